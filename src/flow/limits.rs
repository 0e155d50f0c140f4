//! Limits on what a layer holds at a time.

use std::sync::{
    Arc,
    atomic::{AtomicBool, AtomicUsize, Ordering},
};

use tokio::sync::Notify;

/// A limit on a number of requests, tasks or bytes. Nothing waits for a permit.
pub(crate) struct Limit(Arc<Counter>);

struct Counter {
    max: usize,
    taken: AtomicUsize,
    /// Whether a task waits for the last permit to be given back.
    is_watched: AtomicBool,
    emptied: Notify,
}

impl Limit {
    pub(crate) fn new(max: usize) -> Self {
        Self(Arc::new(Counter {
            max,
            taken: AtomicUsize::new(0),
            is_watched: AtomicBool::new(false),
            emptied: Notify::new(),
        }))
    }

    /// Returns a permit for `size`, or `None` if less is left.
    pub(crate) fn try_acquire(&self, size: usize) -> Option<Permit> {
        let mut permit = self.empty_permit();
        permit.try_grow(size).then_some(permit)
    }

    /// Returns a permit for nothing yet.
    pub(crate) fn empty_permit(&self) -> Permit {
        Permit {
            counter: Arc::clone(&self.0),
            size: 0,
        }
    }

    pub(crate) fn taken(&self) -> usize {
        self.0.taken.load(Ordering::SeqCst)
    }

    /// Resolves once no permit is held.
    pub(crate) async fn emptied(&self) {
        self.0.is_watched.store(true, Ordering::SeqCst);
        loop {
            let emptied = self.0.emptied.notified();
            if self.taken() == 0 {
                return;
            }
            emptied.await;
        }
    }
}

/// A part of a [`Limit`], given back when it is dropped.
pub(crate) struct Permit {
    counter: Arc<Counter>,
    size: usize,
}

impl Permit {
    /// Adds `size` to the permit. Returns false if less is left.
    pub(crate) fn try_grow(&mut self, size: usize) -> bool {
        let Counter { max, taken, .. } = &*self.counter;
        let grown = taken.fetch_update(Ordering::SeqCst, Ordering::SeqCst, |taken| {
            taken.checked_add(size).filter(|sum| sum <= max)
        });
        if grown.is_ok() {
            self.size += size;
        }
        grown.is_ok()
    }

    /// Makes the permit one for `size`. Returns false, and changes nothing, if less is left.
    pub(crate) fn try_resize(&mut self, size: usize) -> bool {
        match size.checked_sub(self.size) {
            Some(more) => self.try_grow(more),
            None => {
                let less = self.size - size;
                drop(self.split(less));
                true
            }
        }
    }

    /// Takes a part out of the permit.
    fn split(&mut self, size: usize) -> Self {
        self.size -= size;
        Self {
            counter: Arc::clone(&self.counter),
            size,
        }
    }
}

impl Drop for Permit {
    fn drop(&mut self) {
        if self.size == 0 {
            return;
        }
        let before = self.counter.taken.fetch_sub(self.size, Ordering::SeqCst);
        // Either this sees that the limit is watched, or the watcher sees that no
        // permit is held.
        if before == self.size && self.counter.is_watched.load(Ordering::SeqCst) {
            self.counter.emptied.notify_waiters();
        }
    }
}
