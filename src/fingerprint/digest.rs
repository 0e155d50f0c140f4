//! Digests of bodies and of lists of fields.

use sha2::{Digest as _, Sha256};

/// The reason why a body has no digest.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct BodyFault(pub(crate) &'static str);

pub(super) type Digest = [u8; 32];

pub(super) fn digest(bytes: &[u8]) -> Digest {
    Sha256::digest(bytes).into()
}

/// SHA-256 over fields that cannot run into one another: each has its length in
/// front.
#[derive(Clone, Default)]
pub(super) struct Framed {
    sha256: Sha256,
    written: u64,
}

impl Framed {
    /// Hashes bytes without their length.
    pub(super) fn of(bytes: &[u8]) -> Self {
        let mut framed = Self::default();
        framed.write(bytes);
        framed
    }

    pub(super) fn field(&mut self, bytes: &[u8]) {
        self.count(bytes.len() + 1);
        self.write(bytes);
    }

    /// Seven bits a byte, the lowest first: most lengths take one byte.
    pub(super) fn count(&mut self, mut count: usize) {
        while count >= 0x80 {
            self.write(&[count as u8 | 0x80]);
            count >>= 7;
        }
        self.write(&[count as u8]);
    }

    /// Ends a list: a field begins with at least one.
    pub(super) fn end(&mut self) {
        self.count(0);
    }

    pub(super) fn write(&mut self, bytes: &[u8]) {
        self.written += bytes.len() as u64;
        self.sha256.update(bytes);
    }

    /// The number of bytes that were hashed.
    pub(super) fn written(&self) -> u64 {
        self.written
    }

    pub(super) fn digest(self) -> Digest {
        self.sha256.finalize().into()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn long_field_has_its_length_in_several_bytes() {
        for (length, before) in [
            (126, &[0x7f][..]),
            (127, &[0x80, 0x01]),
            (300, &[0xad, 0x02]),
            (16_383, &[0x80, 0x80, 0x01]),
        ] {
            let field = vec![7; length];
            let mut framed = Framed::default();
            framed.field(&field);
            assert_eq!(framed.digest(), digest(&[before, &field].concat()));
        }
    }
}
