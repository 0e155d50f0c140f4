//! What the inbox and the outbox have in common.

use sqlx::{Sqlite, SqliteConnection};

use super::{MessageError, MessageErrorKind, sealed::MessageBackend};
use crate::{
    store::{
        SqliteStore, StoreError,
        sql::detached,
        sqlite::{error::is_stale_reader, setup::make_tables},
    },
    transaction::sqlite::is_open,
};

impl MessageBackend for SqliteStore {
    type Sql = Sqlite;
}

impl SqliteStore {
    pub(super) async fn make_tables_of(
        &self,
        name: &'static str,
        definitions: &'static str,
    ) -> Result<(), StoreError> {
        let make = async move |on: &mut SqliteConnection| make_tables(on, name, definitions).await;
        detached(self.writer.clone().write_owned(make)).await
    }
}

/// Refuses a transaction that has ended. Each later statement would be committed alone.
pub(super) async fn ensure_open(on: &mut SqliteConnection) -> Result<(), MessageError> {
    match is_open(on).await.map_err(of_transaction)? {
        true => Ok(()),
        false => Err(MessageError::new(MessageErrorKind::Transaction, HAS_ENDED)),
    }
}

/// Returns the error of a statement in a transaction of the application.
pub(super) fn of_transaction(error: sqlx::Error) -> MessageError {
    match is_stale_reader(&error) {
        true => MessageError::new(MessageErrorKind::Transaction, STALE_READER),
        false => error.into(),
    }
}

const HAS_ENDED: &str =
    "SQLite has rolled the transaction back, after the error of a statement before";
const STALE_READER: &str = "the transaction has read before another one wrote, so that it cannot \
    write: begin it with `BEGIN IMMEDIATE`";
