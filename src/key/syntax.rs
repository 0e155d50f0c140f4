//! The header's syntax and its bounds.

use std::{convert::Infallible, fmt, ops::RangeInclusive, sync::Arc, time::Duration};

use http::{HeaderMap, HeaderName};
use sfv::{
    BareItemFromInput, Parser,
    visitor::{Ignored, parameter_visitor_with},
};
use thiserror::Error;
use tokio::time::Instant;
use uuid::Uuid;

use super::Key;

/// A key as a request brought it.
pub(crate) struct ParsedKey {
    pub(crate) key: Key,
    /// From when on the key may start no run; `None` for keys that always may.
    pub(crate) stale_from: Option<Instant>,
}

/// Which keys a layer accepts.
///
/// ```
/// # use axum::{Router, body::Body, http::{Request, StatusCode}, routing::post};
/// # use tower::ServiceExt;
/// # use tower_idempotency::{IdempotencyLayer, MemoryStore, Scope};
/// use std::time::Duration;
/// use tower_idempotency::KeySyntax;
///
/// # #[tokio::main(flavor = "current_thread")]
/// # async fn main() -> Result<(), Box<dyn std::error::Error>> {
/// // What most services want: quoted or bare, 1 to 255 characters.
/// let lenient = KeySyntax::compat();
/// // Only `"…"`, only UUIDs of version 7 that are at most a day old.
/// let narrow = KeySyntax::strict().uuid_v7(Duration::from_secs(24 * 3600));
/// # for (syntax, bare) in [(lenient, StatusCode::OK), (narrow, StatusCode::BAD_REQUEST)] {
/// #     let layer = IdempotencyLayer::required(MemoryStore::new(), |_| Some(Scope::single_tenant()));
/// #     let app = Router::new().route("/", post(StatusCode::OK).layer(layer.key_syntax(syntax).build()?));
/// #     let request = Request::post("/").header("idempotency-key", "k").body(Body::empty())?;
/// #     assert_eq!(app.oneshot(request).await?.status(), bare);
/// # }
/// # Ok(())
/// # }
/// ```
#[derive(Clone)]
pub struct KeySyntax {
    bare: bool,
    length: RangeInclusive<usize>,
    form: Form,
    validator: Option<Validator>,
}

type Validator = Arc<dyn Fn(&str) -> bool + Send + Sync>;

#[derive(Clone, Copy, Debug)]
enum Form {
    Opaque,
    Uuid,
    UuidV7 { window: Duration },
}

impl KeySyntax {
    /// Accepts a structured-field String (`"8e03978e-…"`, RFC 9651 §3.3.3) and
    /// the same key without its quotes: visible ASCII but `"` `,` `;` `\`.
    /// Parameters after a quoted key are ignored.
    #[must_use]
    pub fn compat() -> Self {
        Self {
            bare: true,
            length: DEFAULT_LENGTH,
            form: Form::Opaque,
            validator: None,
        }
    }

    /// Accepts a quoted structured-field String only, as the draft has it.
    #[must_use]
    pub fn strict() -> Self {
        Self {
            bare: false,
            ..Self::compat()
        }
    }

    /// How many characters a decoded key may have.
    ///
    /// The upper bound may not exceed 1,024, which every store can index.
    /// Defaults to `1..=255`.
    #[must_use]
    pub fn length(mut self, characters: RangeInclusive<usize>) -> Self {
        self.length = characters;
        self
    }

    /// Accepts UUIDs of any version only, in their hyphenated form. The nil and
    /// the max UUID are refused: neither names anything. Upper and lower case are
    /// the same key. Defaults to any text.
    #[must_use]
    pub fn uuid(mut self) -> Self {
        self.form = Form::Uuid;
        self
    }

