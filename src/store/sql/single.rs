//! Calls that are made singly, because another transaction may hold their record.
//!
//! An attempt never waits for a lock. A call whose record is locked is tried again
//! after a pause, and holds neither a connection nor a permit meanwhile. So locked
//! records delay no other call. Calls with the same name are made one at a time.

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

use super::calls::{Call, Replies, WaitingCall};
use crate::{key::RecordName, runtime::backoff::Backoff, store::StoreError};

/// How a store makes a single call.
pub(crate) trait Single: Send + Sync + 'static {
    type Call: Call;
    type Answer: Clone + Send + 'static;

    /// Makes a call, unless its record is locked.
    fn attempt(
        &self,
        call: &Self::Call,
    ) -> impl Future<Output = Result<Attempt<Self::Answer>, StoreError>> + Send;
}

/// The result of an attempt.
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
    pub(crate) fn map<T>(self, map: impl FnOnce(A) -> T) -> Attempt<T> {
        match self {
            Self::Made(answer) => Attempt::Made(map(answer)),
            Self::Locked => Attempt::Locked,
        }
    }
}

/// The limits on single calls.
#[derive(Clone)]
pub(crate) struct Limits {
    /// One for each attempt. Several kinds of calls may share them.
    pub(crate) permits: Arc<Semaphore>,
    /// How many droppable calls may wait.
    pub(crate) max_waiting: usize,
    /// How long a call is tried again while its record is locked.
    pub(crate) lock_timeout: Duration,
}

/// Makes calls singly.
pub(crate) struct SingleCalls<S: Single>(Arc<Shared<S>>);

struct Shared<S: Single> {
    single: Arc<S>,
    limits: Limits,
    queue: Mutex<Queue<S>>,
}

struct Queue<S: Single> {
    /// For each name with a call under way, the calls behind it.
    behind: HashMap<RecordName, VecDeque<Waiting<S>>>,
    /// The calls without an answer.
    waiting: usize,
}

struct Waiting<S: Single> {
    call: S::Call,
    replies: Replies<S::Answer>,
    since: Instant,
}

impl<S: Single> Clone for SingleCalls<S> {
    fn clone(&self) -> Self {
        Self(Arc::clone(&self.0))
    }
}

impl<S: Single> SingleCalls<S> {
    pub(crate) fn new(single: Arc<S>, limits: Limits) -> Self {
        Self(Arc::new(Shared {
            single,
            limits,
            queue: Mutex::new(Queue {
                behind: HashMap::new(),
                waiting: 0,
            }),
        }))
    }

    /// Makes a call, which completes even if its caller leaves meanwhile.
    #[cfg(any(feature = "postgres", test))]
    pub(crate) async fn call(&self, call: S::Call) -> Result<S::Answer, StoreError> {
        let (call, answer) = WaitingCall::new(call);
        self.push(call);
        answer.get().await
    }

    /// Makes a call after those with the same name.
    pub(crate) fn push(&self, WaitingCall { call, replies }: WaitingCall<S::Call, S::Answer>) {
        let mut queue = self.0.queue();
        let Queue { behind, waiting } = &mut *queue;
        let mut same_name = behind.get_mut(call.name());
        let equal = call.identity().and_then(|identity| {
            let mut same_name = same_name.iter_mut().flat_map(|calls| calls.iter_mut());
            same_name.find(|waiting| waiting.call.identity().as_ref() == Some(&identity))
        });
        if let Some(equal) = equal {
            equal.replies.extend(replies);
            return;
        }
        if *waiting >= self.0.limits.max_waiting && call.is_droppable() {
            replies.send(Err(StoreError::overloaded()));
            return;
        }
        *waiting += 1;
        let name = call.name().clone();
        let call = Waiting {
            call,
            replies,
            since: Instant::now(),
        };
        if let Some(same_name) = same_name {
            same_name.push_back(call);
            return;
        }
        behind.insert(name.clone(), VecDeque::new());
        let series = Series {
            shared: Arc::clone(&self.0),
            name,
            has_ended: false,
        };
        // Outside the caller's span, which may end first.
        tokio::spawn(series.run(call));
    }

    #[cfg(test)]
    pub(crate) fn is_idle(&self) -> bool {
        let queue = self.0.queue();
        queue.behind.is_empty() && queue.waiting == 0
    }

    #[cfg(test)]
    pub(crate) fn waiting(&self) -> usize {
        self.0.queue().waiting
    }
}

impl<S: Single> Shared<S> {
    /// A panic under this lock leaves the queue consistent.
    fn queue(&self) -> MutexGuard<'_, Queue<S>> {
        self.queue.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Tries until the record is not locked, and again if the database rolled the call back.
    /// Returns `None` if all callers left.
    async fn make(&self, waiting: &Waiting<S>) -> Option<Result<S::Answer, StoreError>> {
        let mut backoff = Backoff::new(FIRST_PAUSE, LONGEST_PAUSE);
        loop {
            // The semaphore is never closed.
            let permit = self.limits.permits.acquire().await;
            if waiting.call.is_droppable() && waiting.replies.are_closed() {
                return None;
            }
            let attempt = self.single.attempt(&waiting.call).await;
            drop(permit);
            let failure = match attempt {
                Ok(Attempt::Made(answer)) => return Some(Ok(answer)),
                Ok(Attempt::Locked) => StoreError::timed_out().because(RECORD_LOCKED),
                Err(error) if error.was_rolled_back() => error,
                Err(error) => return Some(Err(error)),
            };
            let timeout = self.limits.lock_timeout;
            let left = timeout.saturating_sub(waiting.since.elapsed());
            if left.is_zero() {
                return Some(Err(failure));
            }
            sleep(backoff.pause().min(left)).await;
        }
    }
}

