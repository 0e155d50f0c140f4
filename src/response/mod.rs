//! Recorded responses: their bytes, their headers, and their replays.

pub(crate) mod attributes;
pub(crate) mod codec;
pub(crate) mod headers;
mod kept;
pub(crate) mod recorded;
mod replay;
#[cfg(feature = "guard")]
mod value;

use http::{HeaderName, HeaderValue, Response, StatusCode, header, response};

use self::headers::RECORDED;

/// Says to the client that its response is not recorded.
pub(crate) fn mark_unrecorded<B>(response: &mut Response<B>) {
    response
        .headers_mut()
        .insert(RECORDED, HeaderValue::from_static("false"));
}

/// hyper sends a wrong `Content-Length` of a handler unchanged, and the connection breaks.
/// A 304 describes another response's length.
pub(crate) fn correct_length(parts: &mut response::Parts, length: Option<u64>) {
    let Some(length) = length else {
        return;
    };
    if !parts.headers.contains_key(header::CONTENT_LENGTH) {
        return;
    }
    match parts.status {
        StatusCode::NOT_MODIFIED => {}
        StatusCode::NO_CONTENT => {
            parts.headers.remove(header::CONTENT_LENGTH);
        }
        _ => {
            parts.headers.insert(header::CONTENT_LENGTH, length.into());
        }
    }
}

/// Returns the declared length, after which a server stops to read the body.
pub(crate) fn declared_length(parts: &response::Parts) -> Option<u64> {
    let length = parts.headers.get(header::CONTENT_LENGTH)?;
    length.to_str().ok()?.parse().ok()
}

/// Marks a replay, unless the layer uses another header.
pub(crate) const REPLAYED: HeaderName = HeaderName::from_static("idempotent-replayed");
