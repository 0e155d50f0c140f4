//! The response future: an ignored request costs one enum and no allocation.

use std::{
    fmt,
    pin::Pin,
    task::{Context, Poll},
};

use bytes::Bytes;
use http::Response;
use http_body::Body;
use pin_project_lite::pin_project;

use crate::{ResponseBody, flow::read_body::Guarded, flow::reply::Answer};

pin_project! {
    /// The future of an [`Idempotency`](crate::Idempotency) service.
    ///
    /// Dropping it while the request's body arrives leaves nothing behind; after
    /// that the request runs on to its end, and its response is recorded.
    pub struct ResponseFuture<F, R, E>
    where
        R: Body,
    {
        #[pin]
        inner: Inner<F, R, E>,
    }
}

pin_project! {
    #[project = InnerProj]
    enum Inner<F, R, E>
    where
        R: Body,
    {
        Ignored { #[pin] future: F },
        // None once it has its answer.
        Guarded { request: Option<Pin<Box<dyn Guarded<Answer<R, E>> + Send>>> },
    }
}

impl<F, R: Body, E> ResponseFuture<F, R, E> {
    pub(crate) fn ignored(future: F) -> Self {
        Self {
            inner: Inner::Ignored { future },
        }
    }

    pub(crate) fn guarded(request: impl Guarded<Answer<R, E>> + Send + 'static) -> Self {
        Self {
            inner: Inner::Guarded {
                request: Some(Box::pin(request)),
            },
        }
    }

    pub(crate) fn refused(response: Response<ResponseBody<R>>) -> Self
    where
        R: Send + 'static,
        R::Error: Send,
        E: Send + 'static,
    {
        Self::guarded(std::future::ready(Ok(response)))
    }
}

impl<F, R, E> Future for ResponseFuture<F, R, E>
where
    F: Future<Output = Result<Response<R>, E>>,
    R: Body<Data = Bytes>,
{
    type Output = Answer<R, E>;

    fn poll(self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Self::Output> {
        match self.project().inner.project() {
            InnerProj::Ignored { future } => future
                .poll(cx)
                .map(|result| result.map(|response| response.map(ResponseBody::streamed))),
            InnerProj::Guarded { request } => {
                let Some(mut answered) = request.take() else {
                    panic!("`ResponseFuture` polled after its answer");
                };
                let answer = answered.as_mut().poll_answer(cx);
                match answer.is_ready() {
                    true => answered.finish(),
                    false => *request = Some(answered),
                }
                answer
            }
        }
    }
}

impl<F, R: Body, E> fmt::Debug for ResponseFuture<F, R, E> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self.inner {
            Inner::Ignored { .. } => "ResponseFuture(ignored)",
            Inner::Guarded { .. } => "ResponseFuture(guarded)",
        })
    }
}
