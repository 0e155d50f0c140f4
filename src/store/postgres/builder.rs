//! The settings of a store's connections.

use std::{fmt, sync::Arc, time::Duration};

use sqlx::postgres::PgConnectOptions;
use tokio::sync::Semaphore;

use super::{
    Inner, PostgresStore,
    admin::Admin,
    claims::Claims,
    connector::Connector,
    engine::PostgresEngine,
    error::{connect_timeout, failure},
    fenced::Fenced,
    pool::Pool,
    reads::RecordReads,
    rows::MAX_ROWS,
    schema::Schema,
    server,
    session::{SessionSettings, Timeouts},
    transactions::HandlerTransactions,
    transitions::Transitions,
    wake_ups::WakeUps,
};
use crate::store::{
    StoreError,
    sql::batcher::{Batcher, ConcurrentBatches, MAX_CALLS},
    sql::detached,
    sql::reads::Reads,
    sql::single::{Limits, SingleCalls},
};

impl PostgresStore {
    /// Connects to the database at `url`, with all settings at their defaults.
    ///
    /// # Errors
    ///
    /// If `url` is not a PostgreSQL address, or for one of the reasons of
    /// [`PostgresStoreBuilder::connect`].
    pub async fn connect(url: &str) -> Result<Self, StoreError> {
        let options: PgConnectOptions = url.parse().map_err(failure)?;
        Self::builder(options).connect().await
    }

    /// Returns a builder for a store with other settings. `options` name the server,
    /// TLS and the password.
    pub fn builder(options: PgConnectOptions) -> PostgresStoreBuilder {
        PostgresStoreBuilder {
            options,
            schema: None,
            engine: None,
            max_connections: 10,
            transaction_connections: 10,
            acquire_timeout: Duration::from_secs(3),
            timeouts: Timeouts {
                statement: Duration::from_secs(5),
                lock: Duration::from_secs(2),
                idle_in_transaction: Duration::from_secs(60),
            },
            max_waiting_calls: 4096,
            pooler_safe: false,
        }
    }
}

/// The settings of a [`PostgresStore`].
///
/// ```
/// use std::time::Duration;
/// use tower_idempotency::{PostgresStore, sqlx::postgres::PgConnectOptions};
///
/// # #[tokio::main(flavor = "current_thread")]
/// # async fn main() -> Result<(), Box<dyn std::error::Error>> {
/// # let Ok(url) = std::env::var("DATABASE_URL") else { return Ok(()) };
/// let options: PgConnectOptions = url.parse()?;
/// let store = PostgresStore::builder(options)
///     .max_connections(20)
///     .statement_timeout(Duration::from_secs(2))
///     .connect()
///     .await?;
/// # store.close().await;
/// # Ok(())
/// # }
/// ```
#[must_use = "a builder does nothing until it connects"]
pub struct PostgresStoreBuilder {
    options: PgConnectOptions,
    schema: Option<String>,
    engine: Option<PostgresEngine>,
    max_connections: u32,
    transaction_connections: u32,
    acquire_timeout: Duration,
    timeouts: Timeouts,
    max_waiting_calls: usize,
    pooler_safe: bool,
}

impl PostgresStoreBuilder {
    /// Sets the schema of the store's tables. It need not exist yet.
    ///
    /// Each statement names the schema. A `search_path` that a handler sets in its
    /// transaction, or that another client of a pooler left behind, changes nothing.
    ///
    /// Defaults to the schema in which a new session of the role finds
    /// `idempotency_records`. If there is no such table, it is the schema in which the
    /// role would create one: the first of its `search_path` that exists. The store
    /// looks for it once, when it connects.
    pub fn schema(mut self, schema: impl Into<String>) -> Self {
        self.schema = Some(schema.into());
        self
    }

    /// Sets the engine behind the connection. Defaults to the one that the server names
    /// when the store connects.
    ///
    /// Without it, connecting to YugabyteDB or CockroachDB fails: the store is not tested
    /// there. [`Citus`](PostgresEngine::Citus) has the statements that ask least of an
    /// engine. Run the suite of the feature `conformance` on yours before you rely on it.
    pub fn engine(mut self, engine: PostgresEngine) -> Self {
        self.engine = Some(engine);
        self
    }

    /// Sets the limit of connections for requests, at least 1. Defaults to 10.
    ///
    /// All but four, and at most six, are for calls that are sent alone. The others are for
    /// batches. A call that waits for a locked record holds no connection.
    ///
    /// The store opens up to four more connections when it needs them. Two look up a
    /// COMMIT whose answer got lost, and two list, sweep and check the tables. While requests
    /// wait for those of another process, one more listens.
    pub fn max_connections(mut self, connections: u32) -> Self {
        self.max_connections = connections.max(1);
        self
    }

