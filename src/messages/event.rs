//! An event of the application, from its transaction to the broker.

use std::{fmt, time::Duration};

use bytes::Bytes;

use super::{MessageError, check_name};

/// An event that a transaction stages and a relay publishes.
///
/// Clones share the payload. `Debug` does not show it.
#[derive(Clone, PartialEq, Eq)]
pub struct Event {
    id: String,
    aggregate: String,
    payload: Bytes,
}

/// An event whose publication was given up or rejected, for operators. It and all later
/// events of its aggregate wait for [`requeue`](super::Outbox::requeue) or
/// [`discard`](super::Outbox::discard).
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct DeadEvent {
    /// The event.
    pub event: Event,
    /// How often its publication was tried.
    pub attempts: u32,
    /// How long ago the first attempt was.
    pub failing_for: Duration,
}

/// What waits to be published.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub struct Lag {
    /// All events that are not published, with the dead ones and those behind them.
    pub events: u64,
    /// How long ago the oldest of them was staged, on the clock of the database. Zero if
    /// there is none.
    pub oldest: Duration,
    /// The aggregates whose first event is dead.
    pub dead: u64,
    /// How long ago the oldest other transaction of the database began that has a snapshot or
    /// has written. Until it ends, VACUUM removes none of the rows that relays have deleted
    /// since, and the relays read past them.
    ///
    /// `None` if there is none, and on SQLite. Other roles' transactions are seen by a role
    /// that is a member of `pg_read_all_stats` only.
    pub oldest_snapshot: Option<Duration>,
}

impl Event {
    /// Returns an event of an aggregate: the thing whose events must stay in order, such
    /// as one order or one account.
    ///
    /// The consumer deduplicates by `id`, so it must be the same whenever the same event is
    /// staged again, and different for every other event of the topic. An id that
    /// [`Operation::derive`](crate::Operation::derive) returns is both.
    #[must_use]
    pub fn new(
        id: impl Into<String>,
        aggregate: impl Into<String>,
        payload: impl Into<Bytes>,
    ) -> Self {
        Self {
            id: id.into(),
            aggregate: aggregate.into(),
            payload: payload.into(),
        }
    }

    /// Returns the id, which is also the idempotency key for the consumer.
    #[must_use]
    pub fn id(&self) -> &str {
        &self.id
    }

    /// Returns the aggregate.
    #[must_use]
    pub fn aggregate(&self) -> &str {
        &self.aggregate
    }

    /// Returns the payload.
    #[must_use]
    pub fn payload(&self) -> &Bytes {
        &self.payload
    }

    pub(super) fn check(&self, max_payload: usize) -> Result<(), MessageError> {
        check_name("the id of an event", &self.id, LONGEST_NAME)?;
        check_name("the aggregate of an event", &self.aggregate, LONGEST_NAME)?;
        let bytes = self.payload.len();
        if bytes <= max_payload {
            return Ok(());
        }
        Err(MessageError::invalid(format!(
            "the payload of an event must not exceed `max_payload` ({max_payload} bytes), got \
             {bytes} bytes"
        )))
    }
}

impl fmt::Debug for Event {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Event")
            .field("id", &self.id)
            .field("aggregate", &self.aggregate)
            .field("bytes", &self.payload.len())
            .finish()
    }
}

/// In bytes. Topic, aggregate and id are in one entry of an index.
const LONGEST_NAME: usize = 512;
