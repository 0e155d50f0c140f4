//! The connection that writes.

use sqlx::{Connection as _, SqliteConnection, SqlitePool};

use super::error::failure;
use crate::store::StoreError;

/// Begins a transaction that has the write lock from its start. One that begins as a
/// reader fails at once if another process has written meanwhile.
pub(crate) const BEGIN: &str = "BEGIN IMMEDIATE";

/// The one connection of a store that writes.
#[derive(Clone)]
pub(crate) struct Writer(pub(super) SqlitePool);

impl Writer {
    /// Runs `work` in a transaction, also if the caller's future is dropped: give the
    /// future to [`detached`](crate::store::sql::detached).
    pub(crate) async fn write_owned<T>(
        self,
        work: impl AsyncFnOnce(&mut SqliteConnection) -> Result<T, StoreError>,
    ) -> Result<T, StoreError> {
        self.write(work).await
    }

    /// Runs `work` in a transaction. Call it from a task that is never dropped.
    pub(crate) async fn write<T>(
        &self,
        work: impl AsyncFnOnce(&mut SqliteConnection) -> Result<T, StoreError>,
    ) -> Result<T, StoreError> {
        let mut connection = self.0.acquire().await.map_err(failure)?;
        let written = in_transaction(&mut connection, work).await;
        if written.is_err() {
            // SQLite ends the transaction if the disk is full, and sqlx does not
            // notice it.
            connection.close_on_drop();
        }
        written
    }
}

/// Runs `work` in a transaction, and commits it.
pub(super) async fn in_transaction<T>(
    connection: &mut SqliteConnection,
    work: impl AsyncFnOnce(&mut SqliteConnection) -> Result<T, StoreError>,
) -> Result<T, StoreError> {
    let mut transaction = connection.begin_with(BEGIN).await.map_err(failure)?;
    let answer = work(&mut transaction).await?;
    transaction.commit().await.map_err(failure)?;
    Ok(answer)
}
