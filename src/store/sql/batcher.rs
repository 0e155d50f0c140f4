//! Combines concurrent store calls into batches.
//!
//! Few calls are sent immediately, each alone on a connection of its own. More calls
//! share a batch, and those that arrive meanwhile form the next one. No timer is
//! involved, so batching never adds latency.

use std::{
    collections::{HashMap, HashSet, VecDeque, hash_map::Entry},
    future::poll_fn,
    mem,
    panic::AssertUnwindSafe,
    sync::{
        Arc,
        atomic::{AtomicU64, Ordering},
    },
    task::Poll,
    time::Duration,
};

use futures_util::FutureExt as _;
use tokio::{
    runtime::{self, Handle},
    sync::Semaphore,
    time::{Instant, sleep},
};

use super::{
    calls::{Call, Identity, Reply, WaitingCall},
    single::{Limits, Single, SingleCalls},
};
use crate::{
    key::RecordName,
    runtime::per_runtime::{PerRuntime, RuntimeState},
    store::StoreError,
};

/// How a store makes a batch of calls.
pub(crate) trait Batch: Single {
    /// Makes calls with different names. Returns an answer for each, in their order.
    ///
    /// A call without an answer is made singly: its record is locked, or is not in
    /// the expected state.
    fn execute(
        &self,
        calls: &[Self::Call],
    ) -> impl Future<Output = Result<Answers<Self::Answer>, StoreError>> + Send;

    /// Returns how long to pause after a batch that took `elapsed`. The default is no
    /// pause.
    fn pause_after(&self, _elapsed: Duration) -> Duration {
        Duration::ZERO
    }
}

/// The answers to the calls of a batch.
pub(crate) type Answers<A> = Vec<Option<Result<A, StoreError>>>;

/// Combines calls of one kind into batches.
pub(crate) struct Batcher<B: Batch>(Arc<Shared<B>>);

struct Shared<B: Batch> {
    batch: Arc<B>,
    concurrent: ConcurrentBatches,
    max_waiting: usize,
    queues: PerRuntime<Queue<B>>,
    next_slot: AtomicU64,
    single: SingleCalls<B>,
}

/// How many batches are under way at the same time.
///
/// With fewer batches, each of them carries more calls.
#[derive(Clone)]
pub(crate) struct ConcurrentBatches {
    /// One for each batch of a single call, besides the others. Several kinds of calls
    /// may share them.
    pub(crate) alone: Arc<Semaphore>,
    pub(crate) usual: usize,
    /// The limit while all batches under way are slow.
    pub(crate) max: usize,
    /// The calls of a batch, up to [`MAX_CALLS`].
    pub(crate) max_calls: usize,
}

struct Queue<B: Batch> {
    waiting: VecDeque<Waiting<B>>,
    /// Outcomes without a caller. Calls with a caller go first.
    late: VecDeque<Waiting<B>>,
    /// The callers that joined a call in `waiting` or `late`.
    joined: HashMap<Identity, Vec<Reply<B::Answer>>>,
    /// How many batches were taken.
    batches: u32,
    /// The slots in use, and when the batch of each was taken.
    slots: Vec<(SlotId, Instant)>,
}

/// Unique in a batcher.
type SlotId = u64;

type Waiting<B> = WaitingCall<<B as Single>::Call, <B as Single>::Answer>;

impl<B: Batch> Clone for Batcher<B> {
    fn clone(&self) -> Self {
        Self(Arc::clone(&self.0))
    }
}

impl<B: Batch> Batcher<B> {
    /// Each runtime makes `concurrent` batches at the same time. `limits` hold for
    /// the calls that are made singly, and `max_waiting` for waiting calls too.
    pub(crate) fn new(batch: B, concurrent: ConcurrentBatches, limits: Limits) -> Self {
        let batch = Arc::new(batch);
        Self(Arc::new(Shared {
            max_waiting: limits.max_waiting,
            single: SingleCalls::new(Arc::clone(&batch), limits),
            batch,
            concurrent,
            queues: PerRuntime::default(),
            next_slot: AtomicU64::new(0),
        }))
    }

