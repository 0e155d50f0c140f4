//! What the layer does with a response: records it, releases the key, or leaves the
//! outcome unknown.

use std::{collections::BTreeMap, fmt, sync::Arc, time::Duration};

use http::{Extensions, StatusCode, response};

use crate::store::Release;

/// What the layer does with a response.
///
/// As an extension of its response, or through
/// [`Operation::set_disposition`](crate::Operation::set_disposition), a handler decides
/// for itself. That beats every table of the layer, and the client does not see it. If
/// the response and the operation differ, the response wins.
///
/// The variants are exhaustive on purpose: a `match` covers what can happen.
///
/// ```
/// # use http_body_util::Full;
/// # use tower::{Layer, ServiceExt, service_fn};
/// # use tower_idempotency::{IdempotencyLayer, MemoryStore, Outcome, Scope};
/// use bytes::Bytes;
/// use http::{Request, Response, StatusCode};
/// use tower_idempotency::{Disposition, Release, RequestBody};
///
/// async fn pay(_: Request<RequestBody<Full<Bytes>>>) -> http::Result<Response<Full<Bytes>>> {
///     Response::builder()
///         .status(StatusCode::BAD_REQUEST)
///         .extension(Disposition::Release(Release::AnyRequest))
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
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Disposition {
    /// Records the response. Retries receive a replay.
    Record,
    /// Discards the response and releases the key, so that a retry runs.
    Release(Release),
    /// Records that the outcome is unknown. [`Recovery`](crate::Recovery) decides what
    /// retries receive.
    Unknown,
}

/// How long a response is kept if it is recorded, counted from the claim, as an
/// extension of the response. At least one lease from now, and at most ten years.
///
/// Without it, the layer's [`retention`](crate::IdempotencyBuilder::retention) counts.
///
/// ```
/// # use axum::{Router, body::Body, http::Request, routing::post};
/// # use tower::ServiceExt;
/// # use tower_idempotency::{IdempotencyLayer, MemoryStore, Scope};
/// use std::time::Duration;
/// use tower_idempotency::KeepFor;
///
/// async fn quote() -> (KeepFor, &'static str) {
///     (KeepFor(Duration::from_secs(60)), "valid for a minute")
/// }
/// # #[tokio::main(flavor = "current_thread", start_paused = true)]
/// # async fn main() -> Result<(), Box<dyn std::error::Error>> {
/// # let layer = IdempotencyLayer::required(MemoryStore::new(), |_| Some(Scope::single_tenant()));
/// # let app = Router::new().route("/", post(quote).layer(layer.build()?));
/// # for replayed in [false, true, false] {
/// #     let request = Request::post("/").header("idempotency-key", "k").body(Body::empty())?;
/// #     let response = app.clone().oneshot(request).await?;
/// #     assert_eq!(response.headers().contains_key("idempotent-replayed"), replayed);
/// #     tokio::time::advance(Duration::from_secs(40)).await;
/// # }
/// # Ok(())
/// # }
/// ```
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct KeepFor(pub Duration);

/// A handler's choices for its response. `None` leaves one to the layer.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct HandlerChoice {
    pub(crate) disposition: Option<Disposition>,
    pub(crate) keep_for: Option<Duration>,
}

impl HandlerChoice {
    /// Takes the choices from the extensions of a response.
    pub(crate) fn take_from(extensions: &mut Extensions) -> Self {
        Self {
            disposition: extensions.remove::<Disposition>(),
            keep_for: extensions.remove::<KeepFor>().map(|KeepFor(time)| time),
        }
    }

    /// Fills in the choices that this one leaves open from `other`.
    pub(crate) fn or(self, other: Self) -> Self {
        Self {
            disposition: self.disposition.or(other.disposition),
            keep_for: self.keep_for.or(other.keep_for),
        }
    }
}

/// Which responses are recorded, which release the key, and which leave the outcome
/// unknown.
///
/// ```
/// # use axum::{Router, body::Body, http::Request, routing::post};
/// # use tower::ServiceExt;
/// # use tower_idempotency::{IdempotencyLayer, MemoryStore, Outcome, Scope};
/// use http::StatusCode;
/// use tower_idempotency::{Disposition, Dispositions, Release};
///
/// # #[tokio::main(flavor = "current_thread")]
/// # async fn main() -> Result<(), Box<dyn std::error::Error>> {
/// let correctable = Dispositions::standard()
///     .status(StatusCode::BAD_REQUEST, Disposition::Release(Release::AnyRequest))
///     .status(StatusCode::CONFLICT, Disposition::Release(Release::SameRequest));
/// # let layer = IdempotencyLayer::required(MemoryStore::new(), |_| Some(Scope::single_tenant()));
/// # let layer = layer.dispositions(correctable).build()?;
/// # let app = Router::new().route("/", post(StatusCode::CONFLICT).layer(layer));
/// # let request = Request::post("/").header("idempotency-key", "k").body(Body::empty())?;
/// # let response = app.oneshot(request).await?;
/// # assert_eq!(response.extensions().get(), Some(&Outcome::Released));
/// # Ok(())
/// # }
/// ```
#[derive(Clone)]
#[must_use]
pub struct Dispositions {
    preset: Preset,
    by_status: BTreeMap<StatusCode, Disposition>,
    predicate: Option<Predicate>,
}

