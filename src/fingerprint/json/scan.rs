//! A document in one pass, without recursion.

use sha2::{Digest as _, Sha256};

use super::{
    pointers::{Node, Pointers, ROOT},
    selection::Selection,
    tokens::{NOT_JSON, Tokens},
};
use crate::fingerprint::digest::{BodyFault, Digest, Framed, digest};

pub(super) struct Scan<'d> {
    /// With the canonical form so far.
    tokens: Tokens<'d>,
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
    found: Vec<Option<Digest>>,
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
    /// The pointer that ends at it.
    ends: Option<usize>,
    /// Where the pointers lead that go on inside of it.
    inside: Option<Node>,
}

impl<'d> Scan<'d> {
    pub(super) fn new(text: &'d str, selection: &'d Selection) -> Self {
        let pointers = selection.pointers();
        let only = matches!(selection, Selection::Only(_));
        Self {
            tokens: Tokens::new(text),
            open: Vec::new(),
            members: Vec::new(),
            pointers,
            only,
            watched: Vec::new(),
            found: vec![None; pointers.filter(|_| only).map_or(0, Pointers::count)],
        }
    }

    /// Returns the hash of the values that count.
    pub(super) fn document(mut self) -> Result<Framed, BodyFault> {
        self.read()?;
        if !self.only {
            return Ok(Framed::of(&self.tokens.out));
        }
        let mut chosen = Framed::default();
        for value in &self.found {
            match value {
                Some(digest) => chosen.field(digest),
                None => chosen.end(),
            }
        }
        Ok(chosen)
    }

    fn read(&mut self) -> Result<(), BodyFault> {
        self.tokens.white_space();
        loop {
            if self.begins_container()? {
                continue;
            }
            // A value has ended here, and perhaps the containers around it.
            loop {
                self.end_value();
                self.tokens.white_space();
                let Some(innermost) = self.open.last() else {
                    return match self.tokens.peek() {
                        None => Ok(()),
                        Some(_) => Err(NOT_JSON),
                    };
                };
                let is_object = innermost.members.is_some();
                match (self.tokens.next()?, is_object) {
                    (b',', true) => {
                        self.tokens.white_space();
                        self.name()?;
                        break;
                    }
                    (b',', false) => {
                        self.tokens.white_space();
                        self.begin_element();
                        break;
                    }
                    (b'}', true) => self.end_object()?,
                    (b']', false) => self.end_array(),
                    _ => return Err(NOT_JSON),
                }
            }
        }
    }

    /// Reads a value, or only the beginning of a container that is not empty.
    /// Returns whether a value inside of it comes next.
    fn begins_container(&mut self) -> Result<bool, BodyFault> {
        let byte = self.tokens.next()?;
        match byte {
            b'{' => {
                let members = Some(offset(self.members.len()));
                self.begin_container(byte, members);
                if !self.tokens.takes(b'}') {
                    return self.name().map(|()| true);
                }
                self.end_object()?;
            }
            b'[' => {
                self.begin_container(byte, None);
                if !self.tokens.takes(b']') {
                    self.begin_element();
                    return Ok(true);
                }
                self.end_array();
            }
            _ => self.tokens.scalar(byte)?,
        }
        Ok(false)
    }

    fn begin_container(&mut self, bracket: u8, members: Option<Offset>) {
        let node = if self.open.is_empty() {
            self.pointers.map(|_| ROOT)
        } else {
            self.watched().and_then(|watched| watched.current.inside)
        };
        let start = offset(self.tokens.out.len());
        self.open.push(Open { start, members });
        if let Some(node) = node {
            self.watched.push(Watched {
                depth: self.open.len(),
                node,
                next: 0,
                current: self.current(None),
            });
        }
        self.tokens.out.push(bracket);
        self.tokens.white_space();
    }

    /// The innermost container, if a pointer leads into it.
    fn watched(&mut self) -> Option<&mut Watched> {
        let depth = self.open.len();
        self.watched
            .last_mut()
            .filter(|watched| watched.depth == depth)
    }

    /// Reads the name of a member, up to its value.
    fn name(&mut self) -> Result<(), BodyFault> {
        if self.tokens.next()? != b'"' {
            return Err(NOT_JSON);
        }
        let start = self.tokens.out.len();
        self.tokens.string()?;
        let name_end = self.tokens.out.len();
        self.members.push(Member {
            start: offset(start),
            name_end: offset(name_end),
            end: offset(name_end),
        });
        self.tokens.white_space();
        if self.tokens.next()? != b':' {
            return Err(NOT_JSON);
        }
        self.tokens.white_space();
        if let Some((pointers, &mut Watched { node, .. })) = self.pointers.zip(self.watched()) {
            let child = pointers.member(node, &self.tokens.out[start..name_end]);
            self.begin_value(child);
        }
        Ok(())
    }

    fn begin_element(&mut self) {
        if let Some((pointers, watched)) = self.pointers.zip(self.watched()) {
            let child = pointers.element(watched.node, watched.next);
            watched.next += 1;
            self.begin_value(child);
        }
    }

    fn begin_value(&mut self, child: Option<Node>) {
        let current = self.current(child);
        if let Some(watched) = self.watched.last_mut() {
            watched.current = current;
        }
    }

    /// Returns what the pointers say about the value that begins here.
    fn current(&self, child: Option<Node>) -> Current {
        let ends = child.and_then(|child| self.pointers?.ends_at(child));
        Current {
            start: self.tokens.out.len(),
            ends,
            inside: child.filter(|_| ends.is_none()),
        }
    }

    fn end_value(&mut self) {
        let only = self.only;
        if let Some(&mut Watched { current, .. }) = self.watched() {
            if let Some(pointer) = current.ends.filter(|_| only) {
                self.found[pointer] = Some(digest(&self.tokens.out[current.start..]));
            }
            if only || current.ends.is_some() {
                self.tokens.out.truncate(current.start);
                return;
            }
        }
        match self.open.last() {
            Some(Open {
                members: Some(_), ..
            }) => {
                let end = offset(self.tokens.out.len());
                if let Some(member) = self.members.last_mut() {
                    member.end = end;
                }
            }
            Some(_) => self.tokens.out.push(b','),
            None => {}
        }
    }

    fn end_array(&mut self) {
        self.end_watched();
        self.open.pop();
        self.tokens.out.push(b']');
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
            self.tokens.out.push(b'}');
            self.members.truncate(first);
            return Ok(());
        }
        let out = &self.tokens.out;
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
        self.tokens.out.truncate(start);
        self.tokens.out.push(b'#');
        self.tokens.out.extend_from_slice(&object.finalize());
        Ok(())
    }

    fn end_watched(&mut self) -> bool {
        self.watched().is_some() && self.watched.pop().is_some()
    }
}

fn offset(length: usize) -> Offset {
    length as Offset
}

const DUPLICATE: BodyFault = BodyFault("a JSON object has two members of the same name");
