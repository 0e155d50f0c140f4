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
#[derive(Default)]
pub(super) struct Framed(Sha256);

impl Framed {
    pub(super) fn field(&mut self, bytes: &[u8]) {
        self.count(bytes.len());
        self.write(bytes);
    }

    /// A body has up to 256 MiB, and a head much less.
    pub(super) fn count(&mut self, count: usize) {
        self.write(&(count as u32).to_le_bytes());
    }

    /// Ends a list: no field is as long.
    pub(super) fn end(&mut self) {
        self.write(&u32::MAX.to_le_bytes());
    }

    pub(super) fn write(&mut self, bytes: &[u8]) {
        self.0.update(bytes);
    }

    pub(super) fn digest(self) -> Digest {
        self.0.finalize().into()
    }
}

#[cfg(test)]
mod tests {
    use std::collections::HashSet;

    use super::*;

    #[test]
    fn fields_do_not_run_into_one_another() {
        let of = |length: usize| vec![u8::MAX; length];
        let cases: [&[Vec<Vec<u8>>]; 8] = [
            &[vec![]],
            &[vec![], vec![]],
            &[vec![of(0)]],
            &[vec![of(0), of(0)]],
            &[vec![of(0)], vec![of(0)]],
            &[vec![of(4), of(0)]],
            &[vec![of(0), of(4)]],
            &[vec![of(8)]],
        ];
        let digests = cases.map(|lists| {
            let mut framed = Framed::default();
            for list in lists {
                list.iter().for_each(|field| framed.field(field));
                framed.end();
            }
            framed.digest()
        });
        let distinct: HashSet<_> = digests.iter().collect();
        assert_eq!(distinct.len(), digests.len());
    }
}
