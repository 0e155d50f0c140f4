//! A database of an application with a store in it.

use std::{
    panic::{AssertUnwindSafe, resume_unwind},
    path::PathBuf,
};

use futures_util::FutureExt as _;
use tower_idempotency::{
    PostgresStore, SqliteStore,
    messages::{Inbox, InboxStore, MessageError, Outbox, OutboxStore},
    sqlx::{
        self, AssertSqlSafe, Database, PgPool, Postgres, Sqlite, SqlitePool, Transaction,
        pool::PoolConnection,
        postgres::{PgConnectOptions, PgPoolOptions, PgSslMode},
        raw_sql,
        sqlite::{SqliteConnectOptions, SqlitePoolOptions},
    },
};

use crate::databases::with_database;

pub(crate) type Connection<S> = <<S as Shop>::Sql as Database>::Connection;

/// The common part of both databases. `effects` has a text of each effect.
pub(crate) trait Shop: Clone + Send + Sync + 'static {
    type Sql: Database;
    type Store: InboxStore<Sql = Self::Sql> + OutboxStore<Sql = Self::Sql>;

    fn try_inbox(&self, consumer: &str) -> Result<Inbox<Self::Store>, MessageError>;

    fn try_outbox(&self, topic: &str) -> Result<Outbox<Self::Store>, MessageError>;

    fn outbox(&self, topic: &str) -> Outbox<Self::Store> {
        self.try_outbox(topic).unwrap()
    }

    fn inbox(&self, consumer: &str) -> Inbox<Self::Store> {
        self.try_inbox(consumer).unwrap()
    }

    /// A connection of the application.
    fn connect(&self) -> impl Future<Output = PoolConnection<Self::Sql>> + Send;

    /// Begins a transaction on a connection of the application, which can write.
    fn begin(&self) -> impl Future<Output = Transaction<'static, Self::Sql>> + Send;

    /// Runs statements of the application.
    fn run(
        on: &mut Connection<Self>,
        statements: &str,
    ) -> impl Future<Output = Result<(), sqlx::Error>> + Send;

    fn all(&self, query: &'static str) -> impl Future<Output = Vec<String>> + Send;

    /// How a child process finds the database.
    fn address(&self) -> String;

    fn effect(
        on: &mut Connection<Self>,
        effect: &str,
    ) -> impl Future<Output = Result<(), sqlx::Error>> + Send {
        let statement = format!("INSERT INTO effects (effect) VALUES ('{effect}')");
        async move { Self::run(on, &statement).await }
    }

    fn effects(&self) -> impl Future<Output = Vec<String>> + Send {
        self.all("SELECT effect FROM effects ORDER BY effect")
    }
}

#[derive(Clone)]
pub(crate) struct PostgresShop {
    pub(crate) url: String,
    pub(crate) pool: PgPool,
    pub(crate) store: PostgresStore,
}

impl PostgresShop {
    pub(crate) async fn open(url: &str) -> Self {
        let store = PostgresStore::builder(options(url))
            .connect()
            .await
            .unwrap();
        let pool = PgPoolOptions::new().connect_lazy_with(options(url));
        let url = url.to_owned();
        Self { url, pool, store }
    }

    async fn close(self) {
        self.store.close().await;
        self.pool.close().await;
    }
}

impl Shop for PostgresShop {
    type Sql = Postgres;
    type Store = PostgresStore;

    fn try_outbox(&self, topic: &str) -> Result<Outbox<PostgresStore>, MessageError> {
        self.store.outbox(topic)
    }

    fn try_inbox(&self, consumer: &str) -> Result<Inbox<PostgresStore>, MessageError> {
        self.store.inbox(consumer)
    }

    async fn connect(&self) -> PoolConnection<Self::Sql> {
        self.pool.acquire().await.unwrap()
    }

    async fn begin(&self) -> Transaction<'static, Postgres> {
        self.pool.begin().await.unwrap()
    }

    async fn run(on: &mut Connection<Self>, statements: &str) -> Result<(), sqlx::Error> {
        let statements = AssertSqlSafe(statements.to_owned());
        raw_sql(statements).execute(on).await.map(drop)
    }

    async fn all(&self, query: &'static str) -> Vec<String> {
        sqlx::query_scalar(query)
            .fetch_all(&self.pool)
            .await
            .unwrap()
    }

    fn address(&self) -> String {
        self.url.clone()
    }
}

