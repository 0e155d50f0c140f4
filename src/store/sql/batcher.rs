//! Calls that wait at the same moment travel together.
//!
//! There is no timer: while a lane is free a call goes out at once, with whatever
//! else is ready to, and what gathers while all lanes are busy is the next batch.

use std::{
    collections::{HashMap, HashSet, VecDeque, hash_map::Entry},
    future::poll_fn,
    mem,
    panic::AssertUnwindSafe,
    sync::{
        Arc, Mutex, PoisonError,
        atomic::{AtomicU64, Ordering},
    },
    task::Poll,
    time::Duration,
};

use futures_util::FutureExt as _;
use tokio::{
    runtime::{self, Handle},
    time::Instant,
};

use super::{
    calls::{self, Call, Reply},
    locked::{Alone, Limits, Single},
};
use crate::{RecordName, StoreError};

/// How the calls of one kind are made, together or alone.
pub(crate) trait Batch: Single {
    /// Makes calls of different names together; an answer for each, in their
    /// order.
    fn together(
        &self,
        calls: Arc<Vec<Self::Call>>,
    ) -> impl Future<Output = Result<Vec<Told<Self::Answer>>, StoreError>> + Send;
}

/// What a call of a batch was told.
pub(crate) enum Told<A> {
    Answer(Result<A, StoreError>),
    /// Its record is held by somebody else, or is not what it has to be: to find
    /// out is not for the others to wait for.
    AskAlone,
}

/// Where calls gather.
pub(crate) struct Batches<B: Batch>(Arc<Shared<B>>);

struct Shared<B: Batch> {
    batch: Arc<B>,
    lanes: Lanes,
    most_waiting: usize,
    /// For each runtime its own: a lane goes on only while its runtime does.
    queues: Mutex<Vec<(runtime::Id, Queue<B>)>>,
    next_lane: AtomicU64,
    alone: Alone<B>,
}

/// How many batches are under way at a time: the fewer, the more calls each of
/// them carries.
#[derive(Clone, Copy)]
pub(crate) struct Lanes {
    pub(crate) usual: usize,
    /// When those that are under way take long.
    pub(crate) most: usize,
}

struct Queue<B: Batch> {
    waiting: VecDeque<Member<B>>,
    /// Outcomes whose callers gave up waiting. Live calls go first.
    late: VecDeque<Member<B>>,
    /// The callers that joined a call in `waiting` or `late`, by its identity.
    joined: HashMap<<B::Call as Call>::Identity, Vec<Reply<B::Answer>>>,
    /// How many batches were taken.
    batches: u32,
    /// The lanes that are busy, and when the batch of each went out.
    busy: Vec<(LaneId, Instant)>,
}

/// Never given twice.
type LaneId = u64;

type Member<B> = calls::Member<<B as Single>::Call, <B as Single>::Answer>;

impl<B: Batch> Clone for Batches<B> {
    fn clone(&self) -> Self {
        Self(Arc::clone(&self.0))
    }
}

impl<B: Batch> Batches<B> {
    /// As many batches at a time as `lanes` says, for each runtime, with up to
    /// `most_waiting` calls behind them; and beside them what `limits` says, with as
    /// many behind it.
    pub(crate) fn new(batch: B, lanes: Lanes, most_waiting: usize, limits: Limits) -> Self {
        let batch = Arc::new(batch);
        Self(Arc::new(Shared {
            alone: Alone::new(Arc::clone(&batch), most_waiting, limits),
            batch,
            lanes,
            most_waiting,
            queues: Mutex::default(),
            next_lane: AtomicU64::new(0),
        }))
    }

    /// Makes one call, with others or by itself, to its end even if the caller is
    /// dropped; one that is [for its caller](Call::is_for_its_caller) unless it
    /// has not gone out yet. A call that has an identity is not made if an equal
    /// one waits: it gets that one's answer.
    pub(crate) async fn call(&self, call: B::Call) -> Result<B::Answer, StoreError> {
        let (member, answer) = Member::<B>::new(call);
        let runtime = Handle::current().id();
        if let Some(id) = self.enqueue(runtime, member)? {
            let lane = Lane {
                shared: Arc::clone(&self.0),
                runtime,
                id,
            };
            // In no span: it may go on long after the request that began it.
            tokio::spawn(lane.run());
        }
        answer.get().await
    }

