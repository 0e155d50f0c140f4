//! Documents that are easy to get wrong. The package `fuzz` compares the scanner with a
//! reader that is slow and obvious.

use std::time::{Duration, Instant};

use super::{tokens::Tokens, *};
use crate::fingerprint::digest::Digest;

fn digest(body: &[u8], selection: &Selection) -> Result<Digest, BodyFault> {
    hash(body, selection).map(Framed::digest)
}

fn same(selection: &Selection, one: &str, other: &str) -> bool {
    let of = |text: &str| digest(text.as_bytes(), selection).expect(text);
    of(one) == of(other)
}

#[test]
fn rule_25_half_a_surrogate_pair_keeps_its_bytes() {
    for half in 0xd800..=0xdfff {
        let text = format!("\"\\u{half:x}\"");
        let mut tokens = Tokens::new(&text);
        let first = tokens.next().unwrap();
        tokens.scalar(first).unwrap();
        // As UTF-8 would write a character of this number.
        let bytes = [
            0xed,
            0x80 | (half >> 6 & 0x3f) as u8,
            0x80 | (half & 0x3f) as u8,
        ];
        assert_eq!(tokens.out, [b"\"", &bytes[..], b"\""].concat(), "{text}");
    }
}

#[test]
fn rule_25_a_short_escape_equals_the_long_one() {
    let of = |text: &str| digest(text.as_bytes(), &Selection::All).unwrap();
    for (short, long) in [
        (r#""\b""#, r#""\u0008""#),
        (r#""\f""#, r#""\u000c""#),
        (r#""\n""#, r#""\u000A""#),
        (r#""\r""#, r#""\u000d""#),
        (r#""\t""#, r#""\u0009""#),
        (r#""\/""#, r#""/""#),
        (r#""\"""#, r#""\u0022""#),
        (r#""\\""#, r#""\u005c""#),
    ] {
        assert_eq!(of(short), of(long), "{short}");
        assert_ne!(of(short), of(r#""x""#), "{short}");
    }
}

#[test]
fn rule_25_only_grammatical_json_is_accepted() {
    let words = r#"01 - +1 .5 1. 1e 0x1 NaN nul truee tru 'a' "a "\x" "\u12" "\u12g4" "\u+123"
        [1,] [,1] [ ] {,} {1:2} {"a"} {"a":} {"a":1,} {] [} {"a":1,"a":1} {"":1,"":1}
        {"x":[{"\ud800":1,"\uD800":2}]}"#;
    let others = [
        "",
        " ",
        "\"\t\"",
        "\"\u{0}\"",
        "[1 2]",
        "{} {}",
        "1 2",
        "\u{feff}1",
        "1\u{a0}",
        "\u{b}1",
        "\u{c}1",
        "// a\n1",
    ];
    for text in words.split_whitespace().chain(others) {
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

#[test]
fn rule_25_a_chosen_value_that_is_falsy_is_a_value() {
    let only = Selection::only(["/a", "/a/b"]);
    let values = r#"{} {"a":null} {"a":false} {"a":0} {"a":""} {"a":[]} {"a":{}} {"a":{"b":0}}"#;
    let values: Vec<_> = values.split(' ').collect();
    for one in &values {
        for other in &values {
            assert_eq!(same(&only, one, other), one == other, "{one} {other}");
        }
    }
    assert!(same(&only, r#"{"a":1,"b":2}"#, r#"{"b":3,"a":1}"#));
}

#[test]
fn rule_25_an_excluded_element_counts_neither_present_nor_absent() {
    let without = Selection::without(["/list/0", "/list/10", "/a", "/b/c"]);
    for (one, other, expected) in [
        (r#"{"list":[1,2]}"#, r#"{"list":[{"x":[]},2]}"#, true),
        (r#"{"list":[1]}"#, r#"{"list":[]}"#, true),
        (
            r#"{"list":[0,1,2,3,4,5,6,7,8,9,10]}"#,
            r#"{"list":[0,1,2,3,4,5,6,7,8,9,11]}"#,
            true,
        ),
        (r#"{"a":1,"z":2}"#, r#"{"z":2}"#, true),
        (r#"{"b":{"c":1,"d":2}}"#, r#"{"b":{"d":2}}"#, true),
        (r#"{"b":{"c":1}}"#, r#"{"b":{}}"#, true),
        (r#"{"list":[1,2]}"#, r#"{"list":[2]}"#, false),
        (r#"{"list":[1,2]}"#, r#"{"list":[1,3]}"#, false),
        (r#"{"b":{"c":1}}"#, "{}", false),
        (r#"{"b":[1]}"#, r#"{"b":{"c":1}}"#, false),
        (r#"["_"]"#, "[]", false),
    ] {
        assert_eq!(same(&without, one, other), expected, "{one} {other}");
    }
}
