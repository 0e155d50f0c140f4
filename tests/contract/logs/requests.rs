//! Requests that are refused.

use std::time::Duration;

use axum::{Router, routing::post};
use futures_util::future::join_all;
use http::header;
use tower::ServiceExt as _;
use tower_idempotency::{Fingerprinting, Operation, Quota};

use super::{Log, Says, answering, secret};
use crate::{
    api::{Api, required, settle},
    probe::{Gate, Probe, data, streamed},
    stores::memory,
};

#[tokio::test(start_paused = true)]
async fn f110_an_unknown_caller_is_logged_with_its_remedy() {
    let log = Log::listen();
    let api = Api::new(required(memory()), &Probe::counting());
    api.send(secret("K").without("x-account"))
        .await
        .assert_problem(403, "caller-unknown");
    log.only("scope function returned None")
        .says("message", "authentication must stand outside");
}

#[tokio::test(start_paused = true)]
async fn f110_overload_names_the_setting() {
    let log = Log::listen();
    let gate = Gate::closed();
    let api = Api::new(required(memory()).max_in_flight(1), &Probe::behind(&gate));
    let running = api.spawn(secret("K"));
    gate.arrival().await;
    api.send(secret("L"))
        .await
        .assert_problem(503, "overloaded");
    log.only("`max_in_flight`").says(
        "message",
        "up to 1 requests are allowed, and with this one it would be 2",
    );
    gate.open();
    running.await.unwrap();

    let builder = required(memory())
        .max_request_body(100)
        .max_buffered_bytes(100);
    let api = Api::new(builder, &Probe::counting());
    let (frames, body) = streamed();
    frames
        .send(Ok(data("s3cr3t-b0dy".repeat(8).leak())))
        .unwrap();
    let uploading = api.spawn(secret("K").body(body));
    settle().await;
    api.send(secret("L").body("s3cr3t-b0dy".repeat(8)))
        .await
        .assert_problem(503, "overloaded");
    log.only("`max_buffered_bytes`").says(
        "message",
        "up to 100 bytes are allowed, and with this part of a body it would be 176",
    );
    drop(frames);
    uploading.await.unwrap();
}

#[tokio::test(start_paused = true)]
async fn f110_an_overload_of_one_scope_is_logged_with_its_numbers() {
    let log = Log::listen();
    let gate = Gate::closed();
    let builder = required(memory())
        .max_in_flight(4)
        .max_in_flight_per_scope(1);
    let api = Api::new(builder, &Probe::behind(&gate));
    let running = ["K", "L", "M"].map(|key| api.spawn(secret(key)));
    settle().await;
    let refused = api.send(secret("N")).await;
    refused.assert_problem(429, "scope-overloaded");
    log.only("`max_in_flight_per_scope`").says(
        "message",
        "up to 1 requests of a scope beyond half of `max_in_flight` are allowed, and with this one \
         it would be 2",
    );
    gate.open();
    join_all(running).await;

    let builder = required(memory())
        .max_request_body(100)
        .max_buffered_bytes(200)
        .max_buffered_bytes_per_scope(100);
    let api = Api::new(builder, &Probe::counting());
    let uploads = ["K", "L"].map(|key| {
        let (frames, body) = streamed();
        frames
            .send(Ok(data("s3cr3t-b0dy".repeat(8).leak())))
            .unwrap();
        (frames, api.spawn(secret(key).body(body)))
    });
    settle().await;
    let refused = api.send(secret("M").body("s3cr3t-b0dy".repeat(2))).await;
    refused.assert_problem(429, "scope-overloaded");
    log.only("`max_buffered_bytes_per_scope`").says(
        "message",
        "up to 100 bytes of a scope beyond half of `max_buffered_bytes` are allowed, and with this \
         part of a body it would be 110",
    );
    for (frames, upload) in uploads {
        drop(frames);
        upload.await.unwrap();
    }
}

#[tokio::test(start_paused = true)]
async fn f110_a_used_up_quota_is_logged_with_its_numbers() {
    for (quota, numbers) in [
        (
            Quota::unlimited().max_records(2),
            "up to 2 records are allowed, and with the new record it would be 3",
        ),
        (
            Quota::unlimited().max_bytes(700),
            "up to 700 bytes are allowed, and with the new record it would be 1029",
        ),
    ] {
        let log = Log::listen();
        let api = Api::new(required(memory()).quota(quota), &answering());
        for key in ["K", "L"] {
            api.send(secret(key)).await.assert_live(201);
        }
        let refused = api.send(secret("M")).await;
        refused.assert_problem(429, "quota-exceeded");
        log.only("used up its `quota`")
            .says("message", "raise the quota, or shorten `retention`")
            .says("message", numbers);
    }
}

#[tokio::test(start_paused = true)]
async fn f110_an_unknown_fingerprint_names_the_setting() {
    let log = Log::listen();
    let store = memory();
    let earlier = Fingerprinting::bytes().header(header::CONTENT_LANGUAGE);
    let before = required(store.clone()).fingerprint(earlier);
    Api::new(before, &answering()).send(secret("K")).await;
    let api = Api::new(required(store), &Probe::counting());
    api.send(secret("K"))
        .await
        .assert_problem(503, "store-unavailable");
    log.only("`earlier_fingerprint`");
}

#[tokio::test(start_paused = true)]
async fn f110_draining_is_logged() {
    let log = Log::listen();
    let api = Api::new(required(memory()), &Probe::counting());
    let _ = api.layer.drain(Duration::from_secs(1)).await;
    api.send(secret("K")).await.assert_problem(503, "draining");
    log.only("`drain` was called");
}

#[tokio::test]
async fn f110_an_operation_without_a_layer_is_logged() {
    let log = Log::listen();
    let app: Router = Router::new().route("/count", post(async |_: Operation| "ran"));
    let response = app.oneshot(secret("K").0).await.unwrap();
    assert_eq!(response.status(), 500);
    log.only("`Operation` not extracted")
        .says("message", "`Option<Operation>`");
}