    /// Makes a call in a batch or singly, and returns its answer.
    ///
    /// Once it is sent, the call completes even if the caller leaves. Until then, a
    /// [droppable](Call::is_droppable) call is dropped with its caller. If a call
    /// with the same [identity](Call::identity) waits, this one receives its answer.
    pub(crate) async fn call(&self, call: B::Call) -> Result<B::Answer, StoreError> {
        let (call, answer) = Waiting::<B>::new(call);
        let runtime = Handle::current().id();
        if let Some(id) = self.enqueue(runtime, call)? {
            let slot = Slot {
                shared: Arc::clone(&self.0),
                runtime,
                id,
            };
            // Outside the caller's span, which may end first.
            tokio::spawn(slot.run());
        }
        answer.get().await
    }

    /// Returns a slot to run, if one is free.
    fn enqueue(
        &self,
        runtime: runtime::Id,
        call: Waiting<B>,
    ) -> Result<Option<SlotId>, StoreError> {
        let Shared {
            ref concurrent,
            max_waiting,
            ..
        } = *self.0;
        self.0.queues.with(runtime, |queue| {
            let used = queue.slots.len();
            let is_free =
                used < concurrent.usual || (used < concurrent.max && !queue.has_quick_slot(None));
            if !is_free && queue.waiting.len() >= max_waiting && call.call.is_droppable() {
                queue.sort_out();
                if queue.waiting.len() >= max_waiting {
                    return Err(StoreError::overloaded());
                }
            }
            queue.push(call);
            Ok(is_free.then(|| {
                let slot = self.0.next_slot.fetch_add(1, Ordering::Relaxed);
                queue.slots.push((slot, Instant::now()));
                slot
            }))
        })
    }
}

impl<B: Batch> Shared<B> {
    async fn make(&self, calls: Vec<Waiting<B>>) {
        let (calls, replies): (Vec<_>, Vec<_>) = calls
            .into_iter()
            .map(|waiting| (waiting.call, waiting.replies))
            .unzip();
        let (answers, failure) = match self.batch.execute(&calls).await {
            Ok(answers) => (answers, None),
            // Made singly, the other calls succeed.
            Err(error) if error.is_about_one() && calls.len() > 1 => (Vec::new(), None),
            Err(error) if error.was_rolled_back() => (Vec::new(), None),
            Err(error) => (Vec::new(), Some(error)),
        };
        let mut answers = answers.into_iter();
        for (call, replies) in calls.into_iter().zip(replies) {
            match (&failure, answers.next().flatten()) {
                (Some(error), _) => replies.send(Err(error.clone())),
                (None, Some(answer)) => replies.send(answer),
                (None, None) => self.single.push(Waiting::<B> { call, replies }),
            }
        }
    }
}

/// Makes one batch after the other, until no call waits. Calls for which there are
/// connections go alone.
struct Slot<B: Batch> {
    shared: Arc<Shared<B>>,
    runtime: runtime::Id,
    id: SlotId,
}

impl<B: Batch> Slot<B> {
    async fn run(self) {
        // Callers that were answered together are ready to call again together.
        let_others_run().await;
        loop {
            let calls = self.next_batch();
            if calls.is_empty() {
                return;
            }
            let alone = Arc::clone(&self.shared.concurrent.alone);
            if let Ok(mut permits) = alone.try_acquire_many_owned(calls.len() as u32) {
                for call in calls {
                    let (shared, permit) = (Arc::clone(&self.shared), permits.split(1));
                    tokio::spawn(async move {
                        shared.make(vec![call]).await;
                        drop(permit);
                    });
                }
                continue;
            }
            let begun = Instant::now();
            // A panic closes the channels to the callers. The next batch is made.
            let _ = AssertUnwindSafe(self.shared.make(calls))
                .catch_unwind()
                .await;
            let pause = self.shared.batch.pause_after(begun.elapsed());
            if !pause.is_zero() {
                sleep(pause).await;
            }
        }
    }

