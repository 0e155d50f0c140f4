//! Records in an SQLite file.

mod batches;
mod statements;
mod transaction;

use std::{
    fmt,
    path::Path,
    sync::Arc,
    time::{Duration, Instant},
};

use futures_util::future::BoxFuture;
use sqlx::{
    ConnectOptions as _, Connection as _, SqlSafeStr as _, SqliteConnection, SqlitePool,
    error::DatabaseError,
    migrate::{MigrateError, Migration, MigrationType, Migrator},
    query_scalar,
    sqlite::{SqliteConnectOptions, SqliteJournalMode, SqlitePoolOptions, SqliteSynchronous},
};
use tokio::sync::Semaphore;

use self::batches::{Looks, WriteCall, Writes, Written};
pub use self::transaction::SqliteTransaction;
use super::{
    Claim, Claimed, Filter, Grant, MarkedBy, Page, Purged, ReclaimAs, Record, Store, StoreError,
    Transition, Transitioned, sql,
    sql::batcher::{Batcher, ConcurrentBatches},
    sql::calls::{ClaimCall, OwnerTransition, TransitionCall},
    sql::reads::Reads,
    sql::single::Limits,
};
use crate::{Fence, RecordName, Token};

/// Records in an SQLite file, shared by the processes of one host.
///
/// **What is promised.** A call that returns is durable: the file is in WAL mode
/// with `synchronous = FULL`. Every write is a transaction that has the file's
/// only write lock from its start, so that nothing is decided on what another
/// process is changing. A dropped call ends on its own. Durations longer than
/// 100 years count as 100 years.
///
/// **What is not.** The clock is the host's wall clock, in steps of a
/// millisecond; one that is set back makes leases and retention longer, and one
/// that is set forward lets them lapse early. A file on a network file system
/// is not safe, since its locks are not: give each host a file of its own only
/// if each key always reaches the same host.
///
/// A write waits for up to 5 s for the writes of other connections and
/// processes, and for a transaction of the application on the same file. Reads,
/// and claims of keys that have a record, wait for nobody. For records that
/// need not outlive the process there is [`MemoryStore`](crate::MemoryStore);
/// `:memory:` is refused.
///
/// ```
/// # #[tokio::main(flavor = "current_thread")]
/// # async fn main() -> Result<(), tower_idempotency::StoreError> {
/// use tower_idempotency::{Key, RecordName, Scope, SqliteStore, Store};
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
/// Clones share the connections. Calls need a Tokio runtime.
#[derive(Clone)]
pub struct SqliteStore {
    writer: SqlitePool,
    readers: SqlitePool,
    transactions: SqlitePool,
    writes: Batcher<Writes>,
    /// With large responses. They take turns with the others.
    large_writes: Batcher<Writes>,
    reads: Reads<Looks>,
}

impl SqliteStore {
    /// Opens the file at `path`, makes it if there is none, and makes the
    /// store's tables in it or brings them up to date.
    ///
    /// Safe from several processes at once; a crash on the way leaves the tables
    /// as they were. In a file of the application's own the store adds
    /// `idempotency_records` and `idempotency_fences`, with a ledger of its own,
    /// `_idempotency_migrations`, and turns WAL mode on.
    ///
    /// # Errors
    ///
    /// If the file cannot be made, read or written, is no database, is locked
    /// by another process for too long, or was migrated by a later version of
    /// this crate.
    pub async fn open(path: impl AsRef<Path>) -> Result<Self, StoreError> {
        Self::open_with(SqliteConnectOptions::new().filename(path)).await
    }

