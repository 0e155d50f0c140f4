//! The header `Content-Digest` (RFC 9530): what a client declares about its body.

use std::convert::Infallible;

use http::{HeaderMap, HeaderName, HeaderValue};
use sfv::{
    BareItemFromInput, KeyRef, Parser,
    visitor::{DictionaryVisitor, EntryVisitor, Ignored, InnerListVisitor, ItemVisitor},
};
use sha2::{Digest as _, Sha256, Sha512};

/// The digests of a body that its client declares: at least one. Other algorithms than
/// these do not count.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(crate) struct DeclaredDigests {
    sha256: Option<[u8; 32]>,
    sha512: Option<[u8; 64]>,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum DigestAlgorithm {
    Sha256,
    Sha512,
}

/// The header is no dictionary, or has a digest that is none.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct DigestInvalid;

impl DeclaredDigests {
    /// Reads the header. Returns `None` if it declares no digest that is known here.
    pub(crate) fn of(headers: &HeaderMap) -> Result<Option<Self>, DigestInvalid> {
        let mut lines = headers.get_all(CONTENT_DIGEST).iter();
        let Some(first) = lines.next() else {
            return Ok(None);
        };
        // Several lines are one list (RFC 9651 §4.2).
        let joined = lines.fold(
            first.as_bytes().to_vec(),
            |mut joined, line: &HeaderValue| {
                joined.extend_from_slice(b", ");
                joined.extend_from_slice(line.as_bytes());
                joined
            },
        );
        let parsed = Parser::new(&joined).parse_dictionary_with_visitor(Entries::default());
        let Entries { sha256, sha512 } = parsed.map_err(|_| DigestInvalid)?;
        let declared = Self {
            sha256: sha256.read()?,
            sha512: sha512.read()?,
        };
        Ok(Some(declared).filter(|declared| *declared != Self::default()))
    }

    pub(crate) fn get(&self, algorithm: DigestAlgorithm) -> Option<&[u8]> {
        match algorithm {
            DigestAlgorithm::Sha256 => self.sha256.as_ref().map(|digest| &digest[..]),
            DigestAlgorithm::Sha512 => self.sha512.as_ref().map(|digest| &digest[..]),
        }
    }

    /// Whether they are those of a whole body.
    pub(crate) fn are_of(&self, body: &[u8]) -> bool {
        let mut check = DigestCheck::new(self.clone());
        check.update(body);
        check.holds()
    }
}

impl DigestAlgorithm {
    /// Returns the digest of a whole body.
    pub(crate) fn digest(self, body: &[u8]) -> Vec<u8> {
        match self {
            Self::Sha256 => Sha256::digest(body).to_vec(),
            Self::Sha512 => Sha512::digest(body).to_vec(),
        }
    }
}

/// Compares a body with all of its declared digests while it arrives.
pub(crate) struct DigestCheck {
    declared: DeclaredDigests,
    sha256: Option<Sha256>,
    sha512: Option<Sha512>,
}

impl DigestCheck {
    pub(crate) fn new(declared: DeclaredDigests) -> Self {
        Self {
            sha256: declared.sha256.map(|_| Sha256::new()),
            sha512: declared.sha512.map(|_| Sha512::new()),
            declared,
        }
    }

    pub(crate) fn update(&mut self, bytes: &[u8]) {
        if let Some(sha256) = &mut self.sha256 {
            sha256.update(bytes);
        }
        if let Some(sha512) = &mut self.sha512 {
            sha512.update(bytes);
        }
    }

    /// Whether the bytes so far are the declared body.
    pub(crate) fn holds(&mut self) -> bool {
        let sha256 = self.sha256.take();
        let sha256 = sha256.map(|hash| <[u8; 32]>::from(hash.finalize()));
        let sha512 = self.sha512.take();
        let sha512 = sha512.map(|hash| <[u8; 64]>::from(hash.finalize()));
        (sha256, sha512) == (self.declared.sha256, self.declared.sha512)
    }
}

/// The entries of the dictionary. Of several with one name, the last counts.
#[derive(Default)]
struct Entries {
    sha256: Entry,
    sha512: Entry,
}

#[derive(Default)]
enum Entry {
    #[default]
    Absent,
    Bytes(Vec<u8>),
    Other,
}

impl Entry {
    fn read<const LENGTH: usize>(self) -> Result<Option<[u8; LENGTH]>, DigestInvalid> {
        match self {
            Self::Absent => Ok(None),
            Self::Bytes(bytes) => bytes.try_into().map(Some).map_err(|_| DigestInvalid),
            Self::Other => Err(DigestInvalid),
        }
    }
}

impl<'de> DictionaryVisitor<'de> for Entries {
    type Out = Self;
    type Error = Infallible;

    fn entry(&mut self, key: &'de KeyRef) -> Result<impl EntryVisitor<'de>, Infallible> {
        Ok(match key.as_str() {
            "sha-256" => Some(&mut self.sha256),
            "sha-512" => Some(&mut self.sha512),
            _ => None,
        })
    }

    fn finish(self) -> Result<Self, Infallible> {
        Ok(self)
    }
}

impl<'de> EntryVisitor<'de> for &mut Entry {
    type Error = Infallible;

    fn item(self) -> Result<impl ItemVisitor<'de>, Infallible> {
        Ok(|item: BareItemFromInput<'de>| {
            *self = match item {
                BareItemFromInput::ByteSequence(bytes) => Entry::Bytes(bytes),
                _ => Entry::Other,
            };
            Ok::<_, Infallible>(Ignored)
        })
    }

    fn inner_list(self) -> Result<impl InnerListVisitor<'de>, Infallible> {
        *self = Entry::Other;
        Ok(Ignored)
    }
}

const CONTENT_DIGEST: HeaderName = HeaderName::from_static("content-digest");

#[cfg(test)]
mod tests {
    use super::*;

    fn read(lines: &[&'static str]) -> Result<Option<DeclaredDigests>, DigestInvalid> {
        let mut headers = HeaderMap::new();
        for line in lines {
            headers.append(CONTENT_DIGEST, HeaderValue::from_static(line));
        }
        DeclaredDigests::of(&headers)
    }

    #[test]
    fn malformed_digests_are_refused() {
        for line in [
            "sha-256",
            "sha-256=1",
            "sha-256=\"a\"",
            "sha-256=(:AA==:)",
            "sha-256=:AA==:",
            "sha-512=:AA==:",
            "sha-256=:AA==",
            "=",
            "sha-256=:X48E9qOokqqrvdts8nOJRJN3OWDUoyWxBf7kbu9DBPE=:,",
        ] {
            assert_eq!(read(&[line]), Err(DigestInvalid), "{line}");
        }
    }

    #[test]
    fn the_last_of_two_digests_counts() {
        assert_eq!(read(&["sha-256=1", SHA256]), read(&[SHA256]));
        assert_eq!(read(&[SHA256, "sha-256=1"]), Err(DigestInvalid));
    }

    const SHA256: &str = "sha-256=:RK/0qy18MlBSVnWgjwz6lZEWjP/lF5HF9bvEF8FabDg=:";
}
