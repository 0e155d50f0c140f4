//! What the layer did with a request: for outer layers, logs and metrics.

use crate::{OperationId, RejectionKind};

/// What the layer did with a guarded request, as an extension of its response.
///
/// Requests that are not guarded have none. Each outcome is one `tracing` event
/// (feature `tracing`) and one count of the metric `idempotency_requests_total`
/// with the label `outcome` (feature `metrics`); neither shows a key or scope.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum Outcome {
    /// The handler ran and its response is recorded.
    Recorded,
    /// The handler ran and its key is free again.
    Released,
    /// The handler ran, or began to, and nobody knows what it did.
    Unknown,
    /// The handler ran and its response goes out as it comes, too large or too
    /// slow to keep.
    Live,
    /// The handler ran, but its response could not be recorded yet.
    Unrecorded,
    /// The handler ran without a claim, because the store could not be asked.
    Unguarded,
    /// A recorded response was replayed.
    Replayed,
    /// The client left while it waited for another request to end, or while its
    /// own ran under [`Disconnect::Cancel`](crate::Disconnect::Cancel).
    Left,
    /// The inner service failed before it could be called.
    Unready,
    /// The layer answered in the handler's place.
    Refused(RejectionKind),
}

impl Outcome {
    /// Its name in metrics and logs; one of a fixed set.
    #[must_use]
    pub fn name(self) -> &'static str {
        match self {
            Self::Recorded => "recorded",
            Self::Released => "released",
            Self::Unknown => "unknown",
            Self::Live => "live",
            Self::Unrecorded => "unrecorded",
            Self::Unguarded => "unguarded",
            Self::Replayed => "replayed",
            Self::Left => "left",
            Self::Unready => "unready",
            Self::Refused(kind) => kind.slug(),
        }
    }

    /// The one event and the one count of a guarded request.
    pub(crate) fn tell(self, operation: Option<OperationId>) {
        #[cfg(feature = "tracing")]
        {
            let operation = operation.map(tracing::field::display);
            match self {
                Self::Unknown | Self::Unrecorded | Self::Unguarded => {
                    tracing::warn!(outcome = self.name(), operation, "idempotent request");
                }
                _ => tracing::debug!(outcome = self.name(), operation, "idempotent request"),
            }
        }
        #[cfg(feature = "metrics")]
        metrics::counter!("idempotency_requests_total", "outcome" => self.name()).increment(1);
        let _ = operation;
    }
}

/// Something worth a notice besides the outcome of a request.
#[derive(Clone, Copy, Debug)]
pub(crate) enum Notice {
    /// The client left before its answer was ready.
    ClientGone,
    /// Another owner's claim superseded this one.
    LostOwnership,
    /// A stored record cannot be read.
    Corrupt,
    /// A late write reached the store after all.
    RecordedLate,
    /// A late write was given up: the outcome stays unknown.
    GaveUpRecording,
    /// A claim in doubt was not taken back: if it is in the store, its lease
    /// lapses there.
    GaveUpWithdrawing,
    /// An outcome that was still unknown has expired, and its key runs again.
    UnknownExpired,
    /// A live response ended, and a tombstone stands for it.
    Tombstone,
    /// A live response broke off: the outcome is unknown.
    LiveBroken,
    /// The handler answered with success, and a transaction that it had begun was
    /// not committed.
    Uncommitted,
    /// The answer to COMMIT got lost; the record says that it was committed.
    #[cfg(any(feature = "postgres", feature = "sqlite"))]
    CommitFound,
    /// The answer to COMMIT got lost; the record says that it was rolled back.
    #[cfg(any(feature = "postgres", feature = "sqlite"))]
    AbortFound,
}

impl Notice {
    pub(crate) fn tell(self, operation: Option<OperationId>) {
        let name = match self {
            Self::ClientGone => "client_gone",
            Self::LostOwnership => "lost_ownership",
            Self::Corrupt => "corrupt",
            Self::RecordedLate => "recorded_late",
            Self::GaveUpRecording => "gave_up_recording",
            Self::GaveUpWithdrawing => "gave_up_withdrawing",
            Self::UnknownExpired => "unknown_expired",
            Self::Tombstone => "tombstone",
            Self::LiveBroken => "live_broken",
            Self::Uncommitted => "uncommitted",
            #[cfg(any(feature = "postgres", feature = "sqlite"))]
            Self::CommitFound => "commit_found",
            #[cfg(any(feature = "postgres", feature = "sqlite"))]
            Self::AbortFound => "abort_found",
        };
        #[cfg(feature = "tracing")]
        {
            let operation = operation.map(tracing::field::display);
            match self {
                Self::ClientGone | Self::RecordedLate | Self::Tombstone => {
                    tracing::debug!(notice = name, operation, "idempotent request");
                }
                Self::Uncommitted => {
                    tracing::warn!(
                        notice = name,
                        operation,
                        hint = UNCOMMITTED,
                        "idempotent request"
                    );
                }
                _ => tracing::warn!(notice = name, operation, "idempotent request"),
            }
        }
        #[cfg(feature = "metrics")]
        metrics::counter!("idempotency_notices_total", "notice" => name).increment(1);
        let _ = (name, operation);
    }
}

#[cfg(feature = "tracing")]
const UNCOMMITTED: &str = "the handler answered with success, but a transaction from `begin` was not \
    committed: pass it to the store's `commit`, or end it with `rollback`";