    /// As [`open`](Self::open), with options of the application's own: the busy
    /// timeout, the cache, or any other pragma. The journal mode and
    /// `synchronous` stay the store's.
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
            // Without these, a flush on macOS ends in the disk's cache.
            .pragma("fullfsync", "ON")
            .pragma("checkpoint_fullfsync", "ON");
        prepare(options.clone()).await?;
        let pool = |connections| {
            SqlitePoolOptions::new()
                .max_connections(connections)
                .acquire_timeout(PATIENCE)
                .test_before_acquire(false)
                .idle_timeout(None)
                .max_lifetime(None)
        };
        let writer = pool(1).connect_lazy_with(options.clone());
        let readers = pool(READERS).connect_lazy_with(options.clone().pragma("query_only", "ON"));
        let writes = || Writes(writer.clone());
        let concurrent = |batches| ConcurrentBatches {
            usual: batches,
            max: batches,
        };
        // Locks are waited for by SQLite itself.
        let limits = Limits {
            permits: Arc::new(Semaphore::new(1)),
            max_waiting: MOST_WAITING,
            lock_timeout: PATIENCE,
        };
        let reads = |at_once, limits| {
            let looks = Looks(readers.clone());
            Batcher::new(looks, concurrent(at_once), limits)
        };
        Ok(Self {
            writes: Batcher::new(writes(), concurrent(1), limits.clone()),
            large_writes: Batcher::new(writes(), concurrent(1), limits.clone()),
            reads: Reads {
                small: reads(SMALL_READS, limits.clone()),
                large: reads(1, limits),
            },
            writer,
            readers,
            // Used once: a transaction that failed may have ended in SQLite, while
            // sqlx goes on counting it as open.
            transactions: pool(TRANSACTIONS)
                .after_release(|_, _| Box::pin(async { Ok(false) }))
                .connect_lazy_with(options),
        })
    }

    /// Closes the connections, each after the call that it is busy with. Later
    /// calls fail.
    pub async fn close(&self) {
        self.transactions.close().await;
        self.readers.close().await;
        self.writer.close().await;
    }

    /// Runs work in a transaction that can write from its start: one that began
    /// as a reader fails at once when another process has written meanwhile.
    async fn write<T, W>(&self, work: W) -> Result<T, StoreError>
    where
        T: Send + 'static,
        W: for<'c> FnOnce(&'c mut SqliteConnection) -> BoxFuture<'c, Result<T, StoreError>>
            + Send
            + 'static,
    {
        let writer = self.writer.clone();
        sql::detached(async move { write(&writer, async |on| work(on).await).await }).await
    }

    async fn transition_by_owner(
        &self,
        name: &RecordName,
        token: Token,
        transition: OwnerTransition,
    ) -> Result<Transitioned, StoreError> {
        let name = name.clone();
        let call = TransitionCall {
            name,
            token,
            transition,
        };
        let writes = match call.is_large() {
            true => &self.large_writes,
            false => &self.writes,
        };
        match writes.call(WriteCall::Transition(call)).await? {
            Written::Transitioned(transitioned) => Ok(transitioned),
            Written::Claimed(_) => Err(StoreError::unavailable("a call got another's answer")),
        }
    }

    /// Runs a statement that only reads.
    async fn look<T, W>(&self, work: W) -> Result<T, StoreError>
    where
        T: Send + 'static,
        W: for<'c> FnOnce(&'c mut SqliteConnection) -> BoxFuture<'c, Result<T, StoreError>>
            + Send
            + 'static,
    {
        let readers = self.readers.clone();
        sql::detached(async move {
            let mut connection = readers.acquire().await.map_err(failure)?;
            work(&mut connection).await
        })
        .await
    }
}

impl fmt::Debug for SqliteStore {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("SqliteStore")
            .field("closed", &self.writer.is_closed())
            .finish_non_exhaustive()
    }
}

impl Store for SqliteStore {
    async fn claim(&self, name: &RecordName, claim: &Claim) -> Result<Claimed, StoreError> {
        // The many retries of a key that is taken need not queue for the lock.
        let reads_response = claim.reads_response;
        if let Some(record) = self.reads.read(name, reads_response).await? {
            return Ok(Claimed::Occupied(record));
        }
        let call = ClaimCall {
            name: name.clone(),
            claim: *claim,
        };
        match self.writes.call(WriteCall::Claim(call)).await? {
            Written::Claimed(answer) => self.reads.with_response(name, claim, answer).await,
            Written::Transitioned(_) => Err(StoreError::unavailable("a call got another's answer")),
        }
    }

    async fn reclaim(
        &self,
        name: &RecordName,
        seen: Fence,
        reclaim_as: ReclaimAs,
        claim: &Claim,
    ) -> Result<Option<Grant>, StoreError> {
        let (name, claim) = (name.clone(), *claim);
        self.write(move |on| {
            Box::pin(async move { statements::reclaim(on, &name, seen, reclaim_as, &claim).await })
        })
        .await
    }