    /// A lane to open, if one is free.
    fn enqueue(
        &self,
        runtime: runtime::Id,
        member: Member<B>,
    ) -> Result<Option<LaneId>, StoreError> {
        let Shared {
            lanes,
            most_waiting,
            ..
        } = *self.0;
        self.0.queue(runtime, |queue| {
            let busy = queue.busy.len();
            let is_free = busy < lanes.usual || (busy < lanes.most && !queue.is_well_without(None));
            if !is_free && queue.waiting.len() >= most_waiting && member.call.is_for_its_caller() {
                queue.sort_out();
                if queue.waiting.len() >= most_waiting {
                    return Err(StoreError::overloaded());
                }
            }
            queue.push(member);
            Ok(is_free.then(|| {
                let lane = self.0.next_lane.fetch_add(1, Ordering::Relaxed);
                queue.busy.push((lane, Instant::now()));
                lane
            }))
        })
    }
}

impl<B: Batch> Shared<B> {
    /// Nothing that could be torn by a panic is done under the lock.
    fn queue<T>(&self, runtime: runtime::Id, look: impl FnOnce(&mut Queue<B>) -> T) -> T {
        let mut queues = self.queues.lock().unwrap_or_else(PoisonError::into_inner);
        let place = queues.iter().position(|(id, _)| *id == runtime);
        let place = place.unwrap_or_else(|| {
            // Those of runtimes that have ended among them; the others begin anew.
            queues.retain(|(_, queue)| !queue.is_idle());
            let queue = Queue {
                waiting: VecDeque::new(),
                late: VecDeque::new(),
                joined: HashMap::new(),
                batches: 0,
                busy: Vec::new(),
            };
            queues.push((runtime, queue));
            queues.len() - 1
        });
        look(&mut queues[place].1)
    }
}

/// A place for one batch at a time, given back when it is dropped.
struct Lane<B: Batch> {
    shared: Arc<Shared<B>>,
    runtime: runtime::Id,
    id: LaneId,
}

impl<B: Batch> Lane<B> {
    async fn run(self) {
        // Callers that were answered together are ready to call again together.
        pass().await;
        loop {
            let members = self.next();
            if members.is_empty() {
                return;
            }
            // A panic leaves the members without an answer, and others their lane.
            let _ = AssertUnwindSafe(self.make(members)).catch_unwind().await;
        }
    }

    /// What goes next; nothing, and the lane is free.
    fn next(&self) -> Vec<Member<B>> {
        let usual = self.shared.lanes.usual;
        self.shared.queue(self.runtime, |queue| {
            // One that was opened because of a slow batch is not needed for long:
            // the fewer lanes, the more calls each batch carries.
            let is_spare = queue.busy.len() > usual && queue.is_well_without(Some(self.id));
            let members = if is_spare { Vec::new() } else { queue.take() };
            let is_free = members.is_empty();
            queue.busy.retain(|(id, _)| !(is_free && *id == self.id));
            for (id, went) in &mut queue.busy {
                if *id == self.id {
                    *went = Instant::now();
                }
            }
            members
        })
    }

    async fn make(&self, members: Vec<Member<B>>) {
        let (calls, replies): (Vec<_>, Vec<_>) = members
            .into_iter()
            .map(|member| (member.call, member.replies))
            .unzip();
        let calls = Arc::new(calls);
        let told = self.shared.batch.together(Arc::clone(&calls)).await;
        let (told, failure) = match told {
            Ok(told) => (told, None),
            // Which of them it is about is found out one by one.
            Err(error) if error.is_about_one() && calls.len() > 1 => (Vec::new(), None),
            Err(error) => (Vec::new(), Some(error)),
        };
        let mut told = told.into_iter();
        // Nobody else has them once the batch is over.
        let calls = Arc::into_inner(calls).into_iter().flatten();
        for (call, replies) in calls.zip(replies) {
            match (&failure, told.next()) {
                (Some(error), _) => replies.send(Err(error.clone())),
                (None, Some(Told::Answer(answer))) => replies.send(answer),
                (None, Some(Told::AskAlone) | None) => {
                    self.shared.alone.push(Member::<B> { call, replies });
                }
            }
        }
    }
}

