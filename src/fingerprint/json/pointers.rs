//! JSON Pointers (RFC 6901) as one tree, so that a document is read once however
//! many there are.

use std::collections::HashMap;

/// A set of pointers; one that leads into another's value adds nothing to it.
pub(crate) struct Pointers {
    spelled: Vec<String>,
    nodes: Vec<Branches>,
    count: usize,
}

/// A value that a pointer leads to or through.
pub(super) type Node = usize;

/// The document itself.
pub(super) const ROOT: Node = 0;

#[derive(Default)]
struct Branches {
    /// By name, in the canonical spelling of a JSON string.
    members: HashMap<Vec<u8>, Node>,
    elements: HashMap<usize, Node>,
    /// The number of the pointer that ends here.
    ends: Option<usize>,
}

impl Pointers {
    pub(super) fn new<P: Into<String>>(pointers: impl IntoIterator<Item = P>) -> Self {
        let mut spelled: Vec<String> = pointers.into_iter().map(Into::into).collect();
        spelled.sort();
        spelled.dedup();
        let mut tree = Self {
            spelled: Vec::new(),
            nodes: vec![Branches::default()],
            count: 0,
        };
        // A pointer comes after those to the values around its own.
        for pointer in &spelled {
            tree.add(pointer);
        }
        tree.spelled = spelled;
        tree
    }

    fn add(&mut self, pointer: &str) {
        let mut node = ROOT;
        for segment in pointer.split('/').skip(1) {
            if self.nodes[node].ends.is_some() {
                return;
            }
            let next = self.nodes.len();
            let segment = segment.replace("~1", "/").replace("~0", "~");
            let index = index(&segment);
            let branches = &mut self.nodes[node];
            node = *branches.members.entry(canonical(&segment)).or_insert(next);
            if let Some(index) = index {
                branches.elements.insert(index, node);
            }
            if node == next {
                self.nodes.push(Branches::default());
            }
        }
        let ends = &mut self.nodes[node].ends;
        if ends.is_none() {
            *ends = Some(self.count);
            self.count += 1;
        }
    }

    pub(super) fn fault(&self) -> Option<&'static str> {
        if self.spelled.is_empty() {
            Some("must name at least one JSON Pointer, got none")
        } else if self.spelled.iter().any(|pointer| !pointer.starts_with('/')) {
            Some("must name JSON Pointers that begin with a slash")
        } else if self.spelled.iter().any(|pointer| has_stray_tilde(pointer)) {
            Some("must name JSON Pointers with 0 or 1 after each tilde")
        } else {
            None
        }
    }

    /// The pointers in order, each once.
    pub(super) fn spelled(&self) -> &[String] {
        &self.spelled
    }

    /// How many pointers there are, without those that lead into another's value.
    pub(super) fn count(&self) -> usize {
        self.count
    }

    /// Where the pointers lead that go on with the member of this name.
    pub(super) fn member(&self, node: Node, name: &[u8]) -> Option<Node> {
        self.nodes[node].members.get(name).copied()
    }

    /// Where the pointers lead that go on with the element at this index.
    pub(super) fn element(&self, node: Node, index: usize) -> Option<Node> {
        self.nodes[node].elements.get(&index).copied()
    }

    /// The number of the pointer that ends at this value.
    pub(super) fn ends_at(&self, node: Node) -> Option<usize> {
        self.nodes[node].ends
    }
}

/// A segment that is an index: no sign, no leading zeros (RFC 6901 §4).
fn index(segment: &str) -> Option<usize> {
    let index: usize = segment.parse().ok()?;
    (index.to_string() == segment).then_some(index)
}

fn canonical(name: &str) -> Vec<u8> {
    let escaped = name.replace('\\', "\\\\").replace('"', "\\\"");
    format!("\"{escaped}\"").into_bytes()
}

fn has_stray_tilde(pointer: &str) -> bool {
    let mut behind_tildes = pointer.split('~').skip(1);
    behind_tildes.any(|rest| !rest.starts_with(['0', '1']))
}
