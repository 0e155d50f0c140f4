use std::sync::{Mutex, atomic::AtomicUsize};

use tokio::{
    sync::{Notify, Semaphore, watch},
    task::{JoinHandle, yield_now},
};

use super::{super::single::Attempt, *};
use crate::key::{Key, Scope};

/// Answers with the name, once the gate is open.
#[derive(Clone, Default)]
struct Echo {
    gate: Arc<Notify>,
    batches: Arc<Mutex<Vec<Vec<String>>>>,
    singles: Arc<AtomicUsize>,
    /// The call that, made singly, takes until another one is held.
    held: watch::Sender<String>,
    pause: Duration,
}

impl Echo {
    fn hold(&self, key: &str) {
        self.held.send_replace(key.to_owned());
    }
}

struct Ask(RecordName);

impl Call for Ask {
    fn name(&self) -> &RecordName {
        &self.0
    }

    fn identity(&self) -> Option<Identity> {
        (!self.is_droppable()).then(|| Identity::Response {
            name: self.0.clone(),
            bytes: 0,
        })
    }

    fn bytes(&self) -> usize {
        if key(self) == "large" {
            MAX_BYTES + 1
        } else {
            1
        }
    }

    fn is_droppable(&self) -> bool {
        !key(self).contains("outcome")
    }
}

impl Batch for Echo {
    async fn execute(&self, calls: &[Ask]) -> Result<Answers<String>, StoreError> {
        let keys: Vec<String> = calls.iter().map(key).collect();
        self.batches.lock().unwrap().push(keys.clone());
        self.gate.notified().await;
        assert!(!keys.contains(&"panics".to_owned()), "as asked");
        if keys.contains(&"unreachable".to_owned()) {
            return Err(StoreError::timed_out());
        }
        if keys.contains(&"invalid".to_owned()) {
            return Err(StoreError::unavailable("a value").about_one());
        }
        let answers = keys
            .into_iter()
            .map(|key| (!key.starts_with("locked")).then_some(Ok(key)));
        Ok(answers.collect())
    }

    fn pause_after(&self, _elapsed: Duration) -> Duration {
        self.pause
    }
}

impl Single for Echo {
    type Call = Ask;
    type Answer = String;

    async fn attempt(&self, call: &Ask) -> Result<Attempt<String>, StoreError> {
        self.singles.fetch_add(1, Ordering::Relaxed);
        let mut held = self.held.subscribe();
        let is_free = held.wait_for(|held| *held != key(call)).await;
        assert!(is_free.is_ok());
        match key(call) {
            key if key == "invalid" => Err(StoreError::unavailable("a value")),
            key => Ok(Attempt::Made(format!("{key} singly"))),
        }
    }
}

fn key(call: &Ask) -> String {
    call.0.key().as_str().to_owned()
}

fn ask(key: &str) -> Ask {
    Ask(RecordName::new(Scope::single_tenant(), Key::new(key)))
}

fn limits(permits: usize, max_waiting: usize) -> Limits {
    Limits {
        permits: Arc::new(Semaphore::new(permits)),
        max_waiting,
        lock_timeout: Duration::from_secs(2),
    }
}

fn concurrent(alone: usize, max: usize) -> ConcurrentBatches {
    ConcurrentBatches {
        alone: Arc::new(Semaphore::new(alone)),
        usual: 1,
        max,
        max_calls: MAX_CALLS,
    }
}

struct Trial {
    echo: Echo,
    batcher: Batcher<Echo>,
    permits: Arc<Semaphore>,
}

type Pending = JoinHandle<Result<String, StoreError>>;

impl Trial {
    fn new(max_waiting: usize) -> Self {
        Self::with(Echo::default(), max_waiting)
    }

    fn with(echo: Echo, max_waiting: usize) -> Self {
        Self::with_alone(0, echo, max_waiting)
    }

    /// Makes up to `alone` calls alone at the same time.
    fn with_alone(alone: usize, echo: Echo, max_waiting: usize) -> Self {
        let limits = limits(1, max_waiting);
        let permits = Arc::clone(&limits.permits);
        let batcher = Batcher::new(echo.clone(), concurrent(alone, 2), limits);
        Self {
            echo,
            batcher,
            permits,
        }
    }

    /// Makes a call, and returns once it waits or was sent.
    async fn ask(&self, key: &str) -> Pending {
        let (batcher, call) = (self.batcher.clone(), ask(key));
        let call = tokio::spawn(async move { batcher.call(call).await });
        for _ in 0..8 {
            yield_now().await;
        }
        call
    }

