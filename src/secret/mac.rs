//! HMAC-SHA-256 under a key that is derived from a secret by its purpose.

use std::fmt;

use hmac::{Hmac, KeyInit as _, Mac as _};
use sha2::Sha256;
use zeroize::{ZeroizeOnDrop, Zeroizing};

use super::Secret;

/// A key of HMAC-SHA-256. The blocks of the key are hashed once, when it is made.
pub(crate) struct MacKey(Hmac<Sha256>);

/// A MAC that is under way.
pub(crate) struct MacWriter(Hmac<Sha256>);

impl MacKey {
    /// Derives the key for one purpose. Different purposes have independent keys.
    pub(crate) fn derive(secret: &Secret, purpose: &str) -> Self {
        Self(keyed(&derive(secret, purpose)))
    }

    pub(crate) fn start(&self) -> MacWriter {
        MacWriter(self.0.clone())
    }
}

impl MacWriter {
    pub(crate) fn write(&mut self, bytes: &[u8]) {
        self.0.update(bytes);
    }

    /// Writes bytes behind their length, so that fields do not run into one another.
    pub(crate) fn field(&mut self, bytes: &[u8]) {
        self.write(&(bytes.len() as u64).to_le_bytes());
        self.write(bytes);
    }

    pub(crate) fn finish(self) -> [u8; 32] {
        self.0.finalize().into_bytes().into()
    }
}

/// Derives 32 bytes for one purpose.
pub(crate) fn derive(secret: &Secret, purpose: &str) -> Zeroizing<[u8; 32]> {
    let mut mac = MacWriter(keyed(secret.as_bytes()));
    mac.write(b"tower-idempotency ");
    mac.write(purpose.as_bytes());
    Zeroizing::new(mac.finish())
}

fn keyed(key: &[u8; 32]) -> Hmac<Sha256> {
    Hmac::new_from_slice(key).expect("HMAC takes a key of any length")
}

/// MACs could be made from the states of the hash in an HMAC. They are overwritten when they
/// are dropped, because the feature `zeroize` of `sha2` is enabled.
const _: () = {
    const fn is_overwritten<T: ZeroizeOnDrop>() {}
    is_overwritten::<Sha256>();
};

impl fmt::Debug for MacKey {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("MacKey(..)")
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_derived_key_keeps_its_macs() {
        let secret = Secret::from_bytes(&[7; 32]).unwrap();
        let mut mac = MacKey::derive(&secret, "test/1").start();
        mac.field(b"ab");
        mac.write(b"c");
        assert_eq!(hex::encode(mac.finish()), GOLDEN);
        let other = MacKey::derive(&secret, "test/2").start();
        assert_ne!(
            other.finish(),
            MacKey::derive(&secret, "test/1").start().finish()
        );
    }

    /// Made by Python's `hmac`.
    const GOLDEN: &str = "5a41e6949e598bc50b3fea991c8a006c479e8992951c4c6acc94a37e96517f74";
}
