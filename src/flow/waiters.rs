//! Requests that wait for another request with the same key.

use std::{
    collections::{HashMap, hash_map::Entry},
    time::Duration,
};

use tokio::{sync::Notify, time};

use crate::{
    backoff::Backoff,
    store::RecordName,
    sync::{Arc, AtomicUsize, Mutex, MutexGuard, Ordering, PoisonError},
};

/// The waiters of this process, by the record that they wait for.
pub(crate) struct Waiters {
    max: usize,
    count: AtomicUsize,
    records: Mutex<Records>,
}

/// The number of waiters of each record, and what wakes them.
type Records = HashMap<RecordName, (usize, Arc<Notify>)>;

impl Waiters {
    pub(crate) fn new(max: usize) -> Self {
        Self {
            max,
            count: AtomicUsize::new(0),
            records: Mutex::default(),
        }
    }

    /// Adds a waiter, which is removed when it is dropped. Returns `None` if there are
    /// as many as there may be.
    pub(crate) fn enter(&self, name: &RecordName) -> Option<Waiter<'_>> {
        self.count
            .fetch_update(Ordering::SeqCst, Ordering::SeqCst, |count| {
                (count < self.max).then_some(count + 1)
            })
            .ok()?;
        let ended = {
            let mut records = self.records();
            let (count, ended) = records.entry(name.clone()).or_default();
            *count += 1;
            Arc::clone(ended)
        };
        Some(Waiter {
            waiters: self,
            name: name.clone(),
            ended,
            backoff: Backoff::new(FIRST_PAUSE, LONGEST_PAUSE),
        })
    }

    /// Wakes the waiters of a record.
    pub(crate) fn wake(&self, name: &RecordName) {
        // Most completions have no waiter, and need no lock. A waiter that enters after
        // this load reads the record after its completion.
        if self.count.load(Ordering::SeqCst) == 0 {
            return;
        }
        if let Some((_, ended)) = self.records().get(name) {
            ended.notify_waiters();
        }
    }

    fn records(&self) -> MutexGuard<'_, Records> {
        self.records.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// One waiter.
pub(crate) struct Waiter<'a> {
    waiters: &'a Waiters,
    name: RecordName,
    ended: Arc<Notify>,
    backoff: Backoff,
}

impl Waiter<'_> {
    /// Starts to listen. A completion after this call is not missed.
    ///
    /// The future resolves when a request of this process ends, or after a pause that
    /// grows with each call, since the owner may run in another process.
    pub(crate) fn listen(&mut self) -> impl Future<Output = ()> + Send + use<> {
        let mut ended = Box::pin(Arc::clone(&self.ended).notified_owned());
        ended.as_mut().enable();
        let pause = self.backoff.pause();
        async move {
            let _ = time::timeout(pause, ended).await;
        }
    }
}

impl Drop for Waiter<'_> {
    fn drop(&mut self) {
        let mut records = self.waiters.records();
        if let Entry::Occupied(mut entry) = records.entry(self.name.clone()) {
            entry.get_mut().0 -= 1;
            if entry.get().0 == 0 {
                entry.remove();
            }
        }
        drop(records);
        self.waiters.count.fetch_sub(1, Ordering::SeqCst);
    }
}

const FIRST_PAUSE: Duration = Duration::from_millis(50);
const LONGEST_PAUSE: Duration = Duration::from_secs(1);
