//! What the layer did with a request: for outer layers, logs and metrics.

use crate::{
    body::upload::UploadFault,
    log::{Event, Warnings, chain},
    operation::OperationId,
    rejection::RejectionKind,
    store::StoreError,
};

/// What the layer did with a guarded request, as an extension of its response.
///
/// Requests that are not guarded have none. Each outcome is one event at DEBUG
/// (feature `tracing`) and one count of the metric `idempotency_requests_total`
/// with the label `outcome` (feature `metrics`). Neither shows a key or a scope.
/// The crate's documentation lists all
/// [events and metrics](crate#logs-and-metrics).
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum Outcome {
    /// The handler ran and its response is recorded.
    Recorded,
    /// The handler ran and its key is free again.
    Released,
    /// The handler ran, or began to, and its effects are not known.
    Unknown,
    /// The handler ran and its response was streamed, because it was too large,
    /// too slow or of a streamed type.
    Streamed,
    /// The handler ran, but its response could not be recorded yet.
    Unrecorded,
    /// The handler ran without a claim, because the store could not answer or the
    /// request's body is too large.
    Unguarded,
    /// A recorded response was replayed.
    Replayed,
    /// The client left while it waited for another request to end, or while its
    /// own ran under [`Disconnect::Cancel`](crate::Disconnect::Cancel).
    Left,
    /// The inner service failed before it could be called.
    Unready,
    /// The layer answered instead of the handler.
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
            Self::Streamed => "streamed",
            Self::Unrecorded => "unrecorded",
            Self::Unguarded => "unguarded",
            Self::Replayed => "replayed",
            Self::Left => "left",
            Self::Unready => "unready",
            Self::Refused(kind) => kind.slug(),
        }
    }

    /// The one event and the one count of a guarded request.
    /// `key_id` is the id that `LogIds` give the key.
    pub(crate) fn tell(self, operation: Option<OperationId>, key_id: Option<&str>) {
        #[cfg(feature = "tracing")]
        tracing::debug!(
            target: "tower_idempotency",
            outcome = self.name(),
            operation = operation.map(tracing::field::display),
            key_id,
            "idempotent request"
        );
        #[cfg(feature = "metrics")]
        metrics::counter!(crate::metrics::REQUESTS, "outcome" => self.name()).increment(1);
        let _ = (operation, key_id);
    }
}

/// Something worth a notice besides the outcome of a request.
#[derive(Clone, Copy, Debug)]
pub(crate) enum Notice {
    /// The client left before its answer was ready.
    ClientGone,
    /// Another owner's claim superseded this one.
    Superseded,
    /// A stored record cannot be read.
    Corrupt,
    /// A late write reached the store after all.
    RecordedLate,
    /// A late write was given up: the outcome stays unknown.
    GaveUpRecording(GaveUp),
    /// A claim in doubt was not taken back: if it is in the store, its lease
    /// lapses there.
    GaveUpWithdrawing(GaveUp),
    /// An outcome that was still unknown has expired, and its key runs again.
    UnknownExpired,
    /// A streamed response ended, and a tombstone is recorded for it.
    Tombstone,
    /// A streamed response broke off, or ended with a gRPC error: the outcome is unknown.
    StreamBroken,
    /// The handler answered with success, and its upload was not verified.
    UploadUnverified(UploadFault),
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

/// Why a write in the background was given up.
#[derive(Clone, Copy, Debug)]
pub(crate) enum GaveUp {
    TimedOut,
    TooMany,
    TooManyBytes,
}

impl Notice {
    pub(crate) fn tell(self, warnings: &Warnings, operation: Option<OperationId>) {
        self.tell_because(warnings, operation, None);
    }

    /// One event and one count. The event is a warning if an operator has to know
    /// of it, unless `warnings` suppresses it.
    pub(crate) fn tell_because(
        self,
        warnings: &Warnings,
        operation: Option<OperationId>,
        cause: Option<&StoreError>,
    ) {
        self.log(warnings, operation, cause);
        #[cfg(feature = "metrics")]
        metrics::counter!(crate::metrics::NOTICES, "notice" => self.name()).increment(1);
    }

    fn log(self, warnings: &Warnings, operation: Option<OperationId>, cause: Option<&StoreError>) {
        let warning = self.warning();
        let reason = self.reason().unwrap_or_default();
        let suppressed = warning.and_then(|_| warnings.permit(self.name(), reason));
        let (Some((message, hint)), Some(suppressed)) = (warning, suppressed) else {
            #[cfg(feature = "tracing")]
            tracing::debug!(
                target: "tower_idempotency",
                notice = self.name(),
                operation = operation.map(tracing::field::display),
                "idempotent request"
            );
            return;
        };
        let message = match self.reason() {
            Some(reason) => format!("{message}: {reason}"),
            None => message.to_owned(),
        };
        let event = Event {
            message: &message,
            notice: Some(self.name()),
            kind: cause.map(|cause| cause.kind().name()),
            error: cause.map(|cause| chain(cause)),
            hint,
            operation,
            suppressed,
        };
        event.log();
    }

