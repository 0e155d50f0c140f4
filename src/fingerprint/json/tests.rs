//! The scanner against a reader that is slow and obvious.

use std::{
    collections::BTreeMap,
    time::{Duration, Instant},
};

use rand::{RngExt as _, SeedableRng as _, rngs::StdRng};

use super::{tokens::Tokens, *};
use crate::fingerprint::digest::Digest;

fn digest(body: &[u8], selection: &Selection) -> Result<Digest, BodyFault> {
    hash(body, selection).map(Framed::digest)
}

/// A JSON text after RFC 8259: strings as UTF-16, numbers in their spelling, no
/// name twice.
#[derive(Clone, Debug, PartialEq)]
enum Value {
    /// A number, `true`, `false` or `null`.
    Word(String),
    Text(Vec<u16>),
    /// `None` where an element is left out.
    Array(Vec<Option<Self>>),
    Object(BTreeMap<Vec<u16>, Self>),
}

struct Reader<'t>(&'t str);

impl Reader<'_> {
    fn document(text: &[u8]) -> Option<Value> {
        let mut reader = Reader(std::str::from_utf8(text).ok()?);
        reader.space();
        let value = reader.value()?;
        reader.space();
        reader.0.is_empty().then_some(value)
    }

    fn value(&mut self) -> Option<Value> {
        if self.takes("{") {
            self.object()
        } else if self.takes("[") {
            self.array()
        } else if self.takes("\"") {
            self.text().map(Value::Text)
        } else {
            for word in ["true", "false", "null"] {
                if self.takes(word) {
                    return Some(Value::Word(word.to_owned()));
                }
            }
            self.number().map(Value::Word)
        }
    }

    fn object(&mut self) -> Option<Value> {
        let mut members = BTreeMap::new();
        self.space();
        if self.takes("}") {
            return Some(Value::Object(members));
        }
        loop {
            self.space();
            self.takes("\"").then_some(())?;
            let name = self.text()?;
            self.space();
            self.takes(":").then_some(())?;
            self.space();
            if members.insert(name, self.value()?).is_some() {
                return None;
            }
            self.space();
            if self.takes("}") {
                return Some(Value::Object(members));
            }
            self.takes(",").then_some(())?;
        }
    }

    fn array(&mut self) -> Option<Value> {
        let mut elements = Vec::new();
        self.space();
        if self.takes("]") {
            return Some(Value::Array(elements));
        }
        loop {
            self.space();
            elements.push(Some(self.value()?));
            self.space();
            if self.takes("]") {
                return Some(Value::Array(elements));
            }
            self.takes(",").then_some(())?;
        }
    }

    fn text(&mut self) -> Option<Vec<u16>> {
        let mut units = Vec::new();
        loop {
            match self.character()? {
                '"' => return Some(units),
                '\\' => units.push(match self.character()? {
                    'u' => {
                        let digits: String =
                            (0..4).map(|_| self.character()).collect::<Option<_>>()?;
                        let plain = digits.bytes().all(|byte| byte.is_ascii_hexdigit());
                        u16::from_str_radix(&digits, 16).ok().filter(|_| plain)?
                    }
                    'b' => 8,
                    'f' => 12,
                    'n' => 10,
                    'r' => 13,
                    't' => 9,
                    same @ ('"' | '\\' | '/') => same as u16,
                    _ => return None,
                }),
                control if control < ' ' => return None,
                other => units.extend(other.encode_utf16(&mut [0; 2]).iter()),
            }
        }
    }

    fn number(&mut self) -> Option<String> {
        let before = self.0;
        self.takes("-");
        if !self.takes("0") {
            self.digits()?;
        }
        if self.takes(".") {
            self.digits()?;
        }
        if self.takes("e") || self.takes("E") {
            let _ = self.takes("+") || self.takes("-");
            self.digits()?;
        }
        Some(before[..before.len() - self.0.len()].to_owned())
    }

    fn digits(&mut self) -> Option<()> {
        let rest = self.0.trim_start_matches(|c: char| c.is_ascii_digit());
        let some = rest.len() < self.0.len();
        self.0 = rest;
        some.then_some(())
    }

    fn character(&mut self) -> Option<char> {
        let character = self.0.chars().next()?;
        self.0 = &self.0[character.len_utf8()..];
        Some(character)
    }

    fn takes(&mut self, token: &str) -> bool {
        let rest = self.0.strip_prefix(token);
        self.0 = rest.unwrap_or(self.0);
        rest.is_some()
    }

    fn space(&mut self) {
        self.0 = self.0.trim_start_matches([' ', '\t', '\n', '\r']);
    }
}

