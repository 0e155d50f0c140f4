//! The handler's own transaction, which completes its record and commits both.

use std::sync::Arc;

use sqlx::{Connection as _, Postgres, Transaction, pool::PoolOptions, query, query_as};

#[cfg(doc)]
use super::PostgresStoreBuilder;
use super::{
    PostgresStore,
    failures::{failure, sqlstate},
    schema::Statements,
    statements::CommitCall,
};
use crate::{
    Operation, StoreError,
    store::{
        Completion, Transitioned, sql,
        sql::commit::{ClaimStatus, CommitBackend, CommitFuture, CommitResponse, ENDED, commit},
        sql::commit_error::{CommitError, CommitErrorKind},
        sql::transaction::OperationTransaction,
    },
};

impl PostgresStore {
    /// Begins a transaction for the handler's own writes, to be ended by
    /// [`commit`](Self::commit) or
    /// [`rollback`](OperationTransaction::rollback). It is READ COMMITTED and
    /// read-write, on one of the store's connections for transactions, without a
    /// statement timeout.
    ///
    /// Dropped, it is rolled back, as after a crash. A dropped call leaves no
    /// transaction behind.
    ///
    /// # Errors
    ///
    /// [`Unavailable`](CommitErrorKind::Unavailable) if the server cannot be
    /// reached or no connection is free within
    /// [`acquire_timeout`](PostgresStoreBuilder::acquire_timeout), and
    /// [`LeaseLost`](CommitErrorKind::LeaseLost). Both are 503 with `Retry-After`.
    pub async fn begin(&self, operation: &Operation) -> Result<PostgresTransaction, CommitError> {
        let (pool, pooled) = (self.transactions.clone(), self.pooled.clone());
        let connections = Arc::clone(&self.connections);
        let patience = pool
            .options()
            .get_acquire_timeout()
            .saturating_add(self.connections.deadline);
        OperationTransaction::begin(operation, async move {
            connections.check()?;
            let begin = async {
                match pooled {
                    None => pool.begin_with(BEGIN).await,
                    Some(pooled) => pool.begin_with(pooled).await,
                }
            };
            let began = connections.while_reachable(patience, begin).await?;
            began
                .unwrap_or(Err(sqlx::Error::PoolTimedOut))
                .map_err(|error| not_begun(error, pool.options()))
        })
        .await
    }

    /// Commits `transaction` together with `response`: after a crash at any
    /// moment, either both are there or neither is.
    ///
    /// The response is written as the last statement, and COMMIT is sent by a
    /// task that goes on when the caller is dropped. If its answer gets lost, the
    /// record is asked, which waits for the transaction's end. A transaction
    /// from another pool is accepted if it is READ COMMITTED and on the store's
    /// database. One that has ended before, by a statement of the handler's own
    /// or by the database, records nothing.
    ///
    /// The handler may set a `search_path` and a role of its own in the
    /// transaction. If that role may not write to the records, the session's own
    /// role completes the record. The handler's role and `search_path` are restored
    /// before COMMIT, so that deferred triggers run under them.
    ///
    /// ```
    /// # use axum::{Router, body::Body, routing::post};
    /// # use http::Request;
    /// # use tower::ServiceExt;
    /// # use tower_idempotency::{IdempotencyLayer, Scope, sqlx::{Connection, PgConnection}};
    /// use axum::extract::State;
    /// use http::StatusCode;
    /// use tower_idempotency::{CommitError, Committed, Operation, PostgresStore, sqlx};
    ///
    /// async fn order(
    ///     State(store): State<PostgresStore>,
    ///     operation: Operation,
    /// ) -> Result<Committed, CommitError> {
    ///     let mut transaction = store.begin(&operation).await?;
    ///     sqlx::query("INSERT INTO orders (operation) VALUES ($1)")
    ///         .bind(operation.id().to_string())
    ///         .execute(&mut *transaction)
    ///         .await?;
    ///     let response = (StatusCode::CREATED, "ordered"); // any `IntoResponse`
    ///     store.commit(&operation, transaction, response).await
    /// }
    /// # #[tokio::main(flavor = "current_thread")]
    /// # async fn main() -> Result<(), Box<dyn std::error::Error>> {
    /// # let Ok(server) = std::env::var("DATABASE_URL") else { return Ok(()) };
    /// # let mut admin = PgConnection::connect(&server).await?;
    /// # let database = format!("idempotency_commit_{}", std::process::id());
    /// # let statement = |what: &str| sqlx::AssertSqlSafe(format!("{what} DATABASE {database}"));
    /// # sqlx::raw_sql(statement("CREATE")).execute(&mut admin).await?;
    /// # let options: sqlx::postgres::PgConnectOptions = server.parse()?;
    /// # let store = PostgresStore::builder(options.clone().database(&database)).connect().await?;
    /// # store.migrate().await?;
    /// # let mut shop = PgConnection::connect_with(&options.database(&database)).await?;
    /// # sqlx::raw_sql("CREATE TABLE orders (operation text)").execute(&mut shop).await?;
    /// # let layer = IdempotencyLayer::required(store.clone(), |_| Some(Scope::single_tenant()));
    /// # let app = Router::new()
    /// #     .route("/orders", post(order).layer(layer.build()?))
    /// #     .with_state(store.clone());
    /// # for replayed in [false, true] {
    /// #     let request = Request::post("/orders").header("idempotency-key", "k");
    /// #     let response = app.clone().oneshot(request.body(Body::empty())?).await?;
    /// #     assert_eq!(response.status(), StatusCode::CREATED);
    /// #     assert_eq!(response.headers().contains_key("idempotent-replayed"), replayed);
    /// # }
    /// # let orders: i64 = sqlx::query_scalar("SELECT count(*) FROM orders").fetch_one(&mut shop).await?;
    /// # assert_eq!(orders, 1);
    /// # store.close().await;
    /// # shop.close().await?;
    /// # sqlx::raw_sql(statement("DROP")).execute(&mut admin).await?;
    /// # Ok(())
    /// # }
    /// ```
    ///
    /// # Errors
    ///
    /// A [`CommitError`], whose kind says what is known. Return it, or the
    /// handler's own response to it; if the handler answers as if it had been
    /// committed, the client gets 500 `rolled-back`.
    pub fn commit(
        &self,
        operation: &Operation,
        transaction: impl Into<PostgresTransaction>,
        response: impl CommitResponse,
    ) -> CommitFuture {
        commit(self.clone(), operation, transaction.into(), response)
    }
}

