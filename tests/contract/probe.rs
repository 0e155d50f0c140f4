//! The handler under the layer. It counts its runs, waits where a test says so,
//! and panics when it is called without being ready.

use std::{
    error::Error,
    fmt,
    pin::Pin,
    sync::{
        Arc,
        atomic::{AtomicUsize, Ordering},
    },
    task::{Context, Poll},
};

use axum::body::Body;
use bytes::Bytes;
use futures_util::future::BoxFuture;
use http::{HeaderMap, Request, Response, StatusCode, header};
use http_body::{Body as HttpBody, Frame};
use http_body_util::{BodyExt as _, StreamBody};
use tokio::sync::mpsc;
use tower::Service;
use tower_idempotency::Operation;
pub(crate) use tower_idempotency::test_support::Gate;

/// The error of a handler.
#[derive(Debug)]
pub(crate) struct Failure(pub(crate) &'static str);

impl fmt::Display for Failure {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.0)
    }
}

impl Error for Failure {}

pub(crate) type Handled = Result<Response<Body>, Failure>;

/// One run of the handler.
pub(crate) struct Run {
    /// From 1.
    pub(crate) number: usize,
    pub(crate) request: Request<Body>,
}

impl Run {
    pub(crate) fn operation(&self) -> Operation {
        self.request
            .extensions()
            .get::<Operation>()
            .cloned()
            .expect("a guarded run has an operation")
    }

    /// Answers 201 for the `number`-th created thing.
    pub(crate) fn created(&self) -> Response<Body> {
        Response::builder()
            .status(StatusCode::CREATED)
            .header(header::CONTENT_TYPE, "application/json")
            .header(header::LOCATION, format!("/things/{}", self.number))
            .header("x-run", self.number)
            .body(format!("{{\"n\":{}}}", self.number).into())
            .unwrap()
    }

    /// As [`Run::created`], with another status.
    pub(crate) fn status(&self, status: u16) -> Response<Body> {
        let mut response = self.created();
        *response.status_mut() = StatusCode::from_u16(status).unwrap();
        response
    }
}

/// A service that counts its runs.
pub(crate) struct Probe {
    runs: Arc<AtomicUsize>,
    handler: Arc<dyn Fn(Run) -> BoxFuture<'static, Handled> + Send + Sync>,
    ready: bool,
}

impl Probe {
    /// Answers the n-th run as [`Run::created`] does.
    pub(crate) fn counting() -> Self {
        Self::answering(|run| run.created())
    }

    pub(crate) fn answering(
        answer: impl Fn(Run) -> Response<Body> + Send + Sync + 'static,
    ) -> Self {
        Self::running(move |run| std::future::ready(Ok(answer(run))))
    }

    pub(crate) fn running<F>(handler: impl Fn(Run) -> F + Send + Sync + 'static) -> Self
    where
        F: Future<Output = Handled> + Send + 'static,
    {
        Self {
            runs: Arc::default(),
            handler: Arc::new(move |run| Box::pin(handler(run))),
            ready: false,
        }
    }

    /// Counts, and answers once the gate lets the run pass.
    pub(crate) fn behind(gate: &Gate) -> Self {
        Self::deciding_behind(gate, |run| Ok(run.created()))
    }

    /// As [`Probe::behind`], with what `decide` makes of the run.
    pub(crate) fn deciding_behind(
        gate: &Gate,
        decide: impl Fn(&Run) -> Handled + Send + Sync + 'static,
    ) -> Self {
        let (gate, decide) = (gate.clone(), Arc::new(decide));
        Self::running(move |run| {
            let (gate, decide) = (gate.clone(), Arc::clone(&decide));
            async move {
                gate.pass().await;
                decide(&run)
            }
        })
    }

    /// Answers the n-th run with the n-th status, and later ones with the last.
    pub(crate) fn statuses(script: &[u16]) -> Self {
        let script = script.to_vec();
        Self::answering(move |run| run.status(script[(run.number - 1).min(script.len() - 1)]))
    }

    pub(crate) fn runs(&self) -> usize {
        self.runs.load(Ordering::SeqCst)
    }
}

impl Clone for Probe {
    fn clone(&self) -> Self {
        Self {
            runs: Arc::clone(&self.runs),
            handler: Arc::clone(&self.handler),
            // Readiness is not shared with clones.
            ready: false,
        }
    }
}

impl<B> Service<Request<B>> for Probe
where
    B: HttpBody<Data = Bytes> + Send + 'static,
    B::Error: Into<Box<dyn Error + Send + Sync>>,
{
    type Response = Response<Body>;
    type Error = Failure;
    type Future = BoxFuture<'static, Handled>;

    fn poll_ready(&mut self, _: &mut Context<'_>) -> Poll<Result<(), Failure>> {
        self.ready = true;
        Poll::Ready(Ok(()))
    }

    fn call(&mut self, request: Request<B>) -> Self::Future {
        assert!(self.ready, "called without having been ready");
        self.ready = false;
        let number = self.runs.fetch_add(1, Ordering::SeqCst) + 1;
        (self.handler)(Run {
            number,
            request: request.map(Body::new),
        })
    }
}

pub(crate) type Frames = mpsc::UnboundedSender<Result<Frame<Bytes>, Failure>>;

/// A body whose frames the test sends, one by one.
pub(crate) fn streamed() -> (Frames, Body) {
    let (frames, received) = mpsc::unbounded_channel();
    let stream = futures_util::stream::unfold(received, |mut received| async move {
        let frame = received.recv().await?;
        Some((frame, received))
    });
    (frames, Body::new(StreamBody::new(stream)))
}

/// A body of these chunks, which ends in these trailers.
pub(crate) fn chunks_and_trailers(chunks: &[&'static str], trailers: HeaderMap) -> Body {
    let (frames, body) = streamed();
    for chunk in chunks {
        frames.send(Ok(data(chunk))).unwrap();
    }
    frames.send(Ok(Frame::trailers(trailers))).unwrap();
    body
}

/// A body that breaks after these chunks.
pub(crate) fn breaking_after(chunks: &[&'static str]) -> Body {
    let (frames, body) = streamed();
    for chunk in chunks {
        frames.send(Ok(data(chunk))).unwrap();
    }
    frames.send(Err(Failure("the body broke"))).unwrap();
    body
}

pub(crate) fn data(chunk: &'static str) -> Frame<Bytes> {
    Frame::data(Bytes::from_static(chunk.as_bytes()))
}

/// The bytes that a handler received.
pub(crate) async fn bytes_of(body: Body) -> Bytes {
    body.collect().await.unwrap().to_bytes()
}

/// A body that must not be polled.
pub(crate) struct Untouchable;

impl HttpBody for Untouchable {
    type Data = Bytes;
    type Error = Failure;

    fn poll_frame(
        self: Pin<&mut Self>,
        _: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, Failure>>> {
        panic!("the body was read");
    }
}
