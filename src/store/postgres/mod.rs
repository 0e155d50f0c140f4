//! The PostgreSQL store.

mod admin;
mod answers;
pub(super) mod builder;
mod claims;
mod connector;
pub(super) mod engine;
pub(crate) mod error;
mod fenced;
#[cfg(feature = "inbox")]
mod inbox;
#[cfg(feature = "outbox")]
pub(crate) mod outbox;
#[cfg(feature = "outbox")]
mod notifications;
mod migrations;
pub(crate) mod parameters;
mod pool;
mod reads;
mod rows;
mod schema;
mod server;
pub(crate) mod session;
mod tables;
pub(crate) mod transactions;
mod transitions;
mod usage;
pub(crate) mod units;
mod wake_ups;

use std::{fmt, future::pending, sync::Arc, time::Duration};

use self::{
    admin::Admin,
    claims::Claims,
    connector::Connector,
    fenced::{Fenced, FencedAnswer, FencedCall, FencedChange},
    pool::Pool,
    reads::RecordReads,
    session::Session,
    transactions::HandlerTransactions,
    transitions::{TransitionCall, Transitions},
    wake_ups::WakeUps,
};
use super::{
    Claim, Claimed, Grant, OwnerTransition, Purged, ReclaimAs, Record, Store, StoreError,
    Transition, Transitioned, Usage, UsageDelta,
    admin::{Filter, Page},
    sql::batcher::Batcher,
    sql::calls::ClaimCall,
    sql::detached,
    sql::reads::Reads,
    sql::single::SingleCalls,
};
use crate::{
    key::RecordName,
    store::{Fence, Token},
};

/// Records in PostgreSQL, shared by every process that uses the database.
///
/// **Guarantees.** A call that returns is durable: the server has flushed it to disk,
/// whatever the defaults of the role or the server are. All times are the server's;
/// the clocks of the application's hosts do not matter. If a call is dropped, its
/// connection is used again only after the call has ended. Durations longer than 100
/// years count as 100 years.
///
/// **Limits.** A failover to a standby that had not received a claim loses that claim,
/// and its retry runs again. With `synchronous_standby_names` set on the server, the
/// store waits for the standby as every other writer does. A standby itself is
/// refused.
///
/// The store has **its own connections**. An application's pool may hold connections
/// that a cancelled request left inside a transaction, and writes there would be lost.
/// The store sets read committed, read-write transactions, `synchronous_commit` and its
/// timeouts on each connection. Except for the transactions of handlers, it also sets
/// planner settings that find each record by its name. Each statement names the
/// [schema](crate::store::PostgresStoreBuilder::schema) of the store's tables.
///
/// The store must connect to the server directly, or to a pooler in session mode. A
/// pooler in transaction mode loses these settings, unless the store is
/// [`pooler_safe`](crate::store::PostgresStoreBuilder::pooler_safe). Connecting fails
/// if it detects such a pooler.
///
/// The store needs PostgreSQL 12 or later.
///
/// # Tables
///
/// [`migrate`](Self::migrate) creates the tables `idempotency_records` and
/// `idempotency_usage`, with a ledger of its own, `_idempotency_migrations`. Connecting creates nothing: the
/// application decides who may change a schema, and when. Applications with
/// migrations of their own copy [`schema_sql`](Self::schema_sql) into them.
/// [`check_schema`](Self::check_schema) names every difference.
///
/// To serve requests, a role needs to read and write the tables. [`grants_for`](Self::grants_for) returns its GRANT statements.
///
/// # A server that is gone
///
/// After a failed attempt to connect, calls that need a connection fail at once
/// with its error. While there are calls, the store tries to connect once a second in
/// the background, and serves again when an attempt succeeds.
///
/// # Many calls at once
///
/// Up to six calls at a time are each sent at once, on connections of their own; four
/// connections are left to batches. Beyond that, concurrent claims share a statement, and
/// so do concurrent completions, releases and heartbeats, and concurrent reads. No timer
/// is involved. Each caller gets its own answer, and a call that the database refuses fails
/// alone. On Citus, a statement carries up to 64 claims or 64 completions, and every other
/// call has one of its own. Beyond a limit of
/// [waiting calls](crate::store::PostgresStoreBuilder::max_waiting_calls), a call is
/// refused without being sent.
///
/// A call whose record another transaction has locked is tried again for up to the
/// [lock timeout](crate::store::PostgresStoreBuilder::lock_timeout). It holds no
/// connection meanwhile. Responses over 8 KiB are read and written apart from the rest,
/// about 1 MiB at a time, so that they delay no other call.
///
/// # Waiters
///
/// If the layer [waits](crate::IdempotencyBuilder::wait), a request is woken by a
/// notification when its claim ends in another process. While there are waiters, and for a
/// minute after, each process listens on a connection of its own. The end of a
/// claim without waiters sends no notification. Behind a pooler in transaction mode and on Citus, waiters read the record
/// after pauses.
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
/// Clones share the connections. Calls need a Tokio runtime. Clones may be used in several
/// runtimes. Keep each of them running while it has calls: a runtime that stands still keeps
/// the connections of its calls.
#[derive(Clone)]
pub struct PostgresStore {
    pub(crate) inner: Arc<Inner>,
}

