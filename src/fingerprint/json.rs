//! JSON by structure: members sorted, numbers as they are spelled.
//!
//! Numbers never become floats (9007199254740993 is not …992), which is why
//! values are walked as raw text rather than parsed into a tree.

use std::fmt;

use serde::de::{Deserialize, Deserializer, MapAccess, Visitor};
use serde_json::value::RawValue;

use super::{BodyFault, Framed};

/// Which values of a document count.
#[derive(Clone, Debug)]
pub(super) enum Selection {
    All,
    Only(Vec<String>),
    Without(Vec<String>),
}

impl Selection {
    pub(super) fn only<P: Into<String>>(pointers: impl IntoIterator<Item = P>) -> Self {
        Self::Only(sorted(pointers))
    }

    pub(super) fn without<P: Into<String>>(pointers: impl IntoIterator<Item = P>) -> Self {
        Self::Without(sorted(pointers))
    }

    pub(super) fn fault(&self) -> Option<&'static str> {
        let (Self::Only(pointers) | Self::Without(pointers)) = self else {
            return None;
        };
        if pointers.is_empty() {
            Some("there is no JSON Pointer to choose or leave out")
        } else if pointers.iter().any(|pointer| !pointer.starts_with('/')) {
            Some("a JSON Pointer to a field begins with a slash")
        } else {
            None
        }
    }
}

/// Hashes the chosen values of the document `body`.
pub(super) fn hash(
    body: &[u8],
    selection: &Selection,
    framed: &mut Framed,
) -> Result<(), BodyFault> {
    let document: &RawValue = serde_json::from_slice(body).map_err(|_| NOT_JSON)?;
    match selection {
        Selection::All => walk(document, &[], DEEPEST, framed),
        Selection::Without(pointers) => {
            let pointers: Vec<_> = pointers.iter().map(|pointer| segments(pointer)).collect();
            let pointers: Vec<_> = pointers.iter().map(Vec::as_slice).collect();
            walk(document, &pointers, DEEPEST, framed)
        }
        Selection::Only(pointers) => {
            pointers
                .iter()
                .try_for_each(|pointer| match find(document, &segments(pointer))? {
                    Some(value) => {
                        framed.tag(b'+');
                        walk(value, &[], DEEPEST, framed)
                    }
                    None => {
                        framed.tag(b'-');
                        Ok(())
                    }
                })
        }
    }
}

/// `left_out`: the pointers still to follow from here, as segments.
fn walk(
    value: &RawValue,
    left_out: &[&[String]],
    depth: usize,
    framed: &mut Framed,
) -> Result<(), BodyFault> {
    let deeper = depth.checked_sub(1).ok_or(TOO_DEEP)?;
    let text = value.get();
    match text.as_bytes().first() {
        Some(b'{') => {
            framed.tag(b'{');
            for (name, value) in members(text)? {
                if let Some(left_out) = below(left_out, &name) {
                    framed.tag(b'.');
                    framed.field(name.as_bytes());
                    walk(value, &left_out, deeper, framed)?;
                }
            }
            framed.tag(b'}');
        }
        Some(b'[') => {
            framed.tag(b'[');
            for (index, value) in elements(text)?.into_iter().enumerate() {
                framed.tag(b',');
                let left_out = if left_out.is_empty() {
                    Some(Vec::new())
                } else {
                    below(left_out, &index.to_string())
                };
                if let Some(left_out) = left_out {
                    walk(value, &left_out, deeper, framed)?;
                }
            }
            framed.tag(b']');
        }
        Some(b'"') => {
            framed.tag(b'"');
            let string: String = serde_json::from_str(text).map_err(|_| NOT_JSON)?;
            framed.field(string.as_bytes());
        }
        _ => {
            framed.tag(b'=');
            framed.field(text.as_bytes());
        }
    }
    Ok(())
}

/// What is left of the pointers one step further; `None` if one ends here.
fn below<'a>(left_out: &[&'a [String]], name: &str) -> Option<Vec<&'a [String]>> {
    let mut rest = Vec::new();
    for pointer in left_out {
        match pointer.split_first() {
            Some((first, [])) if first == name => return None,
            Some((first, further)) if first == name => rest.push(further),
            _ => {}
        }
    }
    Some(rest)
}

fn find<'a>(document: &'a RawValue, path: &[String]) -> Result<Option<&'a RawValue>, BodyFault> {
    let mut value = document;
    for segment in path {
        let text = value.get();
        let next = match text.as_bytes().first() {
            Some(b'{') => members(text)?
                .into_iter()
                .find_map(|(name, value)| (name == *segment).then_some(value)),
            Some(b'[') => segment
                .parse::<usize>()
                .ok()
                .filter(|index| index.to_string() == *segment)
                .and_then(|index| elements(text).ok()?.get(index).copied()),
            _ => None,
        };
        match next {
            Some(next) => value = next,
            None => return Ok(None),
        }
    }
    Ok(Some(value))
}

/// An object's members, sorted by name; a name that occurs twice is refused,
/// since parsers disagree on which one counts (RFC 8259 §4).
fn members(text: &str) -> Result<Vec<(String, &RawValue)>, BodyFault> {
    let Members(mut members) = serde_json::from_str(text).map_err(|_| NOT_JSON)?;
    members.sort_by(|(one, _), (other, _)| one.cmp(other));
    match members.windows(2).any(|pair| pair[0].0 == pair[1].0) {
        true => Err(DUPLICATE),
        false => Ok(members),
    }
}

fn elements(text: &str) -> Result<Vec<&RawValue>, BodyFault> {
    serde_json::from_str(text).map_err(|_| NOT_JSON)
}

struct Members<'a>(Vec<(String, &'a RawValue)>);

impl<'de> Deserialize<'de> for Members<'de> {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        struct Collect;

        impl<'de> Visitor<'de> for Collect {
            type Value = Members<'de>;

            fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str("an object")
            }

            fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> Result<Self::Value, A::Error> {
                let mut members = Vec::new();
                while let Some(member) = map.next_entry()? {
                    members.push(member);
                }
                Ok(Members(members))
            }
        }

        deserializer.deserialize_map(Collect)
    }
}

/// RFC 6901 §4: `~1` is a slash, `~0` a tilde, in that order.
fn segments(pointer: &str) -> Vec<String> {
    pointer
        .split('/')
        .skip(1)
        .map(|segment| segment.replace("~1", "/").replace("~0", "~"))
        .collect()
}

fn sorted<P: Into<String>>(pointers: impl IntoIterator<Item = P>) -> Vec<String> {
    let mut pointers: Vec<_> = pointers.into_iter().map(Into::into).collect();
    pointers.sort();
    pointers.dedup();
    pointers
}

const DEEPEST: usize = 64;
const NOT_JSON: BodyFault = BodyFault("it is not valid JSON");
const DUPLICATE: BodyFault = BodyFault("a JSON object has two members of the same name");
const TOO_DEEP: BodyFault = BodyFault("its JSON nests deeper than 64 levels");