#[derive(Clone)]
pub(crate) struct SqliteShop {
    pub(crate) file: PathBuf,
    pub(crate) pool: SqlitePool,
    pub(crate) store: SqliteStore,
}

impl SqliteShop {
    pub(crate) async fn open(file: impl Into<PathBuf>) -> Self {
        let file = file.into();
        let store = SqliteStore::open(&file).await.unwrap();
        let options = SqliteConnectOptions::new().filename(&file);
        let pool = SqlitePoolOptions::new().connect_lazy_with(options);
        Self { file, pool, store }
    }

    async fn close(self) {
        self.store.close().await;
        self.pool.close().await;
    }
}

impl Shop for SqliteShop {
    type Sql = Sqlite;
    type Store = SqliteStore;

    fn try_outbox(&self, topic: &str) -> Result<Outbox<SqliteStore>, MessageError> {
        self.store.outbox(topic)
    }

    fn try_inbox(&self, consumer: &str) -> Result<Inbox<SqliteStore>, MessageError> {
        self.store.inbox(consumer)
    }

    async fn connect(&self) -> PoolConnection<Self::Sql> {
        self.pool.acquire().await.unwrap()
    }

    async fn begin(&self) -> Transaction<'static, Sqlite> {
        self.pool.begin_with("BEGIN IMMEDIATE").await.unwrap()
    }

    async fn run(on: &mut Connection<Self>, statements: &str) -> Result<(), sqlx::Error> {
        let statements = AssertSqlSafe(statements.to_owned());
        raw_sql(statements).execute(on).await.map(drop)
    }

    async fn all(&self, query: &'static str) -> Vec<String> {
        sqlx::query_scalar(query)
            .fetch_all(&self.pool)
            .await
            .unwrap()
    }

    fn address(&self) -> String {
        self.file.display().to_string()
    }
}

/// Opens a shop in a new PostgreSQL database, and drops the database after the test.
pub(crate) async fn with_postgres(test: impl AsyncFnOnce(PostgresShop)) {
    with_database(async |url| {
        let shop = PostgresShop::open(&url).await;
        raw_sql(EFFECTS).execute(&shop.pool).await.unwrap();
        shop.inbox("any").migrate().await.unwrap();
        shop.outbox("any").migrate().await.unwrap();
        test(shop.clone()).await;
        shop.close().await;
    })
    .await;
}

/// Opens a shop in a new SQLite file.
pub(crate) async fn with_sqlite(test: impl AsyncFnOnce(SqliteShop)) {
    let name = format!("idempotency-{:016x}", rand::random::<u64>());
    let directory = std::env::temp_dir().join(name);
    std::fs::create_dir(&directory).unwrap();
    let outcome = AssertUnwindSafe(async {
        let shop = SqliteShop::open(directory.join("shop.db")).await;
        raw_sql(EFFECTS).execute(&shop.pool).await.unwrap();
        shop.inbox("any").migrate().await.unwrap();
        shop.outbox("any").migrate().await.unwrap();
        test(shop.clone()).await;
        shop.close().await;
    })
    .catch_unwind()
    .await;
    std::fs::remove_dir_all(&directory).unwrap();
    if let Err(panic) = outcome {
        resume_unwind(panic);
    }
}

pub(crate) fn options(url: &str) -> PgConnectOptions {
    let options: PgConnectOptions = url.parse().unwrap();
    options.ssl_mode(PgSslMode::Disable)
}

/// Runs each test with each database.
macro_rules! with_each_database {
    ($($name:ident;)*) => {
        mod postgres {
            $(#[tokio::test(flavor = "multi_thread")]
            async fn $name() {
                Box::pin(crate::shop::with_postgres(super::$name)).await;
            })*
        }

        mod sqlite {
            $(#[tokio::test(flavor = "multi_thread")]
            async fn $name() {
                Box::pin(crate::shop::with_sqlite(super::$name)).await;
            })*
        }
    };
}
pub(crate) use with_each_database;

const EFFECTS: &str = "CREATE TABLE effects (effect text NOT NULL CHECK (effect <> 'refused'))";
