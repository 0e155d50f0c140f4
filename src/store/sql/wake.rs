//! Wakes the relays of an outbox.

use std::sync::{
    Arc,
    atomic::{AtomicBool, Ordering},
};

use tokio::sync::watch;

/// Wakes the relays of this process.
#[derive(Clone, Debug, Default)]
pub struct Wake {
    relays: watch::Sender<()>,
    /// Whether events were staged since a relay looked.
    staged: Arc<AtomicBool>,
    /// Whether an outbox that notifies other processes has staged events.
    notifies: Arc<AtomicBool>,
}

impl Wake {
    pub(crate) fn staged(&self, notifies: bool) {
        self.staged.store(true, Ordering::Release);
        if notifies {
            self.notifies.store(true, Ordering::Release);
        }
    }

    /// Wakes the relays if events were staged. Returns whether to notify others.
    pub(crate) fn committed(&self) -> bool {
        if self.staged.load(Ordering::Acquire) {
            self.relays.send_replace(());
        }
        self.notifies.load(Ordering::Acquire)
    }

    pub(crate) fn wake(&self) {
        self.relays.send_replace(());
    }

    pub(crate) fn subscribe(&self) -> watch::Receiver<()> {
        self.relays.subscribe()
    }

    pub(crate) fn looked(&self) {
        self.staged.store(false, Ordering::Release);
    }
}
