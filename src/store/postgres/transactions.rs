//! The connections and the statements for transactions of handlers.

use std::sync::Arc;

use sqlx::{PgPool, SqlSafeStr as _, SqlStr, postgres::PgPoolOptions};

use super::{
    connector::Connector,
    pool::Pool,
    schema::statements,
    session::{Session, SessionSettings, column},
};
use crate::{
    key::RecordName,
    store::{
        StoreError, Token,
        sql::{
            calls::Call,
            single::{Attempt, Limits, Single, SingleCalls},
        },
    },
};

/// The transactions of handlers.
pub(crate) struct HandlerTransactions {
    pub(crate) pool: PgPool,
    pub(crate) begin: SqlStr,
    pub(crate) persistent: bool,
    pub(crate) sql: Statements,
    lookups: SingleCalls<CommitLookups>,
    pub(crate) lookup_pool: Arc<Pool>,
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
            lookups: SingleCalls::new(Arc::new(lookups), lookup_limits),
            lookup_pool,
        }
    }

    /// Returns the state of the record with this token, once no transaction can change it.
    pub(crate) async fn look_up(
        &self,
        name: RecordName,
        token: Token,
    ) -> Result<Option<i64>, StoreError> {
        self.lookups.call(CommitLookup { name, token }).await
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
    /// settings that were changed, to be restored before COMMIT. Functions and operators are
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
