//! What the handler is given, and its word on the outcome.

mod id;
#[cfg_attr(
    not(any(feature = "postgres", feature = "sqlite")),
    expect(dead_code, reason = "only the SQL stores have transactions")
)]
mod transactions;

use std::{
    fmt,
    sync::{
        Arc, Mutex, MutexGuard, OnceLock, PoisonError, Weak,
        atomic::{AtomicBool, Ordering},
    },
    time::Duration,
};

use tokio::time::Instant;

pub use self::id::OperationId;
pub(crate) use self::transactions::{AsCommitted, Transacted, Transactions};
use crate::{
    Fence, Key, RecordName, Scope, Token, config::Config, flow::heartbeat::Lease, store::Grant,
};

/// The guarded operation that a handler is running.
///
/// The layer puts it into the request's extensions; with the feature `axum` it
/// is an extractor too. A request that is not guarded (another method, no key
/// on an optional route, an unguarded run while the store is down) has none.
///
/// ```
/// # use bytes::Bytes;
/// # use http_body_util::{BodyExt, Full};
/// # use tower::{Layer, ServiceExt, service_fn};
/// # use tower_idempotency::{IdempotencyLayer, MemoryStore, Scope};
/// use http::{Request, Response};
/// use tower_idempotency::{Operation, RequestBody};
///
/// async fn pay<B>(request: Request<RequestBody<B>>) -> Response<String> {
///     let Some(operation) = request.extensions().get::<Operation>() else {
///         return Response::new("not guarded".to_owned());
///     };
///     // The payment provider sees the same key for every attempt.
///     let downstream = operation.derive("payments");
///     operation.effects_started();
///     // … charge the card …
///     Response::new(downstream)
/// }
/// # #[tokio::main(flavor = "current_thread")]
/// # async fn main() -> Result<(), Box<dyn std::error::Error>> {
/// # let layer = IdempotencyLayer::required(MemoryStore::new(), |_| Some(Scope::single_tenant()));
/// # let service = layer.build()?.layer(service_fn(|request| async {
/// #     Ok::<_, std::convert::Infallible>(pay::<Full<Bytes>>(request).await)
/// # }));
/// # let mut sent = Vec::new();
/// # for replayed in [false, true] {
/// #     let request = Request::post("/").header("idempotency-key", "k").body(Full::default())?;
/// #     let response = service.clone().oneshot(request).await?;
/// #     assert_eq!(response.headers().contains_key("idempotent-replayed"), replayed);
/// #     sent.push(response.into_body().collect().await.unwrap().to_bytes());
/// # }
/// # assert_eq!(sent[0].len(), 36);
/// # assert_eq!(sent[0], sent[1]);
/// # Ok(())
/// # }
/// ```
#[derive(Clone)]
pub struct Operation {
    shared: Arc<Shared>,
}

/// An operation, if it is still anybody's.
pub(crate) struct WeakOperation(Weak<Shared>);

impl WeakOperation {
    pub(crate) fn upgrade(&self) -> Option<Operation> {
        let shared = self.0.upgrade()?;
        Some(Operation { shared })
    }
}

struct Shared {
    name: RecordName,
    grant: Grant,
    effects: AtomicBool,
    word: Mutex<Word>,
    token: Token,
    lease: Lease,
    #[cfg_attr(
        not(any(feature = "postgres", feature = "sqlite")),
        expect(dead_code, reason = "only the SQL stores complete on their own")
    )]
    config: Arc<Config>,
    /// Made by the first `begin` or `commit`: most operations have none.
    transactions: OnceLock<Box<Transactions>>,
}

impl Operation {
    /// `since` is a moment before the store granted the claim.
    pub(crate) fn new(
        config: Arc<Config>,
        name: RecordName,
        token: Token,
        grant: Grant,
        since: Instant,
    ) -> Self {
        Self {
            shared: Arc::new(Shared {
                name,
                grant,
                effects: AtomicBool::new(false),
                word: Mutex::default(),
                token,
                lease: Lease::granted(since),
                config,
                transactions: OnceLock::new(),
            }),
        }
    }

    /// The same for all attempts of this operation, and for no other.
    #[must_use]
    pub fn id(&self) -> OperationId {
        self.shared.grant.operation
    }

    /// Which try of the operation this is, from 1.
    #[must_use]
    pub fn attempt(&self) -> u32 {
        self.shared.grant.attempt
    }

    /// A number that is larger for every later claim of the key. A downstream
    /// system that remembers the largest can turn away an owner whose lease was
    /// lost.
    #[must_use]
    pub fn fence(&self) -> Fence {
        self.shared.grant.fence
    }

