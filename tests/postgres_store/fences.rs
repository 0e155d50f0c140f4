//! Fences that grow, whatever becomes of records and sequences.

use std::time::Duration;

use bytes::Bytes;
use futures_util::future::join_all;
use tower_idempotency::{
    Fence, Store,
    store::{Claim, Claimed, Completion, ReclaimAs},
};

use crate::{
    any_store::{HOUR, acquired, applied, expiring, fingerprint, hour, name, past, reclaimed},
    databases::run,
    with_store,
};

#[tokio::test(flavor = "multi_thread")]
async fn fences_grow_over_sweeping_forgetting_and_claiming_again() {
    with_store(async |store, _| {
        let name = name("caller", "key");
        let mut last = Fence::from(0);
        for round in 0..30 {
            let claim = expiring();
            let grant = acquired(store.claim(&name, &claim).await);
            assert!(grant.fence > last, "{} after {last}", grant.fence);
            last = grant.fence;
            match round % 3 {
                0 => {
                    let gone = Completion::new(Bytes::new(), Duration::ZERO, Duration::ZERO);
                    let _ = store.complete(&name, claim.token, &gone).await.unwrap();
                    past().await;
                    assert_eq!(store.purge_expired(10, HOUR).await.unwrap().removed, 1);
                }
                1 => {
                    applied(store.forget(&name, grant.fence).await);
                }
                _ => {
                    let gone = Completion::new(Bytes::new(), Duration::ZERO, Duration::ZERO);
                    let _ = store.complete(&name, claim.token, &gone).await.unwrap();
                    past().await;
                    let again = reclaimed(&store, &name, grant, ReclaimAs::Expired)
                        .await
                        .unwrap();
                    assert!(again.fence > last);
                    last = again.fence;
                    let _ = store.forget(&name, again.fence).await.unwrap();
                }
            }
        }
    })
    .await;
}

#[tokio::test(flavor = "multi_thread")]
async fn i2_a_repeated_claim_draws_a_new_fence() {
    with_store(async |store, url| {
        for companions in [0, 40] {
            let lost = name("caller", &format!("lost among {companions}"));
            let before = acquired(store.claim(&lost, &hour()).await);
            let _ = store.forget(&lost, before.fence).await.unwrap();
            let claim = hour();
            acquired(store.claim(&lost, &claim).await);
            // As if it had been cut off before it drew another fence.
            run(
                &url,
                "UPDATE idempotency_records SET fence = 0 WHERE key LIKE 'lost%'",
            )
            .await;
            let others = (0..companions).map(|number| {
                let store = store.clone();
                let name = name("caller", &format!("companion {number}"));
                async move { store.claim(&name, &hour()).await }
            });
            let (_, again) = tokio::join!(join_all(others), store.claim(&lost, &claim));
            let Ok(Claimed::Occupied(record)) = again else {
                panic!("claimed again: {again:?}");
            };
            assert_eq!(record.token, claim.token);
            assert!(record.fence > before.fence);
            let kept = store.read(&lost).await.unwrap().unwrap();
            assert_eq!(kept.fence, record.fence);
        }
    })
    .await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_fence_grows_past_a_sequence_that_was_set_back() {
    with_store(async |store, url| {
        let name = name("caller", "key");
        let claim = Claim::new(fingerprint(1), Duration::ZERO, HOUR);
        for _ in 0..5 {
            let grant = acquired(store.claim(&name, &claim).await);
            let _ = store.forget(&name, grant.fence).await.unwrap();
        }
        let grant = acquired(store.claim(&name, &claim).await);
        run(&url, "ALTER SEQUENCE idempotency_fences RESTART WITH 1").await;
        past().await;
        let next = reclaimed(&store, &name, grant, ReclaimAs::Takeover)
            .await
            .unwrap();
        assert_eq!(next.fence.get(), grant.fence.get() + 1);
    })
    .await;
}
