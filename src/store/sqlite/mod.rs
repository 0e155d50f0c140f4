//! A store of records in an SQLite file.

mod batches;
pub(crate) mod error;
pub(crate) mod setup;
pub(crate) mod statements;
mod usage;
pub(crate) mod writer;

use std::{fmt, path::Path, sync::Arc, time::Duration};

use sqlx::{
    SqliteConnection, SqlitePool,
    sqlite::{SqliteConnectOptions, SqliteJournalMode, SqlitePoolOptions, SqliteSynchronous},
};
use tokio::sync::Semaphore;

use self::{
    batches::{Change, Reader, WriteCall, Written},
    error::failure,
    setup::{TIMEOUT, set_up},
    writer::Writer,
};
use super::{
    Claim, Claimed, Grant, Purged, ReclaimAs, Record, Store, StoreError, Transition, Transitioned,
    Usage, UsageDelta,
    admin::{Filter, Page},
    sql::batcher::{Batcher, ConcurrentBatches, MAX_CALLS},
    sql::detached,
    sql::reads::{Reads, is_own},
    sql::single::Limits,
};
use crate::{key::RecordName, store::Fence};

/// A store of records in an SQLite file, which the processes of one host can share.
///
/// # Guarantees
///
/// A call that returns is durable: the file is in WAL mode with `synchronous = FULL`.
/// A call that writes holds the file's only write lock from its start, so that it never
/// decides on a state that another process is changing. A dropped call leaves nothing
/// half done.
///
/// # Limits
///
/// The clock is the host's wall clock, in microseconds. If it is set back, leases and
/// retention last longer. If it is set forward, leases lapse early.
///
/// The locks of a network file system are not reliable, so that a file on one is not
/// safe. Give each host its own file only if each key always reaches the same host.
///
/// A write waits up to 5 seconds for the writes of other connections and processes, and
/// for a transaction of the application on the same file. Reads, and claims of keys that
/// have a record, do not wait. A database in memory is refused: use
/// [`MemoryStore`](crate::MemoryStore) for records that may end with the process.
///
/// # Example
///
/// ```
/// # #[tokio::main(flavor = "current_thread")]
/// # async fn main() -> Result<(), tower_idempotency::StoreError> {
/// use tower_idempotency::{Key, Scope, SqliteStore, Store, store::RecordName};
///
/// let file = std::env::temp_dir().join(format!("example-{}.db", std::process::id()));
/// let store = SqliteStore::open(&file).await?;
/// let name = RecordName::new(Scope::single_tenant(), Key::new("key"));
/// assert!(store.read(&name).await?.is_none());
/// store.close().await;
/// assert!(file.exists());
/// # std::fs::remove_file(&file).ok();
/// # Ok(())
/// # }
/// ```
///
/// Clones share the connections. Calls need a Tokio runtime. Clones may be used in several
/// runtimes. Keep each of them running while it has calls: a runtime that stands still keeps
/// the connections of its calls.
#[derive(Clone)]
pub struct SqliteStore {
    pub(crate) writer: Writer,
    pub(crate) readers: SqlitePool,
    pub(crate) transactions: SqlitePool,
    writes: Batcher<Writer>,
    /// Writes of large responses, which alternate with the others.
    large_writes: Batcher<Writer>,
    reads: Reads<Reader>,
    #[cfg(feature = "outbox")]
    pub(crate) wake: super::sql::wake::Wake,
}

impl SqliteStore {
    /// Opens the file at `path`. Creates the file and the store's tables if they do not
    /// exist, and turns WAL mode on.
    ///
    /// Several processes may open a new file at the same time. After a crash meanwhile, the
    /// tables are unchanged. In a file of the application, the store adds the tables
    /// `idempotency_records` and `idempotency_usage`, and a ledger for each.
    ///
    /// # Errors
    ///
    /// If the file cannot be created, read or written. If it is not a database, is locked
    /// by another process for more than 5 seconds, or was migrated by a later version of
    /// this crate.
    pub async fn open(path: impl AsRef<Path>) -> Result<Self, StoreError> {
        Self::open_with(SqliteConnectOptions::new().filename(path)).await
    }

