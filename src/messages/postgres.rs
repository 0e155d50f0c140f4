//! What the inbox and the outbox have in common.

use sqlx::Postgres;

use super::{MessageError, sealed::MessageBackend};
use crate::store::{
    PostgresStore,
    postgres::{error::sqlstate, units::Unit},
};

impl MessageBackend for PostgresStore {
    type Sql = Postgres;
}

impl PostgresStore {
    /// Returns the error of a statement in a transaction of the application, with its
    /// remedy.
    pub(super) fn explained(&self, error: sqlx::Error, unit: &Unit) -> MessageError {
        let owner = unit.owner;
        let remedy = match sqlstate(&error).as_deref() {
            Some("42P01") => format!("call `{owner}::migrate`, or apply `{owner}::schema_sql()`"),
            // The transaction may have set another role.
            Some("42501") => self.inner.connector.schema.needed(unit),
            _ => return error.into(),
        };
        MessageError::from(error).with_remedy(&remedy)
    }
}
