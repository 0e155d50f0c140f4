//! The service: is this request ignored, or guarded?

use std::{
    fmt, mem,
    panic::{AssertUnwindSafe, catch_unwind},
    sync::Arc,
    task::{Context, Poll},
};

use bytes::Bytes;
use http::{Request, Response};
use http_body::Body;
use tower::Service;

use crate::{
    Rejection, RequestBody, ResponseBody, ResponseFuture, Store, body::error::BoxError, flow,
    flow::admission::Admission, flow::discard::waits_for_continue, flow::shared::Host,
    rejection::Callback,
};

/// A service whose guarded requests are safe to retry. Made by an
/// [`IdempotencyLayer`](crate::IdempotencyLayer).
pub struct Idempotency<I, S> {
    inner: I,
    host: Arc<Host<S>>,
}

impl<I, S> Idempotency<I, S> {
    pub(crate) fn new(inner: I, host: Arc<Host<S>>) -> Self {
        Self { inner, host }
    }
}

impl<I, S, B, R> Service<Request<B>> for Idempotency<I, S>
where
    I: Service<Request<RequestBody<B>>, Response = Response<R>> + Clone + Send + 'static,
    I::Future: Send,
    I::Error: Send + 'static,
    S: Store,
    B: Body<Data = Bytes> + Send + 'static,
    B::Error: Into<BoxError>,
    R: Body<Data = Bytes> + Send + 'static,
    R::Error: Send,
{
    type Response = Response<ResponseBody<R>>;
    type Error = I::Error;
    type Future = ResponseFuture<I::Future, R, I::Error>;

    fn poll_ready(&mut self, cx: &mut Context<'_>) -> Poll<Result<(), Self::Error>> {
        self.inner.poll_ready(cx)
    }

    fn call(&mut self, request: Request<B>) -> Self::Future {
        if self.host.config.never_guards(request.method()) {
            return self.ignore(request);
        }
        let (parts, body) = request.into_parts();
        // A panic of the application's functions is this request's alone.
        let admitted = catch_unwind(AssertUnwindSafe(|| self.host.admit(&parts, &body)));
        let admitted = admitted.unwrap_or_else(|_| {
            Admission::Refused(Rejection::callback_panicked(Callback::Admission))
        });
        match admitted {
            Admission::Ignored => self.ignore(Request::from_parts(parts, body)),
            Admission::Refused(rejection) => {
                if !waits_for_continue(&parts.headers) {
                    self.host.discard(body);
                }
                ResponseFuture::refused(self.host.config.refuse_at_once(&rejection))
            }
            Admission::Guarded(admitted) => {
                // The ready service is the one to call; a clone of it is not.
                let unready = self.inner.clone();
                let ready = mem::replace(&mut self.inner, unready);
                let host = Arc::clone(&self.host);
                ResponseFuture::guarded(flow::guard(host, ready, admitted, parts, body))
            }
        }
    }
}

impl<I, S> Idempotency<I, S> {
    fn ignore<B, R>(&mut self, request: Request<B>) -> ResponseFuture<I::Future, R, I::Error>
    where
        I: Service<Request<RequestBody<B>>, Response = Response<R>>,
        R: Body,
    {
        ResponseFuture::ignored(self.inner.call(request.map(RequestBody::streamed)))
    }
}

impl<I: Clone, S> Clone for Idempotency<I, S> {
    fn clone(&self) -> Self {
        Self {
            inner: self.inner.clone(),
            host: Arc::clone(&self.host),
        }
    }
}

impl<I: fmt::Debug, S> fmt::Debug for Idempotency<I, S> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Idempotency")
            .field("inner", &self.inner)
            .finish_non_exhaustive()
    }
}
