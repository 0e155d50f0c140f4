//! A shop in each database: its orders, and the store of its records.

use std::{
    fmt::Debug,
    ops::DerefMut,
    panic::{AssertUnwindSafe, resume_unwind},
    path::PathBuf,
};

use axum::{body::Body, response::Response};
use futures_util::FutureExt as _;
use tower_idempotency::{
    CommitError, Committed, Key, Operation, PostgresStore, PostgresTransaction, Scope, SqliteStore,
    SqliteTransaction, Store,
    sqlx::{
        self, ConnectOptions as _, PgConnection, PgPool, SqliteConnection,
        postgres::{PgConnectOptions, PgSslMode},
        query, query_as, raw_sql,
        sqlite::SqliteConnectOptions,
    },
    store::{Record, RecordName, RecordState},
};

use crate::databases::{CitusSchema, run, with_database};

/// The common part of both databases.
pub(crate) trait Shop: Clone + Send + Sync + 'static {
    type Store: Store + Clone + Debug;
    type Connection;
    type Transaction: DerefMut<Target = Self::Connection> + Send + 'static;

    fn store(&self) -> &Self::Store;

    fn begin(
        &self,
        operation: &Operation,
    ) -> impl Future<Output = Result<Self::Transaction, CommitError>> + Send;

    /// Orders `item`. An item that the shop does not have is refused at COMMIT.
    fn order(
        connection: &mut Self::Connection,
        operation: &Operation,
        item: &str,
    ) -> impl Future<Output = Result<(), sqlx::Error>> + Send;

    /// Runs a statement of the handler.
    fn run(
        connection: &mut Self::Connection,
        statement: &'static str,
    ) -> impl Future<Output = Result<(), sqlx::Error>> + Send;

    fn commit(
        &self,
        operation: &Operation,
        transaction: impl Into<Self::Transaction> + Send,
        response: Response,
    ) -> impl Future<Output = Result<Committed, CommitError>> + Send;

    fn roll_back(
        transaction: Self::Transaction,
    ) -> impl Future<Output = Result<(), CommitError>> + Send;

    /// The fences of the claims whose orders are committed.
    fn orders(&self) -> impl Future<Output = Vec<i64>> + Send;

    /// Lets all leases lapse.
    fn lapse(&self) -> impl Future<Output = ()> + Send;

    /// The record of a key of the only caller.
    fn record(&self, key: &str) -> impl Future<Output = Option<Record>> + Send {
        let name = RecordName::new(Scope::single_tenant(), Key::new(key));
        async move { self.store().read(&name).await.unwrap() }
    }

    /// Returns whether `key` has an order. Asserts that it has one, and only one,
    /// if and only if its record was completed by the claim that ordered.
    fn i5_has_order(&self, key: &str) -> impl Future<Output = bool> + Send {
        async move {
            let record = self.record(key).await;
            let orders = self.orders().await;
            match record {
                Some(record) if matches!(record.state, RecordState::Completed { .. }) => {
                    assert_eq!(orders, [i64::try_from(record.fence.get()).unwrap()]);
                    true
                }
                record => {
                    assert!(orders.is_empty(), "{orders:?} beside {record:?}");
                    false
                }
            }
        }
    }
}

#[derive(Clone)]
pub(crate) struct PostgresShop {
    pub(crate) url: String,
    pub(crate) pool: PgPool,
    pub(crate) store: PostgresStore,
}

impl Shop for PostgresShop {
    type Store = PostgresStore;
    type Connection = PgConnection;
    type Transaction = PostgresTransaction;

    fn store(&self) -> &PostgresStore {
        &self.store
    }

    async fn begin(&self, operation: &Operation) -> Result<Self::Transaction, CommitError> {
        self.store.begin(operation).await
    }

    async fn order(
        connection: &mut Self::Connection,
        operation: &Operation,
        item: &str,
    ) -> Result<(), sqlx::Error> {
        query("INSERT INTO orders (fence, item) VALUES ($1, $2)")
            .bind(i64::try_from(operation.fence().get()).unwrap())
            .bind(item)
            .execute(connection)
            .await
            .map(drop)
    }

