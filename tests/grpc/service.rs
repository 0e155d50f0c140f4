//! A handler that answers as gRPC services do, called without a connection.

use std::{
    convert::Infallible,
    sync::{
        Arc,
        atomic::{AtomicUsize, Ordering::SeqCst},
    },
};

use axum::body::Body;
use bytes::Bytes;
use futures_util::stream;
use http::{HeaderMap, HeaderValue, Request, Response};
use http_body::Frame;
use http_body_util::{BodyExt as _, StreamBody};
use tower::{Layer as _, ServiceExt as _, service_fn, util::BoxCloneSyncService};
use tower_idempotency::{
    IdempotencyBuilder, IdempotencyLayer, MemoryStore, Operation, Outcome, RequestBody,
    ResponseBody, Scope, Store,
};

use crate::scan;

pub(crate) type Service =
    BoxCloneSyncService<Request<Body>, Response<ResponseBody<Body>>, Infallible>;

pub(crate) fn layer<S: Store>(store: S) -> IdempotencyBuilder<S> {
    IdempotencyLayer::required(store, |parts| {
        scan::sent(parts);
        Some(Scope::single_tenant())
    })
}

pub(crate) fn memory() -> IdempotencyBuilder<MemoryStore> {
    layer(MemoryStore::new())
}

/// A guarded handler, and the count of its runs.
#[derive(Clone)]
pub(crate) struct Guarded {
    pub(crate) service: Service,
    pub(crate) runs: Arc<AtomicUsize>,
}

impl Guarded {
    pub(crate) fn new<S: Store, F>(
        layer: IdempotencyBuilder<S>,
        handler: impl Fn(Operation) -> F + Clone + Send + Sync + 'static,
    ) -> Self
    where
        F: Future<Output = Response<Body>> + Send + 'static,
    {
        Self::within(&layer.build().unwrap(), handler)
    }

    pub(crate) fn within<S: Store, F>(
        layer: &IdempotencyLayer<S>,
        handler: impl Fn(Operation) -> F + Clone + Send + Sync + 'static,
    ) -> Self
    where
        F: Future<Output = Response<Body>> + Send + 'static,
    {
        let runs = Arc::new(AtomicUsize::new(0));
        let counted = Arc::clone(&runs);
        let service = service_fn(move |request: Request<RequestBody<Body>>| {
            counted.fetch_add(1, SeqCst);
            let answer = handler(request.extensions().get::<Operation>().unwrap().clone());
            async { Ok(answer.await) }
        });
        Self {
            service: BoxCloneSyncService::new(layer.layer(service)),
            runs,
        }
    }

    /// A handler that always gives the answer that `make` makes.
    pub(crate) fn answering<S: Store>(
        layer: IdempotencyBuilder<S>,
        make: impl Fn() -> Response<Body> + Clone + Send + Sync + 'static,
    ) -> Self {
        Self::new(layer, move |_| std::future::ready(make()))
    }

    pub(crate) async fn call(&self, key: &str) -> Answer {
        self.send(call(key, "message")).await
    }

    pub(crate) async fn send(&self, request: Request<Body>) -> Answer {
        let (parts, body) = self
            .service
            .clone()
            .oneshot(request)
            .await
            .unwrap()
            .into_parts();
        assert_eq!(parts.status, 200);
        let collected = body.collect().await.unwrap();
        let trailers = collected.trailers().cloned().unwrap_or_default();
        let outcome = parts.extensions.get().copied();
        let mut lines = parts.headers;
        lines.extend(trailers);
        Answer {
            lines,
            outcome,
            body: collected.to_bytes(),
        }
    }

    pub(crate) fn runs(&self) -> usize {
        self.runs.load(SeqCst)
    }
}

/// A unary call with a key.
pub(crate) fn call(key: &str, message: &'static str) -> Request<Body> {
    Request::post("/shop.Payments/Pay")
        .header("content-type", "application/grpc")
        .header("idempotency-key", key)
        .body(message.into())
        .unwrap()
}

/// What a client of gRPC receives.
#[derive(Debug)]
pub(crate) struct Answer {
    /// The headers and the trailers.
    lines: HeaderMap,
    outcome: Option<Outcome>,
    pub(crate) body: Bytes,
}

impl Answer {
    pub(crate) fn outcome(&self) -> Outcome {
        self.outcome.unwrap()
    }

    pub(crate) fn is_replay(&self) -> bool {
        self.lines.contains_key("idempotent-replayed")
    }

    pub(crate) fn code(&self) -> &str {
        self.text("grpc-status")
    }

    #[track_caller]
    fn text(&self, name: &str) -> &str {
        self.lines[name].to_str().unwrap()
    }

    /// Asserts that it is this refusal.
    #[track_caller]
    pub(crate) fn assert_refused(&self, slug: &str, code: &str, pushback: &str) {
        let problem = self.text("problem-type").rsplit(':').next();
        assert_eq!(problem, Some(slug), "{self:?}");
        assert_eq!(self.code(), code, "{self:?}");
        assert_eq!(self.text("grpc-retry-pushback-ms"), pushback, "{self:?}");
        assert_eq!(self.text("content-type"), "application/grpc", "{self:?}");
        assert!(self.body.is_empty(), "{self:?}");
    }
}

/// Where an answer has its code.
#[derive(Clone, Copy, Debug)]
pub(crate) enum Place {
    Headers,
    Trailers,
    /// Behind a message.
    Behind(&'static str),
}

pub(crate) const PLACES: [Place; 3] = [Place::Headers, Place::Trailers, Place::Behind("answer")];

pub(crate) fn answer(code: &'static str, place: Place) -> Response<Body> {
    let response = Response::builder().header("content-type", "application/grpc");
    let trailers = HeaderMap::from_iter([(
        "grpc-status".parse().unwrap(),
        HeaderValue::from_static(code),
    )]);
    let frames = match place {
        Place::Headers => {
            let response = response.header("grpc-status", code);
            return response.body(Body::empty()).unwrap();
        }
        Place::Trailers => vec![Frame::trailers(trailers)],
        Place::Behind(message) => vec![
            Frame::data(Bytes::from_static(message.as_bytes())),
            Frame::trailers(trailers),
        ],
    };
    let frames = stream::iter(frames.into_iter().map(Ok::<_, Infallible>));
    response.body(Body::new(StreamBody::new(frames))).unwrap()
}