fn path(pointer: &str) -> Vec<String> {
    let segments = pointer.split('/').skip(1);
    segments
        .map(|segment| segment.replace("~1", "/").replace("~0", "~"))
        .collect()
}

/// The value at a pointer, in place.
fn at<'v>(value: &'v mut Value, segment: &str) -> Option<&'v mut Value> {
    match value {
        Value::Object(members) => members.get_mut(&segment.encode_utf16().collect::<Vec<_>>()),
        Value::Array(elements) => elements.get_mut(place(segment)?)?.as_mut(),
        _ => None,
    }
}

fn place(segment: &str) -> Option<usize> {
    let place: usize = segment.parse().ok()?;
    (place.to_string() == segment).then_some(place)
}

fn find(mut value: &mut Value, pointer: &str) -> Option<Value> {
    for segment in path(pointer) {
        value = at(value, &segment)?;
    }
    Some(value.clone())
}

fn remove(mut value: &mut Value, pointer: &str) {
    let mut path = path(pointer);
    let last = path.pop().unwrap();
    for segment in path {
        match at(value, &segment) {
            Some(next) => value = next,
            None => return,
        }
    }
    match value {
        Value::Object(members) => {
            members.remove(&last.encode_utf16().collect::<Vec<_>>());
        }
        Value::Array(elements) => {
            if let Some(element) = place(&last).and_then(|place| elements.get_mut(place)) {
                *element = None;
            }
            while elements.last() == Some(&None) {
                elements.pop();
            }
        }
        _ => {}
    }
}

/// What counts of a document, for comparison.
#[derive(Debug, PartialEq)]
enum Chosen {
    All(Value),
    Only(Vec<Option<Value>>),
}

fn chosen(mut value: Value, selection: &Selection) -> Chosen {
    let (kind, pointers) = selection.spelled();
    if kind == "only" {
        let found = pointers.iter().map(|pointer| find(&mut value, pointer));
        return Chosen::Only(found.collect());
    }
    // From the inside out: an outer removal may take an inner value with it.
    for pointer in pointers.iter().rev() {
        remove(&mut value, pointer);
    }
    Chosen::All(value)
}

/// How a value is written down: each number decides one choice.
struct Spelling<'c> {
    choices: &'c [u8],
    next: usize,
}

