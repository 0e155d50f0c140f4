//! Every state that a record can be in, every call with a guard, and what each
//! call does in each state.

use std::time::Duration;

use bytes::Bytes;
use http::Response;

use super::{HOUR, Held, Subject, Trial, beyond, fingerprint, good, name, response};
use crate::{
    Fence, RecordName, Store, Token,
    store::{
        Claim, Completion, MarkedBy, ReclaimAs, Record, RecordState, Release, Transitioned,
        admin::{RecordedResponse, Resolution},
    },
};

/// What became of a record's last claim, and whether its time is over.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Situation {
    pub(super) status: Status,
    pub(super) expired: bool,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Status {
    /// Forgotten.
    Absent,
    Live,
    Lapsed,
    Completed,
    Unknown,
    Bound,
    Freed,
}

impl Situation {
    pub(super) fn all() -> impl Iterator<Item = Self> {
        let records = [false, true].into_iter().flat_map(|expired| {
            [
                Status::Live,
                Status::Lapsed,
                Status::Completed,
                Status::Unknown,
                Status::Bound,
                Status::Freed,
            ]
            .map(|status| Self { status, expired })
        });
        records.chain([Self {
            status: Status::Absent,
            expired: false,
        }])
    }

    /// Which reclaims are granted here.
    pub(super) fn allows(self, reclaim_as: ReclaimAs) -> bool {
        match (reclaim_as, self.status) {
            (ReclaimAs::Takeover, Status::Lapsed) => true,
            (ReclaimAs::Rerun | ReclaimAs::Reconcile, Status::Unknown)
            | (ReclaimAs::Retry, Status::Bound | Status::Freed)
            | (ReclaimAs::Replace, Status::Freed) => !self.expired,
            (
                ReclaimAs::Expired,
                Status::Lapsed
                | Status::Completed
                | Status::Unknown
                | Status::Bound
                | Status::Freed,
            ) => self.expired,
            _ => false,
        }
    }
}

/// A record that was brought into a situation, and who may do what to it.
#[derive(Debug)]
pub(super) struct Case {
    pub(super) situation: Situation,
    /// Its last claim.
    pub(super) held: Held,
    /// The claim before, which has lost every right.
    pub(super) former: Held,
}

/// A call that is guarded by a token or a fence.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Call {
    Renew,
    Complete,
    ReleaseBound,
    ReleaseFreed,
    MarkAsOwner,
    MarkAsWitness,
    ResolveHappened,
    ResolveDidNotHappen,
    Forget,
}

/// What a call does whose token or fence is right.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Effect {
    /// Superseded, and the record as it was.
    Refused,
    /// Applied, and the record as it was.
    Repeated,
    /// Applied, and the record like this.
    Becomes(Status),
}