impl<B: Batch> Drop for Lane<B> {
    /// The end of the runtime: whoever waits is told by the end of its channel.
    fn drop(&mut self) {
        self.shared.queue(self.runtime, |queue| {
            let busy = queue.busy.len();
            queue.busy.retain(|(id, _)| *id != self.id);
            if queue.busy.len() < busy {
                queue.waiting.clear();
                queue.late.clear();
                queue.joined.clear();
            }
        });
    }
}

impl<B: Batch> Queue<B> {
    fn is_idle(&self) -> bool {
        self.waiting.is_empty() && self.late.is_empty() && self.busy.is_empty()
    }

    /// Whether a lane but this one goes on in good time.
    fn is_well_without(&self, lane: Option<LaneId>) -> bool {
        let mut others = self.busy.iter().filter(|(id, _)| Some(*id) != lane);
        others.any(|(_, went)| went.elapsed() <= SLOW)
    }

    fn push(&mut self, member: Member<B>) {
        let Some(identity) = member.call.identity() else {
            self.waiting.push_back(member);
            return;
        };
        match self.joined.entry(identity) {
            Entry::Occupied(mut joined) => {
                let joined = joined.get_mut();
                joined.retain(|reply| !reply.is_closed());
                joined.push(member.replies.first);
            }
            Entry::Vacant(vacant) => {
                vacant.insert(Vec::new());
                self.waiting.push_back(member);
            }
        }
    }

    /// As many as may travel together, in the order of their names, so that no
    /// two batches wait for each other. Of a name that is called more than once,
    /// the first goes and the others keep their places; what nobody wants any
    /// more is not made.
    ///
    /// Live calls go before late outcomes. Every fourth batch takes late outcomes
    /// first, so that neither starves.
    fn take(&mut self) -> Vec<Member<B>> {
        self.batches = self.batches.wrapping_add(1);
        let mut load = Load::default();
        if self.batches.is_multiple_of(LATE_TURN) {
            self.load_late(&mut load);
        }
        // An outcome that becomes late here goes with this batch: there may be no next.
        self.load_live(&mut load);
        self.load_late(&mut load);
        let mut taken = load.taken;
        taken.sort_unstable_by(|one, other| one.call.name().cmp(other.call.name()));
        taken
    }

    fn load_live(&mut self, load: &mut Load<B>) {
        let mut later = Vec::new();
        while load.has_room()
            && later.len() < MOST_PASSED_OVER
            && let Some(member) = self.waiting.pop_front()
        {
            let Some(member) = self.live(member) else {
                continue;
            };
            if load.admits(&member.call) {
                load.taken.push(self.with_joined(member));
            } else {
                later.push(member);
            }
        }
        put_back(&mut self.waiting, later);
    }

    fn load_late(&mut self, load: &mut Load<B>) {
        let mut later = Vec::new();
        while load.has_room()
            && later.len() < MOST_PASSED_OVER
            && let Some(member) = self.late.pop_front()
        {
            if load.admits(&member.call) {
                load.taken.push(self.with_joined(member));
            } else {
                later.push(member);
            }
        }
        put_back(&mut self.late, later);
    }

    /// The member, if it has a caller. Without one, an outcome becomes late and
    /// another call is dropped.
    fn live(&mut self, mut member: Member<B>) -> Option<Member<B>> {
        if !member.replies.first.is_closed() {
            return Some(member);
        }
        if !member.call.is_for_its_caller() {
            self.late.push_back(member);
            return None;
        }
        member = self.with_joined(member);
        let mut others = mem::take(&mut member.replies.joined).into_iter();
        member.replies.first = others.find(|reply| !reply.is_closed())?;
        if let Some(identity) = member.call.identity() {
            self.joined.insert(identity, others.collect());
        }
        Some(member)
    }

    /// The member as it goes out: none can join it any more.
    fn with_joined(&mut self, mut member: Member<B>) -> Member<B> {
        let identity = member.call.identity();
        if let Some(joined) = identity.and_then(|identity| self.joined.remove(&identity)) {
            member.replies.joined = joined;
        }
        member
    }

    /// Moves late outcomes out of the way, and drops calls without a caller.
    fn sort_out(&mut self) {
        let is_left = |member: &Member<B>| member.replies.first.is_closed();
        if self.waiting.iter().any(is_left) {
            for member in mem::take(&mut self.waiting) {
                if let Some(member) = self.live(member) {
                    self.waiting.push_back(member);
                }
            }
        }
    }
}

fn put_back<T>(queue: &mut VecDeque<T>, passed_over: Vec<T>) {
    for member in passed_over.into_iter().rev() {
        queue.push_front(member);
    }
}

