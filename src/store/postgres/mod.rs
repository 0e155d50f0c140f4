//! Records in PostgreSQL.

mod builder;
mod claims;
mod connections;
mod failures;
mod looks;
mod members;
mod opener;
mod removals;
mod schema;
mod server;
mod session;
mod settlements;
mod statements;
mod tables;
mod transaction;

use std::{fmt, sync::Arc, time::Duration};

use futures_util::future::BoxFuture;
use sqlx::{PgPool, SqlStr, postgres::PgConnectOptions};

pub use self::{builder::PostgresStoreBuilder, transaction::PostgresTransaction};
use self::{
    claims::Claims,
    connections::Connections,
    failures::failure,
    looks::Looks,
    session::Session,
    settlements::Settlements,
    statements::{Commits, Fenced, FencedAnswer, FencedCall, FencedTransition},
};
use super::{
    Claim, Claimed, Grant, MarkedBy, Purged, ReclaimAs, Record, Store, StoreError, Transition,
    Transitioned,
    admin::{Filter, Page},
    sql::batcher::Batcher,
    sql::calls::{ClaimCall, OwnerTransition, TransitionCall},
    sql::reads::Reads,
    sql::single::SingleCalls,
    sql::{self, Resolved},
};
use crate::{Fence, RecordName, Token};

/// Records in PostgreSQL, shared by every process that uses the database.
///
/// **What is promised.** A call that returns is durable: it was flushed to the
/// server's disk, whatever the role's or the server's defaults say. All times
/// are the server's; the clocks of the application's hosts do not matter.
/// A dropped call ends on its own: its connection is another call's only after
/// its last word. Durations longer than 100 years count as 100 years.
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
/// timeouts; and on those that no handler's transaction runs on, the planner's
/// settings that lead to each record by its name. Each statement names the
/// [schema](PostgresStoreBuilder::schema) of the store's tables.
///
/// It must talk to the server directly, or to a pooler in session mode; one in
/// transaction mode would lose these settings, unless the store is
/// [`pooler_safe`](PostgresStoreBuilder::pooler_safe). Connecting fails where it
/// notices such a pooler.
///
/// It needs PostgreSQL 12 or later.
///
/// # Tables
///
/// [`migrate`](Self::migrate) makes the table and the sequences
/// `idempotency_records`, `idempotency_fences` and `idempotency_removals`, with a
/// ledger of its own, `_idempotency_migrations`. Connecting makes nothing: the
/// application decides who may change a schema, and when. Applications with
/// migrations of their own copy [`schema_sql`](Self::schema_sql) into them.
/// [`check_schema`](Self::check_schema) names every difference.
///
/// A role that may read and write the table, and use and read the sequences, is
/// enough to serve; [`grants_for`](Self::grants_for) returns its GRANT statements.
///
/// # A server that is gone
///
/// After a failed attempt to connect, calls that need a connection fail at once
/// with its error. The store makes one attempt a second in the background for as
/// long as there are calls, and serves again when one succeeds.
///
/// # Many calls at once
///
/// Claims that come while one is under way travel in one statement, and so do
/// completions, releases and heartbeats, and reads of records; a lone call goes
/// at once, and nothing waits for a timer. Each caller gets its own answer. A call
/// that the database does not take fails alone. Past a bound of
/// [waiting calls](PostgresStoreBuilder::waiting_calls) a call is refused, and
/// nothing of it is sent.
///
/// A call whose record another transaction has locked is tried again for up to the
/// [lock timeout](PostgresStoreBuilder::lock_timeout). It holds no connection
/// meanwhile. Responses over 8 KiB are read and written apart from the rest, about
/// 1 MiB at a time, so that they delay no other call.
///
/// ```
/// # use axum::{Router, body::Body, http::{Request, StatusCode}, routing::post};
/// # use tower::ServiceExt;
/// # use tower_idempotency::{IdempotencyLayer, Scope, sqlx::{self, ConnectOptions, Connection}};
/// use tower_idempotency::PostgresStore;
///
/// # #[tokio::main(flavor = "current_thread")]
/// # async fn main() -> Result<(), Box<dyn std::error::Error>> {
/// # let Ok(server) = std::env::var("DATABASE_URL") else { return Ok(()) };
/// # let mut admin = sqlx::PgConnection::connect(&server).await?;
/// # let database = format!("idempotency_connect_{}", std::process::id());
/// # let statement = |what: &str| sqlx::AssertSqlSafe(format!("{what} DATABASE {database}"));
/// # sqlx::raw_sql(statement("CREATE")).execute(&mut admin).await?;
/// # let options: sqlx::postgres::PgConnectOptions = server.parse()?;
/// # let url = options.database(&database).to_url_lossy().to_string();
/// // For example "postgres://app@localhost/app".
/// let store = PostgresStore::connect(&url).await?;
/// store.migrate().await?;
/// # let layer = IdempotencyLayer::required(store.clone(), |_| Some(Scope::single_tenant()));
/// # let app = Router::new().route("/", post(StatusCode::CREATED).layer(layer.build()?));
/// # for replayed in [false, true] {
/// #     let request = Request::post("/").header("idempotency-key", "k").body(Body::empty())?;
/// #     let response = app.clone().oneshot(request).await?;
/// #     assert_eq!(response.status(), StatusCode::CREATED);
/// #     assert_eq!(response.headers().contains_key("idempotent-replayed"), replayed);
/// # }
/// // … serve, then:
/// store.close().await;
/// # sqlx::raw_sql(statement("DROP")).execute(&mut admin).await?;
/// # Ok(())
/// # }
/// ```
///
/// Clones share the connections. Calls need a Tokio runtime.
#[derive(Clone)]
pub struct PostgresStore {
    connections: Arc<Connections>,
    claims: Batcher<Claims>,
    settlements: Batcher<Settlements>,
    /// With large responses, which take long on a slow network.
    large_settlements: Batcher<Settlements>,
    reads: Reads<Looks>,
    fenced: SingleCalls<Fenced>,
    /// With connections of their own: a handler waits for them.
    commits: SingleCalls<Commits>,
    commit_connections: Arc<Connections>,
    /// For an operator's pages and for sweeps, which no request waits for.
    operator_connections: Arc<Connections>,
    transactions: PgPool,
    /// What begins a transaction of a handler behind a pooler.
    pooled: Option<SqlStr>,
    options: Arc<PgConnectOptions>,
}

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

    /// A store with settings of its own: TLS, sockets and passwords are said by
    /// `options`, the rest by the builder.
    pub fn builder(options: PgConnectOptions) -> PostgresStoreBuilder {
        PostgresStoreBuilder::new(options)
    }

    /// Closes the connections, each after the call that it is busy with. Later
    /// calls fail.
    pub async fn close(&self) {
        self.transactions.close().await;
        self.connections.close().await;
        self.commit_connections.close().await;
        self.operator_connections.close().await;
    }

    /// Runs an operator's work to its end, on a connection that no request needs.
    async fn operate<T, W>(&self, work: W) -> Result<T, StoreError>
    where
        T: Send + 'static,
        W: for<'c> FnOnce(&'c mut Session<'_>) -> BoxFuture<'c, Result<T, StoreError>>
            + Send
            + 'static,
    {
        self.operator_connections.check()?;
        let connections = Arc::clone(&self.operator_connections);
        sql::detached(async move { connections.run(async |on| work(on).await).await }).await
    }

    async fn transition_by_fence(
        &self,
        name: &RecordName,
        seen: Fence,
        transition: FencedTransition,
    ) -> Result<Transitioned, StoreError> {
        self.connections.check()?;
        let name = name.clone();
        let call = FencedCall {
            name,
            seen,
            transition,
        };
        match self.fenced.call(call).await? {
            FencedAnswer::Settled(settlement) => Ok(settlement),
            FencedAnswer::Reclaimed(_) => {
                Err(StoreError::unavailable("a call got another's answer"))
            }
        }
    }

    async fn transition_by_owner(
        &self,
        name: &RecordName,
        token: Token,
        transition: OwnerTransition,
    ) -> Result<Transitioned, StoreError> {
        self.connections.check()?;
        let name = name.clone();
        let call = TransitionCall {
            name,
            token,
            transition,
        };
        let settlements = match call.is_large() {
            true => &self.large_settlements,
            false => &self.settlements,
        };
        settlements.call(call).await
    }
}

