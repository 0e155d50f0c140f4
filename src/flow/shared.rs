//! What all clones of a layer share in this process: store, settings, running
//! requests and waiters.

use std::{
    sync::{
        Arc,
        atomic::{AtomicBool, AtomicUsize, Ordering},
    },
    time::Duration,
};

use tokio::{
    sync::{Notify, SetOnce},
    time,
};

use crate::{
    Rejection, config::Config, flow::discard::DISCARDS, flow::heartbeat::Leases,
    flow::waiters::Waiters,
};

pub(crate) struct Host<S> {
    pub(crate) store: S,
    pub(crate) config: Arc<Config>,
    pub(crate) waiters: Waiters,
    pub(crate) leases: Leases,
    is_draining: AtomicBool,
    /// Wakes those that wait when the draining begins.
    drained: SetOnce<()>,
    /// The requests that run detached from their clients.
    pub(crate) running: Room,
    /// The bytes of request bodies that are held until their handler runs.
    pub(crate) buffers: Room,
    /// The refused bodies that are read on and thrown away.
    pub(crate) discards: Room,
    /// The writes that are tried again after their client was answered, and
    /// the bytes of their responses.
    pub(crate) late: Room,
    /// The claims in doubt that are taken back.
    pub(crate) withdrawals: Room,
    pub(crate) late_bytes: Room,
}

impl<S> Host<S> {
    pub(crate) fn new(store: S, config: Config) -> Self {
        Self {
            store,
            waiters: Waiters::new(config.max_waiters),
            leases: Leases::default(),
            is_draining: AtomicBool::new(false),
            drained: SetOnce::new(),
            running: Room::new(config.max_in_flight),
            buffers: Room::new(config.max_buffered_bytes),
            discards: Room::new(DISCARDS),
            late: Room::new(config.max_in_flight),
            withdrawals: Room::new(config.max_in_flight),
            late_bytes: Room::new(config.max_late_recording_bytes),
            config: Arc::new(config),
        }
    }

    pub(crate) fn is_draining(&self) -> bool {
        self.is_draining.load(Ordering::SeqCst)
    }

    /// Ends when the draining begins.
    pub(crate) async fn drained(&self) {
        self.drained.wait().await;
    }

    /// A permit to run, held for as long as the request runs.
    ///
    /// A request takes its permit first and looks at the flag then; `drain` sets
    /// the flag first and counts the permits then. So a request that is not
    /// counted sees the flag and does not run.
    pub(crate) fn permit(&self) -> Result<Share, Rejection> {
        let permit = self.running.take(1).ok_or_else(|| {
            Rejection::overloaded(
                "too many requests claim, wait or run, request refused with 503: raise `max_in_flight`, \
                 or find out why they take long",
            )
        })?;
        match self.is_draining() {
            true => Err(Rejection::draining()),
            false => Ok(permit),
        }
    }

    /// How many requests and late writes are left after `grace`.
    pub(crate) async fn drain(&self, grace: Duration) -> usize {
        self.is_draining.store(true, Ordering::SeqCst);
        // It may have begun before.
        let _ = self.drained.set(());
        let emptied = async {
            while self.left() > 0 {
                self.running.emptied().await;
                self.late.emptied().await;
                self.withdrawals.emptied().await;
            }
        };
        let _ = time::timeout(grace, emptied).await;
        self.left()
    }

    fn left(&self) -> usize {
        self.running.taken() + self.late.taken() + self.withdrawals.taken()
    }
}

/// A bound, of which shares are taken and given back by dropping them. Nobody
/// waits for a share.
pub(crate) struct Room(Arc<Space>);

struct Space {
    size: usize,
    taken: AtomicUsize,
    /// Whether anybody wants to know when all shares are back.
    is_watched: AtomicBool,
    emptied: Notify,
}

impl Room {
    fn new(size: usize) -> Self {
        Self(Arc::new(Space {
            size,
            taken: AtomicUsize::new(0),
            is_watched: AtomicBool::new(false),
            emptied: Notify::new(),
        }))
    }

    /// `None` if less than `size` is left.
    pub(crate) fn take(&self, size: usize) -> Option<Share> {
        let mut share = self.none();
        share.grow(size).then_some(share)
    }

    /// A share of nothing yet.
    pub(crate) fn none(&self) -> Share {
        Share {
            space: Arc::clone(&self.0),
            size: 0,
        }
    }

    fn taken(&self) -> usize {
        self.0.taken.load(Ordering::SeqCst)
    }

    /// Ends once no share is out.
    async fn emptied(&self) {
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

/// A part of a [`Room`], given back when it is dropped.
pub(crate) struct Share {
    space: Arc<Space>,
    size: usize,
}

impl Share {
    /// Takes more of the room; false if less than `size` is left.
    pub(crate) fn grow(&mut self, size: usize) -> bool {
        let Space {
            size: most, taken, ..
        } = &*self.space;
        let grown = taken.fetch_update(Ordering::SeqCst, Ordering::SeqCst, |taken| {
            taken.checked_add(size).filter(|sum| sum <= most)
        });
        if grown.is_ok() {
            self.size += size;
        }
        grown.is_ok()
    }
}

impl Drop for Share {
    fn drop(&mut self) {
        if self.size == 0 {
            return;
        }
        let before = self.space.taken.fetch_sub(self.size, Ordering::SeqCst);
        // Either this sees that the room is watched, or the watcher that it is
        // empty.
        if before == self.size && self.space.is_watched.load(Ordering::SeqCst) {
            self.space.emptied.notify_waiters();
        }
    }
}