/// A batch that is put together.
struct Load<B: Batch> {
    taken: Vec<Member<B>>,
    names: HashSet<RecordName>,
    bytes: usize,
    is_full: bool,
}

impl<B: Batch> Default for Load<B> {
    fn default() -> Self {
        Self {
            taken: Vec::new(),
            names: HashSet::new(),
            bytes: 0,
            is_full: false,
        }
    }
}

impl<B: Batch> Load<B> {
    fn has_room(&self) -> bool {
        self.taken.len() < MOST_CALLS && !self.is_full
    }

    /// Whether the call goes with those that were taken.
    fn admits(&mut self, call: &B::Call) -> bool {
        if !self.names.insert(call.name().clone()) {
            return false;
        }
        let bytes = self.bytes + call.bytes();
        self.is_full = bytes > MOST_BYTES && !self.taken.is_empty();
        if !self.is_full {
            self.bytes = bytes;
        }
        !self.is_full
    }
}

/// Lets go first what is ready already. Unlike Tokio's own, it waits where another
/// worker can fetch it: the next on this one may be a handler that blocks.
async fn pass() {
    let mut has_passed = false;
    poll_fn(|cx| {
        if mem::replace(&mut has_passed, true) {
            return Poll::Ready(());
        }
        cx.waker().wake_by_ref();
        Poll::Pending
    })
    .await;
}

/// So few that many callers are more than one batch: while one half of them is
/// claiming, the other is writing its outcomes down. So many that a statement is
/// worth its way.
const MOST_CALLS: usize = 128;

/// How far a batch looks past calls of names that it has already.
const MOST_PASSED_OVER: usize = 4096;

/// Late outcomes go before live calls in one of four batches.
const LATE_TURN: u32 = 4;

/// A larger call travels alone.
const MOST_BYTES: usize = 1 << 20;

/// Many times what a batch takes on a server that is well.
const SLOW: Duration = Duration::from_millis(250);

#[cfg(test)]
mod tests {
    use std::sync::atomic::AtomicUsize;

    use tokio::{
        sync::{Notify, Semaphore, watch},
        task::{JoinHandle, yield_now},
    };

    use super::{super::locked::Attempt, *};
    use crate::{Key, Scope};

    /// Answers with the name, once the gate is open.
    #[derive(Clone, Default)]
    struct Echo {
        gate: Arc<Notify>,
        made: Arc<Mutex<Vec<Vec<String>>>>,
        alone: Arc<AtomicUsize>,
        /// The call that, made alone, takes until another is held.
        held_alone: watch::Sender<String>,
    }

    impl Echo {
        fn hold_alone(&self, name: &str) {
            self.held_alone.send_replace(name.to_owned());
        }
    }

    struct Ask(RecordName);

    impl Call for Ask {
        type Identity = RecordName;

        fn name(&self) -> &RecordName {
            &self.0
        }

        fn identity(&self) -> Option<RecordName> {
            (!self.is_for_its_caller()).then(|| self.0.clone())
        }

        fn bytes(&self) -> usize {
            if spelled(self) == "large" {
                MOST_BYTES + 1
            } else {
                1
            }
        }

        fn is_for_its_caller(&self) -> bool {
            !spelled(self).contains("outcome")
        }
    }

    impl Batch for Echo {
        async fn together(&self, calls: Arc<Vec<Ask>>) -> Result<Vec<Told<String>>, StoreError> {
            let names: Vec<String> = calls.iter().map(spelled).collect();
            self.made.lock().unwrap().push(names.clone());
            self.gate.notified().await;
            assert!(!names.contains(&"panics".to_owned()), "as asked");
            if names.contains(&"unreachable".to_owned()) {
                return Err(StoreError::timed_out());
            }
            if names.contains(&"poison".to_owned()) {
                return Err(StoreError::unavailable("a value").about_one());
            }
            let told = names.into_iter().map(|name| match &*name {
                locked if locked.starts_with("locked") => Told::AskAlone,
                _ => Told::Answer(Ok(name)),
            });
            Ok(told.collect())
        }
    }

    impl Single for Echo {
        type Call = Ask;
        type Answer = String;

