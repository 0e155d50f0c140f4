//! Waiting for another request with the same key to end.

use std::{
    collections::{HashMap, hash_map::Entry},
    time::Duration,
};

use tokio::{sync::Notify, time};

use crate::{
    RecordName,
    jitter::jittered,
    sync::{Arc, AtomicUsize, Mutex, MutexGuard, Ordering, PoisonError},
};

/// The requests of this process that wait, by the record they wait for.
pub(crate) struct Waiters {
    most: usize,
    count: AtomicUsize,
    bells: Mutex<Bells>,
}

/// How many wait for a record, and the bell that wakes them.
type Bells = HashMap<RecordName, (usize, Arc<Notify>)>;

impl Waiters {
    pub(crate) fn new(most: usize) -> Self {
        Self {
            most,
            count: AtomicUsize::new(0),
            bells: Mutex::default(),
        }
    }

    /// A place to wait, given back when it is dropped; `None` if all are taken.
    pub(crate) fn enter(&self, name: &RecordName) -> Option<Place<'_>> {
        self.count
            .fetch_update(Ordering::SeqCst, Ordering::SeqCst, |count| {
                (count < self.most).then_some(count + 1)
            })
            .ok()?;
        let bell = {
            let mut bells = self.bells();
            let (waiting, bell) = bells.entry(name.clone()).or_default();
            *waiting += 1;
            Arc::clone(bell)
        };
        Some(Place {
            waiters: self,
            name: name.clone(),
            bell,
            pause: FIRST_PAUSE,
        })
    }

    /// Wakes those of this process who wait for this record.
    pub(crate) fn wake(&self, name: &RecordName) {
        // Most completions have no waiter, and need no lock. A waiter that
        // enters after this look reads the record after its completion.
        if self.count.load(Ordering::SeqCst) == 0 {
            return;
        }
        if let Some((_, bell)) = self.bells().get(name) {
            bell.notify_waiters();
        }
    }

    fn bells(&self) -> MutexGuard<'_, Bells> {
        self.bells.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// One waiter's place.
pub(crate) struct Place<'a> {
    waiters: &'a Waiters,
    name: RecordName,
    bell: Arc<Notify>,
    pause: Duration,
}

impl Place<'_> {
    /// Begins to listen; a completion after this call is not missed. The future
    /// ends when the owner of this process completes, or after a pause that
    /// grows from wait to wait, for owners elsewhere.
    pub(crate) fn listen(&mut self) -> impl Future<Output = ()> + Send + use<> {
        let mut heard = Box::pin(Arc::clone(&self.bell).notified_owned());
        heard.as_mut().enable();
        let pause = jittered(self.pause);
        self.pause = (self.pause * 2).min(LONGEST_PAUSE);
        async move {
            let _ = time::timeout(pause, heard).await;
        }
    }
}

impl Drop for Place<'_> {
    fn drop(&mut self) {
        let mut bells = self.waiters.bells();
        if let Entry::Occupied(mut entry) = bells.entry(self.name.clone()) {
            entry.get_mut().0 -= 1;
            if entry.get().0 == 0 {
                entry.remove();
            }
        }
        drop(bells);
        self.waiters.count.fetch_sub(1, Ordering::SeqCst);
    }
}

const FIRST_PAUSE: Duration = Duration::from_millis(50);
const LONGEST_PAUSE: Duration = Duration::from_secs(1);
