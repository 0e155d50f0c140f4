//! The errors of SQLite.

use sqlx::error::DatabaseError;

use crate::store::{
    StoreError,
    sql::error::{self, SQLITE_BUSY, SQLITE_LOCKED, sqlite_code, sqlite_error},
};

/// Returns the store's error for one of sqlx, with its remedy.
pub(crate) fn failure(error: sqlx::Error) -> StoreError {
    error::failure(error, of_database)
}

/// Returns whether a transaction that began as a reader cannot write any more, since
/// another one has written.
#[cfg(any(feature = "inbox", feature = "outbox"))]
pub(crate) fn is_stale_reader(error: &sqlx::Error) -> bool {
    const BUSY_SNAPSHOT: &str = "517";
    let error = error.as_database_error();
    error.and_then(DatabaseError::code).as_deref() == Some(BUSY_SNAPSHOT)
}

fn of_database(error: &dyn DatabaseError) -> StoreError {
    match sqlite_code(error).unwrap_or_default() {
        SQLITE_BUSY | SQLITE_LOCKED => StoreError::timed_out().because(IS_LOCKED),
        FULL => StoreError::full(IS_FULL).about_one(),
        CORRUPT | NOT_A_DATABASE => StoreError::corrupt(IS_CORRUPT),
        READ_ONLY => StoreError::unavailable(IS_READ_ONLY),
        CANNOT_OPEN => StoreError::unavailable(CANNOT_BE_OPENED),
        ERROR if error.message().starts_with("no such table") => {
            StoreError::unavailable(format!("{}{IS_MISSING}", error.message()))
        }
        TOO_BIG | CONSTRAINT => StoreError::unavailable(sqlite_error(error)).about_one(),
        _ => StoreError::unavailable(sqlite_error(error)),
    }
}

const IS_LOCKED: &str = "another connection or process holds the file's write lock: \
    end its transactions sooner, or raise `SqliteConnectOptions::busy_timeout`";
const IS_FULL: &str = "the disk, or the database's `max_page_count`";
const IS_CORRUPT: &str = "the file is damaged, or is no SQLite database";
const IS_READ_ONLY: &str = "the database file is read-only: \
    let the process write to the file and to its directory";
const CANNOT_BE_OPENED: &str = "the database file cannot be opened or created: \
    its directory must exist, and the process must be able to write to it";
const IS_MISSING: &str = ": open the store again, which creates its tables";

const ERROR: u8 = 1;
const READ_ONLY: u8 = 8;
const CORRUPT: u8 = 11;
const FULL: u8 = 13;
const CANNOT_OPEN: u8 = 14;
const TOO_BIG: u8 = 18;
pub(crate) const CONSTRAINT: u8 = 19;
const NOT_A_DATABASE: u8 = 26;

#[cfg(test)]
mod tests {
    use sqlx::{ConnectOptions as _, sqlite::SqliteConnectOptions};

    use super::*;
    use crate::store::SqliteStore;

    #[tokio::test]
    async fn write_to_a_read_only_file_names_the_cause() {
        let directory = std::env::temp_dir().join(format!("read-only-{}", std::process::id()));
        std::fs::create_dir(&directory).unwrap();
        let file = directory.join("records.db");
        SqliteStore::open(&file).await.unwrap().close().await;
        let options = SqliteConnectOptions::new().filename(&file).read_only(true);
        let mut connection = options.connect().await.unwrap();
        let error = sqlx::query("DELETE FROM idempotency_records")
            .execute(&mut connection)
            .await
            .map_err(failure)
            .unwrap_err();
        let text = error.to_string();
        assert!(text.contains("the database file is read-only"), "{text}");
        std::fs::remove_dir_all(&directory).unwrap();
    }
}
