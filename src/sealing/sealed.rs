//! The bytes of a sealed response.
//!
//! ```text
//! "ti" 2 · key id length u8, key id · nonce, 12 bytes · ciphertext · tag, 16 bytes
//! ```
//! The plaintext is the encoded response. The associated data are everything that a sealed
//! response belongs to, so that it opens in its own record alone. A nonce is random. If one
//! ever came twice, AES-GCM-SIV would show no more than that two responses are equal.

use aes_gcm_siv::{Nonce, Tag, aead::AeadInOut as _};
use bytes::{BufMut as _, Bytes, BytesMut};
use rand::RngExt as _;

use super::key::{LONGEST_ID, SealingKey, is_sound};
use crate::{
    error::StoreError,
    fingerprint::Fingerprint,
    key::{OperationId, RecordName},
    response::codec::{MAGIC, SEALED},
};

/// What a sealed response belongs to.
#[derive(Clone, Copy)]
pub(super) struct Place<'a> {
    pub(super) table: &'a str,
    pub(super) name: &'a RecordName,
    pub(super) fingerprint: &'a Fingerprint,
    pub(super) operation: OperationId,
}

impl Place<'_> {
    /// Returns the associated data, each part behind its length.
    pub(super) fn associated_data(self, key_id: &str) -> Box<[u8]> {
        let operation = self.operation.as_bytes();
        let parts: [&[u8]; 7] = [
            &[SEALED],
            key_id.as_bytes(),
            self.table.as_bytes(),
            self.name.scope().as_str().as_bytes(),
            self.name.key().as_str().as_bytes(),
            self.fingerprint.as_bytes(),
            operation,
        ];
        let length = parts.iter().map(|part| LENGTH + part.len()).sum();
        let mut data = Vec::with_capacity(length);
        for part in parts {
            data.put_u64_le(part.len() as u64);
            data.put_slice(part);
        }
        data.into()
    }
}

/// Whether the bytes are those of a sealed response.
pub(crate) fn is_sealed(bytes: &[u8]) -> bool {
    bytes.starts_with(&PREFIX)
}

pub(super) fn seal(key: &SealingKey, associated_data: &[u8], plaintext: &[u8]) -> Bytes {
    seal_with(rand::rng().random(), key, associated_data, plaintext)
}

fn seal_with(
    nonce: [u8; NONCE],
    key: &SealingKey,
    associated_data: &[u8],
    plaintext: &[u8],
) -> Bytes {
    let id = key.id().as_bytes();
    let length = PREFIX.len() + 1 + id.len() + NONCE + plaintext.len() + TAG;
    let mut bytes = BytesMut::with_capacity(length);
    bytes.put_slice(&PREFIX);
    bytes.put_u8(id.len() as u8);
    bytes.put_slice(id);
    bytes.put_slice(&nonce);
    let start = bytes.len();
    bytes.put_slice(plaintext);
    let text = (&mut bytes[start..]).into();
    let sealed = key
        .cipher
        .encrypt_inout_detached(&Nonce::from(nonce), associated_data, text);
    let tag = sealed.expect("a response has less than 64 GiB");
    bytes.put_slice(&tag);
    bytes.freeze()
}

/// Returns the id of the key that sealed a response.
pub(super) fn key_id(sealed: &[u8]) -> Result<&str, StoreError> {
    split(sealed).map(|(id, ..)| id)
}

/// Returns the encoded response, if it was sealed by this key for this associated data.
pub(super) fn open(
    key: &SealingKey,
    associated_data: &[u8],
    sealed: &[u8],
) -> Result<Bytes, StoreError> {
    let (_, nonce, ciphertext, tag) = split(sealed)?;
    let mut bytes = BytesMut::from(ciphertext);
    let text = (&mut bytes[..]).into();
    let opened = key.cipher.decrypt_inout_detached(
        &Nonce::from(*nonce),
        associated_data,
        text,
        &Tag::from(*tag),
    );
    match opened {
        Ok(()) => Ok(bytes.freeze()),
        Err(_) => {
            let id = key.id();
            let source = format!("response: sealed with the key `{id}`, {FORGED}");
            Err(StoreError::corrupt("").because(source))
        }
    }
}

