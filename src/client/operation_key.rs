//! The key of an operation, chosen by the caller.

use std::fmt;

use http::HeaderValue;
use thiserror::Error;
use uuid::Uuid;

/// The key of one operation, as an extension of its request.
///
/// [`KeyLayer`](super::KeyLayer) sends it, unless the request has the header already. All
/// requests with the same key are attempts of the same operation, also those of another
/// process:
///
/// ```
/// use tower_idempotency::client::OperationKey;
///
/// let order = "order-1042";
/// let mut request = http::Request::post("/payments").body(())?;
/// request.extensions_mut().insert(OperationKey::new(format!("pay-{order}"))?);
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
///
/// `Debug` shows its length alone.
#[derive(Clone, PartialEq, Eq, Hash)]
pub struct OperationKey(HeaderValue);

impl OperationKey {
    /// A key of 1 to 255 visible ASCII characters without `"`, `,`, `;` and `\`, which
    /// services accept with and without quotes.
    ///
    /// # Errors
    ///
    /// If the key is empty, too long or has another character.
    pub fn new(key: impl AsRef<str>) -> Result<Self, InvalidKeyError> {
        let key = key.as_ref();
        if key.is_empty() || key.len() > MAX_LENGTH {
            return Err(InvalidKeyError::Length(key.len()));
        }
        let is_invalid = |c: &u8| !c.is_ascii_graphic() || b"\",;\\".contains(c);
        if let Some(at) = key.bytes().position(|c| is_invalid(&c)) {
            return Err(InvalidKeyError::Character(at));
        }
        let value = HeaderValue::try_from(key);
        value.map(Self).map_err(|_| InvalidKeyError::Character(0))
    }

    /// A new UUID of version 7, which services can tell the age of.
    #[must_use]
    pub fn uuid_v7() -> Self {
        let mut text = [0; uuid::fmt::Hyphenated::LENGTH];
        let text = Uuid::now_v7().hyphenated().encode_lower(&mut text);
        Self(HeaderValue::from_str(text).expect("a UUID is visible ASCII"))
    }

    /// Returns the value of the header, which no log shows.
    pub(super) fn header(&self, is_quoted: bool) -> HeaderValue {
        let mut value = match is_quoted {
            true => {
                let quoted = [b"\"", self.0.as_bytes(), b"\""].concat();
                HeaderValue::try_from(quoted).expect("a key and quotes are visible ASCII")
            }
            false => self.0.clone(),
        };
        value.set_sensitive(true);
        value
    }
}

impl fmt::Debug for OperationKey {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "OperationKey({} bytes)", self.0.len())
    }
}

/// Why a text is no key.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Error)]
#[non_exhaustive]
pub enum InvalidKeyError {
    /// It is empty or too long.
    #[error("a key has 1 to {MAX_LENGTH} characters, got {0} bytes")]
    Length(usize),
    /// The byte at this place is no visible ASCII, or one of `"`, `,`, `;` and `\`.
    #[error("a key has visible ASCII without \" , ; and \\, got another character at byte {0}")]
    Character(usize),
}

const MAX_LENGTH: usize = 255;

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn keys_that_services_refuse_are_refused() {
        for key in ["", &"k".repeat(256)] {
            let length = key.len();
            assert_eq!(OperationKey::new(key), Err(InvalidKeyError::Length(length)));
        }
        for key in ["a b", "a\"", "a,b", "a;b", "a\\b", "a\n", "a\u{e9}"] {
            let place = key.len() - key.trim_start_matches('a').len();
            assert_eq!(
                OperationKey::new(key),
                Err(InvalidKeyError::Character(place)),
                "{key}"
            );
        }
        let key = OperationKey::new("order/1042:pay").unwrap();
        assert_eq!(key.header(false), "order/1042:pay");
        assert_eq!(key.header(true), "\"order/1042:pay\"");
        assert!(!format!("{key:?} {:?}", key.header(true)).contains("1042"));
    }
}
