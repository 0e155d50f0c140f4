//! What all clones of a layer share in this process: store, settings, running
//! requests and waiters.

use std::{
    sync::{
        Arc,
        atomic::{AtomicBool, Ordering},
    },
    time::Duration,
};

use tokio::{
    sync::{OwnedSemaphorePermit, Semaphore},
    time,
};
use tokio_util::task::TaskTracker;

use crate::{config::Config, waiting::Waiters};

pub(crate) struct Host<S> {
    pub(crate) store: S,
    pub(crate) config: Config,
    pub(crate) tasks: Tasks,
    pub(crate) waiters: Waiters,
    /// A permit for each byte of a response that waits to be recorded late.
    pub(crate) late_bytes: Semaphore,
}

impl<S> Host<S> {
    pub(crate) fn new(store: S, config: Config) -> Self {
        Self {
            store,
            tasks: Tasks::new(config.in_flight),
            waiters: Waiters::new(config.waiters),
            late_bytes: Semaphore::new(config.late_bytes),
            config,
        }
    }
}

/// The requests that run detached from their clients: counted, bounded, and
/// waited for when the process stops.
pub(crate) struct Tasks {
    tracker: TaskTracker,
    places: Arc<Semaphore>,
    draining: AtomicBool,
}

impl Tasks {
    fn new(most: usize) -> Self {
        Self {
            tracker: TaskTracker::new(),
            places: Arc::new(Semaphore::new(most)),
            draining: AtomicBool::new(false),
        }
    }

    pub(crate) fn is_draining(&self) -> bool {
        self.draining.load(Ordering::Acquire)
    }

    /// A place for one more; `None` if all are taken.
    pub(crate) fn place(&self) -> Option<OwnedSemaphorePermit> {
        Arc::clone(&self.places).try_acquire_owned().ok()
    }

    /// Runs `task` to its end, whoever leaves, in the caller's tracing span.
    pub(crate) fn detach(
        &self,
        place: OwnedSemaphorePermit,
        task: impl Future<Output = ()> + Send + 'static,
    ) {
        let task = async move {
            task.await;
            drop(place);
        };
        #[cfg(feature = "tracing")]
        let task = {
            use tracing::instrument::{Instrument as _, WithSubscriber as _};
            task.in_current_span().with_current_subscriber()
        };
        self.tracker.spawn(task);
    }

    /// How many are left after `grace`.
    pub(crate) async fn drain(&self, grace: Duration) -> usize {
        self.draining.store(true, Ordering::Release);
        self.tracker.close();
        let _ = time::timeout(grace, self.tracker.wait()).await;
        self.tracker.len()
    }
}
