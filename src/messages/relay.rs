//! Publishes the events of an outbox.

use std::{
    fmt,
    sync::{
        Arc,
        atomic::{AtomicU64, Ordering},
    },
    time::Duration,
};

use tokio::{
    sync::watch,
    task::{JoinHandle, JoinSet},
    time,
};

use super::{
    Event, Outbox, OutboxStore,
    publishing::{Counts, Publishing},
    run::{BatchSize, Run},
};
use crate::telemetry::log::{self, LogLimit, Warnings};

/// A task that publishes the events of an [`Outbox`].
///
/// Any number of relays, in any number of processes, may share a topic. A relay takes
/// whole aggregates, each for a lease, and publishes the events of one in order.
/// Aggregates are independent of each other. It publishes outside of any transaction.
///
/// ```
/// use std::time::Duration;
/// use tower_idempotency::{
///     SqliteStore,
///     messages::{Event, Publish, Relay},
/// };
/// # use tower_idempotency::sqlx::{self, Connection};
///
/// # #[tokio::main(flavor = "current_thread")]
/// # async fn main() -> Result<(), Box<dyn std::error::Error>> {
/// # let file = std::env::temp_dir().join(format!("relay-{}.db", std::process::id()));
/// # let _ = std::fs::remove_file(&file);
/// # let store = SqliteStore::open(&file).await?;
/// # let mut connection = sqlx::SqliteConnection::connect(file.to_str().unwrap()).await?;
/// # let (sent, mut published) = tokio::sync::mpsc::unbounded_channel();
/// let outbox = store.outbox("orders")?;
/// outbox.migrate().await?;
/// let relay = Relay::new(outbox.clone(), move |event: Event| {
///     let sent = sent.clone(); // a client of the broker
///     async move {
///         match sent.send(event) {
///             Ok(()) => Publish::Done,
///             Err(_) => Publish::Retry,
///         }
///     }
/// })
/// .spawn();
///
/// let mut transaction = connection.begin_with("BEGIN IMMEDIATE").await?;
/// // … the writes of the application …
/// let event = Event::new("event 1", "order 7", "12 pens");
/// outbox.stage(&mut transaction, event.clone()).await?;
/// transaction.commit().await?;
/// outbox.wake();
///
/// assert_eq!(published.recv().await, Some(event));
/// let report = relay.stop(Duration::from_secs(25)).await;
/// assert_eq!(report.published, 1);
/// # std::fs::remove_file(&file)?;
/// # Ok(())
/// # }
/// ```
#[must_use = "a relay does nothing until it is spawned"]
pub struct Relay<S, P> {
    outbox: Outbox<S>,
    publish: P,
    batch: u32,
    max_buffered_bytes: usize,
    lease: Duration,
    poll: Duration,
    give_up: GiveUp,
}

/// The result of an attempt to publish an event.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[must_use]
pub enum Publish {
    /// The broker has it. The event is removed.
    Done,
    /// Try again after a pause: the broker cannot be reached, or is not sure. Later events
    /// of the aggregate wait.
    Retry,
    /// The event can never be published. It is dead at once, and later events of the
    /// aggregate wait for an operator.
    Reject,
}

/// How many attempts an event has at least, before it is given up.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Attempts(pub u32);

/// When an event that cannot be published is dead.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct GiveUp {
    attempts: u32,
    age: Duration,
}

impl Attempts {
    /// Gives up after these attempts if the first was longer ago than `age`.
    ///
    /// Both must hold. Attempts alone would turn an outage of the broker into dead events,
    /// and age alone an outage of the relays.
    #[must_use]
    pub fn and_older_than(self, age: Duration) -> GiveUp {
        let Self(attempts) = self;
        GiveUp { attempts, age }
    }
}

impl GiveUp {
    pub(super) fn is_reached(self, attempts: u32, failing_for: Duration) -> bool {
        attempts >= self.attempts.max(1) && failing_for >= self.age
    }
}

