//! The way of a guarded request: read its body, acquire its key, run the handler, finish.

mod acquire;
pub(crate) mod admission;
mod authorize;
mod claim;
pub(crate) mod config;
mod decide;
pub(crate) mod discard;
mod finish;
mod heartbeat;
mod judge;
mod limits;
mod owned;
mod read_body;
mod record;
mod reconcile;
mod reply;
mod request;
mod run;
pub(crate) mod shared;
mod store_call;
mod withdraw;
#[cfg(feature = "guard")]
pub(crate) mod work;

use std::{
    future::poll_fn,
    panic::{AssertUnwindSafe, catch_unwind},
    pin::Pin,
    sync::{
        Arc,
        atomic::{AtomicBool, Ordering},
    },
    task::{Context, Poll, ready},
};

use bytes::Bytes;
use http::{Request, Response, request::Parts};
use http_body::{Body, Frame};
use pin_project_lite::pin_project;
use tokio::runtime::Handle;
use tower::Service;

pub(crate) use self::reply::ServiceResult;
use self::{
    acquire::{Acquired, NotRun, acquire},
    admission::Admitted,
    discard::discard,
    limits::Permit,
    owned::OwnedClaim,
    read_body::ReadBody,
    reply::{HttpReply, Reply},
    request::{KeyedRequest, ReadRequest},
    run::{run, run_unguarded},
    shared::Shared,
};
use crate::{
    Rejection, RejectionKind, RequestBody, Store,
    body::{ReceivedBody, SentBody},
    rejection::RequestHead,
};

/// Marks a request that a layer guards. A second layer on the same request lets it pass.
#[derive(Clone, Copy)]
pub(crate) struct IsGuarded;

/// The future of a guarded request, without its types.
pub(crate) trait Guarded: Future {
    /// Ends a request that was answered, or whose caller has dropped it.
    fn end(self: Pin<Box<Self>>);
}

pub(crate) type GuardedRequest<R, E> = Pin<Box<dyn Guarded<Output = ServiceResult<R, E>> + Send>>;