    /// As [`uuid`](Self::uuid), but accepts UUIDs of version 7 only, and runs
    /// nothing for one whose timestamp is `window` old or older.
    ///
    /// A record of such a key answers it as any other: with a replay, or with 409
    /// while the first request is in progress or its outcome is unknown. Where the
    /// request would have to run, because the record is absent, released or
    /// expired, it is answered 400 `key-stale`. So a key whose record has expired
    /// never runs its operation again. A layer therefore refuses to be built with a
    /// window longer than one of its retentions. A retention that the handler
    /// shortens is not checked.
    ///
    /// The age is measured on this host's wall clock. A timestamp may lie in the
    /// future by up to a minute, or by a tenth of the window if that is shorter. A
    /// later timestamp is refused as invalid. The window ends earlier by twice that
    /// time: once for such timestamps, and once because the clocks of the hosts and of
    /// the store may differ by as much. If they differ by more, choose a retention that
    /// is longer than the window by the difference. Defaults to any text.
    #[must_use]
    pub fn uuid_v7(mut self, window: Duration) -> Self {
        self.form = Form::UuidV7 { window };
        self
    }

    /// Accepts only keys for which `accepts` is true, after all other checks.
    /// Defaults to accepting all.
    #[must_use]
    pub fn validate(mut self, accepts: impl Fn(&str) -> bool + Send + Sync + 'static) -> Self {
        self.validator = Some(Arc::new(accepts));
        self
    }

    /// The fault of this configuration, if it has one.
    pub(crate) fn fault(&self) -> Option<&'static str> {
        let (shortest, longest) = (*self.length.start(), *self.length.end());
        if shortest == 0 {
            Some("must allow keys of at least 1 character")
        } else if longest < shortest {
            Some("must have a longest key that is not shorter than its shortest")
        } else if longest > LONGEST_KEY {
            Some("must allow keys of at most 1024 characters")
        } else if matches!(self.form, Form::UuidV7 { window } if window.is_zero()) {
            Some("must have a window of UUIDv7 keys that is longer than zero")
        } else {
            None
        }
    }

    /// For how long after it was made a key may start a run, if that is bounded.
    pub(crate) fn window(&self) -> Option<Duration> {
        match self.form {
            Form::UuidV7 { window } => Some(window),
            Form::Opaque | Form::Uuid => None,
        }
    }

    /// Reads the key from the request's headers. `Ok(None)`: there is none.
    pub(crate) fn read(
        &self,
        headers: &HeaderMap,
        name: &HeaderName,
    ) -> Result<Option<ParsedKey>, KeyFault> {
        let mut lines = headers.get_all(name).iter();
        let Some(line) = lines.next() else {
            return Ok(None);
        };
        if lines.next().is_some() {
            return Err(KeyFault::invalid("it was sent on more than one line"));
        }
        self.parse(line.as_bytes()).map(Some)
    }

    fn parse(&self, value: &[u8]) -> Result<ParsedKey, KeyFault> {
        // The longest spelling of an acceptable key: every character escaped,
        // the quotes, and some room for parameters.
        let longest_line = 2 * self.length.end() + 2 + PARAMETER_ROOM;
        if value.len() > longest_line {
            return Err(KeyFault::Length {
                allowed: self.length.clone(),
                got: value.len(),
            });
        }
        let value = without_spaces(value);
        let key = match value.first() {
            None => return Err(KeyFault::invalid("it is empty")),
            Some(b'"') => quoted(value)?,
            Some(_) if self.bare => bare(value)?,
            Some(_) => return Err(KeyFault::invalid("it is not a quoted string")),
        };
        if !self.length.contains(&key.len()) {
            return Err(KeyFault::Length {
                allowed: self.length.clone(),
                got: key.len(),
            });
        }
        let parsed = self.in_form(key)?;
        if self
            .validator
            .as_ref()
            .is_some_and(|accepts| !accepts(parsed.key.as_str()))
        {
            return Err(KeyFault::invalid("this service does not accept its form"));
        }
        Ok(parsed)
    }

    fn in_form(&self, key: Arc<str>) -> Result<ParsedKey, KeyFault> {
        let mut parsed = ParsedKey {
            key: Key(key),
            stale_from: None,
        };
        if matches!(self.form, Form::Opaque) {
            return Ok(parsed);
        }
        let uuid = hyphenated(parsed.key.as_str())?;
        if parsed.key.0.bytes().any(|byte| byte.is_ascii_uppercase()) {
            parsed.key = Key(parsed.key.0.to_ascii_lowercase().into());
        }
        let Form::UuidV7 { window } = self.form else {
            return Ok(parsed);
        };
        let made_at = uuid
            .get_timestamp()
            .filter(|_| uuid.get_version_num() == 7)
            .ok_or(KeyFault::invalid("it is not a UUID of version 7"))?
            .to_unix();
        let made_at = Duration::new(made_at.0, made_at.1);
        let now = std::time::SystemTime::now()
            .duration_since(std::time::UNIX_EPOCH)
            .unwrap_or_default();
        let tolerance = CLOCK_TOLERANCE.min(window / 10);
        if made_at > now + tolerance {
            return Err(KeyFault::invalid("its timestamp lies in the future"));
        }
        // A key must not outlive its record: neither one of a client's clock that is ahead,
        // nor on a host whose clock is behind that of the store.
        let left = (window - 2 * tolerance).saturating_sub(now.saturating_sub(made_at));
        parsed.stale_from = Some(Instant::now() + left);
        Ok(parsed)
    }
}