    /// Returns the calls of the next batch. If there are none, the slot is free.
    fn next_batch(&self) -> Vec<Waiting<B>> {
        let ConcurrentBatches {
            usual, max_calls, ..
        } = self.shared.concurrent;
        self.shared.queues.with(self.runtime, |queue| {
            // A slot beyond the usual ones ends as soon as another one is quick.
            let is_spare = queue.slots.len() > usual && queue.has_quick_slot(Some(self.id));
            let calls = if is_spare {
                Vec::new()
            } else {
                queue.take(max_calls)
            };
            if calls.is_empty() {
                queue.slots.retain(|(id, _)| *id != self.id);
            } else if let Some((_, taken)) = queue.slots.iter_mut().find(|(id, _)| *id == self.id) {
                *taken = Instant::now();
            }
            calls
        })
    }
}

impl<B: Batch> Drop for Slot<B> {
    /// If the runtime shuts down, drops the waiting calls, which closes the channels
    /// to their callers.
    fn drop(&mut self) {
        self.shared.queues.with(self.runtime, |queue| {
            let used = queue.slots.len();
            queue.slots.retain(|(id, _)| *id != self.id);
            if queue.slots.len() < used {
                queue.waiting.clear();
                queue.late.clear();
                queue.joined.clear();
            }
        });
    }
}

impl<B: Batch> Default for Queue<B> {
    fn default() -> Self {
        Self {
            waiting: VecDeque::new(),
            late: VecDeque::new(),
            joined: HashMap::new(),
            batches: 0,
            slots: Vec::new(),
        }
    }
}

impl<B: Batch> RuntimeState for Queue<B> {
    fn is_idle(&self) -> bool {
        self.waiting.is_empty() && self.late.is_empty() && self.slots.is_empty()
    }
}

impl<B: Batch> Queue<B> {
    /// Returns whether a slot other than `except` took its batch a short time ago.
    fn has_quick_slot(&self, except: Option<SlotId>) -> bool {
        let mut others = self.slots.iter().filter(|(id, _)| Some(*id) != except);
        others.any(|(_, taken)| taken.elapsed() <= SLOW)
    }

    fn push(&mut self, waiting: Waiting<B>) {
        let Some(identity) = waiting.call.identity() else {
            self.waiting.push_back(waiting);
            return;
        };
        match self.joined.entry(identity) {
            Entry::Occupied(mut joined) => {
                let joined = joined.get_mut();
                joined.retain(|reply| !reply.is_closed());
                joined.push(waiting.replies.first);
            }
            Entry::Vacant(vacant) => {
                vacant.insert(Vec::new());
                self.waiting.push_back(waiting);
            }
        }
    }

    /// Returns the calls of the next batch, in the order of their names, so that no
    /// two batches wait for each other's records.
    ///
    /// A batch has one call for a name. The others keep their order. Late outcomes
    /// come after calls with a caller, but first in every fourth batch, so that
    /// neither starves.
    fn take(&mut self, max_calls: usize) -> Vec<Waiting<B>> {
        self.batches = self.batches.wrapping_add(1);
        let mut next = NextBatch::new(max_calls);
        if self.batches.is_multiple_of(LATE_FIRST) {
            self.load_late(&mut next);
        }
        // An outcome that becomes late here must go with this batch, since there may
        // be no later one.
        self.load_waiting(&mut next);
        self.load_late(&mut next);
        let mut calls = next.calls;
        calls.sort_unstable_by(|one, other| one.call.name().cmp(other.call.name()));
        calls
    }

    fn load_waiting(&mut self, next: &mut NextBatch<B>) {
        let mut skipped = Vec::new();
        while next.has_space(&skipped)
            && let Some(waiting) = self.waiting.pop_front()
        {
            if let Some(waiting) = self.with_caller(waiting) {
                self.load(next, waiting, &mut skipped);
            }
        }
        put_back(&mut self.waiting, skipped);
    }

    fn load_late(&mut self, next: &mut NextBatch<B>) {
        let mut skipped = Vec::new();
        while next.has_space(&skipped)
            && let Some(late) = self.late.pop_front()
        {
            self.load(next, late, &mut skipped);
        }
        put_back(&mut self.late, skipped);
    }

