//! Records in PostgreSQL.

mod builder;
mod session;
mod statements;
mod transaction;

use std::{fmt, sync::Arc, time::Duration};

use futures_util::future::BoxFuture;
use sqlx::{
    AssertSqlSafe, ConnectOptions as _, Connection as _, PgConnection, PgPool,
    error::DatabaseError, postgres::PgConnectOptions,
};

pub use self::builder::PostgresStoreBuilder;
use self::session::Session;
use super::{
    Claim, Claimed, Completion, Filter, Grant, Purged, Record, Release, Resolution, Settlement,
    Store, StoreError, Succession, Witness, sql,
};
use crate::{Fence, RecordName, Token};

/// Records in PostgreSQL, shared by every process that uses the database.
///
/// **What is promised.** A call that returns is durable: it was flushed to the
/// server's disk, whatever the role's or the server's defaults say. All times
/// are the server's; the clocks of the application's hosts do not matter.
/// A dropped call ends on its own: its connection returns to the pool only
/// after its last word. Durations longer than 100 years count as 100 years.
///
/// **What is not.** A failover to a standby that had not received a claim loses
/// that claim, and its retry runs again. With `synchronous_standby_names` set on
/// the server, the store waits for the standby as every other writer does. A
/// standby itself is refused.
///
/// The store has **its own connections**, apart from the application's: an
/// application's pool can hold connections that a cancelled request left inside
/// a transaction, and what is written there is lost. On each of them it sets
/// read committed, read-write transactions, `synchronous_commit` and its
/// timeouts. It must talk to the server directly, or to a pooler in session
/// mode; one in transaction mode would lose these settings, unless the store is
/// [`pooler_safe`](PostgresStoreBuilder::pooler_safe).
///
/// # Tables
///
/// [`migrate`](Self::migrate) makes the table and the sequence
/// `idempotency_records` and `idempotency_fences`, with a ledger of its own,
/// `_idempotency_migrations`. Connecting does not: who may change a schema, and
/// when, is the application's to say. Or copy the files under
/// `migrations/postgres` into the application's own migrations, and never call
/// `migrate`. A role that may read and write the table and use the sequence is
/// enough to serve.
///
/// ```no_run
/// use tower_idempotency::{PostgresStore, StoreError};
///
/// # async fn example() -> Result<(), StoreError> {
/// let store = PostgresStore::connect("postgres://app@localhost/app").await?;
/// store.migrate().await?;
/// // … serve, then:
/// store.close().await;
/// # Ok(())
/// # }
/// ```
///
/// Clones share the connections. Calls need a Tokio runtime.
#[derive(Clone)]
pub struct PostgresStore {
    pool: PgPool,
    transactions: PgPool,
    options: Arc<PgConnectOptions>,
    deadline: Duration,
    pooled: Option<Pooled>,
}

/// What begins a transaction behind a pooler.
#[derive(Clone)]
struct Pooled {
    call: Arc<str>,
    transaction: Arc<str>,
}

impl PostgresStore {
    /// Connects to the database at `url`, with all settings at their defaults.
    ///
    /// # Errors
    ///
    /// If `url` is not a PostgreSQL address, the server cannot be reached or
    /// refuses the role, if it is a standby, or if the table of records is
    /// `UNLOGGED`.
    pub async fn connect(url: &str) -> Result<Self, StoreError> {
        let options: PgConnectOptions = url.parse().map_err(failure)?;
        Self::builder(options).connect().await
    }

    /// A store with settings of its own: TLS, sockets and passwords are said by
    /// `options`, the rest by the builder.
    pub fn builder(options: PgConnectOptions) -> PostgresStoreBuilder {
        PostgresStoreBuilder::new(options)
    }

