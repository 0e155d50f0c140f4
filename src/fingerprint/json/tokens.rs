//! The tokens of a document, and their canonical spelling.

use crate::fingerprint::digest::BodyFault;

/// Reads a document token by token and writes each as it counts: strings
/// unescaped, numbers untouched, no white space.
pub(super) struct Tokens<'d> {
    text: &'d [u8],
    at: usize,
    pub(super) out: Vec<u8>,
}

impl<'d> Tokens<'d> {
    pub(super) fn new(text: &'d str) -> Self {
        Self {
            text: text.as_bytes(),
            at: 0,
            out: Vec::with_capacity(text.len()),
        }
    }

    /// A value that is no container, behind its first byte.
    pub(super) fn scalar(&mut self, first: u8) -> Result<(), BodyFault> {
        match first {
            b'"' => self.string(),
            b'-' | b'0'..=b'9' => self.number(),
            b't' => self.literal(b"true"),
            b'f' => self.literal(b"false"),
            b'n' => self.literal(b"null"),
            _ => Err(NOT_JSON),
        }
    }

    /// A string behind its opening quote. Quotes and backslashes stay escaped in
    /// the canonical form, nothing else does.
    pub(super) fn string(&mut self) -> Result<(), BodyFault> {
        self.out.push(b'"');
        loop {
            let rest = &self.text[self.at..];
            let plain = rest
                .iter()
                .position(|&byte| matches!(byte, b'"' | b'\\' | 0..=0x1f))
                .ok_or(NOT_JSON)?;
            self.out.extend_from_slice(&rest[..plain]);
            self.at += plain;
            match self.next()? {
                b'"' => break,
                b'\\' => self.escape()?,
                _ => return Err(NOT_JSON),
            }
        }
        self.out.push(b'"');
        Ok(())
    }

    fn escape(&mut self) -> Result<(), BodyFault> {
        let character = match self.next()? {
            escaped @ (b'"' | b'\\') => {
                self.out.push(b'\\');
                escaped
            }
            b'/' => b'/',
            b'b' => 0x08,
            b'f' => 0x0c,
            b'n' => b'\n',
            b'r' => b'\r',
            b't' => b'\t',
            b'u' => return self.code_unit(),
            _ => return Err(NOT_JSON),
        };
        self.out.push(character);
        Ok(())
    }

    /// Half a surrogate pair is written as three bytes that no valid UTF-8 has,
    /// so that it equals itself and no other text.
    fn code_unit(&mut self) -> Result<(), BodyFault> {
        let unit = hexadecimal(&self.text[self.at..]).ok_or(NOT_JSON)?;
        self.at += HEX_DIGITS;
        let code = match (unit, self.low_half()) {
            (0xd800..=0xdbff, Some(low)) => {
                self.at += r"\u".len() + HEX_DIGITS;
                0x10000 + ((unit - 0xd800) << 10) + (low - 0xdc00)
            }
            _ => unit,
        };
        match char::from_u32(code) {
            Some(escaped @ ('"' | '\\')) => self.out.extend_from_slice(&[b'\\', escaped as u8]),
            Some(character) => {
                let utf8 = &mut [0; 4];
                self.out
                    .extend_from_slice(character.encode_utf8(utf8).as_bytes());
            }
            None => self.out.extend_from_slice(&[
                0xe0 | (code >> 12) as u8,
                0x80 | (code >> 6 & 0x3f) as u8,
                0x80 | (code & 0x3f) as u8,
            ]),
        }
        Ok(())
    }

    /// The second half of a surrogate pair, if it comes next.
    fn low_half(&self) -> Option<u32> {
        let digits = self.text[self.at..].strip_prefix(br"\u")?;
        hexadecimal(digits).filter(|unit| matches!(unit, 0xdc00..=0xdfff))
    }

    /// A number behind its first character. Its spelling is kept.
    fn number(&mut self) -> Result<(), BodyFault> {
        let start = self.at - 1;
        self.at = start;
        self.takes(b'-');
        if !self.takes(b'0') {
            self.digits()?;
        }
        if self.takes(b'.') {
            self.digits()?;
        }
        if self.takes(b'e') || self.takes(b'E') {
            let _is_signed = self.takes(b'+') || self.takes(b'-');
            self.digits()?;
        }
        self.out.extend_from_slice(&self.text[start..self.at]);
        Ok(())
    }

    /// One digit or more.
    fn digits(&mut self) -> Result<(), BodyFault> {
        let rest = &self.text[self.at..];
        let count = rest.iter().take_while(|byte| byte.is_ascii_digit()).count();
        self.at += count;
        if count == 0 { Err(NOT_JSON) } else { Ok(()) }
    }

    fn literal(&mut self, whole: &[u8]) -> Result<(), BodyFault> {
        let start = self.at - 1;
        if !self.text[start..].starts_with(whole) {
            return Err(NOT_JSON);
        }
        self.at = start + whole.len();
        self.out.extend_from_slice(whole);
        Ok(())
    }

    pub(super) fn white_space(&mut self) {
        while let Some(b' ' | b'\t' | b'\n' | b'\r') = self.peek() {
            self.at += 1;
        }
    }

    /// Whether this byte comes next, which is then behind.
    pub(super) fn takes(&mut self, byte: u8) -> bool {
        let is_next = self.peek() == Some(byte);
        self.at += usize::from(is_next);
        is_next
    }

    pub(super) fn peek(&self) -> Option<u8> {
        self.text.get(self.at).copied()
    }

    pub(super) fn next(&mut self) -> Result<u8, BodyFault> {
        let byte = self.peek().ok_or(NOT_JSON)?;
        self.at += 1;
        Ok(byte)
    }
}

/// The number that the first four bytes spell.
fn hexadecimal(text: &[u8]) -> Option<u32> {
    text.get(..HEX_DIGITS)?
        .iter()
        .try_fold(0, |number, &digit| {
            Some(number << 4 | char::from(digit).to_digit(16)?)
        })
}

/// How many hexadecimal digits follow `\u`.
const HEX_DIGITS: usize = 4;

pub(super) const NOT_JSON: BodyFault = BodyFault("it is not valid JSON");
