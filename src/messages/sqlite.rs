//! What the inbox and the outbox have in common.

use sqlx::{Sqlite, SqliteConnection};

use super::{MessageError, MessageErrorKind, sealed::MessageBackend};
use crate::store::{
    SqliteStore, StoreError,
    sql::detached,
    sqlite::{error::is_stale_reader, setup::make_tables},
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

/// Returns the error of a statement in a transaction of the application.
pub(super) fn of_transaction(error: sqlx::Error) -> MessageError {
    match is_stale_reader(&error) {
        true => MessageError::new(MessageErrorKind::Transaction, STALE_READER),
        false => error.into(),
    }
}

const STALE_READER: &str = "the transaction has read before another one wrote, so that it cannot \
    write: begin it with `BEGIN IMMEDIATE`";