    /// The key that the client sent, decoded.
    #[must_use]
    pub fn key(&self) -> &Key {
        self.shared.name.key()
    }

    /// Whose key it is.
    #[must_use]
    pub fn scope(&self) -> &Scope {
        self.shared.name.scope()
    }

    /// A stable idempotency key for one downstream system or step, as a UUID; see
    /// [`OperationId::derive`].
    #[must_use]
    pub fn derive(&self, purpose: &str) -> String {
        self.id().derive(purpose)
    }

    /// From here on a failure may have done something: a response that would
    /// release the key (500, 503, 429 …) makes the outcome unknown instead.
    ///
    /// Call it before the first effect outside a transaction that rolls back.
    pub fn effects_started(&self) {
        self.shared.effects.store(true, Ordering::Release);
    }

    /// Ends when this run may no longer be the only one: its lease was lost, or
    /// could not be extended in time, or it has taken longer than the longest
    /// run. Never ends otherwise.
    ///
    /// What the handler does after that may be done by another run too. A
    /// response that it gives all the same is recorded if nobody has taken the
    /// key over.
    ///
    /// ```
    /// # use axum::{Router, body::Body, http::{Request, StatusCode}, routing::post};
    /// # use std::time::Duration;
    /// # use tower::ServiceExt;
    /// # use tower_idempotency::{IdempotencyLayer, MemoryStore, Operation, Scope};
    /// async fn transfer(operation: Operation) -> Result<(), &'static str> {
    ///     tokio::select! {
    ///         () = operation.lease_lost() => Err("stopped before the last step"),
    ///         () = tokio::time::sleep(Duration::from_secs(5)) => Ok(()),
    ///     }
    /// }
    /// # #[tokio::main(flavor = "current_thread", start_paused = true)]
    /// # async fn main() -> Result<(), Box<dyn std::error::Error>> {
    /// # let layer = IdempotencyLayer::required(MemoryStore::new(), |_| Some(Scope::single_tenant()));
    /// # let layer = layer.lease(Duration::from_millis(900)).max_run_time(Duration::from_secs(1));
    /// # let handler = async |operation| transfer(operation).await.map_err(|_| StatusCode::BAD_GATEWAY);
    /// # let app = Router::new().route("/", post(handler).layer(layer.build()?));
    /// # let request = Request::post("/").header("idempotency-key", "k").body(Body::empty())?;
    /// # assert_eq!(app.oneshot(request).await?.status(), StatusCode::BAD_GATEWAY);
    /// # Ok(())
    /// # }
    /// ```
    pub async fn lease_lost(&self) {
        self.shared.lease.lost().await;
    }

    /// The response is to be recorded, whatever its status.
    pub fn record(&self) {
        self.say(Word::record());
    }

    /// Nothing was done: any request may use the key again.
    pub fn release(&self) {
        self.say(Word::release());
    }

    /// It is not known whether anything was done: retries are told so.
    pub fn unknown(&self) {
        self.say(Word::unknown());
    }

    /// If the response is recorded, it is kept for `retention`, counted from
    /// the claim.
    pub fn keep_for(&self, retention: Duration) {
        self.say(Word::keep_for(retention));
    }

    fn say(&self, word: Word) {
        let mut said = self.word_lock();
        *said = word.or(*said);
    }

    pub(crate) fn name(&self) -> &RecordName {
        &self.shared.name
    }

    pub(crate) fn token(&self) -> Token {
        self.shared.token
    }

    pub(crate) fn downgrade(&self) -> WeakOperation {
        WeakOperation(Arc::downgrade(&self.shared))
    }

    pub(crate) fn lease(&self) -> &Lease {
        &self.shared.lease
    }

    pub(crate) fn word(&self) -> Word {
        *self.word_lock()
    }

    pub(crate) fn have_effects_started(&self) -> bool {
        self.shared.effects.load(Ordering::Acquire)
    }

    fn word_lock(&self) -> MutexGuard<'_, Word> {
        self.shared
            .word
            .lock()
            .unwrap_or_else(PoisonError::into_inner)
    }
}

/// For the SQL stores, which complete inside the handler's transaction.
#[cfg(any(feature = "postgres", feature = "sqlite"))]
impl Operation {
    pub(crate) fn config(&self) -> &Arc<Config> {
        &self.shared.config
    }

    pub(crate) fn transactions(&self) -> &Transactions {
        self.shared.transactions.get_or_init(Box::default)
    }
}

/// For the layer: the operation's own transactions, if its store has any.
impl Operation {
    /// Returns how the operation's own transaction ended, and waits for a commit
    /// under way, even if the handler does not.
    pub(crate) async fn transacted(&self) -> Transacted {
        match self.shared.transactions.get() {
            Some(transactions) => Box::pin(transactions.ended()).await,
            None => Transacted::Not,
        }
    }