impl<S, P, F> Relay<S, P>
where
    S: OutboxStore,
    P: Fn(Event) -> F + Send + Sync + 'static,
    F: Future<Output = Publish> + Send + 'static,
{
    /// Returns a relay of the outbox's topic, which publishes with `publish`.
    ///
    /// If `publish` panics, or takes longer than a third of the lease, that counts as
    /// [`Publish::Retry`]. In the latter case its future is dropped.
    pub fn new(outbox: Outbox<S>, publish: P) -> Self {
        Self {
            outbox,
            publish,
            batch: 100,
            max_buffered_bytes: 64 << 20,
            lease: Duration::from_secs(30),
            poll: Duration::from_millis(250),
            give_up: Attempts(20).and_older_than(Duration::from_secs(24 * 3600)),
        }
    }

    /// Sets how many aggregates the relay publishes at the same time, at least 1. Defaults
    /// to 100.
    ///
    /// It reads up to ten events of each, or more of each if few aggregates have events,
    /// within [`max_buffered_bytes`](Self::max_buffered_bytes).
    ///
    /// If the database does not return a batch in time, the next one is half as large.
    pub fn batch(mut self, aggregates: u32) -> Self {
        self.batch = aggregates.max(1);
        self
    }

    /// Sets the limit of the payloads that the relay has in memory, in bytes. Defaults to
    /// 64 MiB.
    ///
    /// The relay reads no events while more than half of the limit is in use. The next event
    /// may exceed the limit, so that a larger payload is published too.
    pub fn max_buffered_bytes(mut self, bytes: usize) -> Self {
        self.max_buffered_bytes = bytes;
        self
    }

    /// Sets for how long the relay takes an aggregate, from 100 ms to a day. Defaults to
    /// 30 s.
    ///
    /// After a crash, others publish the aggregate's events when the lease has ended. No
    /// publication begins in its last third.
    pub fn lease(mut self, lease: Duration) -> Self {
        self.lease = lease.clamp(SHORTEST_LEASE, LONGEST_LEASE);
        self
    }

    /// Sets how often the relay looks for events that it was not
    /// [woken](Outbox::wake) for: those that other processes staged, and those to be tried
    /// again. Defaults to 250 ms.
    pub fn poll(mut self, interval: Duration) -> Self {
        self.poll = interval.max(SHORTEST_POLL);
        self
    }

    /// Sets when an event is dead: it and all later events of its aggregate then wait for
    /// an operator. Defaults to 20 attempts, of which the first was more than 24 hours ago.
    ///
    /// An attempt is followed by a pause of one second, which doubles up to a minute.
    pub fn give_up(mut self, give_up: GiveUp) -> Self {
        self.give_up = give_up;
        self
    }

    /// Starts publishing.
    ///
    /// # Panics
    ///
    /// Outside a Tokio runtime.
    pub fn spawn(self) -> RelayHandle {
        #[cfg(feature = "metrics")]
        crate::telemetry::metrics::describe();
        let stop = watch::Sender::new(false);
        let counts = Arc::<Counts>::default();
        let run = Run {
            publishing: Arc::new(Publishing {
                publish: self.publish,
                timeout: self.lease / 3,
                give_up: self.give_up,
                stop: stop.subscribe(),
                counts: Arc::clone(&counts),
                warnings: Warnings::default(),
            }),
            outbox: self.outbox,
            batch: self.batch as usize,
            max_buffered: self.max_buffered_bytes as u64,
            buffered: Arc::default(),
            size: BatchSize::default(),
            lease: self.lease,
            poll: self.poll,
            is_staging: false,
            tasks: JoinSet::new(),
            ended: Vec::new(),
            failures: LogLimit::new(),
        };
        let task = tokio::spawn(log::catch_panic(run.run(), PANICKED));
        RelayHandle { stop, counts, task }
    }
}

/// Stops a relay. Dropping it stops the relay too, after the publications under way.
#[derive(Debug)]
#[must_use = "the relay stops when its handle is dropped"]
pub struct RelayHandle {
    stop: watch::Sender<bool>,
    counts: Arc<Counts>,
    /// Returns `None` after a panic.
    task: JoinHandle<Option<()>>,
}

/// What a relay did since it started.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub struct RelayReport {
    /// Events published, each settled or still to be published again.
    pub published: u64,
    /// Attempts that failed.
    pub retried: u64,
    /// Events that were given up or rejected.
    pub dead: u64,
    /// Whether the timeout passed before the last publications ended, or the relay has
    /// panicked. These events are published again after their lease.
    pub is_broken_off: bool,
}

impl RelayHandle {
    /// Takes no more events, lets the publications under way end, and settles them. Breaks
    /// them off after `timeout`.
    pub async fn stop(mut self, timeout: Duration) -> RelayReport {
        self.stop.send_replace(true);
        let ended = time::timeout(timeout, &mut self.task).await;
        let is_broken_off = !matches!(ended, Ok(Ok(Some(()))));
        self.task.abort();
        let Counts {
            published,
            retried,
            dead,
        } = &*self.counts;
        let of = |count: &AtomicU64| count.load(Ordering::Relaxed);
        RelayReport {
            published: of(published),
            retried: of(retried),
            dead: of(dead),
            is_broken_off,
        }
    }
}

impl Drop for RelayHandle {
    fn drop(&mut self) {
        self.stop.send_replace(true);
    }
}

impl<S, P> fmt::Debug for Relay<S, P> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Relay")
            .field("outbox", &self.outbox)
            .field("batch", &self.batch)
            .field("max_buffered_bytes", &self.max_buffered_bytes)
            .field("lease", &self.lease)
            .field("poll", &self.poll)
            .field("give_up", &self.give_up)
            .finish_non_exhaustive()
    }
}

const PANICKED: &str = "relay panicked and has ended, its events wait for another relay: restart the \
    process";
const SHORTEST_LEASE: Duration = Duration::from_millis(100);
const LONGEST_LEASE: Duration = Duration::from_secs(24 * 3600);
const SHORTEST_POLL: Duration = Duration::from_millis(1);