    /// Sets the limit of additional connections for the transactions of handlers, at
    /// least 1. Defaults to 10.
    ///
    /// The first [`begin`](PostgresStore::begin) opens the first of them.
    pub fn transaction_connections(mut self, connections: u32) -> Self {
        self.transaction_connections = connections.max(1);
        self
    }

    /// Sets the limit of waiting calls for each kind: claims, heartbeats and reads.
    /// Defaults to 4096.
    ///
    /// As many more of each kind may wait for locked records. A call beyond the limit
    /// is refused with 503. Outcomes are always recorded, since there are no more of
    /// them than requests in flight.
    pub fn max_waiting_calls(mut self, calls: usize) -> Self {
        self.max_waiting_calls = calls;
        self
    }

    /// Sets how long a call waits for a connection, idle or new, before it fails as
    /// timed out, at least 1 ms. Defaults to 3 s.
    ///
    /// An attempt to connect fails after the same time. Later calls that need a
    /// connection then fail at once, until an attempt succeeds.
    pub fn acquire_timeout(mut self, timeout: Duration) -> Self {
        self.acquire_timeout = timeout.max(SHORTEST);
        self
    }

    /// Sets after what time the server cancels a statement, at least 1 ms. Defaults to
    /// 5 s.
    pub fn statement_timeout(mut self, timeout: Duration) -> Self {
        self.timeouts.statement = timeout.max(SHORTEST);
        self
    }

    /// Sets how long a call waits for a record that another transaction has locked
    /// before it fails as timed out, at least 1 ms. Defaults to 2 s.
    ///
    /// A call holds no connection while it waits: it is tried again, at first after
    /// 5 ms and then at most every 200 ms.
    pub fn lock_timeout(mut self, timeout: Duration) -> Self {
        self.timeouts.lock = timeout.max(SHORTEST);
        self
    }

    /// Sets how long a transaction on the store's connections may be idle before the
    /// server ends it, at least 1 ms. Defaults to 60 s.
    ///
    /// This releases the locks of a handler that hangs.
    pub fn idle_in_transaction_timeout(mut self, timeout: Duration) -> Self {
        self.timeouts.idle_in_transaction = timeout.max(SHORTEST);
        self
    }

    /// Makes the store safe behind a pooler that gives each transaction another server
    /// connection, as PgBouncer does with `pool_mode = transaction`. Defaults to off.
    ///
    /// Each call becomes a transaction of its own, with the store's settings in it and
    /// without prepared statements that outlive it. That takes about twice the round
    /// trips. PgBouncer needs `ignore_startup_parameters = extra_float_digits`. In a
    /// handler's own transaction, call
    /// [`persistent(false)`](sqlx::query::Query::persistent) on each query.
    pub fn pooler_safe(mut self) -> Self {
        self.pooler_safe = true;
        self
    }

