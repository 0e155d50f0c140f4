use std::{
    sync::{Arc, Mutex},
    time::Instant,
};

use super::{
    CROWD, HOUR, Subject, Trial, acquired,
    calls::Call,
    fingerprint, good, long_claim, name, occupied, response,
    states::{State, Status, applied, response_of, status_of, superseded},
};
use crate::{
    key::OperationId,
    store::{
        Claim, Claimed, Fence, ReclaimAs, Record, RecordState, Release, Store, Token,
        transition::FORGOTTEN_RETENTION,
    },
};

/// # Claiming
impl<S: Subject> Trial<S> {
    /// The record that a claim leaves shows the claim, its lease and its retention.
    pub async fn claim_acquires_a_name_without_a_record(&self) {
        let name = name("free");
        let began = Instant::now();
        let claim = Claim::new(fingerprint(7), HOUR, HOUR * 2);
        let grant = acquired(&self.store, &name, claim).await.grant;
        assert_eq!(
            (grant.operation, grant.attempt),
            (claim.operation, 1),
            "claim: the first attempt of the operation that the claim brings"
        );

        let record = good(self.peer.read(&name).await)
            .expect("claim: leaves a record that every way to the store sees");
        assert_eq!(
            (
                record.operation,
                record.fence,
                record.attempt,
                record.takeovers
            ),
            (grant.operation, grant.fence, 1, 0),
            "claim: the record says what was granted"
        );
        assert_eq!(
            (record.token, record.fingerprint),
            (claim.token, claim.fingerprint),
            "claim: the record keeps the claim's token and fingerprint"
        );
        Self::lives_for(&record, began, HOUR, HOUR * 2, "claim");
    }

    /// A claim of a name that has a record returns the record, in each state and expired
    /// or not, and changes nothing.
    pub async fn claim_of_an_occupied_name_shows_its_record(&self) {
        for case in self.cases(State::all()).await {
            let record = self.record(&case.held.name).await;
            let what = format!("claim of {:?}", case.state);
            let seen = occupied(&self.peer, &case.held.name, &what).await;
            Self::unchanged(Some(&record), Some(&seen), &what);
            self.stays(&case.held.name, &record, &what).await;
        }
    }

    /// `read` shows the state, the last claim and the times of each record.
    pub async fn read_shows_each_state_expired_or_not(&self) {
        for case in self.cases(State::all()).await {
            let Some(record) = good(self.peer.read(&case.held.name).await) else {
                panic!("read: a record stays until it is swept");
            };
            let what = format!("read of {:?}", case.state);
            assert_eq!(status_of(&record), case.state.status, "{what}: its state");
            assert_eq!(
                record.expires_in.is_none(),
                case.state.expired,
                "{what}: `expires_in` is `None` once it has expired, and only then"
            );
            let held = &case.held;
            assert_eq!(
                (record.operation, record.fence, record.attempt),
                (held.grant.operation, held.grant.fence, held.grant.attempt),
                "{what}: the grant of the last claim"
            );
            assert_eq!(
                (record.token, record.fingerprint),
                (held.token, held.claim.fingerprint),
                "{what}: the token and fingerprint of the last claim"
            );
            assert!(
                record.age + Self::grain() >= S::SHORT * 2,
                "{what}: its age grows, and is {:?}",
                record.age
            );
            if case.state.status == Status::Completed {
                assert_eq!(
                    response_of(&record),
                    Some(&response()),
                    "{what}: the response"
                );
            }
        }
    }

    /// No call but `claim` makes a record.
    pub async fn every_call_without_a_record_is_superseded(&self) {
        let name = name("nothing");
        assert!(
            self.peek(&name).await.is_none(),
            "read: there is no record before the first claim"
        );
        for call in Call::ALL {
            let answer = call
                .make(&self.store, &name, Token::random(), Fence::from(1))
                .await;
            superseded(answer, &format!("{call:?} without a record"));
        }
        for reclaim_as in RECLAIMS {
            let (seen, claim) = (Fence::from(1), long_claim(1));
            let reclaimed = self.store.reclaim(&name, seen, reclaim_as, &claim).await;
            assert_eq!(
                good(reclaimed),
                None,
                "reclaim: nothing can be claimed again without a record"
            );
        }
        assert!(
            self.peek(&name).await.is_none(),
            "a call without a record leaves none"
        );
    }

