//! Errors of the server: what they mean for the store, and a remedy.

use std::{borrow::Cow, io, time::Duration};

use sqlx::{Error, error::DatabaseError, postgres::PgConnectOptions};

use crate::store::{
    StoreError,
    sql::error::{self as sql_error, has_class, postgres_error},
    sql::single::RECORD_LOCKED,
};

pub(crate) fn failure(error: Error) -> StoreError {
    sql_error::failure(error, reported)
}

/// Returns the error of an attempt to connect.
pub(super) fn connect_failure(error: Error, options: &PgConnectOptions) -> StoreError {
    match error {
        Error::Io(cause) => {
            let text = format!("cannot connect to {}: {cause}", address(options));
            StoreError::unavailable(io::Error::new(cause.kind(), text))
        }
        error => failure(error),
    }
}

/// Returns the error of an attempt to connect that timed out.
pub(super) fn connect_timeout(options: &PgConnectOptions, timeout: Duration) -> StoreError {
    StoreError::timed_out().because(format!(
        "cannot connect to {} within `acquire_timeout` ({timeout:?})",
        address(options)
    ))
}

/// Returns the server's address, without the user and the password.
pub(super) fn address(options: &PgConnectOptions) -> String {
    match options.get_socket() {
        Some(socket) => socket.display().to_string(),
        None => format!("{}:{}", options.get_host(), options.get_port()),
    }
}

pub(crate) fn sqlstate(error: &Error) -> Option<Cow<'_, str>> {
    error.as_database_error()?.code()
}

pub(super) fn is_lock_timeout(error: &Error) -> bool {
    sqlstate(error).as_deref() == Some(LOCK_NOT_AVAILABLE)
}

/// Returns the meaning of an error that the server reported.
fn reported(error: &dyn DatabaseError) -> StoreError {
    let code = error.code().unwrap_or_default();
    match &*code {
        "57014" => StoreError::timed_out().because("`statement_timeout` has passed"),
        // One record of a batch may be locked.
        LOCK_NOT_AVAILABLE => StoreError::timed_out().because(RECORD_LOCKED).about_one(),
        SERIALIZATION_FAILURE | DEADLOCK => with_remedy(error, &code).rolled_back(),
        "53100" => StoreError::full("the server's disk"),
        "42501" => with_remedy(error, &code).of_privileges(),
        // Values, constraints, limits and triggers.
        _ if has_class(&code, &["21", "22", "23", "54", "P0"]) => {
            with_remedy(error, &code).about_one()
        }
        _ => with_remedy(error, &code),
    }
}

fn with_remedy(error: &dyn DatabaseError, code: &str) -> StoreError {
    let text = postgres_error(error);
    StoreError::unavailable(match remedy(code, error.message()) {
        Some(remedy) => format!("{text}: {remedy}"),
        None => text,
    })
}

fn remedy(code: &str, message: &str) -> Option<&'static str> {
    Some(match code {
        "42P01" | "3F000" => {
            "call `PostgresStore::migrate`, or apply `PostgresStore::schema_sql()`"
        }
        "42703" | "42804" | "42809" | "42883" | "42P10" => {
            "`PostgresStore::check_schema` says how the tables differ from what is needed"
        }
        "26000" | "42P05" => {
            "a pooler in transaction mode needs `PostgresStoreBuilder::pooler_safe`"
        }
        // A message of the pooler, which is never translated.
        "08P01" if message.contains("startup parameter") => {
            "PgBouncer needs `ignore_startup_parameters = extra_float_digits`"
        }
        "28000" | "28P01" => {
            "check the user and the password of the store's options, and the server's pg_hba.conf"
        }
        "3D000" => "create the database, or name another in the store's options",
        "25006" => "connect to the primary, and to a database that may be written to",
        "53300" => {
            "raise the server's `max_connections`, or lower `max_connections` and \
             `transaction_connections` of the store"
        }
        "57P03" => "the server is starting, stopping or recovering: the store tries again",
        _ => return None,
    })
}

const LOCK_NOT_AVAILABLE: &str = "55P03";
const SERIALIZATION_FAILURE: &str = "40001";
const DEADLOCK: &str = "40P01";

#[cfg(test)]
mod tests {
    use super::remedy;

    #[test]
    fn f110_codes_that_no_test_server_answers_have_remedies() {
        for (code, message, says) in [
            (
                "25006",
                "cannot execute INSERT in a read-only transaction",
                "primary",
            ),
            (
                "26000",
                "prepared statement \"sqlx_s_1\" does not exist",
                "pooler_safe",
            ),
            (
                "08P01",
                "unsupported startup parameter: extra_float_digits",
                "ignore_startup",
            ),
            ("57P03", "the database system is starting up", "tries again"),
        ] {
            let remedy = remedy(code, message).unwrap();
            assert!(remedy.contains(says), "{code}: {remedy}");
        }
    }
}
