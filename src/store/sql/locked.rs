//! Calls that are made alone, because another transaction may hold their record.
//!
//! An attempt never waits for a lock. If the record is locked, the call is tried
//! again after a pause, and holds neither a connection nor a permit meanwhile. So
//! locked records do not delay the calls of others. Calls of one name are made one
//! after the other.

use std::{
    collections::{HashMap, VecDeque},
    panic::AssertUnwindSafe,
    sync::{Arc, Mutex, MutexGuard, PoisonError},
    time::Duration,
};

use futures_util::FutureExt as _;
use tokio::{
    sync::Semaphore,
    time::{Instant, sleep},
};

use super::calls::{Call, Member, Replies};
use crate::{RecordName, StoreError, jitter::jittered};

/// How a call is made alone.
pub(crate) trait Single: Send + Sync + 'static {
    type Call: Call;
    type Answer: Clone + Send + 'static;

    /// Makes one call, unless its record is locked.
    fn attempt(
        &self,
        call: Arc<Self::Call>,
    ) -> impl Future<Output = Result<Attempt<Self::Answer>, StoreError>> + Send;
}

/// The result of one attempt.
#[derive(Debug)]
pub(crate) enum Attempt<A> {
    Made(A),
    /// Another transaction holds the record. Nothing was changed.
    #[cfg_attr(
        not(any(feature = "postgres", test)),
        expect(dead_code, reason = "SQLite waits for its one lock itself")
    )]
    Locked,
}

impl<A> Attempt<A> {
    #[cfg(feature = "postgres")]
    pub(crate) fn map<T>(self, made: impl FnOnce(A) -> T) -> Attempt<T> {
        match self {
            Self::Made(answer) => Attempt::Made(made(answer)),
            Self::Locked => Attempt::Locked,
        }
    }
}

/// Limits on the calls that are made alone.
#[derive(Clone)]
pub(crate) struct Limits {
    /// How many attempts are made at a time.
    pub(crate) permits: Arc<Semaphore>,
    /// How long a call is tried again while its record is locked.
    pub(crate) lock_timeout: Duration,
}

/// Calls that are made alone.
pub(crate) struct Alone<S: Single>(Arc<Shared<S>>);

struct Shared<S: Single> {
    single: Arc<S>,
    most_waiting: usize,
    limits: Limits,
    queue: Mutex<Queue<S>>,
}

struct Queue<S: Single> {
    /// Each name with a call that is being made, and the calls behind it.
    names: HashMap<RecordName, VecDeque<Waiting<S>>>,
    /// How many calls have no answer yet.
    waiting: usize,
}

struct Waiting<S: Single> {
    call: Arc<S::Call>,
    replies: Replies<S::Answer>,
    since: Instant,
}

impl<S: Single> Clone for Alone<S> {
    fn clone(&self) -> Self {
        Self(Arc::clone(&self.0))
    }
}

impl<S: Single> Alone<S> {
    /// Up to `most_waiting` calls may wait.
    pub(crate) fn new(single: Arc<S>, most_waiting: usize, limits: Limits) -> Self {
        Self(Arc::new(Shared {
            single,
            most_waiting,
            limits,
            queue: Mutex::new(Queue {
                names: HashMap::new(),
                waiting: 0,
            }),
        }))
    }

    /// Makes one call, even if its caller leaves while it is being made.
    #[cfg(any(feature = "postgres", test))]
    pub(crate) async fn call(&self, call: S::Call) -> Result<S::Answer, StoreError> {
        let (member, answer) = Member::new(call);
        self.push(member);
        answer.get().await
    }