    /// Makes the store's tables, or brings them up to date.
    ///
    /// Safe from several processes at once: one migrates, the others wait for
    /// up to a minute. Each migration is one transaction; a crash leaves it
    /// done or not done. Needs a role that may create tables.
    ///
    /// # Errors
    ///
    /// If the server cannot be reached or refuses, or if the database was
    /// migrated by a later version of this crate.
    pub async fn migrate(&self) -> Result<(), StoreError> {
        let options = Arc::clone(&self.options);
        sql::detached(async move {
            // A connection of its own: one that fails on the way would take the
            // migrator's lock back into the pool.
            let mut connection = options.connect().await.map_err(failure)?;
            let patience = session::Patience {
                statement: Duration::ZERO,
                lock: Duration::from_secs(60),
                idle_in_transaction: Duration::ZERO,
            };
            session::prepare(&mut connection, patience, false)
                .await
                .map_err(failure)?;
            // `run` is this with a bound that no `Send` future can meet.
            sql::migrator(RECORDS)
                .run_direct(None, &mut connection, false)
                .await
                .map_err(|error| sql::migration_failure(error, answered))?;
            connection.close().await.map_err(failure)
        })
        .await
    }

    /// Closes the connections, each after the call that it is busy with. Later
    /// calls fail.
    pub async fn close(&self) {
        self.transactions.close().await;
        self.pool.close().await;
    }

    /// Runs work on one of the store's connections, to its end.
    async fn run<T, W>(&self, work: W) -> Result<T, StoreError>
    where
        T: Send + 'static,
        W: for<'c> FnOnce(Session<'c>) -> BoxFuture<'c, Result<T, StoreError>> + Send + 'static,
    {
        let (pool, deadline, pooled) = (self.pool.clone(), self.deadline, self.pooled.clone());
        sql::detached(async move {
            let mut connection = pool.acquire().await.map_err(failure)?;
            let call = async {
                match pooled {
                    None => work(Session::lasting(&mut connection)).await,
                    Some(pooled) => in_transaction(&mut connection, &pooled.call, work).await,
                }
            };
            let Ok(answer) = tokio::time::timeout(deadline, call).await else {
                // The server keeps to its own timeouts, so the network does not
                // answer. What still comes is not for the next call to read.
                connection.close_on_drop();
                return Err(StoreError::timed_out());
            };
            // As its drop would, but not for ever: a server that falls silent
            // while the pool asks after it would keep the connection's place.
            tokio::spawn(async move {
                let _ = tokio::time::timeout(deadline, connection.return_to_pool()).await;
            });
            answer
        })
        .await
    }
}

/// One call as a transaction of its own, with statements that leave nothing
/// behind on a server connection that the next call may not get.
async fn in_transaction<T, W>(
    connection: &mut PgConnection,
    begin: &str,
    work: W,
) -> Result<T, StoreError>
where
    W: for<'c> FnOnce(Session<'c>) -> BoxFuture<'c, Result<T, StoreError>>,
{
    let begin = AssertSqlSafe(begin.to_owned());
    let mut transaction = connection.begin_with(begin).await.map_err(failure)?;
    let answer = work(Session::passing(&mut transaction)).await;
    if answer.is_ok() {
        transaction.commit().await.map_err(failure)?;
    } else {
        transaction.rollback().await.map_err(failure)?;
    }
    answer
}

impl fmt::Debug for PostgresStore {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("PostgresStore")
            .field("connections", &self.pool.size())
            .field("idle", &self.pool.num_idle())
            .field("closed", &self.pool.is_closed())
            .finish_non_exhaustive()
    }
}

impl Store for PostgresStore {
    async fn claim(&self, name: &RecordName, claim: &Claim) -> Result<Claimed, StoreError> {
        let (name, claim) = (name.clone(), *claim);
        self.run(move |mut on| {
            Box::pin(async move { statements::claim(&mut on, &name, &claim).await })
        })
        .await
    }

    async fn reclaim(
        &self,
        name: &RecordName,
        seen: Fence,
        succession: Succession,
        claim: &Claim,
    ) -> Result<Option<Grant>, StoreError> {
        let (name, claim) = (name.clone(), *claim);
        self.run(move |mut on| {
            Box::pin(
                async move { statements::reclaim(&mut on, &name, seen, succession, &claim).await },
            )
        })
        .await
    }

