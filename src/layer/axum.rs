//! The layer for services that take and answer axum's own body.

use std::{
    fmt,
    pin::Pin,
    task::{Context, Poll, ready},
};

use ::axum::body::Body;
use bytes::Bytes;
use http::{Request, Response};
use pin_project_lite::pin_project;
use tower::{BoxError, Layer, Service};

use super::{IdempotencyLayer, future::ResponseFuture, service::Idempotency};
use crate::{
    body::{RequestBody, ResponseBody},
    store::Store,
};

impl<S> IdempotencyLayer<S> {
    /// Returns this layer in a form that keeps the type of the body: the inner
    /// service is called with a `Request<axum::body::Body>`, and the response is a
    /// `Response<axum::body::Body>`.
    ///
    /// Needed where the next layer inside takes no other type, as
    /// [`middleware::from_fn`](::axum::middleware::from_fn) in the same `ServiceBuilder`.
    /// A `Router` and a handler take any body: give them the layer itself. Both forms
    /// share their settings, their waiters and their running requests, so that
    /// [`drain`](Self::drain) waits for the requests of both.
    ///
    /// ```
    /// # use axum::{body::Body, extract::Request, http::StatusCode, response::Response};
    /// # use tower::ServiceExt;
    /// use axum::{Router, middleware::{self, Next}, routing::post};
    /// use tower::ServiceBuilder;
    /// use tower_idempotency::{IdempotencyLayer, MemoryStore, Operation, Scope};
    ///
    /// # static RUNS: std::sync::atomic::AtomicUsize = std::sync::atomic::AtomicUsize::new(0);
    /// /// Runs once for a key, however often the request is sent.
    /// async fn audit(operation: Operation, request: Request, next: Next) -> Response {
    ///     println!("operation {}", operation.id());
    /// #   RUNS.fetch_add(1, std::sync::atomic::Ordering::Relaxed);
    ///     next.run(request).await
    /// }
    ///
    /// # #[tokio::main(flavor = "current_thread")]
    /// # async fn main() -> Result<(), Box<dyn std::error::Error>> {
    /// let layer = IdempotencyLayer::required(MemoryStore::new(), |_| Some(Scope::single_tenant()));
    /// let idempotency = layer.build()?;
    /// let app: Router = Router::new().route("/payments", post(StatusCode::CREATED)).layer(
    ///     ServiceBuilder::new()
    ///         .layer(idempotency.for_axum())
    ///         .layer(middleware::from_fn(audit)),
    /// );
    /// # for replayed in [false, true] {
    /// #     let request = Request::post("/payments").header("idempotency-key", "k");
    /// #     let response = app.clone().oneshot(request.body(Body::empty())?).await?;
    /// #     assert_eq!(response.status(), StatusCode::CREATED);
    /// #     assert_eq!(response.headers().contains_key("idempotent-replayed"), replayed);
    /// # }
    /// # assert_eq!(RUNS.load(std::sync::atomic::Ordering::Relaxed), 1);
    /// # Ok(())
    /// # }
    /// ```
    #[must_use]
    pub fn for_axum(&self) -> AxumIdempotencyLayer<S> {
        AxumIdempotencyLayer(self.clone())
    }
}

/// An [`IdempotencyLayer`] that keeps the type of the body. Made by
/// [`IdempotencyLayer::for_axum`].
pub struct AxumIdempotencyLayer<S>(IdempotencyLayer<S>);

impl<I, S> Layer<I> for AxumIdempotencyLayer<S> {
    type Service = AxumIdempotency<I, S>;

    fn layer(&self, inner: I) -> Self::Service {
        AxumIdempotency(self.0.layer(WithAxumBody(inner)))
    }
}

impl<S> Clone for AxumIdempotencyLayer<S> {
    fn clone(&self) -> Self {
        Self(self.0.clone())
    }
}

impl<S> fmt::Debug for AxumIdempotencyLayer<S> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("AxumIdempotencyLayer")
            .finish_non_exhaustive()
    }
}

/// The service of an [`AxumIdempotencyLayer`].
pub struct AxumIdempotency<I, S>(Idempotency<WithAxumBody<I>, S>);

impl<I, S, B, R> Service<Request<B>> for AxumIdempotency<I, S>
where
    I: Service<Request<Body>, Response = Response<R>> + Clone + Send + 'static,
    I::Future: Send,
    I::Error: Send + 'static,
    S: Store,
    B: http_body::Body<Data = Bytes, Error: Into<BoxError>> + Send + 'static,
    R: http_body::Body<Data = Bytes, Error: Into<BoxError> + Send> + Send + 'static,
{
    type Response = Response<Body>;
    type Error = I::Error;
    type Future = AxumResponseFuture<I::Future, R, I::Error>;

    fn poll_ready(&mut self, cx: &mut Context<'_>) -> Poll<Result<(), Self::Error>> {
        Service::<Request<B>>::poll_ready(&mut self.0, cx)
    }

    fn call(&mut self, request: Request<B>) -> Self::Future {
        AxumResponseFuture {
            inner: self.0.call(request),
        }
    }
}

impl<I: Clone, S> Clone for AxumIdempotency<I, S> {
    fn clone(&self) -> Self {
        Self(self.0.clone())
    }
}

impl<I: fmt::Debug, S> fmt::Debug for AxumIdempotency<I, S> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_tuple("AxumIdempotency").field(&self.0).finish()
    }
}

pin_project! {
    /// The future of an [`AxumIdempotency`].
    #[derive(Debug)]
    pub struct AxumResponseFuture<F, R, E>
    where
        R: http_body::Body,
    {
        #[pin]
        inner: ResponseFuture<F, R, E>,
    }
}

impl<F, R, E> Future for AxumResponseFuture<F, R, E>
where
    F: Future<Output = Result<Response<R>, E>>,
    R: http_body::Body<Data = Bytes, Error: Into<BoxError> + Send> + Send + 'static,
{
    type Output = Result<Response<Body>, E>;

    /// # Panics
    ///
    /// If it is polled after it was ready.
    fn poll(self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Self::Output> {
        let answer = ready!(self.project().inner.poll(cx));
        Poll::Ready(answer.map(|response| response.map(ResponseBody::into_axum)))
    }
}

/// Calls the inner service with axum's body.
#[derive(Clone, Debug)]
struct WithAxumBody<I>(I);

impl<I, B> Service<Request<RequestBody<B>>> for WithAxumBody<I>
where
    I: Service<Request<Body>>,
    B: http_body::Body<Data = Bytes, Error: Into<BoxError>> + Send + 'static,
{
    type Response = I::Response;
    type Error = I::Error;
    type Future = I::Future;

    fn poll_ready(&mut self, cx: &mut Context<'_>) -> Poll<Result<(), Self::Error>> {
        self.0.poll_ready(cx)
    }

    fn call(&mut self, request: Request<RequestBody<B>>) -> Self::Future {
        self.0.call(request.map(RequestBody::into_axum))
    }
}
