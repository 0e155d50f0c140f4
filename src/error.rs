//! The error of a store call.

use std::{error::Error, fmt, sync::Arc};

type Source = Box<dyn Error + Send + Sync>;

/// The error of a store call. The layer answers 503, and never runs a handler
/// whose claim failed.
///
/// Its text names the kind and the cause, with a remedy where there is one. The
/// texts of this crate's stores quote no key, scope, token, response or password.
///
/// Because the text includes that of the cause, [`source`](Error::source) returns
/// the source of the cause, and [`get_ref`](Self::get_ref) the cause itself. So a
/// report of the whole chain names each error once.
#[derive(Clone, Debug)]
pub struct StoreError {
    kind: StoreErrorKind,
    source: Option<Arc<dyn Error + Send + Sync>>,
    #[cfg_attr(
        not(any(feature = "postgres", feature = "sqlite")),
        expect(dead_code, reason = "only the SQL stores make calls together")
    )]
    is_about_one: bool,
    #[cfg(any(feature = "postgres", feature = "sqlite"))]
    was_rolled_back: bool,
    #[cfg(feature = "postgres")]
    lacks_privileges: bool,
    sent_nothing: bool,
}

/// The kinds of [`StoreError`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum StoreErrorKind {
    /// The store could not be reached, or broke off.
    Unavailable,
    /// The store did not answer in time.
    TimedOut,
    /// The store is full. It evicted no record.
    Full,
    /// This version cannot read a record.
    Corrupt,
    /// More calls wait for the store than it lets wait. Nothing was sent to it.
    Overloaded,
}

impl StoreError {
    /// The store could not be reached, or broke off.
    pub fn unavailable(source: impl Into<Source>) -> Self {
        Self::new(StoreErrorKind::Unavailable, Some(source.into()))
    }

    /// The store did not answer in time.
    #[must_use]
    pub fn timed_out() -> Self {
        Self::new(StoreErrorKind::TimedOut, None)
    }

    /// The store is full; `limit` names the limit that was reached.
    #[must_use]
    pub fn full(limit: &'static str) -> Self {
        Self::new(StoreErrorKind::Full, Some(limit.into()))
    }

    /// This version cannot read a record; `what` names the field.
    #[must_use]
    pub fn corrupt(what: &'static str) -> Self {
        Self::new(StoreErrorKind::Corrupt, Some(what.into()))
    }

    /// More calls wait for the store than it lets wait. Nothing was sent to it.
    #[must_use]
    pub fn overloaded() -> Self {
        Self::new(StoreErrorKind::Overloaded, None)
    }

    /// Says that the call failed before any of it was sent. The layer withdraws a
    /// claim without an answer, unless it was not sent.
    ///
    /// A store that makes a call again must not say so if an earlier try was sent.
    /// Always said of [`Overloaded`](StoreErrorKind::Overloaded).
    #[must_use]
    pub fn unsent(mut self) -> Self {
        self.sent_nothing = true;
        self
    }

    /// Whether nothing of the call was sent.
    #[must_use]
    pub fn sent_nothing(&self) -> bool {
        self.sent_nothing || self.kind == StoreErrorKind::Overloaded
    }

    /// Which kind of failure it is.
    #[must_use]
    pub fn kind(&self) -> StoreErrorKind {
        self.kind
    }

    /// Returns the cause, such as what a store passed to
    /// [`unavailable`](Self::unavailable), or `None` if there is none.
    #[must_use]
    pub fn get_ref(&self) -> Option<&(dyn Error + Send + Sync + 'static)> {
        self.source.as_deref()
    }

    /// Of several calls made together, it may be about one: about a value of it
    /// that the database did not take.
    #[cfg(any(feature = "postgres", feature = "sqlite"))]
    pub(crate) fn about_one(mut self) -> Self {
        self.is_about_one = true;
        self
    }

    #[cfg(any(feature = "postgres", feature = "sqlite"))]
    pub(crate) fn is_about_one(&self) -> bool {
        self.is_about_one
    }

    /// The database rolled the call back because of another one, and would make it now.
    #[cfg(feature = "postgres")]
    pub(crate) fn rolled_back(mut self) -> Self {
        self.was_rolled_back = true;
        self
    }

    #[cfg(any(feature = "postgres", feature = "sqlite"))]
    pub(crate) fn was_rolled_back(&self) -> bool {
        self.was_rolled_back
    }

    /// As before, with another cause.
    #[cfg(any(
        feature = "postgres",
        feature = "redis",
        feature = "sealing",
        feature = "sqlite"
    ))]
    pub(crate) fn because(mut self, source: impl Into<Source>) -> Self {
        self.source = Some(Arc::from(source.into()));
        self
    }

    /// The role may not do what the store asks of the database.
    #[cfg(feature = "postgres")]
    pub(crate) fn of_privileges(mut self) -> Self {
        self.lacks_privileges = true;
        self
    }

    /// The text after the kind.
    #[cfg(feature = "postgres")]
    pub(crate) fn cause(&self) -> String {
        self.source
            .as_ref()
            .map(ToString::to_string)
            .unwrap_or_default()
    }

    #[cfg(feature = "postgres")]
    pub(crate) fn lacks_privileges(&self) -> bool {
        self.lacks_privileges
    }

    fn new(kind: StoreErrorKind, source: Option<Source>) -> Self {
        Self {
            kind,
            source: source.map(Arc::from),
            is_about_one: false,
            #[cfg(any(feature = "postgres", feature = "sqlite"))]
            was_rolled_back: false,
            #[cfg(feature = "postgres")]
            lacks_privileges: false,
            sent_nothing: false,
        }
    }
}

impl StoreErrorKind {
    /// A short name for metrics and logs.
    #[must_use]
    pub fn name(self) -> &'static str {
        match self {
            Self::Unavailable => "unavailable",
            Self::TimedOut => "timed-out",
            Self::Full => "full",
            Self::Corrupt => "corrupt",
            Self::Overloaded => "overloaded",
        }
    }
}

impl fmt::Display for StoreError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self.kind {
            StoreErrorKind::Unavailable => "the idempotency store is unavailable",
            StoreErrorKind::TimedOut => "the idempotency store did not answer in time",
            StoreErrorKind::Full => "the idempotency store is full",
            StoreErrorKind::Corrupt => "the idempotency store holds an unreadable record",
            StoreErrorKind::Overloaded => "too many calls wait for the idempotency store",
        })?;
        match &self.source {
            Some(source) => write!(f, ": {source}"),
            None => Ok(()),
        }
    }
}

impl Error for StoreError {
    fn source(&self) -> Option<&(dyn Error + 'static)> {
        self.source.as_ref()?.source()
    }
}
