//! A record that any calls have made comes back from its bytes.

use std::time::Duration;

use http::Response;
use proptest::{collection::vec, prelude::*, sample::select};
use tower_idempotency::{
    Release,
    store::{
        Claim, Completion, FencedTransition, Fingerprint, OwnerTransition, ReclaimAs, Transition,
        admin::{RecordedResponse, Resolution},
        transition::StoredRecord,
    },
};

proptest! {
    #[test]
    fn a_record_comes_back_from_its_bytes(
        calls in vec((0_usize..16, select(&SPANS[..]), select(&SPANS[..]), any::<bool>()), 0..12)
    ) {
        let mut now = Duration::from_micros(1_700_000_000_000_001);
        let mut claim = a_claim(SPANS[1], SPANS[2]);
        let mut record = StoredRecord::claimed(&claim, now);
        for (number, one, other, wait) in calls {
            if wait {
                now += one;
            }
            let (seen, before) = (record.grant(), record.clone());
            if let Some(reclaim_as) = RECLAIMS.get(number) {
                let again = a_claim(one, other);
                if let Some(grant) = record.reclaim(seen.fence, *reclaim_as, &again, now) {
                    prop_assert!(grant.fence > seen.fence);
                    prop_assert_eq!(record.grant(), grant);
                    claim = again;
                } else {
                    prop_assert_eq!(&record, &before);
                }
            } else {
                let transition = transition(number, &claim, &record, one, other);
                let first = record.apply(&transition, now);
                let once = record.clone();
                // Made again after its answer was lost. A resolution has no token for that.
                if !matches!(transition, Transition::Fenced(_, FencedTransition::Resolve { .. })) {
                    prop_assert_eq!(record.apply(&transition, now), first, "{:?}", transition);
                }
                prop_assert_eq!(&record, &once);
            }
            let bytes = record.to_bytes();
            prop_assert_eq!(&StoredRecord::from_bytes(bytes).unwrap(), &record);
        }
    }
}

fn a_claim(lease: Duration, retention: Duration) -> Claim {
    let fingerprint = Fingerprint::from_bytes([3; Fingerprint::LENGTH]);
    Claim::new(fingerprint, lease, retention)
}

fn transition(
    number: usize,
    claim: &Claim,
    record: &StoredRecord,
    one: Duration,
    other: Duration,
) -> Transition {
    let owner = match number {
        6 => OwnerTransition::Renew { lease: one },
        7 => OwnerTransition::Complete(Completion::new("kept".into(), one, other)),
        8 => OwnerTransition::Complete(Completion::new("".into(), one, other)),
        9 => OwnerTransition::Release(Release::SameRequest),
        10 => OwnerTransition::Release(Release::AnyRequest),
        11 => OwnerTransition::MarkUnknown { retention: one },
        _ => {
            let fenced = fenced(number, one, other);
            return Transition::Fenced(record.grant().fence, fenced);
        }
    };
    Transition::Owner(claim.token, owner)
}

fn fenced(number: usize, one: Duration, other: Duration) -> FencedTransition {
    let resolution = match number {
        12 => return FencedTransition::MarkLapsed { retention: one },
        13 => return FencedTransition::Forget,
        14 => Resolution::DidNotHappen,
        _ => Resolution::Happened(RecordedResponse::new(Response::new("it did")).unwrap()),
    };
    FencedTransition::Resolve {
        resolution: Box::new(resolution),
        at_least: other,
    }
}

const RECLAIMS: [ReclaimAs; 6] = [
    ReclaimAs::Takeover,
    ReclaimAs::Rerun,
    ReclaimAs::Reconcile,
    ReclaimAs::Retry,
    ReclaimAs::Replace,
    ReclaimAs::Expired,
];

/// Whole microseconds: records are encoded in them.
const SPANS: [Duration; 4] = [
    Duration::ZERO,
    Duration::from_micros(7),
    Duration::from_secs(3_600),
    Duration::from_secs(100 * 24 * 3_600),
];
