//! The settings of a connection, and the statements that run on it.

use std::time::Duration;

use sqlx::{
    Decode, PgConnection, Postgres, Row as _, SqlStr, Type,
    postgres::{PgArguments, PgRow},
    query::Query,
    raw_sql,
};

use super::{engine::PostgresEngine, error::failure, schema::Schema};
use crate::{key::RecordName, store::StoreError};

/// A connection for the statements of one call.
pub(crate) struct Session<'c> {
    pub(crate) connection: &'c mut PgConnection,
    /// Whether the server keeps prepared statements for the next call.
    pub(crate) persistent: bool,
}

pub(super) type PgQuery = Query<'static, Postgres, PgArguments>;

impl Session<'_> {
    pub(crate) fn query(&self, statement: &SqlStr) -> PgQuery {
        sqlx::query(statement.clone()).persistent(self.persistent)
    }

    /// Returns a query about one record, whose scope and key are bound.
    pub(super) fn query_record(&self, statement: &SqlStr, name: &RecordName) -> PgQuery {
        self.query(statement)
            .bind(name.scope().as_str())
            .bind(name.key().as_str())
    }

    /// Returns a query about several records, whose scopes and keys are bound.
    pub(super) fn query_records<'n>(
        &self,
        statement: &SqlStr,
        names: impl Iterator<Item = &'n RecordName>,
    ) -> PgQuery {
        let (scopes, keys): (Vec<&str>, Vec<&str>) = names
            .map(|name| (name.scope().as_str(), name.key().as_str()))
            .unzip();
        self.query(statement).bind(scopes).bind(keys)
    }

    pub(crate) async fn rows(&mut self, query: PgQuery) -> Result<Vec<PgRow>, StoreError> {
        query
            .fetch_all(&mut *self.connection)
            .await
            .map_err(failure)
    }

    pub(crate) async fn row(&mut self, query: PgQuery) -> Result<Option<PgRow>, StoreError> {
        let row = query.fetch_optional(&mut *self.connection);
        row.await.map_err(failure)
    }

    /// Returns whether the statement changed a record.
    pub(crate) async fn changes(&mut self, query: PgQuery) -> Result<bool, StoreError> {
        let done = query.execute(&mut *self.connection).await;
        Ok(done.map_err(failure)?.rows_affected() > 0)
    }
}

/// Returns a value of the row.
pub(crate) fn column<'r, T>(row: &'r PgRow, name: &str) -> Result<T, StoreError>
where
    T: Decode<'r, Postgres> + Type<Postgres>,
{
    row.try_get(name).map_err(failure)
}

/// The server's timeouts for a session.
#[derive(Clone, Copy, Debug)]
pub(super) struct Timeouts {
    pub(super) statement: Duration,
    pub(super) lock: Duration,
    pub(super) idle_in_transaction: Duration,
}

impl Timeouts {
    /// Returns the statement that begins a transaction with the store's settings.
    ///
    /// Its role and its `search_path` are those of a new session, because another
    /// client of a pooler may have changed them.
    pub(super) fn begin(self) -> String {
        format!(
            "BEGIN ISOLATION LEVEL READ COMMITTED READ WRITE; {RESET}; {DURABLE}; \
             SET LOCAL statement_timeout = {}; SET LOCAL lock_timeout = {}; \
             SET LOCAL idle_in_transaction_session_timeout = {}",
            millis(self.statement),
            millis(self.lock),
            millis(self.idle_in_transaction),
        )
    }
}

fn millis(timeout: Duration) -> String {
    timeout.as_millis().min(LONGEST_TIMEOUT).to_string()
}

/// The settings of a connection, against any defaults of the role.
pub(super) struct SessionSettings {
    timeouts: Timeouts,
    sets_plans: bool,
    unfit: SqlStr,
    /// Begins each transaction behind a pooler. `None` without a pooler: the session
    /// itself has the settings.
    pub(super) begin: Option<SqlStr>,
}

impl SessionSettings {
    /// Returns the settings for the store's own calls.
    pub(super) fn for_calls(schema: &Schema, timeouts: Timeouts, pooler_safe: bool) -> Self {
        let begin = || schema.statement(&(timeouts.begin() + LOCAL_PLANS));
        Self {
            timeouts,
            sets_plans: schema.engine == PostgresEngine::Postgres,
            unfit: schema.statement(UNFIT),
            begin: pooler_safe.then(begin),
        }
    }

