//! A handler behind the layer, and its client.

use std::{
    convert::Infallible,
    sync::{
        Arc,
        atomic::{AtomicUsize, Ordering},
    },
    time::Duration,
};

use axum::{body::Body, response::Response};
use bytes::Bytes;
use futures_util::{FutureExt as _, future::BoxFuture};
use http::{HeaderMap, Request, StatusCode};
use http_body_util::{BodyExt as _, Full};
use tower::{Layer as _, ServiceExt as _, service_fn};
use tower_idempotency::{
    CommitError, Committed, IdempotencyBuilder, IdempotencyLayer, Operation, Outcome, RequestBody,
    Scope, Store,
};

use crate::{scan, shop::Shop};

/// One run of a handler.
pub(crate) struct Run<S> {
    pub(crate) shop: S,
    pub(crate) operation: Operation,
    /// From 1, over all keys.
    pub(crate) number: usize,
}

impl<S: Shop> Run<S> {
    /// Begins a transaction, and orders `item` in it.
    pub(crate) async fn begin_order(&self, item: &str) -> S::Transaction {
        let mut transaction = self.shop.begin(&self.operation).await.unwrap();
        let ordered = S::order(&mut transaction, &self.operation, item).await;
        ordered.unwrap();
        transaction
    }

    /// Commits `transaction` with `response`.
    pub(crate) fn commit(
        &self,
        transaction: impl Into<S::Transaction> + Send,
        response: Response,
    ) -> impl Future<Output = Result<Committed, CommitError>> + Send {
        self.shop.commit(&self.operation, transaction, response)
    }
}

type Handler<S> = Arc<dyn Fn(Run<S>) -> BoxFuture<'static, Response> + Send + Sync>;

pub(crate) struct Service<S: Shop> {
    pub(crate) layer: IdempotencyLayer<S::Store>,
    shop: S,
    handler: Handler<S>,
    runs: Arc<AtomicUsize>,
}

impl<S: Shop> Clone for Service<S> {
    fn clone(&self) -> Self {
        Self {
            layer: self.layer.clone(),
            shop: self.shop.clone(),
            handler: Arc::clone(&self.handler),
            runs: Arc::clone(&self.runs),
        }
    }
}

impl<S: Shop> Service<S> {
    pub(crate) fn new<F>(shop: &S, handler: impl Fn(Run<S>) -> F + Send + Sync + 'static) -> Self
    where
        F: Future<Output = Response> + Send + 'static,
    {
        Self {
            layer: settings(shop.store()).build().unwrap(),
            shop: shop.clone(),
            handler: Arc::new(move |run| Box::pin(handler(run))),
            runs: Arc::default(),
        }
    }

    pub(crate) fn set(
        mut self,
        set: impl FnOnce(IdempotencyBuilder<S::Store>) -> IdempotencyBuilder<S::Store>,
    ) -> Self {
        self.layer = set(settings(self.shop.store())).build().unwrap();
        self
    }

    pub(crate) fn post(&self, key: &str) -> BoxFuture<'static, Answer> {
        let (handler, shop) = (Arc::clone(&self.handler), self.shop.clone());
        let runs = Arc::clone(&self.runs);
        let inner = service_fn(move |request: Request<RequestBody<Full<Bytes>>>| {
            let run = Run {
                shop: shop.clone(),
                operation: request.extensions().get::<Operation>().unwrap().clone(),
                number: runs.fetch_add(1, Ordering::SeqCst) + 1,
            };
            let answering = handler(run);
            answering.map(Ok::<_, Infallible>)
        });
        let request = Request::post("/orders")
            .header("idempotency-key", key)
            .body(Full::from("one pen"))
            .unwrap();
        let answering: BoxFuture<'static, Result<_, Infallible>> =
            Box::pin(self.layer.layer(inner).oneshot(request));
        Box::pin(async move {
            let (parts, body) = answering.await.unwrap().into_parts();
            let body = body.collect().await.unwrap().to_bytes();
            Answer {
                status: parts.status,
                outcome: parts.extensions.get::<Outcome>().copied().unwrap(),
                headers: parts.headers,
                body: String::from_utf8(body.to_vec()).unwrap(),
            }
        })
    }

    pub(crate) fn runs(&self) -> usize {
        self.runs.load(Ordering::SeqCst)
    }
}

fn settings<T: Store + Clone>(store: &T) -> IdempotencyBuilder<T> {
    IdempotencyLayer::required(store.clone(), |parts| {
        scan::sent(parts);
        Some(Scope::single_tenant())
    })
}

pub(crate) struct Answer {
    pub(crate) status: StatusCode,
    pub(crate) outcome: Outcome,
    pub(crate) headers: HeaderMap,
    pub(crate) body: String,
}

impl Answer {
    pub(crate) fn is_replay(&self) -> bool {
        self.headers.contains_key("idempotent-replayed")
    }

    /// The last part of the problem's type.
    pub(crate) fn problem(&self) -> String {
        let problem: serde_json::Value = serde_json::from_str(&self.body).unwrap();
        let kind = problem["type"].as_str().unwrap();
        kind.rsplit(':').next().unwrap().to_owned()
    }

    #[track_caller]
    pub(crate) fn assert_is(&self, status: u16, body: &str) {
        assert_eq!((self.status.as_u16(), &*self.body), (status, body));
    }

    #[track_caller]
    pub(crate) fn assert_problem(&self, status: u16, problem: &str) {
        assert_eq!(self.status.as_u16(), status, "{}", self.body);
        assert_eq!(self.problem(), problem);
    }
}

/// Asks again until the answer is not `problem`, which the layer may give for a
/// while.
pub(crate) async fn past<S: Shop>(service: &Service<S>, key: &str, problem: &str) -> Answer {
    loop {
        let answer = service.post(key).await;
        if !answer.body.contains(problem) {
            return answer;
        }
        tokio::time::sleep(Duration::from_millis(10)).await;
    }
}

/// A response with a status alone.
pub(crate) fn status(code: u16) -> Response {
    let mut response = Response::new(Body::empty());
    *response.status_mut() = StatusCode::from_u16(code).unwrap();
    response
}