/// A transaction that [`PostgresStore::begin`] began, on a connection of sqlx for
/// PostgreSQL.
pub type PostgresTransaction = OperationTransaction<Postgres>;

impl CommitBackend for PostgresStore {
    type Database = Postgres;

    async fn complete(
        &self,
        transaction: &mut Transaction<'static, Postgres>,
        operation: &Operation,
        completion: &Completion,
    ) -> Result<Transitioned, CommitError> {
        // A savepoint whose beginning was dropped takes the transaction with it.
        if !transaction.is_in_transaction() {
            return Err(CommitError::caused(CommitErrorKind::Aborted, ENDED));
        }
        let sql = &self.connections.sql;
        let persistent = self.pooled.is_none();
        let (isolation, path, role): (String, Option<String>, Option<String>) =
            query_as(sql.prepare.clone())
                .persistent(persistent)
                .bind(operation.token().as_bytes().as_slice())
                .fetch_one(&mut **transaction)
                .await
                .map_err(|error| refused(sql, error))?;
        if isolation != "read committed" {
            return Err(CommitError::new(CommitErrorKind::Isolation));
        }
        let (completed, still_open): (bool, bool) = query_as(sql.complete.clone())
            .persistent(persistent)
            .bind(operation.name().scope().as_str())
            .bind(operation.name().key().as_str())
            .bind(operation.token().as_bytes().as_slice())
            .bind(&completion.response[..])
            .bind(sql::micros(completion.retention))
            .bind(sql::micros(completion.at_least))
            .fetch_one(&mut **transaction)
            .await
            .map_err(|error| refused(sql, error))?;
        match (completed, still_open) {
            (true, _) => {
                // What runs at COMMIT, as deferred triggers do, is the handler's.
                if path.is_some() || role.is_some() {
                    query(RESTORE)
                        .persistent(persistent)
                        .bind(path)
                        .bind(role)
                        .execute(&mut **transaction)
                        .await
                        .map_err(|error| refused(sql, error))?;
                }
                Ok(Transitioned::Applied)
            }
            (false, true) => Ok(Transitioned::Superseded),
            (false, false) => Err(CommitError::caused(CommitErrorKind::Aborted, ENDED)),
        }
    }

    fn is_abort(error: &sqlx::Error) -> bool {
        sqlstate(error).is_some_and(|code| {
            code.starts_with("23") || matches!(&*code, "40001" | "40P01" | "25P02")
        })
    }

    async fn claim_status(&self, operation: &Operation) -> Result<ClaimStatus, StoreError> {
        let (name, token) = (operation.name().clone(), operation.token());
        let settled = self.commits.call(CommitCall { name, token }).await?;
        sql::claim_status(settled)
    }
}

