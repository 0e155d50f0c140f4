//! Reads the body of a guarded request: up to a limit, and as long as it makes
//! progress.

use std::{
    future::Ready,
    mem,
    ops::ControlFlow,
    pin::Pin,
    sync::Arc,
    task::{Context, Poll, ready},
    time::Duration,
};

use bytes::Bytes;
use http::HeaderMap;
use http_body::{Body, Frame};
use pin_project_lite::pin_project;
use tokio::{
    task::{coop::Unconstrained, unconstrained},
    time::{Instant, Sleep, sleep_until},
};

use crate::{
    Rejection, RejectionKind, Store,
    body::error::{BodyError, BoxError},
    body::{End, Reading},
    config::Config,
    flow::reply::Answer,
    flow::shared::{Host, Share},
};

/// A request that the layer answers.
pub(crate) trait Guarded<A> {
    fn poll_answer(self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<A>;

    /// Ends the request once it has its answer.
    fn finish(self: Pin<Box<Self>>);
}

/// A request that was refused from its head.
impl<A> Guarded<A> for Ready<A> {
    fn poll_answer(self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<A> {
        self.poll(cx)
    }

    fn finish(self: Pin<Box<Self>>) {}
}

pin_project! {
    /// A request whose body is read, and then answered by `next`.
    pub(crate) struct Upload<S, B, N, F> {
        host: Arc<Host<S>>,
        reads_on: bool,
        #[pin]
        stage: Stage<B, N, F>,
    }
}

pin_project! {
    #[project = StageProj]
    enum Stage<B, N, F> {
        // Nothing is open after a refusal, but the body.
        Reading { #[pin] body: B, open: Option<Open<N>> },
        Answering { #[pin] answer: F },
    }
}

/// What a request holds while its body is read.
struct Open<N> {
    reading: Reading,
    progress: ProgressTimeout,
    buffered: Share,
    next: N,
}

impl<S, B, N, F> Upload<S, B, N, F>
where
    N: FnOnce(Bytes, Option<HeaderMap>, Share) -> F,
{
    pub(crate) fn new(host: Arc<Host<S>>, body: B, next: N) -> Self {
        let config = &host.config;
        let open = Open {
            reading: Reading::up_to(config.max_request_body),
            progress: ProgressTimeout::new(config.request_body_timeout),
            buffered: host.buffers.none(),
            next,
        };
        Self {
            reads_on: false,
            stage: Stage::Reading {
                body,
                open: Some(open),
            },
            host,
        }
    }
}

impl<S, B, N, F, R, E> Guarded<Answer<R, E>> for Upload<S, B, N, F>
where
    S: Store,
    B: Body<Data = Bytes> + Send + 'static,
    B::Error: Into<BoxError>,
    N: FnOnce(Bytes, Option<HeaderMap>, Share) -> F + Send + 'static,
    F: Future<Output = Answer<R, E>> + Send + 'static,
    R: Body<Data = Bytes>,
{
    fn poll_answer(self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Answer<R, E>> {
        let mut this = self.project();
        loop {
            let (body, open) = match this.stage.as_mut().project() {
                StageProj::Answering { answer } => return answer.poll(cx),
                StageProj::Reading { body, open } => (body, open),
            };
            let read = match open {
                Some(open) => ready!(open.poll_read(body, cx, &this.host.config)),
                None => panic!("polled after its answer"),
            };
            let open = open.take();
            if let Err(rejection) = read {
                *this.reads_on = matches!(
                    rejection.kind(),
                    RejectionKind::BodyTooLarge | RejectionKind::Overloaded
                );
                return Poll::Ready(Ok(this.host.config.refuse_at_once(&rejection)));
            }
            if let Some(answer) = open.map(Open::answer) {
                this.stage.set(Stage::Answering { answer });
            }
        }
    }

    fn finish(self: Pin<Box<Self>>) {
        if self.reads_on {
            let host = Arc::clone(&self.host);
            host.discard(self);
        }
    }
}

/// The rest of the request's body.
impl<S, B, N, F> Body for Upload<S, B, N, F>
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

impl<N> Open<N> {
    /// Reads to the end of the body.
    fn poll_read<B>(
        &mut self,
        mut body: Pin<&mut B>,
        cx: &mut Context<'_>,
        config: &Config,
    ) -> Poll<Result<(), Rejection>>
    where
        B: Body<Data = Bytes>,
        B::Error: Into<BoxError>,
    {
        loop {
            let Poll::Ready(read) = self.reading.poll_frame(body.as_mut(), cx) else {
                let received = self.reading.len();
                ready!(self.progress.poll_elapsed(received, cx));
                return Poll::Ready(Err(Rejection::body_timeout(config.request_body_timeout)));
            };
            match read {
                ControlFlow::Continue(length) => {
                    if !self.buffered.grow(length) {
                        return Poll::Ready(Err(Rejection::overloaded(
                            "too many bytes of request bodies are held in memory, request \
                             refused with 503: raise `max_buffered_bytes`, or lower `max_request_body`",
                        )));
                    }
                }
                ControlFlow::Break(End::Clean) => return Poll::Ready(Ok(())),
                ControlFlow::Break(End::Outgrown) => {
                    return Poll::Ready(Err(Rejection::body_too_large(config.max_request_body)));
                }
                ControlFlow::Break(End::Broken(error)) => {
                    return Poll::Ready(Err(Rejection::body_broken(BodyError::of(&*error.into()))));
                }
            }
        }
    }

    fn answer<F>(self) -> F
    where
        N: FnOnce(Bytes, Option<HeaderMap>, Share) -> F,
    {
        let (data, trailers) = self.reading.take();
        (self.next)(data, trailers, self.buffered)
    }
}

/// Whether a body has stopped, or arrives too slowly. Neither reads the clock nor sets
/// a timer before there is something to wait for.
struct ProgressTimeout {
    timeout: Duration,
    has_looked: bool,
    watch: Option<Watch>,
}

struct Watch {
    start: Instant,
    /// When the bytes received so far were first seen.
    last: Instant,
    received: usize,
    // Unconstrained, since a body that uses up its task's budget each time would
    // never be seen to be late.
    timer: Pin<Box<Unconstrained<Sleep>>>,
}

impl ProgressTimeout {
    fn new(timeout: Duration) -> Self {
        Self {
            timeout,
            has_looked: false,
            watch: None,
        }
    }

    /// Ready once a pending body is late, `received` being its bytes so far.
    fn poll_elapsed(&mut self, received: usize, cx: &mut Context<'_>) -> Poll<()> {
        // A server begins to read a body when it is first asked for.
        if !mem::replace(&mut self.has_looked, true) {
            cx.waker().wake_by_ref();
            return Poll::Pending;
        }
        let timeout = self.timeout;
        let watch = self.watch.get_or_insert_with(|| {
            let now = Instant::now();
            Watch {
                start: now,
                last: now,
                received,
                timer: Box::pin(unconstrained(sleep_until(now + timeout))),
            }
        });
        if received > watch.received {
            watch.received = received;
            watch.last = Instant::now();
        }
        loop {
            ready!(watch.timer.as_mut().poll(cx));
            let deadline = watch.deadline(timeout);
            if deadline <= Instant::now() {
                return Poll::Ready(());
            }
            watch.timer.set(unconstrained(sleep_until(deadline)));
        }
    }
}

impl Watch {
    /// Until when the next byte has to come.
    fn deadline(&self, timeout: Duration) -> Instant {
        let at_the_floor = self.received as u64 * 1_000 / LEAST_BYTES_PER_SECOND;
        let too_slow = self.start + timeout + Duration::from_millis(at_the_floor);
        let stopped = self.last + timeout;
        too_slow.min(stopped)
    }
}

/// The least average rate at which a body has to arrive.
pub(crate) const LEAST_BYTES_PER_SECOND: u64 = 1 << 10;
