//! The response future. A request that is not guarded costs one enum and no allocation.

use std::{
    fmt,
    pin::Pin,
    task::{Context, Poll},
};

use bytes::Bytes;
use http::Response;
use http_body::Body;
use pin_project_lite::pin_project;

use crate::{
    body::ResponseBody,
    flow::{GuardedRequest, ServiceResult},
};

pin_project! {
    /// The future of an [`Idempotency`](crate::Idempotency) service.
    ///
    /// It drives a guarded request on its caller's task. Dropped while the request's body
    /// is read, it leaves nothing behind. Dropped later, it moves the request to a task
    /// of its own, where the handler runs to its end and its response is recorded; see
    /// [`Disconnect`](crate::Disconnect).
    pub struct ResponseFuture<F, R, E>
    where
        R: Body,
    {
        #[pin]
        inner: Inner<F, R, E>,
    }

    impl<F, R, E> PinnedDrop for ResponseFuture<F, R, E>
    where
        R: Body,
    {
        fn drop(this: Pin<&mut Self>) {
            if let InnerProj::Guarded { request } = this.project().inner.project()
                && let Some(request) = request.take()
            {
                request.end();
            }
        }
    }
}

pin_project! {
    #[project = InnerProj]
    enum Inner<F, R, E>
    where
        R: Body,
    {
        Passed { #[pin] future: F },
        Refused { answer: Option<ServiceResult<R, E>> },
        Guarded { request: Option<GuardedRequest<R, E>> },
    }
}

impl<F, R: Body, E> ResponseFuture<F, R, E> {
    pub(crate) fn passed(future: F) -> Self {
        Self {
            inner: Inner::Passed { future },
        }
    }

    pub(crate) fn refused(answer: ServiceResult<R, E>) -> Self {
        Self {
            inner: Inner::Refused {
                answer: Some(answer),
            },
        }
    }

    pub(crate) fn guarded(request: GuardedRequest<R, E>) -> Self {
        Self {
            inner: Inner::Guarded {
                request: Some(request),
            },
        }
    }
}

impl<F, R, E> Future for ResponseFuture<F, R, E>
where
    F: Future<Output = Result<Response<R>, E>>,
    R: Body<Data = Bytes>,
{
    type Output = ServiceResult<R, E>;

    /// # Panics
    ///
    /// If it is polled after it was ready.
    fn poll(self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Self::Output> {
        match self.project().inner.project() {
            InnerProj::Passed { future } => future
                .poll(cx)
                .map(|result| result.map(|response| response.map(ResponseBody::streamed))),
            InnerProj::Refused { answer } => Poll::Ready(
                answer
                    .take()
                    .expect("`ResponseFuture` polled after its answer"),
            ),
            InnerProj::Guarded { request } => {
                let guarded = request
                    .as_mut()
                    .expect("`ResponseFuture` polled after its answer");
                let answer = guarded.as_mut().poll(cx);
                if answer.is_ready()
                    && let Some(request) = request.take()
                {
                    request.end();
                }
                answer
            }
        }
    }
}

impl<F, R: Body, E> fmt::Debug for ResponseFuture<F, R, E> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self.inner {
            Inner::Passed { .. } => "ResponseFuture(passed)",
            Inner::Refused { .. } => "ResponseFuture(refused)",
            Inner::Guarded { .. } => "ResponseFuture(guarded)",
        })
    }
}
