//! A guarded service for one request after another.

use std::{convert::Infallible, future::ready};

use bytes::Bytes;
use http::{HeaderMap, Request, Response};
use http_body_util::{BodyExt as _, Full, combinators::UnsyncBoxBody};
use serde_json::Value;
use tower::{Layer as _, ServiceExt as _, service_fn};
use tower_idempotency::{
    IdempotencyBuilder, IdempotencyLayer, MemoryStore, Operation, Outcome, RequestBody, Scope,
    Store,
};

pub(crate) fn layer() -> IdempotencyBuilder<MemoryStore> {
    IdempotencyLayer::required(MemoryStore::new(), |_| Some(Scope::single_tenant()))
}

/// A response with its trailers.
pub(crate) struct Answer {
    pub(crate) response: Response<Bytes>,
    pub(crate) trailers: HeaderMap,
}

impl Answer {
    pub(crate) fn outcome(&self) -> &'static str {
        self.response.extensions().get::<Outcome>().unwrap().name()
    }
}

/// Sends a request to a handler that answers with this response and these trailers.
pub(crate) async fn send<S: Store>(
    layer: &IdempotencyLayer<S>,
    request: http::request::Builder,
    handler: impl Fn(&Operation) -> (Response<&'static str>, HeaderMap) + Clone + Send + 'static,
) -> Answer {
    let service = layer.layer(service_fn(move |request: Request<Body>| {
        let operation = request.extensions().get::<Operation>().unwrap();
        let (response, trailers) = handler(operation);
        let response = response.map(|body| {
            let trailers = Some(Ok::<_, Infallible>(trailers));
            Full::from(body)
                .with_trailers(ready(trailers))
                .boxed_unsync()
        });
        ready(Ok::<Response<UnsyncBoxBody<Bytes, Infallible>>, http::Error>(response))
    }));
    let request = request.body(Full::<Bytes>::default()).unwrap();
    let (parts, body) = service.oneshot(request).await.unwrap().into_parts();
    let body = body.collect().await.unwrap();
    let trailers = body.trailers().cloned().unwrap_or_default();
    let response = Response::from_parts(parts, body.to_bytes());
    Answer { response, trailers }
}

type Body = RequestBody<Full<Bytes>>;

/// A request with this key.
pub(crate) fn keyed(key: &str) -> http::request::Builder {
    Request::post("/").header("idempotency-key", key)
}

/// The status of a request, and the slug of a refusal.
pub(crate) async fn status<S: Store>(
    layer: &IdempotencyLayer<S>,
    request: http::request::Builder,
) -> (u16, String) {
    let handler = |_: &Operation| (Response::new(""), HeaderMap::new());
    let response = send(layer, request, handler).await.response;
    let problem: Value = serde_json::from_slice(response.body()).unwrap_or_default();
    let slug = problem["type"]
        .as_str()
        .and_then(|name| name.rsplit(':').next());
    (
        response.status().as_u16(),
        slug.unwrap_or_default().to_owned(),
    )
}
