//! The PostgreSQL store under load: outcomes behind a stalled network, large
//! responses, locked rows, and large tables.

#[path = "../databases/mod.rs"]
mod databases;
mod large;
mod late;
mod lists;
mod locked;
mod proxy;

use std::time::{Duration, Instant};

use bytes::Bytes;
use tower_idempotency::{
    Key, PostgresStore, Scope, Store,
    sqlx::postgres::PgConnectOptions,
    store::{Claim, Claimed, Completion, Fingerprint, Grant, PostgresStoreBuilder, RecordName},
};

/// A store with the defaults, and its tables.
pub(crate) async fn store(options: PgConnectOptions) -> PostgresStore {
    migrated(PostgresStore::builder(options)).await
}

/// Connects a store, and creates its tables.
pub(crate) async fn migrated(builder: PostgresStoreBuilder) -> PostgresStore {
    let store = builder.connect().await.unwrap();
    store.migrate().await.unwrap();
    store
}

pub(crate) fn name(scope: &'static str, key: &str) -> RecordName {
    RecordName::new(Scope::from_stored(scope), Key::new(key))
}

pub(crate) fn hour() -> Claim {
    Claim::new(
        Fingerprint::from_bytes([1; Fingerprint::LENGTH]),
        HOUR,
        HOUR,
    )
}

pub(crate) fn response(bytes: usize) -> Completion {
    Completion::new(Bytes::from(vec![7; bytes]), HOUR, Duration::ZERO)
}

/// Claims a new name.
pub(crate) async fn claimed(store: &PostgresStore, name: &RecordName) -> (Claim, Grant) {
    let claim = hour();
    match store.claim(name, &claim).await.unwrap() {
        Claimed::Acquired(grant) => (claim, grant),
        other => panic!("{other:?}"),
    }
}

/// Waits until `is_so` returns true, for a minute at most.
pub(crate) async fn until(mut is_so: impl AsyncFnMut() -> bool) {
    let begun = Instant::now();
    while !is_so().await {
        assert!(begun.elapsed() < Duration::from_secs(60));
        tokio::time::sleep(Duration::from_millis(10)).await;
    }
}

pub(crate) const HOUR: Duration = Duration::from_secs(3600);
