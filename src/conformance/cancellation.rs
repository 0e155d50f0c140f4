use std::{future::poll_fn, pin::pin, task::Poll, time::Duration};

use super::{
    CROWD, HOUR, Held, Subject, Trial,
    calls::{Call, Effect},
    good, long_claim, name,
    states::{Status, applied, response_of, status_in, status_of},
};
use crate::{
    key::RecordName,
    store::{Claim, Claimed, ReclaimAs, Release, Store, Transitioned, admin::Filter},
};

/// # Dropped calls
///
/// Each call is dropped after its first poll, its second, and so on. Then the
/// record is in one of the two states that are legal, the same call can be made
/// again, and the store works as before.
impl<S: Subject> Trial<S> {
    /// The name is acquired with its whole claim, or free.
    pub async fn i15_dropped_claim_happens_or_does_not(&self) {
        for polls in POLLS {
            let name = name(polls);
            let claim = long_claim(1);
            dropped(polls, self.store.claim(&name, &claim)).await;
            if let Some(record) = self.peek(&name).await {
                assert!(
                    record.token == claim.token && status_of(&record) == Status::Live,
                    "claim: dropped, it leaves its whole claim or nothing, and not {record:?}"
                );
            }
            match in_time(self.store.claim(&name, &claim)).await {
                Claimed::Acquired(_) => {}
                Claimed::Occupied(record) => assert!(
                    record.token == claim.token,
                    "claim: dropped and asked again, it finds its own token"
                ),
                Claimed::Vanished => panic!("claim: a record that is not removed stays"),
            }
            self.belongs_to(&name, &claim).await;
        }
        self.works_as_before().await;
    }

    /// The record is claimed again, or unchanged.
    pub async fn i15_dropped_reclaim_happens_or_does_not(&self) {
        for polls in POLLS {
            let held = self.hold(&name(polls), HOUR, HOUR).await;
            self.release(&held, Release::SameRequest).await;
            let claim = long_claim(2);
            let (name, seen) = (&held.name, held.grant.fence);
            let reclaim = || self.store.reclaim(name, seen, ReclaimAs::Retry, &claim);
            dropped(polls, reclaim()).await;
            // `None` if the dropped call was granted. The record tells by its token.
            let _ = in_time(reclaim()).await;
            self.belongs_to(name, &claim).await;
            let record = self.record(name).await;
            assert!(
                record.attempt == 2 && record.fence > seen,
                "reclaim: dropped and asked again, it is granted once, and not {record:?}"
            );
        }
        self.works_as_before().await;
    }

    checks! {
        /// The lease is extended, or unchanged.
        pub async fn i15_dropped_renew_happens_or_does_not(&self)
            => self.happens_or_does_not(Call::Renew, Status::Lapsed);

        /// The record is completed with its whole response, or unchanged.
        pub async fn i15_dropped_complete_happens_or_does_not(&self)
            => self.happens_or_does_not(Call::Complete, Status::Live);

        /// The record is released, or unchanged.
        pub async fn i15_dropped_release_happens_or_does_not(&self)
            => self.happens_or_does_not(Call::ReleaseForAny, Status::Live);

        /// The record is unknown, or unchanged.
        pub async fn i15_dropped_mark_unknown_happens_or_does_not(&self)
            => self.happens_or_does_not(Call::MarkLapsed, Status::Lapsed);

        /// The record is resolved, or unchanged.
        pub async fn i15_dropped_resolve_happens_or_does_not(&self)
            => self.happens_or_does_not(Call::ResolveHappened, Status::Unknown);

        /// The record is forgotten, or unchanged.
        pub async fn i15_dropped_forget_happens_or_does_not(&self)
            => self.happens_or_does_not(Call::Forget, Status::Completed);
    }

    async fn happens_or_does_not(&self, call: Call, status: Status) {
        let state = status.live();
        let Effect::Becomes(after) = call.effect(state) else {
            unreachable!("{call:?} changes {state:?}");
        };
        let cases = self.cases(POLLS.map(|_| state)).await;
        for (case, polls) in cases.into_iter().zip(POLLS) {
            let Held {
                name, token, grant, ..
            } = case.held;
            let make = || call.make(&self.store, &name, token, grant.fence);
            let before = self.record(&name).await;
            let what = format!("{call:?}, dropped after {polls} polls");
            dropped(polls, make()).await;
            let seen = self.peek(&name).await;
            let status_seen = status_in(&seen);
            assert!(
                status_seen == status || status_seen == after,
                "{what}: happens or does not, and made {seen:?}"
            );
            if let Some(seen) = &seen {
                call.leaves_the_claim(&before, seen, &what);
            }

            let answer = tokio::time::timeout(PATIENCE, make())
                .await
                .unwrap_or_else(|_| panic!("{what}: does not block the next call"));
            // Without a token, a repeated call is not recognised.
            let once = call == Call::ResolveHappened;
            assert!(
                once || answer == Transitioned::Applied,
                "{what}: asked again with the same token it is applied"
            );
            let record = self.peek(&name).await;
            assert_eq!(
                status_in(&record),
                after,
                "{what}: asked again the record is as asked"
            );
            assert!(
                after != Status::Completed
                    || record.as_ref().is_some_and(|record| {
                        response_of(record).is_some_and(|response| !response.is_empty())
                    }),
                "{what}: keeps the whole response"
            );
        }
        self.works_as_before().await;
    }