    async fn transition(
        &self,
        name: &RecordName,
        transition: Transition<'_>,
    ) -> Result<Transitioned, StoreError> {
        let (token, transition) = match transition {
            Transition::Renew { token, lease } => (token, OwnerTransition::Renew { lease }),
            Transition::Complete { token, completion } => {
                (token, OwnerTransition::Complete(completion.clone()))
            }
            Transition::Release { token, release } => (token, OwnerTransition::Release(release)),
            Transition::MarkUnknown {
                marked_by: MarkedBy::Owner(token),
                retention,
            } => (token, OwnerTransition::MarkUnknown { retention }),
            Transition::MarkUnknown {
                marked_by,
                retention,
            } => {
                let name = name.clone();
                return self
                    .write(move |on| {
                        Box::pin(async move {
                            statements::mark_unknown(on, &name, marked_by, retention).await
                        })
                    })
                    .await;
            }
            Transition::Resolve { seen, resolution } => {
                let (name, resolution) = (name.clone(), resolution.clone());
                return self
                    .write(move |on| {
                        Box::pin(
                            async move { statements::resolve(on, &name, seen, &resolution).await },
                        )
                    })
                    .await;
            }
        };
        self.transition_by_owner(name, token, transition).await
    }

    async fn read(&self, name: &RecordName) -> Result<Option<Record>, StoreError> {
        self.reads.read(name, true).await
    }

    /// In the order of the names, by bytes.
    async fn list(
        &self,
        filter: Filter,
        after: Option<&RecordName>,
        limit: u32,
    ) -> Result<Page, StoreError> {
        let after = after.cloned();
        self.look(move |on| {
            Box::pin(async move { statements::list(on, filter, after.as_ref(), limit).await })
        })
        .await
    }

    async fn forget(&self, name: &RecordName, seen: Fence) -> Result<Transitioned, StoreError> {
        let name = name.clone();
        self.write(move |on| Box::pin(async move { statements::forget(on, &name, seen).await }))
            .await
    }

    async fn purge_expired(
        &self,
        limit: u32,
        unknown_retention: Duration,
    ) -> Result<Purged, StoreError> {
        self.write(move |on| Box::pin(statements::purge_expired(on, limit, unknown_retention)))
            .await
    }
}

/// Makes the file ready for the pools, one of several processes at a time.
async fn prepare(options: SqliteConnectOptions) -> Result<(), StoreError> {
    sql::detached(async move {
        let mut connection = connect(&options).await?;
        let mode: String = query_scalar("PRAGMA journal_mode")
            .fetch_one(&mut connection)
            .await
            .map_err(failure)?;
        if mode != "wal" {
            return Err(StoreError::unavailable(
                "records need a file that can be in WAL mode, not a database in memory",
            ));
        }
        immediately(&mut connection, async |on| {
            // `run` is this with a bound that no `Send` future can meet.
            migrator()
                .run_direct(None, on, false)
                .await
                .map_err(migration_failure)
        })
        .await?;
        connection.close().await.map_err(failure)
    })
    .await
}

/// Connects although another process may be turning WAL mode on, for which
/// SQLite does not wait.
async fn connect(options: &SqliteConnectOptions) -> Result<SqliteConnection, StoreError> {
    let begun = Instant::now();
    loop {
        match options.connect().await {
            Err(sqlx::Error::Database(error))
                if primary_code(&*error) == BUSY && begun.elapsed() < PATIENCE =>
            {
                tokio::time::sleep(Duration::from_millis(20)).await;
            }
            connected => return connected.map_err(failure),
        }
    }
}

/// Runs work in a transaction on the one connection that writes. To be called
/// from a task that is never dropped.
async fn write<T>(
    writer: &SqlitePool,
    work: impl AsyncFnOnce(&mut SqliteConnection) -> Result<T, StoreError>,
) -> Result<T, StoreError> {
    let mut connection = writer.acquire().await.map_err(failure)?;
    let done = immediately(&mut connection, work).await;
    if done.is_err() {
        // A full disk ends the transaction in SQLite, while sqlx goes on counting
        // it as open.
        connection.close_on_drop();
    }
    done
}

async fn immediately<T>(
    connection: &mut SqliteConnection,
    work: impl AsyncFnOnce(&mut SqliteConnection) -> Result<T, StoreError>,
) -> Result<T, StoreError> {
    let mut transaction = connection
        .begin_with("BEGIN IMMEDIATE")
        .await
        .map_err(failure)?;
    let answer = work(&mut transaction).await?;
    transaction.commit().await.map_err(failure)?;
    Ok(answer)
}