    /// Of 32 simultaneous claims, one is acquired. The others get its record.
    pub async fn one_of_many_simultaneous_claims_is_acquired(&self) {
        for round in 0..4 {
            let name = name(round);
            let calls = (0..CROWD).map(|turn| {
                let (store, name) = (self.either(turn).clone(), name.clone());
                async move {
                    let claim = long_claim(1);
                    let mut claimed = good(store.claim(&name, &claim).await);
                    if matches!(claimed, Claimed::Vanished) {
                        claimed = good(store.claim(&name, &claim).await);
                    }
                    (claim.token, claimed)
                }
            });
            let answers = self.at_once(calls).await;
            let acquired: Vec<_> = answers
                .iter()
                .filter_map(|(token, claimed)| match claimed {
                    Claimed::Acquired(grant) => Some((*token, *grant)),
                    Claimed::Occupied(_) | Claimed::Vanished => None,
                })
                .collect();
            let [(token, grant)] = acquired[..] else {
                panic!(
                    "claim: one of all simultaneous calls is acquired, and {} were",
                    acquired.len()
                );
            };
            for (_, claimed) in answers {
                match claimed {
                    Claimed::Acquired(_) => {}
                    Claimed::Occupied(record) => assert!(
                        record.token == token && record.fence <= grant.fence,
                        "claim: the others get the record of the one that was acquired"
                    ),
                    Claimed::Vanished => {
                        panic!("claim: a record that is not removed does not vanish twice")
                    }
                }
            }
        }
    }

    /// A claim that is repeated because its answer was lost finds its own token, and a new
    /// fence that is larger than every earlier one.
    pub async fn i1_repeated_claim_shows_its_own_record(&self) {
        let held = self.hold(&name("again"), HOUR, HOUR).await;
        let mut last = held.grant.fence;
        for store in [&self.store, &self.peer] {
            match good(store.claim(&held.name, &held.claim).await) {
                Claimed::Occupied(record) => {
                    assert!(
                        record.token == held.token && record.fence > last,
                        "claim: asked again, it finds its own token and writes a new fence"
                    );
                    last = record.fence;
                }
                other => panic!("claim: each token is granted once, and again as {other:?}"),
            }
        }
        let renewed = held.make(Call::Renew, &self.store).await;
        applied(renewed, "renew after a repeated claim");
    }

    /// A repeated reclaim is granted again to its own token alone, with a new fence.
    pub async fn i1_repeated_reclaim_returns_its_grant(&self) {
        let held = self.hold(&name("again"), HOUR, HOUR).await;
        self.release(&held, Release::SameRequest).await;
        let claim = long_claim(1);
        let next = self.hold_again(&held, ReclaimAs::Retry, claim).await;
        let mut last = next.grant;
        for seen in [held.grant.fence, next.grant.fence] {
            let reclaim = async |claim: &Claim| {
                let name = &held.name;
                good(self.peer.reclaim(name, seen, ReclaimAs::Retry, claim).await)
            };
            let stranger = reclaim(&long_claim(1)).await;
            assert_eq!(stranger, None, "reclaim: another token is not granted it");
            let Some(again) = reclaim(&claim).await else {
                panic!("reclaim: asked again with its own token, it is granted again");
            };
            assert!(
                (again.operation, again.attempt) == (last.operation, last.attempt)
                    && again.fence > last.fence,
                "reclaim: asked again, it gets a new fence, and got {again:?} after {last:?}"
            );
            last = again;
        }
        let record = self.record(&held.name).await;
        assert!(
            record.token == claim.token && record.fence == last.fence,
            "reclaim: asked again, the record shows its own token and fence"
        );
    }

    /// The next claim of a name has a larger fence, however the one before it ended.
    pub async fn i2_fences_grow_over_release_expiry_sweep_and_forget(&self) {
        let name = name("fences");
        let short = || Claim::new(fingerprint(1), S::SHORT, S::SHORT);
        let mut held = self.hold(&name, HOUR, HOUR).await;
        let mut last = held.grant.fence;
        let mut grows = |fence: Fence, over: &str| {
            assert!(
                fence > last,
                "the fences of a name grow over {over}: {fence} came after {last}"
            );
            last = fence;
        };
        for reclaim_as in [ReclaimAs::Retry, ReclaimAs::Replace] {
            self.release(&held, Release::AnyRequest).await;
            held = self.hold_again(&held, reclaim_as, long_claim(1)).await;
            grows(held.grant.fence, "a release");
        }
        self.release(&held, Release::AnyRequest).await;
        held = self.hold_again(&held, ReclaimAs::Retry, short()).await;
        grows(held.grant.fence, "a release");
        self.lapse().await;
        held = self.hold_again(&held, ReclaimAs::Takeover, short()).await;
        grows(held.grant.fence, "a lapse");
        self.complete(&held, response(), S::SHORT).await;
        self.lapse().await;
        held = self.hold_again(&held, ReclaimAs::Expired, short()).await;
        grows(held.grant.fence, "an expiry");
        for turn in 0..2 {
            match Self::swept() {
                Status::Unknown => self.mark_unknown(&held, S::SHORT).await,
                _ => self.release(&held, Release::SameRequest).await,
            }
            self.lapse().await;
            let purged = good(self.peer.purge_expired(10, HOUR).await);
            assert_eq!(purged.removed, 1, "purge_expired: removes what has expired");
            held = self
                .hold_through(self.either(turn), &name, HOUR, HOUR)
                .await;
            grows(held.grant.fence, "a removal, in whichever process");
            self.forget(&held).await;
            held = self.hold_again(&held, ReclaimAs::Replace, short()).await;
            grows(held.grant.fence, "a forget");
        }
    }

