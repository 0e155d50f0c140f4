//! Ids of keys for logs.

use std::sync::Arc;

use crate::key::RecordName;
use crate::secret::{Secret, mac::MacKey};

/// Gives each key an id that may be logged, so that an operator finds a client's key.
///
/// The event of each [outcome](crate#logs-and-metrics) then has the field `key_id`: 16
/// hexadecimal digits of an HMAC-SHA-256 over the scope and the key. Without the secret,
/// it says nothing about either.
///
/// ```
/// use tower_idempotency::{Key, Scope, sealing::{LogIds, Secret}, store::RecordName};
///
/// let log_ids = LogIds::new(&Secret::random());
/// // What a client has sent, as a ticket quotes it.
/// let name = RecordName::new(Scope::new("acct_42").unwrap(), Key::new("order-7"));
/// let search_for = log_ids.of(&name);
/// assert_eq!(search_for.len(), 16);
/// ```
#[derive(Clone, Debug)]
pub struct LogIds(Arc<MacKey>);

impl LogIds {
    /// Ids under a key that is derived from this secret. Under another secret, a key has
    /// another id.
    #[must_use]
    pub fn new(secret: &Secret) -> Self {
        Self(Arc::new(MacKey::derive(secret, "log ids/1")))
    }

    /// Returns the id of a key in its scope, both as the client sent them: 16 hexadecimal
    /// digits.
    #[must_use]
    pub fn of(&self, name: &RecordName) -> String {
        let mut id = self.0.start();
        id.field(name.scope().as_str().as_bytes());
        id.write(name.key().as_str().as_bytes());
        hex::encode(&id.finish()[..8])
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::key::{Key, Scope};

    #[test]
    fn ids_of_keys_keep_their_values() {
        let log_ids = LogIds::new(&Secret::from_bytes(&[7; 32]).unwrap());
        let of = |scope: &str, key: &str| {
            log_ids.of(&RecordName::new(Scope::from_stored(scope), Key::new(key)))
        };
        assert_eq!(of("acct_42", "order-7"), GOLDEN);
        assert_ne!(of("acct_4", "2order-7"), GOLDEN);
    }

    /// Made by Python's `hmac`.
    const GOLDEN: &str = "886a9b1d2a00ce14";
}