    async fn run(
        connection: &mut Self::Connection,
        statement: &'static str,
    ) -> Result<(), sqlx::Error> {
        raw_sql(statement).execute(connection).await.map(drop)
    }

    async fn commit(
        &self,
        operation: &Operation,
        transaction: impl Into<Self::Transaction> + Send,
        response: Response,
    ) -> Result<Committed, CommitError> {
        self.store.commit(operation, transaction, response).await
    }

    async fn roll_back(transaction: Self::Transaction) -> Result<(), CommitError> {
        transaction.rollback().await
    }

    async fn orders(&self) -> Vec<i64> {
        orders(query_as(ORDERS).fetch_all(&self.pool).await)
    }

    async fn lapse(&self) {
        self.execute("UPDATE idempotency_records SET lease_until = claimed_at - 1000000")
            .await;
    }
}

impl PostgresShop {
    /// Runs statements on a new connection, directly to the server.
    pub(crate) async fn execute(&self, statements: &str) {
        run(&self.url, statements).await;
    }

    /// The same shop with another address of its records.
    pub(crate) fn with_store(&self, store: PostgresStore) -> Self {
        Self {
            store,
            ..self.clone()
        }
    }
}

#[derive(Clone)]
pub(crate) struct SqliteShop {
    pub(crate) file: PathBuf,
    pub(crate) store: SqliteStore,
}

impl Shop for SqliteShop {
    type Store = SqliteStore;
    type Connection = SqliteConnection;
    type Transaction = SqliteTransaction;

    fn store(&self) -> &SqliteStore {
        &self.store
    }

    async fn begin(&self, operation: &Operation) -> Result<Self::Transaction, CommitError> {
        self.store.begin(operation).await
    }

    async fn order(
        connection: &mut Self::Connection,
        operation: &Operation,
        item: &str,
    ) -> Result<(), sqlx::Error> {
        query("INSERT INTO orders (fence, item) VALUES (?1, ?2)")
            .bind(i64::try_from(operation.fence().get()).unwrap())
            .bind(item)
            .execute(connection)
            .await
            .map(drop)
    }

    async fn run(
        connection: &mut Self::Connection,
        statement: &'static str,
    ) -> Result<(), sqlx::Error> {
        raw_sql(statement).execute(connection).await.map(drop)
    }

    async fn commit(
        &self,
        operation: &Operation,
        transaction: impl Into<Self::Transaction> + Send,
        response: Response,
    ) -> Result<Committed, CommitError> {
        self.store.commit(operation, transaction, response).await
    }

    async fn roll_back(transaction: Self::Transaction) -> Result<(), CommitError> {
        transaction.rollback().await
    }

    async fn orders(&self) -> Vec<i64> {
        orders(query_as(ORDERS).fetch_all(&mut self.connect().await).await)
    }

    async fn lapse(&self) {
        raw_sql("UPDATE idempotency_records SET lease_until = claimed_at - 1000000")
            .execute(&mut self.connect().await)
            .await
            .unwrap();
    }
}

impl SqliteShop {
    pub(crate) async fn connect(&self) -> SqliteConnection {
        let options = SqliteConnectOptions::new().filename(&self.file);
        options.connect().await.unwrap()
    }
}

fn orders(rows: Result<Vec<(i64,)>, sqlx::Error>) -> Vec<i64> {
    rows.unwrap().into_iter().map(|(fence,)| fence).collect()
}

/// Opens a shop in a new PostgreSQL database, and drops the database after the
/// test.
pub(crate) async fn with_postgres(test: impl AsyncFnOnce(PostgresShop)) {
    with_database(async |url| in_shop(url, test).await).await;
}

