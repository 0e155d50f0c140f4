//! The states of a record.

use std::time::{Duration, Instant};

use bytes::Bytes;

use super::{
    HOUR, Held, Subject, Trial, beyond,
    calls::{Call, Effect, encoded, late_response},
    fingerprint, name, response,
};
use crate::{
    key::RecordName,
    store::{Claim, ReclaimAs, Record, RecordState, Release, Token, Transitioned},
};

/// The status of a record, and whether it has expired.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct State {
    pub(super) status: Status,
    pub(super) expired: bool,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Status {
    /// There is no record.
    Absent,
    Live,
    Lapsed,
    Completed,
    Unknown,
    /// Released for the same request.
    Released,
    /// Released for any request.
    Free,
}

impl Status {
    /// This status, in a record that has not expired.
    pub(super) fn live(self) -> State {
        State {
            status: self,
            expired: false,
        }
    }

    /// This status, in an expired record.
    pub(super) fn expired(self) -> State {
        State {
            status: self,
            expired: true,
        }
    }
}

impl State {
    pub(super) fn all() -> impl Iterator<Item = Self> {
        let records = [
            Status::Live,
            Status::Lapsed,
            Status::Completed,
            Status::Unknown,
            Status::Released,
            Status::Free,
        ];
        let live = records.into_iter().map(Status::live);
        let expired = records.into_iter().map(Status::expired);
        live.chain(expired)
    }

    /// Returns whether a reclaim is granted in this state.
    pub(super) fn allows(self, reclaim_as: ReclaimAs) -> bool {
        match (reclaim_as, self.status) {
            (ReclaimAs::Takeover, Status::Lapsed) => true,
            (ReclaimAs::Rerun | ReclaimAs::Reconcile, Status::Unknown)
            | (ReclaimAs::Retry, Status::Released | Status::Free)
            | (ReclaimAs::Replace, Status::Free) => !self.expired,
            (
                ReclaimAs::Expired,
                Status::Lapsed
                | Status::Completed
                | Status::Unknown
                | Status::Released
                | Status::Free,
            ) => self.expired,
            _ => false,
        }
    }
}

/// A record in a state, and its claims.
#[derive(Debug)]
pub(super) struct Case {
    pub(super) state: State,
    /// The last claim.
    pub(super) held: Held,
    /// The claim before the last one.
    pub(super) former: Held,
}

impl<S: Subject> Trial<S> {
    /// Makes one record in each of these states. Time passes after the last one was made.
    /// No step depends on a lease that is still live.
    pub(super) async fn cases(&self, states: impl IntoIterator<Item = State>) -> Vec<Case> {
        let mut cases = Vec::new();
        for (index, state) in states.into_iter().enumerate() {
            let name = name(format!("{index} {state:?}"));
            cases.push(self.case(name, state).await);
        }
        self.lapse().await;
        cases
    }

    /// Makes one record that is in this state when its short times have passed.
    pub(super) async fn case(&self, name: RecordName, state: State) -> Case {
        let State { status, expired } = state;
        let former = self.hold(&name, HOUR, HOUR).await;
        self.release(&former, Release::SameRequest).await;
        let lease = if status == Status::Lapsed {
            S::SHORT
        } else {
            HOUR
        };
        let retention = if expired { S::SHORT } else { HOUR * 2 };
        let claim = Claim::new(fingerprint(2), lease, retention);
        let held = self.hold_again(&former, ReclaimAs::Retry, claim).await;
        match status {
            Status::Live | Status::Lapsed => {}
            Status::Absent => unreachable!("a case has a record"),
            Status::Completed => {
                self.complete(&held, response(), retention).await;
            }
            Status::Unknown => self.mark_unknown(&held, retention).await,
            Status::Released => self.release(&held, Release::SameRequest).await,
            Status::Free => self.release(&held, Release::AnyRequest).await,
        }
        Case {
            state,
            held,
            former,
        }
    }

