//! A key that seals responses.

use std::{fmt, sync::Arc};

use aes_gcm_siv::{AesGcmSiv, Key, KeyInit as _, aes::Aes256Enc};
use thiserror::Error;

use crate::secret::{Secret, mac::derive};

/// AES-256-GCM-SIV. Only the direction of the cipher that encrypts is needed.
pub(super) type Cipher = AesGcmSiv<Aes256Enc>;

/// A key that seals responses, with the id by which sealed responses name it.
///
/// Its memory is wiped when it is dropped, and `Debug` shows the id alone.
pub struct SealingKey {
    id: Arc<str>,
    pub(super) cipher: Cipher,
}

impl SealingKey {
    /// Returns the key that is derived from this secret.
    ///
    /// The id stands readable in each sealed response. Give every secret an id of its own,
    /// such as the month in which it was made.
    ///
    /// # Errors
    ///
    /// A [`SealingKeyError`] unless the id has 1 to 64 visible ASCII characters.
    pub fn new(id: impl Into<Arc<str>>, secret: &Secret) -> Result<Self, SealingKeyError> {
        let id = id.into();
        if !is_sound(&id) {
            return Err(SealingKeyError(id.len()));
        }
        let key = derive(secret, "sealing/1");
        let key: &Key<Cipher> = (&*key).into();
        Ok(Self {
            id,
            cipher: Cipher::new(key),
        })
    }

    /// Returns the id.
    #[must_use]
    pub fn id(&self) -> &str {
        &self.id
    }
}

pub(super) fn is_sound(id: &str) -> bool {
    (1..=LONGEST_ID).contains(&id.len()) && id.bytes().all(|byte| byte.is_ascii_graphic())
}

impl fmt::Debug for SealingKey {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("SealingKey")
            .field("id", &self.id)
            .finish_non_exhaustive()
    }
}

/// The id of a [`SealingKey`] is not possible.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Error)]
#[error("the id of a sealing key has 1 to 64 visible ASCII characters, got one of {0} bytes")]
pub struct SealingKeyError(usize);

/// Its length is one byte.
pub(super) const LONGEST_ID: usize = 64;

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_key_refuses_ids_that_cannot_be_read() {
        let secret = Secret::random();
        for id in ["", "a b", "a\n", "é", &"x".repeat(65)] {
            let refused = SealingKey::new(id, &secret).unwrap_err();
            assert_eq!(refused, SealingKeyError(id.len()));
        }
        let key = SealingKey::new("x".repeat(64), &secret).unwrap();
        assert_eq!(key.id().len(), 64);
        let shown = format!("{:?}", SealingKey::new("2026-11", &secret).unwrap());
        assert_eq!(shown, "SealingKey { id: \"2026-11\", .. }");
    }
}