impl Spelling<'_> {
    fn choose(&mut self, below: usize) -> usize {
        self.next += 1;
        match self.choices {
            [] => 0,
            choices => usize::from(choices[self.next % choices.len()]) % below,
        }
    }

    fn space(&mut self, out: &mut String) {
        out.push_str(["", "", "", " ", "\t\r\n", "  "][self.choose(6)]);
    }

    fn value(&mut self, value: &Value, out: &mut String) {
        self.space(out);
        match value {
            Value::Word(word) => out.push_str(word),
            Value::Text(units) => self.text(units, out),
            Value::Array(elements) => {
                out.push('[');
                for (index, element) in elements.iter().flatten().enumerate() {
                    out.push_str(if index > 0 { "," } else { "" });
                    self.value(element, out);
                }
                self.space(out);
                out.push(']');
            }
            Value::Object(members) => {
                let mut members: Vec<_> = members.iter().collect();
                for end in (1..members.len()).rev() {
                    let other = self.choose(end + 1);
                    members.swap(end, other);
                }
                out.push('{');
                for (index, (name, value)) in members.into_iter().enumerate() {
                    out.push_str(if index > 0 { "," } else { "" });
                    self.space(out);
                    self.text(name, out);
                    self.space(out);
                    out.push(':');
                    self.value(value, out);
                }
                self.space(out);
                out.push('}');
            }
        }
        self.space(out);
    }

    fn text(&mut self, units: &[u16], out: &mut String) {
        out.push('"');
        for character in char::decode_utf16(units.iter().copied()) {
            match character {
                Ok('"') => out.push_str(["\\\"", "\\u0022"][self.choose(2)]),
                Ok('\\') => out.push_str(["\\\\", "\\u005C"][self.choose(2)]),
                Ok('\n') => out.push_str(["\\n", "\\u000a"][self.choose(2)]),
                Ok(plain) if self.choose(2) == 0 => out.push(plain),
                Ok('/') => out.push_str("\\/"),
                Ok(escaped) => {
                    for unit in escaped.encode_utf16(&mut [0; 2]) {
                        self.unit(*unit, out);
                    }
                }
                Err(half) => self.unit(half.unpaired_surrogate(), out),
            }
        }
        out.push('"');
    }

    fn unit(&mut self, unit: u16, out: &mut String) {
        out.push_str(&match self.choose(2) {
            0 => format!("\\u{unit:04x}"),
            _ => format!("\\u{unit:04X}"),
        });
    }
}

fn spell(value: &Value, choices: &[u8]) -> String {
    let mut out = String::new();
    Spelling { choices, next: 0 }.value(value, &mut out);
    out
}

/// A generator for each case, so that a failure can name its seed.
fn cases() -> impl Iterator<Item = (u64, StdRng)> {
    (0..2_000).map(|seed| (seed, StdRng::seed_from_u64(seed)))
}

fn select<T: Copy>(rng: &mut StdRng, from: &[T]) -> T {
    from[rng.random_range(0..from.len())]
}

fn text(rng: &mut StdRng) -> Vec<u16> {
    const UNITS: &[u16] = &[
        0x61, 0x62, 0x30, 0x22, 0x5c, 0x2f, 0x0a, 0xe9, 0xd800, 0xd83d, 0xde00, 0xdfff,
    ];
    let length = rng.random_range(0..3);
    (0..length).map(|_| select(rng, UNITS)).collect()
}

