//! Checks that hold for every store.

use std::{
    pin::pin,
    time::{Duration, Instant},
};

use futures_util::future::join_all;
use tower_idempotency::{
    Fence, Store,
    store::{
        Claim, Claimed, Completion, Grant, ReclaimAs, RecordState, Release, Token,
        admin::{Filter, Resolution},
    },
};

use super::{
    HOUR, acquired, applied, done, expire, expired, expiring, fingerprint, hour, name, past,
    reclaimed, superseded,
};

pub(crate) async fn one_of_64_claims_is_acquired(store: &(impl Store + Clone)) {
    for round in 0..10 {
        let name = name("caller", &format!("key {round}"));
        let answers = join_all((0..64).map(|_| {
            let (store, name) = (store.clone(), name.clone());
            tokio::spawn(async move { store.claim(&name, &hour()).await.unwrap() })
        }))
        .await;
        let acquired = answers
            .iter()
            .filter(|answer| matches!(answer.as_ref().unwrap(), Claimed::Acquired(_)))
            .count();
        assert_eq!(acquired, 1);
    }
}

pub(crate) async fn each_transition_checks_its_own_guard(store: &impl Store) {
    let taken_over = name("caller", "taken over");
    let live = hour();
    let first = acquired(store.claim(&taken_over, &live).await);
    let other = Token::random();

    // In progress, leased.
    for reclaim_as in [ReclaimAs::Takeover, ReclaimAs::Retry, ReclaimAs::Expired] {
        let granted = reclaimed(store, &taken_over, first, reclaim_as).await;
        assert_eq!(granted, None);
    }
    superseded(store.renew(&taken_over, other, HOUR).await);
    superseded(store.complete(&taken_over, other, &done()).await);
    superseded(store.release(&taken_over, other, Release::AnyRequest).await);
    superseded(store.mark_lapsed(&taken_over, first.fence, HOUR).await);
    let resolution = Resolution::DidNotHappen;
    let resolved = store.resolve(&taken_over, first.fence, &resolution, HOUR);
    superseded(resolved.await);
    superseded(store.forget(&taken_over, Fence::from(0)).await);

    // Lapsed, and alive again by a late heartbeat of its owner.
    applied(store.renew(&taken_over, live.token, Duration::ZERO).await);
    let expired = reclaimed(store, &taken_over, first, ReclaimAs::Expired).await;
    assert_eq!(expired, None);
    applied(store.renew(&taken_over, live.token, HOUR).await);
    let takeover = reclaimed(store, &taken_over, first, ReclaimAs::Takeover).await;
    assert_eq!(takeover, None);
    applied(store.renew(&taken_over, live.token, Duration::ZERO).await);
    past().await;
    let second_claim = Claim::new(fingerprint(1), Duration::ZERO, HOUR);
    let second = store
        .reclaim(&taken_over, first.fence, ReclaimAs::Takeover, &second_claim)
        .await
        .unwrap()
        .unwrap();
    assert_eq!((second.operation, second.attempt), (first.operation, 2));
    assert!(second.fence > first.fence);
    past().await;

    // Taken over: nothing of the first owner counts.
    superseded(store.renew(&taken_over, live.token, HOUR).await);
    superseded(store.complete(&taken_over, live.token, &done()).await);
    superseded(store.mark_unknown(&taken_over, live.token, HOUR).await);

    // Unknown, by one who saw the lease lapse; the owner may still complete.
    let token = second_claim.token;
    applied(store.mark_lapsed(&taken_over, second.fence, HOUR).await);
    superseded(store.renew(&taken_over, token, HOUR).await);
    superseded(
        store
            .release(&taken_over, token, Release::SameRequest)
            .await,
    );
    let expired = reclaimed(store, &taken_over, second, ReclaimAs::Expired).await;
    assert_eq!(expired, None);
    applied(store.complete(&taken_over, token, &done()).await);

    // Completed: it stays so until it expires.
    for reclaim_as in [
        ReclaimAs::Takeover,
        ReclaimAs::Retry,
        ReclaimAs::Replace,
        ReclaimAs::Expired,
    ] {
        let granted = reclaimed(store, &taken_over, second, reclaim_as).await;
        assert_eq!(granted, None);
    }
    superseded(store.release(&taken_over, token, Release::AnyRequest).await);
    applied(store.forget(&taken_over, second.fence).await);
    let forgotten = store.read(&taken_over).await.unwrap().unwrap();
    assert!(matches!(
        forgotten.state,
        RecordState::Released(Release::AnyRequest)
    ));
    superseded(store.complete(&taken_over, token, &done()).await);

    // Released for the same request: no other request may replace it.
    let released = name("caller", "released");
    let live = hour();
    let first = acquired(store.claim(&released, &live).await);
    applied(
        store
            .release(&released, live.token, Release::SameRequest)
            .await,
    );
    superseded(store.complete(&released, live.token, &done()).await);
    let replaced = reclaimed(store, &released, first, ReclaimAs::Replace).await;
    assert_eq!(replaced, None);
    let second = reclaimed(store, &released, first, ReclaimAs::Retry).await;
    let second = second.unwrap();
    assert_eq!((second.operation, second.attempt), (first.operation, 2));
    assert!(second.fence > first.fence);
    let again = reclaimed(store, &released, first, ReclaimAs::Retry).await;
    assert_eq!(again, None);
    superseded(store.renew(&released, live.token, HOUR).await);
}

