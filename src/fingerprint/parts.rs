//! The parts of a request, by name.

use std::fmt;

use http::HeaderName;

/// A part of a request that its fingerprint covers.
///
/// The `Display` form is the name that refusals use:
///
/// ```
/// use http::header::CONTENT_LANGUAGE;
/// use tower_idempotency::RequestPart;
///
/// assert_eq!(RequestPart::MediaType.to_string(), "media type");
/// let header = RequestPart::Header(CONTENT_LANGUAGE);
/// assert_eq!(header.to_string(), "content-language");
/// ```
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum RequestPart {
    /// The method.
    Method,
    /// The path. [`Fingerprinting`](crate::Fingerprinting#path) says which one
    /// behind nested routers.
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
    /// Host and port, if [`Fingerprinting::authority`](crate::Fingerprinting::authority)
    /// chose them.
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
