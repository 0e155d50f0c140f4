//! JSON by structure: members sorted, numbers as they are spelled.
//!
//! One pass writes the canonical form of the document into a buffer: strings
//! unescaped, numbers untouched, no white space. An object with several members
//! is replaced by the digest of its sorted members when it ends, so that no byte
//! is moved twice, however deep the document is. Numbers never become floats:
//! 9007199254740993 is not 9007199254740992.

mod pointers;

use std::{fmt, sync::Arc};

use sha2::{Digest as _, Sha256};

use self::pointers::{Node, Pointers, ROOT};
use super::BodyFault;

/// Which values of a document count.
#[derive(Clone)]
pub(super) enum Selection {
    All,
    Only(Arc<Pointers>),
    Without(Arc<Pointers>),
}

impl Selection {
    pub(super) fn only<P: Into<String>>(pointers: impl IntoIterator<Item = P>) -> Self {
        Self::Only(Arc::new(Pointers::new(pointers)))
    }

    pub(super) fn without<P: Into<String>>(pointers: impl IntoIterator<Item = P>) -> Self {
        Self::Without(Arc::new(Pointers::new(pointers)))
    }

    pub(super) fn fault(&self) -> Option<&'static str> {
        self.pointers().and_then(Pointers::fault)
    }

    /// What kind of selection it is, and its pointers in order.
    pub(super) fn spelled(&self) -> (&'static str, &[String]) {
        match self {
            Self::All => ("all", &[]),
            Self::Only(pointers) => ("only", pointers.spelled()),
            Self::Without(pointers) => ("without", pointers.spelled()),
        }
    }

    fn pointers(&self) -> Option<&Pointers> {
        match self {
            Self::All => None,
            Self::Only(pointers) | Self::Without(pointers) => Some(pointers),
        }
    }
}

impl fmt::Debug for Selection {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let (kind, pointers) = self.spelled();
        write!(f, "{kind} {pointers:?}")
    }
}

/// The digest of the chosen values of the document `body`. Two documents have
/// the same one if and only if these values are the same.
pub(super) fn digest(body: &[u8], selection: &Selection) -> Result<[u8; 32], BodyFault> {
    let text = std::str::from_utf8(body).map_err(|_| NOT_JSON)?;
    let mut scan = Scan::new(text.as_bytes(), selection);
    scan.document()?;
    if !matches!(selection, Selection::Only(_)) {
        return Ok(Sha256::digest(&scan.out).into());
    }
    let mut chosen = Sha256::new();
    for value in &scan.found {
        match value {
            Some(digest) => {
                chosen.update(b"+");
                chosen.update(digest);
            }
            None => chosen.update(b"-"),
        }
    }
    Ok(chosen.finalize().into())
}

struct Scan<'d> {
    text: &'d [u8],
    at: usize,
    /// The canonical form so far.
    out: Vec<u8>,
    /// The containers that have begun and not ended.
    open: Vec<Open>,
    /// The members of the open objects; those of the innermost one are last.
    members: Vec<Member>,
    pointers: Option<&'d Pointers>,
    /// Whether only the values at the pointers count, rather than all others.
    only: bool,
    /// Those of the open containers that a pointer leads into.
    watched: Vec<Watched>,
    /// The digests of the values at the pointers, if only those count.
    found: Vec<Option<[u8; 32]>>,
}

/// Offsets into `out` have 32 bits. A body has up to 256 MiB, and its canonical form
/// less than three times as much: the shortest object of two members has 12 bytes,
/// and its digest 33. Each container that a pointer leads into adds up to 33 bytes.
type Offset = u32;

struct Open {
    start: Offset,
    /// Where its members begin; `None` for an array.
    members: Option<Offset>,
}

struct Member {
    start: Offset,
    name_end: Offset,
    end: Offset,
}

struct Watched {
    /// How many containers were open when it had begun.
    depth: usize,
    node: Node,
    /// The index of the next element of an array.
    next: usize,
    /// The value in it that is being read.
    current: Current,
}

#[derive(Clone, Copy)]
struct Current {
    start: usize,
    fate: Fate,
    /// Where the pointers lead that go on inside of it.
    inside: Option<Node>,
}

/// What becomes of a value once it has been read.
#[derive(Clone, Copy)]
enum Fate {
    Counts,
    Dropped,
    /// Its digest is kept for this pointer.
    Found(usize),
}

impl<'d> Scan<'d> {
    fn new(text: &'d [u8], selection: &'d Selection) -> Self {
        let pointers = selection.pointers();
        let only = matches!(selection, Selection::Only(_));
        Self {
            text,
            at: 0,
            out: Vec::with_capacity(text.len()),
            open: Vec::new(),
            members: Vec::new(),
            pointers,
            only,
            watched: Vec::new(),
            found: vec![None; pointers.filter(|_| only).map_or(0, Pointers::count)],
        }
    }

