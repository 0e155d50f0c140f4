//! The moments at which records lapse and expire, and the numbers of claims.

use std::time::Duration;

use tower_idempotency::{
    Fence, Release,
    store::{
        Claim, Completion, FencedTransition, Fingerprint, OwnerTransition, ReclaimAs, RecordState,
        Transition, Transitioned,
        transition::{FORGOTTEN_RETENTION, StoredRecord, Swept, next_fence},
    },
};

#[test]
fn fences_follow_the_clock_or_the_last_one() {
    let at = Duration::from_micros;
    assert_eq!(next_fence(Fence::from(5), at(9)), Fence::from(9));
    assert_eq!(next_fence(Fence::from(9), at(9)), Fence::from(10));
    assert_eq!(next_fence(Fence::from(12), at(9)), Fence::from(13));
    assert_eq!(next_fence(Fence::from(0), at(0)), Fence::from(1));
}

#[test]
fn a_lease_lapses_after_its_last_moment() {
    let claim = claim(LEASE, DAY);
    let lapses_at = NOW + LEASE;
    let taken_over = |at| {
        let mut record = StoredRecord::claimed(&claim, NOW);
        let seen = record.grant().fence;
        let other = self::claim(LEASE, DAY);
        record
            .reclaim(seen, ReclaimAs::Takeover, &other, at)
            .is_some()
    };
    assert!(!taken_over(lapses_at));
    assert!(taken_over(lapses_at + MICRO));
}

#[test]
fn a_record_expires_after_its_last_moment() {
    let expires_at = NOW + DAY;
    let reclaimed = |reclaim_as, at| {
        let claim = claim(LEASE, DAY);
        let mut record = StoredRecord::claimed(&claim, NOW);
        let release = OwnerTransition::Release(Release::AnyRequest);
        let released = record.apply(&Transition::Owner(claim.token, release), NOW);
        assert_eq!(released, Transitioned::Applied);
        let seen = record.grant().fence;
        record
            .reclaim(seen, reclaim_as, &self::claim(LEASE, DAY), at)
            .is_some()
    };
    for (at, has_expired) in [(expires_at, false), (expires_at + MICRO, true)] {
        assert_eq!(reclaimed(ReclaimAs::Expired, at), has_expired);
        assert_eq!(reclaimed(ReclaimAs::Replace, at), !has_expired);
        assert_eq!(reclaimed(ReclaimAs::Retry, at), !has_expired);
    }
}

#[test]
fn an_expired_claim_with_a_live_lease_is_not_claimed_again() {
    let claim = claim(2 * DAY, DAY);
    let reclaimed = |at| {
        let mut record = StoredRecord::claimed(&claim, NOW);
        let seen = record.grant().fence;
        let other = self::claim(LEASE, DAY);
        record
            .reclaim(seen, ReclaimAs::Expired, &other, at)
            .is_some()
    };
    assert!(!reclaimed(NOW + DAY + MICRO));
    assert!(!reclaimed(NOW + 2 * DAY));
    assert!(reclaimed(NOW + 2 * DAY + MICRO));
}

#[test]
fn a_retry_counts_attempts_and_keeps_one_takeover() {
    let mut claim = claim(Duration::ZERO, DAY);
    let mut record = StoredRecord::claimed(&claim, NOW);
    for (number, reclaim_as, takeovers) in [
        (2, ReclaimAs::Takeover, 1),
        (3, ReclaimAs::Takeover, 2),
        (4, ReclaimAs::Retry, 1),
        (5, ReclaimAs::Retry, 1),
    ] {
        if reclaim_as == ReclaimAs::Retry {
            let release = OwnerTransition::Release(Release::AnyRequest);
            let released = record.apply(&Transition::Owner(claim.token, release), NOW);
            assert_eq!(released, Transitioned::Applied);
            let same = RecordState::Released(Release::SameRequest);
            assert_eq!(format!("{:?}", record.read(NOW).state), format!("{same:?}"));
        }
        let seen = record.grant();
        claim = self::claim(Duration::ZERO, DAY);
        let at = NOW + MICRO * number;
        let grant = record.reclaim(seen.fence, reclaim_as, &claim, at);
        let grant = grant.unwrap();
        assert_eq!((grant.attempt, grant.operation), (number, seen.operation));
        assert_eq!(record.read(NOW).takeovers, takeovers);
    }
}

#[test]
fn a_sweep_waits_for_expiry_lease_and_fence() {
    let claim = claim(2 * DAY, DAY);
    let record = StoredRecord::claimed(&claim, NOW);
    assert_eq!(record.sweep_after(), NOW + 2 * DAY);
    let swept = |at| record.clone().sweep(DAY, at);
    assert_eq!(swept(NOW + 2 * DAY), Swept::Kept);
    assert_eq!(swept(NOW + 2 * DAY + MICRO), Swept::MarkedUnknown);
    let record = StoredRecord::claimed(&self::claim(Duration::ZERO, Duration::ZERO), NOW);
    let fence = Duration::from_micros(record.grant().fence.get());
    assert_eq!(record.sweep_after(), fence + MICRO);
}

