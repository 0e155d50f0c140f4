//! Why a transaction did not begin, or was not committed.

use crate::{operation::Transacted, rejection::Rejection, telemetry::log::LogLimit};

/// The kinds of [`CommitError`](crate::CommitError).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum CommitErrorKind {
    /// 503: no connection was free in time, the database cannot be reached, or it
    /// does not accept statements. No transaction began, or it was rolled back.
    Unavailable,
    /// 503: no transaction began, because the operation's lease is lost. Another
    /// request may be running the operation.
    LeaseLost,
    /// 500: it was rolled back. An earlier statement had failed, a constraint was
    /// violated, or the database ended a deadlock or a serialization failure. The
    /// handler may begin another transaction; otherwise a retry runs.
    Aborted,
    /// 500: it was rolled back, because another claim has superseded the operation's.
    /// The client receives the response of that claim.
    Superseded,
    /// 503: COMMIT was not answered, and the record did not show its outcome in
    /// time. The outcome is unknown.
    Unknown,
    /// 500: it was rolled back, because the response cannot be recorded: it is
    /// streamed, too large or too slow, or it has trailers.
    ResponseNotKept,
    /// 500: it was rolled back, because it is not a transaction on the store's
    /// database.
    OtherDatabase,
    /// 500: it was rolled back, because it is not READ COMMITTED. In another isolation
    /// level, a heartbeat during the transaction would make its completion fail.
    Isolation,
}

impl CommitErrorKind {
    /// Returns a short name for metrics and logs.
    #[must_use]
    pub fn name(self) -> &'static str {
        match self {
            Self::Unavailable => "unavailable",
            Self::LeaseLost => "lease-lost",
            Self::Aborted => "aborted",
            Self::Superseded => "superseded",
            Self::Unknown => "unknown",
            Self::ResponseNotKept => "response-not-kept",
            Self::OtherDatabase => "other-database",
            Self::Isolation => "isolation",
        }
    }

    pub(super) fn limit(self) -> &'static LogLimit {
        static LIMITS: [LogLimit; 8] = [const { LogLimit::new() }; 8];
        &LIMITS[self as usize]
    }

    /// Returns what the error says before its cause.
    pub(super) fn reason(self) -> &'static str {
        match self {
            Self::Unavailable => "the database is unavailable",
            Self::LeaseLost => "no transaction began, because the operation's lease is lost",
            Self::Aborted => "the transaction was rolled back",
            Self::Superseded => {
                "the transaction was rolled back, because another claim has superseded this one"
            }
            Self::Unknown => "it is not known whether the transaction was committed",
            Self::ResponseNotKept => {
                "the transaction was rolled back, because its response cannot be recorded"
            }
            Self::OtherDatabase => {
                "the transaction was rolled back, because it is not on the store's database"
            }
            Self::Isolation => {
                "the transaction was rolled back, because it is not READ COMMITTED: begin it with `store.begin`"
            }
        }
    }

    /// Returns the refusal that its response shows.
    pub(super) fn rejection(self) -> Rejection {
        match self {
            Self::Unavailable | Self::LeaseLost => Rejection::no_transaction(),
            Self::Unknown => Rejection::commit_unknown(),
            Self::Aborted => Rejection::aborted(),
            Self::Superseded | Self::ResponseNotKept | Self::OtherDatabase | Self::Isolation => {
                Rejection::not_committed()
            }
        }
    }

    pub(super) fn transacted(self) -> Transacted {
        match self {
            Self::Superseded => Transacted::Superseded,
            Self::Unknown => Transacted::Unknown,
            _ => Transacted::Aborted,
        }
    }
}