        async fn attempt(&self, call: Arc<Ask>) -> Result<Attempt<String>, StoreError> {
            self.alone.fetch_add(1, Ordering::Relaxed);
            let mut held = self.held_alone.subscribe();
            let is_free = held.wait_for(|held| *held != spelled(&call)).await;
            assert!(is_free.is_ok());
            match spelled(&call) {
                name if name == "poison" => Err(StoreError::unavailable("a value")),
                name => Ok(Attempt::Made(format!("{name} alone"))),
            }
        }
    }

    fn spelled(call: &Ask) -> String {
        call.0.key().as_str().to_owned()
    }

    fn ask(key: &str) -> Ask {
        Ask(RecordName::new(Scope::single_tenant(), Key::new(key)))
    }

    struct Trial {
        echo: Echo,
        batches: Batches<Echo>,
        permits: Arc<Semaphore>,
    }

    fn limits(permits: usize) -> Limits {
        Limits {
            permits: Arc::new(Semaphore::new(permits)),
            lock_timeout: Duration::from_secs(2),
        }
    }

    type Asked = JoinHandle<Result<String, StoreError>>;

    impl Trial {
        fn new(most_waiting: usize) -> Self {
            let echo = Echo::default();
            let limits = limits(1);
            let permits = Arc::clone(&limits.permits);
            let lanes = Lanes { usual: 1, most: 2 };
            let batches = Batches::new(echo.clone(), lanes, most_waiting, limits);
            Self {
                echo,
                batches,
                permits,
            }
        }

        /// Asks, and goes on once the question is where it has to be.
        async fn ask(&self, key: &str) -> Asked {
            let (batches, call) = (self.batches.clone(), ask(key));
            let asked = tokio::spawn(async move { batches.call(call).await });
            for _ in 0..8 {
                yield_now().await;
            }
            asked
        }

        async fn open(&self) {
            self.echo.gate.notify_one();
            for _ in 0..8 {
                yield_now().await;
            }
        }

        fn made(&self) -> Vec<Vec<String>> {
            self.echo.made.lock().unwrap().clone()
        }
    }

    async fn said(asked: Asked) -> Result<String, StoreError> {
        asked.await.unwrap()
    }

    #[tokio::test]
    async fn a_lone_call_goes_at_once_and_what_comes_meanwhile_goes_together_in_order() {
        let trial = Trial::new(10);
        let first = trial.ask("first").await;
        let [c, a, b] = [
            trial.ask("c").await,
            trial.ask("a").await,
            trial.ask("b").await,
        ];
        assert_eq!(trial.made(), [["first"]]);
        trial.open().await;
        assert_eq!(said(first).await.unwrap(), "first");
        trial.open().await;
        assert_eq!(trial.made()[1..], [["a", "b", "c"]]);
        for (asked, name) in [(a, "a"), (b, "b"), (c, "c")] {
            assert_eq!(said(asked).await.unwrap(), name);
        }
        let last = trial.ask("last").await;
        assert_eq!(trial.made()[2..], [["last"]]);
        trial.open().await;
        assert_eq!(said(last).await.unwrap(), "last");
    }

    #[tokio::test]
    async fn who_is_ready_at_the_same_time_goes_together() {
        let trial = Trial::new(10);
        let batches = &trial.batches;
        let calls = ["b", "c", "a"].map(|key| batches.call(ask(key)));
        let (calls, ()) = tokio::join!(futures_util::future::join_all(calls), trial.open());
        assert!(calls.iter().all(Result::is_ok));
        assert_eq!(trial.made(), [["a", "b", "c"]]);
    }

    #[tokio::test]
    async fn a_second_call_of_a_name_waits_for_the_next_batch() {
        let trial = Trial::new(10);
        let first = trial.ask("first").await;
        let [one, other, third] = [
            trial.ask("same").await,
            trial.ask("same").await,
            trial.ask("third").await,
        ];
        for _ in 0..3 {
            trial.open().await;
        }
        for asked in [first, one, other, third] {
            said(asked).await.unwrap();
        }
        assert_eq!(trial.made()[1..], [vec!["same", "third"], vec!["same"]]);
    }

    #[tokio::test]
    async fn many_calls_of_one_name_hold_up_no_other_and_go_in_their_order() {
        let trial = Trial::new(1_000);
        let first = trial.ask("first").await;
        let mut same = Vec::new();
        for _ in 0..MOST_CALLS + 10 {
            same.push(trial.ask("same").await);
        }
        let other = trial.ask("other").await;
        trial.open().await;
        trial.open().await;
        said(first).await.unwrap();
        said(other).await.unwrap();
        assert_eq!(trial.made()[1], ["other", "same"]);
        let mut same = same.into_iter();
        said(same.next().unwrap()).await.unwrap();
        for asked in same {
            assert!(!asked.is_finished());
            trial.open().await;
            said(asked).await.unwrap();
        }
    }

