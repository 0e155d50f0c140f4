//! Asking what became of an operation whose outcome is unknown.

use std::{fmt, panic::AssertUnwindSafe, pin::Pin, sync::Arc};

use bytes::Bytes;
use futures_util::FutureExt as _;
use http::Response;
use tokio::time::{self, Instant};

use crate::{
    Operation, Store, StoreError,
    flow::claim::Claimant,
    flow::heartbeat::Heartbeats,
    flow::owned::{Ending, Owned},
    flow::shared::Host,
    store::{Claim, Grant, ReclaimAs, Transitioned},
};

/// A hook that finds out what became of an operation, for
/// [`Recovery::Reconcile`](crate::Recovery::Reconcile).
///
/// It is asked with the operation itself, whose [`id`](Operation::id) and
/// [`derive`](Operation::derive)d keys are those of the run that was lost: look
/// them up where the work would have been done. It is asked by one request at a
/// time for a key, on all processes together, while heartbeats keep the claim,
/// and not for longer than the longest run. A panic is
/// [`StillUnknown`](Reconciled::StillUnknown).
///
/// ```
/// # use axum::{Router, body::Body, routing::post};
/// # use http::{Request, StatusCode};
/// # use tower::ServiceExt;
/// # use tower_idempotency::{IdempotencyLayer, MemoryStore, Scope};
/// use http::Response;
/// use tower_idempotency::{Reconciled, Reconciler, Recovery};
///
/// async fn find_charge(key: String) -> Result<Option<String>, std::io::Error> {
///     // … ask the payment provider …
/// #   assert_eq!(key.len(), 36);
/// #   return Ok(Some("ch_1".to_owned()));
///     Ok(None)
/// }
///
/// # #[tokio::main(flavor = "current_thread")]
/// # async fn main() -> Result<(), Box<dyn std::error::Error>> {
/// let recovery = Recovery::Reconcile(Reconciler::new(|operation| async move {
///     match find_charge(operation.derive("payments")).await {
///         Ok(Some(charge)) => Reconciled::Happened(Response::new(charge.into())),
///         Ok(None) => Reconciled::DidNotHappen,
///         Err(_) => Reconciled::StillUnknown,
///     }
/// }));
/// # let layer = IdempotencyLayer::required(MemoryStore::new(), |_| Some(Scope::single_tenant()));
/// # let layer = layer.recovery(recovery).build()?;
/// # // 504: the provider may have charged.
/// # let app = Router::new().route("/", post(StatusCode::GATEWAY_TIMEOUT).layer(layer));
/// # for status in [StatusCode::GATEWAY_TIMEOUT, StatusCode::OK] {
/// #     let request = Request::post("/").header("idempotency-key", "k").body(Body::empty())?;
/// #     assert_eq!(app.clone().oneshot(request).await?.status(), status);
/// # }
/// # Ok(())
/// # }
/// ```
#[derive(Clone)]
pub struct Reconciler(Arc<dyn Fn(Operation) -> Asking + Send + Sync>);

type Asking = Pin<Box<dyn Future<Output = Reconciled> + Send>>;

impl Reconciler {
    /// Asks `hook`.
    pub fn new<F>(hook: impl Fn(Operation) -> F + Send + Sync + 'static) -> Self
    where
        F: Future<Output = Reconciled> + Send + 'static,
    {
        Self(Arc::new(move |operation| Box::pin(hook(operation))))
    }
}

impl fmt::Debug for Reconciler {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Reconciler(..)")
    }
}

/// What a [`Reconciler`] found out.
#[derive(Debug)]
pub enum Reconciled {
    /// It happened, and this was, or stands for, its response: recorded and
    /// replayed from now on, through the same rules as a handler's response.
    ///
    /// Of a response with an interim status (1xx) only the fact is recorded:
    /// retries get 409 `response-not-replayable`.
    Happened(Response<Bytes>),
    /// It did not happen, and the handler runs again.
    ///
    /// The lost run may be paused rather than dead. Say this only where it
    /// cannot do its work any more, or where doing it again under the same
    /// derived keys has no further effect.
    DidNotHappen,
    /// It cannot be told now: retries get 409 `outcome-unknown`, and ask again.
    StillUnknown,
}

/// What became of the question, for the request that asked it.
pub(crate) enum Reconciliation {
    /// Recorded; the answer is in the record.
    Happened,
    /// The request may run, under a claim of its own.
    Run {
        claim: Claim,
        grant: Grant,
        since: Instant,
    },
    /// Nothing is known, or it may not run again.
    Unknown,
}

/// Asks the hook under the claim that was granted for it, and writes down what
/// it says. A lost answer of the store leaves the outcome unknown.
pub(crate) async fn reconcile<S: Store>(
    host: &Arc<Host<S>>,
    reconciler: &Reconciler,
    claimant: &Claimant,
    grant: Grant,
    since: Instant,
    may_run: bool,
) -> Result<Reconciliation, StoreError> {
    let owned = Owned::new(host, claimant, grant);
    let config = Arc::clone(&host.config);
    let operation = Operation::new(config, owned.name.clone(), owned.token, grant, since);
    let heartbeats = Heartbeats::start(host, &operation);
    if heartbeats.is_first {
        tokio::task::yield_now().await;
    }
    let asked = AssertUnwindSafe(async { (reconciler.0)(operation).await }).catch_unwind();
    let failed = |warning| {
        host.config.warnings.warn(warning, None, owned.operation);
        Reconciled::StillUnknown
    };
    let said = match time::timeout(host.config.max_run_time, asked).await {
        Ok(Ok(said)) => said,
        Ok(Err(_panic)) => failed(PANICKED),
        Err(_) => failed(TOOK_TOO_LONG),
    };
    let ending = match said {
        Reconciled::Happened(response) => {
            let (parts, body) = response.into_parts();
            let word = crate::Word::default();
            let completion = host.config.completion(&parts, &body, None, word);
            return Ok(match owned.settle(&Ending::Completed(completion)).await? {
                Transitioned::Applied => Reconciliation::Happened,
                Transitioned::Superseded => Reconciliation::Unknown,
            });
        }
        Reconciled::DidNotHappen | Reconciled::StillUnknown => Ending::Unknown,
    };
    let settled = owned.settle(&ending).await?;
    drop(heartbeats);
    let run = matches!(said, Reconciled::DidNotHappen) && may_run && !claimant.is_stale();
    if settled == Transitioned::Superseded || !run {
        return Ok(Reconciliation::Unknown);
    }
    // A claim of its own, which counts as one more that followed an unknown
    // outcome: a request that kills its process every time comes to an end.
    let claim = Claim::new(
        claimant.claim.fingerprint,
        host.config.lease,
        host.config.retention,
    );
    let since = Instant::now();
    let reclaimed = host
        .store
        .reclaim(&owned.name, grant.fence, ReclaimAs::Rerun, &claim);
    Ok(match host.timely(reclaimed).await? {
        Some(grant) => Reconciliation::Run {
            claim,
            grant,
            since,
        },
        None => Reconciliation::Unknown,
    })
}

const PANICKED: &str = "`Reconciler` panicked: the outcome stays unknown";
const TOOK_TOO_LONG: &str =
    "`Reconciler` took longer than `max_run_time` and was stopped: the outcome stays unknown";
