//! Which messages a consumer has processed.

#[cfg(feature = "postgres")]
mod postgres;
mod sealed;
#[cfg(feature = "sqlite")]
mod sqlite;

use std::{collections::HashSet, fmt, time::Duration};

use sqlx::{Connection as _, Transaction};
use tokio::time::{self, Instant};

use self::sealed::Unseen;
use super::{Connection, MessageError, check_name};
use crate::{
    error::StoreError,
    runtime::backoff::Backoff,
    store::{Purged, Sweep, Token, sql::detached},
    telemetry::log::Warnings,
    transaction::{
        commit::{ENDED, NOT_ROLLED_BACK, TASK_ENDED, send_commit},
        error::CommitError,
        kind::CommitErrorKind,
    },
};

/// The messages that one consumer has processed.
///
/// A broker delivers a message again whenever it has seen no acknowledgement. An inbox
/// marks its id in the transaction of the consumer's writes, so that these are made once.
///
/// **Promised.** The mark and the writes are committed together, or not at all. If the
/// same message is delivered twice at once, the second delivery waits for the first. It is
/// a [`Repeat`](Delivery::Repeat) if the first commits, and a [`First`](Delivery::First)
/// if it rolls back. **Not promised:** effects outside of the database, and the order of
/// messages.
///
/// | the consumer dies | the redelivery is |
/// |---|---|
/// | before COMMIT | `First`: nothing was written |
/// | after COMMIT, before the acknowledgement | `Repeat`: acknowledge it |
/// | while COMMIT is on its way | what the database says: `First` or `Repeat` |
///
/// The table is made by [`migrate`](Self::migrate). A mark is kept for the
/// [`retention`](Self::retention), and then removed by a [`Sweeper`](crate::Sweeper) of
/// the inbox: `Sweeper::new(inbox)`. A message that arrives after that is `First` again.
///
/// ```
/// use tower_idempotency::{SqliteStore, messages::{MessageError, Received}, sqlx};
///
/// # #[tokio::main(flavor = "current_thread")]
/// # async fn main() -> Result<(), Box<dyn std::error::Error>> {
/// # let file = std::env::temp_dir().join(format!("inbox-{}.db", std::process::id()));
/// # let _ = std::fs::remove_file(&file);
/// let store = SqliteStore::open(&file).await?;
/// let inbox = store.inbox("billing")?;
/// inbox.migrate().await?;
/// # let mut shop = <sqlx::SqliteConnection as sqlx::Connection>::connect(file.to_str().unwrap()).await?;
/// # sqlx::raw_sql("CREATE TABLE invoices (text TEXT)").execute(&mut shop).await?;
///
/// let mut deliveries = Vec::new();
/// for _ in 0..2 {
///     let received = inbox.receive("message 1", async |transaction| {
///         sqlx::query("INSERT INTO invoices VALUES ('12 pens')")
///             .execute(&mut *transaction)
///             .await?;
///         Ok::<_, MessageError>("invoice 7")
///     });
///     deliveries.push(received.await?);
///     // … acknowledge the message …
/// }
/// assert_eq!(deliveries, [Received::First("invoice 7"), Received::Repeat]);
/// # let invoices: i64 = sqlx::query_scalar("SELECT count(*) FROM invoices").fetch_one(&mut shop).await?;
/// # assert_eq!(invoices, 1);
/// # std::fs::remove_file(&file)?;
/// # Ok(())
/// # }
/// ```
#[derive(Clone)]
pub struct Inbox<S> {
    pub(crate) store: S,
    consumer: String,
    retention: Duration,
    warnings: Warnings,
}

/// Whether a message was seen before.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[must_use = "a repeated message must not be processed again"]
pub enum Delivery {
    /// It was not. Process the message in this transaction.
    First,
    /// It was: a committed transaction has marked it. Acknowledge the message.
    Repeat,
}

/// What [`Inbox::receive`] did. Acknowledge the message in either case.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[must_use = "`Repeat` did not run the work"]
pub enum Received<T> {
    /// The work ran, and is committed.
    First(T),
    /// The message was processed before, and the work did not run.
    Repeat,
}