pub(crate) struct Inner {
    claims: Batcher<Claims>,
    transitions: Batcher<Transitions>,
    /// Large responses take long on a slow network.
    large_transitions: Batcher<Transitions>,
    reads: Reads<RecordReads>,
    fenced: SingleCalls<Fenced>,
    pub(crate) transactions: HandlerTransactions,
    pub(crate) admin: Admin,
    usage: usage::Statements,
    wake_ups: Arc<WakeUps>,
    #[cfg(feature = "inbox")]
    pub(crate) inbox: inbox::Statements,
    #[cfg(feature = "outbox")]
    pub(crate) outbox: outbox::Statements,
    #[cfg(feature = "outbox")]
    pub(crate) wake: super::sql::wake::Wake,
    #[cfg(feature = "outbox")]
    notifications: notifications::Notifications,
    /// The connections for requests.
    pub(crate) pool: Arc<Pool>,
    pub(crate) connector: Arc<Connector>,
}

impl PostgresStore {
    /// Closes the connections, each after the call that it is busy with. Later
    /// calls fail.
    pub async fn close(&self) {
        self.inner.wake_ups.close().await;
        self.inner.transactions.pool.close().await;
        self.inner.pool.close().await;
        self.inner.transactions.lookup_pool.close().await;
        self.inner.admin.pool.close().await;
    }

    /// Makes a call that no request waits for, on one of the connections for operators. Give
    /// the future to [`detached`].
    pub(crate) async fn operate<T>(
        self,
        call: impl AsyncFnOnce(&Inner, &mut Session<'_>) -> Result<T, StoreError>,
    ) -> Result<T, StoreError> {
        let inner = &self.inner;
        let call = async |session: &mut Session<'_>| call(inner, session).await;
        inner.admin.run(call).await
    }

    async fn by_owner(
        &self,
        name: &RecordName,
        token: Token,
        transition: OwnerTransition,
    ) -> Result<Transitioned, StoreError> {
        self.inner.pool.check()?;
        let name = name.clone();
        let call = TransitionCall {
            name,
            token,
            transition,
        };
        let transitions = match call.is_large() {
            true => &self.inner.large_transitions,
            false => &self.inner.transitions,
        };
        transitions.call(call).await
    }

    async fn by_fence(
        &self,
        name: &RecordName,
        seen: Fence,
        change: FencedChange,
    ) -> Result<FencedAnswer, StoreError> {
        self.inner.pool.check()?;
        let name = name.clone();
        let call = FencedCall { name, seen, change };
        self.inner.fenced.call(call).await
    }
}

impl fmt::Debug for PostgresStore {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("PostgresStore")
            .field("idle", &self.inner.pool.idle())
            .field("closed", &self.inner.pool.is_closed())
            .finish_non_exhaustive()
    }
}

impl Store for PostgresStore {
    async fn claim(&self, name: &RecordName, claim: &Claim) -> Result<Claimed, StoreError> {
        self.inner.pool.check()?;
        let call = ClaimCall {
            name: name.clone(),
            claim: *claim,
        };
        let answer = self.inner.claims.call(call).await?;
        self.inner.reads.with_response(name, claim, answer).await
    }

    async fn reclaim(
        &self,
        name: &RecordName,
        seen: Fence,
        reclaim_as: ReclaimAs,
        claim: &Claim,
    ) -> Result<Option<Grant>, StoreError> {
        let reclaim = FencedChange::Reclaim(reclaim_as, *claim);
        let answer = self.by_fence(name, seen, reclaim).await?;
        Ok(answer.grant)
    }

    async fn transition(
        &self,
        name: &RecordName,
        transition: Transition,
    ) -> Result<Transitioned, StoreError> {
        match transition {
            Transition::Owner(token, transition) => self.by_owner(name, token, transition).await,
            Transition::Fenced(seen, transition) => {
                let change = FencedChange::Transition(transition);
                Ok(self.by_fence(name, seen, change).await?.transitioned)
            }
        }
    }

    async fn wait(&self, name: &RecordName, seen: Fence) -> Result<(), StoreError> {
        let wake_ups = &self.inner.wake_ups;
        if !wake_ups.are_possible() {
            return pending().await;
        }
        let mark = async {
            let marked = self.by_fence(name, seen, FencedChange::MarkAwaited).await?;
            Ok(marked.transitioned == Transitioned::Applied)
        };
        wake_ups.wait(seen, mark).await
    }

    /// The clock of the server, and of the coordinator on Citus.
    async fn now(&self) -> Result<Duration, StoreError> {
        let now =
            async move |inner: &Inner, session: &mut Session<'_>| inner.admin.now(session).await;
        detached(self.clone().operate(now)).await
    }

    async fn read(&self, name: &RecordName) -> Result<Option<Record>, StoreError> {
        self.inner.pool.check()?;
        self.inner.reads.read(name, true).await
    }

    /// In the order of the names, by bytes.
    async fn list(
        &self,
        filter: &Filter,
        after: Option<&RecordName>,
        limit: u32,
    ) -> Result<Page, StoreError> {
        let (filter, after) = (filter.clone(), after.cloned());
        let list = async move |inner: &Inner, session: &mut Session<'_>| {
            inner
                .admin
                .list(session, &filter, after.as_ref(), limit)
                .await
        };
        detached(self.clone().operate(list)).await
    }

    async fn purge_expired(
        &self,
        limit: u32,
        unknown_retention: Duration,
    ) -> Result<Purged, StoreError> {
        let purge = async move |inner: &Inner, session: &mut Session<'_>| {
            inner.usage.sweep(session, limit).await?;
            let admin = &inner.admin;
            admin.purge_expired(session, limit, unknown_retention).await
        };
        detached(self.clone().operate(purge)).await
    }

    async fn add_usage(&self, deltas: &[UsageDelta]) -> Result<Option<Vec<Usage>>, StoreError> {
        let deltas = deltas.to_vec();
        let add = async move |inner: &Inner, session: &mut Session<'_>| {
            inner.usage.add(session, &deltas).await.map(Some)
        };
        detached(self.clone().operate(add)).await
    }
}
