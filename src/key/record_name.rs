//! The name of a record: a scope and a key.

use super::{Key, Scope};

/// The name of a record: a scope and a key.
#[derive(Clone, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct RecordName {
    scope: Scope,
    key: Key,
}

impl RecordName {
    /// Returns the name of the record of this key in this scope.
    #[must_use]
    pub fn new(scope: Scope, key: Key) -> Self {
        Self { scope, key }
    }

    /// The scope.
    #[must_use]
    pub fn scope(&self) -> &Scope {
        &self.scope
    }

    /// The key.
    #[must_use]
    pub fn key(&self) -> &Key {
        &self.key
    }

    /// The length of both in bytes.
    pub(crate) fn bytes(&self) -> usize {
        self.scope.as_str().len() + self.key.as_str().len()
    }
}
