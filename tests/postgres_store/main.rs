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
mod settings;
mod sweeps;
mod tables;

use tower_idempotency::{PostgresStore, StoreError, Token};

use crate::databases::with_database;

/// Runs a test against a new, migrated database.
pub(crate) async fn with_store(test: impl AsyncFnOnce(PostgresStore, String)) {
    with_database(async |url| {
        let store = PostgresStore::connect(&url).await.unwrap();
        store.migrate().await.unwrap();
        test(store.clone(), url).await;
        store.close().await;
    })
    .await;
}

pub(crate) fn told(error: &StoreError) -> String {
    format!("{error} {error:?}")
}

pub(crate) fn hex(token: Token) -> String {
    token.as_bytes().map(|byte| format!("{byte:02x}")).concat()
}
