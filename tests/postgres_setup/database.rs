//! A new database for each test.

use std::{
    panic::{AssertUnwindSafe, resume_unwind},
    time::Duration,
};

use futures_util::FutureExt as _;
use tower_idempotency::{
    Key, PostgresStore, Scope, StoreError,
    sqlx::{
        AssertSqlSafe, ConnectOptions as _, Connection as _, Decode, PgConnection, Postgres, Type,
        postgres::PgConnectOptions, query_scalar,
    },
    store::{Claim, Claimed, Completion, Fingerprint, PostgresStoreBuilder, RecordName},
};

use crate::databases;
pub(crate) use crate::databases::run_on;

/// The addresses of a new database: direct and through the pooler.
pub(crate) struct Database {
    pub(crate) options: PgConnectOptions,
    pub(crate) pooler: PgConnectOptions,
}

impl Database {
    pub(crate) fn builder(&self) -> PostgresStoreBuilder {
        PostgresStore::builder(self.options.clone())
    }

    pub(crate) async fn run(&self, statements: &str) {
        let mut connection: PgConnection = self.options.connect().await.unwrap();
        run_on(&mut connection, statements).await;
        connection.close().await.unwrap();
    }

    pub(crate) async fn ask<T>(&self, question: &str) -> T
    where
        T: Send + Unpin,
        for<'r> T: Decode<'r, Postgres> + Type<Postgres>,
    {
        self.asks(question).await.pop().unwrap()
    }

    pub(crate) async fn asks<T>(&self, question: &str) -> Vec<T>
    where
        T: Send + Unpin,
        for<'r> T: Decode<'r, Postgres> + Type<Postgres>,
    {
        let mut connection: PgConnection = self.options.connect().await.unwrap();
        query_scalar(AssertSqlSafe(question.to_owned()))
            .fetch_all(&mut connection)
            .await
            .unwrap()
    }
}

/// Runs a test against a new database, and drops the database after it.
pub(crate) async fn with_database(test: impl AsyncFnOnce(&Database)) {
    databases::Database::new()
        .around(async |created| {
            let database = Database {
                options: created.options(),
                pooler: created.pooler_options(),
            };
            test(&database).await;
        })
        .await;
}

/// Runs a test with a new role, and drops the role after it.
pub(crate) async fn with_role(database: &Database, test: impl AsyncFnOnce(String)) {
    let role = format!("role_{:016x}", rand::random::<u64>());
    database.run(&format!("CREATE ROLE {role}")).await;
    let outcome = AssertUnwindSafe(test(role.clone())).catch_unwind().await;
    let drop = format!("DROP OWNED BY {role}; DROP ROLE {role}");
    database.run(&drop).await;
    if let Err(panic) = outcome {
        resume_unwind(panic);
    }
}

pub(crate) fn told(error: &StoreError) -> String {
    error.to_string()
}

pub(crate) fn acquired(answer: Result<Claimed, StoreError>) {
    let answer = answer.unwrap();
    assert!(matches!(answer, Claimed::Acquired(_)), "{answer:?}");
}

pub(crate) fn name(key: &str) -> RecordName {
    RecordName::new(Scope::single_tenant(), Key::new(key))
}

pub(crate) fn hour() -> Claim {
    Claim::new(
        Fingerprint::from_bytes([1; Fingerprint::LENGTH]),
        HOUR,
        HOUR,
    )
}

pub(crate) fn done() -> Completion {
    Completion::new("done".into(), HOUR, Duration::ZERO)
}

pub(crate) const HOUR: Duration = Duration::from_secs(3600);
