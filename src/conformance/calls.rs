//! The guarded calls, and the effect of each in each state.

use std::time::Duration;

use bytes::Bytes;
use http::Response;

use super::{
    HOUR, good,
    states::{State, Status, same_claim, status_of},
};
use crate::{
    key::RecordName,
    store::{
        Completion, Fence, Record, Release, Store, Token, Transitioned,
        admin::{RecordedResponse, Resolution},
    },
};

/// A call with a guard: a token or a fence.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Call {
    Renew,
    Complete,
    ReleaseForSame,
    ReleaseForAny,
    MarkByOwner,
    MarkLapsed,
    ResolveHappened,
    ResolveDidNotHappen,
    Forget,
}

/// The effect of a call with the token or fence of the last claim.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Effect {
    /// Refused. The record is unchanged.
    Refused,
    /// Applied. The record is unchanged.
    Repeated,
    /// Applied. The record has this status.
    Becomes(Status),
}

impl Call {
    pub(super) const ALL: [Self; 9] = [
        Self::Renew,
        Self::Complete,
        Self::ReleaseForSame,
        Self::ReleaseForAny,
        Self::MarkByOwner,
        Self::MarkLapsed,
        Self::ResolveHappened,
        Self::ResolveDidNotHappen,
        Self::Forget,
    ];

    pub(super) async fn make(
        self,
        store: &impl Store,
        name: &RecordName,
        token: Token,
        fence: Fence,
    ) -> Transitioned {
        good(match self {
            Self::Renew => store.renew(name, token, HOUR * 3).await,
            Self::Complete => {
                let completion = Completion::new(late_response(), HOUR * 3, Duration::ZERO);
                store.complete(name, token, &completion).await
            }
            Self::ReleaseForSame => store.release(name, token, Release::SameRequest).await,
            Self::ReleaseForAny => store.release(name, token, Release::AnyRequest).await,
            Self::MarkByOwner => store.mark_unknown(name, token, HOUR * 3).await,
            Self::MarkLapsed => store.mark_lapsed(name, fence, HOUR * 3).await,
            Self::ResolveHappened => {
                store
                    .resolve(name, fence, &happened(b"another response"), HOUR)
                    .await
            }
            Self::ResolveDidNotHappen => {
                let resolution = Resolution::DidNotHappen;
                store.resolve(name, fence, &resolution, HOUR).await
            }
            Self::Forget => store.forget(name, fence).await,
        })
    }

    pub(super) fn effect(self, state: State) -> Effect {
        let in_progress = matches!(state.status, Status::Live | Status::Lapsed);
        match (self, state.status) {
            (_, Status::Absent) => Effect::Refused,
            (Self::Forget, _) => Effect::Becomes(Status::Free),
            (Self::Renew, _) if in_progress => Effect::Becomes(Status::Live),
            (Self::Complete, Status::Completed) => Effect::Repeated,
            (Self::Complete, Status::Unknown) => Effect::Becomes(Status::Completed),
            (Self::Complete, _) if in_progress => Effect::Becomes(Status::Completed),
            (Self::ReleaseForSame | Self::ReleaseForAny, Status::Released | Status::Free) => {
                Effect::Repeated
            }
            (Self::ReleaseForSame, _) if in_progress => Effect::Becomes(Status::Released),
            (Self::ReleaseForAny, _) if in_progress => Effect::Becomes(Status::Free),
            (Self::MarkByOwner | Self::MarkLapsed, Status::Unknown) => Effect::Repeated,
            (Self::MarkByOwner, _) if in_progress => Effect::Becomes(Status::Unknown),
            (Self::MarkLapsed, Status::Lapsed) => Effect::Becomes(Status::Unknown),
            (Self::ResolveHappened, Status::Unknown | Status::Lapsed) => {
                Effect::Becomes(Status::Completed)
            }
            (Self::ResolveDidNotHappen, Status::Unknown | Status::Lapsed) => {
                Effect::Becomes(Status::Released)
            }
            _ => Effect::Refused,
        }
    }

    /// Asserts that the claim stays the same, except for the token of a record that was
    /// forgotten or resolved as happened.
    pub(super) fn leaves_the_claim(self, before: &Record, after: &Record, what: &str) {
        let ends_the_claim = match self {
            Self::ResolveHappened => status_of(after) == Status::Completed,
            Self::Forget => status_of(after) == Status::Free,
            _ => false,
        };
        assert_eq!(
            before.token == after.token,
            !ends_the_claim,
            "{what}: the token stays, and changes only if it happened or was forgotten"
        );
        let before = &Record {
            token: after.token,
            ..before.clone()
        };
        same_claim(before, after, what);
    }
}

/// Returns the resolution of an operation that happened, with a response of these bytes.
pub(super) fn happened(body: &[u8]) -> Resolution {
    Resolution::Happened(recorded(body))
}

/// Returns what a store keeps of a resolution by [`happened`].
pub(super) fn encoded(body: &[u8]) -> Bytes {
    recorded(body).encode()
}

fn recorded(body: &[u8]) -> RecordedResponse {
    RecordedResponse::new(Response::new(Bytes::copy_from_slice(body)))
        .expect("200 is a final status")
}

/// The response in calls, which differs from the one that is kept.
pub(super) fn late_response() -> Bytes {
    Bytes::from_static(b"another response")
}
