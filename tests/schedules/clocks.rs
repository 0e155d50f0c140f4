//! The time of a store is that of its clock.

use std::time::Duration;

use tower_idempotency::{
    DynStore, Key, RedisStore, Scope, Store,
    store::{CachedStore, Claim, Claimed, Fingerprint, RecordName},
    test_support::FaultyStore,
};

use crate::{
    set_now, store,
    stores::{with_postgres, with_sqlite},
};

/// The fence of a first claim is the time of its claim in microseconds.
async fn assert_fences_follow_the_clock(store: impl Store) {
    let key = format!("clock-{:016x}", rand::random::<u64>());
    let name = RecordName::new(Scope::single_tenant(), Key::new(key));
    let fingerprint = Fingerprint::from_bytes([0; Fingerprint::LENGTH]);
    let minute = Duration::from_secs(60);
    let claim = Claim::new(fingerprint, minute, minute);
    let before = store.now().await.unwrap();
    let Ok(Claimed::Acquired(grant)) = store.claim(&name, &claim).await else {
        panic!("a new name is not acquired");
    };
    let after = store.now().await.unwrap();
    let fence = u128::from(grant.fence.get());
    let range = before.as_micros()..=after.as_micros();
    assert!(range.contains(&fence), "{fence} in {range:?}");
}

#[tokio::test(flavor = "multi_thread")]
async fn sqlite_returns_the_clock_of_its_fences() {
    with_sqlite(async |store, _| assert_fences_follow_the_clock(store).await).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn postgres_returns_the_clock_of_its_fences() {
    with_postgres(async |store, _| assert_fences_follow_the_clock(store).await).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn redis_returns_the_clock_of_its_fences() {
    for variable in ["REDIS_URL", "REDIS_CLUSTER_URL"] {
        let url = std::env::var(variable)
            .unwrap_or_else(|_| panic!("{variable} is not set; ./tests/run starts what it names"));
        assert_fences_follow_the_clock(RedisStore::connect(&url).await.unwrap()).await;
    }
}

#[tokio::test]
async fn stores_around_a_store_return_its_time() {
    let inner = store();
    set_now(&inner, "2026-07-01T00:00:00Z");
    let time = inner.now().await.unwrap();
    let hour = Duration::from_secs(3600);
    assert_eq!(FaultyStore::new(inner.clone()).now().await.unwrap(), time);
    assert_eq!(DynStore::new(inner.clone()).now().await.unwrap(), time);
    assert_eq!(
        std::sync::Arc::new(inner.clone()).now().await.unwrap(),
        time
    );
    assert_eq!(
        CachedStore::new(inner, 1 << 20, hour).now().await.unwrap(),
        time
    );
}
