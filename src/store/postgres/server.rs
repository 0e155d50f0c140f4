//! Checks of a server before the store uses it.

use std::time::Duration;

use sqlx::{
    AssertSqlSafe, ConnectOptions as _, Connection as _, PgConnection, Row as _,
    postgres::PgConnectOptions, raw_sql,
};
use tokio::time::timeout;

use super::{
    engine::PostgresEngine,
    error::{connect_failure, failure},
    schema::Schema,
    session::{RESET, UNFIT, refuse_unfit},
};
use crate::store::StoreError;

/// Returns the schema of the store's tables, unless the server is unfit.
///
/// Without a `schema`, the role's `search_path` decides. Only simple queries are
/// sent, which are safe behind any pooler.
pub(super) async fn inspect(
    options: &PgConnectOptions,
    schema: Option<String>,
    engine: Option<PostgresEngine>,
    pooler_safe: bool,
) -> Result<Schema, StoreError> {
    let connected = options.connect().await;
    let mut connection = connected.map_err(|error| connect_failure(error, options))?;
    if engine.is_none() {
        let software = raw_sql(SOFTWARE).fetch_one(&mut connection).await;
        let software: String = software
            .and_then(|row| row.try_get("software"))
            .map_err(failure)?;
        refuse_relative(&software)?;
    }
    let question = format!("BEGIN; {RESET}; {INSPECT}; ROLLBACK");
    let found = raw_sql(AssertSqlSafe(question))
        .fetch_one(&mut connection)
        .await
        .map_err(failure)?;
    let number: Option<i32> = found.try_get("number").map_err(failure)?;
    if number.is_some_and(|number| number < LEAST_VERSION * 10_000) {
        let version: String = found.try_get("version").map_err(failure)?;
        return Err(StoreError::unavailable(format!(
            "the server is PostgreSQL {version}, and the store needs PostgreSQL {LEAST_VERSION} or later"
        )));
    }
    let schema = match schema {
        Some(schema) => schema,
        None => {
            let found: Option<String> = found.try_get("schema").map_err(failure)?;
            found.ok_or_else(|| StoreError::unavailable(NO_SCHEMA))?
        }
    };
    let has_citus: bool = found.try_get("citus").map_err(failure)?;
    let engine = match engine {
        Some(engine) => engine,
        None if has_citus => PostgresEngine::Citus,
        None => PostgresEngine::Postgres,
    };
    let schema = Schema::new(schema, found.try_get("role").map_err(failure)?, engine)?;
    if has_citus {
        refuse_other_distribution(&mut connection, &schema).await?;
    }
    refuse_unfit(&mut connection, &schema.statement(UNFIT))
        .await
        .map_err(failure)?;
    if !pooler_safe && shares_servers(connection, options).await {
        return Err(StoreError::unavailable(POOLED));
    }
    Ok(schema)
}

/// Refuses an engine that speaks the protocol of PostgreSQL and is another one.
fn refuse_relative(software: &str) -> Result<(), StoreError> {
    let relative = RELATIVES
        .iter()
        .find(|(mark, _)| software.contains(mark))
        .map(|(_, name)| name);
    relative.map_or(Ok(()), |name| {
        Err(StoreError::unavailable(format!(
            "the server is {name}, on which the store is not tested: use PostgreSQL or Citus, or \
             set `PostgresStoreBuilder::engine` after your own tests"
        )))
    })
}

/// Refuses a table that is distributed by another column than `key`.
async fn refuse_other_distribution(
    connection: &mut PgConnection,
    schema: &Schema,
) -> Result<(), StoreError> {
    let found = raw_sql(schema.statement(DISTRIBUTION))
        .fetch_optional(connection)
        .await
        .map_err(failure)?;
    let Some(found) = found else { return Ok(()) };
    let by: Option<String> = found.try_get("distributed_by").map_err(failure)?;
    match by.as_deref() {
        Some("key") => Ok(()),
        _ => Err(StoreError::unavailable(OTHER_DISTRIBUTION)),
    }
}

/// Returns whether a pooler gives each transaction another server connection.
///
/// Two connections ask in turn for the number of their server process. Without such
/// a pooler, each connection always has its own process. An error or a timeout counts
/// as no pooler.
async fn shares_servers(mut first: PgConnection, options: &PgConnectOptions) -> bool {
    let probe = async {
        let mut second = options.connect().await?;
        let mut seen = [None, None];
        let mut is_shared = false;
        for _ in 0..ROUNDS {
            for (index, connection) in [&mut first, &mut second].into_iter().enumerate() {
                let answered = raw_sql(BACKEND).fetch_optional(connection).await?;
                // Some servers do not show their processes.
                let Some(answered) = answered else { break };
                let process: Option<String> = Some(answered.try_get("process")?);
                is_shared |= seen[1 - index] == process;
                is_shared |= seen[index].is_some() && seen[index] != process;
                seen[index] = process;
            }
        }
        first.close().await?;
        second.close().await?;
        Ok::<_, sqlx::Error>(is_shared)
    };
    matches!(timeout(PROBE, probe).await, Ok(Ok(true)))
}

/// The only question that each engine understands.
const SOFTWARE: &str = "SELECT version() AS software";

/// What the versions of other engines contain.
const RELATIVES: [(&str, &str); 2] = [("CockroachDB", "CockroachDB"), ("-YB-", "YugabyteDB")];

const INSPECT: &str = "
SELECT current_setting('server_version_num', true)::int AS number,
       current_setting('server_version', true) AS version,
       current_user::text AS role,
       EXISTS (SELECT FROM pg_catalog.pg_extension WHERE extname = 'citus') AS citus,
       COALESCE(
           (SELECT namespace.nspname
            FROM pg_catalog.pg_class AS class
                JOIN pg_catalog.pg_namespace AS namespace ON namespace.oid = class.relnamespace
            WHERE class.oid = to_regclass('idempotency_records')),
           current_schema())::text AS schema";

/// No row for a table that is not distributed.
const DISTRIBUTION: &str = "
SELECT column_to_column_name(logicalrelid, partkey) AS distributed_by
FROM pg_catalog.pg_dist_partition
    JOIN pg_catalog.pg_class AS class ON class.oid = logicalrelid
    JOIN pg_catalog.pg_namespace AS namespace ON namespace.oid = class.relnamespace
WHERE namespace.nspname = {schema} AND class.relname = 'idempotency_records'";

const OTHER_DISTRIBUTION: &str = "the table of records is not distributed by `key`: \
    `SELECT create_distributed_table('idempotency_records', 'key', colocate_with => 'none')` on \
    a table that is not distributed yet";

/// A later process may get the same number.
const BACKEND: &str = "
SELECT pid::text || ' ' || EXTRACT(EPOCH FROM backend_start)::text AS process
FROM pg_catalog.pg_stat_activity
WHERE pid = pg_backend_pid()";

const NO_SCHEMA: &str = "the role's search_path has no schema that exists: \
    name one with `PostgresStoreBuilder::schema`";

const POOLED: &str = "a pooler gives each transaction another server connection: \
    call `PostgresStoreBuilder::pooler_safe`, or connect to the server itself";

/// The first with `WITH … AS MATERIALIZED`.
const LEAST_VERSION: i32 = 12;

/// A pooler uses the connection that was returned last, or all of them in turn. So a
/// change shows in the first rounds.
const ROUNDS: usize = 3;

/// A pooler without a free server connection makes the second client wait.
const PROBE: Duration = Duration::from_secs(1);