pub(crate) async fn a_repeated_call_returns_the_lost_answer(store: &impl Store) {
    for round in 0..2 {
        let completed = name("s", &format!("completed {round}"));
        let claim = hour();
        acquired(store.claim(&completed, &claim).await);
        for response in ["first", "second"] {
            let completion = Completion::new(response.into(), HOUR, Duration::ZERO);
            applied(store.complete(&completed, claim.token, &completion).await);
        }
        let record = store.read(&completed).await.unwrap().unwrap();
        assert!(matches!(
            record.state,
            RecordState::Completed { response } if response == "first"
        ));
    }

    let (released, claim) = (name("s", "released"), hour());
    acquired(store.claim(&released, &claim).await);
    for release in [Release::SameRequest, Release::AnyRequest] {
        applied(store.release(&released, claim.token, release).await);
    }
    let record = store.read(&released).await.unwrap().unwrap();
    assert!(matches!(
        record.state,
        RecordState::Released(Release::SameRequest)
    ));

    let (unknown, claim) = (name("s", "unknown"), hour());
    acquired(store.claim(&unknown, &claim).await);
    for retention in [HOUR, Duration::ZERO] {
        applied(store.mark_unknown(&unknown, claim.token, retention).await);
    }
    let record = store.read(&unknown).await.unwrap().unwrap();
    assert!(record.expires_in.is_some());

    // A claim whose answer got lost is recognised by its token.
    let Claimed::Occupied(record) = store.claim(&unknown, &claim).await.unwrap() else {
        panic!("claimed twice");
    };
    assert_eq!(record.token, claim.token);
}

pub(crate) async fn a_sweep_obeys_its_limit_and_spares_leased_records(store: &impl Store) {
    let leased = name("leased", "0");
    // As many as the limit, and before all others.
    for n in 0..3 {
        let claim = Claim::new(fingerprint(1), HOUR, Duration::ZERO);
        acquired(store.claim(&name("leased", &n.to_string()), &claim).await);
    }
    for n in 0..5 {
        expired(store, &name("done", &n.to_string())).await;
    }
    for n in 0..3 {
        let lapsed = Claim::new(fingerprint(1), Duration::ZERO, Duration::ZERO);
        acquired(store.claim(&name("lapsed", &n.to_string()), &lapsed).await);
    }
    past().await;
    let mut total = (0, 0);
    loop {
        let purged = store.purge_expired(3, HOUR).await.unwrap();
        assert!(purged.touched() <= 3);
        total = (total.0 + purged.removed, total.1 + purged.marked_unknown);
        if purged.touched() == 0 {
            break;
        }
    }
    assert_eq!(total, (5, 3));
    assert!(store.read(&leased).await.unwrap().is_some());
    let page = store.list(&Filter::unknown(), None, 10).await.unwrap();
    assert_eq!((page.records.len(), page.next), (3, None));
    let page = store.list(&Filter::unknown(), None, 2).await.unwrap();
    assert_eq!(page.records.len(), 2);
    let unknown = Filter::unknown();
    let rest = store.list(&unknown, page.next.as_ref(), 2).await.unwrap();
    assert_eq!((rest.records.len(), rest.next), (1, None));
    let old = Filter::in_progress_for(Duration::ZERO);
    let running = store.list(&old, None, 10).await.unwrap();
    assert_eq!(running.records[0].0, leased);
}

