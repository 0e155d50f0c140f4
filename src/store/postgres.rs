//! Records in PostgreSQL.

mod statements;

use std::{fmt, time::Duration};

use futures_util::future::BoxFuture;
use sqlx::{
    ConnectOptions as _, Connection as _, PgConnection, PgPool,
    error::DatabaseError,
    postgres::{PgConnectOptions, PgPoolOptions},
    query, query_scalar,
};

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
/// mode; one in transaction mode would lose these settings.
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
    options: PgConnectOptions,
    deadline: Duration,
}

impl PostgresStore {
    /// Connects to the database at `url`, with all settings at their defaults.
    ///
    /// # Errors
    ///
    /// If `url` is not a PostgreSQL address, the server cannot be reached or
    /// refuses the role, or it is a standby.
    pub async fn connect(url: &str) -> Result<Self, StoreError> {
        let options: PgConnectOptions = url.parse().map_err(failure)?;
        Self::builder(options).connect().await
    }

    /// A store with settings of its own: TLS, sockets and passwords are said by
    /// `options`, the rest by the builder.
    pub fn builder(options: PgConnectOptions) -> PostgresStoreBuilder {
        PostgresStoreBuilder {
            options,
            max_connections: 10,
            acquire_timeout: Duration::from_secs(3),
            statement_timeout: Duration::from_secs(5),
            lock_timeout: Duration::from_secs(2),
            idle_in_transaction_timeout: Duration::from_secs(60),
        }
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
        let options = self.options.clone();
        sql::detached(async move {
            // A connection of its own: one that fails on the way would take the
            // migrator's lock back into the pool.
            let mut connection = options.connect().await.map_err(failure)?;
            let patience = Patience {
                statement: Duration::ZERO,
                lock: Duration::from_secs(60),
                idle_in_transaction: Duration::ZERO,
            };
            prepare(&mut connection, patience).await.map_err(failure)?;
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
        self.pool.close().await;
    }

    /// Runs work on one of the store's connections, to its end.
    async fn run<T, W>(&self, work: W) -> Result<T, StoreError>
    where
        T: Send + 'static,
        W: for<'c> FnOnce(&'c mut PgConnection) -> BoxFuture<'c, Result<T, StoreError>>
            + Send
            + 'static,
    {
        let (pool, deadline) = (self.pool.clone(), self.deadline);
        sql::detached(async move {
            let mut connection = pool.acquire().await.map_err(failure)?;
            let Ok(answer) = tokio::time::timeout(deadline, work(&mut connection)).await else {
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
        self.run(move |on| Box::pin(async move { statements::claim(on, &name, &claim).await }))
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
        self.run(move |on| {
            Box::pin(async move { statements::reclaim(on, &name, seen, succession, &claim).await })
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
        self.run(move |on| {
            Box::pin(async move { statements::renew(on, &name, token, lease).await })
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
        self.run(move |on| {
            Box::pin(async move { statements::complete(on, &name, token, &completion).await })
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
        self.run(move |on| {
            Box::pin(async move { statements::release(on, &name, token, release).await })
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
        self.run(move |on| {
            Box::pin(async move { statements::mark_unknown(on, &name, witness, retention).await })
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
        self.run(move |on| {
            Box::pin(async move { statements::resolve(on, &name, seen, &resolution).await })
        })
        .await
    }

    async fn read(&self, name: &RecordName) -> Result<Option<Record>, StoreError> {
        let name = name.clone();
        self.run(move |on| Box::pin(async move { statements::read(on, &name).await }))
            .await
    }

    async fn list(
        &self,
        filter: Filter,
        limit: u32,
    ) -> Result<Vec<(RecordName, Record)>, StoreError> {
        self.run(move |on| Box::pin(statements::list(on, filter, limit)))
            .await
    }

    async fn forget(&self, name: &RecordName, seen: Fence) -> Result<Settlement, StoreError> {
        let name = name.clone();
        self.run(move |on| Box::pin(async move { statements::forget(on, &name, seen).await }))
            .await
    }

    async fn purge_expired(
        &self,
        limit: u32,
        unknown_retention: Duration,
    ) -> Result<Purged, StoreError> {
        self.run(move |on| Box::pin(statements::purge_expired(on, limit, unknown_retention)))
            .await
    }
}

/// The settings of a [`PostgresStore`].
///
/// ```no_run
/// use std::time::Duration;
/// use tower_idempotency::{PostgresStore, sqlx::postgres::PgConnectOptions};
///
/// # async fn example() -> Result<(), tower_idempotency::StoreError> {
/// let store = PostgresStore::builder(PgConnectOptions::new().host("db").database("app"))
///     .max_connections(20)
///     .statement_timeout(Duration::from_secs(2))
///     .connect()
///     .await?;
/// # let _ = store;
/// # Ok(())
/// # }
/// ```
#[must_use = "a builder does nothing until it connects"]
pub struct PostgresStoreBuilder {
    options: PgConnectOptions,
    max_connections: u32,
    acquire_timeout: Duration,
    statement_timeout: Duration,
    lock_timeout: Duration,
    idle_in_transaction_timeout: Duration,
}

impl PostgresStoreBuilder {
    /// How many connections the store opens at most, at least 1. A call holds
    /// one for its one or two statements, a waiting request holds none.
    /// Defaults to 10.
    pub fn max_connections(mut self, connections: u32) -> Self {
        self.max_connections = connections.max(1);
        self
    }

    /// How long a call waits for a connection before it fails as timed out.
    /// Defaults to 3 s.
    pub fn acquire_timeout(mut self, patience: Duration) -> Self {
        self.acquire_timeout = patience;
        self
    }

    /// How long the server works on one statement before it breaks it off.
    /// Defaults to 5 s.
    pub fn statement_timeout(mut self, patience: Duration) -> Self {
        self.statement_timeout = patience;
        self
    }

    /// How long a statement waits for a record that another transaction is
    /// writing before it fails as timed out. Defaults to 2 s.
    pub fn lock_timeout(mut self, patience: Duration) -> Self {
        self.lock_timeout = patience;
        self
    }

    /// How long a transaction on the store's connections may be idle before
    /// the server ends it, and with it the locks of an owner that hangs.
    /// Defaults to 60 s.
    pub fn idle_in_transaction_timeout(mut self, patience: Duration) -> Self {
        self.idle_in_transaction_timeout = patience;
        self
    }

    /// Connects, without making or changing a table.
    ///
    /// # Errors
    ///
    /// If the server cannot be reached or refuses the role, or it is a standby.
    pub async fn connect(self) -> Result<PostgresStore, StoreError> {
        let options = match self.options.get_application_name() {
            Some(_) => self.options,
            None => self.options.application_name("tower-idempotency"),
        };
        let patience = Patience {
            statement: self.statement_timeout,
            lock: self.lock_timeout,
            idle_in_transaction: self.idle_in_transaction_timeout,
        };
        let pool = PgPoolOptions::new()
            .max_connections(self.max_connections)
            .acquire_timeout(self.acquire_timeout)
            .after_connect(move |connection, _| Box::pin(prepare(connection, patience)))
            // A question before every call would double the time of each; one
            // after a pause finds the connections that a firewall forgot.
            .test_before_acquire(false)
            .before_acquire(|connection, used| {
                Box::pin(async move {
                    if used.idle_for > TRUSTED_IDLE {
                        connection.ping().await?;
                    }
                    Ok(true)
                })
            });
        let store = PostgresStore {
            pool: pool.connect_lazy_with(options.clone()),
            options,
            // For the two statements of a call, and the way there.
            deadline: 2 * self.statement_timeout + Duration::from_secs(1),
        };
        store.check_server().await?;
        Ok(store)
    }
}

impl PostgresStore {
    /// Says why a server is unfit; a pool would only try it again until it
    /// gives up without a reason.
    async fn check_server(&self) -> Result<(), StoreError> {
        let options = self.options.clone();
        let patience = self.pool.options().get_acquire_timeout();
        sql::detached(async move {
            tokio::time::timeout(patience, async {
                let mut connection = options.connect().await.map_err(failure)?;
                refuse_standby(&mut connection).await.map_err(failure)?;
                connection.close().await.map_err(failure)
            })
            .await
            .map_err(|_| StoreError::timed_out())?
        })
        .await
    }
}

impl fmt::Debug for PostgresStoreBuilder {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        // The connection's options have a password in them.
        f.debug_struct("PostgresStoreBuilder")
            .field("max_connections", &self.max_connections)
            .field("acquire_timeout", &self.acquire_timeout)
            .field("statement_timeout", &self.statement_timeout)
            .field("lock_timeout", &self.lock_timeout)
            .field(
                "idle_in_transaction_timeout",
                &self.idle_in_transaction_timeout,
            )
            .finish_non_exhaustive()
    }
}

/// How long the server puts up with this session.
#[derive(Clone, Copy)]
struct Patience {
    statement: Duration,
    lock: Duration,
    idle_in_transaction: Duration,
}

/// Makes a new connection fit for records, whatever its role's defaults are.
async fn prepare(connection: &mut PgConnection, patience: Patience) -> Result<(), sqlx::Error> {
    refuse_standby(connection).await?;
    let millis = |patience: Duration| patience.as_millis().min(LONGEST_TIMEOUT).to_string();
    query(SESSION)
        .persistent(false)
        .bind(millis(patience.statement))
        .bind(millis(patience.lock))
        .bind(millis(patience.idle_in_transaction))
        .execute(connection)
        .await
        .map(drop)
}

async fn refuse_standby(connection: &mut PgConnection) -> Result<(), sqlx::Error> {
    let standby: bool = query_scalar("SELECT pg_is_in_recovery()")
        .persistent(false)
        .fetch_one(connection)
        .await?;
    if standby {
        return Err(sqlx::Error::Configuration(
            "the server is a standby, where nothing can be claimed: connect to the primary".into(),
        ));
    }
    Ok(())
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

/// Whoever asks for more durability than `on` keeps it.
const SESSION: &str = "
SELECT set_config('default_transaction_isolation', 'read committed', false),
       set_config('default_transaction_read_only', 'off', false),
       set_config('default_transaction_deferrable', 'off', false),
       set_config('synchronous_commit',
           CASE current_setting('synchronous_commit')
               WHEN 'remote_apply' THEN 'remote_apply'
               ELSE 'on'
           END, false),
       set_config('statement_timeout', $1, false),
       set_config('lock_timeout', $2, false),
       set_config('idle_in_transaction_session_timeout', $3, false)";

const RECORDS: &str = include_str!("../../migrations/postgres/0001_records.sql");
const TRUSTED_IDLE: Duration = Duration::from_secs(1);

/// In milliseconds, as the server's settings are.
const LONGEST_TIMEOUT: u128 = i32::MAX as u128;
