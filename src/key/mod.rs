//! The names of things: keys, scopes, records and operations.

mod operation_id;
mod record_name;
mod scope;
mod syntax;

use std::{fmt, sync::Arc};

pub(crate) use self::syntax::{HEADER, KeyFault};
pub use self::{
    operation_id::OperationId, record_name::RecordName, scope::Scope, syntax::KeySyntax,
};

/// What the client sent to name its operation: one decoded `Idempotency-Key`.
///
/// Keys are compared byte for byte and case-sensitively. `"abc"` and a bare
/// `abc` are the same key. Where only UUIDs are accepted, a key is the UUID in
/// lower case, however it was sent. Its `Debug` output shows the length alone, so
/// that no key reaches a log by accident.
#[derive(Clone, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct Key(Arc<str>);

impl Key {
    /// A key as an operator or a test spells it: already decoded, without
    /// quotes. The syntax of the layer is not applied: write UUIDs in lower case.
    pub fn new(decoded: impl Into<Arc<str>>) -> Self {
        Self(decoded.into())
    }

    /// The decoded key.
    #[must_use]
    pub fn as_str(&self) -> &str {
        &self.0
    }
}

impl fmt::Debug for Key {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Key({} bytes)", self.0.len())
    }
}
