//! Who waits for which record, in this process.

use std::{
    collections::{HashMap, hash_map::Entry},
    hash::Hash,
    pin::Pin,
};

use tokio::sync::{Notify, futures::OwnedNotified};

use crate::store::{
    RecordName,
    sync::{Arc, AtomicUsize, Mutex, MutexGuard, Ordering, PoisonError},
};

/// The waiters of this process, by the record that they wait for.
pub(crate) struct Waiters<K = RecordName> {
    max: usize,
    count: AtomicUsize,
    records: Mutex<Records<K>>,
}

/// The number of waiters of each record, and what wakes them.
type Records<K> = HashMap<K, (usize, Arc<Notify>)>;

impl<K: Clone + Eq + Hash> Waiters<K> {
    pub(crate) fn new(max: usize) -> Self {
        Self {
            max,
            count: AtomicUsize::new(0),
            records: Mutex::default(),
        }
    }

    /// Adds a waiter, which is removed when it is dropped. Returns `None` if there are
    /// as many as there may be.
    pub(crate) fn enter(&self, name: &K) -> Option<Waiter<'_, K>> {
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
        })
    }

    /// Wakes the waiters of a record.
    pub(crate) fn wake(&self, name: &K) {
        // Most completions have no waiter, and need no lock. A waiter that enters after
        // this load reads the record after its completion.
        if self.is_empty() {
            return;
        }
        if let Some((_, ended)) = self.records().get(name) {
            ended.notify_waiters();
        }
    }

    /// Whether the record has waiters.
    #[cfg(feature = "redis")]
    pub(crate) fn has(&self, name: &K) -> bool {
        self.records().contains_key(name)
    }

    /// Whether there are no waiters.
    pub(crate) fn is_empty(&self) -> bool {
        self.count.load(Ordering::SeqCst) == 0
    }

    fn records(&self) -> MutexGuard<'_, Records<K>> {
        self.records.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// One waiter.
pub(crate) struct Waiter<'a, K: Clone + Eq + Hash = RecordName> {
    waiters: &'a Waiters<K>,
    name: K,
    ended: Arc<Notify>,
}

impl<K: Clone + Eq + Hash> Waiter<'_, K> {
    /// Starts to listen. The future resolves when the record's waiters are woken after
    /// this call.
    pub(crate) fn listen(&self) -> Pin<Box<OwnedNotified>> {
        let mut ended = Box::pin(Arc::clone(&self.ended).notified_owned());
        ended.as_mut().enable();
        ended
    }
}

impl<K: Clone + Eq + Hash> Drop for Waiter<'_, K> {
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
