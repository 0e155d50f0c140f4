//! Transactions of handlers in PostgreSQL.

use sqlx::{Connection as _, Postgres, SqlStr, Transaction, query, query_as, query_scalar};

#[cfg(feature = "guard")]
use super::commit::commit_value;
use super::{
    OperationTransaction,
    commit::{ClaimStatus, CommitBackend, CommitFuture, ENDED, commit},
    error::CommitError,
    kind::CommitErrorKind,
    response::CommitResponse,
};
use crate::{
    operation::Operation,
    store::{
        Completion, PostgresStore, StoreError, Token, Transitioned,
        postgres::{
            error::{failure, sqlstate},
            parameters::micros,
            transactions::HandlerTransactions,
        },
        sql::columns::{
            COMPLETED, IN_PROGRESS, RELEASED_ANY_REQUEST, RELEASED_SAME_REQUEST, UNKNOWN,
        },
    },
};

impl PostgresStore {
    /// Begins a transaction for the handler's own writes.
    ///
    /// It ends with [`commit`](Self::commit) or
    /// [`rollback`](OperationTransaction::rollback). If it is dropped, it is rolled
    /// back, as after a crash. A dropped call leaves no transaction behind.
    ///
    /// The transaction is READ COMMITTED and read-write, on one of the store's
    /// connections for transactions, without a statement timeout.
    ///
    /// # Errors
    ///
    /// [`Unavailable`](CommitErrorKind::Unavailable) if the server cannot be
    /// reached or no connection is free within
    /// [`acquire_timeout`](crate::store::PostgresStoreBuilder::acquire_timeout), and
    /// [`LeaseLost`](CommitErrorKind::LeaseLost). Both are 503 with `Retry-After`.
    pub async fn begin(&self, operation: &Operation) -> Result<PostgresTransaction, CommitError> {
        let store = self.clone();
        let begin = store.inner.transactions.begin.clone();
        OperationTransaction::begin(operation, async move { store.begin_with(begin).await }).await
    }

    /// Commits `transaction` together with `response`: after a crash at any
    /// moment, either both are stored or neither is.
    ///
    /// The response is written by the last statement. A task sends COMMIT, even if the
    /// caller is dropped meanwhile. If the answer to COMMIT gets lost, the store reads
    /// the record once the transaction has ended. A transaction from another pool is
    /// accepted if it is READ COMMITTED and on the store's database. A transaction that
    /// has ended before, by a statement of the handler or by the database, records
    /// nothing.
    ///
    /// The handler may set a `search_path` and a role in the transaction. If that role
    /// may not write to the records, the session's own role completes the record. The
    /// handler's role and `search_path` are restored before COMMIT, so that deferred
    /// triggers run under them.
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
    /// Fails with a [`CommitError`] whose kind tells whether the transaction may be
    /// committed. Return it, or a response of the handler's own for it. If the handler
    /// answers as if the transaction were committed, the client gets 500 `rolled-back`.
    pub fn commit(
        &self,
        operation: &Operation,
        transaction: impl Into<PostgresTransaction>,
        response: impl CommitResponse,
    ) -> CommitFuture {
        commit(self.clone(), operation, transaction.into(), response)
    }

    /// Commits `transaction` together with the value of a [`Guard`](crate::Guard)'s work:
    /// after a crash at any moment, either both are stored or neither is.
    ///
    /// It is [`commit`](Self::commit) with a value in place of a response. Return the value
    /// from the work. Whatever the work returns, its caller and later calls receive the
    /// committed value.
    ///
    /// # Errors
    ///
    /// Those of [`commit`](Self::commit), and
    /// [`ResponseNotKept`](CommitErrorKind::ResponseNotKept) if the value cannot be written
    /// as JSON, exceeds [`max_value`](crate::GuardBuilder::max_value), or the operation is
    /// not that of a guard. Return the error from the work: if the work returns a value
    /// instead, its caller receives [`RolledBack`](crate::RunError::RolledBack).
    #[cfg(feature = "guard")]
    pub fn commit_value(
        &self,
        operation: &Operation,
        transaction: impl Into<PostgresTransaction>,
        value: &(impl serde::Serialize + ?Sized),
    ) -> CommitFuture<()> {
        commit_value(self.clone(), operation, transaction.into(), value)
    }
}