#[derive(Clone, Copy, Debug)]
enum Preset {
    Standard,
    Everything,
    Success,
}

type Predicate = Arc<dyn Fn(&response::Parts) -> Option<Disposition> + Send + Sync>;

impl Dispositions {
    /// Records 2xx, 3xx and 4xx, with these exceptions:
    ///
    /// - 307 and 308 release the key for any request. The client sends the same
    ///   request to the new address, and nothing was done at this one.
    /// - 401, 407, 413, 415, 421, 425 and 429 release the key for any request. A
    ///   corrected request may use it.
    /// - 500, 501, 503 and 505 upwards release the key for the same request.
    /// - 408, 502 and 504 leave the outcome unknown: a party in between gave up
    ///   waiting.
    ///
    /// After [`Operation::effects_started`](crate::Operation::effects_started) each of
    /// the released responses leaves the outcome unknown. This is the default of a
    /// layer.
    ///
    /// A panic that a layer inside of this one turned into a 500 counts as that
    /// 500. See [where the layer stands](crate#where-the-layer-stands).
    ///
    /// An error of gRPC, in the headers or in the trailers, counts as an HTTP status.
    /// [gRPC](crate#grpc) has the table.
    pub fn standard() -> Self {
        Self::preset(Preset::Standard)
    }

    /// Records every response, whatever its status.
    pub fn everything() -> Self {
        Self::preset(Preset::Everything)
    }

    /// Records 2xx and releases the key after the rest: for any request after a 3xx or
    /// 4xx, otherwise for the same request. 408, 502 and 504 leave the outcome unknown.
    pub fn only_success() -> Self {
        Self::preset(Preset::Success)
    }

    /// Sets the disposition of one status. Defaults to that of the preset.
    pub fn status(mut self, status: StatusCode, disposition: Disposition) -> Self {
        self.by_status.insert(status, disposition);
        self
    }

    /// Sets a function that decides before the status does. `None` leaves the response
    /// to its status. Defaults to none.
    ///
    /// The function may be called a second time for a gRPC response whose trailers have the
    /// code of an error. It does not see the trailers.
    pub fn by(
        mut self,
        decide: impl Fn(&response::Parts) -> Option<Disposition> + Send + Sync + 'static,
    ) -> Self {
        self.predicate = Some(Arc::new(decide));
        self
    }

    fn preset(preset: Preset) -> Self {
        Self {
            preset,
            by_status: BTreeMap::new(),
            predicate: None,
        }
    }

    /// Returns the disposition of a response whose handler left it open.
    ///
    /// `status`: as which the response counts.
    pub(crate) fn of(
        &self,
        response: &response::Parts,
        status: StatusCode,
        have_effects_started: bool,
    ) -> Disposition {
        let disposition = self
            .predicate
            .as_ref()
            .and_then(|decide| decide(response))
            .or_else(|| self.by_status.get(&status).copied())
            .unwrap_or_else(|| self.preset.of(status));
        match disposition {
            Disposition::Release(_) if have_effects_started => Disposition::Unknown,
            disposition => disposition,
        }
    }
}

impl Preset {
    fn of(self, status: StatusCode) -> Disposition {
        match (self, status.as_u16()) {
            (Self::Everything, _) => Disposition::Record,
            (_, 408 | 502 | 504) => Disposition::Unknown,
            (_, 200..=299) => Disposition::Record,
            (Self::Success, _) => Disposition::Release(release_after(status)),
            (Self::Standard, 307 | 308 | 401 | 407 | 413 | 415 | 421 | 425 | 429 | 500..) => {
                Disposition::Release(release_after(status))
            }
            (Self::Standard, _) => Disposition::Record,
        }
    }
}

/// After a redirection or a client error the client sends another request; after a
/// server error, the same one.
fn release_after(status: StatusCode) -> Release {
    match status.is_redirection() || status.is_client_error() {
        true => Release::AnyRequest,
        false => Release::SameRequest,
    }
}

impl Default for Dispositions {
    fn default() -> Self {
        Self::standard()
    }
}

impl fmt::Debug for Dispositions {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Dispositions")
            .field("preset", &self.preset)
            .field("by_status", &self.by_status)
            .field("predicate", &self.predicate.is_some())
            .finish()
    }
}