/// Makes the calls with one name, one at a time.
struct Series<S: Single> {
    shared: Arc<Shared<S>>,
    name: RecordName,
    has_ended: bool,
}

impl<S: Single> Series<S> {
    async fn run(mut self, mut waiting: Waiting<S>) {
        loop {
            // A panic closes the channels to the callers. The next call is made.
            let answer = AssertUnwindSafe(self.shared.make(&waiting))
                .catch_unwind()
                .await;
            if let Ok(Some(answer)) = answer {
                waiting.replies.send(answer);
            }
            match self.next() {
                Some(next) => waiting = next,
                None => return,
            }
        }
    }

    fn next(&mut self) -> Option<Waiting<S>> {
        let mut queue = self.shared.queue();
        queue.waiting -= 1;
        let next = queue.behind.get_mut(&self.name)?.pop_front();
        if next.is_none() {
            queue.behind.remove(&self.name);
        }
        self.has_ended = next.is_none();
        next
    }
}

impl<S: Single> Drop for Series<S> {
    /// If the runtime shuts down, drops the calls, which closes the channels to
    /// their callers.
    fn drop(&mut self) {
        if self.has_ended {
            return;
        }
        let mut queue = self.shared.queue();
        let behind = queue.behind.remove(&self.name).unwrap_or_default();
        queue.waiting -= behind.len() + 1;
    }
}

/// The cause of the error if a record stays locked for too long.
pub(crate) const RECORD_LOCKED: &str =
    "`lock_timeout` has passed: another transaction holds the record";

/// Most locks are held by single statements.
const FIRST_PAUSE: Duration = Duration::from_millis(5);

const LONGEST_PAUSE: Duration = Duration::from_millis(200);

#[cfg(test)]
mod tests {
    use std::sync::atomic::{AtomicUsize, Ordering};

    use tokio::{task::yield_now, time::timeout};

    use super::*;
    use crate::{
        key::{Key, Scope},
        store::StoreErrorKind,
    };

    /// A store that knows which names are locked.
    #[derive(Default)]
    struct Locks {
        names: Mutex<Vec<&'static str>>,
        attempts: AtomicUsize,
    }

    struct Ask(RecordName);

    impl Call for Ask {
        fn name(&self) -> &RecordName {
            &self.0
        }
    }

    impl Single for Locks {
        type Call = Ask;
        type Answer = ();

        async fn attempt(&self, call: &Ask) -> Result<Attempt<()>, StoreError> {
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

    fn single_calls(permits: usize) -> (Arc<Locks>, SingleCalls<Locks>) {
        let locks = Arc::<Locks>::default();
        let limits = Limits {
            permits: Arc::new(Semaphore::new(permits)),
            max_waiting: 100,
            lock_timeout: Duration::from_secs(2),
        };
        let calls = SingleCalls::new(Arc::clone(&locks), limits);
        (locks, calls)
    }

    fn spawn(
        calls: &SingleCalls<Locks>,
        key: &'static str,
    ) -> tokio::task::JoinHandle<Result<(), StoreError>> {
        let calls = calls.clone();
        tokio::spawn(async move { calls.call(ask(key)).await })
    }

    #[tokio::test(start_paused = true)]
    async fn f106_locked_records_hold_no_permit() {
        let (locks, calls) = single_calls(1);
        *locks.names.lock().unwrap() = vec!["a", "b", "c"];
        let locked = ["a", "b", "c", "a", "a"].map(|key| spawn(&calls, key));
        yield_now().await;
        let free = timeout(Duration::from_millis(1), calls.call(ask("free")));
        free.await.unwrap().unwrap();
        assert!(locked.iter().all(|call| !call.is_finished()));
        locks.names.lock().unwrap().clear();
        for call in locked {
            call.await.unwrap().unwrap();
        }
        assert!(calls.is_idle());
    }

    #[tokio::test(start_paused = true)]
    async fn locked_record_times_out_for_all_waiting_calls() {
        let (locks, calls) = single_calls(1);
        *locks.names.lock().unwrap() = vec!["a"];
        let begun = Instant::now();
        let waiting: Vec<_> = (0..10).map(|_| spawn(&calls, "a")).collect();
        for call in waiting {
            let error = call.await.unwrap().unwrap_err();
            assert_eq!(error.kind(), StoreErrorKind::TimedOut);
        }
        assert!(begun.elapsed() < Duration::from_secs(3));
        // The first call pauses between its attempts. Each other makes one attempt.
        assert!(locks.attempts.load(Ordering::Relaxed) < 50);
        assert!(calls.is_idle());
    }

    #[tokio::test(start_paused = true)]
    async fn call_without_a_caller_is_not_tried_again() {
        let (locks, calls) = single_calls(1);
        *locks.names.lock().unwrap() = vec!["a"];
        let call = spawn(&calls, "a");
        sleep(Duration::from_millis(100)).await;
        call.abort();
        sleep(Duration::from_secs(1)).await;
        assert!(calls.is_idle());
    }
}
