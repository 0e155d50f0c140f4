//! What the store asks of a server before it uses it.

use std::time::Duration;

use sqlx::{
    AssertSqlSafe, ConnectOptions as _, Connection as _, PgConnection, Row as _,
    postgres::PgConnectOptions, raw_sql,
};
use tokio::time::timeout;

use super::{
    failure,
    failures::connecting,
    schema::{Schema, Statements},
    session::{self, AS_NEW},
};
use crate::store::StoreError;

/// The settings of a store's connections that the server has to suit.
pub(super) struct Wanted {
    pub(super) schema: Option<Schema>,
    pub(super) pooler_safe: bool,
}

/// Returns the statements of the store, unless the server is unfit.
///
/// Only simple queries are sent, which are safe behind any pooler.
pub(super) async fn inspect(
    options: &PgConnectOptions,
    wanted: Wanted,
) -> Result<Statements, StoreError> {
    let connected = options.connect().await;
    let mut connection = connected.map_err(|error| connecting(error, options))?;
    let question = format!("BEGIN; {AS_NEW}; {INSPECT}; ROLLBACK");
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
    let schema = match wanted.schema {
        Some(schema) => schema,
        None => {
            let name: Option<String> = found.try_get("schema").map_err(failure)?;
            Schema::named(name.ok_or_else(|| StoreError::unavailable(NO_SCHEMA))?)?
        }
    };
    let sql = Statements::of(schema, found.try_get("role").map_err(failure)?);
    session::refuse_unfit(&mut connection, &sql.unfit)
        .await
        .map_err(failure)?;
    if !wanted.pooler_safe && shares_servers(connection, options).await {
        return Err(StoreError::unavailable(POOLED));
    }
    Ok(sql)
}

/// Whether a pooler gives each transaction another server connection.
///
/// Two client connections are asked in turn which server process answers. Without
/// such a pooler it is one process for each of them, always. An error or a second
/// connection that does not open in time shows nothing.
async fn shares_servers(mut first: PgConnection, options: &PgConnectOptions) -> bool {
    let probe = async {
        let mut second = options.connect().await?;
        let mut seen = [None, None];
        let mut is_shared = false;
        for _ in 0..ROUNDS {
            for (place, connection) in [&mut first, &mut second].into_iter().enumerate() {
                let answered = raw_sql(BACKEND).fetch_optional(connection).await?;
                // Servers that do not show their processes are left alone.
                let Some(answered) = answered else { break };
                let process: Option<String> = Some(answered.try_get("process")?);
                is_shared |= seen[1 - place] == process;
                is_shared |= seen[place].is_some() && seen[place] != process;
                seen[place] = process;
            }
        }
        first.close().await?;
        second.close().await?;
        Ok::<_, sqlx::Error>(is_shared)
    };
    matches!(timeout(PROBE, probe).await, Ok(Ok(true)))
}

const INSPECT: &str = "
SELECT current_setting('server_version_num', true)::int AS number,
       current_setting('server_version', true) AS version,
       current_user::text AS role,
       COALESCE(
           (SELECT namespace.nspname
            FROM pg_catalog.pg_class AS class
                JOIN pg_catalog.pg_namespace AS namespace ON namespace.oid = class.relnamespace
            WHERE class.oid = to_regclass('idempotency_records')),
           current_schema())::text AS schema";

/// The number of a process is given again, to a later one.
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

/// A pooler hands out the connection that came back last, or all of them in turn:
/// a change shows in the first rounds, on a busy pooler too.
const ROUNDS: usize = 3;

/// A pooler without a free server connection lets the second client wait.
const PROBE: Duration = Duration::from_secs(1);
