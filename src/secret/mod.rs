//! Bytes that only the service knows.

pub(crate) mod mac;

use std::fmt;

use rand::Rng as _;
use thiserror::Error;
use zeroize::Zeroizing;

/// 32 bytes that only the service knows.
///
/// Everything that is made from one secret has a key of its own, derived from it by its
/// purpose. So one secret may serve several purposes. Its memory is wiped when it is
/// dropped, and `Debug` shows nothing of it. The bytes or the text that it is made from
/// belong to the caller, and are not wiped.
///
/// ```
/// use tower_idempotency::sealing::{Secret, SecretError};
///
/// # fn main() -> Result<(), SecretError> {
/// // For example made by `openssl rand -hex 32`, and given in an environment variable.
/// let hex = "b1d5c6e80e2f43b9a0d7f1c24e6a8890b1d5c6e80e2f43b9a0d7f1c24e6a8890";
/// let secret = Secret::from_hex(hex)?;
/// assert_eq!(format!("{secret:?}"), "Secret(..)");
/// assert_eq!(Secret::from_hex("b1d5").unwrap_err(), SecretError::WrongLength(2));
/// # Ok(())
/// # }
/// ```
pub struct Secret(
    /// Boxed, so that moving the secret leaves no copy behind.
    Box<Zeroizing<[u8; Self::LENGTH]>>,
);

impl Secret {
    /// The number of bytes of a secret: 32.
    pub const LENGTH: usize = 32;

    /// Returns the secret with these bytes, which must be random.
    ///
    /// # Errors
    ///
    /// A [`SecretError`] if there are not exactly 32 bytes, or all of them are zero.
    pub fn from_bytes(bytes: &[u8]) -> Result<Self, SecretError> {
        let mut secret = Self::zero();
        if bytes.len() != Self::LENGTH {
            return Err(SecretError::WrongLength(bytes.len()));
        }
        secret.0.copy_from_slice(bytes);
        secret.checked()
    }

    /// Returns the secret with these bytes in hexadecimal: 64 digits.
    ///
    /// # Errors
    ///
    /// A [`SecretError`] if the text is not hexadecimal, does not stand for exactly 32
    /// bytes, or all of them are zero.
    pub fn from_hex(digits: &str) -> Result<Self, SecretError> {
        let mut secret = Self::zero();
        match hex::decode_to_slice(digits, secret.0.as_mut_slice()) {
            Ok(()) => secret.checked(),
            Err(hex::FromHexError::InvalidHexCharacter { .. }) => Err(SecretError::NotHex),
            Err(_) => Err(SecretError::WrongLength(digits.len() / 2)),
        }
    }

    /// Returns a new random secret, for tests and for a tool that makes keys.
    #[must_use]
    pub fn random() -> Self {
        let mut secret = Self::zero();
        rand::rng().fill_bytes(secret.0.as_mut_slice());
        secret
    }

    pub(crate) fn as_bytes(&self) -> &[u8; Self::LENGTH] {
        &self.0
    }

    fn zero() -> Self {
        Self(Box::default())
    }

    /// A secret of zeros is a buffer that was not filled.
    fn checked(self) -> Result<Self, SecretError> {
        match self.as_bytes().iter().all(|&byte| byte == 0) {
            true => Err(SecretError::AllZero),
            false => Ok(self),
        }
    }
}

impl fmt::Debug for Secret {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Secret(..)")
    }
}

/// Why bytes are no [`Secret`]. The text quotes none of them.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Error)]
#[non_exhaustive]
pub enum SecretError {
    /// It has another number of bytes.
    #[error("a secret has 32 bytes, got {0}")]
    WrongLength(usize),
    /// The text is not hexadecimal.
    #[error("a secret in hexadecimal has 64 digits from 0 to 9 and a to f")]
    NotHex,
    /// All bytes are zero.
    #[error("a secret has random bytes, got 32 zeros")]
    AllZero,
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_secret_refuses_wrong_lengths_and_zeros() {
        for length in [0, 16, 31, 33, 64] {
            let refused = Secret::from_bytes(&vec![7; length]).unwrap_err();
            assert_eq!(refused, SecretError::WrongLength(length));
            let refused = Secret::from_hex(&"07".repeat(length)).unwrap_err();
            assert_eq!(refused, SecretError::WrongLength(length));
        }
        let refused = Secret::from_bytes(&[0; 32]).unwrap_err();
        assert_eq!(refused, SecretError::AllZero);
        assert_eq!(
            refused.to_string(),
            "a secret has random bytes, got 32 zeros"
        );
        let refused = Secret::from_hex(&"0g".repeat(32)).unwrap_err();
        assert_eq!(refused, SecretError::NotHex);
        let (hex, bytes) = (Secret::from_hex(&"07".repeat(32)), [7; 32]);
        assert_eq!(hex.unwrap().as_bytes(), &bytes);
        assert_ne!(Secret::random().as_bytes(), Secret::random().as_bytes());
    }
}
