//! The handler's own transaction, which completes its record and commits both.

use std::sync::Arc;

use sqlx::{
    Connection as _, PgPool, Postgres, SqlSafeStr as _, SqlStr, Transaction,
    postgres::PgPoolOptions, query, query_as, query_scalar,
};

use super::{
    Inner, PostgresStore,
    connector::Connector,
    error::{failure, sqlstate},
    parameters::micros,
    pool::Pool,
    schema::{Schema, statements},
    session::{Session, SessionSettings, column},
};
#[cfg(feature = "guard")]
use crate::store::sql::commit::commit_value;
use crate::{
    key::RecordName,
    operation::Operation,
    store::{
        Completion, StoreError, Token, Transitioned,
        sql::{
            calls::Call,
            columns::{
                COMPLETED, IN_PROGRESS, RELEASED_ANY_REQUEST, RELEASED_SAME_REQUEST, UNKNOWN,
            },
            commit::{ClaimStatus, CommitBackend, CommitFuture, CommitResponse, ENDED, commit},
            commit_error::{CommitError, CommitErrorKind},
            single::{Attempt, Limits, Single, SingleCalls},
            transaction::OperationTransaction,
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
        let inner = Arc::clone(&self.inner);
        let begin = inner.transactions.begin.clone();
        OperationTransaction::begin(operation, async move { inner.begin(begin).await }).await
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

impl Inner {
    /// Begins a transaction on one of the connections for handlers.
    pub(super) async fn begin(
        &self,
        begin: SqlStr,
    ) -> Result<Transaction<'static, Postgres>, CommitError> {
        self.pool.check()?;
        let timeout = self.connector.acquire_timeout;
        let limit = timeout.saturating_add(self.pool.call_timeout);
        let begin = self.transactions.pool.begin_with(begin);
        let began = self.pool.while_reachable(limit, begin).await?;
        began
            .unwrap_or(Err(sqlx::Error::PoolTimedOut))
            .map_err(|error| self.transactions.not_begun(error))
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
        let refused = |error| self.inner.transactions.refused(error);
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
            let is_open = self
                .inner
                .transactions
                .is_open(transaction, operation.token());
            return match is_open.await? {
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
    fn committed(&self) {
        if self.inner.wake.committed() {
            self.notify_relays();
        }
    }

    fn is_abort(error: &sqlx::Error) -> bool {
        sqlstate(error).is_some_and(|code| {
            code.starts_with("23") || matches!(&*code, "40001" | "40P01" | "25P02")
        })
    }

    async fn claim_status(&self, operation: &Operation) -> Result<ClaimStatus, StoreError> {
        let (name, token) = (operation.name().clone(), operation.token());
        let lookups = &self.inner.transactions.lookups;
        match lookups.call(CommitLookup { name, token }).await? {
            Some(COMPLETED) => Ok(ClaimStatus::Completed),
            Some(IN_PROGRESS | UNKNOWN) => Ok(ClaimStatus::Open),
            None | Some(RELEASED_SAME_REQUEST | RELEASED_ANY_REQUEST) => {
                Ok(ClaimStatus::Superseded)
            }
            Some(_) => Err(StoreError::corrupt("state")),
        }
    }
}

/// The transactions of handlers.
pub(super) struct HandlerTransactions {
    pub(super) pool: PgPool,
    pub(super) begin: SqlStr,
    pub(super) persistent: bool,
    sql: Statements,
    schema: Arc<Schema>,
    lookups: SingleCalls<CommitLookups>,
    pub(super) lookup_pool: Arc<Pool>,
}

impl HandlerTransactions {
    pub(super) fn new(
        connector: &Connector,
        settings: SessionSettings,
        max_connections: u32,
        lookup_pool: Arc<Pool>,
        lookup_limits: Limits,
    ) -> Self {
        let begin = settings.begin.clone();
        let settings = Arc::new(settings);
        let pool = PgPoolOptions::new()
            .max_connections(max_connections)
            .acquire_timeout(connector.acquire_timeout)
            .after_connect(move |connection, _| {
                let settings = Arc::clone(&settings);
                Box::pin(async move { settings.apply(connection).await })
            });
        let lookups = CommitLookups {
            pool: Arc::clone(&lookup_pool),
            sql: Statements::new(&connector.schema),
        };
        Self {
            pool: pool.connect_lazy_with(connector.options.clone()),
            persistent: begin.is_none(),
            begin: begin.unwrap_or_else(|| BEGIN.into_sql_str()),
            sql: Statements::new(&connector.schema),
            schema: Arc::clone(&connector.schema),
            lookups: SingleCalls::new(Arc::new(lookups), lookup_limits),
            lookup_pool,
        }
    }

    /// Returns whether the transaction that was prepared for `token` is still open.
    pub(super) async fn is_open(
        &self,
        transaction: &mut Transaction<'static, Postgres>,
        token: Token,
    ) -> Result<bool, CommitError> {
        query_scalar(self.sql.is_open.clone())
            .persistent(self.persistent)
            .bind(token.as_bytes().as_slice())
            .fetch_one(&mut **transaction)
            .await
            .map_err(|error| self.refused(error))
    }

    fn not_begun(&self, error: sqlx::Error) -> CommitError {
        let kind = CommitErrorKind::Unavailable;
        match error {
            sqlx::Error::PoolTimedOut => {
                let options = self.pool.options();
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
    pub(super) fn refused(&self, error: sqlx::Error) -> CommitError {
        let kind = CommitErrorKind::Aborted;
        match sqlstate(&error).as_deref() {
            // The table of records does not exist.
            Some("42P01") => CommitError::caused(CommitErrorKind::OtherDatabase, error),
            // Neither the handler's role nor the session's may write to it.
            Some("42501") => CommitError::caused(kind, self.schema.explain(failure(error))),
            _ => CommitError::caused(kind, error),
        }
    }
}

/// Looks up the outcome of a COMMIT whose answer got lost.
struct CommitLookups {
    pool: Arc<Pool>,
    sql: Statements,
}

struct CommitLookup {
    name: RecordName,
    token: Token,
}

impl Call for CommitLookup {
    fn name(&self) -> &RecordName {
        &self.name
    }
}

impl Single for CommitLookups {
    type Call = CommitLookup;
    /// The state of the record with this token, once no transaction can change it.
    type Answer = Option<i64>;

    async fn attempt(&self, call: &CommitLookup) -> Result<Attempt<Option<i64>>, StoreError> {
        self.pool
            .run(async |session| self.look_up(session, call).await)
            .await
    }
}

impl CommitLookups {
    async fn look_up(
        &self,
        session: &mut Session<'_>,
        CommitLookup { name, token }: &CommitLookup,
    ) -> Result<Attempt<Option<i64>>, StoreError> {
        for (statement, is_locked) in [(&self.sql.unlocked_state, false), (&self.sql.state, true)] {
            let query = session.query_record(statement, name);
            let row = session.row(query.bind(token.as_bytes().as_slice())).await?;
            match row {
                Some(_) if is_locked => return Ok(Attempt::Locked),
                Some(row) => return Ok(Attempt::Made(Some(column(&row, "state")?))),
                None => {}
            }
        }
        Ok(Attempt::Made(None))
    }
}

const BEGIN: &str = "BEGIN ISOLATION LEVEL READ COMMITTED READ WRITE";

const RESTORE: &str = "
SELECT CASE WHEN $1::pg_catalog.text IS NOT NULL THEN
           pg_catalog.set_config('search_path', $1, true) END,
       CASE WHEN $2::pg_catalog.text IS NOT NULL THEN
           pg_catalog.set_config('role', $2, true) END";

/// The state of the record with a claim's token.
macro_rules! state {
    () => {
        "
SELECT state::bigint
FROM {records}
WHERE scope = $1 AND key = $2 AND token = $3"
    };
}

/// Whether the transaction that `prepare` prepared for this token is still open. NULL counts
/// as no. Citus allows no COALESCE around a setting.
macro_rules! is_open {
    ($token:literal) => {
        concat!(
            "current_setting('tower_idempotency.completes', true) = encode(",
            $token,
            ", 'hex')"
        )
    };
}

statements! {
    /// Sets what `complete` needs, until the transaction ends.
    ///
    /// `complete` does nothing if the transaction has ended since, by a ROLLBACK of the
    /// driver or of the handler: each statement would commit on its own. A transaction
    /// from another pool becomes as durable as the store's own.
    ///
    /// The record is completed with the `search_path` of a new session, because the
    /// handler's may lead to operators that a tenant has made. If the handler's role may
    /// not write to the records, the session's role completes the record. Returns the
    /// settings that were changed, for [`RESTORE`]. Functions and operators are
    /// qualified, because this statement runs with the handler's `search_path`.
    prepare = "
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

    /// Completes an open claim. A record that was completed before, even with this token,
    /// must not take further writes with it.
    complete = concat!("
UPDATE {records}
SET state = {completed},
    response = $4,
    unknown_since = NULL,
    expires_at = GREATEST(claimed_at + $5, clock.now + $6)
FROM {clock}
WHERE scope = $1 AND key = $2 AND token = $3 AND state IN ({in_progress}, {unknown})
  AND ", is_open!("$3"), "
RETURNING {notify} AS notified");

    is_open = concat!("SELECT COALESCE(", is_open!("$1"), ", false)");

    /// Skips a record that an open transaction has written. A plain read would see the
    /// version before it.
    unlocked_state = concat!(state!(), "\nFOR SHARE SKIP LOCKED");

    /// Finds a record that `unlocked_state` skipped because it is locked.
    state = state!();
}
