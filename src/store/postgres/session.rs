//! What the store asks of each of its connections.

use std::time::Duration;

use sqlx::{PgConnection, Row as _, SqlStr, query, raw_sql};

use super::schema::Statements;

/// How long the server puts up with this session.
#[derive(Clone, Copy, Debug)]
pub(super) struct Patience {
    pub(super) statement: Duration,
    pub(super) lock: Duration,
    pub(super) idle_in_transaction: Duration,
}

/// A connection for the statements of one call.
pub(super) struct Session<'c> {
    pub(super) connection: &'c mut PgConnection,
    pub(super) sql: &'c Statements,
    /// Whether the server may keep a statement for the connection's next call.
    pub(super) persistent: bool,
}

impl<'c> Session<'c> {
    /// A connection that stays with the same server connection.
    pub(super) fn lasting(connection: &'c mut PgConnection, sql: &'c Statements) -> Self {
        Self {
            connection,
            sql,
            persistent: true,
        }
    }

    /// One that is the call's own for a transaction only.
    pub(super) fn passing(connection: &'c mut PgConnection, sql: &'c Statements) -> Self {
        Self {
            connection,
            sql,
            persistent: false,
        }
    }
}

impl Patience {
    /// A transaction with the store's settings in itself, for a pooler that may
    /// give each transaction another server connection. Its role and its
    /// `search_path` are those of a new session, whatever another client left.
    pub(super) fn begin(self) -> String {
        format!(
            "BEGIN ISOLATION LEVEL READ COMMITTED READ WRITE; {AS_NEW}; {DURABLE}; \
             SET LOCAL statement_timeout = {}; SET LOCAL lock_timeout = {}; \
             SET LOCAL idle_in_transaction_session_timeout = {}",
            millis(self.statement),
            millis(self.lock),
            millis(self.idle_in_transaction),
        )
    }
}

/// A timeout as the server's settings have it.
fn millis(patience: Duration) -> String {
    patience.as_millis().min(LONGEST_TIMEOUT).to_string()
}

/// Makes a new connection fit for records, whatever its role's defaults are.
pub(super) async fn prepare(
    connection: &mut PgConnection,
    sql: &Statements,
    patience: Patience,
    pooled: bool,
) -> Result<(), sqlx::Error> {
    refuse_unfit(connection, &sql.unfit).await?;
    if pooled {
        // What is set here would stay with a server connection that others use.
        return Ok(());
    }
    query(SESSION)
        .persistent(false)
        .bind(millis(patience.statement))
        .bind(millis(patience.lock))
        .bind(millis(patience.idle_in_transaction))
        .execute(connection)
        .await
        .map(drop)
}

/// Makes a connection lead to each record by its name. Not for the transactions
/// of handlers, whose statements are their own.
pub(super) async fn prefer_names(connection: &mut PgConnection) -> Result<(), sqlx::Error> {
    raw_sql(PLANS).fetch_all(connection).await.map(drop)
}

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

/// The settings that decide what a name means, and who asks, as a new session has
/// them. A pooler does not undo what another client has changed.
pub(super) const AS_NEW: &str = "SET LOCAL role TO DEFAULT; SET LOCAL search_path TO DEFAULT";

/// More durability than `on` is kept.
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

/// Each record is led to by its name, with a plan that is made once: one that was
/// made for a small table would be kept while the table grows. What is turned off
/// and used all the same, as for a sequence, counts as costly enough to compile:
/// that would take longer than all the rest. Other databases that speak
/// PostgreSQL's protocol know some of these settings, or none.
const PLANS: &str = "
SELECT set_config(name, CASE name WHEN 'plan_cache_mode' THEN 'force_generic_plan' ELSE 'off' END, false)
FROM pg_catalog.pg_settings
WHERE name IN ('enable_seqscan', 'enable_hashjoin', 'enable_mergejoin', 'jit', 'plan_cache_mode')";

/// The same inside of a transaction, behind a pooler.
pub(super) const LOCAL_PLANS: &str = "; SET LOCAL enable_seqscan = off; \
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

/// In milliseconds, as the server's settings are.
const LONGEST_TIMEOUT: u128 = i32::MAX as u128;
