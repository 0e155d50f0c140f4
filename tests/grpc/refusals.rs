//! The code of each refusal, and when its call may be repeated.

use std::{
    convert::Infallible,
    future::{pending, ready},
    io,
    pin::Pin,
    sync::{Arc, Mutex},
    time::Duration,
};

use axum::body::Body;
use bytes::Bytes;
use futures_util::stream;
use http::{HeaderValue, Request, Response, StatusCode};
use tower::ServiceExt as _;
use tower_idempotency::{
    Fingerprinting, IdempotencyLayer, KeySyntax, MemoryStore, Operation, Quota, Reconciler,
    Recovery, ReplayAuthorizer, ReplayDecision, Scope, StoreError,
    store::admin::{RecordedResponse, Resolution},
    test_support::{Fault, FaultyStore, Gate, StoreCall},
};

use super::service::{Guarded, Place, answer, call, layer, memory};

fn done() -> Response<Body> {
    answer("0", Place::Behind("done"))
}

/// Holds each run until the gate opens.
fn behind(gate: &Gate) -> impl Fn(Operation) -> Held + Clone + Send + Sync + 'static {
    let gate = gate.clone();
    move |_| {
        let gate = gate.clone();
        Box::pin(async move {
            gate.pass().await;
            done()
        })
    }
}

type Held = Pin<Box<dyn Future<Output = Response<Body>> + Send>>;

#[tokio::test]
async fn rule_78_the_media_type_alone_makes_a_call_grpc() {
    let guarded = Guarded::answering(memory(), done);
    let typed = |media_type| {
        let mut request = call("", "message");
        let media_type = HeaderValue::from_static(media_type);
        request.headers_mut().insert("content-type", media_type);
        request
    };
    for media_type in [
        "application/grpc+proto",
        "Application/gRPC; a=b",
        "application/grpc",
    ] {
        let refused = guarded.send(typed(media_type)).await;
        refused.assert_refused("key-invalid", "3", "-1");
    }
    for media_type in ["application/grpc-web+proto", "application/json"] {
        let service = guarded.service.clone();
        let refused = service.oneshot(typed(media_type)).await.unwrap();
        assert_eq!(refused.status(), StatusCode::BAD_REQUEST);
        assert_eq!(
            refused.headers()["content-type"],
            "application/problem+json"
        );
    }
}

#[tokio::test]
async fn rule_80_calls_refused_for_now_may_be_repeated() {
    for (most, slug) in [(1, "overloaded"), (2, "request-in-progress")] {
        let gate = Gate::closed();
        let guarded = Guarded::new(memory().max_in_flight(most), behind(&gate));
        let first = tokio::spawn({
            let guarded = guarded.clone();
            async move { guarded.call("k").await }
        });
        gate.arrival().await;
        let second = guarded.call("k").await;
        second.assert_refused(slug, "14", "1000");
        gate.open();
        assert_eq!(first.await.unwrap().code(), "0");
    }

    let gate = Gate::closed();
    let layer = memory().build().unwrap();
    let guarded = Guarded::within(&layer, behind(&gate));
    assert_eq!(layer.drain(Duration::ZERO).await.left(), 0);
    let draining = guarded.call("k").await;
    draining.assert_refused("draining", "14", "1000");

    let broken = stream::iter([Ok(Bytes::from("half")), Err(io::Error::other("gone"))]);
    let mut request = call("k", "");
    *request.body_mut() = Body::from_stream(broken);
    let guarded = Guarded::answering(memory(), done);
    let broken = guarded.send(request).await;
    broken.assert_refused("body-invalid", "14", "1000");
    assert_eq!(guarded.call("k").await.code(), "0");
}

#[tokio::test(start_paused = true)]
async fn rule_80_call_over_a_quota_is_not_retried_at_once() {
    let quota = Quota::unlimited().max_records(1);
    let guarded = Guarded::answering(memory().quota(quota), done);
    assert_eq!(guarded.call("k").await.code(), "0");
    let refused = guarded.call("l").await;
    // After a day.
    refused.assert_refused("quota-exceeded", "8", "86400000");
    assert_eq!(guarded.call("k").await.code(), "0");
}

#[tokio::test(start_paused = true)]
async fn rule_80_slow_bodies_and_faulty_stores_allow_another_call() {
    let mut request = call("k", "");
    let endless = stream::once(pending::<Result<Bytes, Infallible>>());
    *request.body_mut() = Body::from_stream(endless);
    let slow = Guarded::answering(memory(), done).send(request).await;
    slow.assert_refused("body-timeout", "14", "1000");

    let store = FaultyStore::new(MemoryStore::new());
    store.inject(StoreCall::Claim, .., Fault::Error(StoreError::full("x")));
    let unavailable = Guarded::answering(layer(store), done).call("k").await;
    unavailable.assert_refused("store-unavailable", "14", "1000");
}