    /// The fences of a name grow while callers claim and forget it at the same time.
    pub async fn i2_fences_grow_while_claims_and_forgets_race(&self) {
        let name = name("contended");
        // An owner notes its fence before it forgets the record, so the list is in
        // the order of the grants.
        let granted = Arc::new(Mutex::new(Vec::new()));
        let calls = (0..8).map(|turn| {
            let (store, name) = (self.either(turn).clone(), name.clone());
            let granted = granted.clone();
            async move {
                for _ in 0..10 {
                    let claim = long_claim(1);
                    let grant = match good(store.claim(&name, &claim).await) {
                        Claimed::Acquired(grant) => Some(grant),
                        Claimed::Occupied(Record { fence, .. }) => good(
                            store
                                .reclaim(&name, fence, ReclaimAs::Replace, &claim)
                                .await,
                        ),
                        Claimed::Vanished => None,
                    };
                    if let Some(grant) = grant {
                        let write = |fence| granted.lock().expect("unpoisoned").push(fence);
                        write(grant.fence);
                        applied(
                            good(store.forget(&name, grant.fence).await),
                            "forget by the only owner",
                        );
                    }
                    tokio::task::yield_now().await;
                }
            }
        });
        self.at_once(calls).await;
        let granted = granted.lock().expect("unpoisoned");
        assert!(
            !granted.is_empty() && granted.is_sorted_by(|one, next| one < next),
            "claim: each fence is larger than all before it, and they came as {granted:?}"
        );
    }

    /// A claim whose process dies leaves a record in progress with a lease that lapses.
    pub async fn abandoned_claim_lapses_and_stays_in_progress(&self) {
        let held = self.hold(&name("dead"), S::SHORT, HOUR).await;
        self.lapse().await;
        let record = self.record(&held.name).await;
        assert!(
            matches!(record.state, RecordState::InProgress { lease_left: None }),
            "claim: after a crash it is in progress with a lapsed lease, and was {record:?}"
        );
        let claim = Claim::new(fingerprint(1), S::SHORT, HOUR);
        let held = self.hold_again(&held, ReclaimAs::Takeover, claim).await;
        self.lapse().await;
        let record = self.record(&held.name).await;
        assert!(
            matches!(record.state, RecordState::InProgress { lease_left: None }),
            "reclaim: after a crash it is in progress with a lapsed lease, and was {record:?}"
        );
    }

    /// A forgotten record is free for any request for a day, and the owner of the forgotten
    /// claim changes nothing.
    pub async fn forget_frees_a_record_in_any_state(&self) {
        self.guard_holds(Call::Forget).await;
        let held = self.hold(&name("forgotten"), HOUR, HOUR).await;
        let before = self.record(&held.name).await;
        let answer = held.make(Call::Forget, &self.peer).await;
        applied(answer, "forget with the fence seen");
        let forgotten = self.record(&held.name).await;
        let left = forgotten.expires_in;
        Self::counts_from_now(&before, &forgotten, left, FORGOTTEN_RETENTION, "forget");
        assert_eq!(
            forgotten.takeovers, 0,
            "forget: the record does not keep its takeovers: {forgotten:?}"
        );
        for call in Call::ALL {
            let answer = held.make(call, &self.store).await;
            let what = format!("{call:?} of a forgotten record");
            match call {
                Call::Forget => applied(answer, &what),
                _ => superseded(answer, &what),
            }
            self.stays(&held.name, &forgotten, &what).await;
        }
        let next = self
            .hold_again(&held, ReclaimAs::Replace, long_claim(2))
            .await;
        assert!(
            next.grant.operation == next.claim.operation
                && next.grant.operation != held.grant.operation
                && next.grant.attempt == 1,
            "forget: the next claim begins a new operation"
        );
        let record = self.peek(&held.name).await;
        for call in Call::ALL {
            let answer = held.make(call, &self.store).await;
            let what = format!("{call:?} by the owner of a forgotten claim");
            superseded(answer, &what);
            self.stays(&held.name, &record, &what).await;
        }
    }

    /// Every bit of operation, token and fingerprint comes back.
    pub async fn ids_tokens_and_fingerprints_are_kept_whole(&self) {
        for (index, byte) in [0x00, 0x7f, 0x80, 0xff].into_iter().enumerate() {
            let mut claim = long_claim(byte);
            claim.operation = OperationId::from_bytes([byte; 16]);
            claim.token = Token::from_bytes([byte ^ 1; 16]);
            let name = name(index);
            let grant = acquired(&self.store, &name, claim).await.grant;
            let record = self.record(&name).await;
            assert!(
                grant.operation == claim.operation
                    && record.operation == claim.operation
                    && record.token == claim.token
                    && record.fingerprint == claim.fingerprint,
                "claim: every bit of operation, token and fingerprint comes back"
            );
        }
    }
}

pub(super) const RECLAIMS: [ReclaimAs; 6] = [
    ReclaimAs::Takeover,
    ReclaimAs::Rerun,
    ReclaimAs::Reconcile,
    ReclaimAs::Retry,
    ReclaimAs::Replace,
    ReclaimAs::Expired,
];
