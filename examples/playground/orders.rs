//! Orders in the store's own database, each committed with its response.

use std::{collections::BTreeMap, path::Path, process, time::Duration};

use axum::{
    Extension, Json,
    response::{IntoResponse, Response},
};
use http::{StatusCode, header::LOCATION};
use serde_json::json;
use tokio::time;
use tower_idempotency::{
    CommitError, Committed, Operation, PostgresStore, PostgresTransaction, SqliteStore,
    SqliteTransaction,
    sqlx::{
        self, FromRow, PgPool, SqlitePool, query, query_as, query_scalar, raw_sql,
        sqlite::SqliteConnectOptions,
    },
};

use crate::{
    caller::Account,
    handlers::{Mistake, Wishes},
    runs::Run,
};

/// The table of orders, where the store has a database for it.
#[derive(Clone)]
pub(crate) enum Orders {
    Nowhere,
    Sqlite(SqliteStore, SqlitePool),
    Postgres(PostgresStore, PgPool),
}

impl Orders {
    pub(crate) async fn in_file(store: SqliteStore, path: &Path) -> Result<Self, sqlx::Error> {
        let pool = SqlitePool::connect_lazy_with(SqliteConnectOptions::new().filename(path));
        raw_sql(SQLITE_TABLE).execute(&pool).await?;
        Ok(Self::Sqlite(store, pool))
    }

    pub(crate) async fn on_server(store: PostgresStore, url: &str) -> Result<Self, sqlx::Error> {
        let pool = PgPool::connect_lazy(url)?;
        raw_sql(POSTGRES_TABLE).execute(&pool).await?;
        Ok(Self::Postgres(store, pool))
    }

    /// The committed orders of each account; `None` if there can be none.
    pub(crate) async fn count(&self) -> Result<Option<BTreeMap<String, i64>>, sqlx::Error> {
        let counted: Vec<(String, i64)> = match self {
            Self::Nowhere => return Ok(None),
            Self::Sqlite(_, pool) => query_as(COUNT).fetch_all(pool).await?,
            // A simple query, which is safe behind any pooler.
            Self::Postgres(_, pool) => {
                let rows = raw_sql(COUNT).fetch_all(pool).await?;
                rows.iter()
                    .map(FromRow::from_row)
                    .collect::<Result<_, _>>()?
            }
        };
        Ok(Some(counted.into_iter().collect()))
    }

    /// `None` if the store keeps no orders.
    async fn begin(&self, operation: &Operation) -> Result<Option<Open<'_>>, CommitError> {
        Ok(match self {
            Self::Nowhere => None,
            Self::Sqlite(store, _) => Some(Open::Sqlite(store, store.begin(operation).await?)),
            Self::Postgres(store, _) => Some(Open::Postgres(store, store.begin(operation).await?)),
        })
    }
}

/// An order that is not committed.
enum Open<'a> {
    Sqlite(&'a SqliteStore, SqliteTransaction),
    Postgres(&'a PostgresStore, PostgresTransaction),
}

impl Open<'_> {
    async fn insert(&mut self, account: &str, operation: &Operation) -> Result<i64, sqlx::Error> {
        let operation = operation.id().to_string();
        match self {
            Self::Sqlite(_, transaction) => {
                query_scalar(INSERT)
                    .bind(account)
                    .bind(operation)
                    .fetch_one(&mut **transaction)
                    .await
            }
            Self::Postgres(_, transaction) => {
                query_scalar(INSERT)
                    // A pooler may give the next statement another connection.
                    .persistent(false)
                    .bind(account)
                    .bind(operation)
                    .fetch_one(&mut **transaction)
                    .await
            }
        }
    }

    /// Fails with an error that aborts the whole transaction.
    async fn insert_again(&mut self, id: i64) -> Result<(), sqlx::Error> {
        match self {
            Self::Sqlite(_, transaction) => {
                let again = query("INSERT OR ROLLBACK INTO playground_orders VALUES ($1, '', '')");
                again.bind(id).execute(&mut **transaction).await.map(drop)
            }
            Self::Postgres(_, transaction) => {
                let again = query("INSERT INTO playground_orders VALUES ($1, '', '')");
                let again = again.persistent(false).bind(id);
                again.execute(&mut **transaction).await.map(drop)
            }
        }
    }

    async fn roll_back(self) -> Result<(), CommitError> {
        match self {
            Self::Sqlite(_, transaction) => transaction.rollback().await,
            Self::Postgres(_, transaction) => transaction.rollback().await,
        }
    }

    async fn commit(
        self,
        operation: &Operation,
        response: Response,
    ) -> Result<Committed, CommitError> {
        match self {
            Self::Sqlite(store, transaction) => {
                store.commit(operation, transaction, response).await
            }
            Self::Postgres(store, transaction) => {
                store.commit(operation, transaction, response).await
            }
        }
    }
}

