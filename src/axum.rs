//! For axum applications: extractors and responses.

use std::convert::Infallible;

use ::axum::{
    extract::{FromRequest, FromRequestParts, OptionalFromRequestParts, Request},
    response::{IntoResponse, IntoResponseParts, Response, ResponseParts},
};
use http::{StatusCode, request};

use crate::{
    operation::{
        Operation,
        disposition::{Disposition, KeepFor},
    },
    store::Release,
    telemetry::log::{self, LogLimit},
};

/// Rejects a request that is not guarded with 500: the route has no layer, the layer
/// does not guard the method, or the request has no key. Extract `Option<Operation>`
/// where that is expected.
impl<S: Sync> FromRequestParts<S> for Operation {
    type Rejection = NotGuarded;

    async fn from_request_parts(
        parts: &mut request::Parts,
        _state: &S,
    ) -> Result<Self, Self::Rejection> {
        parts.extensions.get().cloned().ok_or(NotGuarded(()))
    }
}

impl<S: Sync> OptionalFromRequestParts<S> for Operation {
    type Rejection = Infallible;

    async fn from_request_parts(
        parts: &mut request::Parts,
        _state: &S,
    ) -> Result<Option<Self>, Self::Rejection> {
        Ok(parts.extensions.get().cloned())
    }
}

/// The rejection of the extractor [`Operation`]: the request is not guarded.
#[derive(Clone, Copy, Debug)]
pub struct NotGuarded(());

/// Responds with 500, and logs at WARN, at most once in 5 seconds.
impl IntoResponse for NotGuarded {
    fn into_response(self) -> Response {
        static LIMIT: LogLimit = LogLimit::new();
        log::warn(&LIMIT, NOT_GUARDED, None, None);
        (
            StatusCode::INTERNAL_SERVER_ERROR,
            "this request is not guarded by an idempotency layer",
        )
            .into_response()
    }
}

impl std::fmt::Display for NotGuarded {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("this request is not guarded by an idempotency layer")
    }
}

impl std::error::Error for NotGuarded {}

/// Makes `(StatusCode::BAD_REQUEST, Disposition::Release(…), "…")` a response.
///
/// ```
/// # use axum::{body::Body, http::Request};
/// # use tower::ServiceExt;
/// use axum::{Router, http::StatusCode, response::IntoResponse, routing::post};
/// use tower_idempotency::{Disposition, IdempotencyLayer, MemoryStore, Operation, Release, Scope};
///
/// async fn pay(operation: Operation, amount: String) -> Result<String, impl IntoResponse> {
///     let Ok(amount) = amount.parse::<u32>() else {
///         // Nothing was done: the corrected request may use the same key.
///         let released = Disposition::Release(Release::AnyRequest);
///         return Err((StatusCode::BAD_REQUEST, released, "no amount"));
///     };
///     Ok(format!("{amount} charged as {}", operation.derive("payments")))
/// }
///
/// # #[tokio::main(flavor = "current_thread")]
/// # async fn main() -> Result<(), Box<dyn std::error::Error>> {
/// let layer = IdempotencyLayer::required(MemoryStore::new(), |_| Some(Scope::single_tenant()));
/// let app: Router = Router::new().route("/payments", post(pay).layer(layer.build()?));
/// # for (amount, status, replayed) in [
/// #     ("much", StatusCode::BAD_REQUEST, false),
/// #     ("500", StatusCode::OK, false),
/// #     ("500", StatusCode::OK, true),
/// # ] {
/// #     let request = Request::post("/payments").header("idempotency-key", "order-1");
/// #     let response = app.clone().oneshot(request.body(Body::from(amount))?).await?;
/// #     assert_eq!(response.status(), status);
/// #     assert_eq!(response.headers().contains_key("idempotent-replayed"), replayed);
/// # }
/// # Ok(())
/// # }
/// ```
impl IntoResponseParts for Disposition {
    type Error = Infallible;

    fn into_response_parts(self, mut response: ResponseParts) -> Result<ResponseParts, Infallible> {
        response.extensions_mut().insert(self);
        Ok(response)
    }
}

/// Makes `(KeepFor(…), "…")` a response.
impl IntoResponseParts for KeepFor {
    type Error = Infallible;

    fn into_response_parts(self, mut response: ResponseParts) -> Result<ResponseParts, Infallible> {
        response.extensions_mut().insert(self);
        Ok(response)
    }
}