    async fn open(&self) {
        self.echo.gate.notify_one();
        for _ in 0..8 {
            yield_now().await;
        }
    }

    fn batches(&self) -> Vec<Vec<String>> {
        self.echo.batches.lock().unwrap().clone()
    }
}

async fn answer(call: Pending) -> Result<String, StoreError> {
    call.await.unwrap()
}

#[tokio::test]
async fn calls_that_arrive_meanwhile_form_the_next_batch() {
    let trial = Trial::new(10);
    let first = trial.ask("first").await;
    let [c, a, b] = [
        trial.ask("c").await,
        trial.ask("a").await,
        trial.ask("b").await,
    ];
    assert_eq!(trial.batches(), [["first"]]);
    trial.open().await;
    assert_eq!(answer(first).await.unwrap(), "first");
    trial.open().await;
    assert_eq!(trial.batches()[1..], [["a", "b", "c"]]);
    for (call, name) in [(a, "a"), (b, "b"), (c, "c")] {
        assert_eq!(answer(call).await.unwrap(), name);
    }
    let last = trial.ask("last").await;
    assert_eq!(trial.batches()[2..], [["last"]]);
    trial.open().await;
    assert_eq!(answer(last).await.unwrap(), "last");
}

#[tokio::test]
async fn calls_ready_together_share_the_first_batch() {
    let trial = Trial::new(10);
    let batcher = &trial.batcher;
    let calls = ["b", "c", "a"].map(|key| batcher.call(ask(key)));
    let (calls, ()) = tokio::join!(futures_util::future::join_all(calls), trial.open());
    assert!(calls.iter().all(Result::is_ok));
    assert_eq!(trial.batches(), [["a", "b", "c"]]);
}

#[tokio::test]
async fn few_calls_are_each_sent_alone() {
    let trial = Trial::with_alone(2, Echo::default(), 10);
    let few = [trial.ask("b").await, trial.ask("a").await];
    assert_eq!(trial.batches(), [["b"], ["a"]]);
    let third = trial.ask("c").await;
    let more = [trial.ask("e").await, trial.ask("d").await];
    assert_eq!(trial.batches()[2..], [["c"]]);
    trial.open().await;
    trial.open().await;
    for (call, name) in few.into_iter().zip(["b", "a"]) {
        assert_eq!(answer(call).await.unwrap(), name);
    }
    // The batch is under way, so that the others wait for it.
    assert_eq!(trial.batches().len(), 3);
    for _ in 0..3 {
        trial.open().await;
    }
    answer(third).await.unwrap();
    for call in more {
        answer(call).await.unwrap();
    }
    assert_eq!(trial.batches()[3..], [["d"], ["e"]]);
}

#[tokio::test]
async fn calls_wait_where_a_batch_has_one() {
    let echo = Echo::default();
    let concurrent = ConcurrentBatches {
        usual: 2,
        max_calls: 1,
        ..concurrent(0, 2)
    };
    let limits = limits(1, 10);
    let permits = Arc::clone(&limits.permits);
    let trial = Trial {
        batcher: Batcher::new(echo.clone(), concurrent, limits),
        echo,
        permits,
    };
    let calls = ["c", "b", "a"].map(|key| trial.ask(key));
    let calls = futures_util::future::join_all(calls).await;
    assert_eq!(trial.batches(), [["c"], ["b"]]);
    for _ in 0..3 {
        trial.open().await;
    }
    for call in calls {
        answer(call).await.unwrap();
    }
    assert_eq!(trial.batches()[2..], [["a"]]);
}

#[tokio::test]
async fn calls_beyond_the_lone_ones_share_a_batch() {
    let trial = Trial::with_alone(2, Echo::default(), 10);
    let batcher = &trial.batcher;
    let calls = ["b", "c", "a"].map(|key| batcher.call(ask(key)));
    let (calls, ()) = tokio::join!(futures_util::future::join_all(calls), trial.open());
    assert!(calls.iter().all(Result::is_ok));
    assert_eq!(trial.batches(), [["a", "b", "c"]]);
}

#[tokio::test]
async fn lone_call_that_panics_frees_its_place() {
    let trial = Trial::with_alone(1, Echo::default(), 10);
    for _ in 0..2 {
        let panics = trial.ask("panics").await;
        let beside = trial.ask("beside").await;
        assert_eq!(trial.batches().len() % 2, 0);
        trial.open().await;
        let error = answer(panics).await.unwrap_err();
        assert_eq!(error.kind(), crate::store::StoreErrorKind::Unavailable);
        trial.open().await;
        assert_eq!(answer(beside).await.unwrap(), "beside");
    }
}

