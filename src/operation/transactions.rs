//! The transactions that a handler begins for its operation, and how they ended.

use std::sync::{
    Mutex, MutexGuard, PoisonError,
    atomic::{AtomicBool, AtomicUsize, Ordering},
};

use bytes::Bytes;
use tokio::sync::watch;

use crate::store::Completion;

/// Marks the response of a commit, which the layer need not read from the record.
#[derive(Clone, Copy)]
pub(crate) struct AsCommitted;

/// The end of the operation's own transaction, whatever the handler returns.
#[derive(Clone, Debug, Default)]
pub(crate) enum Transacted {
    /// No transaction reached `commit`.
    #[default]
    Not,
    /// A commit is under way.
    Pending,
    Committed {
        response: Bytes,
        /// What the record has, where the response may be sealed.
        completion: Completion,
    },
    Aborted,
    Superseded,
    Unknown,
}

/// The transactions of one operation.
#[derive(Default)]
pub(crate) struct Transactions {
    transacted: watch::Sender<Transacted>,
    open: AtomicUsize,
    /// Whether the last one was dropped without `commit` or `rollback`.
    is_dropped: AtomicBool,
    last_failure: Mutex<Option<LogFailure>>,
}

/// Logs a failure, unless it was logged before.
type LogFailure = Box<dyn FnOnce() + Send>;

impl Transactions {
    /// Counts a transaction that was begun. It makes up for one that was dropped
    /// before.
    pub(crate) fn open(&self) {
        self.open.fetch_add(1, Ordering::AcqRel);
        self.is_dropped.store(false, Ordering::Release);
    }

    /// Takes a transaction out of the count. `is_dropped`: without `commit` or
    /// `rollback`.
    pub(crate) fn close(&self, is_dropped: bool) {
        if is_dropped {
            self.is_dropped.store(true, Ordering::Release);
        }
        self.open.fetch_sub(1, Ordering::AcqRel);
    }

    /// Returns whether one was begun, but neither committed nor rolled back by the
    /// handler's call.
    pub(crate) fn is_uncommitted(&self) -> bool {
        self.open.load(Ordering::Acquire) > 0 || self.is_dropped.load(Ordering::Acquire)
    }

    /// Begins a commit. Returns false if one is under way, or has ended in another
    /// way than aborted.
    pub(crate) fn begin_commit(&self) -> bool {
        self.transacted.send_if_modified(|transacted| {
            let may_begin = matches!(transacted, Transacted::Not | Transacted::Aborted);
            if may_begin {
                *transacted = Transacted::Pending;
            }
            may_begin
        })
    }

    /// Ends the commit under way. Does nothing if it has ended.
    pub(crate) fn end_commit(&self, ended: Transacted) {
        self.transacted.send_if_modified(|transacted| {
            let is_pending = matches!(transacted, Transacted::Pending);
            if is_pending {
                *transacted = ended;
            }
            is_pending
        });
    }

    /// Returns whether a commit is under way.
    pub(crate) fn is_committing(&self) -> bool {
        matches!(*self.transacted.borrow(), Transacted::Pending)
    }

    /// Waits for the end of a commit under way, and returns how it ended.
    pub(crate) async fn ended(&self) -> Transacted {
        let mut transacted = self.transacted.subscribe();
        let ended = transacted.wait_for(|transacted| !matches!(transacted, Transacted::Pending));
        // Never an error: the sender lives as long as `self`.
        ended.await.map_or(Transacted::Not, |ended| ended.clone())
    }

    /// Keeps how to log the last failure, for a handler that does not log it.
    pub(crate) fn keep_failure(&self, log: impl FnOnce() + Send + 'static) {
        *self.last_failure() = Some(Box::new(log));
    }

    /// Logs the last failure.
    pub(crate) fn log_failure(&self) {
        let log = self.last_failure().take();
        if let Some(log) = log {
            log();
        }
    }

    fn last_failure(&self) -> MutexGuard<'_, Option<LogFailure>> {
        let failure = self.last_failure.lock();
        failure.unwrap_or_else(PoisonError::into_inner)
    }
}