/// Sweeps through `sweeping` while records are claimed again through `store`.
pub(crate) async fn a_sweep_never_deletes_a_record_claimed_again<S: Store + Clone>(
    store: &S,
    sweeping: &S,
) {
    for round in 0..15 {
        let names: Vec<_> = (0..20)
            .map(|n| name("caller", &format!("{round} {n}")))
            .collect();
        for name in &names {
            expired(store, name).await;
        }
        let sweepers = (0..3).map(|_| {
            let sweeping = sweeping.clone();
            tokio::spawn(async move {
                for _ in 0..10 {
                    sweeping.purge_expired(3, HOUR).await.unwrap();
                }
            })
        });
        let claimers = names.iter().cloned().map(|name| {
            let store = store.clone();
            tokio::spawn(async move {
                let seen = store.read(&name).await.unwrap()?;
                let expired = ReclaimAs::Expired;
                let granted = store.reclaim(&name, seen.fence, expired, &hour()).await;
                granted.unwrap().map(|grant| (name, grant))
            })
        });
        let (granted, swept) = tokio::join!(join_all(claimers), join_all(sweepers));
        swept.into_iter().for_each(|sweeper| sweeper.unwrap());
        for (name, grant) in granted.into_iter().filter_map(Result::unwrap) {
            let record = store.read(&name).await.unwrap();
            assert_eq!(record.expect("swept while leased").fence, grant.fence);
        }
    }
}

/// Drops calls after ever longer times, and makes each of them again. Leaves
/// `rounds` completed records.
pub(crate) async fn a_call_may_be_dropped_at_any_time(store: &impl Store, rounds: u64) {
    for round in 0..rounds {
        let name = name("caller", &round.to_string());
        let claim = hour();
        let timeout = Duration::from_micros(40 * (round % 50));
        let _ = tokio::time::timeout(timeout, store.claim(&name, &claim)).await;
        let _ = tokio::time::timeout(timeout, store.read(&name)).await;
        // Whether or not the dropped call was applied, its repetition is safe and
        // its answer can be relied on.
        let token = match store.claim(&name, &claim).await.unwrap() {
            Claimed::Acquired(_) => claim.token,
            Claimed::Occupied(record) => record.token,
            Claimed::Vanished => panic!("no sweep runs"),
        };
        assert_eq!(token, claim.token);
        let completion = done();
        let dropped = store.complete(&name, claim.token, &completion);
        let _ = tokio::time::timeout(timeout, dropped).await;
        applied(store.complete(&name, claim.token, &completion).await);
    }
}

pub(crate) async fn a_dropped_outcome_is_still_written(store: &impl Store) {
    let (name, claim) = (name("caller", "key"), hour());
    acquired(store.claim(&name, &claim).await);
    {
        let outcome = done();
        let mut call = pin!(store.complete(&name, claim.token, &outcome));
        let _ = futures_util::poll!(&mut call);
    }
    let begun = Instant::now();
    let is_completed = async || {
        let record = store.read(&name).await.unwrap().unwrap();
        matches!(record.state, RecordState::Completed { .. })
    };
    while !is_completed().await {
        assert!(begun.elapsed() < Duration::from_secs(60));
    }
}

/// Claims a name in each way in which its last claim may have ended, and expects fences
/// after `last`. Returns the last one.
pub(crate) async fn fences_grow_over_sweeping_and_forgetting(
    store: &impl Store,
    mut last: Fence,
) -> Fence {
    let name = name("caller", "key");
    let mut grows = |grant: Grant| {
        assert!(grant.fence > last, "{} after {last}", grant.fence);
        last = grant.fence;
    };
    let swept = expiring();
    grows(acquired(store.claim(&name, &swept).await));
    expire(store, &name, &swept).await;
    assert_eq!(store.purge_expired(10, HOUR).await.unwrap().removed, 1);
    let forgotten = acquired(store.claim(&name, &expiring()).await);
    grows(forgotten);
    applied(store.forget(&name, forgotten.fence).await);
    let claim = expiring();
    let replaced = store.reclaim(&name, forgotten.fence, ReclaimAs::Replace, &claim);
    let replaced = replaced.await.unwrap().unwrap();
    grows(replaced);
    expire(store, &name, &claim).await;
    let claim = expiring();
    let expired = store.reclaim(&name, replaced.fence, ReclaimAs::Expired, &claim);
    grows(expired.await.unwrap().unwrap());
    expire(store, &name, &claim).await;
    assert_eq!(store.purge_expired(10, HOUR).await.unwrap().removed, 1);
    last
}
