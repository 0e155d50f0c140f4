//! The form in which a body is compared.

use std::{borrow::Cow, fmt, sync::Arc};

use bytes::Bytes;
use http::{HeaderMap, HeaderValue, header, request};

#[cfg(feature = "multipart")]
use super::multipart;
use super::{
    content::Content,
    digest::{BodyFault, Framed},
    json::{self, Selection},
    layout::Print,
    media_type::MediaType,
};
use crate::body::digests::DigestAlgorithm;

#[derive(Clone)]
pub(super) enum Form {
    Bytes,
    Json(Selection),
    #[cfg(feature = "multipart")]
    Multipart,
    Custom {
        scheme: String,
        identify: Identify,
    },
    /// A digest of the body stands for it.
    Digest(DigestAlgorithm),
}

pub(super) type Identify = Arc<dyn Fn(&request::Parts, &Bytes) -> Vec<u8> + Send + Sync>;

impl Form {
    pub(super) fn fault(&self) -> Option<&'static str> {
        match self {
            Self::Custom { scheme, .. } if scheme.is_empty() => {
                Some("must have a scheme with a name")
            }
            Self::Json(selection) => selection.fault(),
            _ => None,
        }
    }

    /// The name of a form changes with its meaning, so that no record is compared
    /// under a meaning that it was not made with.
    pub(super) fn spell(&self, framed: &mut Framed) {
        match self {
            Self::Bytes => framed.field(b"bytes/4"),
            Self::Json(selection) => {
                let (kind, pointers) = selection.spelled();
                framed.field(b"json/4");
                framed.field(kind.as_bytes());
                framed.count(pointers.len());
                for pointer in pointers {
                    framed.field(pointer.as_bytes());
                }
            }
            #[cfg(feature = "multipart")]
            Self::Multipart => framed.field(b"multipart/4"),
            Self::Custom { scheme, .. } => {
                framed.field(b"custom/4");
                framed.field(scheme.as_bytes());
            }
            Self::Digest(DigestAlgorithm::Sha256) => framed.field(b"sha-256/4"),
            Self::Digest(DigestAlgorithm::Sha512) => framed.field(b"sha-512/4"),
        }
    }

    /// A media type, as it counts: without a boundary where parts are compared.
    pub(super) fn media_type<'v>(&self, line: &'v HeaderValue) -> Cow<'v, [u8]> {
        let media_type = MediaType::parse(line.as_bytes());
        #[cfg(feature = "multipart")]
        if matches!(self, Self::Multipart) && media_type.is_form() {
            return media_type.without_boundary().canonical();
        }
        media_type.canonical()
    }

    /// Returns the digest that stands for a body and that its client declares.
    pub(super) fn declared<'r>(&self, body: Content<'r>) -> Option<&'r [u8]> {
        match self {
            Self::Digest(algorithm) => body.digests?.get(*algorithm),
            _ => None,
        }
    }

    /// The form in which this body is compared, and its hash.
    pub(super) fn hash(
        &self,
        headers: &HeaderMap,
        content: Content<'_>,
        coding: &[u8],
    ) -> (u8, Result<Framed, BodyFault>) {
        if let Some(digest) = self.declared(content) {
            return (b'd', Ok(Framed::of(digest)));
        }
        let Some(body) = content.bytes else {
            return (b'd', Err(BodyFault("it is not in memory")));
        };
        if let Self::Digest(algorithm) = self {
            return (b'd', Ok(Framed::of(&algorithm.digest(body))));
        }
        let media_type = || sole_media_type(headers).filter(|_| coding.is_empty());
        if let Self::Json(selection) = self
            && !body.is_empty()
            && media_type().is_some_and(|media_type| media_type.is_json())
        {
            return (b'j', json::hash(body, selection));
        }
        #[cfg(feature = "multipart")]
        if let Self::Multipart = self
            && let Some(media_type) = media_type().filter(MediaType::is_form)
        {
            return (b'p', multipart::hash(&media_type, body));
        }
        (b'b', Ok(Framed::of(body)))
    }

    /// Whether the record keeps this very body, compared in another form because
    /// of another media type or content encoding.
    pub(super) fn is_another_form(&self, recorded: Print, body: Option<&Bytes>) -> bool {
        let Some(body) = body else {
            return false;
        };
        let begins = |hash: Framed| hash.digest().starts_with(&recorded);
        match self {
            Self::Json(selection) => {
                begins(Framed::of(body)) || json::hash(body, selection).is_ok_and(begins)
            }
            #[cfg(feature = "multipart")]
            Self::Multipart => begins(Framed::of(body)),
            Self::Bytes | Self::Custom { .. } | Self::Digest(_) => false,
        }
    }
}

impl fmt::Debug for Form {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Bytes => f.write_str("Bytes"),
            Self::Json(selection) => f.debug_tuple("Json").field(selection).finish(),
            #[cfg(feature = "multipart")]
            Self::Multipart => f.write_str("Multipart"),
            Self::Custom { scheme, .. } => f.debug_tuple("Custom").field(scheme).finish(),
            Self::Digest(algorithm) => f.debug_tuple("Digest").field(algorithm).finish(),
        }
    }
}

/// Returns the media type of a request with exactly one `Content-Type`.
fn sole_media_type(headers: &HeaderMap) -> Option<MediaType<'_>> {
    let mut lines = headers.get_all(header::CONTENT_TYPE).iter();
    let line = lines.next()?;
    let is_sole = lines.next().is_none();
    is_sole.then(|| MediaType::parse(line.as_bytes()))
}
