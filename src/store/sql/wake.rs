//! Wakes the relays of an outbox.

use std::{
    sync::{Arc, Mutex, PoisonError},
    time::Instant,
};

use tokio::sync::watch;

/// Wakes the relays of this process.
#[derive(Clone, Debug, Default)]
pub struct Wake {
    relays: watch::Sender<()>,
    staged: Arc<Mutex<Staged>>,
}

/// When events were staged last.
#[derive(Debug, Default)]
struct Staged {
    by_any: Option<Instant>,
    /// By an outbox that notifies other processes.
    by_notifying: Option<Instant>,
}

impl Wake {
    pub(crate) fn staged(&self, notifies: bool) {
        let now = Some(Instant::now());
        let mut staged = self.staged.lock().unwrap_or_else(PoisonError::into_inner);
        staged.by_any = now;
        if notifies {
            staged.by_notifying = now;
        }
    }

    /// Wakes the relays if the committed transaction may have staged events. Returns whether
    /// to notify other processes.
    ///
    /// It was begun at `begun`, or somewhere else. One that was begun after all events were
    /// staged has staged none.
    pub(crate) fn committed(&self, begun: Option<Instant>) -> bool {
        let staged = self.staged.lock().unwrap_or_else(PoisonError::into_inner);
        let may_stage = |last: Option<Instant>| {
            last.is_some_and(|last| begun.is_none_or(|begun| begun <= last))
        };
        if may_stage(staged.by_any) {
            self.relays.send_replace(());
        }
        may_stage(staged.by_notifying)
    }

    pub(crate) fn wake(&self) {
        self.relays.send_replace(());
    }

    pub(crate) fn subscribe(&self) -> watch::Receiver<()> {
        self.relays.subscribe()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn is_woken(wake: &Wake, begun: Option<Instant>) -> bool {
        let relay = wake.subscribe();
        let notifies = wake.committed(begun);
        assert!(!notifies || relay.has_changed().unwrap());
        relay.has_changed().unwrap()
    }

    #[test]
    fn commit_wakes_relays_if_it_may_have_staged_events() {
        let wake = Wake::default();
        let first = Some(Instant::now());
        assert!(!is_woken(&wake, first) && !is_woken(&wake, None));
        wake.staged(false);
        assert!(is_woken(&wake, first) && is_woken(&wake, first) && is_woken(&wake, None));
        let staged = wake.staged.lock().unwrap().by_any.unwrap();
        let second = Some(staged + std::time::Duration::from_nanos(1));
        assert!(!is_woken(&wake, second));
        assert!(!wake.committed(first));
        wake.staged(true);
        assert!(wake.committed(first) && wake.committed(None));
    }
}
