//! Whose key it is.

use std::{borrow::Cow, fmt, sync::Arc};

/// Whose key it is: the caller, account or tenant that an operation belongs to.
///
/// The same key in two scopes names two separate operations. Build the scope from
/// *who the caller is* (the account's id), never from a credential: a token that
/// is refreshed between two tries would run the operation twice.
///
/// ```
/// use tower_idempotency::Scope;
///
/// let caller = Scope::new("acct_42").unwrap();
/// assert_eq!(caller.as_str(), "acct_42");
/// // For example in psql: WHERE scope = 'acct_42~payments'
/// assert_eq!(caller.with_endpoint("payments").as_str(), "acct_42~payments");
/// assert!(Scope::new("").is_none());
/// ```
///
/// # Text
///
/// [`as_str`](Self::as_str) is printable text, so that an operator can type it:
///
/// - the caller's name;
/// - for each endpoint a `~` and its name, or `%sha256:` and the SHA-256 in hexadecimal
///   of a name that is too long or has a control character.
///
/// `~` in a name is written `%7E`, and `%` is written `%25`. So different callers and
/// endpoints have different texts.
#[derive(Clone, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct Scope(
    /// `None` is the empty text, which allocates nothing.
    Option<Arc<str>>,
);

impl Scope {
    /// Returns the scope of one caller.
    ///
    /// Returns `None` if `caller` is empty, is longer than 255 bytes, of which `~` and
    /// `%` count as three, or has a control character. A request without a scope is
    /// refused with 403 `caller-unknown`.
    #[must_use]
    pub fn new(caller: impl AsRef<str>) -> Option<Self> {
        let caller = caller.as_ref();
        if caller.is_empty() {
            return None;
        }
        escaped(caller).map(Self::from_stored)
    }

    /// Returns the one scope of a service that has a single tenant, whose text is
    /// empty.
    ///
    /// All callers share their keys, and each of them can receive the response to
    /// another's request.
    #[must_use]
    pub fn single_tenant() -> Self {
        Self(None)
    }

    /// Returns this caller's scope at one endpoint, apart from its keys elsewhere.
    ///
    /// Without it, a key that comes back on another endpoint is a mismatch.
    #[must_use]
    pub fn with_endpoint(self, endpoint: impl AsRef<str>) -> Self {
        let (scope, endpoint) = (self.as_str(), endpoint.as_ref());
        Self::from_stored(match escaped(endpoint) {
            Some(endpoint) => format!("{scope}{SEPARATOR}{endpoint}"),
            None => {
                let digest = <sha2::Sha256 as sha2::Digest>::digest(endpoint.as_bytes());
                format!("{scope}{SEPARATOR}%sha256:{}", hex::encode(digest))
            }
        })
    }

    /// Returns the scope with this text, as a store kept it or an operator typed it.
    ///
    /// The text is taken unchanged: nothing is checked or escaped.
    #[must_use]
    pub fn from_stored(text: impl Into<Arc<str>>) -> Self {
        Self(Some(text.into()).filter(|text| !text.is_empty()))
    }

    /// Returns the scope's text, which stores keep.
    #[must_use]
    pub fn as_str(&self) -> &str {
        self.0.as_deref().unwrap_or_default()
    }
}

/// The name as a part of a scope's text; `None` if it is too long or not printable.
fn escaped(name: &str) -> Option<Cow<'_, str>> {
    if name.len() > MAX_PART || name.contains(char::is_control) {
        return None;
    }
    if !name.contains([SEPARATOR, '%']) {
        return Some(name.into());
    }
    let name = name.replace('%', "%25").replace(SEPARATOR, "%7E");
    (name.len() <= MAX_PART).then(|| name.into())
}

impl fmt::Debug for Scope {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Scope({} bytes)", self.as_str().len())
    }
}

/// In bytes, so that a caller and an endpoint have 511.
const MAX_PART: usize = 255;
const SEPARATOR: char = '~';

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_caller_without_a_bounded_printable_name_has_no_scope() {
        assert!(Scope::new("é tenant").is_some());
        assert!(Scope::new("x".repeat(255)).is_some());
        for caller in [
            "",
            "a\nb",
            "a\u{1f}b",
            "\u{0}",
            &"x".repeat(256),
            &"~".repeat(86),
        ] {
            assert!(Scope::new(caller).is_none());
        }
    }

    #[test]
    fn a_scopes_text_is_printable_and_bounded() {
        let at = |caller: &str, endpoint: &str| {
            let scope = Scope::new(caller).unwrap().with_endpoint(endpoint);
            scope.as_str().to_owned()
        };
        assert_eq!(at("acct_42", "POST /payments"), "acct_42~POST /payments");
        assert_eq!(at("auth0|5f", "/a/~b"), "auth0|5f~/a/%7Eb");
        assert_eq!(at("100%", ""), "100%25~");
        let long = at("a", &"x".repeat(256));
        assert!(long.starts_with("a~%sha256:") && long.len() == 74);
        assert!(!at("a", "\u{1f}").contains(char::is_control));
        assert!(at(&"x".repeat(255), &"y".repeat(255)).len() <= 512);
    }

    #[test]
    fn a_stored_scope_reads_back_unchanged() {
        for scope in [
            Scope::single_tenant(),
            Scope::single_tenant().with_endpoint("payments"),
            Scope::new("acct_42").unwrap(),
        ] {
            assert_eq!(Scope::from_stored(scope.as_str()), scope);
        }
    }
}
