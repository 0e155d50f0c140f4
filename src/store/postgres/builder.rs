//! The settings of a store's connections.

use std::{fmt, sync::Arc, time::Duration};

use sqlx::{
    AssertSqlSafe, SqlSafeStr as _,
    postgres::{PgConnectOptions, PgPoolOptions},
};
use tokio::sync::Semaphore;

use super::{
    PostgresStore,
    claims::Claims,
    connections::Connections,
    failures::not_answered,
    looks::Looks,
    opener::Opener,
    schema::{Schema, Statements},
    server::{self, Wanted},
    session::{self, LOCAL_PLANS, Patience},
    settlements::Settlements,
    statements::{Commits, Fenced},
};
use crate::store::{
    StoreError, sql,
    sql::batcher::{Batcher, ConcurrentBatches},
    sql::reads::Reads,
    sql::single::{Limits, SingleCalls},
};

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
    max_connections: u32,
    transaction_connections: u32,
    acquire_timeout: Duration,
    patience: Patience,
    most_waiting: usize,
    pooler_safe: bool,
}

impl PostgresStoreBuilder {
    pub(super) fn new(options: PgConnectOptions) -> Self {
        Self {
            options,
            schema: None,
            max_connections: 10,
            transaction_connections: 10,
            acquire_timeout: Duration::from_secs(3),
            patience: Patience {
                statement: Duration::from_secs(5),
                lock: Duration::from_secs(2),
                idle_in_transaction: Duration::from_secs(60),
            },
            most_waiting: 4096,
            pooler_safe: false,
        }
    }

    /// Sets the schema of the store's tables. It need not exist yet.
    ///
    /// Each statement names the schema. A `search_path` that a handler sets in its
    /// transaction, or that another client of a pooler left behind, changes
    /// nothing.
    ///
    /// Defaults to the schema in which a new session of the role finds
    /// `idempotency_records`. If there is no such table, it is the schema in which
    /// the role would create one: the first of its `search_path` that exists. The
    /// store looks for it once, when it connects.
    pub fn schema(mut self, schema: impl Into<String>) -> Self {
        self.schema = Some(schema.into());
        self
    }

    /// Sets how many connections the store opens at most for requests, at least 1.
    ///
    /// Calls that come at the same moment share one, and a call that waits for a
    /// locked record holds none: three connections carry nearly everything. The
    /// others are used while the server or the network is slow.
    ///
    /// The store opens up to four more when it needs them: two look up a COMMIT
    /// whose answer got lost, and two list, sweep and check the tables. Defaults to
    /// 10.
    pub fn max_connections(mut self, connections: u32) -> Self {
        self.max_connections = connections.max(1);
        self
    }

    /// How many connections more the store opens at most for the transactions of
    /// handlers, at least 1; none before the first
    /// [`begin`](PostgresStore::begin). Defaults to 10.
    pub fn transaction_connections(mut self, connections: u32) -> Self {
        self.transaction_connections = connections.max(1);
        self
    }

    /// How many claims, how many heartbeats and how many looks at records may wait
    /// for the statements before them, and as many of each for records that others
    /// have locked; one more is refused with 503. Outcomes are always written
    /// down: they are no more than the requests in flight. Defaults to 4096.
    pub fn waiting_calls(mut self, calls: usize) -> Self {
        self.most_waiting = calls;
        self
    }

    /// How long a call waits for a connection before it fails as timed out,
    /// whether one is free, broken or yet to be opened. Defaults to 3 s.
    ///
    /// An attempt to connect fails after the same time. Later calls that need a
    /// connection then fail at once, until an attempt succeeds.
    pub fn acquire_timeout(mut self, patience: Duration) -> Self {
        self.acquire_timeout = patience;
        self
    }

    /// How long the server works on one statement before it breaks it off.
    /// Defaults to 5 s.
    pub fn statement_timeout(mut self, patience: Duration) -> Self {
        self.patience.statement = patience.max(SHORTEST);
        self
    }

    /// Sets how long a call waits for a record that another transaction has locked
    /// before it fails as timed out.
    ///
    /// A call holds no connection while it waits: it is tried again, at first after
    /// 5 ms and then at most every 200 ms. Defaults to 2 s.
    pub fn lock_timeout(mut self, patience: Duration) -> Self {
        self.patience.lock = patience.max(SHORTEST);
        self
    }

    /// How long a transaction on the store's connections may be idle before
    /// the server ends it, and with it the locks of an owner that hangs.
    /// Defaults to 60 s.
    pub fn idle_in_transaction_timeout(mut self, patience: Duration) -> Self {
        self.patience.idle_in_transaction = patience.max(SHORTEST);
        self
    }

