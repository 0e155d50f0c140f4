//! The example of a custom store keeps every promise, and serves below the layer.

use std::convert::Infallible;

use bytes::Bytes;
use http::{Request, Response};
use http_body_util::{BodyExt as _, Full};
use tower::{Layer as _, ServiceExt as _, service_fn};
use tower_idempotency::{
    IdempotencyLayer, Operation, RequestBody, Scope, conformance::Subject, conformance_tests,
};

#[path = "../examples/custom_store.rs"]
mod custom_store;

conformance_tests! {
    #[tokio::test(start_paused = true)]
    custom_store::NewMap
}

#[test]
fn the_example_runs_to_its_end() {
    custom_store::main();
}

#[tokio::test(start_paused = true)]
async fn rule_20_the_custom_store_replays_a_response() {
    let store = custom_store::NewMap.store().await;
    let layer = IdempotencyLayer::required(store, |_| Some(Scope::single_tenant()))
        .build()
        .unwrap();
    let service = layer.layer(service_fn(
        |request: Request<RequestBody<Full<Bytes>>>| async move {
            let operation = request.extensions().get::<Operation>().unwrap();
            Ok::<_, Infallible>(Response::new(Full::from(operation.id().to_string())))
        },
    ));
    let mut bodies = Vec::new();
    for is_replay in [false, true] {
        let request = Request::post("/payments")
            .header("idempotency-key", "8e03978e")
            .body(Full::<Bytes>::from("amount=100"))
            .unwrap();
        let response = service.clone().oneshot(request).await.unwrap();
        let replayed = response.headers().contains_key("idempotent-replayed");
        assert_eq!(replayed, is_replay);
        let body = response.into_body().collect().await.unwrap();
        bodies.push(body.to_bytes());
    }
    assert_eq!(bodies[0], bodies[1]);
}
