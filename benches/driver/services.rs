//! The service and the requests with which the cost of the layer is measured.

use std::{convert::Infallible, fmt::Debug, hint::black_box};

use bytes::Bytes;
use http::{Request, Response};
use http_body_util::{BodyExt as _, Full};
use tower::{Service, ServiceExt as _};
use tower_idempotency::{
    Fingerprinting, IdempotencyLayer, MemoryStore, Scope, Store,
    sealing::{Sealing, SealingKey, Secret},
};

pub(crate) type Body = Full<Bytes>;

/// Reads the whole request, and answers with a kibibyte.
pub(crate) async fn handle<B>(request: Request<B>) -> Result<Response<Body>, Infallible>
where
    B: http_body::Body<Data = Bytes, Error: Debug>,
{
    let body = request.into_body().collect().await.unwrap().to_bytes();
    black_box(body.len());
    Ok(Response::new(Full::new(Bytes::from_static(&[b'r'; 1024]))))
}

/// The layered service, and its store.
pub(crate) fn layer() -> (MemoryStore, IdempotencyLayer<MemoryStore>) {
    let store = MemoryStore::new();
    (store.clone(), layer_on(store))
}

pub(crate) fn layer_on<S: Store>(store: S) -> IdempotencyLayer<S> {
    let layer = IdempotencyLayer::required(store, |_| Some(Scope::single_tenant()));
    layer.build().unwrap()
}

/// A layer that seals its responses and has a secret for its fingerprints.
pub(crate) fn sealed_layer() -> IdempotencyLayer<MemoryStore> {
    let secret = Secret::random();
    let key = SealingKey::new("2026-11", &secret).unwrap();
    IdempotencyLayer::required(MemoryStore::new(), |_| Some(Scope::single_tenant()))
        .sealing(Sealing::new("payments", key))
        .fingerprint(Fingerprinting::bytes().keyed(&secret))
        .build()
        .unwrap()
}

/// A request with a kibibyte.
pub(crate) fn post(key: &str) -> Request<Body> {
    Request::post("/payments")
        .header("content-type", "application/json")
        .header("idempotency-key", key)
        .body(Full::new(Bytes::from_static(&[b'q'; 1024])))
        .unwrap()
}

pub(crate) fn get() -> Request<Body> {
    Request::get("/payments").body(Full::default()).unwrap()
}

/// The whole answer, read.
pub(crate) async fn answered<S, R>(service: &mut S, request: Request<Body>)
where
    S: Service<Request<Body>, Response = Response<R>, Error = Infallible>,
    R: http_body::Body<Data = Bytes, Error: Debug>,
{
    let response = service.ready().await.unwrap().call(request).await.unwrap();
    assert_eq!(response.status(), 200);
    let body = response.into_body().collect().await.unwrap().to_bytes();
    black_box(body.len());
}
