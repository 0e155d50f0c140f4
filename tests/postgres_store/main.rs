//! The PostgreSQL store against a real server.

#[path = "../any_store/mod.rs"]
mod any_store;
mod batches;
mod connections;
mod fences;
mod guards;
mod indexes;
mod settings;
mod sweeps;
mod tables;

use std::panic::{AssertUnwindSafe, resume_unwind};

use futures_util::FutureExt as _;
use tower_idempotency::{
    PostgresStore, StoreError, Token,
    sqlx::{
        AssertSqlSafe, ConnectOptions as _, Connection as _, PgConnection,
        postgres::PgConnectOptions, raw_sql,
    },
};

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

pub(crate) async fn run(url: &str, statements: &str) {
    let mut connection = PgConnection::connect(url).await.unwrap();
    run_on(&mut connection, statements).await;
    connection.close().await.unwrap();
}

pub(crate) async fn run_on(connection: &mut PgConnection, statements: &str) {
    raw_sql(AssertSqlSafe(statements.to_owned()))
        .execute(connection)
        .await
        .unwrap();
}

pub(crate) fn told(error: &StoreError) -> String {
    format!("{error} {error:?}")
}

pub(crate) fn hex(token: Token) -> String {
    token.as_bytes().map(|byte| format!("{byte:02x}")).concat()
}