/// A document in which no more than this many values contain each other.
fn value(rng: &mut StdRng, depth: usize) -> Value {
    const WORDS: &[&str] = &[
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
    let kinds = if depth > 0 { 4 } else { 2 };
    match rng.random_range(0..kinds) {
        0 => Value::Word(select(rng, WORDS).to_owned()),
        1 => Value::Text(text(rng)),
        2 => {
            let length = rng.random_range(0..4);
            Value::Array((0..length).map(|_| Some(value(rng, depth - 1))).collect())
        }
        _ => {
            let length = rng.random_range(0..4);
            let members = (0..length).map(|_| (text(rng), value(rng, depth - 1)));
            Value::Object(members.collect())
        }
    }
}

fn selection(rng: &mut StdRng) -> Selection {
    const POINTERS: &[&str] = &[
        "/a", "/b", "/", "/0", "/1", "/2", "/a/a", "/a/0", "/0/a", "/0/0", "/1/1", "/~1", "/é",
        "/\"", "/\\", "/a/b/a", "/0/1/0",
    ];
    let length = rng.random_range(1..5);
    let pointers: Vec<_> = (0..length).map(|_| select(rng, POINTERS)).collect();
    match rng.random_range(0..3) {
        0 => Selection::All,
        1 => Selection::only(pointers),
        _ => Selection::without(pointers),
    }
}

fn choices(rng: &mut StdRng) -> Vec<u8> {
    let length = rng.random_range(0..50);
    rng.random_iter().take(length).collect()
}

fn same(selection: &Selection, one: &str, other: &str) -> bool {
    let of = |text: &str| digest(text.as_bytes(), selection).expect(text);
    of(one) == of(other)
}

#[test]
fn rule_25_spelling_does_not_count() {
    for (seed, mut rng) in cases() {
        let (value, selection) = (value(&mut rng, DEPTH), selection(&mut rng));
        let one = spell(&value, &choices(&mut rng));
        let other = spell(&value, &choices(&mut rng));
        assert!(same(&selection, &one, &other), "seed {seed}: {one} {other}");
    }
}

#[test]
fn rule_25_equal_documents_have_equal_fingerprints() {
    let mut pairs = [0, 0];
    for (seed, mut rng) in cases() {
        let one = value(&mut rng, DEPTH);
        // Often nearly the same document.
        let other = match (&one, rng.random()) {
            (Value::Object(members), true) => {
                let mut members = members.clone();
                members.insert(text(&mut rng), value(&mut rng, 1));
                Value::Object(members)
            }
            _ => value(&mut rng, DEPTH),
        };
        let selection = selection(&mut rng);
        let (one_spelled, other_spelled) = (spell(&one, &[]), spell(&other, &[]));
        let equal = chosen(one, &selection) == chosen(other, &selection);
        pairs[usize::from(equal)] += 1;
        assert_eq!(
            same(&selection, &one_spelled, &other_spelled),
            equal,
            "seed {seed}: {one_spelled} {other_spelled}"
        );
    }
    assert!(pairs.iter().all(|pairs| *pairs > 100), "{pairs:?}");
}

#[test]
fn rule_25_a_changed_byte_counts_as_the_reference_has_it() {
    let mut read = 0;
    for (seed, mut rng) in cases() {
        let (value, selection) = (value(&mut rng, DEPTH), selection(&mut rng));
        let before = spell(&value, &choices(&mut rng));
        let mut after = before.clone().into_bytes();
        let place = rng.random_range(0..=after.len());
        let end = (place + rng.random_range(0..2)).min(after.len());
        let change = select(
            &mut rng,
            b"{}[],:\"\\01-.eEuaDn \t/\x00\x1f\x7f\x80\xc3\xed",
        );
        after.splice(place..end, [change]);
        let expected = Reader::document(&after);
        let digested = digest(&after, &selection);
        let text = String::from_utf8_lossy(&after);
        assert_eq!(digested.is_ok(), expected.is_some(), "seed {seed}: {text}");
        if let (Ok(digested), Some(expected)) = (digested, expected) {
            read += 1;
            let equal = chosen(expected, &selection) == chosen(value, &selection);
            let was = digest(before.as_bytes(), &selection).unwrap();
            assert_eq!(digested == was, equal, "seed {seed}: {before} {text}");
        }
    }
    assert!(read > 100, "{read}");
}

#[test]
fn rule_25_any_text_is_accepted_as_the_reference_has_it() {
    let mut accepted = 0;
    for (seed, mut rng) in cases() {
        let length = rng.random_range(0..8);
        let text: Vec<u8> = (0..length)
            .map(|_| select(&mut rng, b"{}[]:,\"\"\\u0d81eE+-. \n"))
            .collect();
        let is_read = Reader::document(&text).is_some();
        accepted += u32::from(is_read);
        let is_digested = digest(&text, &Selection::All).is_ok();
        assert_eq!(is_digested, is_read, "seed {seed}: {}", text.escape_ascii());
    }
    assert!(accepted > 20, "{accepted}");
}

const DEPTH: usize = 4;

#[test]
fn rule_25_half_a_surrogate_pair_equals_itself_in_any_spelling() {
    let all = Selection::All;
    for (one, other) in [
        (r#""\ud800""#, r#""\uD800""#),
        (r#"{"\ud800k":1}"#, r#"{ "\uD800k" : 1 }"#),
        (r#""\ud83d\ude00""#, "\"\u{1f600}\""),
        (r#""\ud800\ud83d\ude00""#, "\"\\uD800\u{1f600}\""),
    ] {
        assert!(same(&all, one, other), "{one} {other}");
    }
    let different = [
        r#""\ud800""#,
        r#""\ud801""#,
        r#""\udc00""#,
        r#""\udc00\ud800""#,
        r#""\ud800\ud800""#,
        "\"\u{fffd}\"",
        r#""\\ud800""#,
        r#""""#,
    ];
    for (index, one) in different.iter().enumerate() {
        for (other_index, other) in different.iter().enumerate() {
            assert_eq!(
                same(&all, one, other),
                index == other_index,
                "{one} {other}"
            );
        }
    }
    // The bytes of half a pair are not UTF-8, so that they equal no other text.
    assert!(digest(b"\"\xed\xa0\x80\"", &all).is_err());
    for half in 0xd800..=0xdfff {
        let text = format!("\"\\u{half:x}\"");
        let mut tokens = Tokens::new(&text);
        let first = tokens.next().unwrap();
        tokens.scalar(first).unwrap();
        assert!(std::str::from_utf8(&tokens.out).is_err(), "{text}");
    }
}

#[test]
fn rule_25_only_grammatical_json_is_accepted() {
    for text in [
        "",
        " ",
        "01",
        "-",
        "+1",
        ".5",
        "1.",
        "1e",
        "0x1",
        "NaN",
        "nul",
        "truee",
        "tru",
        "'a'",
        "\"a",
        "\"\\x\"",
        "\"\\u12\"",
        "\"\\u12g4\"",
        "\"\\u+123\"",
        "\"\t\"",
        "\"\u{0}\"",
        "[1,]",
        "[,1]",
        "[1 2]",
        "[",
        "]",
        "{,}",
        "{1:2}",
        "{\"a\"}",
        "{\"a\":}",
        "{\"a\":1,}",
        "{]",
        "[}",
        "{} {}",
        "1 2",
        "\u{feff}1",
        "1\u{a0}",
        "\u{b}1",
        "\u{c}1",
        "// a\n1",
        r#"{"a":1,"a":1}"#,
        r#"{"x":[{"\ud800":1,"\uD800":2}]}"#,
        r#"{"":1,"":1}"#,
    ] {
        assert!(digest(text.as_bytes(), &Selection::All).is_err(), "{text}");
        let without = Selection::without(["/a", "/x/0"]);
        assert!(digest(text.as_bytes(), &without).is_err(), "{text}");
    }
    for text in [
        "\"\u{7f}\u{80}\"",
        "-0.0e-00",
        " \t\r\n[ ] ",
        "[[],{}]",
        "1E+2",
    ] {
        assert!(digest(text.as_bytes(), &Selection::All).is_ok(), "{text}");
    }
}

#[test]
fn rule_25_a_chosen_value_that_is_falsy_is_a_value() {
    let only = Selection::only(["/a", "/a/b"]);
    let values = [
        "{}",
        r#"{"a":null}"#,
        r#"{"a":false}"#,
        r#"{"a":0}"#,
        r#"{"a":""}"#,
        r#"{"a":[]}"#,
        r#"{"a":{}}"#,
        r#"{"a":{"b":0}}"#,
    ];
    for (index, one) in values.iter().enumerate() {
        for (other_index, other) in values.iter().enumerate() {
            assert_eq!(
                same(&only, one, other),
                index == other_index,
                "{one} {other}"
            );
        }
    }
    assert!(same(&only, r#"{"a":1,"b":2}"#, r#"{"b":3,"a":1}"#));
}

#[test]
fn rule_25_a_pointer_that_cannot_be_followed_is_refused() {
    for pointers in [&[][..], &["a"], &[""], &["/a", "/~"], &["/~2"], &["/a~b"]] {
        let pointers = || pointers.iter().copied();
        assert!(Selection::only(pointers()).fault().is_some());
        assert!(Selection::without(pointers()).fault().is_some());
    }
    for pointer in ["/", "/a/-", "/~0~1", "/a//b"] {
        assert_eq!(Selection::only([pointer]).fault(), None, "{pointer}");
    }
}

#[test]
fn rule_25_an_excluded_element_counts_neither_present_nor_absent() {
    let without = Selection::without(["/list/0", "/a", "/b/c"]);
    for (one, other) in [
        (r#"{"list":[1,2]}"#, r#"{"list":[{"x":[]},2]}"#),
        (r#"{"list":[1]}"#, r#"{"list":[]}"#),
        (r#"{"a":1,"z":2}"#, r#"{"z":2}"#),
        (r#"{"b":{"c":1,"d":2}}"#, r#"{"b":{"d":2}}"#),
        (r#"{"b":{"c":1}}"#, r#"{"b":{}}"#),
    ] {
        assert!(same(&without, one, other), "{one} {other}");
    }
    for (one, other) in [
        (r#"{"list":[1,2]}"#, r#"{"list":[2]}"#),
        (r#"{"b":{"c":1}}"#, "{}"),
        (r#"{"b":[1]}"#, r#"{"b":{"c":1}}"#),
        (r#"["_"]"#, "[]"),
    ] {
        assert!(!same(&without, one, other), "{one} {other}");
    }
}

#[test]
fn f9_hostile_json_takes_about_as_long_as_plain_json() {
    let thousand = || (0..1_000).map(|number| format!("/deep/{number}/x"));
    let pointers = || thousand().chain(["/b/b/b".to_owned()]);
    let (only, without) = (Selection::only(pointers()), Selection::without(pointers()));
    let repeat = |begin: &str, middle: &str, end: &str| {
        let count = MIB / (begin.len() + end.len());
        begin.repeat(count) + middle + &end.repeat(count)
    };
    let many = |each: fn(usize) -> String, count: usize| {
        let members: Vec<_> = (0..count).map(each).collect();
        format!("{{{}}}", members.join(","))
    };
    let deep = format!(r#"{{"deep":[{}]}}"#, vec!["0"; MIB / 2].join(","));
    let documents = [
        repeat("[", "", "]"),
        repeat(r#"{"b":0,"a":"#, "1", "}"),
        repeat(r#"{"a":"#, "1", r#","b":0}"#),
        repeat("[0,", "1", "]"),
        repeat(r#"[{"b":"#, "1", r#","a":[]}]"#),
        many(|number| format!("\"{:05}\":1", 99_999 - number), 100_000),
        many(
            |number| format!("\"\\u0061{:05}\":1", number * 7_919 % 65_536),
            60_000,
        ),
        format!("[{}]", vec!["{}"; MIB / 3].join(",")),
        format!("[{}]", vec![r#"{"b":0,"a":0}"#; MIB / 14].join(",")),
        format!("\"{}\"", r"\ud800".repeat(MIB / 6)),
    ];
    let plain = took(&format!("\"{}\"", "a".repeat(MIB)), &Selection::All);
    let of_all = documents.iter().map(|document| (document, &Selection::All));
    for (document, selection) in of_all.chain([(&deep, &only), (&deep, &without)]) {
        let hostile = took(document, selection);
        // A quadratic reader takes minutes.
        let most = 100 * plain + Duration::from_secs(1);
        assert!(hostile < most, "{hostile:?} {}", &document[..20]);
    }
}

fn took(document: &str, selection: &Selection) -> Duration {
    let begun = Instant::now();
    digest(document.as_bytes(), selection).unwrap();
    begun.elapsed()
}

const MIB: usize = 1 << 20;
