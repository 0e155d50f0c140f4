//! The lease of one claim, as its owner knows it.

use std::sync::{Mutex, MutexGuard, PoisonError};

use tokio::{sync::SetOnce, task::AbortHandle, time::Instant};

pub(crate) struct Lease {
    /// A moment before the store granted the claim.
    pub(crate) granted: Instant,
    /// Set when the lease is, or may be, over.
    lost: SetOnce<()>,
    renewal: Mutex<Renewal>,
}

/// How the lease is renewed.
pub(crate) enum Renewal {
    /// The first heartbeat is not due yet.
    Scheduled,
    /// A task renews it.
    Running(AbortHandle),
    /// The run has ended.
    Ended,
}

impl Lease {
    /// `granted` is a moment before the store granted the claim.
    pub(crate) fn new(granted: Instant) -> Self {
        Self {
            granted,
            lost: SetOnce::new(),
            renewal: Mutex::new(Renewal::Scheduled),
        }
    }

    pub(crate) fn is_lost(&self) -> bool {
        self.lost.initialized()
    }

    /// Resolves when the lease is, or may be, over.
    pub(crate) async fn lost(&self) {
        self.lost.wait().await;
    }

    pub(crate) fn lose(&self) {
        // It may have been lost before.
        let _ = self.lost.set(());
    }

    pub(crate) fn renewal(&self) -> MutexGuard<'_, Renewal> {
        self.renewal.lock().unwrap_or_else(PoisonError::into_inner)
    }

    pub(crate) fn has_ended(&self) -> bool {
        matches!(*self.renewal(), Renewal::Ended)
    }
}
