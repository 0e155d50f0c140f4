//! Rules 46 to 48 and 61: clients that leave, and requests that are too slow or
//! too large.

use std::time::Duration;

use axum::{Router, body::Body};
use http::{Request, StatusCode};
use tower::ServiceExt as _;
use tower_http::timeout::TimeoutLayer;
use tower_idempotency::{DynStore, MemoryStore};

use crate::{
    api::{Api, eventually, keyed, optional, required, send, settle},
    client::{Http2, Wire, keyed_post},
    faulty::Faulty,
    probe::{Failure, Gate, Probe, breaking_after, data, streamed},
    stores::{Place, memory, on_each_store},
};

on_each_store! {
    rule_46_the_client_closes_the_connection_and_the_handler_finishes
    rule_46_the_client_closes_its_half_and_the_handler_finishes
    rule_46_the_client_resets_the_stream_and_the_handler_finishes
}

async fn rule_46_the_client_closes_the_connection_and_the_handler_finishes(place: &Place) {
    left_mid_handler(place, Leaving::Closes).await;
}

async fn rule_46_the_client_closes_its_half_and_the_handler_finishes(place: &Place) {
    left_mid_handler(place, Leaving::ClosesItsHalf).await;
}

async fn rule_46_the_client_resets_the_stream_and_the_handler_finishes(place: &Place) {
    left_mid_handler(place, Leaving::ResetsTheStream).await;
}

enum Leaving {
    Closes,
    ClosesItsHalf,
    ResetsTheStream,
}

async fn left_mid_handler(place: &Place, leaving: Leaving) {
    let gate = Gate::closed();
    let probe = Probe::behind(&gate);
    let api = Api::new(required(place.open().await), &probe);
    let server = api.serve().await;
    let mut wire = Wire::open(&server).await;
    let request = keyed_post("K");
    match leaving {
        Leaving::Closes => {
            wire.write(request).await;
            gate.arrival().await;
            drop(wire);
        }
        Leaving::ClosesItsHalf => {
            wire.write(request).await;
            gate.arrival().await;
            wire.half_close().await;
        }
        Leaving::ResetsTheStream => {
            let mut http2 = Http2::open(&server).await;
            let asked = tokio::spawn(async move { http2.ask(keyed("K").0).await });
            gate.arrival().await;
            asked.abort();
        }
    }
    // The server has dropped the request's future; the handler still runs.
    server.abandonment().await;
    api.send(keyed("K"))
        .await
        .assert_problem(409, "request-in-progress");
    gate.open();
    let replay = eventually(async || {
        let answer = api.send(keyed("K")).await;
        answer.is_replay().then_some(answer)
    })
    .await;
    assert_eq!(
        (replay.status.as_u16(), &*replay.body),
        (201, &b"{\"n\":1}"[..])
    );
    assert_eq!(probe.runs(), 1);
}

#[tokio::test]
async fn rule_47_a_client_that_leaves_during_its_upload_leaves_nothing_behind() {
    let (store, probe) = (Faulty::new(MemoryStore::new()), Probe::counting());
    let api = Api::new(required(DynStore::new(store.clone())), &probe);
    let server = api.serve().await;

    // The server drops the request before or after the end of its body; neither
    // may lead to a run.
    let mut wire = Wire::open(&server).await;
    let all = keyed_post("K");
    wire.write(&all[..all.len() - 5]).await;
    server.start_of_a_request().await;
    drop(wire);
    server.end_of_a_request().await;

    let mut wire = Wire::open(&server).await;
    let head = "POST /count HTTP/1.1\r\nHost: test\r\nX-Account: acme-7\r\nTransfer-Encoding: chunked\r\nIdempotency-Key: K\r\n\r\n5\r\n{\"amo\r\n";
    wire.write(head).await;
    server.start_of_a_request().await;
    drop(wire);
    server.end_of_a_request().await;

    let (frames, body) = streamed();
    frames.send(Ok(data("{\"amo"))).unwrap();
    let mut http2 = Http2::open(&server).await;
    let asked = tokio::spawn(async move { http2.respond(keyed("K").body(body).0).await.status() });
    server.start_of_a_request().await;
    frames.send(Err(Failure("the client is gone"))).unwrap();
    server.end_of_a_request().await;
    asked.abort();

    // The same without a socket: the request is dropped while it reads the body.
    let (frames, body) = streamed();
    frames.send(Ok(data("{\"amo"))).unwrap();
    let asked = api.spawn(keyed("K").body(body));
    settle().await;
    asked.abort();
    assert!(asked.await.unwrap_err().is_cancelled());
    assert!(
        frames.send(Ok(data("unt\":1}"))).is_err(),
        "the body was dropped"
    );

    settle().await;
    assert_eq!((probe.runs(), store.calls()), (0, vec![]));
    // The key is free for any request.
    api.send(keyed("K").body("another")).await.assert_run(1);
}

#[tokio::test]
async fn rule_47_a_body_that_breaks_off_is_refused_before_any_claim() {
    let (store, probe) = (Faulty::new(MemoryStore::new()), Probe::counting());
    let api = Api::new(required(DynStore::new(store.clone())), &probe);
    let broken = keyed("K").body(breaking_after(&["{\"amo"]));
    api.send(broken).await.assert_problem(400, "body-invalid");
    assert_eq!((probe.runs(), store.calls()), (0, vec![]));
}

