//! The key parser, against `sfv` and the grammar of a bare key.
//!
//! The layer goes beyond RFC 9651 in three places. It refuses an empty key, and a key that
//! is longer than its bound. It refuses a header that has 258 bytes more than twice that
//! bound. It accepts a bare key unless the syntax is strict.

use bytes::Bytes;
use http::{HeaderValue, Request};
use tower_idempotency::{IdempotencyLayer, KeySyntax, MemoryStore, Scope};

use crate::probe::{Probed, probe};

/// The first byte chooses the syntax, the rest is the header.
pub fn key(data: &[u8]) {
    let Some((choice, value)) = data.split_first() else {
        return;
    };
    let Ok(header) = HeaderValue::from_bytes(value) else {
        return;
    };
    let syntax = match choice % 3 {
        0 => Syntax::Compat,
        1 => Syntax::Strict,
        _ => Syntax::Uuid,
    };
    let expected = syntax.reference(value);
    assert_eq!(syntax.parse(&header), expected, "{syntax:?} {header:?}");
    let Some(key) = expected else { return };
    // Rule 12: each quoted spelling is the same key.
    for quoted in [quoted(&key, false), quoted(&key, true)] {
        let again = HeaderValue::from_str(&quoted).expect("a key is visible ASCII and spaces");
        assert_eq!(syntax.parse(&again).as_deref(), Some(&*key), "{again:?}");
    }
}

#[derive(Clone, Copy, Debug)]
enum Syntax {
    Compat,
    Strict,
    Uuid,
}

impl Syntax {
    /// The key as the layer reads it.
    fn parse(self, header: &HeaderValue) -> Option<String> {
        let builder =
            IdempotencyLayer::required(MemoryStore::new(), |_| Some(Scope::single_tenant()));
        let builder = builder.key_syntax(match self {
            Self::Compat => KeySyntax::compat(),
            Self::Strict => KeySyntax::strict(),
            Self::Uuid => KeySyntax::compat().uuid(),
        });
        let request = Request::post("/").header("idempotency-key", header);
        let request = request.body(Bytes::new()).expect("a valid request");
        match probe(builder, request) {
            Probed::Ran(name) => Some(name.key().as_str().to_owned()),
            Probed::Answered(parts, body) => {
                let body = String::from_utf8_lossy(&body);
                assert!(
                    parts.status == 400 && body.contains("key-invalid"),
                    "{parts:?} {body}"
                );
                None
            }
        }
    }

    fn reference(self, value: &[u8]) -> Option<String> {
        if value.len() > LONGEST_LINE {
            return None;
        }
        let key = match sfv::Parser::new(value).parse::<sfv::Item>() {
            Ok(sfv::Item {
                bare_item: sfv::BareItem::String(string),
                ..
            }) => string.as_str().to_owned(),
            _ if matches!(self, Self::Strict) => return None,
            _ => bare(value)?,
        };
        if key.is_empty() || key.len() > LONGEST_KEY {
            return None;
        }
        match self {
            Self::Compat | Self::Strict => Some(key),
            Self::Uuid => uuid(&key),
        }
    }
}

fn bare(value: &[u8]) -> Option<String> {
    let value = std::str::from_utf8(value).ok()?.trim_matches(' ');
    let is_plain = |c: char| matches!(c, '!'..='~') && !"\",;\\".contains(c);
    value.chars().all(is_plain).then(|| value.to_owned())
}

fn uuid(key: &str) -> Option<String> {
    let key = key.to_ascii_lowercase();
    let groups: Vec<_> = key.split('-').collect();
    let is_uuid = groups.iter().map(|group| group.len()).eq([8, 4, 4, 4, 12])
        && groups
            .iter()
            .all(|group| group.bytes().all(|byte| byte.is_ascii_hexdigit()));
    let digits = || key.bytes().filter(|&byte| byte != b'-');
    let is_one_digit = |digit| digits().all(|other| other == digit);
    (is_uuid && !is_one_digit(b'0') && !is_one_digit(b'f')).then_some(key)
}

fn quoted(key: &str, with_parameter: bool) -> String {
    let escaped = key.replace('\\', "\\\\").replace('"', "\\\"");
    let parameter = if with_parameter { ";a=1;b" } else { "" };
    format!("  \"{escaped}\"{parameter} ")
}

const LONGEST_KEY: usize = 255;
const LONGEST_LINE: usize = 2 * LONGEST_KEY + 2 + 256;
