//! Whose key it is; scope and key together name a record.

use std::{fmt, sync::Arc};

use crate::Key;

/// Whose key it is: the caller, account or tenant that an operation belongs to.
///
/// The same key in two scopes names two operations that know nothing of each
/// other. Build the scope from *who the caller is* (the account's id), never
/// from a credential: a token that is refreshed between two tries would run
/// the operation twice.
///
/// ```
/// use tower_idempotency::Scope;
///
/// assert!(Scope::new("acct_42").is_some());
/// assert!(Scope::new("").is_none());
/// assert_ne!(
///     Scope::new("acct_42").map(|caller| caller.with_endpoint("payments")),
///     Scope::new("acct_42"),
/// );
/// ```
#[derive(Clone, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct Scope(
    /// `None` is the empty text, which needs no memory of its own.
    Option<Arc<str>>,
);

impl Scope {
    /// The scope of one caller.
    ///
    /// `None`, which refuses the request, if `caller` is empty, longer than
    /// 255 bytes, or contains a control character: no bounded, printable name
    /// of a caller, no scope.
    #[must_use]
    pub fn new(caller: impl AsRef<str>) -> Option<Self> {
        let caller = caller.as_ref();
        let sound = !caller.is_empty()
            && caller.len() <= LONGEST_PART
            && !caller.contains(char::is_control);
        sound.then(|| Self::from_stored(caller))
    }

    /// The one scope of a service that has a single tenant: all callers share
    /// their keys, and each of them can receive the response to another's
    /// request.
    #[must_use]
    pub fn single_tenant() -> Self {
        Self(None)
    }

    /// This caller's keys at one endpoint, apart from its keys elsewhere.
    ///
    /// Without it, a key that comes back on another endpoint is a mismatch.
    /// Longer endpoints than 255 bytes are cut to a digest.
    #[must_use]
    pub fn with_endpoint(self, endpoint: impl AsRef<str>) -> Self {
        let endpoint = endpoint.as_ref();
        // No part contains the separator: callers have no control characters,
        // and an endpoint that has one is spelled as its digest.
        if endpoint.len() <= LONGEST_PART && !endpoint.contains(char::is_control) {
            Self::from_stored(format!("{}{SEPARATOR}{endpoint}", self.as_str()))
        } else {
            let digest = <sha2::Sha256 as sha2::Digest>::digest(endpoint.as_bytes());
            let digest = hex::encode(digest);
            Self::from_stored(format!("{}{SEPARATOR}{SEPARATOR}{digest}", self.as_str()))
        }
    }

    /// A scope as a store keeps it.
    ///
    /// For the authors of stores: the text is taken as it is.
    #[must_use]
    pub fn from_stored(text: impl Into<Arc<str>>) -> Self {
        Self(Some(text.into()).filter(|text| !text.is_empty()))
    }

    /// The scope's text: what stores keep and operators type.
    #[must_use]
    pub fn as_str(&self) -> &str {
        self.0.as_deref().unwrap_or_default()
    }
}

impl fmt::Debug for Scope {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Scope({} bytes)", self.as_str().len())
    }
}

/// The name of a record: whose key, and which. Never the key alone.
#[derive(Clone, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct RecordName {
    scope: Scope,
    key: Key,
}

impl RecordName {
    /// The name of the record of this key in this scope.
    #[must_use]
    pub fn new(scope: Scope, key: Key) -> Self {
        Self { scope, key }
    }

    /// Whose key it is.
    #[must_use]
    pub fn scope(&self) -> &Scope {
        &self.scope
    }

    /// The key.
    #[must_use]
    pub fn key(&self) -> &Key {
        &self.key
    }

    /// The length of both.
    #[cfg(any(feature = "postgres", feature = "sqlite"))]
    pub(crate) fn bytes(&self) -> usize {
        self.scope.as_str().len() + self.key.as_str().len()
    }
}

const LONGEST_PART: usize = 255;
const SEPARATOR: char = '\u{1f}';

#[cfg(test)]
mod tests {
    use rand::{RngExt as _, SeedableRng as _, rngs::StdRng};

    use super::*;

    #[test]
    fn a_caller_without_a_bounded_printable_name_has_no_scope() {
        assert!(Scope::new("é tenant").is_some());
        assert!(Scope::new("x".repeat(255)).is_some());
        for caller in ["", "a\nb", "a\u{1f}b", "\u{0}", &"x".repeat(256)] {
            assert!(Scope::new(caller).is_none());
        }
    }

    #[test]
    fn a_scope_comes_back_from_its_store_as_it_was() {
        for scope in [
            Scope::single_tenant(),
            Scope::single_tenant().with_endpoint("payments"),
            Scope::new("acct_42").unwrap(),
        ] {
            assert_eq!(Scope::from_stored(scope.as_str()), scope);
        }
    }

    #[test]
    fn different_parts_make_different_scopes() {
        let mut rng = StdRng::seed_from_u64(0);
        let mut part = || -> String {
            let length = rng.random_range(0..4);
            let chars =
                (0..length).map(|_| ['a', 'b', '/', 'é', '\\', SEPARATOR][rng.random_range(0..6)]);
            chars.collect()
        };
        for _ in 0..4_000 {
            let [a, b, c, d] = [part(), part(), part(), part()];
            if let (Some(one), Some(two)) = (Scope::new(&a), Scope::new(&c))
                && (&a, &b) != (&c, &d)
            {
                assert_ne!(one.with_endpoint(&b), two.with_endpoint(&d));
            }
        }
    }
}