    /// Makes the store safe behind a pooler that gives each transaction another
    /// server connection, as PgBouncer does with `pool_mode = transaction`.
    ///
    /// Each call becomes a transaction of its own, with the store's settings in
    /// it and without prepared statements that outlive it: about twice the round
    /// trips. PgBouncer needs `ignore_startup_parameters = extra_float_digits`.
    /// In a handler's own transaction, call
    /// [`persistent(false)`](sqlx::query::Query::persistent) on each query.
    /// Defaults to off.
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
    /// - The table of records is `UNLOGGED`.
    /// - The name of the schema is empty or longer than 63 bytes, or none was given
    ///   and the role's `search_path` has no schema that exists.
    pub async fn connect(self) -> Result<PostgresStore, StoreError> {
        let options = match self.options.get_application_name() {
            Some(_) => self.options,
            None => self.options.application_name("tower-idempotency"),
        };
        let (patience, pooler_safe) = (self.patience, self.pooler_safe);
        let unhurried = Patience {
            statement: Duration::ZERO,
            lock: Duration::ZERO,
            ..patience
        };
        let wanted = Wanted {
            schema: self.schema.map(Schema::named).transpose()?,
            pooler_safe,
        };
        let sql = check_server(options.clone(), wanted, self.acquire_timeout).await?;
        let sql = Arc::new(sql);
        let for_transactions = Arc::clone(&sql);
        let transactions = PgPoolOptions::new()
            .max_connections(self.transaction_connections)
            .acquire_timeout(self.acquire_timeout)
            .after_connect(move |connection, _| {
                let sql = Arc::clone(&for_transactions);
                Box::pin(
                    async move { session::prepare(connection, &sql, unhurried, pooler_safe).await },
                )
            });
        let opener = Arc::new(Opener::new(
            options.clone(),
            Arc::clone(&sql),
            patience,
            pooler_safe,
            self.acquire_timeout,
        ));
        // For the two statements of a call, and the way there.
        let deadline = patience
            .statement
            .saturating_mul(2)
            .saturating_add(Duration::from_secs(1));
        let statement = |text: String| AssertSqlSafe(Arc::<str>::from(text)).into_sql_str();
        let begin = pooler_safe.then(|| statement(patience.begin() + LOCAL_PLANS));
        let connections = |most, bound| {
            Arc::new(Connections::of(
                Arc::clone(&opener),
                (most, bound),
                self.acquire_timeout,
                deadline,
                begin.clone(),
                Arc::clone(&sql),
            ))
        };
        let limits = |attempts, max_waiting| Limits {
            permits: Arc::new(Semaphore::new(attempts)),
            max_waiting,
            lock_timeout: patience.lock,
        };
        let most = self.max_connections;
        let for_requests = connections(most, format!("`max_connections` is {most}"));
        let commit_connections = connections(
            COMMIT_CONNECTIONS,
            format!("there are {COMMIT_CONNECTIONS} for looking up COMMITs"),
        );
        let operator_connections = connections(
            OPERATOR_CONNECTIONS,
            format!("there are {OPERATOR_CONNECTIONS} for lists, sweeps and checks of the tables"),
        );
        let single = limits(ATTEMPTS, self.most_waiting);
        let large = ConcurrentBatches {
            usual: 1,
            max: (most as usize / 5).clamp(1, 2),
        };
        let claims = Claims::new(Arc::clone(&for_requests));
        let settlements = || Settlements(Arc::clone(&for_requests));
        let looks = || Looks(Arc::clone(&for_requests));
        let reads = Reads {
            small: Batcher::new(looks(), CONCURRENT, single.clone()),
            large: Batcher::new(looks(), large, single.clone()),
        };
        let fenced = Arc::new(Fenced(Arc::clone(&for_requests)));
        let commits = Arc::new(Commits(Arc::clone(&commit_connections)));
        let commit_limits = limits(COMMIT_CONNECTIONS as usize, usize::MAX);
        Ok(PostgresStore {
            claims: Batcher::new(claims, CONCURRENT, single.clone()),
            settlements: Batcher::new(settlements(), CONCURRENT, single.clone()),
            large_settlements: Batcher::new(settlements(), large, single.clone()),
            reads,
            fenced: SingleCalls::new(fenced, single),
            commits: SingleCalls::new(commits, commit_limits),
            commit_connections,
            operator_connections,
            connections: for_requests,
            transactions: transactions.connect_lazy_with(options.clone()),
            pooled: pooler_safe.then(|| statement(unhurried.begin())),
            options: Arc::new(options),
        })
    }
}

impl fmt::Debug for PostgresStoreBuilder {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        // The connection's options have a password in them.
        f.debug_struct("PostgresStoreBuilder")
            .field("schema", &self.schema)
            .field("max_connections", &self.max_connections)
            .field("transaction_connections", &self.transaction_connections)
            .field("acquire_timeout", &self.acquire_timeout)
            .field("patience", &self.patience)
            .finish_non_exhaustive()
    }
}

/// Says why a server is unfit; a pool would only try it again until it gives up
/// without a reason.
async fn check_server(
    options: PgConnectOptions,
    wanted: Wanted,
    patience: Duration,
) -> Result<Statements, StoreError> {
    sql::detached(async move {
        let inspected = tokio::time::timeout(patience, server::inspect(&options, wanted)).await;
        inspected.unwrap_or_else(|_| Err(not_answered(&options, patience)))
    })
    .await
}

/// How many calls are made alone at a time. An attempt waits for no lock.
const ATTEMPTS: usize = 2;

/// How many COMMITs are looked up at a time.
const COMMIT_CONNECTIONS: u32 = 2;

/// How many lists, sweeps and checks of the tables run at a time. A list may take
/// long, and must not hold up the sweeps.
const OPERATOR_CONNECTIONS: u32 = 2;

/// One carries most; a second and a third when a server or a connection is slow.
const CONCURRENT: ConcurrentBatches = ConcurrentBatches { usual: 1, max: 3 };

/// To the server, a timeout of nothing is none at all.
const SHORTEST: Duration = Duration::from_millis(1);