impl Call {
    pub(super) const ALL: [Self; 9] = [
        Self::Renew,
        Self::Complete,
        Self::ReleaseBound,
        Self::ReleaseFreed,
        Self::MarkAsOwner,
        Self::MarkAsWitness,
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
            Self::ReleaseBound => store.release(name, token, Release::SameRequest).await,
            Self::ReleaseFreed => store.release(name, token, Release::AnyRequest).await,
            Self::MarkAsOwner => {
                let owner = MarkedBy::Owner(token);
                store.mark_unknown(name, owner, HOUR * 3).await
            }
            Self::MarkAsWitness => {
                let marked_by = MarkedBy::Lapsed(fence);
                store.mark_unknown(name, marked_by, HOUR * 3).await
            }
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

    pub(super) fn effect(self, situation: Situation) -> Effect {
        let in_progress = matches!(situation.status, Status::Live | Status::Lapsed);
        match (self, situation.status) {
            (_, Status::Absent) => Effect::Refused,
            (Self::Forget, _) => Effect::Becomes(Status::Absent),
            (Self::Renew, _) if in_progress => Effect::Becomes(Status::Live),
            (Self::Complete, Status::Completed) => Effect::Repeated,
            (Self::Complete, Status::Unknown) => Effect::Becomes(Status::Completed),
            (Self::Complete, _) if in_progress => Effect::Becomes(Status::Completed),
            (Self::ReleaseBound | Self::ReleaseFreed, Status::Bound | Status::Freed) => {
                Effect::Repeated
            }
            (Self::ReleaseBound, _) if in_progress => Effect::Becomes(Status::Bound),
            (Self::ReleaseFreed, _) if in_progress => Effect::Becomes(Status::Freed),
            (Self::MarkAsOwner | Self::MarkAsWitness, Status::Unknown) => Effect::Repeated,
            (Self::MarkAsOwner, _) if in_progress => Effect::Becomes(Status::Unknown),
            (Self::MarkAsWitness, Status::Lapsed) => Effect::Becomes(Status::Unknown),
            (Self::ResolveHappened, Status::Unknown) => Effect::Becomes(Status::Completed),
            (Self::ResolveDidNotHappen, Status::Unknown) => Effect::Becomes(Status::Bound),
            _ => Effect::Refused,
        }
    }
}

impl Call {
    /// The claim stays what it is, but that an operator's word ends the rights
    /// of its owner.
    pub(super) fn leaves_the_claim(self, before: &Record, after: &Record, what: &str) {
        let resolved = self == Self::ResolveHappened && status_of(after) == Status::Completed;
        assert_eq!(
            before.token == after.token,
            !resolved,
            "{what}: the token stays, and is nobody's once it happened"
        );
        let before = &Record {
            token: after.token,
            ..before.clone()
        };
        same_claim(before, after, what);
    }
}

impl<S: Subject> Trial<S> {
    /// One record in each of these situations. Time passes only after the last
    /// one was made, and no step minds if a lease has lapsed before.
    pub(super) async fn cases(&self, situations: impl Iterator<Item = Situation>) -> Vec<Case> {
        let mut cases = Vec::new();
        for (index, situation) in situations.enumerate() {
            let name = name(format!("{index} {situation:?}"));
            cases.push(self.case(name, situation).await);
        }
        self.lapse().await;
        cases
    }

    /// One record in this situation, once what is short has lapsed.
    pub(super) async fn case(&self, name: RecordName, situation: Situation) -> Case {
        let Situation { status, expired } = situation;
        let former = self.hold(&name, HOUR, HOUR).await;
        let released = self
            .store
            .release(&name, former.token, Release::SameRequest);
        applied(good(released.await), "release: by the owner is applied");
        let lease = if status == Status::Lapsed {
            S::SHORT
        } else {
            HOUR
        };
        let retention = if expired { S::SHORT } else { HOUR * 2 };
        let claim = Claim::new(fingerprint(2), lease, retention);
        let held = self.hold_again(&former, ReclaimAs::Retry, claim).await;
        let settlement = match status {
            Status::Live | Status::Lapsed => Ok(Transitioned::Applied),
            Status::Absent => self.store.forget(&name, held.grant.fence).await,
            Status::Completed => {
                let completion = Completion::new(response(), retention, Duration::ZERO);
                self.store.complete(&name, held.token, &completion).await
            }
            Status::Unknown => {
                let owner = MarkedBy::Owner(held.token);
                self.store.mark_unknown(&name, owner, retention).await
            }
            Status::Bound => {
                self.store
                    .release(&name, held.token, Release::SameRequest)
                    .await
            }
            Status::Freed => {
                self.store
                    .release(&name, held.token, Release::AnyRequest)
                    .await
            }
        };
        applied(
            good(settlement),
            "by the owner of a record in progress, every call is applied",
        );
        Case {
            situation,
            held,
            former,
        }
    }

    /// Makes `call` in every situation: by strangers, by the former owner, and
    /// with the right token and fence.
    pub(super) async fn guard_holds(&self, call: Call) {
        for case in self.cases(Situation::all()).await {
            let Case {
                situation,
                held,
                former,
            } = case;
            let before = self.peek(&held.name).await;
            let fence = held.grant.fence;
            for (who, token, fence) in [
                ("a stranger", Token::random(), beyond(fence)),
                ("the former owner", former.token, former.grant.fence),
            ] {
                let settlement = call.make(&self.store, &held.name, token, fence).await;
                let what = format!("{call:?} by {who} on {situation:?}");
                superseded(settlement, &what);
                Self::unchanged(before.as_ref(), self.peek(&held.name).await.as_ref(), &what);
            }

            let settlement = call
                .make(self.either(1), &held.name, held.token, fence)
                .await;
            let after = self.peek(&held.name).await;
            let what = format!("{call:?} on {situation:?}");
            match call.effect(situation) {
                Effect::Refused => {
                    superseded(settlement, &what);
                    Self::unchanged(before.as_ref(), after.as_ref(), &what);
                }
                Effect::Repeated => {
                    applied(settlement, &what);
                    Self::unchanged(before.as_ref(), after.as_ref(), &what);
                }
                Effect::Becomes(status) => {
                    applied(settlement, &what);
                    assert_eq!(
                        after.as_ref().map_or(Status::Absent, status_of),
                        status,
                        "{what}: the record is as asked"
                    );
                    if let (Some(before), Some(after)) = (&before, &after) {
                        call.leaves_the_claim(before, after, &what);
                        if let RecordState::Completed { response } = &after.state {
                            let given = match call {
                                Call::ResolveHappened => encoded(b"another response"),
                                _ => late_response(),
                            };
                            assert_eq!(*response, given, "{what}: is what was given");
                        }
                    }
                }
            }
        }
    }

