//! A request that the layer ignores costs no allocation.
//!
//! The counter counts the allocations of one thread, so each measurement polls
//! by hand on its own.

use std::{
    convert::Infallible,
    future::{Ready, ready},
    pin::pin,
    sync::Arc,
    task::{Context, Poll, Waker},
};

use allocation_counter::measure;
use axum::{Router, body::Body, routing};
use bytes::Bytes;
use http::{Request, Response};
use http_body_util::Full;
use tower::{Layer, Service, layer::layer_fn};
use tower_idempotency::{IdempotencyLayer, MemoryStore, Scope};

/// Answers at once, and takes any body.
#[derive(Clone)]
struct Answers;

impl<B> Service<Request<B>> for Answers {
    type Response = Response<Full<Bytes>>;
    type Error = Infallible;
    type Future = Ready<Result<Self::Response, Infallible>>;

    fn poll_ready(&mut self, _: &mut Context<'_>) -> Poll<Result<(), Infallible>> {
        Poll::Ready(Ok(()))
    }

    fn call(&mut self, _: Request<B>) -> Self::Future {
        ready(Ok(Response::new(Full::from("hello"))))
    }
}

#[test]
fn an_ignored_request_costs_no_allocation_over_the_bare_service() {
    let mut bare = Answers;
    let mut guarded = layer().layer(Answers);
    for request in [get, keyless] {
        let without = allocations(&mut bare, &request);
        let with = allocations(&mut guarded, &request);
        assert_eq!(with, without);
    }
}

#[test]
fn an_ignored_request_through_axum_costs_at_most_two_allocations() {
    let router = || Router::new().route("/", routing::any(async || "hello"));
    // With a size, as any layer that has settings: axum boxes a clone of the
    // layer for each call, which is free for a layer of no size.
    let settings = Arc::new(());
    let nothing = layer_fn(move |inner| {
        let _ = &settings;
        inner
    });
    let mut with_nothing = router().layer(nothing);
    let mut with_layer = router().layer(layer());
    for request in [get, keyless] {
        let request = || request().map(Body::new);
        let without = allocations(&mut with_nothing, &request);
        let with = allocations(&mut with_layer, &request);
        assert!(with <= without + 2, "{with} instead of {without}");
    }
}

#[test]
fn a_guarded_request_is_noticed_by_the_counter() {
    // The other tests pass on a counter that counts nothing; this one does not.
    let runtime = tokio::runtime::Builder::new_current_thread()
        .build()
        .unwrap();
    let _entered = runtime.enter();
    let mut guarded = layer().layer(Answers);
    let keyed = || {
        let mut request = keyless();
        let headers = request.headers_mut();
        headers.insert("idempotency-key", "K".parse().unwrap());
        request
    };
    let counted = measure(|| drop(Service::<Request<Full<Bytes>>>::call(&mut guarded, keyed())));
    assert!(counted.count_total > allocations(&mut Answers, &keyed));
}

#[test]
fn a_guarded_request_costs_a_few_allocations() {
    let runtime = tokio::runtime::Builder::new_current_thread()
        .enable_time()
        .build()
        .unwrap();
    let mut guarded = layer().layer(Answers);
    let mut number = 0;
    let mut ask = |fresh: bool| {
        number += u32::from(fresh);
        let mut request = keyless();
        let key = format!("key-{number}").parse().unwrap();
        request.headers_mut().insert("idempotency-key", key);
        let counted = measure(|| {
            let response = runtime.block_on(async { guarded.call(request).await });
            assert_eq!(response.unwrap().status(), 200);
        });
        counted.count_total
    };
    // The first requests grow each part of the store's table.
    for _ in 0..10_000 {
        ask(true);
    }
    let first_run = (0..20).map(|_| ask(true)).min().unwrap();
    let replay = (0..20).map(|_| ask(false)).min().unwrap();
    // The service and this test make five of the first and three of the second.
    assert!(first_run <= 20, "a first run: {first_run}");
    assert!(replay <= 12, "a replay: {replay}");
}

fn layer() -> IdempotencyLayer<MemoryStore> {
    IdempotencyLayer::optional(MemoryStore::new(), |_| Scope::new("acme"))
        .build()
        .unwrap()
}

fn get() -> Request<Full<Bytes>> {
    Request::get("/").body(Full::default()).unwrap()
}

fn keyless() -> Request<Full<Bytes>> {
    Request::post("/").body(Full::default()).unwrap()
}

/// The number of allocations of one call, after a first call to warm up.
fn allocations<S, B>(service: &mut S, request: &impl Fn() -> Request<B>) -> u64
where
    S: Service<Request<B>>,
{
    let mut call = || {
        let request = request();
        let counted = measure(|| {
            let mut cx = Context::from_waker(Waker::noop());
            assert!(service.poll_ready(&mut cx).is_ready());
            let answered = pin!(service.call(request)).as_mut().poll(&mut cx);
            let Poll::Ready(Ok(_)) = answered else {
                panic!("the call waits");
            };
        });
        counted.count_total
    };
    call();
    call()
}