#[tokio::test(start_paused = true)]
async fn rule_80_a_replay_that_cannot_be_authorized_allows_another_call() {
    for (decision, slug, code, pushback) in [
        (ReplayDecision::Refuse, "replay-refused", "7", "-1"),
        (
            ReplayDecision::Unavailable,
            "authorization-unavailable",
            "14",
            "1000",
        ),
    ] {
        let authorizer = ReplayAuthorizer::new(move |_, _| ready(decision));
        // A custom renderer is not asked for a call of gRPC.
        let layer = memory()
            .authorize_replay(authorizer)
            .render(|_, _| Some(Response::new("rendered")));
        let guarded = Guarded::answering(layer, done);
        assert_eq!(guarded.call("k").await.code(), "0");
        let refused = guarded.call("k").await;
        refused.assert_refused(slug, code, pushback);
    }
}

#[tokio::test]
async fn rule_80_a_call_may_ask_a_reconciler_again() {
    let answers = Arc::new(Mutex::new(Vec::new()));
    let found = Arc::clone(&answers);
    let reconciler = Reconciler::new(move |_| ready(found.lock().unwrap().pop()));
    let layer = memory().recovery(Recovery::Reconcile(reconciler));
    let guarded = Guarded::answering(layer, || answer("14", Place::Headers));
    guarded.call("k").await;
    let retry = guarded.call("k").await;
    retry.assert_refused("outcome-unknown", "14", "1000");
    let response = RecordedResponse::new(answer("0", Place::Behind("found"))).unwrap();
    let happened = Resolution::Happened(response);
    answers.lock().unwrap().push(happened);
    let found = guarded.call("k").await;
    assert_eq!((found.code(), &found.body[..]), ("0", &b"found"[..]));
    assert_eq!(guarded.runs(), 1);
}

#[tokio::test]
async fn rule_81_a_final_refusal_has_the_code_of_its_kind() {
    let guarded = Guarded::answering(memory(), done);
    let mut missing = call("k", "message");
    missing.headers_mut().remove("idempotency-key");
    let missing = guarded.send(missing).await;
    missing.assert_refused("key-missing", "3", "-1");
    let invalid = guarded.call("").await;
    invalid.assert_refused("key-invalid", "3", "-1");
    guarded.call("k").await;
    let reused = guarded.send(call("k", "another")).await;
    reused.assert_refused("key-reused", "3", "-1");

    let hour = Duration::from_secs(3600);
    let recent = memory().key_syntax(KeySyntax::compat().uuid_v7(hour));
    let stale = Guarded::answering(recent, done).call(OLD_UUID).await;
    stale.assert_refused("key-stale", "3", "-1");

    let mut request = call("k", "no JSON");
    let media_type = HeaderValue::from_static("application/grpc+json");
    request.headers_mut().insert("content-type", media_type);
    let json = memory().fingerprint(Fingerprinting::json());
    let invalid = Guarded::answering(json, done).send(request).await;
    invalid.assert_refused("body-invalid", "3", "-1");

    let nobody = IdempotencyLayer::required(MemoryStore::new(), |_| None::<Scope>);
    let unknown = Guarded::answering(nobody, done).call("k").await;
    unknown.assert_refused("caller-unknown", "7", "-1");

    let small = memory().max_request_body(3);
    let too_large = Guarded::answering(small, done).call("k").await;
    too_large.assert_refused("body-too-large", "8", "-1");

    let panicking = Guarded::answering(memory(), || panic!("boom"));
    let panicked = panicking.call("k").await;
    panicked.assert_refused("handler-panicked", "13", "-1");
    let unknown = panicking.call("k").await;
    unknown.assert_refused("outcome-unknown", "9", "-1");

    let panicking =
        IdempotencyLayer::required(MemoryStore::new(), |_| -> Option<Scope> { panic!("boom") });
    let panicked = Guarded::answering(panicking, done).call("k").await;
    panicked.assert_refused("callback-panicked", "13", "-1");
}

/// Made in 2023.
const OLD_UUID: &str = "01890a5d-ac96-774b-bcce-b302099a8057";

#[tokio::test]
async fn rule_87_a_renderer_is_not_asked_for_a_call() {
    let layer = memory().render(|_, _| {
        let mut response = Response::new("rendered");
        *response.status_mut() = StatusCode::IM_A_TEAPOT;
        Some(response)
    });
    let guarded = Guarded::answering(layer, done);
    let refused = guarded.call("").await;
    refused.assert_refused("key-invalid", "3", "-1");
    let request = Request::post("/").body(Body::empty()).unwrap();
    let rendered = guarded.service.oneshot(request).await.unwrap();
    assert_eq!(rendered.status(), StatusCode::IM_A_TEAPOT);
}