    /// Makes `call` in every state: with a token and fence that no claim has, with those
    /// of the former claim, and with those of the last claim.
    pub(super) async fn guard_holds(&self, call: Call) {
        for case in self.cases(State::all()).await {
            let (state, held, former) = (case.state, case.held, case.former);
            let before = self.peek(&held.name).await;
            let fence = held.grant.fence;
            for (who, token, fence) in [
                ("a stranger", Token::random(), beyond(fence)),
                ("the former owner", former.token, former.grant.fence),
            ] {
                let answer = call.make(&self.store, &held.name, token, fence).await;
                let what = format!("{call:?} by {who} on {state:?}");
                superseded(answer, &what);
                self.stays(&held.name, &before, &what).await;
            }

            let answer = held.make(call, self.either(1)).await;
            let what = format!("{call:?} on {state:?}");
            match call.effect(state) {
                Effect::Refused => {
                    superseded(answer, &what);
                    self.stays(&held.name, &before, &what).await;
                }
                Effect::Repeated => {
                    applied(answer, &what);
                    self.stays(&held.name, &before, &what).await;
                }
                Effect::Becomes(status) => {
                    applied(answer, &what);
                    let after = self.peek(&held.name).await;
                    assert_eq!(status_in(&after), status, "{what}: the record is as asked");
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

    /// Asserts that nothing but the age of this record has changed.
    pub(super) async fn stays(
        &self,
        name: &RecordName,
        before: impl Into<Option<&Record>>,
        what: &str,
    ) {
        let after = self.peek(name).await;
        Self::unchanged(before.into(), after.as_ref(), what);
    }

    /// Returns the status of a record, or that there is none.
    pub(super) async fn status(&self, name: &RecordName) -> Status {
        status_in(&self.peek(name).await)
    }

    /// Asserts that a record lives and is kept for these times from its claim.
    pub(super) fn lives_for(
        record: &Record,
        began: Instant,
        lease: Duration,
        retention: Duration,
        what: &str,
    ) {
        assert!(
            record.age <= began.elapsed() + Self::grain(),
            "{what}: its age counts from the claim, and is {:?}",
            record.age
        );
        let Some(lease_left) = lease_left(record) else {
            panic!("{what}: is in progress and live for hours, and was {record:?}");
        };
        assert!(
            Self::close(record.age + lease_left, lease),
            "{what}: lives for its lease from the claim, and for {lease_left:?} more"
        );
        Self::kept_from_its_claim(record, retention, what);
    }

    /// Asserts that a record is kept for this time from its claim.
    pub(super) fn kept_from_its_claim(record: &Record, retention: Duration, what: &str) {
        let left = record.expires_in.unwrap_or_default();
        assert!(
            Self::close(record.age + left, retention),
            "{what}: is kept for {retention:?} from its claim, and for {left:?} more after {:?}",
            record.age
        );
    }

    /// Asserts that `left`, of the record `after` a call, is `time` from the call.
    pub(super) fn counts_from_now(
        before: &Record,
        after: &Record,
        left: Option<Duration>,
        time: Duration,
        what: &str,
    ) {
        let left = left.unwrap_or_else(|| panic!("{what}: {time:?} from now had ended at once"));
        assert!(
            after.age + left + Self::grain() >= before.age + time && left <= time + Self::grain(),
            "{what}: lasts for {time:?} from now, and for {left:?}"
        );
    }

    /// Asserts that nothing but the age of a record has changed.
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

    /// Whether two remaining times end at the same moment, counted from the claim. Unlike
    /// the remaining times, this does not depend on the speed of the machine.
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
pub(super) fn applied(answer: Transitioned, what: &str) {
    assert_eq!(answer, Transitioned::Applied, "{what}: is applied");
}

#[track_caller]
pub(super) fn superseded(answer: Transitioned, what: &str) {
    assert_eq!(
        answer,
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
        RecordState::Released(Release::SameRequest) => Status::Released,
        RecordState::Released(Release::AnyRequest) => Status::Free,
    }
}

/// Returns the status of a record, or `Absent` if there is none.
pub(super) fn status_in(record: &Option<Record>) -> Status {
    record.as_ref().map_or(Status::Absent, status_of)
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
