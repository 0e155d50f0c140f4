//! Events that are published if and only if their transaction commits.

#[cfg(feature = "postgres")]
mod postgres;
#[cfg(feature = "sqlite")]
mod sqlite;

use std::{fmt, time::Duration};

use sqlx::Connection as _;

use super::{Connection, DeadEvent, Event, Lag, MessageError, check_name};
use crate::{error::StoreError, store::Token};

/// The events of one topic, staged in the transactions of the application.
///
/// **Promised.** An event is published if its transaction commits, and never if it rolls
/// back. It is published at least once, by a [`Relay`](super::Relay). The first
/// deliveries of one aggregate come in the order in which the transactions committed. A
/// repeated delivery has the same id, so that the consumer's [`Inbox`] absorbs it.
/// **Not promised:** an order between aggregates.
///
/// [`Inbox`]: crate::guide::messages
///
/// | a process dies | the event |
/// |---|---|
/// | before COMMIT | is not there |
/// | after COMMIT | is pending |
/// | while a relay has its aggregate | is published by another relay, after the lease |
/// | after it was published, before that was settled | is published again |
///
/// [`migrate`](Self::migrate) makes the tables. They are empty once all is published.
#[derive(Clone)]
pub struct Outbox<S> {
    pub(crate) store: S,
    pub(super) topic: String,
    max_payload: usize,
    /// Whether relays of other processes are notified.
    pub(crate) notifies: bool,
}

/// A store that has an outbox: `PostgresStore` and `SqliteStore`. The trait is sealed.
pub trait OutboxStore: sealed::OutboxBackend {}

impl<S: sealed::OutboxBackend> OutboxStore for S {}

pub(super) mod sealed {
    use super::*;
    use crate::{messages::sealed::MessageBackend, store::sql::wake::Wake};

    /// The database's part in an outbox.
    pub trait OutboxBackend: MessageBackend {
        fn migrate(&self) -> impl Future<Output = Result<(), StoreError>> + Send;

        fn schema_sql(&self) -> String;

        /// Stages events of one aggregate, and returns how many are new.
        fn stage(
            &self,
            on: &mut Connection<Self>,
            topic: &str,
            aggregate: &str,
            events: &[Event],
        ) -> impl Future<Output = Result<u64, MessageError>> + Send;

        /// Takes up to `limit` due turns, each with up to [`events_each`] of its events.
        /// Their payloads have up to `max_bytes`, or there is one event.
        fn take(
            &self,
            topic: &str,
            token: Token,
            limit: u32,
            max_bytes: u64,
            lease: Duration,
        ) -> impl Future<Output = Result<Vec<Turn>, StoreError>> + Send;

        /// Ends turns whose token is the last one. Returns their aggregates.
        fn settle(
            &self,
            topic: &str,
            settlements: &[Settlement],
        ) -> impl Future<Output = Result<Vec<String>, StoreError>> + Send;

        fn dead(
            &self,
            topic: &str,
            limit: u32,
        ) -> impl Future<Output = Result<Vec<DeadEvent>, StoreError>> + Send;

        /// Lets relays take the aggregate of a dead event again, without the event if it
        /// is discarded.
        fn revive(
            &self,
            topic: &str,
            id: &str,
            discards: bool,
        ) -> impl Future<Output = Result<bool, StoreError>> + Send;

        fn lag(&self, topic: &str) -> impl Future<Output = Result<Lag, StoreError>> + Send;

        fn wake(&self) -> &Wake;

        /// Wakes the relays of other processes soon, if the store can.
        fn notify_others(&self) {}

        /// Wakes the relays of this process when another one has notified them. Never
        /// returns.
        fn listen(self) -> impl Future<Output = ()> + Send + 'static {
            std::future::pending()
        }
    }

    /// Returns how many events of each turn are read: few commits for many events, and
    /// a single aggregate is not slower than many.
    pub(crate) fn events_each(limit: u32, turns: usize) -> usize {
        const FEWEST: usize = 10;
        (limit as usize / turns.max(1)).max(FEWEST)
    }

    /// The turn of an aggregate that a relay has taken.
    #[derive(Debug)]
    pub struct Turn {
        pub(crate) aggregate: String,
        /// Attempts to publish the first event, with this one.
        pub(crate) attempts: u32,
        pub(crate) failing_for: Duration,
        /// With their positions.
        pub(crate) events: Vec<(i64, Event)>,
        /// Whether these are all events of the aggregate.
        pub(crate) is_whole: bool,
    }

    /// The end of a turn.
    #[derive(Clone, Debug)]
    pub struct Settlement {
        pub(crate) aggregate: String,
        pub(crate) token: Token,
        /// The position of the last event that was published. Zero if none was.
        pub(crate) through: i64,
        /// Attempts to publish the first event that is left.
        pub(crate) attempts: u32,
        /// Until the turn is due again. `None` if the first event is dead.
        pub(crate) pause: Option<Duration>,
        /// Whether all events of the aggregate are published, unless more were staged.
        pub(crate) is_all: bool,
    }
}

impl<S: OutboxStore> Outbox<S> {
    pub(crate) fn new(store: S, topic: &str) -> Result<Self, MessageError> {
        check_name("the name of a topic", topic, LONGEST_TOPIC)?;
        Ok(Self {
            store,
            topic: topic.to_owned(),
            max_payload: 1 << 20,
            notifies: false,
        })
    }