/// An extractor whose rejection releases the key, so that a corrected request can
/// use it.
///
/// axum's extractors reject a request before the handler runs: malformed JSON with
/// 400, JSON of another shape with 422, a query or a path that cannot be parsed with
/// 400. The layer cannot tell such a response from one of the handler, and records it.
/// A corrected request with the same key then receives 422 `key-reused`. `OrRelease`
/// adds [`Disposition::Release`] for any request to the rejection, which the client does
/// not see. It does not change a disposition that the rejection has. A 4xx of the
/// handler is recorded as before.
///
/// The key is not released if a middleware inside the layer has called
/// [`Operation::effects_started`].
///
/// ```
/// # use axum::body::Body;
/// # use tower::ServiceExt;
/// use axum::{Json, Router, http::{Request, StatusCode}, routing::post};
/// use serde::Deserialize;
/// use tower_idempotency::{IdempotencyLayer, MemoryStore, Scope, OrRelease};
///
/// #[derive(Deserialize)]
/// struct Payment {
///     amount: u64,
/// }
///
/// async fn pay(OrRelease(Json(payment)): OrRelease<Json<Payment>>) -> (StatusCode, &'static str) {
///     match payment.amount {
///         0 => (StatusCode::UNPROCESSABLE_ENTITY, "nothing to pay"), // recorded
///         _ => (StatusCode::CREATED, "paid"),
///     }
/// }
///
/// # #[tokio::main(flavor = "current_thread")]
/// # async fn main() -> Result<(), Box<dyn std::error::Error>> {
/// let layer = IdempotencyLayer::required(MemoryStore::new(), |_| Some(Scope::single_tenant()));
/// let app = Router::new().route("/payments", post(pay).layer(layer.build()?));
/// # let send = async |body: &'static str| {
/// #     let request = Request::post("/payments")
/// #         .header("idempotency-key", "order-1")
/// #         .header("content-type", "application/json")
/// #         .body(Body::from(body));
/// #     app.clone().oneshot(request.unwrap()).await.unwrap().status()
/// # };
/// // With one key: a wrong shape, then malformed JSON, then a payment.
/// assert_eq!(send(r#"{"amount":"500"}"#).await, StatusCode::UNPROCESSABLE_ENTITY);
/// assert_eq!(send(r#"{"amount":500"#).await, StatusCode::BAD_REQUEST);
/// assert_eq!(send(r#"{"amount":500}"#).await, StatusCode::CREATED);
/// # assert_eq!(send(r#"{"amount":0}"#).await, StatusCode::UNPROCESSABLE_ENTITY);
/// # Ok(())
/// # }
/// ```
///
/// An application with its own extractor, for its own format of rejections, adds
/// [`Disposition::Release`] there, once for all handlers:
///
/// ```
/// # use axum::{Router, body::Body, routing::post};
/// # use tower::ServiceExt;
/// # use tower_idempotency::{IdempotencyLayer, MemoryStore, Scope};
/// use axum::{
///     Json,
///     extract::{FromRequest, Request},
///     response::{IntoResponse, Response},
/// };
/// use http::StatusCode;
/// use serde::de::DeserializeOwned;
/// use tower_idempotency::{Disposition, Release};
///
/// struct AppJson<T>(T);
///
/// impl<S: Send + Sync, T: DeserializeOwned> FromRequest<S> for AppJson<T> {
///     type Rejection = Response;
///
///     async fn from_request(request: Request, state: &S) -> Result<Self, Response> {
///         let read = Json::from_request(request, state).await;
///         read.map(|Json(value)| Self(value)).map_err(|rejection| {
///             let released = Disposition::Release(Release::AnyRequest);
///             (StatusCode::BAD_REQUEST, released, rejection.body_text()).into_response()
///         })
///     }
/// }
///
/// async fn pay(AppJson(amount): AppJson<u64>) -> String {
///     format!("{amount} paid")
/// }
/// # #[tokio::main(flavor = "current_thread")]
/// # async fn main() -> Result<(), Box<dyn std::error::Error>> {
/// # let layer = IdempotencyLayer::required(MemoryStore::new(), |_| Some(Scope::single_tenant()));
/// # let app = Router::new().route("/payments", post(pay).layer(layer.build()?));
/// # for (body, status) in [("five", StatusCode::BAD_REQUEST), ("5", StatusCode::OK)] {
/// #     let request = Request::post("/payments")
/// #         .header("idempotency-key", "order-1")
/// #         .header("content-type", "application/json")
/// #         .body(Body::from(body))?;
/// #     assert_eq!(app.clone().oneshot(request).await?.status(), status);
/// # }
/// # Ok(())
/// # }
/// ```
#[derive(Clone, Copy, Debug, Default)]
pub struct OrRelease<T>(pub T);

impl<S, T> FromRequestParts<S> for OrRelease<T>
where
    S: Sync,
    T: FromRequestParts<S>,
{
    type Rejection = Response;

    async fn from_request_parts(
        parts: &mut request::Parts,
        state: &S,
    ) -> Result<Self, Self::Rejection> {
        let extracted = T::from_request_parts(parts, state).await;
        let operation = parts.extensions.get::<Operation>();
        extracted
            .map(Self)
            .map_err(|rejection| released(rejection, operation))
    }
}

impl<S, T> FromRequest<S> for OrRelease<T>
where
    S: Sync,
    T: FromRequest<S>,
{
    type Rejection = Response;

    async fn from_request(request: Request, state: &S) -> Result<Self, Self::Rejection> {
        let operation = request.extensions().get::<Operation>().cloned();
        let extracted = T::from_request(request, state).await;
        extracted
            .map(Self)
            .map_err(|rejection| released(rejection, operation.as_ref()))
    }
}

fn released(rejection: impl IntoResponse, operation: Option<&Operation>) -> Response {
    let mut response = rejection.into_response();
    if operation.is_some_and(|operation| !operation.have_effects_started()) {
        response
            .extensions_mut()
            .get_or_insert(Disposition::Release(Release::AnyRequest));
    }
    response
}

#[cfg(any(feature = "postgres", feature = "sqlite"))]
impl IntoResponse for crate::transaction::response::Committed {
    fn into_response(self) -> Response {
        self.into_http().map(::axum::body::Body::new)
    }
}

/// Logs the error and shows no cause, as
/// [`CommitError::into_http`](crate::CommitError::into_http) does.
#[cfg(any(feature = "postgres", feature = "sqlite"))]
impl IntoResponse for crate::transaction::error::CommitError {
    fn into_response(self) -> Response {
        self.into_http().map(::axum::body::Body::new)
    }
}

const NOT_GUARDED: &str = "`Operation` not extracted, request refused with 500: the route has no \
    idempotency layer, does not guard the method, or the request has no key. Extract \
    `Option<Operation>` where that is expected";
