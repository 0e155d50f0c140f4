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
        match count as u32 {
            short @ 0..SHORT => self.write(&[short as u8]),
            long => {
                self.write(&[LONG]);
                self.write(&long.to_le_bytes());
            }
        }
    }

    /// Ends a list: no field begins like this.
    pub(super) fn end(&mut self) {
        self.write(&[END]);
    }

    pub(super) fn write(&mut self, bytes: &[u8]) {
        self.0.update(bytes);
    }

    pub(super) fn digest(self) -> Digest {
        self.0.finalize().into()
    }
}

/// Shorter lengths have one byte. The values above begin or end something else.
const SHORT: u32 = 0xfe;
const END: u8 = 0xfe;
const LONG: u8 = 0xff;

#[cfg(test)]
mod tests {
    use std::collections::HashSet;

    use super::*;

    #[test]
    fn fields_do_not_run_into_one_another() {
        let of = |length: usize| vec![END; length];
        // If the length 254 had one byte, it would look like the end of a list.
        let hidden = [&[252][..], &of(252), &[1]].concat();
        let cases: [&[Vec<Vec<u8>>]; 11] = [
            &[vec![]],
            &[vec![], vec![]],
            &[vec![of(0)]],
            &[vec![of(0), of(0)]],
            &[vec![of(0)], vec![of(0)]],
            &[vec![of(1), of(0)]],
            &[vec![of(0), of(1)]],
            &[vec![of(255)]],
            &[vec![of(256)]],
            &[vec![hidden], vec![]],
            &[vec![], vec![of(252), of(1)]],
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

    #[test]
    fn a_long_field_has_its_length_in_five_bytes() {
        let mut framed = Framed::default();
        framed.field(&[7; 0x1fe]);
        let spelled = [&[0xff, 0xfe, 1, 0, 0][..], &[7; 0x1fe]].concat();
        assert_eq!(framed.digest(), digest(&spelled));
    }
}
