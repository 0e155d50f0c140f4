//! The bytes of a fingerprint.

use std::{fmt, ops::Range};

#[cfg(feature = "sealing")]
use super::key::FingerprintKey;
use super::{
    digest::{Digest, Framed},
    target::Source,
};

/// Identifies a request, to tell a retry from another request with the same key.
///
/// It holds the id of the scheme that made it, a SHA-256 digest of the request, and
/// four bytes for each part of the request. A keyed one has an HMAC in the place of the
/// digest. Two requests are the same if their digests under one scheme are. The four bytes
/// only name the parts that differ.
///
/// Stores keep the bytes and never look into them:
///
/// ```
/// use tower_idempotency::store::Fingerprint;
///
/// let kept: Vec<u8> = vec![7; Fingerprint::LENGTH];
/// let fingerprint = Fingerprint::from_bytes(kept.as_slice().try_into()?);
/// assert_eq!(fingerprint.as_bytes()[..], kept);
/// # Ok::<(), std::array::TryFromSliceError>(())
/// ```
#[derive(Clone, Copy, PartialEq, Eq, Hash)]
pub struct Fingerprint([u8; Self::LENGTH]);

impl Fingerprint {
    /// The number of bytes of a fingerprint: 84.
    pub const LENGTH: usize = PRINTS_START + (HEADERS_START + HEADER_PLACES) * PRINT_LENGTH;

    /// Returns the fingerprint that a store kept. Accepts any bytes: those that no
    /// scheme made belong to a scheme that is not known.
    #[must_use]
    pub fn from_bytes(bytes: [u8; Self::LENGTH]) -> Self {
        Self(bytes)
    }

    /// Returns the bytes for a store to keep.
    #[must_use]
    pub fn as_bytes(&self) -> &[u8; Self::LENGTH] {
        &self.0
    }

    pub(super) fn scheme(&self) -> Scheme {
        Scheme(first(&self.0))
    }

    /// `None` if the byte is that of a later version.
    pub(super) fn source(&self) -> Option<Source> {
        Source::from_byte(self.0[SOURCE])
    }

    /// Whether both have the same scheme and the same source.
    pub(super) fn is_made_as(&self, other: &Self) -> bool {
        self.0[..DIGEST_START] == other.0[..DIGEST_START]
    }

    pub(super) fn print(&self, place: Place) -> Print {
        first(&self.0[place.bytes()])
    }

    /// Replaces the digest with its MAC, and hides the prints of the parts.
    #[cfg(feature = "sealing")]
    pub(super) fn keyed(mut self, key: &FingerprintKey) -> Self {
        let digest = key.digest(&self.0[..PRINTS_START]);
        self.0[DIGEST_START..PRINTS_START].copy_from_slice(&digest);
        self.masked(key)
    }

    /// Hides the prints of a keyed fingerprint, or shows them again.
    #[cfg(feature = "sealing")]
    pub(super) fn masked(mut self, key: &FingerprintKey) -> Self {
        let (made, prints) = self.0.split_at_mut(PRINTS_START);
        let mask = key.mask(&made[DIGEST_START..]);
        prints
            .iter_mut()
            .zip(mask)
            .for_each(|(byte, mask)| *byte ^= mask);
        self
    }
}

/// Shows the scheme and its source, and nothing of the request.
impl fmt::Debug for Fingerprint {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let scheme = hex::encode(&self.0[..DIGEST_START]);
        write!(f, "Fingerprint({scheme}..)")
    }
}

/// Identifies the settings of a fingerprint. Two layers with the same settings
/// have the same scheme, in any process and version.
///
/// The full id is these bytes and the [`Source`] of the target, which may differ
/// from record to record.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Scheme([u8; SOURCE]);

impl Scheme {
    pub(super) fn new(digest: Digest) -> Self {
        Self(first(&digest))
    }
}

/// The position of a part in a fingerprint.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(super) struct Place(usize);