    /// Opens a file as [`open`](Self::open) does, with the options of the application:
    /// the busy timeout, the size of the cache, or other pragmas. The journal mode and
    /// `synchronous` are always the store's.
    ///
    /// # Errors
    ///
    /// As for [`open`](Self::open).
    pub async fn open_with(options: SqliteConnectOptions) -> Result<Self, StoreError> {
        let options = options
            .create_if_missing(true)
            .read_only(false)
            .journal_mode(SqliteJournalMode::Wal)
            .synchronous(SqliteSynchronous::Full)
            // Without these, macOS flushes to the cache of the disk only.
            .pragma("fullfsync", "ON")
            .pragma("checkpoint_fullfsync", "ON");
        set_up(options.clone()).await?;
        let pool = |connections| {
            SqlitePoolOptions::new()
                .max_connections(connections)
                .acquire_timeout(TIMEOUT)
                .test_before_acquire(false)
                .idle_timeout(None)
                .max_lifetime(None)
        };
        let writer = Writer(pool(1).connect_lazy_with(options.clone()));
        let readers = pool(READERS).connect_lazy_with(options.clone().pragma("query_only", "ON"));
        let concurrent = |batches| ConcurrentBatches {
            alone: Arc::new(Semaphore::new(0)),
            usual: batches,
            max: batches,
            max_calls: MAX_CALLS,
        };
        // SQLite itself waits for its lock.
        let limits = Limits {
            permits: Arc::new(Semaphore::new(1)),
            max_waiting: MAX_WAITING,
            lock_timeout: TIMEOUT,
        };
        let writes = || Batcher::new(writer.clone(), concurrent(1), limits.clone());
        let reads = |batches| {
            let reader = Reader(readers.clone());
            Batcher::new(reader, concurrent(batches), limits.clone())
        };
        Ok(Self {
            writes: writes(),
            large_writes: writes(),
            reads: Reads {
                small: reads(SMALL_READS),
                large: reads(1),
            },
            writer,
            readers,
            #[cfg(feature = "outbox")]
            wake: super::sql::wake::Wake::default(),
            // A connection is used once: SQLite may have ended a transaction that
            // failed, which sqlx does not notice.
            transactions: pool(TRANSACTIONS)
                .after_release(|_, _| Box::pin(async { Ok(false) }))
                .connect_lazy_with(options),
        })
    }

    /// Closes the connections, after the calls under way. Later calls fail.
    pub async fn close(&self) {
        self.transactions.close().await;
        self.readers.close().await;
        self.writer.0.close().await;
    }

    async fn write(&self, name: &RecordName, change: Change) -> Result<Written, StoreError> {
        let name = name.clone();
        let call = WriteCall { name, change };
        let writes = match call.is_large() {
            true => &self.large_writes,
            false => &self.writes,
        };
        writes.call(call).await
    }
}

impl fmt::Debug for SqliteStore {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("SqliteStore")
            .field("closed", &self.writer.0.is_closed())
            .finish_non_exhaustive()
    }
}

impl Store for SqliteStore {
    async fn claim(&self, name: &RecordName, claim: &Claim) -> Result<Claimed, StoreError> {
        // Most retries of a key that is taken need no write lock.
        let found = self.reads.read(name, claim.reads_response).await?;
        if let Some(record) = found.filter(|record| !is_own(record, claim.token.as_bytes())) {
            return Ok(Claimed::Occupied(record));
        }
        match self.write(name, Change::Claim(*claim)).await? {
            Written::Claimed(answer) => self.reads.with_response(name, claim, answer).await,
            _ => Err(other_answer()),
        }
    }

    async fn reclaim(
        &self,
        name: &RecordName,
        seen: Fence,
        reclaim_as: ReclaimAs,
        claim: &Claim,
    ) -> Result<Option<Grant>, StoreError> {
        let reclaim = Change::Reclaim(seen, reclaim_as, *claim);
        match self.write(name, reclaim).await? {
            Written::Reclaimed(grant) => Ok(grant),
            _ => Err(other_answer()),
        }
    }

    async fn transition(
        &self,
        name: &RecordName,
        transition: Transition,
    ) -> Result<Transitioned, StoreError> {
        match self.write(name, Change::Transition(transition)).await? {
            Written::Transitioned(transitioned) => Ok(transitioned),
            _ => Err(other_answer()),
        }
    }

    async fn read(&self, name: &RecordName) -> Result<Option<Record>, StoreError> {
        self.reads.read(name, true).await
    }

    /// In the order of the names, by bytes.
    async fn list(
        &self,
        filter: &Filter,
        after: Option<&RecordName>,
        limit: u32,
    ) -> Result<Page, StoreError> {
        let readers = self.readers.clone();
        let (filter, after) = (filter.clone(), after.cloned());
        detached(async move {
            let mut connection = readers.acquire().await.map_err(failure)?;
            statements::list(&mut connection, &filter, after.as_ref(), limit).await
        })
        .await
    }

    async fn purge_expired(
        &self,
        limit: u32,
        unknown_retention: Duration,
    ) -> Result<Purged, StoreError> {
        let purge = async move |on: &mut SqliteConnection| {
            usage::sweep(on, limit).await?;
            statements::purge_expired(on, limit, unknown_retention).await
        };
        detached(self.writer.clone().write_owned(purge)).await
    }

    async fn add_usage(&self, deltas: &[UsageDelta]) -> Result<Option<Vec<Usage>>, StoreError> {
        let (writer, readers) = (self.writer.clone(), self.readers.clone());
        let deltas = deltas.to_vec();
        detached(async move {
            if !deltas.iter().all(UsageDelta::is_none) {
                let add = async |on: &mut SqliteConnection| usage::add(on, &deltas).await;
                writer.write(add).await?;
            }
            let mut connection = readers.acquire().await.map_err(failure)?;
            usage::read(&mut connection, &deltas).await.map(Some)
        })
        .await
    }
}

fn other_answer() -> StoreError {
    StoreError::unavailable("a call received the answer of another")
}

/// The connections for transactions of handlers. One of them writes at a time.
const TRANSACTIONS: u32 = 8;

const READERS: u32 = 4;

/// The connections for batches of small reads. Large responses and lists use the rest.
const SMALL_READS: usize = 2;

/// How many droppable calls may wait.
const MAX_WAITING: usize = 4096;
