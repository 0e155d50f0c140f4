//! The request target: path, query and authority, and where they were read.

use http::{HeaderMap, HeaderValue, Uri, header, request};

/// Where the target of a fingerprint was read.
///
/// Nested routers shorten the path that an inner layer sees. axum's `OriginalUri`
/// keeps the path that the client sent; reading it needs the feature `axum`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Source {
    /// In the request's URI. A router may have shortened it.
    Seen = 0,
    /// In the request's URI, to which `OriginalUri` was equal.
    Sent = 1,
    /// In `OriginalUri`. A router had shortened the request's URI.
    Restored = 2,
}

impl Source {
    pub(super) fn from_byte(byte: u8) -> Option<Self> {
        [Self::Seen, Self::Sent, Self::Restored]
            .into_iter()
            .find(|source| *source as u8 == byte)
    }
}

#[derive(Clone, Copy)]
pub(super) struct Target<'r> {
    pub(super) source: Source,
    pub(super) uri: &'r Uri,
}

impl<'r> Target<'r> {
    /// The target that the client sent, as far as that can be read here.
    pub(super) fn of(parts: &'r request::Parts) -> Self {
        let (source, uri) = match original(parts) {
            None => (Source::Seen, &parts.uri),
            Some(uri) if uri.path_and_query() == parts.uri.path_and_query() => (Source::Sent, uri),
            Some(uri) => (Source::Restored, uri),
        };
        Self { source, uri }
    }

    /// The target to compare with one that was read in `source`; `None` if this
    /// request does not have it.
    pub(super) fn from(source: Source, parts: &'r request::Parts) -> Option<Self> {
        let uri = match source {
            Source::Seen => &parts.uri,
            Source::Sent => original(parts).unwrap_or(&parts.uri),
            Source::Restored => original(parts)?,
        };
        Some(Self { source, uri })
    }
}

/// The URI before nested routers shortened it.
#[cfg(feature = "axum")]
fn original(parts: &request::Parts) -> Option<&Uri> {
    let original = parts.extensions.get::<axum::extract::OriginalUri>()?;
    Some(&original.0)
}

#[cfg(not(feature = "axum"))]
fn original(_: &request::Parts) -> Option<&Uri> {
    None
}

/// The authority that the client sent; several if it sent several `Host` lines.
pub(super) fn authority<'r>(uri: &'r Uri, headers: &'r HeaderMap) -> impl Iterator<Item = Vec<u8>> {
    let sent = uri
        .authority()
        .map(|authority| authority.as_str().as_bytes());
    let hosts = headers.get_all(header::HOST).iter();
    let hosts = hosts
        .map(HeaderValue::as_bytes)
        .filter(move |_| sent.is_none());
    sent.into_iter().chain(hosts).map(canonical_authority)
}

/// Host and port in lower case, without user information and without a port that
/// may be the default one.
fn canonical_authority(authority: &[u8]) -> Vec<u8> {
    let host = authority
        .rsplit(|&byte| byte == b'@')
        .next()
        .unwrap_or_default();
    let host = [&b":443"[..], b":80", b":"]
        .into_iter()
        .find_map(|port| host.strip_suffix(port))
        .unwrap_or(host);
    host.to_ascii_lowercase()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn rule_30_an_authority_loses_case_user_and_default_port() {
        for spelling in [
            "a.example",
            "A.Example",
            "a.example:",
            "a.example:80",
            "u:p@a.example:443",
        ] {
            assert_eq!(canonical_authority(spelling.as_bytes()), b"a.example");
        }
        assert_eq!(
            canonical_authority(b"[2001:DB8::80]:443"),
            b"[2001:db8::80]"
        );
        assert_eq!(canonical_authority(b"a:8080"), b"a:8080");
    }
}