fn not_begun(error: sqlx::Error, pool: &PoolOptions<Postgres>) -> CommitError {
    let kind = CommitErrorKind::Unavailable;
    match error {
        sqlx::Error::PoolTimedOut => {
            let reason = format!(
                "no connection for a transaction was free or could be opened within {:?}, \
                 `transaction_connections` is {}",
                pool.get_acquire_timeout(),
                pool.get_max_connections(),
            );
            CommitError::caused(kind, reason)
        }
        error => CommitError::caused(kind, error),
    }
}

/// A statement that failed before COMMIT was sent.
fn refused(sql: &Statements, error: sqlx::Error) -> CommitError {
    match sqlstate(&error).as_deref() {
        // The table of records is not there.
        Some("42P01") => CommitError::caused(CommitErrorKind::OtherDatabase, error),
        // Neither the handler's role nor the session's may write to it.
        Some("42501") => CommitError::caused(CommitErrorKind::Aborted, sql.explain(failure(error))),
        _ => CommitError::caused(CommitErrorKind::Aborted, error),
    }
}

pub(super) const BEGIN: &str = "BEGIN ISOLATION LEVEL READ COMMITTED READ WRITE";

/// What is said here lasts as long as the transaction: [`COMPLETE`] does nothing
/// if it ended meanwhile or before, by a ROLLBACK that the driver sent or the
/// handler wrote, and each statement would commit on its own. A transaction of
/// another pool is made as durable as the store's own.
///
/// The record is completed with the `search_path` of a new session: the
/// handler's may lead to operators that a tenant has made. If the handler's role
/// may not write to the records, the session's role completes the record. Returns
/// the settings it changed, for [`RESTORE`]. Functions and operators are
/// qualified, because this statement still runs with the handler's `search_path`.
pub(super) const PREPARE: &str = "
SELECT before.isolation,
       CASE WHEN said.path OPERATOR(pg_catalog.<>) before.path THEN before.path END,
       CASE WHEN said.role OPERATOR(pg_catalog.<>) before.role THEN before.role END
FROM (
    SELECT pg_catalog.current_setting('transaction_isolation') AS isolation,
           pg_catalog.current_setting('search_path') AS path,
           pg_catalog.current_setting('role') AS role,
           CASE
               WHEN pg_catalog.current_setting('role') OPERATOR(pg_catalog.=) 'none' THEN true
               ELSE EXISTS (
                   SELECT FROM pg_catalog.pg_class AS class
                       JOIN pg_catalog.pg_namespace AS namespace
                           ON namespace.oid OPERATOR(pg_catalog.=) class.relnamespace
                   WHERE namespace.nspname OPERATOR(pg_catalog.=) {schema}
                     AND class.relname OPERATOR(pg_catalog.=) 'idempotency_records'
                     AND pg_catalog.has_schema_privilege(namespace.oid, 'USAGE')
                     AND pg_catalog.has_table_privilege(class.oid, 'SELECT')
                     AND pg_catalog.has_table_privilege(class.oid, 'UPDATE'))
           END AS may_complete
    OFFSET 0
) AS before CROSS JOIN LATERAL (
    SELECT pg_catalog.set_config(
               'tower_idempotency.completes', pg_catalog.encode($1, 'hex'), true),
           pg_catalog.set_config('synchronous_commit',
               CASE
                   WHEN pg_catalog.current_setting('synchronous_commit')
                       OPERATOR(pg_catalog.=) 'remote_apply' THEN 'remote_apply'
                   ELSE 'on'
               END, true),
           pg_catalog.set_config('search_path', NULL, true) AS path,
           CASE
               WHEN before.may_complete THEN before.role
               ELSE pg_catalog.set_config('role', NULL, true)
           END AS role
    OFFSET 0
) AS said";

const RESTORE: &str = "
SELECT CASE WHEN $1::pg_catalog.text IS NOT NULL THEN
           pg_catalog.set_config('search_path', $1, true) END,
       CASE WHEN $2::pg_catalog.text IS NOT NULL THEN
           pg_catalog.set_config('role', $2, true) END";

/// Only an open claim: one that was completed already, even by this token, must
/// not take further writes with it.
pub(super) const COMPLETE: &str = "
WITH transaction AS MATERIALIZED (
    SELECT COALESCE(
        current_setting('tower_idempotency.completes', true) = encode($3, 'hex'),
        false) AS is_open
), completed AS (
    UPDATE {records}
    SET state = 2,
        response = $4,
        unknown_since = NULL,
        expires_at = GREATEST(
            claimed_at + $5 * interval '1 microsecond',
            clock_timestamp() + $6 * interval '1 microsecond')
    WHERE scope = $1 AND key = $2 AND token = $3 AND state IN (1, 3)
      AND (SELECT is_open FROM transaction)
    RETURNING 1
)
SELECT EXISTS (SELECT FROM completed), is_open
FROM transaction";