#[tokio::test]
async fn many_calls_with_one_name_delay_no_other() {
    let trial = Trial::new(1_000);
    let first = trial.ask("first").await;
    let mut same = Vec::new();
    for _ in 0..MAX_CALLS + 10 {
        same.push(trial.ask("same").await);
    }
    let other = trial.ask("other").await;
    trial.open().await;
    trial.open().await;
    answer(first).await.unwrap();
    answer(other).await.unwrap();
    assert_eq!(trial.batches()[1], ["other", "same"]);
    let mut same = same.into_iter();
    answer(same.next().unwrap()).await.unwrap();
    for call in same {
        assert!(!call.is_finished());
        trial.open().await;
        answer(call).await.unwrap();
    }
}

#[tokio::test(start_paused = true)]
async fn slow_batch_delays_no_other_call() {
    for max_waiting in [10, 1] {
        let trial = Trial::new(max_waiting);
        let slow = trial.ask("slow").await;
        let waiting = trial.ask("waiting").await;
        tokio::time::advance(SLOW * 2).await;
        let next = trial.ask("next").await;
        assert_eq!(trial.batches()[1..], [["next", "waiting"]]);
        for _ in 0..2 {
            trial.open().await;
        }
        for call in [slow, waiting, next] {
            answer(call).await.unwrap();
        }
    }
}

