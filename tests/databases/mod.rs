//! Databases that tests create on the server of `DATABASE_URL`, and drop again.

#![allow(dead_code, reason = "not every test binary uses all of it")]

use std::panic::{AssertUnwindSafe, resume_unwind};

use futures_util::FutureExt as _;
use tower_idempotency::{
    PostgresStore,
    sqlx::{
        AssertSqlSafe, ConnectOptions as _, Connection as _, PgConnection,
        postgres::PgConnectOptions, raw_sql,
    },
};

/// The database of one test.
pub(crate) struct Database {
    server: PgConnectOptions,
    name: String,
}

impl Database {
    /// Chooses a new name. The database does not exist yet.
    pub(crate) fn new() -> Self {
        Self {
            server: address("DATABASE_URL"),
            name: format!("idempotency_{:016x}", rand::random::<u64>()),
        }
    }

    pub(crate) async fn create(&self) {
        self.run_on_server("CREATE DATABASE", "").await;
    }

    pub(crate) async fn remove(&self) {
        self.run_on_server("DROP DATABASE", "WITH (FORCE)").await;
    }

    async fn run_on_server(&self, statement: &str, options: &str) {
        let mut connection = self.server.connect().await.unwrap();
        let statement = format!("{statement} {} {options}", self.name);
        run_on(&mut connection, &statement).await;
        connection.close().await.unwrap();
    }

    pub(crate) fn options(&self) -> PgConnectOptions {
        self.server.clone().database(&self.name)
    }

    /// Its address through the pooler of `PGBOUNCER_URL`.
    pub(crate) fn pooler_options(&self) -> PgConnectOptions {
        address("PGBOUNCER_URL").database(&self.name)
    }

    pub(crate) fn url(&self) -> String {
        self.options().to_url_lossy().to_string()
    }

    /// Creates the database, runs a test, and drops the database whether or not
    /// the test panics.
    pub(crate) async fn around(self, test: impl AsyncFnOnce(&Self)) {
        self.create().await;
        let outcome = AssertUnwindSafe(test(&self)).catch_unwind().await;
        self.remove().await;
        if let Err(panic) = outcome {
            resume_unwind(panic);
        }
    }
}

/// A new schema in the database of `CITUS_URL`.
pub(crate) struct CitusSchema(String);

impl CitusSchema {
    /// Chooses a new name. The schema does not exist yet.
    pub(crate) fn new() -> Self {
        Self(format!("idempotency_{:016x}", rand::random::<u64>()))
    }

    /// Creates the schema, with a table of records that is distributed by key.
    pub(crate) async fn create(&self) {
        self.run(&format!("CREATE SCHEMA {}", self.0)).await;
        let store = PostgresStore::connect(&self.url()).await.unwrap();
        store.migrate().await.unwrap();
        store.close().await;
        self.run(
            "SET citus.shard_count = 4;
             SELECT create_distributed_table('idempotency_records', 'key')",
        )
        .await;
    }

    pub(crate) async fn remove(&self) {
        self.run(&format!("DROP SCHEMA IF EXISTS {} CASCADE", self.0))
            .await;
    }

    /// An address whose `search_path` is the schema.
    pub(crate) fn url(&self) -> String {
        let mut url = address("CITUS_URL").to_url_lossy();
        let search_path = format!("-c search_path={}", self.0);
        url.query_pairs_mut().append_pair("options", &search_path);
        url.to_string()
    }

    /// Runs statements, which find the tables of the schema.
    pub(crate) async fn run(&self, statements: &str) {
        run(&self.url(), statements).await;
    }
}

/// Runs a test with the URL of a new database.
pub(crate) async fn with_database(test: impl AsyncFnOnce(String)) {
    Database::new()
        .around(async |database| test(database.url()).await)
        .await;
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

pub(crate) fn address(variable: &str) -> PgConnectOptions {
    let url = std::env::var(variable)
        .unwrap_or_else(|_| panic!("{variable} is not set; ./tests/run starts what it names"));
    options(&url)
}