    /// Each record is swept, or unchanged.
    pub async fn i15_dropped_sweep_happens_or_does_not(&self) {
        let states = [Self::swept(), Status::Lapsed].map(Status::expired);
        let cases = self
            .cases(states.into_iter().cycle().take(POLLS.count() * 4))
            .await;
        for polls in POLLS {
            dropped(polls, self.store.purge_expired(3, HOUR)).await;
        }
        while in_time(self.store.purge_expired(100, HOUR)).await.touched() > 0 {}
        for case in cases {
            assert_eq!(
                self.status(&case.held.name).await,
                if case.state.status == Status::Lapsed {
                    Status::Unknown
                } else {
                    Status::Absent
                },
                "purge_expired: dropped and asked again, it did what one does"
            );
        }
        self.works_as_before().await;
    }

    /// Calls that only read change nothing.
    pub async fn i15_dropped_read_or_list_changes_nothing(&self) {
        let held = self.hold(&name("looked at"), HOUR, HOUR).await;
        let before = self.peek(&held.name).await;
        for polls in POLLS {
            dropped(polls, self.store.read(&held.name)).await;
            dropped(
                polls,
                self.store
                    .list(&Filter::in_progress_for(Duration::ZERO), None, 10),
            )
            .await;
            let after = in_time(self.store.read(&held.name)).await;
            Self::unchanged(before.as_ref(), after.as_ref(), "a dropped read or list");
        }
        self.works_as_before().await;
    }

    async fn belongs_to(&self, name: &RecordName, claim: &Claim) {
        let record = self.record(name).await;
        assert!(
            record.token == claim.token && record.fingerprint == claim.fingerprint,
            "a dropped claim that was asked again is its caller's, and was {record:?}"
        );
        let renewed = in_time(self.store.renew(name, claim.token, HOUR)).await;
        applied(renewed, "renew by the owner");
    }

    /// Asserts that no connection was left with an unread answer: many callers get their
    /// own answers.
    async fn works_as_before(&self) {
        let calls = (0..CROWD).map(|turn| {
            let (store, other) = (self.store.clone(), self.either(turn).clone());
            async move {
                let name = name(format!("after {turn}"));
                let claim = long_claim(1);
                let claimed = in_time(store.claim(&name, &claim)).await;
                let Claimed::Acquired(grant) = claimed else {
                    panic!("claim: after dropped calls a free name is acquired");
                };
                let answer = Call::Complete
                    .make(&store, &name, claim.token, grant.fence)
                    .await;
                applied(answer, "complete after dropped calls");
                let record = in_time(other.read(&name)).await;
                assert!(
                    record.is_some_and(|record| {
                        record.token == claim.token && status_of(&record) == Status::Completed
                    }),
                    "complete: an acknowledged completion after dropped calls is kept"
                );
            }
        });
        self.at_once(calls).await;
    }
}

/// Polls a call up to `polls` times, and drops it.
async fn dropped(polls: usize, call: impl Future) {
    let mut call = pin!(call);
    let mut polled = 0;
    let last = poll_fn(|cx| {
        polled += 1;
        match call.as_mut().poll(cx) {
            Poll::Pending if polled < polls => Poll::Pending,
            _ => Poll::Ready(()),
        }
    });
    // A call that hangs is dropped too.
    let _ = tokio::time::timeout(PATIENCE, last).await;
}

/// Awaits a call that a dropped one must not block.
async fn in_time<T>(call: impl Future<Output = Result<T, crate::error::StoreError>>) -> T {
    let answer = tokio::time::timeout(PATIENCE, call).await;
    good(answer.unwrap_or_else(|_| panic!("a dropped call does not block the next ones")))
}

/// After how many polls calls are dropped. Eight cover a statement or two.
const POLLS: std::ops::RangeInclusive<usize> = 1..=8;
/// After this time the suite reports a call as hanging.
const PATIENCE: Duration = Duration::from_secs(60);
