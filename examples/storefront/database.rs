//! The database of the shop: PostgreSQL, or a file of SQLite.

use std::path::Path;

use tower_idempotency::{
    DynStore, SqliteStore,
    sqlx::{
        self, SqlitePool, query, query_as, query_scalar, raw_sql, sqlite::SqliteConnectOptions,
    },
};
#[cfg(feature = "postgres")]
use tower_idempotency::{PostgresStore, sqlx::PgPool};

use crate::{Error, consumer::PAYMENTS, ordered::ORDERS};

/// The store of the records, and a pool of the shop on the same database.
#[derive(Clone)]
pub(crate) enum Database {
    #[cfg(feature = "postgres")]
    Postgres(PostgresStore, PgPool),
    Sqlite(SqliteStore, SqlitePool),
}

/// Runs the same code on either database. The statements are the same, their types differ.
macro_rules! on_database {
    ($database:expr, |$store:ident, $pool:ident| $code:expr) => {
        match $database {
            #[cfg(feature = "postgres")]
            $crate::database::Database::Postgres($store, $pool) => $code,
            $crate::database::Database::Sqlite($store, $pool) => $code,
        }
    };
}
pub(crate) use on_database;

impl Database {
    /// Opens the database of `DATABASE_URL`, or else a file in `directory`.
    pub(crate) async fn open(directory: &Path) -> Result<Self, Error> {
        match std::env::var("DATABASE_URL") {
            Ok(url) => Self::open_postgres(&url).await,
            Err(_) => {
                let file = directory.join("shop.db");
                let store = SqliteStore::open(&file).await?;
                let pool = SqliteConnectOptions::new().filename(&file);
                Ok(Self::Sqlite(store, SqlitePool::connect_with(pool).await?))
            }
        }
    }

    #[cfg(feature = "postgres")]
    async fn open_postgres(url: &str) -> Result<Self, Error> {
        let store = PostgresStore::connect(url).await?;
        Ok(Self::Postgres(store, PgPool::connect(url).await?))
    }

    #[cfg(not(feature = "postgres"))]
    async fn open_postgres(_: &str) -> Result<Self, Error> {
        Err("DATABASE_URL needs `--features postgres`; without it, a file is used".into())
    }

    /// Creates the tables.
    pub(crate) async fn migrate(&self) -> Result<(), Error> {
        #[cfg(feature = "postgres")]
        if let Self::Postgres(store, _) = self {
            store.migrate().await?;
        }
        on_database!(self, |store, pool| {
            store.outbox(ORDERS)?.migrate().await?;
            store.inbox(PAYMENTS)?.migrate().await?;
            raw_sql(TABLES).execute(pool).await?;
        });
        Ok(())
    }

    pub(crate) fn store(&self) -> DynStore {
        on_database!(self, |store, _pool| DynStore::new(store.clone()))
    }

    /// The orders of the carts with this prefix, and the different carts among them.
    pub(crate) async fn orders(&self, prefix: &str) -> sqlx::Result<(i64, i64)> {
        on_database!(self, |_store, pool| query_as(ORDERED)
            .bind(prefix)
            .fetch_one(pool)
            .await)
    }

    /// The payments of the carts with this prefix, as [`orders`](Self::orders).
    pub(crate) async fn payments(&self, prefix: &str) -> sqlx::Result<(i64, i64)> {
        on_database!(self, |_store, pool| query_as(PAID)
            .bind(prefix)
            .fetch_one(pool)
            .await)
    }

    /// The events that no relay has published.
    pub(crate) async fn pending_events(&self) -> Result<u64, Error> {
        let lag = on_database!(self, |store, _pool| store.outbox(ORDERS)?.lag().await?);
        Ok(lag.events)
    }

    /// The statements, and the different periods among them.
    pub(crate) async fn statements(&self) -> sqlx::Result<(i64, i64)> {
        on_database!(self, |_store, pool| query_as(STATEMENTS)
            .fetch_one(pool)
            .await)
    }

    /// The pieces taken from the stock.
    pub(crate) async fn taken(&self) -> sqlx::Result<i64> {
        on_database!(self, |_store, pool| query_scalar(TAKEN)
            .fetch_one(pool)
            .await)
    }

    /// Locks what each claim needs, as a database that does not answer. Ends when the
    /// future is dropped.
    pub(crate) async fn stall(&self) -> sqlx::Result<std::convert::Infallible> {
        match self {
            #[cfg(feature = "postgres")]
            Self::Postgres(_, pool) => {
                let mut transaction = pool.begin().await?;
                let lock =
                    "LOCK TABLE idempotency_records, orders, payments IN ACCESS EXCLUSIVE MODE";
                query(lock).execute(&mut *transaction).await?;
                std::future::pending().await
            }
            Self::Sqlite(_, pool) => {
                let mut transaction = pool.begin_with("BEGIN IMMEDIATE").await?;
                query("SELECT 1").execute(&mut *transaction).await?;
                std::future::pending().await
            }
        }
    }
}

const TABLES: &str = "
CREATE TABLE IF NOT EXISTS stock (item text PRIMARY KEY, taken bigint NOT NULL);
INSERT INTO stock VALUES ('pen', 0) ON CONFLICT DO NOTHING;
CREATE TABLE IF NOT EXISTS orders (operation text PRIMARY KEY, cart text NOT NULL);
CREATE TABLE IF NOT EXISTS payments (operation text NOT NULL, cart text NOT NULL);
CREATE TABLE IF NOT EXISTS statements (period text NOT NULL, payments bigint NOT NULL)";

const ORDERED: &str = "
SELECT count(*), count(DISTINCT cart) FROM orders WHERE substr(cart, 1, length($1)) = $1";

const PAID: &str = "
SELECT count(*), count(DISTINCT cart) FROM payments WHERE substr(cart, 1, length($1)) = $1";

const STATEMENTS: &str = "SELECT count(*), count(DISTINCT period) FROM statements";

const TAKEN: &str = "SELECT taken FROM stock WHERE item = 'pen'";
