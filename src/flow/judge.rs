//! Decides whether a handler's response is recorded.

use std::panic::{AssertUnwindSafe, catch_unwind};

use http::{HeaderMap, StatusCode, response};

use super::owned::OwnedClaim;
use crate::{
    body::grpc,
    operation::disposition::{Disposition, HandlerChoice},
    rejection::Rejection,
    store::{Release, Store},
    telemetry::notice::Notice,
};

/// The head of a response, and what decides about it.
pub(super) struct Judged {
    pub(super) parts: response::Parts,
    pub(super) choice: HandlerChoice,
    pub(super) undone: Option<Undone>,
    /// The status as which it is to be recorded. `None` if only its trailers can say that
    /// its work is not done.
    pub(super) status: Option<StatusCode>,
}

/// The handler's transaction is not committed, so a success must not be recorded.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(super) enum Undone {
    RolledBack,
    /// The handler may have done its work in another way, or its transaction may still be
    /// open.
    Uncommitted,
}

/// Why a response is not recorded.
pub(super) enum Unrecorded {
    Release(Release),
    Unknown,
    /// The commit failed, and the handler answered as if it had not. That counts as the
    /// failure with which it should have answered: a retry runs.
    RolledBack,
    /// The outcome is unknown, and the client is refused.
    Refused(Rejection),
}

impl<S: Store> OwnedClaim<S> {
    /// Decides about a response that counts as this status. Returns `None` if it is to be
    /// recorded.
    pub(super) fn judge(&self, judged: &Judged, status: StatusCode) -> Option<Unrecorded> {
        let Judged { parts, choice, .. } = judged;
        let operation = &self.operation;
        let undone = judged.undone.filter(|_| is_success(status));
        if undone == Some(Undone::RolledBack) {
            operation.log_failure();
            let is_unknown = choice.disposition == Some(Disposition::Unknown);
            return Some(match operation.have_effects_started() || is_unknown {
                true => Unrecorded::Refused(Rejection::rolled_back_after_effects()),
                false => Unrecorded::RolledBack,
            });
        }
        if status.is_server_error() {
            operation.log_failure();
        }
        let dispositions = &self.shared.config.dispositions;
        let disposition = || match choice.disposition {
            Some(disposition) => disposition,
            None => dispositions.of(parts, status, operation.have_effects_started()),
        };
        let Ok(disposition) = catch_unwind(AssertUnwindSafe(disposition)) else {
            return Some(Unrecorded::Refused(Rejection::dispositions_panicked()));
        };
        match disposition {
            Disposition::Release(release) => Some(Unrecorded::Release(release)),
            Disposition::Unknown => Some(Unrecorded::Unknown),
            // Recording its response would promise work that is not there (I5).
            Disposition::Record if undone.is_some() => {
                Notice::Uncommitted.tell(self.shared.config.warnings(), self.id());
                Some(Unrecorded::Refused(Rejection::uncommitted()))
            }
            Disposition::Record => None,
        }
    }

    /// Decides about a response once more if its trailers change what its head says.
    pub(super) fn judge_trailers(
        &self,
        judged: &Judged,
        trailers: Option<&HeaderMap>,
    ) -> Option<Unrecorded> {
        if trailers.is_none() && judged.status.is_some() {
            return None;
        }
        let parts = &judged.parts;
        let status = grpc::status_of(parts.status, &parts.headers, trailers);
        match judged.status == Some(status) {
            true => None,
            false => self.judge(judged, status),
        }
    }
}

/// Whether a handler says that it did its work.
pub(super) fn is_success(status: StatusCode) -> bool {
    status.as_u16() < 400
}