    /// Returns the settings for the transactions of handlers. These have no statement
    /// timeout, and plan their statements as usual.
    pub(super) fn for_handlers(schema: &Schema, timeouts: Timeouts, pooler_safe: bool) -> Self {
        let timeouts = Timeouts {
            statement: Duration::ZERO,
            lock: Duration::ZERO,
            ..timeouts
        };
        let begin = || schema.statement(&timeouts.begin());
        Self {
            timeouts,
            sets_plans: false,
            unfit: schema.statement(UNFIT),
            begin: pooler_safe.then(begin),
        }
    }

    /// Applies the settings to a new connection, unless the server is unfit.
    pub(super) async fn apply(&self, connection: &mut PgConnection) -> Result<(), sqlx::Error> {
        refuse_unfit(connection, &self.unfit).await?;
        if self.begin.is_some() {
            // Settings of the session would stay with a server connection that others
            // use.
            return Ok(());
        }
        sqlx::query(SESSION)
            .persistent(false)
            .bind(millis(self.timeouts.statement))
            .bind(millis(self.timeouts.lock))
            .bind(millis(self.timeouts.idle_in_transaction))
            .execute(&mut *connection)
            .await?;
        if self.sets_plans {
            raw_sql(PLANS).fetch_all(connection).await?;
        }
        Ok(())
    }
}

/// Refuses a server or a table that may lose records.
pub(super) async fn refuse_unfit(
    connection: &mut PgConnection,
    unfit: &SqlStr,
) -> Result<(), sqlx::Error> {
    let server = raw_sql(unfit.clone()).fetch_one(connection).await?;
    let reason = if server.try_get("standby")? {
        "the server is a standby, where nothing can be claimed: connect to the primary"
    } else if server.try_get("unlogged")? {
        "the table of records is UNLOGGED, and empty after a crash: make it LOGGED"
    } else {
        return Ok(());
    };
    Err(sqlx::Error::Configuration(reason.into()))
}

/// A simple query, which is safe behind any pooler.
pub(super) const UNFIT: &str = "
SELECT pg_is_in_recovery() AS standby,
       EXISTS (
           SELECT FROM pg_catalog.pg_class AS class
               JOIN pg_catalog.pg_namespace AS namespace ON namespace.oid = class.relnamespace
           WHERE namespace.nspname = {schema} AND class.relname = 'idempotency_records'
             AND class.relpersistence = 'u'
       ) AS unlogged";

/// Resets the role and the `search_path`. A pooler does not do so between its
/// clients.
pub(super) const RESET: &str = "SET LOCAL role TO DEFAULT; SET LOCAL search_path TO DEFAULT";

/// Keeps `remote_apply`, which is more durable than `on`.
macro_rules! durable {
    ($is_local:literal) => {
        concat!(
            "set_config('synchronous_commit',
           CASE current_setting('synchronous_commit')
               WHEN 'remote_apply' THEN 'remote_apply'
               ELSE 'on'
           END, ",
            $is_local,
            ")"
        )
    };
}

const DURABLE: &str = concat!("SELECT ", durable!(true));

/// Makes each statement find its records by their names, with a plan that is kept
/// while the table grows.
///
/// Disabled plan nodes carry a cost of 1e10, which makes PostgreSQL compile the
/// plan. So the JIT compiler is disabled too. Citus plans with the values of parameters.
const PLANS: &str = "
SELECT set_config(name, CASE name WHEN 'plan_cache_mode' THEN 'force_generic_plan' ELSE 'off' END, false)
FROM pg_catalog.pg_settings
WHERE name IN ('enable_seqscan', 'enable_hashjoin', 'enable_mergejoin', 'jit', 'plan_cache_mode')";

/// The same within a transaction.
const LOCAL_PLANS: &str = "; SET LOCAL enable_seqscan = off; \
    SET LOCAL enable_hashjoin = off; SET LOCAL enable_mergejoin = off; SET LOCAL jit = off";

const SESSION: &str = concat!(
    "
SELECT set_config('default_transaction_isolation', 'read committed', false),
       set_config('default_transaction_read_only', 'off', false),
       set_config('default_transaction_deferrable', 'off', false),
       ",
    durable!(false),
    ",
       set_config('statement_timeout', $1, false),
       set_config('lock_timeout', $2, false),
       set_config('idle_in_transaction_session_timeout', $3, false)"
);

/// In milliseconds, the largest value of the server's settings.
const LONGEST_TIMEOUT: u128 = i32::MAX as u128;
