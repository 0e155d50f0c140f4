//! Fences that grow, whatever becomes of records and clocks.

use std::time::Duration;

use futures_util::future::join_all;
use tower_idempotency::{
    Fence, Store,
    store::{Claim, Claimed, Grant, ReclaimAs},
};

use crate::{
    any_store::{HOUR, acquired, fingerprint, guards, hour, name, past, reclaimed},
    databases::run,
    with_store,
};

#[tokio::test(flavor = "multi_thread")]
async fn fences_grow_over_sweeping_forgetting_and_claiming_again() {
    with_store(async |store, _| {
        let mut last = Fence::from(0);
        for _ in 0..10 {
            last = guards::fences_grow_over_sweeping_and_forgetting(&store, last).await;
        }
    })
    .await;
}

#[tokio::test(flavor = "multi_thread")]
async fn i2_a_repeated_claim_draws_a_new_fence() {
    with_store(async |store, _| {
        for companions in [0, 40] {
            let lost = name("caller", &format!("lost among {companions}"));
            let claim = hour();
            let before = acquired(store.claim(&lost, &claim).await);
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
async fn a_fence_grows_past_a_clock_that_was_set_back() {
    with_store(async |store, url| {
        let name = name("caller", "key");
        let claim = Claim::new(fingerprint(1), Duration::ZERO, HOUR);
        acquired(store.claim(&name, &claim).await);
        run(
            &url,
            "UPDATE idempotency_records SET fence = 1::bigint << 52",
        )
        .await;
        past().await;
        let seen = store.read(&name).await.unwrap().unwrap();
        let seen = Grant {
            operation: seen.operation,
            fence: seen.fence,
            attempt: seen.attempt,
        };
        let next = reclaimed(&store, &name, seen, ReclaimAs::Takeover).await;
        assert_eq!(next.unwrap().fence.get(), (1 << 52) + 1);
    })
    .await;
}
