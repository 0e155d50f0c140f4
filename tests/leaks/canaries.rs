//! Secrets that are easy to recognise, and the search for them.

use base64::{Engine as _, engine::general_purpose::STANDARD_NO_PAD};

/// What the caller sends, and what the service answers to it alone.
pub(crate) const SCOPE: &str = "c4n4ry-scope";
pub(crate) const KEY: &str = "c4n4ry-key";
pub(crate) const ANSWER: &str = "c4n4ry-answer";
pub(crate) const HEADER: &str = "c4n4ry-header";
pub(crate) const ATTRIBUTE: &str = "c4n4ry-attribute";
pub(crate) const VALUE: &str = "c4n4ry-value";
pub(crate) const PAYLOAD: &str = "c4n4ry-payload";
pub(crate) const TOKEN: &str = "c4n4ry-token";
pub(crate) const COOKIE: &str = "c4n4ry-cookie";
pub(crate) const QUERY: &str = "c4n4ry-query";
pub(crate) const BODY: &str = "c4n4ry-body";
pub(crate) const INPUT: &str = "c4n4ry-input";
pub(crate) const SET_COOKIE: &str = "c4n4ry-session";
pub(crate) const FAILURE: &str = "c4n4ry-failure";

/// Those that a record keeps: its name, and what a replay needs.
pub(crate) const KEPT: &[&str] = &[SCOPE, KEY, ANSWER, HEADER, ATTRIBUTE, VALUE];

pub(crate) const ALL: &[&str] = &[
    SCOPE, KEY, ANSWER, HEADER, ATTRIBUTE, VALUE, PAYLOAD, TOKEN, COOKIE, QUERY, BODY, INPUT,
    SET_COOKIE, FAILURE,
];

/// The canaries that the text shows in any spelling.
pub(crate) fn found(text: &[u8]) -> Vec<&'static str> {
    let text = String::from_utf8_lossy(text);
    let shows = |canary: &&&str| {
        let mut spelled = spellings(canary).into_iter();
        spelled.any(|spelling| text.contains(&spelling))
    };
    ALL.iter().filter(shows).copied().collect()
}

/// As text, in hexadecimal, as a list of bytes, and in Base64 behind any other bytes.
fn spellings(canary: &str) -> Vec<String> {
    let bytes = canary.as_bytes();
    let hexadecimal: String = bytes.iter().map(|byte| format!("{byte:02x}")).collect();
    let mut spellings = vec![canary.to_owned(), hexadecimal.to_uppercase(), hexadecimal];
    for list in [
        format!("{bytes:?}"),
        format!("{bytes:x?}"),
        format!("{bytes:02x?}"),
    ] {
        spellings.push(list.trim_matches(['[', ']']).to_owned());
    }
    for before in 0..3 {
        let mut shifted = vec![0; before];
        shifted.extend_from_slice(bytes);
        let encoded = STANDARD_NO_PAD.encode(&shifted);
        // The first and the last digits depend on the bytes around.
        let last = shifted.len() * 8 / 6;
        spellings.push(encoded[(before * 8).div_ceil(6)..last].to_owned());
    }
    spellings
}

#[test]
fn search_finds_each_spelling() {
    let hexadecimal: String = KEY.bytes().map(|byte| format!("{byte:02x}")).collect();
    for spelled in [
        format!("operation={KEY}-7"),
        hexadecimal.clone(),
        hexadecimal.to_uppercase(),
        format!("{:?}", format!("a{KEY}b").as_bytes()),
        format!("{:x?}", format!("a{KEY}b").as_bytes()),
        STANDARD_NO_PAD.encode(format!("{KEY} behind nothing")),
        STANDARD_NO_PAD.encode(format!("1{KEY} behind one byte")),
        STANDARD_NO_PAD.encode(format!("12{KEY}")),
    ] {
        assert_eq!(found(spelled.as_bytes()), [KEY], "{spelled}");
    }
    assert!(found(b"c4n4ry c4n4ry-ke").is_empty());
}
