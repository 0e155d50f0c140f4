//! The PostgreSQL store under load: outcomes behind a stalled network, large
//! responses, locked rows, and large tables.

mod large;
mod late;
mod lists;
mod locked;
mod proxy;

use std::{
    panic::{AssertUnwindSafe, resume_unwind},
    time::{Duration, Instant},
};

use bytes::Bytes;
use futures_util::FutureExt as _;
use tower_idempotency::{
    Fingerprint, Key, PostgresStore, RecordName, Scope, Store,
    sqlx::{
        AssertSqlSafe, ConnectOptions as _, Connection as _, PgConnection,
        postgres::PgConnectOptions, raw_sql,
    },
    store::{Claim, Claimed, Completion, Grant},
};

/// Runs a test against a new database, and drops the database after it.
pub(crate) async fn with_database(test: impl AsyncFnOnce(String)) {
    let server = std::env::var("DATABASE_URL").expect(
        "DATABASE_URL names no PostgreSQL server on which these tests may create databases; \
         ./tests/run starts one",
    );
    let database = format!("idempotency_{:016x}", rand::random::<u64>());
    run(&server, &format!("CREATE DATABASE {database}")).await;
    let url = options(&server).database(&database);
    let url = url.to_url_lossy().to_string();
    let outcome = AssertUnwindSafe(test(url)).catch_unwind().await;
    run(&server, &format!("DROP DATABASE {database} WITH (FORCE)")).await;
    if let Err(panic) = outcome {
        resume_unwind(panic);
    }
}

pub(crate) fn options(url: &str) -> PgConnectOptions {
    url.parse().unwrap()
}

/// A store with the defaults, and its tables.
pub(crate) async fn store(options: PgConnectOptions) -> PostgresStore {
    let store = PostgresStore::builder(options).connect().await.unwrap();
    store.migrate().await.unwrap();
    store
}

pub(crate) async fn run(url: &str, statements: &str) {
    let mut connection = PgConnection::connect(url).await.unwrap();
    raw_sql(AssertSqlSafe(statements.to_owned()))
        .execute(&mut connection)
        .await
        .unwrap();
    connection.close().await.unwrap();
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