    /// Makes a call after those of its name.
    pub(crate) fn push(&self, Member { call, replies }: Member<S::Call, S::Answer>) {
        let mut queue = self.0.queue();
        let Queue { names, waiting } = &mut *queue;
        let mut behind = names.get_mut(call.name());
        let equal = call.identity().and_then(|identity| {
            let mut behind = behind.iter_mut().flat_map(|behind| behind.iter_mut());
            behind.find(|waiting| waiting.call.identity().as_ref() == Some(&identity))
        });
        if let Some(equal) = equal {
            equal.replies.extend(replies);
            return;
        }
        if *waiting >= self.0.most_waiting && call.is_for_its_caller() {
            replies.send(Err(StoreError::overloaded()));
            return;
        }
        *waiting += 1;
        let name = call.name().clone();
        let call = Waiting {
            call: Arc::new(call),
            replies,
            since: Instant::now(),
        };
        if let Some(behind) = behind {
            behind.push_back(call);
            return;
        }
        names.insert(name.clone(), VecDeque::new());
        let turn = Turn {
            shared: Arc::clone(&self.0),
            name,
            has_ended: false,
        };
        // In no span: it may go on long after the request that began it.
        tokio::spawn(turn.run(call));
    }

    #[cfg(test)]
    pub(crate) fn is_idle(&self) -> bool {
        let queue = self.0.queue();
        queue.names.is_empty() && queue.waiting == 0
    }

    #[cfg(test)]
    pub(crate) fn waiting(&self) -> usize {
        self.0.queue().waiting
    }
}

impl<S: Single> Shared<S> {
    /// Nothing that could be torn by a panic is done under the lock.
    fn queue(&self) -> MutexGuard<'_, Queue<S>> {
        self.queue.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Tries until the record is not locked. `None` if all callers left.
    async fn make(&self, call: &Waiting<S>) -> Option<Result<S::Answer, StoreError>> {
        let mut pause = FIRST_PAUSE;
        loop {
            // Never closed.
            let permit = self.limits.permits.acquire().await;
            if !call.is_wanted() {
                return None;
            }
            let attempt = self.single.attempt(Arc::clone(&call.call)).await;
            drop(permit);
            match attempt {
                Ok(Attempt::Made(answer)) => return Some(Ok(answer)),
                Ok(Attempt::Locked) => {
                    let left = self.limits.lock_timeout.checked_sub(call.since.elapsed());
                    let left = left.unwrap_or_default();
                    if left.is_zero() {
                        return Some(Err(StoreError::timed_out().because(RECORD_LOCKED)));
                    }
                    sleep(jittered(pause).min(left)).await;
                    pause = (pause * 2).min(LONGEST_PAUSE);
                }
                Err(error) => return Some(Err(error)),
            }
        }
    }
}

impl<S: Single> Waiting<S> {
    fn is_wanted(&self) -> bool {
        !(self.call.is_for_its_caller() && self.replies.are_closed())
    }
}

/// Makes the calls of one name, one after the other.
struct Turn<S: Single> {
    shared: Arc<Shared<S>>,
    name: RecordName,
    has_ended: bool,
}

impl<S: Single> Turn<S> {
    async fn run(mut self, mut call: Waiting<S>) {
        loop {
            // A panic leaves the callers without an answer, and others their turn.
            let answer = AssertUnwindSafe(self.shared.make(&call))
                .catch_unwind()
                .await;
            if let Ok(Some(answer)) = answer {
                call.replies.send(answer);
            }
            match self.next() {
                Some(next) => call = next,
                None => return,
            }
        }
    }

    fn next(&mut self) -> Option<Waiting<S>> {
        let mut queue = self.shared.queue();
        queue.waiting -= 1;
        let next = queue.names.get_mut(&self.name)?.pop_front();
        if next.is_none() {
            queue.names.remove(&self.name);
        }
        self.has_ended = next.is_none();
        next
    }
}

impl<S: Single> Drop for Turn<S> {
    /// The end of the runtime: each caller hears of it by the end of its channel.
    fn drop(&mut self) {
        if self.has_ended {
            return;
        }
        let mut queue = self.shared.queue();
        let behind = queue.names.remove(&self.name).unwrap_or_default();
        queue.waiting -= behind.len() + 1;
    }
}

/// The cause where a record stays locked for too long.
pub(crate) const RECORD_LOCKED: &str =
    "`lock_timeout` has passed: another transaction holds the record";

