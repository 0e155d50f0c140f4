//! What the order of layers decides.

use http::StatusCode;
use tower::{Layer as _, ServiceBuilder};
use tower_http::catch_panic::CatchPanicLayer;

use crate::{
    api::{keyed, required, send},
    probe::Probe,
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