impl Place {
    pub(super) const METHOD: Self = Self(0);
    pub(super) const PATH: Self = Self(1);
    pub(super) const QUERY: Self = Self(2);
    pub(super) const MEDIA_TYPE: Self = Self(3);
    pub(super) const CONTENT_ENCODING: Self = Self(4);
    pub(super) const AUTHORITY: Self = Self(5);
    pub(super) const BODY: Self = Self(6);

    /// The position of the chosen header with this index; some share one.
    pub(super) fn header(index: usize) -> Self {
        Self(HEADERS_START + index % HEADER_PLACES)
    }

    fn bytes(self) -> Range<usize> {
        let start = PRINTS_START + self.0 * PRINT_LENGTH;
        start..start + PRINT_LENGTH
    }
}

pub(super) type Print = [u8; PRINT_LENGTH];

fn first<const LENGTH: usize>(bytes: &[u8]) -> [u8; LENGTH] {
    *bytes
        .first_chunk()
        .expect("the slice is as long as the array")
}

/// Makes a fingerprint, part by part.
///
/// The body comes first and is hashed once: the hash goes on over the parts of the head.
/// Last come its form and its length, which say where the head begins.
pub(super) struct Builder {
    fingerprint: Fingerprint,
    whole: Framed,
    form: u8,
    body_length: u64,
    /// A new one, to be copied: making one asks for the features of the processor.
    checksum: crc32fast::Hasher,
}

impl Builder {
    /// `form` tells a body of bytes from one of values or parts.
    pub(super) fn new(scheme: Scheme, source: Source, form: u8, body: Framed) -> Self {
        let mut bytes = [0; Fingerprint::LENGTH];
        bytes[..SOURCE].copy_from_slice(&scheme.0);
        bytes[SOURCE] = source as u8;
        let mut builder = Self {
            fingerprint: Fingerprint(bytes),
            form,
            body_length: body.written(),
            whole: body,
            checksum: crc32fast::Hasher::new(),
        };
        // With a checksum, a reader of the store could solve for a secret in the body.
        let digest = builder.whole.clone().digest();
        builder.set(Place::BODY, first(&digest));
        builder
    }

    /// Adds a part that every request has.
    ///
    /// A checksum suffices to name a part that differs, and costs a fraction of a
    /// digest. The digest of the whole decides whether any part differs.
    pub(super) fn part(&mut self, place: Place, value: &[u8]) {
        self.whole.field(value);
        let mut checksum = self.checksum.clone();
        checksum.update(value);
        self.set(place, checksum.finalize().to_le_bytes());
    }

    /// Adds the values of a part that may have several: none differs from an empty
    /// one.
    pub(super) fn list(&mut self, place: Place, values: impl IntoIterator<Item: AsRef<[u8]>>) {
        let mut checksum = self.checksum.clone();
        for value in values {
            let value = value.as_ref();
            self.whole.field(value);
            checksum.update(value);
            // No value contains a line feed, so nothing runs together.
            checksum.update(b"\n");
        }
        self.whole.end();
        // Several lists may share a place.
        let before = u32::from_le_bytes(self.fingerprint.print(place));
        let print = before.rotate_left(1) ^ checksum.finalize();
        self.set(place, print.to_le_bytes());
    }

    pub(super) fn build(mut self) -> Fingerprint {
        self.whole.write(&[self.form]);
        self.whole.write(&self.body_length.to_le_bytes());
        self.fingerprint.0[DIGEST_START..PRINTS_START].copy_from_slice(&self.whole.digest());
        self.fingerprint
    }

    fn set(&mut self, place: Place, print: Print) {
        self.fingerprint.0[place.bytes()].copy_from_slice(&print);
    }
}

const SOURCE: usize = 7;
const DIGEST_START: usize = 8;
const PRINTS_START: usize = DIGEST_START + 32;
const PRINT_LENGTH: usize = 4;
const HEADERS_START: usize = 7;
const HEADER_PLACES: usize = 4;
