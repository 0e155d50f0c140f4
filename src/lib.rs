//! Idempotency keys for Tower services.

#[cfg(feature = "axum")]
pub mod axum;
mod body;
mod claim;
mod config;
mod fingerprint;
mod flow;
mod future;
mod headers;
mod host;
mod jitter;
mod key;
mod layer;
mod lease;
mod operation;
mod outcome;
mod policy;
mod protocol;
mod record;
mod rejection;
mod replay;
mod scope;
mod service;
mod settle;
pub mod store;
mod waiting;

pub use self::{
    body::{RequestBody, ResponseBody},
    config::BuildError,
    fingerprint::{Fingerprint, Fingerprinting},
    future::ResponseFuture,
    headers::KeptHeaders,
    key::{Key, KeySyntax},
    layer::{Drained, IdempotencyBuilder, IdempotencyLayer},
    lease::{Fence, Token},
    operation::{Operation, OperationId, Word},
    outcome::Outcome,
    policy::{Disposition, Dispositions, Recovery, StoreFailure},
    record::RecordedResponse,
    rejection::{Rejection, RejectionKind},
    scope::{RecordName, Scope},
    service::Idempotency,
    store::{MemoryStore, SharedStore, Store, StoreError, StoreErrorKind, Sweeper},
};
