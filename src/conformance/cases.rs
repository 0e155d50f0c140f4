//! Records in each state, and what they keep and become.

use std::time::{Duration, Instant};

use super::{
    HOUR, Held, Subject, Trial, beyond,
    calls::{Call, Effect, encoded, late_response},
    fingerprint, name, response,
    states::{
        State, Status, applied, lease_left, response_of, same_claim, status_in, status_of,
        superseded,
    },
};
use crate::{
    key::RecordName,
    store::{Claim, ReclaimAs, Record, RecordState, Release, Token},
};

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
    ///
    /// The lease may be longer by the time since `began`: a store that observes leases counts
    /// one from the first time that it sees the record.
    pub(super) fn lives_for(
        record: &Record,
        began: Instant,
        lease: Duration,
        retention: Duration,
        what: &str,
    ) {
        let since = began.elapsed() + Self::grain();
        assert!(
            record.age <= since,
            "{what}: its age counts from the claim, and is {:?}",
            record.age
        );
        let Some(lease_left) = lease_left(record) else {
            panic!("{what}: is in progress and live for hours, and was {record:?}");
        };
        let lives = record.age + lease_left;
        assert!(
            lives + Self::grain() >= lease && lives <= lease + since,
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
