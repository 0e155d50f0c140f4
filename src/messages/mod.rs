//! Messages from and to other services, in the transactions of the application.
//!
//! With the feature `inbox`, an `Inbox` lets a consumer process each message once. With
//! the feature `outbox`, an `Outbox` stages events that a `Relay` publishes. The
//! [guide](crate::guide::messages) has the promises, and what a crash after each step
//! means.

mod error;
#[cfg(feature = "outbox")]
mod event;
#[cfg(feature = "inbox")]
mod inbox;
#[cfg(feature = "outbox")]
mod outbox;
#[cfg(feature = "postgres")]
mod postgres;
#[cfg(feature = "outbox")]
mod publishing;
#[cfg(feature = "outbox")]
mod relay;
#[cfg(feature = "outbox")]
mod run;
#[cfg(feature = "outbox")]
mod selection;
#[cfg(feature = "sqlite")]
mod sqlite;

pub use self::error::{MessageError, MessageErrorKind};
#[cfg(feature = "inbox")]
pub use self::inbox::{Delivery, Inbox, InboxStore, Received, SeenMessage};
#[cfg(feature = "outbox")]
pub use self::{
    event::{DeadEvent, Event, Lag},
    outbox::{Outbox, OutboxStore},
    relay::{Attempts, GiveUp, Publish, Relay, RelayHandle, RelayReport},
};

pub(crate) mod sealed {
    use sqlx::Database;

    use crate::transaction::commit::CommitBackend;

    /// A store with a database in which messages can be kept.
    #[expect(private_bounds, reason = "the trait is sealed")]
    pub trait MessageBackend: CommitBackend<Database = Self::Sql> + Clone {
        type Sql: Database;
    }
}

/// A connection of the store's database.
type Connection<S> = <<S as sealed::MessageBackend>::Sql as sqlx::Database>::Connection;

/// Refuses a name that is empty, longer than `max` bytes, or has a NUL.
fn check_name(what: &str, name: &str, max: usize) -> Result<(), MessageError> {
    let bytes = name.len();
    if (1..=max).contains(&bytes) && !name.contains('\0') {
        return Ok(());
    }
    Err(MessageError::invalid(format!(
        "{what} must have 1 to {max} bytes and no NUL, got {bytes} bytes"
    )))
}

/// The counters of the events of an outbox.
#[cfg(feature = "outbox")]
#[derive(Clone, Copy)]
enum Counted {
    Staged,
    Published,
    Retried,
    Dead,
}

#[cfg(feature = "outbox")]
impl Counted {
    fn name(self) -> &'static str {
        match self {
            Self::Staged => "staged",
            Self::Published => "published",
            Self::Retried => "retried",
            Self::Dead => "dead",
        }
    }
}

#[cfg(feature = "outbox")]
fn count(counted: Counted, events: u64) {
    #[cfg(feature = "metrics")]
    metrics::counter!(crate::telemetry::metrics::OUTBOX, "what" => counted.name())
        .increment(events);
    let _ = (counted.name(), events);
}