/// Opens a shop in a new schema on Citus, whose orders are on the coordinator and whose
/// records are on the workers. Drops the schema after the test.
pub(crate) async fn with_citus(test: impl AsyncFnOnce(PostgresShop)) {
    let schema = CitusSchema::new();
    schema.create().await;
    let outcome = AssertUnwindSafe(in_shop(schema.url(), test)).catch_unwind();
    let outcome = outcome.await;
    schema.remove().await;
    if let Err(panic) = outcome {
        resume_unwind(panic);
    }
}

async fn in_shop(url: String, test: impl AsyncFnOnce(PostgresShop)) {
    let store = PostgresStore::builder(options(&url))
        .lock_timeout(SHORT)
        .connect()
        .await
        .unwrap();
    store.migrate().await.unwrap();
    run(&url, POSTGRES_SHOP).await;
    let pool = PgPool::connect_lazy_with(options(&url));
    let shop = PostgresShop { url, pool, store };
    test(shop.clone()).await;
    run(&shop.url, MARKS_EXACTLY_THE_UNKNOWN).await;
    shop.store.close().await;
    shop.pool.close().await;
}

/// The column that the index of unknown records is over.
const MARKS_EXACTLY_THE_UNKNOWN: &str = "
DO $$ BEGIN
    ASSERT NOT EXISTS (
        SELECT 1 FROM idempotency_records WHERE (state = 3) <> (unknown_since IS NOT NULL));
END $$";

/// Opens a shop in a new SQLite file.
pub(crate) async fn with_sqlite(test: impl AsyncFnOnce(SqliteShop)) {
    let name = format!("idempotency-{:016x}", rand::random::<u64>());
    let directory = std::env::temp_dir().join(name);
    std::fs::create_dir(&directory).unwrap();
    let outcome = AssertUnwindSafe(async {
        let file = directory.join("shop.db");
        let store = SqliteStore::open(&file).await.unwrap();
        let shop = SqliteShop { file, store };
        raw_sql(SQLITE_SHOP)
            .execute(&mut shop.connect().await)
            .await
            .unwrap();
        test(shop.clone()).await;
        shop.store.close().await;
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

/// A response with every part that is kept, and one that is not.
pub(crate) fn ordered(what: &str) -> Response {
    Response::builder()
        .status(201)
        .header("location", "/orders/1")
        .header("x-part", "one")
        .header("x-part", "two")
        .header("set-cookie", "cart=; Max-Age=0")
        .body(Body::from(format!("ordered {what}")))
        .unwrap()
}

/// Runs each test with each database.
macro_rules! with_each_database {
    ($($name:ident;)*) => {
        mod postgres {
            $(#[tokio::test(flavor = "multi_thread")]
            async fn $name() {
                crate::shop::with_postgres(super::$name).await;
            })*
        }

        mod citus {
            $(#[tokio::test(flavor = "multi_thread")]
            #[ignore = "needs the Citus of CITUS_URL"]
            async fn $name() {
                crate::shop::with_citus(super::$name).await;
            })*
        }

        mod sqlite {
            $(#[tokio::test(flavor = "multi_thread")]
            async fn $name() {
                crate::shop::with_sqlite(super::$name).await;
            })*
        }
    };
}
pub(crate) use with_each_database;

const ORDERS: &str = "SELECT fence FROM orders ORDER BY fence";

const POSTGRES_SHOP: &str = "
CREATE TABLE items (name text PRIMARY KEY);
INSERT INTO items VALUES ('pen');
CREATE TABLE orders (
    fence bigint NOT NULL,
    item text NOT NULL REFERENCES items (name) DEFERRABLE INITIALLY DEFERRED
)";

const SQLITE_SHOP: &str = "
CREATE TABLE items (name TEXT PRIMARY KEY);
INSERT INTO items VALUES ('pen');
CREATE TABLE orders (
    fence INTEGER NOT NULL,
    item TEXT NOT NULL REFERENCES items (name) DEFERRABLE INITIALLY DEFERRED
)";

/// The lock timeout of a store.
pub(crate) const SHORT: std::time::Duration = std::time::Duration::from_millis(100);
