//! The id of an operation, and the keys that are derived from it.

use std::fmt;

use rand::RngExt as _;
use sha2::{Digest as _, Sha256};

/// Identifies one operation over all its attempts: 128 random bits, made at the
/// first claim, shown as 32 hexadecimal digits.
///
/// It stays the same while retries bring the same request, and is replaced for
/// another request or once the record has expired, so it is safe to send
/// downstream. It contains nothing of the key.
#[derive(Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct OperationId([u8; 16]);

impl OperationId {
    /// A new random id.
    #[must_use]
    pub fn random() -> Self {
        Self(rand::rng().random::<u128>().to_ne_bytes())
    }

    /// The id that a store kept.
    #[must_use]
    pub fn from_bytes(bytes: [u8; 16]) -> Self {
        Self(bytes)
    }

    /// The bytes for a store to keep.
    #[must_use]
    pub fn as_bytes(&self) -> &[u8; 16] {
        &self.0
    }

    /// A stable idempotency key for one downstream system or step, as a UUID:
    /// the same for all attempts of this operation, another for every other
    /// `purpose` and operation.
    ///
    /// Made from the id by SHA-256 (a UUID of version 8, RFC 9562 §5.8); the
    /// client cannot choose or guess it.
    #[must_use]
    pub fn derive(&self, purpose: &str) -> String {
        let digest = Sha256::new()
            .chain_update(self.0)
            .chain_update(purpose)
            .finalize();
        let mut bytes = [0; 16];
        bytes.copy_from_slice(&digest[..16]);
        uuid::Builder::from_custom_bytes(bytes)
            .into_uuid()
            .to_string()
    }
}

impl fmt::Display for OperationId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&hex::encode(self.0))
    }
}

impl fmt::Debug for OperationId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "OperationId({self})")
    }
}

#[cfg(test)]
mod tests {
    use uuid::Uuid;

    use super::*;

    #[test]
    fn derived_key_is_stable_and_differs_by_purpose_and_operation() {
        let (one, other) = (
            OperationId::from_bytes([1; 16]),
            OperationId::from_bytes([2; 16]),
        );
        assert_eq!(one.derive("payments"), one.derive("payments"));
        assert_ne!(one.derive("payments"), one.derive("mail"));
        assert_ne!(one.derive("payments"), other.derive("payments"));
        let derived = Uuid::parse_str(&one.derive("payments")).unwrap();
        assert_eq!(derived.get_version_num(), 8);
    }
}