    #[tokio::test(start_paused = true)]
    async fn a_batch_that_takes_long_holds_nobody_up_and_neither_does_a_full_queue() {
        for most_waiting in [10, 1] {
            let trial = Trial::new(most_waiting);
            let slow = trial.ask("slow").await;
            let waiting = trial.ask("waiting").await;
            tokio::time::advance(SLOW * 2).await;
            let next = trial.ask("next").await;
            assert_eq!(trial.made()[1..], [["next", "waiting"]]);
            for _ in 0..2 {
                trial.open().await;
            }
            for asked in [slow, waiting, next] {
                said(asked).await.unwrap();
            }
        }
    }

    #[tokio::test(flavor = "multi_thread", worker_threads = 2)]
    async fn a_lane_opens_beside_a_handler_that_blocks() {
        // Either worker may be the one that is blocked.
        for _ in 0..20 {
            let trial = Trial::new(10);
            let batches = trial.batches.clone();
            let (release, held) = std::sync::mpsc::channel::<()>();
            let asked = tokio::spawn(async move {
                // Next on this worker, as soon as the lane has let others go first.
                tokio::spawn(async move { held.recv() });
                batches.call(ask("beside")).await
            });
            let opened = async {
                while trial.made().is_empty() {
                    tokio::time::sleep(Duration::from_millis(1)).await;
                }
            };
            let opened = tokio::time::timeout(Duration::from_secs(10), opened).await;
            drop(release);
            trial.open().await;
            assert_eq!(said(asked).await.unwrap(), "beside");
            assert!(opened.is_ok());
        }
    }

    #[tokio::test]
    async fn a_large_call_travels_alone() {
        let trial = Trial::new(10);
        let mut asked = Vec::new();
        for key in ["first", "a", "large", "b"] {
            asked.push(trial.ask(key).await);
        }
        for _ in 0..4 {
            trial.open().await;
        }
        for asked in asked {
            said(asked).await.unwrap();
        }
        assert_eq!(trial.made()[1..], [["a"], ["large"], ["b"]]);
    }

    #[tokio::test]
    async fn a_call_whose_caller_has_gone_before_it_went_out_is_not_made_but_an_outcome_is() {
        let trial = Trial::new(10);
        let first = trial.ask("first").await;
        let gone = trial.ask("gone").await;
        gone.abort();
        let outcome = trial.ask("outcome").await;
        outcome.abort();
        let here = trial.ask("here").await;
        trial.open().await;
        trial.open().await;
        said(first).await.unwrap();
        said(here).await.unwrap();
        assert_eq!(trial.made()[1..], [["here", "outcome"]]);
    }

    #[tokio::test]
    async fn f103_a_retried_outcome_joins_the_one_that_waits() {
        let trial = Trial::new(10);
        let first = trial.ask("first").await;
        for _ in 0..3 {
            trial.ask("outcome").await.abort();
        }
        let retried = [trial.ask("outcome").await, trial.ask("outcome").await];
        trial.open().await;
        trial.open().await;
        said(first).await.unwrap();
        for asked in retried {
            assert_eq!(said(asked).await.unwrap(), "outcome");
        }
        assert_eq!(trial.made()[1..], [["outcome"]]);
        // One that is on its way cannot be joined: it may have been broken off.
        let under_way = trial.ask("outcome").await;
        let waiting = trial.ask("outcome").await;
        trial.open().await;
        trial.open().await;
        said(under_way).await.unwrap();
        said(waiting).await.unwrap();
        assert_eq!(trial.made()[2..], [["outcome"], ["outcome"]]);
    }