    fn name(self) -> &'static str {
        match self {
            Self::ClientGone => "client-gone",
            Self::Superseded => "superseded",
            Self::Corrupt => "corrupt",
            Self::RecordedLate => "recorded-late",
            Self::GaveUpRecording(_) => "gave-up-recording",
            Self::GaveUpWithdrawing(_) => "gave-up-withdrawing",
            Self::UnknownExpired => "unknown-expired",
            Self::Tombstone => "tombstone",
            Self::StreamBroken => "stream-broken",
            Self::UploadUnverified(_) => "upload-unverified",
            Self::Uncommitted => "uncommitted",
            #[cfg(any(feature = "postgres", feature = "sqlite"))]
            Self::CommitFound => "commit-found",
            #[cfg(any(feature = "postgres", feature = "sqlite"))]
            Self::AbortFound => "abort-found",
        }
    }

    /// The warning for an operator, and its remedy.
    fn warning(self) -> Option<(&'static str, Option<&'static str>)> {
        Some(match self {
            // The refusal of an unreadable record is a warning with its cause.
            Self::ClientGone | Self::RecordedLate | Self::Tombstone | Self::Corrupt => return None,
            Self::Superseded => (
                "a run has lost its key: another request or an operator ended its claim, and its \
                 response is not recorded",
                Some("if it happens often, raise `lease`, or find out why leases are not renewed"),
            ),
            Self::GaveUpRecording(_) => (
                "recording of an outcome given up",
                Some(
                    "retries get 409 outcome-unknown: look up what was done, and `resolve` the \
                     record",
                ),
            ),
            Self::GaveUpWithdrawing(_) => (
                "withdrawal of a claim given up",
                Some(
                    "if the store has the claim, its outcome is unknown once its lease lapses, \
                     although nothing ran: `resolve` it as not happened",
                ),
            ),
            Self::UnknownExpired => (
                "a record has expired while its outcome was unknown, and its key runs again",
                Some("`resolve` unknown outcomes in time, or raise `unknown_retention`"),
            ),
            Self::StreamBroken => (
                "a response that was sent as it came broke off or ended with a gRPC error, or its \
                 client left: its outcome is unknown",
                Some(RESOLVE),
            ),
            Self::UploadUnverified(_) => (
                "a handler answered with success although its upload was not verified: its \
                 outcome is unknown",
                Some(
                    "let the handler read the body to its end and fail with it; look up what it \
                     did, and `resolve` the record",
                ),
            ),
            Self::Uncommitted => (
                "the handler answered with success, but a transaction from `begin` was not \
                 committed: its outcome is unknown",
                Some("pass it to the store's `commit`, or end it with `rollback`"),
            ),
            #[cfg(any(feature = "postgres", feature = "sqlite"))]
            Self::CommitFound => (
                "COMMIT was not answered, and its record shows that it succeeded",
                None,
            ),
            #[cfg(any(feature = "postgres", feature = "sqlite"))]
            Self::AbortFound => (
                "COMMIT was not answered, and its record shows that it was rolled back",
                None,
            ),
        })
    }

    fn reason(self) -> Option<&'static str> {
        match self {
            Self::GaveUpRecording(gave_up) | Self::GaveUpWithdrawing(gave_up) => {
                Some(match gave_up {
                    GaveUp::TimedOut => "it did not succeed within `late_recording_timeout`",
                    GaveUp::TooMany => {
                        "as many late writes as `max_in_flight` allows are under way"
                    }
                    GaveUp::TooManyBytes => {
                        "the responses of late writes have reached `max_late_recording_bytes`"
                    }
                })
            }
            Self::UploadUnverified(fault) => Some(match fault {
                UploadFault::WrongDigest => "it is not the one that `Content-Digest` declares",
                UploadFault::TooLarge { .. } => "it is larger than `max_upload`",
                UploadFault::TooSlow => "it came more slowly than `request_body_timeout` allows",
                UploadFault::Overloaded => "`max_buffered_bytes` are held in memory",
                UploadFault::Broken(_) => "it broke off",
                UploadFault::Unread => "it was not read to its end",
            }),
            _ => None,
        }
    }
}

/// The remedy for an unknown outcome.
pub(crate) const RESOLVE: &str = "look up what the handler did, and `resolve` the record: until then retries get 409 \
     outcome-unknown";

#[cfg(test)]
mod tests {
    #[test]
    fn documentation_lists_every_outcome_and_notice() {
        let source = include_str!("outcome.rs");
        let documentation = include_str!("lib.rs");
        let names: Vec<_> = source
            .lines()
            .filter_map(|line| line.split_once(" => \"")?.1.strip_suffix("\","))
            .filter(|name| !name.contains(' '))
            .collect();
        assert!(names.len() > 20, "{names:?}");
        for name in names {
            assert!(documentation.contains(&format!("`{name}`")), "{name}");
        }
    }
}
