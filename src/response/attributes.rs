//! What the application keeps beside a response.
//!
//! ```text
//! count u16, then name length u16, name, value length u16, value
//! ```
//! Numbers are little-endian.

use std::fmt;

use bytes::{Buf as _, BufMut as _, Bytes, BytesMut};

/// Names and values that the application keeps beside a response, such as the user who
/// made the request.
///
/// A [`ReplayAuthorizer`](crate::ReplayAuthorizer) takes them from the request that runs,
/// and sees them before a replay. They are part of the recorded response: every store
/// keeps them, and no client receives them. `Debug` shows the names alone.
///
/// They may take up to 4 KiB together: the bytes of all names and values, and 4 bytes for
/// each pair. Of more than that, none are kept, and a warning says so.
///
/// ```
/// use tower_idempotency::Attributes;
///
/// let attributes = Attributes::new().with("user", "u_7").with("role", "clerk");
/// assert_eq!(attributes.get("role"), Some("clerk"));
/// assert_eq!(attributes.get("address"), None);
/// ```
#[derive(Clone, Default, PartialEq, Eq)]
#[must_use]
pub struct Attributes(Vec<(String, String)>);

impl Attributes {
    pub(crate) const NONE: Self = Self(Vec::new());

    /// No attributes.
    pub fn new() -> Self {
        Self::default()
    }

    /// Adds an attribute, in place of an earlier one with this name.
    pub fn with(mut self, name: impl Into<String>, value: impl Into<String>) -> Self {
        let name = name.into();
        self.0.retain(|(earlier, _)| *earlier != name);
        self.0.push((name, value.into()));
        self
    }

    /// Returns the value of an attribute, or `None` if there is none with this name.
    #[must_use]
    pub fn get(&self, name: &str) -> Option<&str> {
        self.iter()
            .find_map(|(kept, value)| (kept == name).then_some(value))
    }

    /// Returns the names with their values, in the order in which they were added.
    pub fn iter(&self) -> impl Iterator<Item = (&str, &str)> {
        self.0.iter().map(|(name, value)| (&**name, &**value))
    }

    /// Returns whether there are none.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.0.is_empty()
    }

    /// Whether they are few and short enough to be kept.
    pub(crate) fn fit(&self) -> bool {
        self.encoded_len() <= LARGEST
    }

    pub(super) fn encoded_len(&self) -> usize {
        let pairs = self.iter();
        COUNT
            + pairs
                .map(|(name, value)| PAIR + name.len() + value.len())
                .sum::<usize>()
    }

    /// Appends them, which must [fit](Self::fit).
    pub(super) fn put(&self, bytes: &mut BytesMut) {
        bytes.put_u16_le(self.0.len() as u16);
        for text in self.iter().flat_map(|(name, value)| [name, value]) {
            bytes.put_u16_le(text.len() as u16);
            bytes.put_slice(text.as_bytes());
        }
    }

    /// Takes them off the front. Returns `None` if they are damaged.
    pub(super) fn read(rest: &mut Bytes) -> Option<Self> {
        let count = rest.try_get_u16_le().ok()?;
        let pairs = (0..count).map(|_| Some((text(rest)?, text(rest)?)));
        pairs.collect::<Option<_>>().map(Self)
    }
}

fn text(rest: &mut Bytes) -> Option<String> {
    let length = usize::from(rest.try_get_u16_le().ok()?);
    let text = (length <= rest.len()).then(|| rest.split_to(length))?;
    String::from_utf8(text.into()).ok()
}

/// As [`Attributes::with`], for each pair.
impl<N: Into<String>, V: Into<String>> FromIterator<(N, V)> for Attributes {
    fn from_iter<T: IntoIterator<Item = (N, V)>>(pairs: T) -> Self {
        let add = |all: Self, (name, value): (N, V)| all.with(name, value);
        pairs.into_iter().fold(Self::new(), add)
    }
}

impl fmt::Debug for Attributes {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let names = self.iter().map(|(name, _)| name);
        f.debug_list().entries(names).finish()
    }
}

const LARGEST: usize = (4 << 10) + COUNT;
const COUNT: usize = 2;
/// The lengths of a name and its value.
const PAIR: usize = 4;

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn attributes_up_to_four_kibibytes_fit() {
        let of = |length: usize| Attributes::new().with("a", "x".repeat(length - PAIR - 1));
        assert!(of(4 << 10).fit());
        assert!(!of((4 << 10) + 1).fit());
        assert!(Attributes::new().fit());
    }

    #[test]
    fn a_later_value_replaces_an_earlier_one() {
        let attributes = Attributes::from_iter([("a", "1"), ("b", "2"), ("a", "3")]);
        assert_eq!(
            attributes.iter().collect::<Vec<_>>(),
            [("b", "2"), ("a", "3")]
        );
    }

    #[test]
    fn debug_shows_names_and_no_values() {
        let attributes = Attributes::new().with("user", "s3cr3t");
        assert_eq!(format!("{attributes:?}"), "[\"user\"]");
    }
}
