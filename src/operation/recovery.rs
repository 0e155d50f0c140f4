//! What a retry receives after an unknown outcome.

use std::{fmt, pin::Pin, sync::Arc};

use super::Operation;
use crate::store::admin::Resolution;

/// What a retry receives while the outcome is unknown: after a panic, an error of the inner
/// service, a broken response body, or the end of a process.
///
/// A panic reaches the layer only if no layer inside catches it before. See
/// [where the layer stands](crate#where-the-layer-stands).
#[derive(Clone, Debug, Default)]
#[non_exhaustive]
pub enum Recovery {
    /// 409 `outcome-unknown`, until an operator or the late owner ends it.
    #[default]
    Refuse,
    /// The handler runs again, with the next attempt and a larger fence.
    ///
    /// Only for handlers whose effects are keyed by
    /// [`Operation::derive`](crate::Operation::derive) or otherwise harmless
    /// when repeated: a handler that charged and then crashed charges again.
    Rerun,
    /// Asks a hook, whose answer decides: replay, run again, or 409 `outcome-unknown`.
    Reconcile(Reconciler),
}

/// A hook that finds out whether an operation happened, for
/// [`Recovery::Reconcile`].
///
/// It is asked with the operation itself, whose [`id`](Operation::id) and
/// [`derive`](Operation::derive)d keys are those of the run that was lost: look
/// them up where the work would have been done. It is asked by one request at a
/// time for a key, on all processes together, while heartbeats keep the claim,
/// and not for longer than `max_run_time`.
///
/// The hook returns a [`Resolution`], or `None` if the outcome is still unknown. Then
/// the retry gets 409 `outcome-unknown`, and the next one asks again. A panic counts as
/// `None`.
///
/// A response in [`Happened`](Resolution::Happened) is recorded by the rules for a
/// handler's response, and replayed. After [`DidNotHappen`](Resolution::DidNotHappen) the
/// handler runs again. If the layer has a [`ReplayAuthorizer`](crate::ReplayAuthorizer), give
/// the response the attributes that it asks for, by
/// [`with_attributes`](crate::store::admin::RecordedResponse::with_attributes).
///
/// ```
/// # use axum::{Router, body::Body, routing::post};
/// # use http::{Request, StatusCode};
/// # use tower::ServiceExt;
/// # use tower_idempotency::{IdempotencyLayer, MemoryStore, Scope};
/// use http::Response;
/// use tower_idempotency::{
///     Reconciler, Recovery,
///     store::admin::{RecordedResponse, Resolution},
/// };
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
///         Ok(Some(charge)) => {
///             let response = RecordedResponse::new(Response::new(charge)).ok()?;
///             Some(Resolution::Happened(response))
///         }
///         Ok(None) => Some(Resolution::DidNotHappen),
///         Err(_) => None,
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
pub struct Reconciler(Arc<dyn Fn(Operation) -> HookFuture + Send + Sync>);

type HookFuture = Pin<Box<dyn Future<Output = Option<Resolution>> + Send>>;

impl Reconciler {
    /// Asks `hook`.
    pub fn new<F>(hook: impl Fn(Operation) -> F + Send + Sync + 'static) -> Self
    where
        F: Future<Output = Option<Resolution>> + Send + 'static,
    {
        Self(Arc::new(move |operation| Box::pin(hook(operation))))
    }

    pub(crate) fn ask(&self, operation: Operation) -> HookFuture {
        (self.0)(operation)
    }
}

impl fmt::Debug for Reconciler {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Reconciler(..)")
    }
}