    /// Returns whether a transaction of the operation is being committed.
    pub(crate) fn is_committing(&self) -> bool {
        let transactions = self.shared.transactions.get();
        transactions.is_some_and(|transactions| transactions.is_committing())
    }

    /// Returns whether a transaction was begun, but neither committed nor rolled
    /// back by the handler's call.
    pub(crate) fn is_uncommitted(&self) -> bool {
        let transactions = self.shared.transactions.get();
        transactions.is_some_and(|transactions| transactions.is_uncommitted())
    }

    /// Logs why `begin` or `commit` failed.
    pub(crate) fn log_failure(&self) {
        if let Some(transactions) = self.shared.transactions.get() {
            transactions.log_failure();
        }
    }
}

impl fmt::Debug for Operation {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Operation")
            .field("id", &self.id())
            .field("attempt", &self.attempt())
            .field("fence", &self.fence())
            .finish_non_exhaustive()
    }
}

/// The handler's word on the outcome, as an extension of its response. It beats
/// every table of the layer, and the client does not see it.
///
/// Where a response and the [`Operation`] both say something, the response
/// wins.
///
/// ```
/// # use http_body_util::Full;
/// # use tower::{Layer, ServiceExt, service_fn};
/// # use tower_idempotency::{IdempotencyLayer, MemoryStore, Outcome, Scope};
/// use bytes::Bytes;
/// use http::{Request, Response, StatusCode};
/// use tower_idempotency::{RequestBody, Word};
///
/// async fn pay(_: Request<RequestBody<Full<Bytes>>>) -> http::Result<Response<Full<Bytes>>> {
///     Response::builder()
///         .status(StatusCode::BAD_REQUEST)
///         .extension(Word::release())
///         .body("correct the amount and use the same key".into())
/// }
/// # #[tokio::main(flavor = "current_thread")]
/// # async fn main() -> Result<(), Box<dyn std::error::Error>> {
/// # let layer = IdempotencyLayer::required(MemoryStore::new(), |_| Some(Scope::single_tenant()));
/// # let service = layer.build()?.layer(service_fn(pay));
/// # for body in ["one", "another"] {
/// #     let request = Request::post("/").header("idempotency-key", "k").body(Full::from(body))?;
/// #     let response = service.clone().oneshot(request).await?;
/// #     assert_eq!(response.status(), StatusCode::BAD_REQUEST);
/// #     assert_eq!(response.extensions().get(), Some(&Outcome::Released));
/// # }
/// # Ok(())
/// # }
/// ```
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[must_use]
pub struct Word {
    verdict: Option<Verdict>,
    retention: Option<Duration>,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Verdict {
    Record,
    Release,
    Unknown,
}

impl Word {
    /// The response is to be recorded, whatever its status.
    pub fn record() -> Self {
        Self::of(Verdict::Record)
    }

    /// Nothing was done: any request may use the key again.
    pub fn release() -> Self {
        Self::of(Verdict::Release)
    }

    /// It is not known whether anything was done: retries are told so.
    pub fn unknown() -> Self {
        Self::of(Verdict::Unknown)
    }

    /// If the response is recorded, it is kept for `retention`, counted from
    /// the claim; at least for one lease from now, and at most for ten years.
    pub fn keep_for(retention: Duration) -> Self {
        Self {
            verdict: None,
            retention: Some(retention),
        }
    }

    /// This word, and `retention` as with [`keep_for`](Self::keep_for).
    pub fn kept_for(self, retention: Duration) -> Self {
        Self {
            retention: Some(retention),
            ..self
        }
    }

    fn of(verdict: Verdict) -> Self {
        Self {
            verdict: Some(verdict),
            retention: None,
        }
    }

    /// What this word leaves open, `earlier` decides.
    pub(crate) fn or(self, earlier: Self) -> Self {
        Self {
            verdict: self.verdict.or(earlier.verdict),
            retention: self.retention.or(earlier.retention),
        }
    }

    pub(crate) fn verdict(self) -> Option<Verdict> {
        self.verdict
    }

    pub(crate) fn retention(self) -> Option<Duration> {
        self.retention
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_last_word_wins_and_keeps_what_it_leaves_open() {
        let kept = Word::keep_for(Duration::from_secs(5));
        let word = Word::release().or(Word::record().or(kept));
        assert_eq!(word.verdict(), Some(Verdict::Release));
        assert_eq!(word.retention(), Some(Duration::from_secs(5)));
    }
}