#[tokio::test(start_paused = true)]
async fn next_batch_waits_for_the_pause() {
    let pause = Duration::from_millis(20);
    let echo = Echo {
        pause,
        ..Echo::default()
    };
    let trial = Trial::with(echo, 10);
    let first = trial.ask("first").await;
    let next = trial.ask("next").await;
    trial.open().await;
    assert_eq!(answer(first).await.unwrap(), "first");
    assert_eq!(trial.batches().len(), 1);
    tokio::time::sleep(pause).await;
    trial.open().await;
    assert_eq!(answer(next).await.unwrap(), "next");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn slot_starts_beside_a_handler_that_blocks() {
    // Either worker may be the one that is blocked.
    for _ in 0..20 {
        let trial = Trial::new(10);
        let batcher = trial.batcher.clone();
        let (release, held) = std::sync::mpsc::channel::<()>();
        let call = tokio::spawn(async move {
            // The next task of this worker, once the slot lets others run.
            tokio::spawn(async move { held.recv() });
            batcher.call(ask("beside")).await
        });
        let opened = async {
            while trial.batches().is_empty() {
                tokio::time::sleep(Duration::from_millis(1)).await;
            }
        };
        let opened = tokio::time::timeout(Duration::from_secs(10), opened).await;
        drop(release);
        trial.open().await;
        assert_eq!(answer(call).await.unwrap(), "beside");
        assert!(opened.is_ok());
    }
}

#[tokio::test]
async fn large_call_gets_a_batch_of_its_own() {
    let trial = Trial::new(10);
    let mut call = Vec::new();
    for key in ["first", "a", "large", "b"] {
        call.push(trial.ask(key).await);
    }
    for _ in 0..4 {
        trial.open().await;
    }
    for call in call {
        answer(call).await.unwrap();
    }
    assert_eq!(trial.batches()[1..], [["a"], ["large"], ["b"]]);
}

#[tokio::test]
async fn call_without_a_caller_is_dropped_unless_an_outcome() {
    let trial = Trial::new(10);
    let first = trial.ask("first").await;
    let gone = trial.ask("gone").await;
    gone.abort();
    let outcome = trial.ask("outcome").await;
    outcome.abort();
    let here = trial.ask("here").await;
    trial.open().await;
    trial.open().await;
    answer(first).await.unwrap();
    answer(here).await.unwrap();
    assert_eq!(trial.batches()[1..], [["here", "outcome"]]);
}

#[tokio::test]
async fn f103_retried_outcome_joins_the_waiting_one() {
    let trial = Trial::new(10);
    let first = trial.ask("first").await;
    for _ in 0..3 {
        trial.ask("outcome").await.abort();
    }
    let retried = [trial.ask("outcome").await, trial.ask("outcome").await];
    trial.open().await;
    trial.open().await;
    answer(first).await.unwrap();
    for call in retried {
        assert_eq!(answer(call).await.unwrap(), "outcome");
    }
    assert_eq!(trial.batches()[1..], [["outcome"]]);
    // One that was sent cannot be joined: it may be broken off.
    let under_way = trial.ask("outcome").await;
    let waiting = trial.ask("outcome").await;
    trial.open().await;
    trial.open().await;
    answer(under_way).await.unwrap();
    answer(waiting).await.unwrap();
    assert_eq!(trial.batches()[2..], [["outcome"], ["outcome"]]);
}

#[tokio::test]
async fn f103_late_outcomes_yield_to_others_without_starving() {
    let trial = Trial::new(10_000);
    let first = trial.ask("first").await;
    let late = 2 * MAX_CALLS;
    for number in 0..late {
        trial.ask(&format!("late outcome {number}")).await.abort();
    }
    let mut live = Vec::new();
    for number in 0..6 * MAX_CALLS {
        live.push(trial.ask(&format!("live {number}")).await);
    }
    trial.open().await;
    answer(first).await.unwrap();
    for _ in 0..8 {
        trial.open().await;
    }
    for call in live {
        answer(call).await.unwrap();
    }
    let is_late = |batch: &Vec<String>| batch.iter().all(|name| name.contains("late"));
    let late: Vec<_> = trial.batches().iter().map(is_late).collect();
    assert_eq!(
        late,
        [false, false, false, true, false, false, false, true, false]
    );
}

#[tokio::test]
async fn f103_outcome_that_becomes_late_goes_with_the_batch() {
    let trial = Trial::new(10);
    for round in 0..LATE_FIRST {
        let first = trial.ask("first").await;
        let key = format!("outcome {round}");
        trial.ask(&key).await.abort();
        let retried = trial.ask(&key).await;
        trial.open().await;
        trial.open().await;
        answer(first).await.unwrap();
        assert!(retried.is_finished(), "left behind in round {round}");
        assert_eq!(answer(retried).await.unwrap(), key);
    }
}

#[tokio::test]
async fn f103_late_outcomes_count_against_no_limit() {
    let trial = Trial::new(2);
    let first = trial.ask("first").await;
    for number in 0..5 {
        trial.ask(&format!("late outcome {number}")).await.abort();
    }
    let live = [trial.ask("one").await, trial.ask("other").await];
    let refused = answer(trial.ask("refused").await).await.unwrap_err();
    assert_eq!(refused.kind(), crate::store::StoreErrorKind::Overloaded);
    trial.open().await;
    trial.open().await;
    answer(first).await.unwrap();
    for call in live {
        answer(call).await.unwrap();
    }
}

#[tokio::test]
async fn full_queue_refuses_calls_until_a_caller_leaves() {
    let trial = Trial::new(1);
    let first = trial.ask("first").await;
    let waiting = trial.ask("waiting").await;
    let refused = answer(trial.ask("refused").await).await.unwrap_err();
    assert_eq!(refused.kind(), crate::store::StoreErrorKind::Overloaded);
    waiting.abort();
    let next = trial.ask("next").await;
    trial.open().await;
    trial.open().await;
    answer(first).await.unwrap();
    assert_eq!(answer(next).await.unwrap(), "next");
}

#[tokio::test]
async fn invalid_call_fails_alone() {
    let trial = Trial::new(10);
    let first = trial.ask("first").await;
    let [good, invalid] = [trial.ask("good").await, trial.ask("invalid").await];
    trial.open().await;
    trial.open().await;
    answer(first).await.unwrap();
    assert_eq!(answer(good).await.unwrap(), "good singly");
    answer(invalid).await.unwrap_err();
    // In a batch of one it is not tried again.
    let invalid = trial.ask("invalid").await;
    trial.open().await;
    answer(invalid).await.unwrap_err();
    assert_eq!(trial.echo.singles.load(Ordering::Relaxed), 2);
}

#[tokio::test]
async fn locked_call_is_made_singly() {
    let trial = Trial::new(10);
    let first = trial.ask("first").await;
    let [free, locked] = [trial.ask("free").await, trial.ask("locked").await];
    trial.open().await;
    trial.open().await;
    answer(first).await.unwrap();
    assert_eq!(answer(free).await.unwrap(), "free");
    assert_eq!(answer(locked).await.unwrap(), "locked singly");
}

#[tokio::test]
async fn full_single_queue_refuses_calls_but_no_outcome() {
    let trial = Trial::new(2);
    // No attempt gets a permit.
    let permits = Arc::clone(&trial.permits);
    let held = permits.acquire_owned().await.unwrap();
    let mut locked = Vec::new();
    for _ in 0..3 {
        locked.push(trial.ask("locked").await);
        trial.open().await;
    }
    let refused = answer(locked.pop().unwrap()).await.unwrap_err();
    assert_eq!(refused.kind(), crate::store::StoreErrorKind::Overloaded);
    let outcome = trial.ask("locked outcome").await;
    trial.open().await;
    drop(held);
    assert_eq!(answer(outcome).await.unwrap(), "locked outcome singly");
    for call in locked {
        assert_eq!(answer(call).await.unwrap(), "locked singly");
    }
}

#[tokio::test]
async fn f103_retried_outcome_joins_the_waiting_single_one() {
    let trial = Trial::new(10);
    let permits = Arc::clone(&trial.permits);
    let held = permits.acquire_owned().await.unwrap();
    let mut retried = Vec::new();
    for _ in 0..4 {
        retried.push(trial.ask("locked outcome").await);
        trial.open().await;
    }
    assert_eq!(trial.batcher.0.single.waiting(), 2);
    drop(held);
    for call in retried {
        assert_eq!(answer(call).await.unwrap(), "locked outcome singly");
    }
    assert_eq!(trial.echo.singles.load(Ordering::Relaxed), 2);
    assert!(trial.batcher.0.single.is_idle());
}

#[tokio::test]
async fn f106_calls_with_one_locked_name_use_one_permit() {
    let trial = Trial::new(10);
    trial.permits.add_permits(1);
    trial.echo.hold("locked one");
    let mut locked = Vec::new();
    for _ in 0..3 {
        locked.push(trial.ask("locked one").await);
        trial.open().await;
    }
    let other = trial.ask("locked other").await;
    trial.open().await;
    assert_eq!(answer(other).await.unwrap(), "locked other singly");
    assert!(locked.iter().all(|call| !call.is_finished()));
    trial.echo.hold("nothing");
    for call in locked {
        assert_eq!(answer(call).await.unwrap(), "locked one singly");
    }
}

#[test]
fn runtime_that_ends_leaves_no_name_behind() {
    let echo = Echo::default();
    let concurrent = concurrent(0, 1);
    let batcher = Batcher::new(echo.clone(), concurrent, limits(1, 10));
    for _ in 0..2 {
        echo.hold("locked");
        let runtime = tokio::runtime::Builder::new_current_thread()
            .enable_time()
            .build()
            .unwrap();
        let wait = Duration::from_millis(50);
        runtime.block_on(async {
            for _ in 0..3 {
                echo.gate.notify_one();
                let call = tokio::time::timeout(wait, batcher.call(ask("locked")));
                call.await.unwrap_err();
            }
        });
        drop(runtime);
        assert!(batcher.0.single.is_idle());
    }
}

#[test]
fn queue_of_an_ended_runtime_is_dropped() {
    let echo = Echo::default();
    let concurrent = concurrent(0, 1);
    let batcher = Batcher::new(echo.clone(), concurrent, limits(1, 10));
    for _ in 0..3 {
        let runtime = tokio::runtime::Builder::new_current_thread()
            .build()
            .unwrap();
        echo.gate.notify_one();
        runtime.block_on(batcher.call(ask("key"))).unwrap();
    }
    assert_eq!(batcher.0.queues.len(), 1);
}

#[tokio::test]
async fn failed_batch_fails_every_call() {
    let trial = Trial::new(10);
    let first = trial.ask("first").await;
    let [one, other] = [trial.ask("one").await, trial.ask("unreachable").await];
    trial.open().await;
    trial.open().await;
    answer(first).await.unwrap();
    for call in [one, other] {
        let error = answer(call).await.unwrap_err();
        assert_eq!(error.kind(), crate::store::StoreErrorKind::TimedOut);
    }
    assert_eq!(trial.echo.singles.load(Ordering::Relaxed), 0);
}

#[tokio::test]
async fn panic_fails_its_batch_and_frees_the_slot() {
    let trial = Trial::new(10);
    let panics = trial.ask("panics").await;
    let waiting = trial.ask("waiting").await;
    trial.open().await;
    let error = answer(panics).await.unwrap_err();
    assert_eq!(error.kind(), crate::store::StoreErrorKind::Unavailable);
    trial.open().await;
    assert_eq!(answer(waiting).await.unwrap(), "waiting");
}
