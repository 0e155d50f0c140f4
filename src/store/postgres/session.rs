//! What the store asks of each of its connections.

use std::time::Duration;

use sqlx::{PgConnection, query, query_scalar};

/// How long the server puts up with this session.
#[derive(Clone, Copy, Debug)]
pub(super) struct Patience {
    pub(super) statement: Duration,
    pub(super) lock: Duration,
    pub(super) idle_in_transaction: Duration,
}

/// Makes a new connection fit for records, whatever its role's defaults are.
pub(super) async fn prepare(
    connection: &mut PgConnection,
    patience: Patience,
) -> Result<(), sqlx::Error> {
    refuse_standby(connection).await?;
    let millis = |patience: Duration| patience.as_millis().min(LONGEST_TIMEOUT).to_string();
    query(SESSION)
        .persistent(false)
        .bind(millis(patience.statement))
        .bind(millis(patience.lock))
        .bind(millis(patience.idle_in_transaction))
        .execute(connection)
        .await
        .map(drop)
}

pub(super) async fn refuse_standby(connection: &mut PgConnection) -> Result<(), sqlx::Error> {
    let standby: bool = query_scalar("SELECT pg_is_in_recovery()")
        .persistent(false)
        .fetch_one(connection)
        .await?;
    if standby {
        return Err(sqlx::Error::Configuration(
            "the server is a standby, where nothing can be claimed: connect to the primary".into(),
        ));
    }
    Ok(())
}

/// Whoever asks for more durability than `on` keeps it.
const SESSION: &str = "
SELECT set_config('default_transaction_isolation', 'read committed', false),
       set_config('default_transaction_read_only', 'off', false),
       set_config('default_transaction_deferrable', 'off', false),
       set_config('synchronous_commit',
           CASE current_setting('synchronous_commit')
               WHEN 'remote_apply' THEN 'remote_apply'
               ELSE 'on'
           END, false),
       set_config('statement_timeout', $1, false),
       set_config('lock_timeout', $2, false),
       set_config('idle_in_transaction_session_timeout', $3, false)";

/// In milliseconds, as the server's settings are.
const LONGEST_TIMEOUT: u128 = i32::MAX as u128;
