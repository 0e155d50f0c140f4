//! Media types, against a reader that goes from character to character.

use std::collections::VecDeque;

use arbitrary::Unstructured;
use bytes::Bytes;
use http::{HeaderValue, Request};
use tower_idempotency::{Fingerprinting, store::Fingerprint};

use crate::probe::fingerprint;

/// The first eight bytes choose a spelling. The rest are two media types, with a line feed
/// between them.
pub fn media_type(data: &[u8]) {
    let Some((choices, lines)) = data.split_at_checked(8) else {
        return;
    };
    let mut lines = lines.splitn(2, |&byte| byte == b'\n');
    let values = [lines.next(), lines.next()].map(Option::unwrap_or_default);
    let [Ok(one), Ok(other)] = values.map(HeaderValue::from_bytes) else {
        return;
    };
    let [first, second] = values.map(MediaType::read);
    assert_eq!(
        identify(&one) == identify(&other),
        first == second,
        "{one:?} {other:?}"
    );
    let Ok(Some(respelled)) = first.spell(&mut Unstructured::new(choices)) else {
        return;
    };
    let again = HeaderValue::from_bytes(&respelled).expect("made of a header");
    assert_eq!(MediaType::read(&respelled), first, "{again:?}");
    assert_eq!(identify(&one), identify(&again), "{one:?} {again:?}");
}

fn identify(media_type: &HeaderValue) -> Fingerprint {
    let request = Request::post("/")
        .header("idempotency-key", "k")
        .header("content-type", media_type)
        .body(Bytes::new());
    let request = request.expect("a valid request");
    fingerprint(Fingerprinting::bytes(), request).expect("any bytes have a fingerprint")
}

/// A media type as it counts.
#[derive(Debug, PartialEq)]
struct MediaType {
    essence: Vec<u8>,
    parameters: Vec<(Vec<u8>, Vec<u8>)>,
}

impl MediaType {
    fn read(value: &[u8]) -> Self {
        let mut parts = parts(value);
        let essence = parts.pop_front().unwrap_or_default();
        let essence = trimmed(&essence).to_ascii_lowercase();
        let is_json = essence == b"application/json"
            || (essence.contains(&b'/') && essence.ends_with(b"+json"));
        let mut parameters = Vec::new();
        for part in parts {
            let part = trimmed(&part);
            if part.is_empty() {
                continue;
            }
            let mut halves = part.splitn(2, |&byte| byte == b'=');
            let [name, value] = [halves.next(), halves.next()].map(Option::unwrap_or_default);
            let name = trimmed(name).to_ascii_lowercase();
            let mut value = unquoted(trimmed(value));
            if name == b"charset" {
                value.make_ascii_lowercase();
            }
            if !(is_json && name == b"charset" && value == b"utf-8") {
                parameters.push((name, value));
            }
        }
        parameters.sort();
        Self {
            essence,
            parameters,
        }
    }

    /// Another spelling; `None` for a value that breaks the grammar.
    fn spell(&self, input: &mut Unstructured<'_>) -> arbitrary::Result<Option<Vec<u8>>> {
        let names = self.parameters.iter().map(|(name, _)| name);
        let is_regular = names.chain([&self.essence]).all(|name| is_token(name));
        if !is_regular {
            return Ok(None);
        }
        let mut parameters = self.parameters.clone();
        for end in (1..parameters.len()).rev() {
            parameters.swap(end, input.int_in_range(0..=end)?);
        }
        let mut out = cased(&self.essence, input)?;
        for (name, value) in parameters {
            out.extend_from_slice(input.choose(&[&b";"[..], b" ; ", b"\t;", b";; "])?);
            out.extend(cased(&name, input)?);
            out.push(b'=');
            let value = match name == b"charset" {
                true => cased(&value, input)?,
                false => value,
            };
            match is_token(&value) && !value.is_empty() && input.arbitrary()? {
                true => out.extend(value),
                false => out.extend(quoted(&value)),
            }
        }
        Ok(Some(out))
    }
}

/// The parts between semicolons that are not in quotes.
fn parts(value: &[u8]) -> VecDeque<Vec<u8>> {
    let mut parts = VecDeque::from([Vec::new()]);
    let mut is_quoted = false;
    let mut bytes = value.iter().copied();
    while let Some(byte) = bytes.next() {
        if byte == b';' && !is_quoted {
            parts.push_back(Vec::new());
            continue;
        }
        let part = parts.back_mut().expect("there is always one");
        part.push(byte);
        if byte == b'"' {
            is_quoted = !is_quoted;
        } else if byte == b'\\' && is_quoted {
            part.extend(bytes.next());
        }
    }
    parts
}

fn trimmed(mut value: &[u8]) -> &[u8] {
    while let [b' ' | b'\t', rest @ ..] | [rest @ .., b' ' | b'\t'] = value {
        value = rest;
    }
    value
}

fn unquoted(value: &[u8]) -> Vec<u8> {
    let [b'"', inner @ .., b'"'] = value else {
        return value.to_vec();
    };
    let mut out = Vec::new();
    let mut bytes = inner.iter().copied();
    while let Some(byte) = bytes.next() {
        match byte {
            b'\\' => out.extend(bytes.next()),
            _ => out.push(byte),
        }
    }
    out
}

fn quoted(value: &[u8]) -> Vec<u8> {
    let mut out = vec![b'"'];
    for &byte in value {
        if matches!(byte, b'"' | b'\\') {
            out.push(b'\\');
        }
        out.push(byte);
    }
    out.push(b'"');
    out
}

fn cased(text: &[u8], input: &mut Unstructured<'_>) -> arbitrary::Result<Vec<u8>> {
    Ok(match input.arbitrary()? {
        true => text.to_ascii_uppercase(),
        false => text.to_vec(),
    })
}

fn is_token(text: &[u8]) -> bool {
    text.iter()
        .all(|byte| byte.is_ascii_alphanumeric() || b"!#$%&'*+-.^_`|~/".contains(byte))
}