    fn document(&mut self) -> Result<(), BodyFault> {
        self.white_space();
        loop {
            if self.begins_container()? {
                continue;
            }
            // A value has ended here, and perhaps the containers around it.
            loop {
                self.end_value();
                self.white_space();
                let Some(innermost) = self.open.last() else {
                    return match self.peek() {
                        None => Ok(()),
                        Some(_) => Err(NOT_JSON),
                    };
                };
                let is_object = innermost.members.is_some();
                match (self.next()?, is_object) {
                    (b',', true) => {
                        self.white_space();
                        self.name()?;
                    }
                    (b',', false) => {
                        self.white_space();
                        self.begin_element();
                    }
                    (b'}', true) => {
                        self.end_object()?;
                        continue;
                    }
                    (b']', false) => {
                        self.end_array();
                        continue;
                    }
                    _ => return Err(NOT_JSON),
                }
                break;
            }
        }
    }

    /// Reads a value; of a container with something in it only what comes
    /// before the first value inside, which is to be read next.
    fn begins_container(&mut self) -> Result<bool, BodyFault> {
        let byte = self.next()?;
        match byte {
            b'{' => {
                let members = Some(offset(self.members.len()));
                self.begin_container(byte, members);
                if self.peek() == Some(b'}') {
                    self.at += 1;
                    self.end_object()?;
                    return Ok(false);
                }
                self.name()?;
                Ok(true)
            }
            b'[' => {
                self.begin_container(byte, None);
                if self.peek() == Some(b']') {
                    self.at += 1;
                    self.end_array();
                    return Ok(false);
                }
                self.begin_element();
                Ok(true)
            }
            b'"' => self.string().map(|()| false),
            b'-' | b'0'..=b'9' => self.number().map(|()| false),
            b't' => self.literal(b"true").map(|()| false),
            b'f' => self.literal(b"false").map(|()| false),
            b'n' => self.literal(b"null").map(|()| false),
            _ => Err(NOT_JSON),
        }
    }

    fn begin_container(&mut self, bracket: u8, members: Option<Offset>) {
        let node = if self.open.is_empty() {
            self.pointers.map(|_| ROOT)
        } else {
            self.watched().and_then(|watched| watched.current.inside)
        };
        let start = offset(self.out.len());
        self.open.push(Open { start, members });
        if let Some(node) = node {
            self.watched.push(Watched {
                depth: self.open.len(),
                node,
                next: 0,
                current: Current {
                    start: 0,
                    fate: Fate::Counts,
                    inside: None,
                },
            });
        }
        self.out.push(bracket);
        self.white_space();
    }

    /// The innermost container, if a pointer leads into it.
    fn watched(&mut self) -> Option<&mut Watched> {
        let depth = self.open.len();
        self.watched
            .last_mut()
            .filter(|watched| watched.depth == depth)
    }

    /// The name of a member and what stands between it and its value.
    fn name(&mut self) -> Result<(), BodyFault> {
        if self.next()? != b'"' {
            return Err(NOT_JSON);
        }
        let start = self.out.len();
        self.string()?;
        let name_end = self.out.len();
        self.members.push(Member {
            start: offset(start),
            name_end: offset(name_end),
            end: offset(name_end),
        });
        self.white_space();
        if self.next()? != b':' {
            return Err(NOT_JSON);
        }
        self.white_space();
        if let Some(pointers) = self.pointers
            && let Some(node) = self.watched().map(|watched| watched.node)
        {
            let child = pointers.member(node, &self.out[start..name_end]);
            let current = self.current(child);
            self.watched.last_mut().expect("it is there").current = current;
        }
        Ok(())
    }

    fn begin_element(&mut self) {
        let Some(pointers) = self.pointers else {
            return;
        };
        let Some(&mut Watched { node, next, .. }) = self.watched() else {
            return;
        };
        let current = self.current(pointers.element(node, next));
        let watched = self.watched.last_mut().expect("it is there");
        watched.next += 1;
        watched.current = current;
    }

    /// What a pointer says about the value that begins here.
    fn current(&self, child: Option<Node>) -> Current {
        let ends = child.and_then(|child| self.pointers?.ends_at(child));
        let fate = match ends {
            Some(pointer) if self.only => Fate::Found(pointer),
            Some(_) => Fate::Dropped,
            None if self.only => Fate::Dropped,
            None => Fate::Counts,
        };
        Current {
            start: self.out.len(),
            fate,
            inside: child.filter(|_| ends.is_none()),
        }
    }