/// A migrator of the crate's own tables, whose ledger stands beside the
/// application's: with one ledger, each would refuse the other's migrations.
fn migrator() -> Migrator {
    let mut migrator = Migrator::with_migrations(vec![Migration::new(
        1,
        "records".into(),
        MigrationType::Simple,
        RECORDS.into_sql_str(),
        false,
    )]);
    migrator.dangerous_set_table_name("_idempotency_migrations");
    migrator
}

fn migration_failure(error: MigrateError) -> StoreError {
    match error {
        MigrateError::Execute(error) | MigrateError::ExecuteMigration(error, _) => failure(error),
        error => StoreError::unavailable(error),
    }
}

fn failure(error: sqlx::Error) -> StoreError {
    sql::failure(error, answered)
}

/// What SQLite's own error means.
fn answered(error: &dyn DatabaseError) -> StoreError {
    match primary_code(error) {
        BUSY | LOCKED => StoreError::timed_out().because(IS_LOCKED),
        FULL => StoreError::full(IS_FULL).about_one(),
        CORRUPT | NOT_A_DATABASE => StoreError::corrupt(IS_CORRUPT),
        READ_ONLY => StoreError::unavailable(IS_READ_ONLY),
        CANNOT_OPEN => StoreError::unavailable(CANNOT_BE_OPENED),
        ERROR if error.message().starts_with("no such table") => {
            StoreError::unavailable(format!("{}{IS_MISSING}", error.message()))
        }
        code => {
            let failed = StoreError::unavailable(quoting_no_value(error));
            match code {
                TOO_BIG | CONSTRAINT => failed.about_one(),
                _ => failed,
            }
        }
    }
}

/// What SQLite said of an error. Its messages name tables, columns and
/// constraints. That of a trigger may quote a value, and is left out.
pub(super) fn quoting_no_value(error: &dyn DatabaseError) -> String {
    let code = error.code().unwrap_or_default();
    if code == CONSTRAINT_TRIGGER {
        return format!("a trigger refused it (SQLite code {code})");
    }
    format!("{} (SQLite code {code})", error.message())
}

/// The result code without its extension.
fn primary_code(error: &dyn DatabaseError) -> u8 {
    error
        .code()
        .and_then(|code| code.parse::<i32>().ok())
        .map_or(0, |code| code.to_le_bytes()[0])
}

const RECORDS: &str = include_str!("../../../migrations/sqlite/0001_records.sql");
/// One writes, and the others wait for it.
const TRANSACTIONS: u32 = 8;

const READERS: u32 = 4;

/// Large responses and an operator's pages leave these their connections.
const SMALL_READS: usize = 2;

/// The calls that wait for the writes before them; one more is refused.
const MOST_WAITING: usize = 4096;

const PATIENCE: Duration = Duration::from_secs(5);

const IS_LOCKED: &str = "another connection or process holds the file's write lock: \
    end its transactions sooner, or raise `SqliteConnectOptions::busy_timeout`";
const IS_FULL: &str = "the disk, or the database's `max_page_count`";
const IS_CORRUPT: &str = "the file is damaged, or is no SQLite database";
const IS_READ_ONLY: &str = "the database file is read-only: \
    let the process write to the file and to its directory";
const CANNOT_BE_OPENED: &str = "the database file cannot be opened or made: \
    its directory must exist, and the process must be able to write to it";
const IS_MISSING: &str = ": open the store again, which makes its tables";

const ERROR: u8 = 1;
const BUSY: u8 = 5;
const LOCKED: u8 = 6;
const READ_ONLY: u8 = 8;
const CORRUPT: u8 = 11;
const FULL: u8 = 13;
const CANNOT_OPEN: u8 = 14;
const TOO_BIG: u8 = 18;
const CONSTRAINT: u8 = 19;
const CONSTRAINT_TRIGGER: &str = "1811";
const NOT_A_DATABASE: u8 = 26;

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test]
    async fn a_file_that_may_not_be_written_is_called_so() {
        let directory = std::env::temp_dir().join(format!("read-only-{}", std::process::id()));
        std::fs::create_dir(&directory).unwrap();
        let file = directory.join("records.db");
        SqliteStore::open(&file).await.unwrap().close().await;
        let options = SqliteConnectOptions::new().filename(&file).read_only(true);
        let mut connection = options.connect().await.unwrap();
        let error = sqlx::query("DELETE FROM idempotency_records")
            .execute(&mut connection)
            .await
            .map_err(failure)
            .unwrap_err();
        let told = error.to_string();
        assert!(told.contains("the database file is read-only"), "{told}");
        std::fs::remove_dir_all(&directory).unwrap();
    }
}
