//! What the layer tells operators besides the outcome of a request.

use crate::{
    body::upload::UploadFault,
    error::{StoreError, StoreErrorKind},
    key::OperationId,
    telemetry::log::{Event, Warnings, chain},
};

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
        metrics::counter!(crate::telemetry::metrics::NOTICES, "notice" => self.name()).increment(1);
    }

    /// Tells that a record cannot be read, if this is the error of one.
    pub(crate) fn tell_if_corrupt(
        warnings: &Warnings,
        error: &StoreError,
        operation: Option<OperationId>,
    ) {
        if error.kind() == StoreErrorKind::Corrupt {
            Self::Corrupt.tell(warnings, operation);
        }
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
                UploadFault::TooSlow { .. } => {
                    "it came more slowly than `request_body_timeout` allows"
                }
                UploadFault::Overloaded => "`max_buffered_bytes` are held in memory",
                UploadFault::Broken(_) => "it broke off",
                UploadFault::Unread => "it was not read to its end",
            }),
            _ => None,
        }
    }
}

/// The remedy for an unknown outcome.
const RESOLVE: &str = "look up what the handler did, and `resolve` the record: until then retries get 409 \
     outcome-unknown";