    fn end_value(&mut self) {
        if let Some(&mut Watched { current, .. }) = self.watched() {
            if let Fate::Found(pointer) = current.fate {
                self.found[pointer] = Some(Sha256::digest(&self.out[current.start..]).into());
            }
            if !matches!(current.fate, Fate::Counts) {
                self.out.truncate(current.start);
                return;
            }
        }
        match self.open.last() {
            Some(Open {
                members: Some(_), ..
            }) => {
                let end = offset(self.out.len());
                self.members.last_mut().expect("it has a name").end = end;
            }
            Some(_) => self.out.push(b','),
            None => {}
        }
    }

    fn end_array(&mut self) {
        self.end_watched();
        self.open.pop();
        self.out.push(b']');
    }

    /// Refuses a name that occurs twice: parsers disagree on which of the two
    /// counts (RFC 8259 §4).
    fn end_object(&mut self) -> Result<(), BodyFault> {
        let is_watched = self.end_watched();
        let Some(Open {
            start,
            members: Some(first),
        }) = self.open.pop()
        else {
            return Err(NOT_JSON);
        };
        let (start, first) = (start as usize, first as usize);
        let members = &mut self.members[first..];
        // What a pointer leaves out must not decide about the form.
        if members.len() < 2 && !is_watched {
            self.out.push(b'}');
            self.members.truncate(first);
            return Ok(());
        }
        let out = &self.out;
        let name = |member: &Member| &out[member.start as usize..member.name_end as usize];
        members.sort_unstable_by(|one, other| name(one).cmp(name(other)));
        if members
            .windows(2)
            .any(|pair| name(&pair[0]) == name(&pair[1]))
        {
            return Err(DUPLICATE);
        }
        let mut object = Sha256::new();
        for member in members.iter().filter(|member| member.end > member.name_end) {
            object.update(&out[member.start as usize..member.end as usize]);
        }
        self.members.truncate(first);
        self.out.truncate(start);
        self.out.push(b'#');
        self.out.extend_from_slice(&object.finalize());
        Ok(())
    }

    fn end_watched(&mut self) -> bool {
        let is_watched = self.watched().is_some();
        if is_watched {
            self.watched.pop();
        }
        is_watched
    }

    /// A string behind its opening quote. Quotes and backslashes stay escaped in
    /// the canonical form, nothing else does.
    fn string(&mut self) -> Result<(), BodyFault> {
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
                self.out.extend_from_slice(&[b'\\', escaped]);
                return Ok(());
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
        let unit = self.four_digits()?;
        let code = match (unit, self.low_half()) {
            (0xd800..=0xdbff, Some(low)) => {
                self.at += r"\uXXXX".len();
                0x10000 + ((unit - 0xd800) << 10) + (low - 0xdc00)
            }
            _ => unit,
        };
        match char::from_u32(code) {
            Some(escaped @ ('"' | '\\')) => self.out.extend_from_slice(&[b'\\', escaped as u8]),
            Some(character) => {
                let mut utf8 = [0; 4];
                let encoded = character.encode_utf8(&mut utf8);
                self.out.extend_from_slice(encoded.as_bytes());
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
        let digits = self.text[self.at..].strip_prefix(br"\u")?.get(..4)?;
        hexadecimal(digits).filter(|unit| matches!(unit, 0xdc00..=0xdfff))
    }

    fn four_digits(&mut self) -> Result<u32, BodyFault> {
        let digits = self.text.get(self.at..self.at + 4).ok_or(NOT_JSON)?;
        self.at += 4;
        hexadecimal(digits).ok_or(NOT_JSON)
    }

    /// A number behind its first character. Its spelling is kept.
    fn number(&mut self) -> Result<(), BodyFault> {
        let start = self.at - 1;
        self.at = start + usize::from(self.text[start] == b'-');
        if self.peek() == Some(b'0') {
            self.at += 1;
        } else {
            self.digits()?;
        }
        if self.peek() == Some(b'.') {
            self.at += 1;
            self.digits()?;
        }
        if matches!(self.peek(), Some(b'e' | b'E')) {
            self.at += 1;
            if matches!(self.peek(), Some(b'+' | b'-')) {
                self.at += 1;
            }
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

    fn white_space(&mut self) {
        while let Some(b' ' | b'\t' | b'\n' | b'\r') = self.peek() {
            self.at += 1;
        }
    }

    fn peek(&self) -> Option<u8> {
        self.text.get(self.at).copied()
    }

    fn next(&mut self) -> Result<u8, BodyFault> {
        let byte = self.peek().ok_or(NOT_JSON)?;
        self.at += 1;
        Ok(byte)
    }
}

fn offset(length: usize) -> Offset {
    length as Offset
}

fn hexadecimal(digits: &[u8]) -> Option<u32> {
    digits.iter().try_fold(0, |number, &digit| {
        Some(number << 4 | char::from(digit).to_digit(16)?)
    })
}

const NOT_JSON: BodyFault = BodyFault("it is not valid JSON");
const DUPLICATE: BodyFault = BodyFault("a JSON object has two members of the same name");

#[cfg(test)]
mod tests;