/// Most locks are held by single statements.
const FIRST_PAUSE: Duration = Duration::from_millis(5);

/// How late a call may notice that its record is free.
const LONGEST_PAUSE: Duration = Duration::from_millis(200);

#[cfg(test)]
mod tests {
    use std::{convert::Infallible, sync::atomic::AtomicUsize, sync::atomic::Ordering};

    use tokio::{task::yield_now, time::timeout};

    use super::*;
    use crate::{Key, Scope, StoreErrorKind};

    /// Knows which names are locked.
    #[derive(Default)]
    struct Locks {
        names: Mutex<Vec<&'static str>>,
        attempts: AtomicUsize,
    }

    struct Ask(RecordName);

    impl Call for Ask {
        type Identity = Infallible;

        fn name(&self) -> &RecordName {
            &self.0
        }

        fn identity(&self) -> Option<Infallible> {
            None
        }

        fn bytes(&self) -> usize {
            0
        }

        fn is_for_its_caller(&self) -> bool {
            true
        }
    }

    impl Single for Locks {
        type Call = Ask;
        type Answer = ();

        async fn attempt(&self, call: Arc<Ask>) -> Result<Attempt<()>, StoreError> {
            self.attempts.fetch_add(1, Ordering::Relaxed);
            let names = self.names.lock().unwrap();
            Ok(match names.contains(&call.0.key().as_str()) {
                true => Attempt::Locked,
                false => Attempt::Made(()),
            })
        }
    }

    fn ask(key: &str) -> Ask {
        Ask(RecordName::new(Scope::single_tenant(), Key::new(key)))
    }

    fn alone(permits: usize) -> (Arc<Locks>, Alone<Locks>) {
        let locks = Arc::<Locks>::default();
        let limits = Limits {
            permits: Arc::new(Semaphore::new(permits)),
            lock_timeout: Duration::from_secs(2),
        };
        let alone = Alone::new(Arc::clone(&locks), 100, limits);
        (locks, alone)
    }

    fn spawn(
        alone: &Alone<Locks>,
        key: &'static str,
    ) -> tokio::task::JoinHandle<Result<(), StoreError>> {
        let alone = alone.clone();
        tokio::spawn(async move { alone.call(ask(key)).await })
    }

    #[tokio::test(start_paused = true)]
    async fn f106_locked_records_hold_no_permit() {
        let (locks, alone) = alone(1);
        *locks.names.lock().unwrap() = vec!["a", "b", "c"];
        let locked = ["a", "b", "c", "a", "a"].map(|key| spawn(&alone, key));
        yield_now().await;
        let free = timeout(Duration::from_millis(1), alone.call(ask("free")));
        free.await.unwrap().unwrap();
        assert!(locked.iter().all(|call| !call.is_finished()));
        locks.names.lock().unwrap().clear();
        for call in locked {
            call.await.unwrap().unwrap();
        }
        assert!(alone.is_idle());
    }

    #[tokio::test(start_paused = true)]
    async fn a_locked_record_times_out_for_all_that_wait_for_it() {
        let (locks, alone) = alone(1);
        *locks.names.lock().unwrap() = vec!["a"];
        let begun = Instant::now();
        let calls: Vec<_> = (0..10).map(|_| spawn(&alone, "a")).collect();
        for call in calls {
            let error = call.await.unwrap().unwrap_err();
            assert_eq!(error.kind(), StoreErrorKind::TimedOut);
        }
        assert!(begun.elapsed() < Duration::from_secs(3));
        // With pauses between the attempts of the first, and one for each other.
        assert!(locks.attempts.load(Ordering::Relaxed) < 50);
        assert!(alone.is_idle());
    }

    #[tokio::test(start_paused = true)]
    async fn a_call_without_a_caller_is_not_tried_again() {
        let (locks, alone) = alone(1);
        *locks.names.lock().unwrap() = vec!["a"];
        let call = spawn(&alone, "a");
        sleep(Duration::from_millis(100)).await;
        call.abort();
        sleep(Duration::from_secs(1)).await;
        assert!(alone.is_idle());
    }
}
