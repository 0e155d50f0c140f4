//! The bytes of a fingerprint.

use std::fmt;

use super::{
    digest::{Digest, Framed},
    target::Source,
};

/// Identifies a request, to tell a retry from another request with the same key.
///
/// It holds the id of the scheme that made it, a SHA-256 digest of the request, and
/// four bytes for each part of the request. Two requests are the same if their
/// digests under one scheme are. The four bytes only name the parts that differ.
///
/// Stores keep the bytes and never look into them:
///
/// ```
/// use tower_idempotency::Fingerprint;
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
        let mut id = [0; SOURCE];
        id.copy_from_slice(&self.0[..SOURCE]);
        Scheme(id)
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
        let mut print = [0; PRINT_LENGTH];
        print.copy_from_slice(&self.0[place.start()..][..PRINT_LENGTH]);
        print
    }
}

impl fmt::Debug for Fingerprint {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Fingerprint(..)")
    }
}

/// Identifies the settings that made a fingerprint: two layers with the same
/// settings agree on it, whatever process or version they run in.
///
/// The full id is these bytes and the [`Source`] of the target, which may differ
/// from record to record.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Scheme([u8; SOURCE]);

impl Scheme {
    pub(super) fn new(digest: Digest) -> Self {
        let mut id = [0; SOURCE];
        id.copy_from_slice(&digest[..SOURCE]);
        Self(id)
    }
}

/// Where the bytes of a part stand in a fingerprint.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(super) enum Place {
    Method,
    Path,
    Query,
    MediaType,
    ContentEncoding,
    Authority,
    Body,
    Header(usize),
}

impl Place {
    /// The place of the chosen header with this index; some share one.
    pub(super) fn header(index: usize) -> Self {
        Self::Header(index % HEADER_PLACES)
    }

    fn start(self) -> usize {
        let number = match self {
            Self::Method => 0,
            Self::Path => 1,
            Self::Query => 2,
            Self::MediaType => 3,
            Self::ContentEncoding => 4,
            Self::Authority => 5,
            Self::Body => 6,
            Self::Header(index) => HEADERS_START + index,
        };
        PRINTS_START + number * PRINT_LENGTH
    }
}

pub(super) type Print = [u8; PRINT_LENGTH];

/// The form in which a body is digested.
#[derive(Clone, Copy)]
pub(super) enum BodyForm {
    Bytes = b'b' as isize,
    Json = b'j' as isize,
    #[cfg(feature = "multipart")]
    Multipart = b'p' as isize,
    Custom = b'c' as isize,
}

/// Makes a fingerprint, part by part.
pub(super) struct Builder {
    fingerprint: Fingerprint,
    whole: Framed,
}

impl Builder {
    pub(super) fn new(scheme: Scheme, source: Source) -> Self {
        let mut bytes = [0; Fingerprint::LENGTH];
        bytes[..SOURCE].copy_from_slice(&scheme.0);
        bytes[SOURCE] = source as u8;
        Self {
            fingerprint: Fingerprint(bytes),
            whole: Framed::default(),
        }
    }

    /// Adds a part that every request has.
    ///
    /// A checksum suffices to name a part that differs, and costs a fraction of a
    /// digest. The digest of the whole decides whether any part differs.
    pub(super) fn part(&mut self, place: Place, value: &[u8]) {
        self.whole.field(value);
        self.set(place, crc32fast::hash(value).to_le_bytes());
    }

    /// Adds the values of a part that may have several: none differs from an empty
    /// one.
    pub(super) fn list(&mut self, place: Place, values: impl IntoIterator<Item: AsRef<[u8]>>) {
        for value in values {
            let value = value.as_ref();
            self.whole.field(value);
            let before = u32::from_le_bytes(self.fingerprint.print(place));
            let mut print = crc32fast::Hasher::new_with_initial(before);
            print.update(value);
            // No value contains a line feed, so nothing runs together.
            print.update(b"\n");
            self.set(place, print.finalize().to_le_bytes());
        }
        self.whole.end();
    }

    /// Adds the body, which comes last, by its digest in this form.
    pub(super) fn body(&mut self, form: BodyForm, digest: &Digest) {
        self.whole.write(&[form as u8]);
        self.whole.write(digest);
        // With a checksum, a reader of the store could solve for a secret in the body.
        let mut print = [0; PRINT_LENGTH];
        print.copy_from_slice(&digest[..PRINT_LENGTH]);
        self.set(Place::Body, print);
    }

    pub(super) fn build(mut self) -> Fingerprint {
        self.fingerprint.0[DIGEST_START..PRINTS_START].copy_from_slice(&self.whole.digest());
        self.fingerprint
    }

    fn set(&mut self, place: Place, print: Print) {
        self.fingerprint.0[place.start()..][..PRINT_LENGTH].copy_from_slice(&print);
    }
}

const SOURCE: usize = 7;
const DIGEST_START: usize = 8;
const PRINTS_START: usize = DIGEST_START + 32;
const PRINT_LENGTH: usize = 4;
const HEADERS_START: usize = 7;
const HEADER_PLACES: usize = 4;
