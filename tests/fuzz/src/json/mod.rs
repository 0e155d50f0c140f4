//! JSON fingerprints, against a reader that is slow and obvious.

mod reference;
mod spelling;

use arbitrary::Unstructured;
use bytes::Bytes;
use http::Request;
use tower_idempotency::{Fingerprinting, store::Fingerprint};

use self::{
    reference::{Reader, Selection, Value},
    spelling::spell,
};
use crate::probe::fingerprint;

/// The first bytes choose the values that count, a spelling and a change. The rest is a
/// document, or makes one.
pub fn json(data: &[u8]) {
    if data.len() <= LONGEST {
        let _ = compare(&mut Unstructured::new(data));
    }
}

fn compare(input: &mut Unstructured<'_>) -> arbitrary::Result<()> {
    let selection = *input.choose(&SELECTIONS)?;
    let choices = input.bytes(8)?;
    let text = match input.arbitrary()? {
        true => spell(&value(input, DEPTH)?, choices).into_bytes(),
        false => input.bytes(input.len())?.to_vec(),
    };
    let Some((before, own)) = read(&text, selection) else {
        return Ok(());
    };
    let other = spell(&before, choices);
    let (_, again) = read(other.as_bytes(), selection).expect("written here");
    assert_eq!(own, again, "{} {other}", text.escape_ascii());

    let mut larger = before.clone();
    if let Value::Object(members) = &mut larger {
        members.insert(
            vec![UNITS[usize::from(choices[0]) % UNITS.len()]],
            Value::Array(vec![]),
        );
    }
    for changed in [
        changed(&text, choices),
        spell(&larger, choices).into_bytes(),
    ] {
        if let Some((after, theirs)) = read(&changed, selection) {
            let is_same = selection.of(before.clone()) == selection.of(after);
            assert_eq!(
                own == theirs,
                is_same,
                "{selection:?} {} {}",
                text.escape_ascii(),
                changed.escape_ascii()
            );
        }
    }
    Ok(())
}

/// The document, read by the reference, and its fingerprint. Both accept it, or neither.
fn read(text: &[u8], selection: Selection) -> Option<(Value, Fingerprint)> {
    let value = Reader::document(text);
    let fingerprint = identify(text, selection);
    // An absent body is no document, and is the same as an empty one.
    if text.is_empty() {
        assert!(fingerprint.is_some());
        return None;
    }
    assert_eq!(
        fingerprint.is_some(),
        value.is_some(),
        "{}",
        text.escape_ascii()
    );
    value.zip(fingerprint)
}

fn identify(text: &[u8], selection: Selection) -> Option<Fingerprint> {
    let fingerprinting = match selection {
        Selection::All => Fingerprinting::json(),
        Selection::Only(pointers) => Fingerprinting::json_only(pointers.iter().copied()),
        Selection::Without(pointers) => Fingerprinting::json_without(pointers.iter().copied()),
    };
    let request = Request::post("/")
        .header("idempotency-key", "k")
        .header("content-type", "application/json")
        .body(Bytes::copy_from_slice(text));
    fingerprint(fingerprinting, request.expect("a valid request"))
}

/// The text with one byte inserted or replaced.
fn changed(text: &[u8], choices: &[u8]) -> Vec<u8> {
    let number = |index: usize| usize::from(choices[index]);
    let place = (number(0) << 8 | number(1)) % (text.len() + 1);
    let end = (place + number(2) % 2).min(text.len());
    let change = CHANGES[number(3) % CHANGES.len()];
    [&text[..place], &[change], &text[end..]].concat()
}

/// A document in which no more than this many values contain each other.
fn value(input: &mut Unstructured<'_>, depth: usize) -> arbitrary::Result<Value> {
    let kinds = if depth > 0 { 4 } else { 2 };
    Ok(match input.int_in_range(0..=kinds - 1)? {
        0 => Value::Word((*input.choose(&WORDS)?).to_owned()),
        1 => Value::Text(text(input)?),
        2 => {
            let length = input.int_in_range(0..=3)?;
            let elements = (0..length).map(|_| value(input, depth - 1).map(Some));
            Value::Array(elements.collect::<Result<_, _>>()?)
        }
        _ => {
            let length = input.int_in_range(0..=3)?;
            let members = (0..length).map(|_| Ok((text(input)?, value(input, depth - 1)?)));
            Value::Object(members.collect::<Result<_, _>>()?)
        }
    })
}

fn text(input: &mut Unstructured<'_>) -> arbitrary::Result<Vec<u16>> {
    let length = input.int_in_range(0..=2)?;
    (0..length).map(|_| input.choose(&UNITS).copied()).collect()
}

/// The reference recurses for each level of a document.
const LONGEST: usize = 2_048;
const DEPTH: usize = 4;

const SELECTIONS: [Selection; 7] = [
    Selection::All,
    Selection::Only(&["/a"]),
    Selection::Only(&["/0/a", "/1", "/a/0", "/b"]),
    Selection::Only(&["/", "/\"", "/\\", "/a/b/a", "/~1", "/é"]),
    Selection::Without(&["/a"]),
    Selection::Without(&["/0", "/0/a", "/1/1", "/a/0", "/a/a"]),
    Selection::Without(&["/", "/\"", "/2", "/\\", "/a/b/a", "/é"]),
];

const WORDS: [&str; 12] = [
    "null",
    "true",
    "false",
    "0",
    "-0",
    "1",
    "1.0",
    "1e2",
    "1E2",
    "100",
    "9007199254740993",
    "9007199254740992",
];

const UNITS: [u16; 12] = [
    0x61, 0x62, 0x30, 0x22, 0x5c, 0x2f, 0x0a, 0xe9, 0xd800, 0xd83d, 0xde00, 0xdfff,
];

const CHANGES: &[u8] = b"{}[],:\"\\01-.eEuaDn \t/\x00\x1f\x7f\x80\xc3\xed";
