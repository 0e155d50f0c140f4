//! The service: passes a request on, refuses it, or guards it.

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
    body::{RequestBody, error::BoxError},
    flow::{
        self,
        admission::{Admission, admit, never_guards},
        discard::{discard, waits_for_continue},
        shared::Shared,
    },
    layer::future::ResponseFuture,
    rejection::{Callback, Rejection},
    store::Store,
};

/// A service whose guarded requests are safe to retry. Made by an
/// [`IdempotencyLayer`](crate::IdempotencyLayer).
pub struct Idempotency<I, S> {
    inner: I,
    shared: Arc<Shared<S>>,
}

impl<I, S> Idempotency<I, S> {
    pub(crate) fn new(inner: I, shared: Arc<Shared<S>>) -> Self {
        Self { inner, shared }
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
    type Response = Response<crate::body::ResponseBody<R>>;
    type Error = I::Error;
    type Future = ResponseFuture<I::Future, R, I::Error>;

    fn poll_ready(&mut self, cx: &mut Context<'_>) -> Poll<Result<(), Self::Error>> {
        self.inner.poll_ready(cx)
    }

    fn call(&mut self, request: Request<B>) -> Self::Future {
        let shared = &self.shared;
        let config = &shared.config;
        if never_guards(config, request.method()) {
            return self.pass(request);
        }
        let (parts, body) = request.into_parts();
        // A panic of the application's functions is this request's alone.
        let admission = catch_unwind(AssertUnwindSafe(|| {
            admit(config, shared.is_draining(), &parts, &body)
        }));
        let admission = admission.unwrap_or_else(|_| {
            Admission::Refuse(Rejection::callback_panicked(Callback::Admission))
        });
        match admission {
            Admission::Pass => self.pass(Request::from_parts(parts, body)),
            Admission::Refuse(rejection) => {
                if !waits_for_continue(&parts.headers) {
                    discard(&shared.discards, body);
                }
                ResponseFuture::refused(flow::refuse(shared, &parts, &rejection))
            }
            Admission::Guard(admitted) => {
                // The ready service is the one to call. A clone of it is not ready.
                let clone = self.inner.clone();
                let ready = mem::replace(&mut self.inner, clone);
                let shared = Arc::clone(&self.shared);
                ResponseFuture::guarded(flow::guard(shared, ready, admitted, parts, body))
            }
        }
    }
}

impl<I, S> Idempotency<I, S> {
    fn pass<B, R>(&mut self, request: Request<B>) -> ResponseFuture<I::Future, R, I::Error>
    where
        I: Service<Request<RequestBody<B>>, Response = Response<R>>,
        R: Body,
    {
        ResponseFuture::passed(self.inner.call(request.map(RequestBody::streamed)))
    }
}

impl<I: Clone, S> Clone for Idempotency<I, S> {
    fn clone(&self) -> Self {
        Self {
            inner: self.inner.clone(),
            shared: Arc::clone(&self.shared),
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