/// A transaction that [`PostgresStore::begin`] began, on an sqlx connection to
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
        // A savepoint that was dropped while it began takes the transaction with it.
        if !transaction.is_in_transaction() {
            return Err(CommitError::caused(CommitErrorKind::Aborted, ENDED));
        }
        let HandlerTransactions {
            sql, persistent, ..
        } = &self.inner.transactions;
        let refused = |error| self.refused(error);
        let (isolation, path, role): (String, Option<String>, Option<String>) =
            query_as(sql.prepare.clone())
                .persistent(*persistent)
                .bind(operation.token().as_bytes().as_slice())
                .fetch_one(&mut **transaction)
                .await
                .map_err(refused)?;
        if isolation != "read committed" {
            return Err(CommitError::new(CommitErrorKind::Isolation));
        }
        let completed = query(sql.complete.clone())
            .persistent(*persistent)
            .bind(operation.name().scope().as_str())
            .bind(operation.name().key().as_str())
            .bind(operation.token().as_bytes().as_slice())
            .bind(&completion.response[..])
            .bind(micros(completion.retention))
            .bind(micros(completion.at_least))
            .execute(&mut **transaction)
            .await
            .map_err(refused)?;
        if completed.rows_affected() == 0 {
            let is_open = self.is_still_open(transaction, operation.token()).await?;
            return match is_open {
                true => Ok(Transitioned::Superseded),
                false => Err(CommitError::caused(CommitErrorKind::Aborted, ENDED)),
            };
        }
        // Deferred triggers run at COMMIT, with the handler's settings.
        if path.is_some() || role.is_some() {
            query(RESTORE)
                .persistent(*persistent)
                .bind(path)
                .bind(role)
                .execute(&mut **transaction)
                .await
                .map_err(refused)?;
        }
        Ok(Transitioned::Applied)
    }

    #[cfg(feature = "outbox")]
    fn committed(&self, begun: Option<std::time::Instant>) {
        self.wake_relays(begun);
    }

    fn is_abort(error: &sqlx::Error) -> bool {
        sqlstate(error).is_some_and(|code| {
            code.starts_with("23") || matches!(&*code, "40001" | "40P01" | "25P02")
        })
    }

    async fn claim_status(&self, operation: &Operation) -> Result<ClaimStatus, StoreError> {
        let (name, token) = (operation.name().clone(), operation.token());
        match self.inner.transactions.look_up(name, token).await? {
            Some(COMPLETED) => Ok(ClaimStatus::Completed),
            Some(IN_PROGRESS | UNKNOWN) => Ok(ClaimStatus::Open),
            None | Some(RELEASED_SAME_REQUEST | RELEASED_ANY_REQUEST) => {
                Ok(ClaimStatus::Superseded)
            }
            Some(_) => Err(StoreError::corrupt("state")),
        }
    }
}

impl PostgresStore {
    /// Begins a transaction on one of the connections for handlers.
    pub(crate) async fn begin_with(
        &self,
        begin: SqlStr,
    ) -> Result<Transaction<'static, Postgres>, CommitError> {
        let inner = &self.inner;
        inner.pool.check()?;
        let timeout = inner.connector.acquire_timeout;
        let limit = timeout.saturating_add(inner.pool.call_timeout);
        let begin = inner.transactions.pool.begin_with(begin);
        let began = inner.pool.while_reachable(limit, begin).await?;
        began
            .unwrap_or(Err(sqlx::Error::PoolTimedOut))
            .map_err(|error| self.not_begun(error))
    }

    /// Returns whether the transaction that was prepared for `token` is still open.
    pub(crate) async fn is_still_open(
        &self,
        transaction: &mut Transaction<'static, Postgres>,
        token: Token,
    ) -> Result<bool, CommitError> {
        let transactions = &self.inner.transactions;
        query_scalar(transactions.sql.is_open.clone())
            .persistent(transactions.persistent)
            .bind(token.as_bytes().as_slice())
            .fetch_one(&mut **transaction)
            .await
            .map_err(|error| self.refused(error))
    }

    fn not_begun(&self, error: sqlx::Error) -> CommitError {
        let kind = CommitErrorKind::Unavailable;
        match error {
            sqlx::Error::PoolTimedOut => {
                let options = self.inner.transactions.pool.options();
                let reason = format!(
                    "no connection for a transaction was free or could be opened within {:?}, \
                     `transaction_connections` is {}",
                    options.get_acquire_timeout(),
                    options.get_max_connections(),
                );
                CommitError::caused(kind, reason)
            }
            error => CommitError::caused(kind, error),
        }
    }

    /// Returns the error of a statement that failed before COMMIT was sent.
    fn refused(&self, error: sqlx::Error) -> CommitError {
        let kind = CommitErrorKind::Aborted;
        match sqlstate(&error).as_deref() {
            // The table of records does not exist.
            Some("42P01") => CommitError::caused(CommitErrorKind::OtherDatabase, error),
            // Neither the handler's role nor the session's may write to it.
            Some("42501") => {
                let schema = &self.inner.connector.schema;
                CommitError::caused(kind, schema.explain(failure(error)))
            }
            _ => CommitError::caused(kind, error),
        }
    }
}

const RESTORE: &str = "
SELECT CASE WHEN $1::pg_catalog.text IS NOT NULL THEN
           pg_catalog.set_config('search_path', $1, true) END,
       CASE WHEN $2::pg_catalog.text IS NOT NULL THEN
           pg_catalog.set_config('role', $2, true) END";