    #[tokio::test]
    async fn f103_live_calls_go_before_late_outcomes_and_neither_starves() {
        let trial = Trial::new(10_000);
        let first = trial.ask("first").await;
        let late = 2 * MOST_CALLS;
        for number in 0..late {
            trial.ask(&format!("late outcome {number}")).await.abort();
        }
        let mut live = Vec::new();
        for number in 0..6 * MOST_CALLS {
            live.push(trial.ask(&format!("live {number}")).await);
        }
        trial.open().await;
        said(first).await.unwrap();
        for _ in 0..8 {
            trial.open().await;
        }
        for asked in live {
            said(asked).await.unwrap();
        }
        let is_late = |batch: &Vec<String>| batch.iter().all(|name| name.contains("late"));
        let late: Vec<_> = trial.made().iter().map(is_late).collect();
        assert_eq!(
            late,
            [false, false, false, true, false, false, false, true, false]
        );
    }

    #[tokio::test]
    async fn a_batch_of_live_calls_is_filled_with_late_outcomes() {
        let trial = Trial::new(10);
        let first = trial.ask("first").await;
        trial.ask("late outcome").await.abort();
        let live = trial.ask("live").await;
        trial.open().await;
        trial.open().await;
        said(first).await.unwrap();
        said(live).await.unwrap();
        assert_eq!(trial.made()[1..], [["late outcome", "live"]]);
    }

    #[tokio::test]
    async fn f103_no_batch_leaves_an_outcome_behind_that_just_became_late() {
        let trial = Trial::new(10);
        for round in 0..LATE_TURN {
            let first = trial.ask("first").await;
            let key = format!("outcome {round}");
            trial.ask(&key).await.abort();
            let retried = trial.ask(&key).await;
            trial.open().await;
            trial.open().await;
            said(first).await.unwrap();
            assert!(retried.is_finished(), "left behind in round {round}");
            assert_eq!(said(retried).await.unwrap(), key);
        }
    }

    #[tokio::test]
    async fn f103_late_outcomes_take_no_place_of_waiting_calls() {
        let trial = Trial::new(2);
        let first = trial.ask("first").await;
        for number in 0..5 {
            trial.ask(&format!("late outcome {number}")).await.abort();
        }
        let live = [trial.ask("one").await, trial.ask("other").await];
        let refused = said(trial.ask("refused").await).await.unwrap_err();
        assert_eq!(refused.kind(), crate::StoreErrorKind::Overloaded);
        trial.open().await;
        trial.open().await;
        said(first).await.unwrap();
        for asked in live {
            said(asked).await.unwrap();
        }
    }

    #[tokio::test]
    async fn a_full_queue_refuses_the_next_call_and_has_room_for_one_whose_caller_has_gone() {
        let trial = Trial::new(1);
        let first = trial.ask("first").await;
        let waiting = trial.ask("waiting").await;
        let refused = said(trial.ask("refused").await).await.unwrap_err();
        assert_eq!(refused.kind(), crate::StoreErrorKind::Overloaded);
        waiting.abort();
        let next = trial.ask("next").await;
        trial.open().await;
        trial.open().await;
        said(first).await.unwrap();
        assert_eq!(said(next).await.unwrap(), "next");
    }

    #[tokio::test]
    async fn one_that_cannot_be_taken_fails_alone() {
        let trial = Trial::new(10);
        let first = trial.ask("first").await;
        let [good, poison] = [trial.ask("good").await, trial.ask("poison").await];
        trial.open().await;
        trial.open().await;
        said(first).await.unwrap();
        assert_eq!(said(good).await.unwrap(), "good alone");
        said(poison).await.unwrap_err();
        // By itself it is not tried twice.
        let poison = trial.ask("poison").await;
        trial.open().await;
        said(poison).await.unwrap_err();
        assert_eq!(trial.echo.alone.load(Ordering::Relaxed), 2);
    }

    #[tokio::test]
    async fn a_locked_record_is_waited_for_alone() {
        let trial = Trial::new(10);
        let first = trial.ask("first").await;
        let [free, locked] = [trial.ask("free").await, trial.ask("locked").await];
        trial.open().await;
        trial.open().await;
        said(first).await.unwrap();
        assert_eq!(said(free).await.unwrap(), "free");
        assert_eq!(said(locked).await.unwrap(), "locked alone");
    }

    #[tokio::test]
    async fn too_many_locked_records_refuse_the_next_one_but_no_outcome() {
        let trial = Trial::new(2);
        // Nobody gets a place to ask alone.
        let permits = Arc::clone(&trial.permits);
        let held = permits.acquire_owned().await.unwrap();
        let mut locked = Vec::new();
        for _ in 0..3 {
            locked.push(trial.ask("locked").await);
            trial.open().await;
        }
        let refused = said(locked.pop().unwrap()).await.unwrap_err();
        assert_eq!(refused.kind(), crate::StoreErrorKind::Overloaded);
        let outcome = trial.ask("locked outcome").await;
        trial.open().await;
        drop(held);
        assert_eq!(said(outcome).await.unwrap(), "locked outcome alone");
        for asked in locked {
            assert_eq!(said(asked).await.unwrap(), "locked alone");
        }
    }

