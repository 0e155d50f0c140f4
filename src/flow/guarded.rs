//! The future of a guarded request.

use std::{
    panic::{AssertUnwindSafe, catch_unwind},
    pin::Pin,
    sync::Arc,
    task::{Context, Poll, ready},
};

use bytes::Bytes;
use http_body::{Body, Frame};
use pin_project_lite::pin_project;

use super::{
    Background, Client,
    discard::discard,
    read_body::ReadBody,
    reply::{Reply, ServiceResult},
    shared::Shared,
};
use crate::{
    body::ReceivedBody,
    rejection::{Rejection, RejectionKind, RequestHead},
    store::Store,
};

/// The future of a guarded request, without its types.
pub(crate) trait Guarded: Future {
    /// Ends a request that was answered, or whose caller has dropped it.
    fn end(self: Pin<Box<Self>>);
}

pub(crate) type GuardedRequest<R, E> = Pin<Box<dyn Guarded<Output = ServiceResult<R, E>> + Send>>;

pin_project! {
    /// Drives a guarded request on its caller's task.
    ///
    /// If the caller drops it while the body is read, nothing is left behind. Later, the
    /// request moves to a task of its own and runs to its end there, or, with
    /// `Disconnect::Cancel`, is stopped and marked as unknown.
    pub(super) struct GuardedFuture<S, B, N, F> {
        shared: Arc<Shared<S>>,
        client: Client,
        head: RequestHead,
        background: Option<Background>,
        is_answered: bool,
        // Whether the rest of the body is read and discarded.
        reads_on: bool,
        #[pin]
        stage: Stage<B, N, F>,
    }
}

pin_project! {
    #[project = StageProj]
    enum Stage<B, N, F> {
        // After a refusal, nothing but the body is left.
        Reading { #[pin] body: B, reading: Option<Reading<N>> },
        Answering { #[pin] answer: F },
    }
}

/// A request whose body is read.
pub(super) struct Reading<N> {
    pub(super) read: ReadBody,
    /// Called with the part of the body that was read, and with the body.
    pub(super) answer: N,
}

impl<S, B, N, F> GuardedFuture<S, B, N, F> {
    pub(super) fn new(
        shared: Arc<Shared<S>>,
        client: Client,
        head: RequestHead,
        background: Background,
        body: B,
        reading: Reading<N>,
    ) -> Pin<Box<Self>> {
        // Written in place: the future is large, and only its first stage is there yet.
        let guarded = Box::new_uninit();
        let guarded = Box::write(
            guarded,
            Self {
                shared,
                client,
                head,
                background: Some(background),
                is_answered: false,
                reads_on: false,
                stage: Stage::Reading {
                    body,
                    reading: Some(reading),
                },
            },
        );
        Box::into_pin(guarded)
    }
}

impl<S, B, N, F, R, E> Future for GuardedFuture<S, B, N, F>
where
    B: ReceivedBody,
    N: FnOnce(ReadBody, Pin<&mut B>) -> F,
    F: Future<Output = ServiceResult<R, E>>,
    R: Body<Data = Bytes>,
{
    type Output = ServiceResult<R, E>;

    fn poll(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Self::Output> {
        // A panic of the request's body, or of the layer itself, is this request's alone.
        let polled = catch_unwind(AssertUnwindSafe(|| self.as_mut().poll_stage(cx)));
        let polled = polled.unwrap_or_else(|_| {
            let rejection = match self.stage {
                Stage::Reading { .. } => Rejection::body_panicked(),
                Stage::Answering { .. } => Rejection::task_panicked(),
            };
            Poll::Ready(self.as_mut().refuse(&rejection))
        });
        *self.project().is_answered = polled.is_ready();
        polled
    }
}

impl<S, B, N, F, R, E> GuardedFuture<S, B, N, F>
where
    B: ReceivedBody,
    N: FnOnce(ReadBody, Pin<&mut B>) -> F,
    F: Future<Output = ServiceResult<R, E>>,
    R: Body<Data = Bytes>,
{
    fn poll_stage(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<ServiceResult<R, E>> {
        let mut this = self.as_mut().project();
        if let StageProj::Reading { body, reading } = this.stage.as_mut().project() {
            let Some(Reading { read, .. }) = reading else {
                unreachable!("`ResponseFuture` polls no request that was answered");
            };
            let mut body = body;
            let is_read = ready!(read.poll_read(body.as_mut(), cx, this.shared));
            let reading = reading.take();
            if let Err(rejection) = is_read {
                *this.reads_on = matches!(
                    rejection.kind(),
                    RejectionKind::BodyTooLarge
                        | RejectionKind::Overloaded
                        | RejectionKind::ScopeOverloaded
                );
                return Poll::Ready(self.refuse(&rejection));
            }
            if let Some(Reading { read, answer }) = reading {
                let answer = answer(read, body);
                this.stage.set(Stage::Answering { answer });
            }
        }
        match this.stage.project() {
            StageProj::Answering { answer } => answer.poll(cx),
            StageProj::Reading { .. } => unreachable!("the body has been read"),
        }
    }

    fn refuse(self: Pin<&mut Self>, rejection: &Rejection) -> ServiceResult<R, E> {
        let this = self.project();
        let settings = &this.shared.config.responses;
        Reply::refuse(settings, this.head, rejection).send(this.client, &settings.warnings)
    }
}

impl<S, B, N, F, R, E> Guarded for GuardedFuture<S, B, N, F>
where
    S: Store,
    B: ReceivedBody + Send + 'static,
    N: FnOnce(ReadBody, Pin<&mut B>) -> F + Send + 'static,
    F: Future<Output = ServiceResult<R, E>> + Send + 'static,
    R: Body<Data = Bytes>,
{
    fn end(mut self: Pin<Box<Self>>) {
        let this = self.as_mut().project();
        match this.stage.project() {
            StageProj::Reading { .. } if *this.reads_on => {
                let shared = Arc::clone(this.shared);
                discard(&shared.discards, self);
            }
            StageProj::Answering { .. } if !*this.is_answered => {
                this.client.leave();
                if let Some(background) = this.background.take() {
                    background.spawn(async move {
                        // Its outcome is logged, and its client has left.
                        let _ = self.await;
                    });
                }
            }
            StageProj::Reading { .. } | StageProj::Answering { .. } => {}
        }
    }
}

/// The rest of the request's body, to be discarded.
impl<S, B, N, F> Body for GuardedFuture<S, B, N, F>
where
    B: Body<Data = Bytes>,
{
    type Data = Bytes;
    type Error = B::Error;

    fn poll_frame(
        self: Pin<&mut Self>,
        cx: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, B::Error>>> {
        match self.project().stage.project() {
            StageProj::Reading { body, .. } => body.poll_frame(cx),
            StageProj::Answering { .. } => Poll::Ready(None),
        }
    }
}