    async fn renew(
        &self,
        name: &RecordName,
        token: Token,
        lease: Duration,
    ) -> Result<Settlement, StoreError> {
        let name = name.clone();
        self.run(move |mut on| {
            Box::pin(async move { statements::renew(&mut on, &name, token, lease).await })
        })
        .await
    }

    async fn complete(
        &self,
        name: &RecordName,
        token: Token,
        completion: &Completion,
    ) -> Result<Settlement, StoreError> {
        let (name, completion) = (name.clone(), completion.clone());
        self.run(move |mut on| {
            Box::pin(async move { statements::complete(&mut on, &name, token, &completion).await })
        })
        .await
    }

    async fn release(
        &self,
        name: &RecordName,
        token: Token,
        release: Release,
    ) -> Result<Settlement, StoreError> {
        let name = name.clone();
        self.run(move |mut on| {
            Box::pin(async move { statements::release(&mut on, &name, token, release).await })
        })
        .await
    }

    async fn mark_unknown(
        &self,
        name: &RecordName,
        witness: Witness,
        retention: Duration,
    ) -> Result<Settlement, StoreError> {
        let name = name.clone();
        self.run(move |mut on| {
            Box::pin(
                async move { statements::mark_unknown(&mut on, &name, witness, retention).await },
            )
        })
        .await
    }

    async fn resolve(
        &self,
        name: &RecordName,
        seen: Fence,
        resolution: &Resolution,
    ) -> Result<Settlement, StoreError> {
        let (name, resolution) = (name.clone(), resolution.clone());
        self.run(move |mut on| {
            Box::pin(async move { statements::resolve(&mut on, &name, seen, &resolution).await })
        })
        .await
    }

    async fn read(&self, name: &RecordName) -> Result<Option<Record>, StoreError> {
        let name = name.clone();
        self.run(move |mut on| Box::pin(async move { statements::read(&mut on, &name).await }))
            .await
    }

    async fn list(
        &self,
        filter: Filter,
        limit: u32,
    ) -> Result<Vec<(RecordName, Record)>, StoreError> {
        self.run(move |mut on| {
            Box::pin(async move { statements::list(&mut on, filter, limit).await })
        })
        .await
    }

    async fn forget(&self, name: &RecordName, seen: Fence) -> Result<Settlement, StoreError> {
        let name = name.clone();
        self.run(move |mut on| {
            Box::pin(async move { statements::forget(&mut on, &name, seen).await })
        })
        .await
    }

    async fn purge_expired(
        &self,
        limit: u32,
        unknown_retention: Duration,
    ) -> Result<Purged, StoreError> {
        self.run(move |mut on| {
            Box::pin(
                async move { statements::purge_expired(&mut on, limit, unknown_retention).await },
            )
        })
        .await
    }
}

fn failure(error: sqlx::Error) -> StoreError {
    sql::failure(error, answered)
}

/// What the server's own error means.
fn answered(error: &dyn DatabaseError) -> StoreError {
    let code = error.code().unwrap_or_default();
    match &*code {
        // Broken off by statement_timeout or lock_timeout.
        "57014" | "55P03" => StoreError::timed_out(),
        "53100" => StoreError::full("the server's disk"),
        "42P01" => StoreError::unavailable(
            "the tables are missing: call `migrate`, or copy the files under migrations/postgres",
        ),
        // These speak of the server and the schema; other classes quote values.
        _ if ["08", "25", "28", "3D", "42", "53", "55", "57"]
            .iter()
            .any(|class| code.starts_with(class)) =>
        {
            StoreError::unavailable(format!("{} (SQLSTATE {code})", error.message()))
        }
        _ => StoreError::unavailable(format!("SQLSTATE {code}")),
    }
}

const RECORDS: &str = include_str!("../../migrations/postgres/0001_records.sql");
