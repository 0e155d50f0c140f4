//! A reader of JSON that is slow and obvious.

use std::collections::BTreeMap;

/// A JSON text after RFC 8259: strings as UTF-16, numbers in their spelling, no
/// name twice.
#[derive(Clone, Debug, PartialEq)]
pub(super) enum Value {
    /// A number, `true`, `false` or `null`.
    Word(String),
    Text(Vec<u16>),
    /// `None` where an element is left out.
    Array(Vec<Option<Self>>),
    Object(BTreeMap<Vec<u16>, Self>),
}

pub(super) struct Reader<'t>(&'t str);

impl Reader<'_> {
    pub(super) fn document(text: &[u8]) -> Option<Value> {
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
pub(super) enum Chosen {
    All(Value),
    Only(Vec<Option<Value>>),
}

impl Selection {
    /// The values that count.
    pub(super) fn of(self, mut value: Value) -> Chosen {
        match self {
            Self::All => Chosen::All(value),
            Self::Only(pointers) => {
                let found = pointers.iter().map(|pointer| find(&mut value, pointer));
                Chosen::Only(found.collect())
            }
            Self::Without(pointers) => {
                // From the inside out: an outer removal may take an inner value with it.
                let mut pointers = pointers.to_vec();
                pointers.sort_unstable();
                for pointer in pointers.iter().rev() {
                    remove(&mut value, pointer);
                }
                Chosen::All(value)
            }
        }
    }
}

/// Which values of a document count.
#[derive(Clone, Copy, Debug)]
pub(super) enum Selection {
    All,
    Only(&'static [&'static str]),
    Without(&'static [&'static str]),
}
