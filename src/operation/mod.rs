//! The operation that a handler runs.

pub(crate) mod disposition;
mod lease;
pub(crate) mod recovery;
pub(crate) mod request_name;
pub(crate) mod response_settings;
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

pub(crate) use self::lease::{Lease, Renewal};
pub(crate) use self::transactions::{AsCommitted, Transacted, Transactions};
use crate::{
    body::upload::UploadState,
    key::{Key, OperationId, RecordName, Scope},
    operation::{
        disposition::{Disposition, HandlerChoice},
        request_name::RequestName,
        response_settings::ResponseSettings,
    },
    rejection::RequestHead,
    store::{Claim, Completion, Fence, Grant, Token},
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

/// An operation, unless it was dropped.
pub(crate) struct WeakOperation(Weak<Shared>);

impl WeakOperation {
    pub(crate) fn upgrade(&self) -> Option<Operation> {
        let shared = self.0.upgrade()?;
        Some(Operation { shared })
    }
}

struct Shared {
    name: RequestName,
    grant: Grant,
    token: Token,
    lease: Lease,
    have_effects_started: AtomicBool,
    choice: Mutex<HandlerChoice>,
    /// What a refusal of the layer, or of a commit, needs.
    head: RequestHead,
    #[cfg_attr(
        not(any(feature = "postgres", feature = "sqlite")),
        expect(dead_code, reason = "only the SQL stores commit")
    )]
    settings: Arc<ResponseSettings>,
    /// The upload that has to be verified before a response is recorded.
    upload: OnceLock<Arc<UploadState>>,
    #[cfg(feature = "sealing")]
    sealer: Option<crate::sealing::settings::Sealer>,
    /// Made by the first `begin` or `commit`: most operations have none.
    transactions: OnceLock<Box<Transactions>>,
}

impl Operation {
    /// `since` is a moment before the store granted the claim.
    pub(crate) fn new(
        settings: Arc<ResponseSettings>,
        head: RequestHead,
        name: RequestName,
        claim: &Claim,
        grant: Grant,
        since: Instant,
    ) -> Self {
        #[cfg(feature = "sealing")]
        let sealing = settings.sealing.as_ref().filter(|sealing| sealing.seals());
        #[cfg(feature = "sealing")]
        let sealer = sealing.map(|sealing| {
            let key = sealing.current_if_loaded();
            let key = key.expect("no request claims before the key is loaded");
            sealing.sealer(key, &name, &claim.fingerprint, grant.operation)
        });
        Self {
            shared: Arc::new(Shared {
                name,
                grant,
                token: claim.token,
                lease: Lease::new(since),
                have_effects_started: AtomicBool::new(false),
                choice: Mutex::default(),
                head,
                settings,
                upload: OnceLock::new(),
                #[cfg(feature = "sealing")]
                sealer,
                transactions: OnceLock::new(),
            }),
        }
    }

    /// Returns the id of the operation: the same for all of its attempts, and for no
    /// other operation.
    #[must_use]
    pub fn id(&self) -> OperationId {
        self.shared.grant.operation
    }

    /// Returns which attempt of the operation this is, from 1.
    #[must_use]
    pub fn attempt(&self) -> u32 {
        self.shared.grant.attempt
    }

    /// Returns a number that is larger for every later claim of the key. A downstream
    /// system that remembers the largest can refuse an owner whose lease was lost.
    #[must_use]
    pub fn fence(&self) -> Fence {
        self.shared.grant.fence
    }

    /// Returns the key that the client sent, decoded.
    #[must_use]
    pub fn key(&self) -> &Key {
        self.shared.name.sent().key()
    }

    /// Returns the scope of the key.
    #[must_use]
    pub fn scope(&self) -> &Scope {
        self.shared.name.sent().scope()
    }

    /// Returns a stable idempotency key for one downstream system or step, as a UUID;
    /// see [`OperationId::derive`].
    #[must_use]
    pub fn derive(&self, purpose: &str) -> String {
        self.id().derive(purpose)
    }

    /// Says that a failure from here on may have had effects. A response that would
    /// release the key (500, 503, 429 …) leaves the outcome unknown instead.
    ///
    /// Call it before the first effect outside of a transaction that rolls back.
    pub fn effects_started(&self) {
        self.shared
            .have_effects_started
            .store(true, Ordering::Release);
    }

    /// Resolves when this run may no longer be the only one.
    ///
    /// That is the case when another request took the key over, when the lease could not
    /// be renewed in time, or when `max_run_time` has passed. Otherwise the future never
    /// resolves.
    ///
    /// Effects after that point may happen twice. A response returned after that point
    /// is still recorded, unless the key was taken over.
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

    /// Sets what the layer does with the response, whatever its status. A
    /// [`Disposition`] in the extensions of the response wins over it. Defaults to the
    /// layer's [`Dispositions`](crate::Dispositions).
    pub fn set_disposition(&self, disposition: Disposition) {
        self.choice_lock().disposition = Some(disposition);
    }

    /// Sets how long the response is kept if it is recorded, counted from the claim: at
    /// least one lease from its recording, and at most ten years. A
    /// [`KeepFor`](crate::KeepFor) in the extensions of the response wins over it.
    /// Defaults to the layer's [`retention`](crate::IdempotencyBuilder::retention).
    pub fn keep_for(&self, retention: Duration) {
        self.choice_lock().keep_for = Some(retention);
    }

    pub(crate) fn name(&self) -> &RecordName {
        &self.shared.name
    }

    /// Returns what a store keeps of a completion: the same, or with a sealed response.
    pub(crate) fn kept(&self, completion: Completion) -> Completion {
        #[cfg(feature = "sealing")]
        if let Some(sealer) = &self.shared.sealer {
            return sealer.completion(completion);
        }
        completion
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

    pub(crate) fn choice(&self) -> HandlerChoice {
        *self.choice_lock()
    }

    pub(crate) fn head(&self) -> &RequestHead {
        &self.shared.head
    }

    /// Called before the handler.
    pub(crate) fn set_upload(&self, upload: Arc<UploadState>) {
        self.shared.upload.get_or_init(|| upload);
    }

    pub(crate) fn upload(&self) -> Option<&UploadState> {
        self.shared.upload.get().map(|upload| &**upload)
    }

    pub(crate) fn have_effects_started(&self) -> bool {
        self.shared.have_effects_started.load(Ordering::Acquire)
    }

    fn choice_lock(&self) -> MutexGuard<'_, HandlerChoice> {
        self.shared
            .choice
            .lock()
            .unwrap_or_else(PoisonError::into_inner)
    }
}

/// For the SQL stores, which complete inside the handler's transaction.
#[cfg(any(feature = "postgres", feature = "sqlite"))]
impl Operation {
    pub(crate) fn settings(&self) -> &Arc<ResponseSettings> {
        &self.shared.settings
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
