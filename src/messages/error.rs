//! The error of an inbox and of an outbox.

use std::{error::Error, fmt};

use crate::{
    error::StoreError, transaction::error::CommitError, transaction::kind::CommitErrorKind,
};

/// The error of an inbox or an outbox.
///
/// Its text names the cause, and quotes no id, payload or bound value. `?` converts an
/// [`sqlx::Error`] into it.
#[derive(Clone)]
pub struct MessageError {
    kind: MessageErrorKind,
    text: String,
    cause: Option<CommitError>,
}

/// The kinds of [`MessageError`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum MessageErrorKind {
    /// A name, an id or a payload breaks a limit. Nothing was sent to the database, and
    /// the transaction can be used further.
    Invalid,
    /// The connection has no open transaction, or one that an inbox or outbox cannot
    /// use. The text says how to begin one.
    Transaction,
    /// The aggregate has another payload with the id of an event. That event is not staged,
    /// and the transaction can be used further. Others of the same call may be staged.
    Conflict,
    /// The database cannot be reached, or accepts no statements. Nothing was committed.
    Unavailable,
    /// The transaction was rolled back, or has to be.
    Aborted,
    /// COMMIT was not answered, and its outcome could not be found out in time. Do not
    /// acknowledge the message: its redelivery finds out.
    Unknown,
}

impl MessageError {
    pub(crate) fn new(kind: MessageErrorKind, text: impl Into<String>) -> Self {
        Self {
            kind,
            text: text.into(),
            cause: None,
        }
    }

    pub(super) fn invalid(text: impl Into<String>) -> Self {
        Self::new(MessageErrorKind::Invalid, text)
    }

    /// The connection has no transaction of sqlx.
    pub(super) fn no_transaction() -> Self {
        Self::new(MessageErrorKind::Transaction, NO_TRANSACTION)
    }

    #[cfg(feature = "outbox")]
    pub(crate) fn conflict() -> Self {
        Self::new(MessageErrorKind::Conflict, CONFLICT)
    }

    #[cfg(feature = "postgres")]
    pub(crate) fn with_remedy(mut self, remedy: &str) -> Self {
        self.text = format!("{}: {remedy}", self.text);
        self
    }

    /// Returns the kind.
    #[must_use]
    pub fn kind(&self) -> MessageErrorKind {
        self.kind
    }

    /// Returns the cause, an [`sqlx::Error`] or a [`StoreError`], or `None` if there is
    /// none. An [`sqlx::Error`] may quote values: do not log it.
    #[must_use]
    pub fn get_ref(&self) -> Option<&(dyn Error + Send + Sync + 'static)> {
        self.cause.as_ref()?.get_ref()
    }
}

impl From<CommitError> for MessageError {
    fn from(error: CommitError) -> Self {
        Self {
            kind: match error.kind() {
                CommitErrorKind::Unavailable => MessageErrorKind::Unavailable,
                CommitErrorKind::Unknown => MessageErrorKind::Unknown,
                _ => MessageErrorKind::Aborted,
            },
            text: error.to_string(),
            cause: Some(error),
        }
    }
}

/// A failed statement. Its transaction is rolled back when it is dropped.
impl From<sqlx::Error> for MessageError {
    fn from(error: sqlx::Error) -> Self {
        CommitError::from(error).into()
    }
}

impl From<StoreError> for MessageError {
    fn from(error: StoreError) -> Self {
        CommitError::from(error).into()
    }
}

impl fmt::Debug for MessageError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("MessageError")
            .field("kind", &self.kind)
            .field("text", &self.text)
            .finish()
    }
}

impl fmt::Display for MessageError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.text)
    }
}

impl Error for MessageError {}

const NO_TRANSACTION: &str = "the connection is in no transaction: begin one with sqlx's `begin`, \
    and pass it";
#[cfg(feature = "outbox")]
const CONFLICT: &str = "the aggregate has another event with this id: derive the id from what \
    happened, as `Operation::derive` does";
