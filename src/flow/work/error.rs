//! Why a call of a guard returned no value.

use thiserror::Error;

use crate::{
    error::{StoreError, StoreErrorKind},
    rejection::{Rejection, RejectionKind},
};

/// Why [`Guard::run`](crate::Guard::run) returned no value.
///
/// Nothing ran under this call, unless the variant says so. If the call lost its lease while
/// its work ran, it receives what the record says then, as a later call would. No text quotes
/// the name, the input or the value.
#[derive(Clone, Debug, Error)]
#[non_exhaustive]
pub enum RunError<E> {
    /// The work ran and returned this error. The next call with the same input runs, or
    /// receives [`OutcomeUnknown`](Self::OutcomeUnknown) if effects had started.
    #[error("the work failed")]
    Failed(#[source] E),
    /// The work is running under another call. Call again later, or set
    /// [`wait`](crate::GuardBuilder::wait).
    #[error("the work is still running: call again later, or set `wait`")]
    InProgress,
    /// The work ran, under this call or an earlier one, and may or may not have had its
    /// effects. Resolve the record; see [`Recovery`](crate::Recovery).
    #[error(
        "the work ended without a result, and may have had its effects: look up what it did, \
         and `resolve` its record"
    )]
    OutcomeUnknown,
    /// The work ran under this call and returned a value, although the commit of its
    /// transaction had failed. The next call runs.
    #[error("the transaction of the work was rolled back: return the error of `commit_value`")]
    RolledBack,
    /// The name belongs to work with another input.
    #[error("the name was used with another input: use another name, or the first input")]
    Mismatch,
    /// The name belongs to a request of a layer, or to work of another version.
    #[error("the name belongs to another kind of record: use names that no layer uses")]
    OtherKind,
    /// The work is done, and its value was not kept.
    #[error("the work is done, but its value was not kept: look up its result")]
    NotReplayable,
    /// The work is done, under this call or an earlier one, and its value cannot be read
    /// here: it was recorded as another type or [`schema`](crate::GuardBuilder::schema), is
    /// sealed with a key that is not known here, or is damaged.
    #[error("the work is done, but its value cannot be read here")]
    Unreadable(#[source] StoreError),
    /// The input has no fingerprint, for this reason.
    #[error("the input cannot be compared: {0}")]
    InputInvalid(&'static str),
    /// The store cannot say whether the work ran before.
    #[error("the store failed, and nothing ran: call again later")]
    Store(#[source] StoreError),
    /// As many calls claim, wait or run as
    /// [`max_in_flight`](crate::GuardBuilder::max_in_flight) allows.
    #[error("too many calls are in flight: raise `max_in_flight`, or call again later")]
    Overloaded,
    /// The scope keeps as much in the store as its
    /// [`quota`](crate::GuardBuilder::quota) allows.
    #[error(
        "the quota of the scope is used up: call again when records have expired, or raise `quota`"
    )]
    QuotaExceeded,
    /// [`drain`](crate::Guard::drain) was called.
    #[error("this process starts no more work, because `drain` was called")]
    Draining,
}

impl<E> RunError<E> {
    pub(crate) fn of(rejection: &Rejection) -> Self {
        match rejection.kind() {
            RejectionKind::RequestInProgress => Self::InProgress,
            RejectionKind::KeyReused => Self::Mismatch,
            RejectionKind::ResponseNotReplayable => Self::NotReplayable,
            RejectionKind::Overloaded | RejectionKind::ScopeOverloaded => Self::Overloaded,
            RejectionKind::QuotaExceeded => Self::QuotaExceeded,
            RejectionKind::Draining => Self::Draining,
            RejectionKind::RolledBack if rejection.retry_after_seconds().is_some() => {
                Self::RolledBack
            }
            RejectionKind::StoreUnavailable => match rejection.cause() {
                // Of an operation that has a record.
                Some(cause)
                    if cause.kind() == StoreErrorKind::Corrupt
                        && rejection.operation().is_some() =>
                {
                    Self::Unreadable(cause.clone())
                }
                Some(_) if rejection.operation().is_some() => Self::OutcomeUnknown,
                Some(cause) => Self::Store(cause.clone()),
                None => Self::Store(StoreError::unavailable(
                    "the record changed during each attempt",
                )),
            },
            // All others are refusals after a run.
            _ => Self::OutcomeUnknown,
        }
    }
}
