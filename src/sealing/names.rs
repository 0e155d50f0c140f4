//! Digests in the place of readable scopes and keys.

use std::sync::Arc;

use crate::key::{Key, RecordName, Scope};
use crate::secret::{Secret, mac::MacKey};

/// Replaces the scope and the key of each record with digests, so that the store, its logs
/// and its backups hold nothing readable of either.
///
/// A digest is the HMAC-SHA-256 under a secret in hexadecimal: 64 characters. The digest of
/// a key includes its scope, so that equal keys of two callers differ.
///
/// **The secret must stay the same for as long as records are kept.** Under another secret
/// a retry finds no record, and runs again. So must the choice of digests or readable names.
///
/// Operators find a record by the same digests:
///
/// ```
/// use tower_idempotency::{Key, Scope, sealing::{NameDigests, Secret}, store::RecordName};
///
/// let digests = NameDigests::new(&Secret::random());
/// let scope = Scope::new("acct_42").unwrap();
/// let name = digests.of(&RecordName::new(scope.clone(), Key::new("order-7")));
/// // `store.read(&name)`, or in psql: WHERE scope = '…' AND key = '…'
/// assert_eq!(name.scope(), &digests.of_scope(&scope));
/// assert_eq!((name.scope().as_str().len(), name.key().as_str().len()), (64, 64));
/// ```
#[derive(Clone, Debug)]
pub struct NameDigests(Arc<MacKey>);

impl NameDigests {
    /// Digests under a key that is derived from this secret.
    #[must_use]
    pub fn new(secret: &Secret) -> Self {
        Self(Arc::new(MacKey::derive(secret, "record names/1")))
    }

    /// Returns the name under which the record is kept.
    #[must_use]
    pub fn of(&self, name: &RecordName) -> RecordName {
        let mut key = self.0.start();
        key.write(b"key");
        key.field(name.scope().as_str().as_bytes());
        key.write(name.key().as_str().as_bytes());
        let key = Key::new(text(key.finish()));
        RecordName::new(self.of_scope(name.scope()), key)
    }

    /// Returns the scope under which the records of this scope are kept, for a
    /// [`Filter`](crate::store::admin::Filter).
    #[must_use]
    pub fn of_scope(&self, scope: &Scope) -> Scope {
        let mut digest = self.0.start();
        digest.write(b"scope");
        digest.write(scope.as_str().as_bytes());
        Scope::from_stored(text(digest.finish()))
    }
}

fn text(digest: [u8; 32]) -> Arc<str> {
    hex::encode(digest).into()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn named(scope: &str, key: &str) -> RecordName {
        RecordName::new(Scope::from_stored(scope), Key::new(key))
    }

    #[test]
    fn digests_of_names_keep_their_values() {
        let digests = NameDigests::new(&Secret::from_bytes(&[7; 32]).unwrap());
        let name = digests.of(&named("acct_42", "order-7"));
        assert_eq!(name.scope().as_str(), SCOPE);
        assert_eq!(name.key().as_str(), KEY);
    }

    /// Made by Python's `hmac`.
    const SCOPE: &str = "0ed9d35993ebea2cccde1aca4e6c6625fe67ebca810e6467d609c501533ffa88";
    const KEY: &str = "dca428715f0cdec737fb881728470c9f7aadcc2547f52dd83b0e66b09b4f63bc";
}
