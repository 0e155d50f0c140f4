//! The parts of a request: a fingerprint keeps a few bytes of each, so that a
//! mismatch can name those that differ.

use std::fmt;

use http::HeaderName;

use super::{Fingerprint, Framed, Scheme};

/// A part of a request that its fingerprint covers.
///
/// Its `Display` form is the name in refusals: `method`, `media type`, a header's
/// own name, and so on.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum RequestPart {
    /// The method.
    Method,
    /// The path, before nested routers shortened it.
    Path,
    /// The query, without its question mark.
    Query,
    /// The media type with its parameters: the header `Content-Type`.
    MediaType,
    /// The codings of the body: the header `Content-Encoding`.
    ContentEncoding,
    /// A header that [`Fingerprinting::header`](crate::Fingerprinting::header)
    /// chose.
    Header(HeaderName),
    /// Host and port.
    Authority,
    /// The body, or the chosen values of it.
    Body,
    /// All that the function of
    /// [`Fingerprinting::custom`](crate::Fingerprinting::custom) returned.
    Custom,
}

impl fmt::Display for RequestPart {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Method => "method",
            Self::Path => "path",
            Self::Query => "query",
            Self::MediaType => "media type",
            Self::ContentEncoding => "content encoding",
            Self::Header(name) => name.as_str(),
            Self::Authority => "authority",
            Self::Body => "body",
            Self::Custom => "custom fingerprint",
        })
    }
}

/// How a request differs from the one that a key belongs to.
#[derive(Clone, Debug, Default)]
pub(crate) struct Mismatch {
    pub(crate) compared: Vec<RequestPart>,
    pub(crate) differs: Vec<RequestPart>,
}

impl Mismatch {
    /// Whether all parts but the body are known to be the same.
    pub(crate) fn is_of_body_alone(&self) -> bool {
        self.differs.iter().all(|part| *part == RequestPart::Body)
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
        number * PRINT_LENGTH
    }
}

const HEADERS_START: usize = 7;
const HEADER_PLACES: usize = 4;
const PRINT_LENGTH: usize = 4;
pub(super) const PRINTS_LENGTH: usize = (HEADERS_START + HEADER_PLACES) * PRINT_LENGTH;

/// The bytes of all parts.
pub(super) struct Prints([u8; PRINTS_LENGTH]);

impl Prints {
    pub(super) fn from_slice(bytes: &[u8]) -> Self {
        let mut prints = [0; PRINTS_LENGTH];
        prints.copy_from_slice(bytes);
        Self(prints)
    }

    pub(super) fn as_bytes(&self) -> &[u8; PRINTS_LENGTH] {
        &self.0
    }

    pub(super) fn at(&self, place: Place) -> [u8; PRINT_LENGTH] {
        let mut print = [0; PRINT_LENGTH];
        print.copy_from_slice(&self.0[place.start()..][..PRINT_LENGTH]);
        print
    }

    fn set(&mut self, place: Place, print: [u8; PRINT_LENGTH]) {
        self.0[place.start()..][..PRINT_LENGTH].copy_from_slice(&print);
    }
}

/// In which form a body is digested.
#[derive(Clone, Copy)]
pub(super) enum BodyForm {
    Bytes = b'b' as isize,
    Json = b'j' as isize,
    Parts = b'p' as isize,
    Custom = b'c' as isize,
}

/// A request on its way to a fingerprint, part by part.
pub(super) struct Parted {
    whole: Framed,
    prints: Prints,
}

impl Default for Parted {
    fn default() -> Self {
        Self {
            whole: Framed::default(),
            prints: Prints([0; PRINTS_LENGTH]),
        }
    }
}

impl Parted {
    /// A part that every request has.
    ///
    /// A checksum suffices to name a part that differs, and costs a fraction of a
    /// digest. The digest of the whole decides whether any part differs.
    pub(super) fn part(&mut self, place: Place, value: &[u8]) {
        self.whole.field(value);
        self.prints.set(place, crc32fast::hash(value).to_le_bytes());
    }

    /// The values of a part that may have several: none differs from an empty one.
    pub(super) fn list(&mut self, place: Place, values: impl IntoIterator<Item: AsRef<[u8]>>) {
        let before = u32::from_le_bytes(self.prints.at(place));
        let mut print = crc32fast::Hasher::new_with_initial(before);
        for value in values {
            let value = value.as_ref();
            self.whole.field(value);
            print.update(value);
            // No value contains a line feed, so nothing runs together.
            print.update(b"\n");
        }
        self.whole.end();
        self.prints.set(place, print.finalize().to_le_bytes());
    }

    /// The body, which comes last, by its digest in this form.
    pub(super) fn body(&mut self, form: BodyForm, digest: [u8; 32]) {
        self.whole.tag(form as u8);
        self.whole.field(&digest);
        let mut print = [0; PRINT_LENGTH];
        print.copy_from_slice(&digest[..PRINT_LENGTH]);
        self.prints.set(Place::Body, print);
    }

    pub(super) fn fingerprint(self, scheme: Scheme) -> Fingerprint {
        Fingerprint::new(scheme, self.whole.digest(), &self.prints)
    }
}
