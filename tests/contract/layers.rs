//! The effect of the order of layers.

use std::sync::{
    Arc,
    atomic::{AtomicUsize, Ordering::SeqCst},
};

use axum::{
    Router,
    extract::Request,
    middleware::{Next, from_fn_with_state},
    response::Response,
};
use http::{HeaderMap, HeaderValue, Method, StatusCode};
use tower::{Layer as _, ServiceBuilder};
use tower_http::{catch_panic::CatchPanicLayer, limit::RequestBodyLimitLayer, trace::TraceLayer};

use crate::{
    api::{keyed, required, send},
    client::{Wire, post},
    probe::{Probe, bytes_of, chunks_and_trailers},
    server::serve,
    stores::memory,
};

fn panicking() -> Probe {
    Probe::running(|run| async move {
        assert_ne!(run.number, 1, "the handler panics");
        Ok(run.created())
    })
}

#[tokio::test]
async fn f111_a_panic_caught_outside_leaves_the_outcome_unknown() {
    let probe = panicking();
    let service = ServiceBuilder::new()
        .layer(CatchPanicLayer::new())
        .layer(required(memory()).build().unwrap())
        .service(probe.clone());
    let first = send(service.clone(), keyed("K")).await;
    first.assert_problem(500, "handler-panicked");
    send(service, keyed("K"))
        .await
        .assert_problem(409, "outcome-unknown");
    assert_eq!(probe.runs(), 1);
}

#[tokio::test]
async fn f111_a_panic_caught_inside_frees_the_key() {
    let probe = panicking();
    let layer = required(memory()).build().unwrap();
    let service = layer.layer(CatchPanicLayer::new().layer(probe.clone()));
    let first = send(service.clone(), keyed("K")).await;
    assert_eq!(first.status, StatusCode::INTERNAL_SERVER_ERROR);
    // It runs again, as after any 500 of a handler.
    send(service, keyed("K")).await.assert_run(2);
}

async fn count(
    axum::extract::State(calls): axum::extract::State<Arc<AtomicUsize>>,
    request: Request,
    next: Next,
) -> Response {
    calls.fetch_add(1, SeqCst);
    next.run(request).await
}

#[tokio::test]
async fn rule_21_for_axum_stands_between_two_functions() {
    let (outside, inside) = (Arc::new(AtomicUsize::new(0)), Arc::new(AtomicUsize::new(0)));
    let layer = required(memory()).build().unwrap();
    let layers = ServiceBuilder::new()
        .layer(from_fn_with_state(Arc::clone(&outside), count))
        .layer(layer.for_axum())
        .layer(from_fn_with_state(Arc::clone(&inside), count));
    let handler = async |body: String| (StatusCode::CREATED, body);
    let app: Router = Router::new()
        .route("/count", axum::routing::any(handler))
        .layer(layers);
    let server = serve(app).await;
    let mut wire = Wire::open(&server).await;
    for is_replay in [false, true, true] {
        let lines = "Idempotency-Key: K\r\n";
        let answer = wire.ask(post("/count", lines, "{\"amount\":1}")).await;
        assert_eq!((answer.status, answer.is_replay()), (201, is_replay));
        assert_eq!(answer.body, b"{\"amount\":1}");
    }
    let put = post("/count", "", "unguarded").replace("POST", "PUT");
    assert_eq!(wire.ask(put).await.body, b"unguarded");
    assert_eq!((outside.load(SeqCst), inside.load(SeqCst)), (4, 2));
}

#[tokio::test]
async fn rule_20_for_axum_converts_bodies_of_other_layers() {
    let probe = Probe::running(|run| async move {
        let mut response = run.created();
        let body = bytes_of(run.request.into_body()).await;
        let body = str::from_utf8(&body).unwrap().to_owned().leak();
        let sum = HeaderValue::from_static("5d41");
        let trailers = HeaderMap::from_iter([("x-sum".parse().unwrap(), sum)]);
        *response.body_mut() = chunks_and_trailers(&[body], trailers);
        Ok(response)
    });
    let layer = required(memory()).build().unwrap();
    let service = ServiceBuilder::new()
        .layer(RequestBodyLimitLayer::new(100))
        .layer(layer.for_axum())
        .layer(TraceLayer::new_for_http())
        .service(probe.clone());
    let first = send(service.clone(), keyed("K")).await;
    first.assert_run(1);
    assert_eq!(first.body, "{\"amount\":1}");
    assert_eq!(first.trailers.as_ref().unwrap()["x-sum"], "5d41");
    send(service.clone(), keyed("K"))
        .await
        .assert_replay_of(&first);
    let large = keyed("L").body("x".repeat(101));
    send(service.clone(), large)
        .await
        .assert_problem(413, "body-too-large");
    let put = keyed("K").method(Method::PUT).body("streamed");
    assert_eq!(send(service, put).await.body, "streamed");
    assert_eq!(probe.runs(), 2);
}