/// A message that was processed, for operators.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct SeenMessage {
    /// The id of the message.
    pub id: String,
    /// How long ago it was marked, on the clock of the database.
    pub age: Duration,
}

/// A store that has an inbox: `PostgresStore` and `SqliteStore`. The trait is sealed.
pub trait InboxStore: sealed::InboxBackend {}

impl<S: sealed::InboxBackend> InboxStore for S {}

impl<S: InboxStore> Inbox<S> {
    pub(crate) fn new(store: S, consumer: &str) -> Result<Self, MessageError> {
        check_name("the name of a consumer", consumer, LONGEST_CONSUMER)?;
        Ok(Self {
            store,
            consumer: consumer.to_owned(),
            retention: Duration::from_secs(14 * 24 * 3600),
            warnings: Warnings::default(),
        })
    }

    /// Sets how long a message is remembered, from when it is marked. Defaults to 14
    /// days.
    ///
    /// A broker that delivers a message after that delivers it for the first time, so make
    /// it longer than the longest time in which it may do so. Marks that were made before
    /// keep their time.
    #[must_use]
    pub fn retention(mut self, retention: Duration) -> Self {
        self.retention = retention;
        self
    }

    /// Makes the table of the inbox, `idempotency_messages`, if it does not exist. All
    /// consumers share it.
    ///
    /// Safe from several processes at once. A crash leaves it made or not made. The store's
    /// own `migrate` is for records, and need not be called.
    ///
    /// # Errors
    ///
    /// If the database cannot be reached, or does not let the role make the table.
    pub async fn migrate(&self) -> Result<(), StoreError> {
        self.store.migrate().await
    }

    /// Returns the statements that make the table, for the application's own migrations.
    #[must_use]
    pub fn schema_sql(&self) -> String {
        self.store.schema_sql()
    }

    /// Marks a message in a transaction of the application, and returns whether this is
    /// its first delivery.
    ///
    /// The message counts as processed once the caller commits. Acknowledge it after that,
    /// or when this returns [`Delivery::Repeat`]. If the transaction rolls back, the next
    /// delivery is `First`.
    ///
    /// **Check that COMMIT has committed.** PostgreSQL answers COMMIT with a rollback
    /// if an earlier statement has failed, and sqlx returns `Ok`. So return each error of a
    /// statement, or use [`receive`](Self::receive), which checks.
    ///
    /// While another transaction has marked the same message, this waits until it has
    /// ended, up to the connection's `lock_timeout`. On SQLite, begin with `BEGIN
    /// IMMEDIATE`: a transaction that has read before cannot write once another one has
    /// written.
    ///
    /// # Errors
    ///
    /// [`Invalid`](super::MessageErrorKind::Invalid) for an id that is empty, longer than 1,024
    /// bytes, or has a NUL. [`Transaction`](super::MessageErrorKind::Transaction) without a
    /// transaction, or for one that is not READ COMMITTED. Neither leaves a trace in the
    /// transaction. Otherwise the error of the statement.
    pub async fn first_time(
        &self,
        transaction: &mut Connection<S>,
        id: &str,
    ) -> Result<Delivery, MessageError> {
        let deliveries = self.first_times(transaction, &[id]).await?;
        Ok(deliveries[0])
    }

    /// Marks several messages in one statement, and returns the delivery of each, in the
    /// order of `ids`.
    ///
    /// An id that stands there twice is `First` and then `Repeat`. The ids are marked in
    /// their byte order, so that two such calls never wait for each other in a circle. Two
    /// transactions that each make several calls may do so: the database then ends one of
    /// them.
    ///
    /// # Errors
    ///
    /// As for [`first_time`](Self::first_time). One invalid id refuses all.
    pub async fn first_times(
        &self,
        transaction: &mut Connection<S>,
        ids: &[impl AsRef<str> + Sync],
    ) -> Result<Vec<Delivery>, MessageError> {
        for id in ids {
            check_name("the id of a message", id.as_ref(), LONGEST_ID)?;
        }
        let mut sorted: Vec<&str> = ids.iter().map(AsRef::as_ref).collect();
        sorted.sort_unstable();
        sorted.dedup();
        if sorted.is_empty() {
            return Ok(Vec::new());
        }
        let mut first: HashSet<&str> = match &self.mark(transaction, &sorted).await?.unseen {
            Unseen::All if sorted.len() == ids.len() => {
                return Ok(vec![Delivery::First; ids.len()]);
            }
            Unseen::All => sorted.into_iter().collect(),
            Unseen::Only(unseen) => sorted
                .into_iter()
                .filter(|id| unseen.contains(*id))
                .collect(),
        };
        let delivery = |id: &str| match first.remove(id) {
            true => Delivery::First,
            false => Delivery::Repeat,
        };
        Ok(ids.iter().map(AsRef::as_ref).map(delivery).collect())
    }

