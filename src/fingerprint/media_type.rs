//! Media types without their accidents of spelling (RFC 9110 §8.3.1).

use std::borrow::Cow;

use http::{HeaderMap, header};

/// The type and its parameters, lower-cased where case does not count, sorted,
/// without quotes and spaces. `without_boundary` leaves the boundary out.
pub(super) fn canonical(value: &[u8], without_boundary: bool) -> Cow<'_, [u8]> {
    let plain = |byte: &u8| !byte.is_ascii_uppercase() && !matches!(byte, b';' | b' ' | b'\t');
    if value.iter().all(plain) {
        return Cow::Borrowed(value);
    }
    let mut parts = split(value).into_iter();
    let mut canonical = parts
        .next()
        .unwrap_or_default()
        .trim_ascii()
        .to_ascii_lowercase();
    let mut parameters: Vec<_> = parts
        .filter_map(parameter)
        .filter(|(name, _)| !(without_boundary && name == b"boundary"))
        .collect();
    parameters.sort();
    for (name, value) in parameters {
        // A header value contains no line feed, so nothing runs together.
        canonical.push(b'\n');
        canonical.extend(name);
        canonical.push(b'\n');
        canonical.extend(value);
    }
    Cow::Owned(canonical)
}

pub(super) fn is_json(headers: &HeaderMap) -> bool {
    essence(headers).is_some_and(|essence| {
        essence == b"application/json" || (essence.ends_with(b"+json") && essence.contains(&b'/'))
    })
}

pub(super) fn is_multipart(headers: &HeaderMap) -> bool {
    essence(headers).is_some_and(|essence| essence == b"multipart/form-data")
}

fn essence(headers: &HeaderMap) -> Option<Vec<u8>> {
    let value = headers.get(header::CONTENT_TYPE)?.as_bytes();
    let end = value
        .iter()
        .position(|&byte| byte == b';')
        .unwrap_or(value.len());
    Some(value[..end].trim_ascii().to_ascii_lowercase())
}

/// Splits at semicolons outside quoted strings.
fn split(value: &[u8]) -> Vec<&[u8]> {
    let (mut quoted, mut escaped) = (false, false);
    value
        .split(|&byte| {
            let here = (byte, quoted, escaped);
            escaped = quoted && byte == b'\\' && !escaped;
            if byte == b'"' && !here.2 {
                quoted = !quoted;
            }
            byte == b';' && !quoted
        })
        .collect()
}

fn parameter(part: &[u8]) -> Option<(Vec<u8>, Vec<u8>)> {
    let part = part.trim_ascii();
    if part.is_empty() {
        return None;
    }
    let equals = part
        .iter()
        .position(|&byte| byte == b'=')
        .unwrap_or(part.len());
    let name = part[..equals].trim_ascii().to_ascii_lowercase();
    let value = part.get(equals + 1..).unwrap_or_default().trim_ascii();
    let mut value = unquoted(value);
    // RFC 2978 §2.3: the names of character sets are case-insensitive. Other
    // values, a boundary for one, are not.
    if name == b"charset" {
        value.make_ascii_lowercase();
    }
    Some((name, value))
}

fn unquoted(value: &[u8]) -> Vec<u8> {
    let Some(inner) = value
        .strip_prefix(b"\"")
        .and_then(|rest| rest.strip_suffix(b"\""))
    else {
        return value.to_vec();
    };
    let mut escaped = false;
    inner
        .iter()
        .copied()
        .filter(|&byte| {
            escaped = byte == b'\\' && !escaped;
            !escaped
        })
        .collect()
}
