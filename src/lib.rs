//! Idempotency keys for Tower services.

mod config;
#[cfg(feature = "conformance")]
pub mod conformance;
mod fingerprint;
mod key;
mod lease;
mod operation;
mod protocol;
mod scope;
pub mod store;

pub use self::{
    fingerprint::{Fingerprint, Fingerprinting},
    key::{Key, KeySyntax},
    lease::{Fence, Token},
    operation::{Operation, OperationId, Word},
    scope::{RecordName, Scope},
    store::{MemoryStore, SharedStore, Store, StoreError, StoreErrorKind, Sweeper},
};
