//! The errors of sqlx: their meaning for the layer, and their texts without values.

use std::borrow::Cow;
#[cfg(feature = "postgres")]
use std::fmt::Write as _;

#[cfg(feature = "postgres")]
use sqlx::postgres::{PgDatabaseError, PgErrorPosition};
#[cfg(feature = "sqlite")]
use sqlx::sqlite::SqliteError;
use sqlx::{Error, error::DatabaseError};

use crate::store::StoreError;

/// Returns the store's error for one of sqlx, without a value that was bound.
/// `of_database` converts an error that the database returned.
pub(crate) fn failure(
    error: Error,
    of_database: impl FnOnce(&dyn DatabaseError) -> StoreError,
) -> StoreError {
    match error {
        Error::Database(error) => of_database(&*error),
        Error::PoolTimedOut => StoreError::timed_out().because("no connection was free in time"),
        Error::PoolClosed => StoreError::unavailable("the store is closed"),
        Error::Io(error) => StoreError::unavailable(error),
        Error::Tls(error) | Error::Configuration(error) => StoreError::unavailable(error),
        Error::ColumnDecode { .. } | Error::Decode(_) => StoreError::corrupt("a column's type"),
        Error::ColumnNotFound(_) | Error::ColumnIndexOutOfBounds { .. } => {
            StoreError::corrupt("a missing column")
        }
        error => StoreError::unavailable(without_values(&error)),
    }
}

/// Returns the text of an error, without a value that was bound or read.
pub(crate) fn without_values(error: &Error) -> Cow<'static, str> {
    Cow::Borrowed(match error {
        Error::Database(error) => return database_error(&**error).into(),
        // The text of a type's decoder may quote the value.
        Error::ColumnDecode { index, .. } => {
            return format!("the value of column {index} cannot be decoded").into();
        }
        Error::Decode(_) => "a value cannot be decoded",
        Error::Encode(_) => "a value cannot be encoded",
        Error::Protocol(_) => "the database violated its protocol",
        Error::Configuration(_)
        | Error::Io(_)
        | Error::Tls(_)
        | Error::RowNotFound
        | Error::TypeNotFound { .. }
        | Error::ColumnIndexOutOfBounds { .. }
        | Error::ColumnNotFound(_)
        | Error::PoolTimedOut
        | Error::PoolClosed
        | Error::WorkerCrashed
        | Error::InvalidSavePointStatement
        | Error::BeginFailed => return error.to_string().into(),
        _ => "the database driver failed",
    })
}

fn database_error(error: &dyn DatabaseError) -> String {
    #[cfg(feature = "postgres")]
    if error.try_downcast_ref::<PgDatabaseError>().is_some() {
        return postgres_error(error);
    }
    #[cfg(feature = "sqlite")]
    if error.try_downcast_ref::<SqliteError>().is_some() {
        return sqlite_error(error);
    }
    // Of another database, which the application uses beside the store.
    match error.code() {
        Some(code) => format!("the database answered with the error {code}"),
        None => "the database answered with an error".into(),
    }
}

/// Returns the message of an error that quotes no values. For other errors returns the
/// SQLSTATE, with the names of the table, column and constraint.
#[cfg(feature = "postgres")]
pub(crate) fn postgres_error(error: &dyn DatabaseError) -> String {
    let code = error.code().unwrap_or_default();
    let error_of_postgres = error.try_downcast_ref::<PgDatabaseError>();
    // A message about names quotes the statement, and points at its text; or it quotes a value
    // that the statement has made a name or a query.
    let position = error_of_postgres.and_then(PgDatabaseError::position);
    let is_about_statement = matches!(position, Some(PgErrorPosition::Original(_)));
    // The server, the schema and other transactions.
    let quotes_none = ["08", "25", "26", "28", "3D", "40", "53", "55", "57"];
    if has_class(&code, &quotes_none)
        || code == "42501"
        || is_about_statement && has_class(&code, &["3F", "42"])
    {
        return format!("{} (SQLSTATE {code})", error.message());
    }
    let mut text = format!("SQLSTATE {code}");
    let column = error_of_postgres.and_then(PgDatabaseError::column);
    for (kind, name) in [
        ("table", error.table()),
        ("column", column),
        ("constraint", error.constraint()),
    ] {
        if let Some(name) = name {
            let _ = write!(text, ", {kind} {name}");
        }
    }
    text
}

/// Returns whether an SQLSTATE begins with one of these.
#[cfg(feature = "postgres")]
pub(crate) fn has_class(code: &str, classes: &[&str]) -> bool {
    classes.iter().any(|class| code.starts_with(class))
}

/// Returns the message, which names tables and constraints, if it quotes no values.
#[cfg(feature = "sqlite")]
pub(crate) fn sqlite_error(error: &dyn DatabaseError) -> String {
    const GENERIC: &str = "1";
    const CONSTRAINT_TRIGGER: &str = "1811";
    let (code, message) = (error.code().unwrap_or_default(), error.message());
    match &*code {
        CONSTRAINT_TRIGGER => format!("a trigger refused it (SQLite code {code})"),
        // A function or a virtual table may quote a value, as those of JSON and text search do.
        GENERIC if !is_about_statement(message) => format!("SQLite code {code}"),
        _ => format!("{message} (SQLite code {code})"),
    }
}

/// Whether a message of SQLite quotes the text of its statement.
#[cfg(feature = "sqlite")]
fn is_about_statement(message: &str) -> bool {
    let beginnings = ["no such table: ", "no such function: ", "near \""];
    beginnings.iter().any(|text| message.starts_with(text))
        || message.starts_with("table ") && message.contains(" has no column named ")
}

#[cfg(feature = "sqlite")]
pub(crate) const SQLITE_BUSY: u8 = 5;
#[cfg(feature = "sqlite")]
pub(crate) const SQLITE_LOCKED: u8 = 6;

/// Returns SQLite's result code without its extension, or `None` for another database.
#[cfg(feature = "sqlite")]
pub(crate) fn sqlite_code(error: &dyn DatabaseError) -> Option<u8> {
    let error = error.try_downcast_ref::<SqliteError>()?;
    let code: i32 = error.code()?.parse().ok()?;
    Some(code.to_le_bytes()[0])
}