type Split<'a> = (&'a str, &'a [u8; NONCE], &'a [u8], &'a [u8; TAG]);

fn split(sealed: &[u8]) -> Result<Split<'_>, StoreError> {
    let parts = || {
        let (&length, rest) = sealed.strip_prefix(&PREFIX)?.split_first()?;
        let (id, rest) = rest.split_at_checked(usize::from(length))?;
        let id = str::from_utf8(id).ok().filter(|id| is_sound(id))?;
        let (nonce, rest) = rest.split_first_chunk()?;
        let (ciphertext, tag) = rest.split_last_chunk()?;
        Some((id, nonce, ciphertext, tag))
    };
    parts().ok_or_else(|| StoreError::corrupt("response: its seal is cut off or damaged"))
}

const PREFIX: [u8; 3] = [MAGIC[0], MAGIC[1], SEALED];
const NONCE: usize = 12;
const TAG: usize = 16;
const LENGTH: usize = 8;
const FORGED: &str = "but with another secret, in another record or table, or changed since";
const _: () = assert!(LONGEST_ID <= u8::MAX as usize);

#[cfg(test)]
mod tests {
    use rand::{SeedableRng as _, rngs::StdRng};

    use super::*;
    use crate::{
        key::{Key, Scope},
        secret::Secret,
    };

    fn key(id: &str) -> SealingKey {
        SealingKey::new(id, &Secret::from_bytes(&[7; 32]).unwrap()).unwrap()
    }

    fn name(scope: &str, key: &str) -> RecordName {
        RecordName::new(Scope::from_stored(scope), Key::new(key))
    }

    fn data(id: &str, table: &str, name: &RecordName, filled: u8, operation: u8) -> Box<[u8]> {
        let place = Place {
            table,
            name,
            fingerprint: &Fingerprint::from_bytes([filled; Fingerprint::LENGTH]),
            operation: OperationId::from_bytes([operation; 16]),
        };
        place.associated_data(id)
    }

    #[test]
    fn sealed_bytes_of_format_2_stay_readable() {
        let data = data("2026-11", "payments", &name("acct_42", "order-7"), 1, 2);
        let sealed = seal_with([3; NONCE], &key("2026-11"), &data, b"paid");
        assert_eq!(hex::encode(&sealed), GOLDEN);
        assert_eq!(key_id(&sealed).unwrap(), "2026-11");
        let opened = open(&key("2026-11"), &data, &sealed).unwrap();
        assert_eq!(&opened[..], b"paid");
    }

    #[test]
    fn different_places_have_different_associated_data() {
        let mut rng = StdRng::seed_from_u64(0);
        let mut seen = std::collections::HashMap::new();
        for _ in 0..20_000 {
            let mut text = |most| -> String {
                let length = rng.random_range(0..=most);
                (0..length)
                    .map(|_| ['a', '\u{0}', '\u{1}'][rng.random_range(0..3)])
                    .collect()
            };
            let (id, table, scope, key) = (text(1), text(2), text(2), text(2));
            let (filled, operation) = (rng.random_range(0..2), rng.random_range(0..2));
            let bytes = data(&id, &table, &name(&scope, &key), filled, operation);
            let place = (id, table, scope, key, filled, operation);
            let before = seen.entry(bytes).or_insert_with(|| place.clone());
            assert_eq!(*before, place);
        }
        assert!(seen.len() > 1_000);
    }

    /// Made by the `AESGCMSIV` and `hmac` of Python.
    const GOLDEN: &str =
        "74690207323032362d31310303030303030303030303039f4ae4870de77a3ce51c4a49b58835e1bc1236d8";
}