    /// Nothing that the record says has changed but its age.
    pub(super) fn unchanged(before: Option<&Record>, after: Option<&Record>, what: &str) {
        match (before, after) {
            (None, None) => {}
            (Some(before), Some(after)) => {
                same_claim(before, after, what);
                assert!(
                    status_of(before) == status_of(after)
                        && response_of(before) == response_of(after)
                        && Self::same_end(before, before.expires_in, after, after.expires_in)
                        && Self::same_end(before, lease_left(before), after, lease_left(after)),
                    "{what}: changes nothing, and made {after:?} of {before:?}"
                );
            }
            _ => panic!("{what}: changes nothing, and made {after:?} of {before:?}"),
        }
    }

    /// Whether two times that are left end at the same moment, counted from the
    /// same claim: right on the slowest machine, unlike the times themselves.
    fn same_end(
        before: &Record,
        left_before: Option<Duration>,
        after: &Record,
        left_after: Option<Duration>,
    ) -> bool {
        match (left_before, left_after) {
            (Some(one), Some(other)) => Self::close(before.age + one, after.age + other),
            (one, other) => one.is_none() == other.is_none(),
        }
    }
}

#[track_caller]
pub(super) fn applied(settlement: Transitioned, what: &str) {
    assert_eq!(settlement, Transitioned::Applied, "{what}: is applied");
}

#[track_caller]
pub(super) fn superseded(settlement: Transitioned, what: &str) {
    assert_eq!(
        settlement,
        Transitioned::Superseded,
        "{what}: its guard does not hold"
    );
}

pub(super) fn same_claim(before: &Record, after: &Record, what: &str) {
    assert!(
        before.operation == after.operation
            && before.fence == after.fence
            && before.attempt == after.attempt
            && before.takeovers == after.takeovers
            && before.fingerprint == after.fingerprint
            && before.token == after.token,
        "{what}: the claim stays what it is, and {before:?} became {after:?}"
    );
}

pub(super) fn status_of(record: &Record) -> Status {
    match &record.state {
        RecordState::InProgress {
            lease_left: Some(_),
        } => Status::Live,
        RecordState::InProgress { lease_left: None } => Status::Lapsed,
        RecordState::Completed { .. } => Status::Completed,
        RecordState::Unknown => Status::Unknown,
        RecordState::Released(Release::SameRequest) => Status::Bound,
        RecordState::Released(Release::AnyRequest) => Status::Freed,
    }
}

pub(super) fn lease_left(record: &Record) -> Option<Duration> {
    match record.state {
        RecordState::InProgress { lease_left } => lease_left,
        _ => None,
    }
}

pub(super) fn response_of(record: &Record) -> Option<&Bytes> {
    match &record.state {
        RecordState::Completed { response } => Some(response),
        _ => None,
    }
}

/// The resolution of an operation that happened, with a response of these bytes.
pub(super) fn happened(body: &[u8]) -> Resolution {
    Resolution::Happened(recorded(body))
}

/// What a store keeps of a resolution by [`happened`].
pub(super) fn encoded(body: &[u8]) -> Bytes {
    recorded(body).encode()
}

fn recorded(body: &[u8]) -> RecordedResponse {
    RecordedResponse::new(Response::new(Bytes::copy_from_slice(body)))
        .expect("200 is a final status")
}

/// What [`Call`]s bring, other than what is there already.
fn late_response() -> Bytes {
    Bytes::from_static(b"another response")
}
