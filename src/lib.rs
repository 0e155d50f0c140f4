//! Idempotency keys for Tower services.

mod config;
mod fingerprint;
mod key;
mod lease;
mod operation;
mod protocol;
mod scope;
pub mod store;

#[cfg(feature = "postgres")]
pub use self::store::PostgresStore;
#[cfg(feature = "sqlite")]
pub use self::store::SqliteStore;
pub use self::{
    fingerprint::{Fingerprint, Fingerprinting},
    key::{Key, KeySyntax},
    lease::{Fence, Token},
    operation::{Operation, OperationId, Word},
    scope::{RecordName, Scope},
    store::{MemoryStore, SharedStore, Store, StoreError, StoreErrorKind, Sweeper},
};

/// The sqlx that the SQL stores are built on, so that an application names the
/// same version of its types.
#[cfg(any(feature = "postgres", feature = "sqlite"))]
pub use sqlx;