    /// Connects, without making or changing a table.
    ///
    /// # Errors
    ///
    /// - The server cannot be reached, refuses the role, is a standby, or is older
    ///   than PostgreSQL 12.
    /// - A pooler gives each transaction another server connection, and the store is
    ///   not [`pooler_safe`](Self::pooler_safe).
    /// - The table of records is `UNLOGGED`, or distributed by another column than `key`.
    /// - The name of the schema is empty or longer than 63 bytes, or none was given
    ///   and the role's `search_path` has no schema that exists.
    pub async fn connect(self) -> Result<PostgresStore, StoreError> {
        let options = match self.options.get_application_name() {
            Some(_) => self.options,
            None => self.options.application_name("tower-idempotency"),
        };
        let (timeouts, pooler_safe) = (self.timeouts, self.pooler_safe);
        let schema = inspect(
            options.clone(),
            self.schema,
            self.engine,
            pooler_safe,
            self.acquire_timeout,
        );
        let schema = Arc::new(schema.await?);
        let connector = Arc::new(Connector::new(
            options,
            Arc::clone(&schema),
            SessionSettings::for_calls(&schema, timeouts, pooler_safe),
            self.acquire_timeout,
        ));
        // For the two statements of a call, and the network.
        let call_timeout = timeouts
            .statement
            .saturating_mul(2)
            .saturating_add(Duration::from_secs(1));
        let pool = |max, limit| {
            let connector = Arc::clone(&connector);
            Arc::new(Pool::new(connector, max, limit, call_timeout))
        };
        let max = self.max_connections;
        let requests = pool(max, format!("`max_connections` is {max}"));
        let lookups = pool(
            LOOKUP_CONNECTIONS,
            format!("there are {LOOKUP_CONNECTIONS} for looking up COMMITs"),
        );
        let admin = pool(
            ADMIN_CONNECTIONS,
            format!("there are {ADMIN_CONNECTIONS} for lists, sweeps and checks of the tables"),
        );

        let limits = |attempts, max_waiting| Limits {
            permits: Arc::new(Semaphore::new(attempts)),
            max_waiting,
            lock_timeout: timeouts.lock,
        };
        let shared = limits(ATTEMPTS, self.max_waiting_calls);
        let alone = (max as usize).saturating_sub(BATCH_CONNECTIONS);
        let alone = Arc::new(Semaphore::new(alone.min(MAX_ALONE)));
        let is_plain = schema.engine == PostgresEngine::Postgres;
        let concurrent = |is_large: bool, is_of_rows: bool| match is_large {
            // On other engines a batch costs more than its calls, unless it is one of rows.
            _ if !is_plain && !is_of_rows => ConcurrentBatches {
                alone: Arc::new(Semaphore::new(0)),
                usual: max as usize,
                max: max as usize,
                max_calls: 1,
            },
            // Each node commits twice for a batch of rows, whatever its size: one large batch
            // costs less than two small ones.
            _ if !is_plain => ConcurrentBatches {
                alone: Arc::new(Semaphore::new(0)),
                usual: 1,
                max: 3,
                max_calls: MAX_ROWS,
            },
            true => ConcurrentBatches {
                alone: Arc::new(Semaphore::new(0)),
                usual: 1,
                max: (max as usize / 5).clamp(1, 2),
                max_calls: MAX_CALLS,
            },
            // One batch carries most calls. Two more are made while the server or a
            // connection is slow.
            false => ConcurrentBatches {
                alone: Arc::clone(&alone),
                usual: 1,
                max: 3,
                max_calls: MAX_CALLS,
            },
        };
        let reads = |is_large| {
            let reads = RecordReads::new(Arc::clone(&requests), &schema, is_large);
            Batcher::new(reads, concurrent(is_large, false), shared.clone())
        };
        let transitions = |is_large| {
            let transitions = Transitions::new(Arc::clone(&requests), &schema, is_large);
            Batcher::new(transitions, concurrent(is_large, true), shared.clone())
        };
        let claims = Claims::new(Arc::clone(&requests), &schema);
        let fenced = Arc::new(Fenced::new(Arc::clone(&requests), &schema));
        Ok(PostgresStore {
            inner: Arc::new(Inner {
                claims: Batcher::new(claims, concurrent(false, true), shared.clone()),
                transitions: transitions(false),
                large_transitions: transitions(true),
                reads: Reads {
                    small: reads(false),
                    large: reads(true),
                },
                fenced: SingleCalls::new(fenced, shared.clone()),
                transactions: HandlerTransactions::new(
                    &connector,
                    SessionSettings::for_handlers(&schema, timeouts, pooler_safe),
                    self.transaction_connections,
                    lookups,
                    limits(LOOKUP_CONNECTIONS as usize, usize::MAX),
                ),
                admin: Admin::new(admin, &schema),
                usage: super::usage::Statements::new(&schema),
                wake_ups: Arc::new(WakeUps::new(Arc::clone(&connector))),
                #[cfg(feature = "inbox")]
                inbox: super::inbox::Statements::new(&schema),
                #[cfg(feature = "outbox")]
                outbox: super::outbox::Statements::new(&schema),
                #[cfg(feature = "outbox")]
                wake: crate::store::sql::wake::Wake::default(),
                #[cfg(feature = "outbox")]
                notifications: super::notifications::Notifications::default(),
                pool: requests,
                connector,
            }),
        })
    }
}

impl fmt::Debug for PostgresStoreBuilder {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        // The options of the connection contain a password.
        f.debug_struct("PostgresStoreBuilder")
            .field("schema", &self.schema)
            .field("max_connections", &self.max_connections)
            .field("transaction_connections", &self.transaction_connections)
            .field("acquire_timeout", &self.acquire_timeout)
            .field("timeouts", &self.timeouts)
            .finish_non_exhaustive()
    }
}

/// Inspects the server once, so that an unfit one is reported when the store connects.
async fn inspect(
    options: PgConnectOptions,
    schema: Option<String>,
    engine: Option<PostgresEngine>,
    pooler_safe: bool,
    timeout: Duration,
) -> Result<Schema, StoreError> {
    detached(async move {
        let schema = server::inspect(&options, schema, engine, pooler_safe);
        let schema = tokio::time::timeout(timeout, schema).await;
        schema.unwrap_or_else(|_| Err(connect_timeout(&options, timeout)))
    })
    .await
}

/// How many calls are made alone at the same time. Further ones share statements, which
/// cost the server less.
const MAX_ALONE: usize = 6;

/// How many connections are left to batches while calls are made alone.
const BATCH_CONNECTIONS: usize = 4;

/// How many single calls are made at the same time. An attempt waits for no lock.
const ATTEMPTS: usize = 2;

/// How many COMMITs are looked up at the same time.
const LOOKUP_CONNECTIONS: u32 = 2;

/// A sweep needs a connection while a list takes long.
const ADMIN_CONNECTIONS: u32 = 2;

/// A timeout of zero means none to the server.
const SHORTEST: Duration = Duration::from_millis(1);
