//! What all clones of a layer share in this process: store, settings, running
//! requests and waiters.

use std::{
    panic::{AssertUnwindSafe, catch_unwind},
    pin::Pin,
    sync::Arc,
    task::{Context, Poll, Waker},
    time::Duration,
};

use tokio::{
    sync::{OwnedSemaphorePermit, Semaphore},
    time,
};
use tokio_util::{sync::CancellationToken, task::TaskTracker};

use crate::{config::Config, lease::Leases, waiting::Waiters};

pub(crate) struct Host<S> {
    pub(crate) store: S,
    pub(crate) config: Arc<Config>,
    pub(crate) tasks: Tasks,
    pub(crate) waiters: Waiters,
    pub(crate) leases: Arc<Leases>,
    /// The bytes of request bodies that are held until their handler runs.
    pub(crate) buffers: Room,
    /// The writes that are tried again after their client was answered, and
    /// the bytes of their responses.
    pub(crate) late: Room,
    pub(crate) late_bytes: Room,
}

impl<S> Host<S> {
    pub(crate) fn new(store: S, config: Config) -> Self {
        Self {
            store,
            tasks: Tasks::new(config.in_flight),
            waiters: Waiters::new(config.waiters),
            leases: Arc::default(),
            buffers: Room::new(config.buffered_bytes),
            late: Room::new(config.in_flight),
            late_bytes: Room::new(config.late_bytes),
            config: Arc::new(config),
        }
    }
}

/// The requests that run detached from their clients: counted, bounded, and
/// waited for when the process stops.
pub(crate) struct Tasks {
    tracker: TaskTracker,
    places: Room,
    draining: CancellationToken,
}

impl Tasks {
    fn new(most: usize) -> Self {
        Self {
            tracker: TaskTracker::new(),
            places: Room::new(most),
            draining: CancellationToken::new(),
        }
    }

    pub(crate) fn is_draining(&self) -> bool {
        self.draining.is_cancelled()
    }

    /// Ends when the draining begins.
    pub(crate) async fn drained(&self) {
        self.draining.cancelled().await;
    }

    /// A place for one more; `None` if all are taken.
    pub(crate) fn place(&self) -> Option<Share> {
        self.places.take(1)
    }

    /// Runs `task` to its end, whoever leaves, in the caller's tracing span.
    ///
    /// Begins at once, on the caller's stack: what has nothing to wait for needs
    /// no task of its own, and nobody can leave meanwhile. A panic ends it, as it
    /// would end a task.
    pub(crate) fn detach(&self, task: impl Future<Output = ()> + Send + 'static) {
        let task = Box::pin(task);
        #[cfg(feature = "tracing")]
        let task = {
            use tracing::instrument::{Instrument as _, WithSubscriber as _};
            task.in_current_span().with_current_subscriber()
        };
        let mut task = self.tracker.track_future(task);
        let mut cx = Context::from_waker(Waker::noop());
        let begun = catch_unwind(AssertUnwindSafe(|| Pin::new(&mut task).poll(&mut cx)));
        if matches!(begun, Ok(Poll::Pending)) {
            // Polled again at once, with a waker of its own.
            tokio::spawn(task);
        }
    }

    /// How many are left after `grace`.
    pub(crate) async fn drain(&self, grace: Duration) -> usize {
        self.draining.cancel();
        self.tracker.close();
        let _ = time::timeout(grace, self.tracker.wait()).await;
        self.tracker.len()
    }
}

/// A bound, of which shares are taken and given back by dropping them. Nobody
/// waits for a share.
pub(crate) struct Room(Arc<Semaphore>);

impl Room {
    fn new(size: usize) -> Self {
        Self(Arc::new(Semaphore::new(size)))
    }

    /// `None` if less than `size` is left.
    pub(crate) fn take(&self, size: usize) -> Option<Share> {
        let size = u32::try_from(size).ok()?;
        let permit = Arc::clone(&self.0).try_acquire_many_owned(size).ok()?;
        Some(Share(Some(permit)))
    }
}

/// A part of a [`Room`], given back when it is dropped.
pub(crate) struct Share(Option<OwnedSemaphorePermit>);

impl Share {
    /// Nothing yet.
    pub(crate) fn empty() -> Self {
        Self(None)
    }

    /// Takes more of `room`; false if less than `size` is left.
    pub(crate) fn grow(&mut self, room: &Room, size: usize) -> bool {
        let Some(Self(Some(more))) = room.take(size) else {
            return false;
        };
        match &mut self.0 {
            Some(share) => share.merge(more),
            none => *none = Some(more),
        }
        true
    }
}