    #[tokio::test]
    async fn f103_a_retried_outcome_joins_the_one_that_waits_to_be_made_alone() {
        let trial = Trial::new(10);
        let permits = Arc::clone(&trial.permits);
        let held = permits.acquire_owned().await.unwrap();
        let mut retried = Vec::new();
        for _ in 0..4 {
            retried.push(trial.ask("locked outcome").await);
            trial.open().await;
        }
        assert_eq!(trial.batches.0.alone.waiting(), 2);
        drop(held);
        for asked in retried {
            assert_eq!(said(asked).await.unwrap(), "locked outcome alone");
        }
        assert_eq!(trial.echo.alone.load(Ordering::Relaxed), 2);
        assert!(trial.batches.0.alone.is_idle());
    }

    #[tokio::test]
    async fn f106_calls_of_one_locked_name_take_one_place() {
        let trial = Trial::new(10);
        trial.permits.add_permits(1);
        trial.echo.hold_alone("locked one");
        let mut locked = Vec::new();
        for _ in 0..3 {
            locked.push(trial.ask("locked one").await);
            trial.open().await;
        }
        let other = trial.ask("locked other").await;
        trial.open().await;
        assert_eq!(said(other).await.unwrap(), "locked other alone");
        assert!(locked.iter().all(|asked| !asked.is_finished()));
        trial.echo.hold_alone("nothing");
        for asked in locked {
            assert_eq!(said(asked).await.unwrap(), "locked one alone");
        }
    }

    #[test]
    fn the_end_of_a_runtime_leaves_no_name_behind() {
        let echo = Echo::default();
        let lanes = Lanes { usual: 1, most: 1 };
        let batches = Batches::new(echo.clone(), lanes, 10, limits(1));
        for _ in 0..2 {
            echo.hold_alone("locked");
            let runtime = tokio::runtime::Builder::new_current_thread()
                .enable_time()
                .build()
                .unwrap();
            let wait = Duration::from_millis(50);
            runtime.block_on(async {
                for _ in 0..3 {
                    echo.gate.notify_one();
                    let asked = tokio::time::timeout(wait, batches.call(ask("locked")));
                    asked.await.unwrap_err();
                }
            });
            drop(runtime);
            assert!(batches.0.alone.is_idle());
        }
    }

    #[test]
    fn the_queue_of_a_runtime_that_has_ended_is_forgotten() {
        let echo = Echo::default();
        let lanes = Lanes { usual: 1, most: 1 };
        let batches = Batches::new(echo.clone(), lanes, 10, limits(1));
        for _ in 0..3 {
            let runtime = tokio::runtime::Builder::new_current_thread()
                .build()
                .unwrap();
            echo.gate.notify_one();
            runtime.block_on(batches.call(ask("key"))).unwrap();
        }
        assert_eq!(batches.0.queues.lock().unwrap().len(), 1);
    }

    #[tokio::test]
    async fn everybody_hears_that_the_store_is_gone() {
        let trial = Trial::new(10);
        let first = trial.ask("first").await;
        let [one, other] = [trial.ask("one").await, trial.ask("unreachable").await];
        trial.open().await;
        trial.open().await;
        said(first).await.unwrap();
        for asked in [one, other] {
            let error = said(asked).await.unwrap_err();
            assert_eq!(error.kind(), crate::StoreErrorKind::TimedOut);
        }
        assert_eq!(trial.echo.alone.load(Ordering::Relaxed), 0);
    }

    #[tokio::test]
    async fn a_panic_leaves_nobody_without_an_answer_and_the_others_their_lane() {
        let trial = Trial::new(10);
        let panics = trial.ask("panics").await;
        let waiting = trial.ask("waiting").await;
        trial.open().await;
        let error = said(panics).await.unwrap_err();
        assert_eq!(error.kind(), crate::StoreErrorKind::Unavailable);
        trial.open().await;
        assert_eq!(said(waiting).await.unwrap(), "waiting");
    }
}