#[tokio::test(start_paused = true)]
async fn rule_47_a_slow_upload_is_refused_before_any_claim() {
    let (store, probe) = (Faulty::new(MemoryStore::new()), Probe::counting());
    let api = Api::new(required(DynStore::new(store.clone())), &probe);
    let (frames, body) = streamed();
    frames.send(Ok(data("{\"amo"))).unwrap();
    let start = tokio::time::Instant::now();
    let late = api.send(keyed("K").body(body)).await;
    late.assert_problem(408, "body-timeout");
    assert_eq!(late.retry_after(), Some(1));
    assert!(start.elapsed() >= Duration::from_secs(10));
    assert_eq!((probe.runs(), store.calls()), (0, vec![]));
}

#[tokio::test(start_paused = true)]
async fn rule_48_an_outer_timeout_leaves_the_real_result_recorded() {
    let gate = Gate::closed();
    let probe = Probe::behind(&gate);
    let layer = required(memory()).build().unwrap();
    let app =
        Router::new()
            .fallback_service(tower::service_fn({
                let probe = probe.clone();
                move |request: Request<Body>| {
                    let probe = probe.clone();
                    async move {
                        Ok::<_, std::convert::Infallible>(probe.oneshot(request).await.unwrap())
                    }
                }
            }))
            .layer(layer)
            .layer(TimeoutLayer::with_status_code(
                StatusCode::GATEWAY_TIMEOUT,
                Duration::from_secs(2),
            ));
    let timed_out = send(app.clone(), keyed("K")).await;
    assert_eq!(timed_out.status, StatusCode::GATEWAY_TIMEOUT);
    let waiting = send(app.clone(), keyed("K")).await;
    waiting.assert_problem(409, "request-in-progress");
    gate.open();
    settle().await;
    let replay = send(app.clone(), keyed("K")).await;
    assert!(replay.is_replay());
    assert_eq!(
        (replay.status.as_u16(), replay.header("x-run")),
        (201, Some("1"))
    );
    assert_eq!(probe.runs(), 1);
}

#[tokio::test]
async fn rule_61_a_body_over_the_limit_is_refused_without_claim() {
    let (store, probe) = (Faulty::new(MemoryStore::new()), Probe::counting());
    let builder = required(DynStore::new(store.clone())).max_request_body(1_000);
    let api = Api::new(builder, &probe);
    // Its `Content-Length` exceeds the limit.
    let told = keyed("K").body("x".repeat(1_001));
    let told = api.send(told).await;
    told.assert_problem(413, "body-too-large");
    assert!(told.problem()["detail"].as_str().unwrap().contains("1000"));
    // Its size shows only as it arrives.
    let (frames, body) = streamed();
    let asked = api.spawn(keyed("K").body(body));
    let chunk = || Ok(http_body::Frame::data(vec![b'x'; 400].into()));
    for _ in 0..3 {
        frames.send(chunk()).unwrap();
    }
    asked.await.unwrap().assert_problem(413, "body-too-large");
    assert_eq!((probe.runs(), store.calls()), (0, vec![]));
    // A body of exactly the limit passes, and the key is free for it.
    api.send(keyed("K").body("x".repeat(1_000)))
        .await
        .assert_run(1);
}

#[tokio::test]
async fn rule_61_the_limit_covers_every_framing_of_keyed_requests() {
    let probe = Probe::counting();
    let api = Api::new(optional(memory()).max_request_body(4), &probe);
    let server = api.serve().await;
    let head = "POST /count HTTP/1.1\r\nHost: test\r\nX-Account: acme-7\r\n";
    for framing in [
        "Content-Length: 5\r\n\r\n12345",
        "Transfer-Encoding: chunked\r\n\r\n3\r\n123\r\n2\r\n45\r\n0\r\n\r\n",
    ] {
        let mut wire = Wire::open(&server).await;
        let answer = wire
            .ask(format!("{head}Idempotency-Key: K\r\n{framing}"))
            .await;
        assert_eq!((answer.status, &*answer.problem()), (413, "body-too-large"));
        assert_eq!(
            Wire::open(&server)
                .await
                .ask(format!("{head}{framing}"))
                .await
                .status,
            201
        );
    }
    assert_eq!(probe.runs(), 2);
    let answer = Http2::open(&server)
        .await
        .ask(keyed("K").body("12345").0)
        .await;
    answer.assert_problem(413, "body-too-large");
}

#[tokio::test]
async fn rule_61_the_limit_is_a_mebibyte_by_default() {
    let probe = Probe::counting();
    let api = Api::new(required(memory()), &probe);
    let over = keyed("K").body(vec![b'x'; (1 << 20) + 1]);
    api.send(over).await.assert_problem(413, "body-too-large");
    let first = api.send(keyed("K").body(vec![b'x'; 1 << 20])).await;
    first.assert_run(1);
    let again = api.send(keyed("K").body(vec![b'x'; 1 << 20])).await;
    again.assert_replay_of(&first);
}