#[test]
fn a_forgotten_record_is_kept_for_a_day() {
    let mut record = StoredRecord::claimed(&claim(LEASE, LEASE), NOW);
    let forget = Transition::Fenced(record.grant().fence, FencedTransition::Forget);
    assert_eq!(record.apply(&forget, NOW), Transitioned::Applied);
    assert_eq!(FORGOTTEN_RETENTION, DAY);
    assert_eq!(record.sweep_after(), NOW + DAY);
    // Forgotten again later, it is not kept for longer.
    assert_eq!(record.apply(&forget, NOW + LEASE), Transitioned::Applied);
    assert_eq!(record.sweep_after(), NOW + DAY);
}

#[test]
fn a_record_that_its_owner_released_is_forgotten_anew() {
    let claim = claim(LEASE, LEASE);
    let mut record = StoredRecord::claimed(&claim, NOW);
    let release = OwnerTransition::Release(Release::AnyRequest);
    let released = record.apply(&Transition::Owner(claim.token, release), NOW);
    assert_eq!(released, Transitioned::Applied);
    let forget = Transition::Fenced(record.grant().fence, FencedTransition::Forget);
    assert_eq!(record.apply(&forget, NOW), Transitioned::Applied);
    assert_eq!(record.sweep_after(), NOW + DAY);
    assert_ne!(record.read(NOW).token, claim.token);
}

#[test]
fn a_live_lease_is_not_marked_by_others() {
    let mut record = StoredRecord::claimed(&claim(LEASE, DAY), NOW);
    let mark = FencedTransition::MarkLapsed { retention: DAY };
    let mark = Transition::Fenced(record.grant().fence, mark);
    assert_eq!(record.apply(&mark, NOW + LEASE), Transitioned::Superseded);
    let lapsed = NOW + LEASE + MICRO;
    assert_eq!(record.apply(&mark, lapsed), Transitioned::Applied);
    assert!(matches!(record.read(lapsed).state, RecordState::Unknown));
    // Its answer was lost.
    assert_eq!(record.apply(&mark, lapsed), Transitioned::Applied);
}

#[test]
fn numbers_of_claims_grow_by_one() {
    let mut record = StoredRecord::claimed(&claim(Duration::ZERO, DAY), NOW);
    let operation = record.grant().operation;
    for takeovers in 1..4_u32 {
        let at = NOW + MICRO * takeovers;
        let seen = record.grant().fence;
        let again = claim(Duration::ZERO, DAY);
        let grant = record
            .reclaim(seen, ReclaimAs::Takeover, &again, at)
            .unwrap();
        assert_eq!((grant.attempt, grant.operation), (takeovers + 1, operation));
        assert!(grant.fence > seen);
        assert_eq!(record.read(at).takeovers, takeovers);
        // The answer was lost: the same claim has a new fence.
        let repeated = record
            .reclaim(seen, ReclaimAs::Takeover, &again, at)
            .unwrap();
        assert!(repeated.fence > grant.fence);
        assert_eq!(repeated.attempt, grant.attempt);
    }
}

#[test]
fn the_length_of_a_response_is_that_of_its_bytes() {
    let claim = claim(LEASE, DAY);
    let mut record = StoredRecord::claimed(&claim, NOW);
    assert_eq!(record.response_len(), 0);
    let completion = Completion::new("five.".into(), DAY, DAY);
    let complete = OwnerTransition::Complete(completion);
    let complete = Transition::Owner(claim.token, complete);
    assert_eq!(record.apply(&complete, NOW), Transitioned::Applied);
    assert_eq!(record.response_len(), 5);
    assert!(format!("{record:?}").contains("Completed(5 bytes)"));
    // Its answer was lost.
    assert_eq!(record.apply(&complete, NOW), Transitioned::Applied);
}

#[test]
fn a_record_that_is_cut_short_is_corrupt() {
    let bytes = StoredRecord::claimed(&claim(LEASE, DAY), NOW).to_bytes();
    for end in 0..bytes.len() {
        assert!(
            StoredRecord::from_bytes(bytes.slice(..end)).is_err(),
            "{end}"
        );
    }
}

fn claim(lease: Duration, retention: Duration) -> Claim {
    let fingerprint = Fingerprint::from_bytes([1; Fingerprint::LENGTH]);
    Claim::new(fingerprint, lease, retention)
}

const NOW: Duration = Duration::from_secs(1_700_000_000);
const MICRO: Duration = Duration::from_micros(1);
const LEASE: Duration = Duration::from_secs(30);
const DAY: Duration = Duration::from_secs(24 * 3_600);