impl Default for KeySyntax {
    fn default() -> Self {
        Self::compat()
    }
}

impl fmt::Debug for KeySyntax {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("KeySyntax")
            .field("bare", &self.bare)
            .field("length", &self.length)
            .field("form", &self.form)
            .field("validator", &self.validator.is_some())
            .finish()
    }
}

/// The reason why a header is not a key. Never contains the header's value.
#[derive(Clone, Debug, Error)]
pub(crate) enum KeyFault {
    #[error("{0}")]
    Invalid(&'static str),
    #[error("a key has {} to {} characters, and this one has {got}", allowed.start(), allowed.end())]
    Length {
        allowed: RangeInclusive<usize>,
        got: usize,
    },
}

impl KeyFault {
    const fn invalid(reason: &'static str) -> Self {
        Self::Invalid(reason)
    }
}

/// What HTTP or a structured field allows around a value, but for tabs: RFC 9651
/// has spaces alone.
fn without_spaces(value: &[u8]) -> &[u8] {
    let is_other = |byte: &u8| *byte != b' ';
    let start = value.iter().position(is_other).unwrap_or(value.len());
    let end = value
        .iter()
        .rposition(is_other)
        .map_or(start, |last| last + 1);
    &value[start..end]
}

fn quoted(value: &[u8]) -> Result<Arc<str>, KeyFault> {
    let string = |item: BareItemFromInput<'_>| {
        let string = match item {
            BareItemFromInput::String(string) => Some(Arc::<str>::from(string.as_str())),
            _ => None,
        };
        Ok::<_, Infallible>(parameter_visitor_with(Ignored, |_| Ok(string)))
    };
    match Parser::new(value).parse_item_with_visitor(string) {
        Ok(Some(key)) => Ok(key),
        Ok(None) | Err(_) => Err(KeyFault::invalid("it is not one structured-field string")),
    }
}

fn bare(value: &[u8]) -> Result<Arc<str>, KeyFault> {
    let plain = |byte: &u8| byte.is_ascii_graphic() && !matches!(byte, b'"' | b',' | b';' | b'\\');
    std::str::from_utf8(value)
        .ok()
        .filter(|key| key.as_bytes().iter().all(plain))
        .map(Arc::from)
        .ok_or(KeyFault::invalid(
            "an unquoted key is visible ASCII without quote, comma, semicolon or backslash",
        ))
}

fn hyphenated(key: &str) -> Result<Uuid, KeyFault> {
    const HYPHENATED: usize = 36;
    Some(key)
        .filter(|key| key.len() == HYPHENATED)
        .and_then(|key| Uuid::try_parse(key).ok())
        .ok_or(KeyFault::invalid("it is not a UUID"))
        .and_then(|uuid| match uuid.is_nil() || uuid.is_max() {
            true => Err(KeyFault::invalid(
                "it is the nil or the max UUID, which is not unique",
            )),
            false => Ok(uuid),
        })
}

/// The header of the IETF draft.
pub(crate) const HEADER: HeaderName = HeaderName::from_static("idempotency-key");
const DEFAULT_LENGTH: RangeInclusive<usize> = 1..=255;
const LONGEST_KEY: usize = 1024;
const PARAMETER_ROOM: usize = 256;
/// By how much two clocks may differ.
const CLOCK_TOLERANCE: Duration = Duration::from_secs(60);
