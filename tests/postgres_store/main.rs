//! The PostgreSQL store against a real server.

#[path = "../any_store/mod.rs"]
mod any_store;
mod batches;
mod connections;
#[path = "../databases/mod.rs"]
mod databases;
mod fences;
mod guards;
mod indexes;
mod rollbacks;
mod rows;
mod settings;
mod sweeps;
mod tables;
mod view;
mod wake_ups;

use tower_idempotency::{
    PostgresStore, StoreError,
    store::{PostgresStoreBuilder, Token},
};

use crate::databases::{options, with_database};

/// Runs a test against a new, migrated database.
pub(crate) async fn with_store(test: impl AsyncFnOnce(PostgresStore, String)) {
    with_database(async |url| {
        let store = migrated(PostgresStore::builder(options(&url))).await;
        test(store.clone(), url).await;
        store.close().await;
    })
    .await;
}

/// Connects a store, and creates its tables.
pub(crate) async fn migrated(builder: PostgresStoreBuilder) -> PostgresStore {
    let store = builder.connect().await.unwrap();
    store.migrate().await.unwrap();
    store
}

pub(crate) fn told(error: &StoreError) -> String {
    format!("{error} {error:?}")
}

pub(crate) fn hex(token: Token) -> String {
    token.as_bytes().map(|byte| format!("{byte:02x}")).concat()
}
