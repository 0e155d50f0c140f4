//! Media types and content codings without their accidents of spelling
//! (RFC 9110 §8.3.1 and §8.4).

use std::borrow::Cow;

use http::{HeaderMap, header};

/// A media type, taken apart. Canonical spellings are borrowed from the value.
pub(super) struct MediaType<'v> {
    /// Type and subtype in lower case.
    essence: Cow<'v, [u8]>,
    /// Names in lower case and values without quotes, sorted.
    parameters: Vec<Parameter<'v>>,
}

type Parameter<'v> = (Cow<'v, [u8]>, Cow<'v, [u8]>);

impl<'v> MediaType<'v> {
    /// Takes any value: one that is no media type is its own essence.
    pub(super) fn parse(value: &'v [u8]) -> Self {
        if !value.contains(&b';') {
            return Self {
                essence: in_lower_case(value.trim_ascii()),
                parameters: Vec::new(),
            };
        }
        let mut parts = split(value);
        let essence = in_lower_case(parts.next().unwrap_or_default().trim_ascii());
        let mut media_type = Self {
            essence,
            parameters: Vec::new(),
        };
        let is_json = media_type.is_json();
        // JSON is UTF-8 whether or not it says so (RFC 8259 §11).
        let counts = |(name, value): &Parameter<'_>| {
            !(is_json && (&name[..], &value[..]) == (b"charset", b"utf-8"))
        };
        media_type.parameters = parts.filter_map(parameter).filter(counts).collect();
        media_type.parameters.sort();
        media_type
    }

    pub(super) fn is_json(&self) -> bool {
        let essence = &*self.essence;
        essence == b"application/json" || (essence.ends_with(b"+json") && essence.contains(&b'/'))
    }

    /// The same bytes for all spellings of the same type.
    pub(super) fn canonical(self) -> Cow<'v, [u8]> {
        let Self {
            mut essence,
            parameters,
        } = self;
        for (name, value) in parameters {
            // A header value contains no line feed, so nothing runs together.
            let spelled = essence.to_mut();
            spelled.push(b'\n');
            spelled.extend_from_slice(&name);
            spelled.push(b'\n');
            spelled.extend_from_slice(&value);
        }
        essence
    }
}

#[cfg(feature = "multipart")]
impl MediaType<'_> {
    pub(super) fn is_form(&self) -> bool {
        &*self.essence == b"multipart/form-data"
    }

    /// The boundary of a multipart type; `None` if there is not exactly one.
    pub(super) fn boundary(&self) -> Option<&str> {
        let mut boundaries = self.parameters.iter().filter(|(name, _)| is_boundary(name));
        let (_, boundary) = boundaries.next()?;
        let boundary = std::str::from_utf8(boundary).ok()?;
        (boundaries.next().is_none() && !boundary.is_empty()).then_some(boundary)
    }

    pub(super) fn without_boundary(mut self) -> Self {
        self.parameters.retain(|(name, _)| !is_boundary(name));
        self
    }
}

#[cfg(feature = "multipart")]
fn is_boundary(name: &[u8]) -> bool {
    name == b"boundary"
}

/// The codings of the body in the order in which they were applied, in lower
/// case and without `identity`. Empty for a body that is not coded.
pub(super) fn coding(headers: &HeaderMap) -> Vec<u8> {
    let mut codings = Vec::new();
    for line in headers.get_all(header::CONTENT_ENCODING) {
        for coding in line.as_bytes().split(|&byte| byte == b',') {
            let coding = coding.trim_ascii().to_ascii_lowercase();
            if coding.is_empty() || coding == b"identity" {
                continue;
            }
            if !codings.is_empty() {
                codings.push(b',');
            }
            codings.extend(coding);
        }
    }
    codings
}

fn in_lower_case<'v>(text: impl Into<Cow<'v, [u8]>>) -> Cow<'v, [u8]> {
    let mut text = text.into();
    if text.iter().any(u8::is_ascii_uppercase) {
        text.to_mut().make_ascii_lowercase();
    }
    text
}

/// Splits at semicolons outside quoted strings.
fn split(value: &[u8]) -> impl Iterator<Item = &[u8]> {
    let (mut quoted, mut escaped) = (false, false);
    value.split(move |&byte| {
        let here = (byte, quoted, escaped);
        escaped = quoted && byte == b'\\' && !escaped;
        if byte == b'"' && !here.2 {
            quoted = !quoted;
        }
        byte == b';' && !quoted
    })
}

fn parameter(part: &[u8]) -> Option<Parameter<'_>> {
    let part = part.trim_ascii();
    if part.is_empty() {
        return None;
    }
    let equals = part
        .iter()
        .position(|&byte| byte == b'=')
        .unwrap_or(part.len());
    let name = in_lower_case(part[..equals].trim_ascii());
    let value = part.get(equals + 1..).unwrap_or_default().trim_ascii();
    let mut value = unquoted(value);
    // RFC 2978 §2.3: the names of character sets are case-insensitive. Other
    // values, a boundary for one, are not.
    if &*name == b"charset" {
        value = in_lower_case(value);
    }
    Some((name, value))
}

fn unquoted(value: &[u8]) -> Cow<'_, [u8]> {
    let Some(inner) = value
        .strip_prefix(b"\"")
        .and_then(|rest| rest.strip_suffix(b"\""))
    else {
        return Cow::Borrowed(value);
    };
    let mut escaped = false;
    let characters = inner.iter().copied().filter(|&byte| {
        escaped = byte == b'\\' && !escaped;
        !escaped
    });
    Cow::Owned(characters.collect())
}