/// Guards a request.
pub(crate) fn guard<I, S, B, R>(
    shared: Arc<Shared<S>>,
    inner: I,
    admitted: Admitted,
    parts: Parts,
    body: B,
) -> GuardedRequest<R, I::Error>
where
    I: Service<Request<RequestBody<B>>, Response = Response<R>> + Clone + Send + 'static,
    I::Future: Send,
    I::Error: Send + 'static,
    S: Store,
    B: ReceivedBody + Send + 'static,
    R: SentBody,
{
    let client = Client::default();
    let head = match shared.config.authorizer {
        None => RequestHead::new(&parts, &shared.config.responses.renderer),
        Some(_) => RequestHead::with_attributes(&parts, admitted.attributes),
    };
    let background = Background::new(admitted.runtime);
    let (name, stale_from) = (admitted.name, admitted.stale_from);
    let mut request = ReadRequest::unread(parts);
    let reading = Reading {
        read: ReadBody::new(&shared.config, shared.buffers.empty_permit()),
        answer: {
            let (shared, client, head) = (Arc::clone(&shared), client.clone(), head.clone());
            move |read: ReadBody| {
                let (body, trailers) = read.reader.into_parts();
                request.read(body, trailers);
                let request = KeyedRequest::new(&shared.config, name, stale_from, request);
                let buffered = read.buffered;
                async move {
                    let reply = match request {
                        Ok(request) => {
                            process(&shared, &client, &head, inner, request, buffered).await
                        }
                        Err(rejection) => {
                            Reply::refuse(&shared.config.responses, &head, &rejection)
                        }
                    };
                    reply.send(&client, shared.config.warnings())
                }
            }
        },
    };
    // Written in place: the future is large, and only its first stage is there yet.
    let guarded = Box::new_uninit();
    let guarded = Box::write(
        guarded,
        GuardedFuture {
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

/// Refuses a request from its head.
pub(crate) fn refuse<S, R, E>(
    shared: &Shared<S>,
    parts: &Parts,
    rejection: &Rejection,
) -> ServiceResult<R, E>
where
    R: Body<Data = Bytes>,
{
    let settings = &shared.config.responses;
    let head = RequestHead::new(parts, &settings.renderer);
    Reply::refuse(settings, &head, rejection).send(&Client::default(), &settings.warnings)
}

/// Acquires the key of a request and runs its handler, or answers it without a run.
async fn process<I, S, B, R>(
    shared: &Arc<Shared<S>>,
    client: &Client,
    head: &RequestHead,
    inner: I,
    mut request: KeyedRequest,
    buffered: Permit,
) -> HttpReply<R, I::Error>
where
    I: Service<Request<RequestBody<B>>, Response = Response<R>> + Clone,
    S: Store,
    R: SentBody,
{
    let settings = &shared.config.responses;
    let permit = match shared.running_permit() {
        Ok(permit) => permit,
        Err(rejection) => return Reply::refuse(settings, head, &rejection),
    };
    match acquire(shared, client, inner, &mut request).await {
        Ok(Acquired::Run { inner, granted }) => {
            let claim = OwnedClaim::new(Arc::clone(shared), &request, granted, head.clone());
            drop(buffered);
            run(claim, inner, request, client, permit).await
        }
        Ok(Acquired::RunUnguarded { inner }) => {
            let withdrawal = request.withdrawal(shared);
            drop(buffered);
            let run = run_unguarded(settings, head, inner, request.into_http());
            let reply = Box::pin(run).await;
            if let Some(withdrawal) = withdrawal {
                spawn(withdrawal.run(permit));
            }
            reply
        }
        Err(not_run) => {
            let withdrawal = request.withdrawal(shared);
            // What the request holds is free before its client is answered.
            drop((request, buffered));
            if let Some(withdrawal) = withdrawal {
                spawn(withdrawal.run(permit));
            }
            match not_run {
                NotRun::Answered(answered) if shared.config.authorizer.is_some() => {
                    let answer = authorize::answer(&shared.config, client, head, answered);
                    Box::pin(answer).await
                }
                not_run => Reply::not_run(&shared.config, head, not_run),
            }
        }
    }
}

pin_project! {
    /// Drives a guarded request on its caller's task.
    ///
    /// If the caller drops it while the body is read, nothing is left behind. Later, the
    /// request moves to a task of its own and runs to its end there, or, with
    /// `Disconnect::Cancel`, is stopped and marked as unknown.
    struct GuardedFuture<S, B, N, F> {
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
struct Reading<N> {
    read: ReadBody,
    answer: N,
}

impl<S, B, N, F, R, E> Future for GuardedFuture<S, B, N, F>
where
    B: ReceivedBody,
    N: FnOnce(ReadBody) -> F,
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
    N: FnOnce(ReadBody) -> F,
    F: Future<Output = ServiceResult<R, E>>,
    R: Body<Data = Bytes>,
{
    fn poll_stage(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<ServiceResult<R, E>> {
        let mut this = self.as_mut().project();
        if let StageProj::Reading { body, reading } = this.stage.as_mut().project() {
            let Some(Reading { read, .. }) = reading else {
                unreachable!("`ResponseFuture` polls no request that was answered");
            };
            let is_read = ready!(read.poll_read(body, cx, &this.shared.config));
            let reading = reading.take();
            if let Err(rejection) = is_read {
                *this.reads_on = matches!(
                    rejection.kind(),
                    RejectionKind::BodyTooLarge | RejectionKind::Overloaded
                );
                return Poll::Ready(self.refuse(&rejection));
            }
            if let Some(Reading { read, answer }) = reading {
                let answer = answer(read);
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
    N: FnOnce(ReadBody) -> F + Send + 'static,
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

/// Whether the client of a request is still there.
#[derive(Clone, Default)]
struct Client(Arc<AtomicBool>);

impl Client {
    /// The request is polled again after this: nothing has to be woken.
    fn leave(&self) {
        self.0.store(true, Ordering::Release);
    }

    fn has_left(&self) -> bool {
        self.0.load(Ordering::Acquire)
    }

    /// Resolves when the client has left.
    async fn left(&self) {
        poll_fn(|_| match self.has_left() {
            true => Poll::Ready(()),
            false => Poll::Pending,
        })
        .await;
    }
}

/// Where a request continues when its client has left: in the tracing span of its caller.
struct Background {
    runtime: Handle,
    #[cfg(feature = "tracing")]
    span: tracing::Span,
}

impl Background {
    fn new(runtime: Handle) -> Self {
        Self {
            runtime,
            #[cfg(feature = "tracing")]
            span: tracing::Span::current(),
        }
    }

    fn spawn(self, task: impl Future<Output = ()> + Send + 'static) {
        #[cfg(feature = "tracing")]
        let task = tracing::Instrument::instrument(task, self.span);
        #[cfg(feature = "tracing")]
        let task = tracing::instrument::WithSubscriber::with_current_subscriber(task);
        self.runtime.spawn(task);
    }
}

/// Runs what outlives the answer of a request on a task of its own, in the current span.
fn spawn(task: impl Future<Output = ()> + Send + 'static) {
    #[cfg(feature = "tracing")]
    let task = tracing::Instrument::in_current_span(task);
    #[cfg(feature = "tracing")]
    let task = tracing::instrument::WithSubscriber::with_current_subscriber(task);
    tokio::spawn(task);
}