impl fmt::Debug for PostgresStore {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("PostgresStore")
            .field("idle", &self.connections.num_idle())
            .field("closed", &self.connections.is_closed())
            .finish_non_exhaustive()
    }
}

impl Store for PostgresStore {
    async fn claim(&self, name: &RecordName, claim: &Claim) -> Result<Claimed, StoreError> {
        self.connections.check()?;
        let call = ClaimCall {
            name: name.clone(),
            claim: *claim,
        };
        let answer = self.claims.call(call).await?;
        self.reads.with_response(name, claim, answer).await
    }

    async fn reclaim(
        &self,
        name: &RecordName,
        seen: Fence,
        reclaim_as: ReclaimAs,
        claim: &Claim,
    ) -> Result<Option<Grant>, StoreError> {
        self.connections.check()?;
        let call = FencedCall {
            name: name.clone(),
            seen,
            transition: FencedTransition::Reclaimed(reclaim_as, *claim),
        };
        match self.fenced.call(call).await? {
            FencedAnswer::Reclaimed(grant) => Ok(grant),
            FencedAnswer::Settled(_) => Err(StoreError::unavailable("a call got another's answer")),
        }
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
                marked_by: MarkedBy::Lapsed(seen),
                retention,
            } => {
                let transition = FencedTransition::MarkedUnknown(retention);
                return self.transition_by_fence(name, seen, transition).await;
            }
            Transition::Resolve {
                seen,
                resolution,
                at_least,
            } => {
                let resolved = Resolved::new(resolution, at_least);
                let transition = FencedTransition::Resolved(resolved);
                return self.transition_by_fence(name, seen, transition).await;
            }
        };
        self.transition_by_owner(name, token, transition).await
    }

    async fn read(&self, name: &RecordName) -> Result<Option<Record>, StoreError> {
        self.connections.check()?;
        self.reads.read(name, true).await
    }

    /// In the order of the names, by bytes.
    async fn list(
        &self,
        filter: &Filter,
        after: Option<&RecordName>,
        limit: u32,
    ) -> Result<Page, StoreError> {
        let (filter, after) = (filter.clone(), after.cloned());
        self.operate(move |on| {
            Box::pin(async move { statements::list(on, &filter, after.as_ref(), limit).await })
        })
        .await
    }

    async fn forget(&self, name: &RecordName, seen: Fence) -> Result<Transitioned, StoreError> {
        self.transition_by_fence(name, seen, FencedTransition::Forgotten)
            .await
    }

    async fn purge_expired(
        &self,
        limit: u32,
        unknown_retention: Duration,
    ) -> Result<Purged, StoreError> {
        self.operate(move |on| {
            Box::pin(async move { statements::purge_expired(on, limit, unknown_retention).await })
        })
        .await
    }
}
