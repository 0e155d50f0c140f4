//! Records of requests and of values under one name.

use axum::{Router, body::Body, http::Request, routing::post};
use tower::ServiceExt as _;
use tower_idempotency::{
    IdempotencyLayer, Scope, Store,
    store::admin::{RecordedResponse, Resolution},
};

use crate::{Runs, guard, name, retry, stores::on_each_store, told};

on_each_store! {
    a_record_of_a_request_is_never_replayed_as_a_value;
    a_record_of_a_value_is_never_replayed_as_a_response;
    a_response_in_the_place_of_a_value_is_unreadable;
}

fn app(store: impl Store, runs: &Runs) -> Router {
    let layer = IdempotencyLayer::required(store, |_| Some(Scope::single_tenant()));
    let runs = runs.clone();
    let handler = async move || runs.add().to_string();
    Router::new().route("/", post(handler).layer(layer.build().unwrap()))
}

async fn status(app: &Router) -> u16 {
    let request = Request::post("/").header("idempotency-key", "job");
    let response = app.clone().oneshot(request.body(Body::empty()).unwrap());
    response.await.unwrap().status().as_u16()
}

async fn a_record_of_a_request_is_never_replayed_as_a_value(store: impl Store) {
    let (store, runs) = (std::sync::Arc::new(store), Runs::default());
    assert_eq!(status(&app(store.clone(), &runs)).await, 200);
    let guard = guard(store);
    assert_eq!(retry(&guard, "job", &runs).await, "other kind");
    assert_eq!(runs.count(), 1);
}

async fn a_record_of_a_value_is_never_replayed_as_a_response(store: impl Store) {
    let (store, runs) = (std::sync::Arc::new(store), Runs::default());
    assert_eq!(retry(&guard(store.clone()), "job", &runs).await, "now");
    assert_eq!(status(&app(store, &runs)).await, 503);
    assert_eq!(runs.count(), 1);
}

/// An operator has resolved an unknown outcome with a response.
async fn a_response_in_the_place_of_a_value_is_unreadable(store: impl Store) {
    let (store, runs) = (std::sync::Arc::new(store), Runs::default());
    let guard = guard(store.clone());
    let failed = guard.run(&name("job"), &"input", async |operation| {
        operation.effects_started();
        Err::<usize, _>(())
    });
    assert_eq!(told::<_, ()>(&failed.await), "failed");
    let name = name("job");
    let record = store.read(&name).await.unwrap().unwrap();
    let response = RecordedResponse::new(http::Response::new("1")).unwrap();
    let happened = Resolution::Happened(response);
    let resolved = store.resolve(&name, record.fence, &happened, crate::LEASE);
    assert!(matches!(
        resolved.await,
        Ok(tower_idempotency::store::Transitioned::Applied)
    ));
    assert_eq!(retry(&guard, "job", &runs).await, "unreadable");
}