    /// Begins a transaction, marks the message, runs `work` in the transaction, and
    /// commits it. `work` does not run for a message that was processed before.
    ///
    /// The transaction is one of the store's own, as its `begin` makes them. On SQLite it
    /// is the file's only writer. `work` must not end it, and may use savepoints.
    /// If this future is dropped before `work` ends, everything is rolled back. If it
    /// is dropped later, a task completes the commit.
    ///
    /// # Errors
    ///
    /// **Do not acknowledge the message after an error.** An error of `work` rolls back.
    /// [`Aborted`](super::MessageErrorKind::Aborted) means that nothing was written: a statement
    /// had failed although `work` returned `Ok`, `work` had ended the transaction, the
    /// database did not answer before COMMIT, or it refused COMMIT. If COMMIT is not answered
    /// within 5 s, the mark is read on another connection, for up to 10 s. If that does not
    /// tell either, the error is [`Unknown`](super::MessageErrorKind::Unknown).
    ///
    /// **On SQLite, return the error of each statement.** After `OR ROLLBACK`, and after some
    /// failures of the disk, SQLite rolls the transaction back by itself. Each later statement
    /// is then committed alone.
    pub async fn receive<T, E>(
        &self,
        id: &str,
        work: impl AsyncFnOnce(&mut Connection<S>) -> Result<T, E>,
    ) -> Result<Received<T>, E>
    where
        E: From<MessageError>,
    {
        check_name("the id of a message", id, LONGEST_ID)?;
        let token = Token::random();
        let begun = std::time::Instant::now();
        let transaction = detached(self.store.begin(token)).await;
        let mut transaction = transaction.map_err(MessageError::from)?;
        let marked = self.mark(&mut transaction, &[id]).await?;
        if marked.unseen.is_empty() {
            return Ok(Received::Repeat);
        }
        let done = match work(&mut transaction).await {
            Ok(done) => done,
            Err(error) => {
                // Its locks are free for the redelivery. Dropped, it ends a little later.
                let rolled_back = time::timeout(COMMIT_TIMEOUT, transaction.rollback()).await;
                if !matches!(rolled_back, Ok(Ok(()))) {
                    self.warnings.warn(NOT_ROLLED_BACK, None, None);
                }
                return Err(error);
            }
        };
        let (inbox, id) = (self.clone(), id.to_owned());
        let commit = async move {
            let store = inbox.store.clone();
            let delivery = inbox.commit(transaction, token, &id, marked.seen_at).await;
            if let Ok(Delivery::First) = delivery {
                store.committed(Some(begun));
            }
            delivery
        };
        #[cfg(feature = "tracing")]
        let commit = tracing::Instrument::in_current_span(commit);
        // In a task, which completes it even if this future is dropped.
        let committed = tokio::spawn(commit).await;
        let ended = |_| Err(CommitError::caused(CommitErrorKind::Unknown, TASK_ENDED));
        match committed.unwrap_or_else(ended) {
            Ok(Delivery::First) => Ok(Received::First(done)),
            Ok(Delivery::Repeat) => Ok(Received::Repeat),
            Err(error) => Err(MessageError::from(error).into()),
        }
    }