    fn load(
        &mut self,
        next: &mut NextBatch<B>,
        waiting: Waiting<B>,
        skipped: &mut Vec<Waiting<B>>,
    ) {
        if next.admits(&waiting.call) {
            next.calls.push(self.with_joined(waiting));
        } else {
            skipped.push(waiting);
        }
    }

    /// Returns the call, if it has a caller. Without one, an outcome becomes late and
    /// another call is dropped.
    fn with_caller(&mut self, mut waiting: Waiting<B>) -> Option<Waiting<B>> {
        if !waiting.replies.first.is_closed() {
            return Some(waiting);
        }
        if !waiting.call.is_droppable() {
            self.late.push_back(waiting);
            return None;
        }
        waiting = self.with_joined(waiting);
        let mut others = mem::take(&mut waiting.replies.joined).into_iter();
        waiting.replies.first = others.find(|reply| !reply.is_closed())?;
        if let Some(identity) = waiting.call.identity() {
            self.joined.insert(identity, others.collect());
        }
        Some(waiting)
    }

    /// Returns the call with the callers that joined it. Later ones wait for the next
    /// call.
    fn with_joined(&mut self, mut waiting: Waiting<B>) -> Waiting<B> {
        let identity = waiting.call.identity();
        if let Some(joined) = identity.and_then(|identity| self.joined.remove(&identity)) {
            waiting.replies.joined = joined;
        }
        waiting
    }

    /// Drops calls without a caller, and separates late outcomes.
    fn sort_out(&mut self) {
        let has_left = |waiting: &Waiting<B>| waiting.replies.first.is_closed();
        if self.waiting.iter().any(has_left) {
            for waiting in mem::take(&mut self.waiting) {
                if let Some(waiting) = self.with_caller(waiting) {
                    self.waiting.push_back(waiting);
                }
            }
        }
    }
}

fn put_back<T>(queue: &mut VecDeque<T>, skipped: Vec<T>) {
    for waiting in skipped.into_iter().rev() {
        queue.push_front(waiting);
    }
}

/// A batch that is put together.
struct NextBatch<B: Batch> {
    calls: Vec<Waiting<B>>,
    names: HashSet<RecordName>,
    max_calls: usize,
    bytes: usize,
    is_full: bool,
}

impl<B: Batch> NextBatch<B> {
    fn new(max_calls: usize) -> Self {
        Self {
            max_calls,
            calls: Vec::new(),
            names: HashSet::new(),
            bytes: 0,
            is_full: false,
        }
    }

    fn has_space(&self, skipped: &[Waiting<B>]) -> bool {
        !self.is_full && self.calls.len() < self.max_calls && skipped.len() < MAX_SKIPPED
    }

    fn admits(&mut self, call: &B::Call) -> bool {
        if !self.names.insert(call.name().clone()) {
            return false;
        }
        let bytes = self.bytes + call.bytes();
        self.is_full = bytes > MAX_BYTES && !self.calls.is_empty();
        if !self.is_full {
            self.bytes = bytes;
        }
        !self.is_full
    }
}

/// Lets tasks run that are ready.
///
/// Unlike with Tokio's `yield_now`, another worker can fetch this task meanwhile:
/// the next task of this worker may block.
async fn let_others_run() {
    let mut has_yielded = false;
    poll_fn(|cx| {
        if mem::replace(&mut has_yielded, true) {
            return Poll::Ready(());
        }
        cx.waker().wake_by_ref();
        Poll::Pending
    })
    .await;
}

/// A larger batch would hold all of a server's callers: now one half of them
/// claims while the other half records outcomes. A smaller one would not be worth
/// a statement.
pub(crate) const MAX_CALLS: usize = 128;

/// How many calls with names that the batch has are skipped.
const MAX_SKIPPED: usize = 4096;

/// In every fourth batch, late outcomes come first.
const LATE_FIRST: u32 = 4;

/// A larger call gets a batch of its own.
const MAX_BYTES: usize = 1 << 20;

/// Many times the duration of a batch on a healthy server.
const SLOW: Duration = Duration::from_millis(250);

#[cfg(test)]
mod tests;
