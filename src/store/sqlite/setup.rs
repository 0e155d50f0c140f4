//! The setup of a file: WAL mode and the store's tables.

use std::time::{Duration, Instant};

use sqlx::{
    ConnectOptions as _, Connection as _, SqlSafeStr as _, SqliteConnection,
    migrate::{MigrateError, Migration, MigrationType, Migrator},
    query_scalar,
    sqlite::SqliteConnectOptions,
};

use super::{error::failure, usage::USAGE, writer::in_transaction};
use crate::store::{
    StoreError,
    sql::detached,
    sql::error::{SQLITE_BUSY, sqlite_code},
};

/// Sets the file up, in one process at a time.
pub(super) async fn set_up(options: SqliteConnectOptions) -> Result<(), StoreError> {
    detached(async move {
        let mut connection = connect(&options).await?;
        let mode: String = query_scalar("PRAGMA journal_mode")
            .fetch_one(&mut connection)
            .await
            .map_err(failure)?;
        if mode != "wal" {
            return Err(StoreError::unavailable(NOT_A_FILE));
        }
        in_transaction(&mut connection, async |on| {
            make_tables(on, "records", RECORDS).await?;
            make_tables(on, "usage", USAGE).await
        })
        .await?;
        connection.close().await.map_err(failure)
    })
    .await
}

/// Connects, also while another process turns WAL mode on, for which SQLite does not
/// wait.
async fn connect(options: &SqliteConnectOptions) -> Result<SqliteConnection, StoreError> {
    let start = Instant::now();
    loop {
        match options.connect().await {
            Err(sqlx::Error::Database(error))
                if sqlite_code(&*error) == Some(SQLITE_BUSY) && start.elapsed() < TIMEOUT =>
            {
                tokio::time::sleep(Duration::from_millis(20)).await;
            }
            connected => return connected.map_err(failure),
        }
    }
}

/// Makes the tables of `definitions`, unless the ledger of `name` says that they are made.
///
/// Each name has a ledger of its own. In a common one, the store and the application would
/// each refuse the other's migrations.
pub(crate) async fn make_tables(
    on: &mut SqliteConnection,
    name: &'static str,
    definitions: &'static str,
) -> Result<(), StoreError> {
    let mut migrator = Migrator::with_migrations(vec![Migration::new(
        1,
        name.into(),
        MigrationType::Simple,
        definitions.into_sql_str(),
        false,
    )]);
    migrator.dangerous_set_table_name(match name {
        "records" => "_idempotency_migrations".to_owned(),
        name => format!("_idempotency_{name}_migrations"),
    });
    // The future of `run` is not `Send` here.
    let migrated = migrator.run_direct(None, on, false).await;
    migrated.map_err(|error| match error {
        MigrateError::Execute(error) | MigrateError::ExecuteMigration(error, _) => failure(error),
        error => StoreError::unavailable(error),
    })
}

/// How long a call waits for a connection, or for the lock of another process.
pub(super) const TIMEOUT: Duration = Duration::from_secs(5);

const NOT_A_FILE: &str =
    "records need a file that can be in WAL mode, not a database in memory: use `MemoryStore`";
const RECORDS: &str = include_str!("../../../migrations/sqlite/0001_records.sql");
