//! The engine behind the connection.

/// The engine that answers to a store's statements.
///
/// The store asks the server when it connects.
/// [`PostgresStoreBuilder::engine`](crate::store::PostgresStoreBuilder::engine) overrides
/// the answer.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum PostgresEngine {
    /// PostgreSQL itself: statements skip records that another transaction has locked.
    Postgres,
    /// PostgreSQL with the extension Citus, whether the table is distributed or not:
    /// statements that every node can run. They wait for locked records.
    Citus,
}