/// `mode` says what happens to the order on its way:
/// - `commit`, the default: nothing, 201;
/// - `rollback`: it is rolled back, and the handler says so with 503;
/// - `drop`: its transaction is dropped, and the handler says 201;
/// - `swallow`: a statement of its transaction fails, and the handler says 200;
/// - `crash-before`, `crash-after`: the process dies right before, or right
///   after, the order is committed.
///
/// `ms` is slept before the transaction begins, `hold_ms` while it is open. The
/// response gets `len` bytes of padding, none by default.
pub(crate) async fn order(
    Extension(orders): Extension<Orders>,
    Extension(Run(n)): Extension<Run>,
    account: Option<Extension<Account>>,
    operation: Option<Operation>,
    wishes: Wishes,
) -> Result<Response, CommitError> {
    let Some(operation) = operation else {
        let message = "an order needs an idempotency key";
        return Ok((StatusCode::BAD_REQUEST, message).into_response());
    };
    let numbers = || {
        Ok((
            wishes.number("ms", 0)?,
            wishes.number("hold_ms", 0)?,
            wishes.length()?,
        ))
    };
    let (pause, hold, length) = match numbers() {
        Ok(numbers) => numbers,
        Err::<_, Mistake>(mistake) => return Ok(mistake.into_response()),
    };
    time::sleep(Duration::from_millis(pause)).await;
    let Some(mut open) = orders.begin(&operation).await? else {
        let message = "this store keeps no orders";
        return Ok((StatusCode::NOT_IMPLEMENTED, message).into_response());
    };
    let account = account
        .as_ref()
        .map_or("-", |Extension(account)| account.as_str());
    let id = open.insert(account, &operation).await?;
    time::sleep(Duration::from_millis(hold)).await;
    let mut made = json!({ "n": n, "order": id });
    if length > 0 {
        made["padding"] = "x".repeat(length).into();
    }
    let location = [(LOCATION, format!("/orders/{id}"))];
    let response = (StatusCode::CREATED, location, Json(made)).into_response();
    match wishes.text("mode").unwrap_or("commit") {
        "commit" => {}
        "rollback" => {
            open.roll_back().await?;
            let message = "the order was rolled back";
            return Ok((StatusCode::SERVICE_UNAVAILABLE, message).into_response());
        }
        "drop" => {
            drop(open);
            return Ok(response);
        }
        "swallow" => {
            // Ignores this error and the next.
            let _ = open.insert_again(id).await;
            let _ = open.commit(&operation, response).await;
            return Ok("ordered, as far as this handler cares".into_response());
        }
        // Only the first attempt crashes, so that its retry can succeed.
        "crash-before" if operation.attempt() == 1 => process::abort(),
        "crash-after" if operation.attempt() == 1 => {
            let _ = open.commit(&operation, response).await?;
            process::abort();
        }
        "crash-before" | "crash-after" => {}
        mode => {
            let message = format!("mode: {mode:?} is no mode");
            return Ok((StatusCode::BAD_REQUEST, message).into_response());
        }
    }
    Ok(open.commit(&operation, response).await?.into_response())
}

/// Several processes may start at once.
const POSTGRES_TABLE: &str = "
SELECT pg_advisory_xact_lock(hashtext('playground_orders'));
CREATE TABLE IF NOT EXISTS playground_orders (
    id bigserial PRIMARY KEY,
    account text NOT NULL,
    operation text NOT NULL
)";

const SQLITE_TABLE: &str = "
CREATE TABLE IF NOT EXISTS playground_orders (
    id INTEGER PRIMARY KEY,
    account TEXT NOT NULL,
    operation TEXT NOT NULL
)";

const INSERT: &str =
    "INSERT INTO playground_orders (account, operation) VALUES ($1, $2) RETURNING id";

const COUNT: &str = "SELECT account, count(*) FROM playground_orders GROUP BY account";
