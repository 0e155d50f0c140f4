//! Writes a document in one of its many spellings.

use super::reference::Value;

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
                Ok(plain) if plain >= ' ' && self.choose(2) == 0 => out.push(plain),
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

pub(super) fn spell(value: &Value, choices: &[u8]) -> String {
    let mut out = String::new();
    Spelling { choices, next: 0 }.value(value, &mut out);
    out
}