    /// Commits, and looks at the mark if COMMIT is not answered. `Repeat` means that
    /// another delivery was committed instead.
    async fn commit(
        self,
        mut transaction: Transaction<'static, S::Sql>,
        token: Token,
        id: &str,
        marked_at: i64,
    ) -> Result<Delivery, CommitError> {
        let is_open = self.store.is_open(&mut transaction, token);
        let is_open = time::timeout(COMMIT_TIMEOUT, is_open).await;
        let is_open = is_open
            .unwrap_or_else(|_| Err(CommitError::caused(CommitErrorKind::Aborted, NO_ANSWER)));
        if !is_open? {
            return Err(CommitError::caused(CommitErrorKind::Aborted, ENDED));
        }
        let unknown = match send_commit::<S>(transaction, COMMIT_TIMEOUT).await {
            Ok(()) => return Ok(Delivery::First),
            Err(error) if error.kind() == CommitErrorKind::Unknown => error,
            Err(error) => return Err(error),
        };
        let end = Instant::now() + 2 * COMMIT_TIMEOUT;
        let mut backoff = Backoff::new(FIRST_PAUSE, LONGEST_PAUSE);
        while Instant::now() < end {
            let seen_at = self.store.seen_at(&self.consumer, id);
            match time::timeout(COMMIT_TIMEOUT, seen_at).await {
                Ok(Ok(Some(seen_at))) if seen_at == marked_at => return Ok(Delivery::First),
                Ok(Ok(Some(_))) => return Ok(Delivery::Repeat),
                Ok(Ok(None)) => return Err(unknown.found_aborted()),
                Ok(Err(error)) => self.warnings.warn(UNREADABLE, Some(&error), None),
                Err(_) => {
                    let error = StoreError::timed_out();
                    self.warnings.warn(UNREADABLE, Some(&error), None);
                }
            }
            time::sleep(backoff.pause()).await;
        }
        Err(unknown)
    }

    async fn mark(
        &self,
        transaction: &mut Connection<S>,
        ids: &[&str],
    ) -> Result<sealed::Marked, MessageError> {
        if !transaction.is_in_transaction() {
            return Err(MessageError::no_transaction());
        }
        self.store
            .mark(transaction, &self.consumer, ids, self.retention)
            .await
    }

    /// Returns up to `limit` messages of this consumer, in the byte order of their ids,
    /// beginning after the id `after`. For operators. PostgreSQL also reads the marks that
    /// other consumers have between these ids.
    ///
    /// # Errors
    ///
    /// If the database cannot be reached.
    pub async fn list(
        &self,
        after: Option<&str>,
        limit: u32,
    ) -> Result<Vec<SeenMessage>, StoreError> {
        let after = after.unwrap_or_default();
        self.store.list(&self.consumer, after, limit.max(1)).await
    }

    /// Forgets a message, and returns whether it was there. **Its next delivery is
    /// processed again.** For operators.
    ///
    /// # Errors
    ///
    /// If the database cannot be reached. Calling again is safe.
    pub async fn forget(&self, id: &str) -> Result<bool, StoreError> {
        self.store.forget(&self.consumer, id).await
    }
}

/// Sweeps the marks of all consumers.
impl<S: InboxStore> Sweep for Inbox<S> {
    async fn sweep(&self, limit: u32, _: Duration) -> Result<Purged, StoreError> {
        let removed = self.store.sweep(limit).await?;
        Ok(Purged {
            removed,
            ..Purged::default()
        })
    }
}

impl<S> fmt::Debug for Inbox<S> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Inbox")
            .field("consumer", &self.consumer)
            .field("retention", &self.retention)
            .finish_non_exhaustive()
    }
}

/// In bytes. Both are in one entry of an index.
const LONGEST_CONSUMER: usize = 255;
const LONGEST_ID: usize = 1024;

const NO_ANSWER: &str = "the database did not answer within 5 s, and COMMIT was not sent";
const UNREADABLE: &str = "COMMIT was not answered, and the mark of its message is not readable: it is \
    read again";
const COMMIT_TIMEOUT: Duration = Duration::from_secs(5);
const FIRST_PAUSE: Duration = Duration::from_millis(50);
const LONGEST_PAUSE: Duration = Duration::from_secs(1);
