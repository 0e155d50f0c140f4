//! What the inbox and the outbox have in common.

use sqlx::Postgres;

use super::{PostgresStore, error::sqlstate, migrations::Unit};
use crate::messages::{MessageError, sealed::MessageBackend};

impl MessageBackend for PostgresStore {
    type Sql = Postgres;
}

impl Unit {
    /// Returns the error of a statement in a transaction of the application.
    pub(super) fn error(&self, error: sqlx::Error) -> MessageError {
        let owner = self.owner;
        let remedy = match sqlstate(&error).as_deref() {
            Some("42P01") => format!("call `{owner}::migrate`, or apply `{owner}::schema_sql()`"),
            Some("42501") => format!(
                "the role needs USAGE on the schema, and SELECT, INSERT, UPDATE and DELETE on \
                 the tables of `{owner}::schema_sql()`"
            ),
            _ => return error.into(),
        };
        MessageError::from(error).with_remedy(&remedy)
    }
}