    /// Sets the limit of a payload, in bytes. Defaults to 1 MiB.
    ///
    /// A relay has several events in memory, up to its own
    /// [limit](super::Relay::max_buffered_bytes).
    #[must_use]
    pub fn max_payload(mut self, bytes: usize) -> Self {
        self.max_payload = bytes;
        self
    }

    /// Makes the tables of the outbox, if they do not exist: `idempotency_streams`,
    /// `idempotency_events` and `idempotency_turns`. All topics share them.
    ///
    /// Safe from several processes at once. A crash leaves all of them made or none. The
    /// store's own `migrate` is for records, and need not be called.
    ///
    /// # Errors
    ///
    /// If the database cannot be reached, or does not let the role make a table.
    pub async fn migrate(&self) -> Result<(), StoreError> {
        self.store.migrate().await
    }

    /// Returns the statements that make the tables, for the application's own migrations.
    #[must_use]
    pub fn schema_sql(&self) -> String {
        self.store.schema_sql()
    }

    /// Stages an event in a transaction of the application.
    ///
    /// An event that is staged already, with the same id and payload, is not changed. After
    /// it was published it is gone, and is staged anew.
    ///
    /// **Stage last.** Until the transaction ends, no other one can stage an event of the
    /// same aggregate. Two transactions that stage events of two aggregates in opposite
    /// order wait for each other, and the database ends one of them: use
    /// [`stage_all`](Self::stage_all).
    ///
    /// # Errors
    ///
    /// [`Invalid`](super::MessageErrorKind::Invalid) for a payload beyond
    /// [`max_payload`](Self::max_payload), and for an id or aggregate that is empty, longer
    /// than 512 bytes, or has a NUL. [`Conflict`](super::MessageErrorKind::Conflict) if the
    /// aggregate has another payload with this id.
    /// [`Transaction`](super::MessageErrorKind::Transaction) without a transaction. The
    /// transaction stays usable after these. Otherwise the error of the statement.
    pub async fn stage(
        &self,
        transaction: &mut Connection<S>,
        event: Event,
    ) -> Result<(), MessageError> {
        self.stage_all(transaction, vec![event]).await
    }

    /// Stages several events. Those of one aggregate keep their order.
    ///
    /// The aggregates are locked in their byte order, so that two such calls never wait for
    /// each other in a circle.
    ///
    /// # Errors
    ///
    /// As for [`stage`](Self::stage). After a conflict, others of the events may be staged:
    /// roll back.
    pub async fn stage_all(
        &self,
        transaction: &mut Connection<S>,
        mut events: Vec<Event>,
    ) -> Result<(), MessageError> {
        for event in &events {
            event.check(self.max_payload)?;
        }
        if !transaction.is_in_transaction() {
            return Err(MessageError::no_transaction());
        }
        events.sort_by(|one, other| one.aggregate().cmp(other.aggregate()));
        let mut staged = 0;
        for events in events.chunk_by(|one, other| one.aggregate() == other.aggregate()) {
            let aggregate = events[0].aggregate();
            let stage = self
                .store
                .stage(transaction, &self.topic, aggregate, events);
            staged += stage.await?;
        }
        self.store.wake().staged(self.notifies);
        super::count(super::Counted::Staged, staged);
        Ok(())
    }

    /// Wakes the relays of this process, which otherwise look for events by
    /// [polling](super::Relay::poll). Call it after COMMIT. The store's own `commit` does.
    pub fn wake(&self) {
        self.store.wake().wake();
        if self.notifies {
            self.store.notify_others();
        }
    }

    /// Returns up to `limit` dead events, at most one of each aggregate, in the byte order
    /// of the aggregates. For operators.
    ///
    /// # Errors
    ///
    /// If the database cannot be reached.
    pub async fn dead(&self, limit: u32) -> Result<Vec<DeadEvent>, StoreError> {
        self.store.dead(&self.topic, limit.max(1)).await
    }

    /// Lets relays publish a dead event again, with no attempts counted, and then those
    /// behind it. Returns false if no dead event has this id. For operators.
    ///
    /// # Errors
    ///
    /// If the database cannot be reached. Calling again is safe.
    pub async fn requeue(&self, id: &str) -> Result<bool, StoreError> {
        self.revive(id, false).await
    }

    /// Removes a dead event **without publishing it**, and lets relays publish those behind
    /// it. Returns false if no dead event has this id. For operators.
    ///
    /// # Errors
    ///
    /// If the database cannot be reached. Calling again is safe.
    pub async fn discard(&self, id: &str) -> Result<bool, StoreError> {
        self.revive(id, true).await
    }

    async fn revive(&self, id: &str, discards: bool) -> Result<bool, StoreError> {
        let revived = self.store.revive(&self.topic, id, discards).await?;
        self.wake();
        Ok(revived)
    }

    /// Returns how much waits to be published: numbers to alert on. Reads all pending
    /// events.
    ///
    /// # Errors
    ///
    /// If the database cannot be reached.
    pub async fn lag(&self) -> Result<Lag, StoreError> {
        self.store.lag(&self.topic).await
    }
}

impl<S> fmt::Debug for Outbox<S> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Outbox")
            .field("topic", &self.topic)
            .field("max_payload", &self.max_payload)
            .field("notifies", &self.notifies)
            .finish_non_exhaustive()
    }
}

/// In bytes.
const LONGEST_TOPIC: usize = 255;
