//! When a call is sent again. The clock is paused: a pause takes no time.

use std::{sync::Arc, time::Duration};

use bytes::Bytes;
use futures_util::future::join_all;
use http::{HeaderName, Request};
use http_body_util::Full;
use tokio::time::Instant;
use tower::{
    ServiceBuilder,
    retry::{RetryLayer, budget::TpsBudget},
};
use tower_idempotency::client::{KeyLayer, KeyedRetry};

use crate::service::{Failure, Script, Step, Streamed, post, status};

/// Sends a POST with a key. Returns its result and the number of requests.
async fn keyed(retry: KeyedRetry<Failure>, script: &Script) -> (Result<u16, Failure>, usize) {
    let client = ServiceBuilder::new()
        .layer(KeyLayer::uuid_v7())
        .layer(RetryLayer::new(retry))
        .service(script.clone());
    let answered = status(client, post()).await;
    let mut keys = script.keys();
    let requests = keys.len();
    keys.dedup();
    assert_eq!(keys.len(), 1, "one key for all attempts");
    (answered, requests)
}

/// Sends a request without a key.
async fn unkeyed(
    retry: KeyedRetry<Failure>,
    script: &Script,
    request: Request<Full<Bytes>>,
) -> (Result<u16, Failure>, usize) {
    let client = ServiceBuilder::new()
        .layer(RetryLayer::new(retry))
        .service(script.clone());
    let answered = status(client, request).await;
    (answered, script.seen().len())
}

#[tokio::test(start_paused = true)]
async fn failures_that_may_pass_are_retried_under_one_key() {
    let script = Script::new(&[
        Err(Failure::Broken),
        Ok((503, &[])),
        Ok((409, &[("retry-after", "1")])),
        Ok((200, &[])),
    ]);
    let begun = Instant::now();
    let answered = keyed(KeyedRetry::new().attempts(5), &script).await;
    assert_eq!(answered, (Ok(200), 4));
    assert!(begun.elapsed() >= Duration::from_secs(1));
}

#[tokio::test(start_paused = true)]
async fn each_status_is_retried_or_final_as_documented() {
    let cases: [(u16, Step, usize); 14] = [
        (200, Ok((200, &[])), 1),
        (307, Ok((307, &[])), 1),
        (400, Ok((400, &[("retry-after", "1")])), 1),
        (408, Ok((408, &[])), 3),
        (409, Ok((409, &[])), 1),
        (409, Ok((409, &[("retry-after", "1")])), 3),
        (422, Ok((422, &[])), 1),
        (425, Ok((425, &[])), 3),
        (429, Ok((429, &[("retry-after", "2")])), 3),
        (500, Ok((500, &[])), 3),
        (503, Ok((503, &[("retry-after", "soon")])), 3),
        (500, Ok((500, &[("idempotent-replayed", "true")])), 1),
        (
            503,
            Ok((
                503,
                &[("idempotent-replayed", "true"), ("retry-after", "1")],
            )),
            1,
        ),
        (504, Ok((504, &[])), 3),
    ];
    for (expected, step, requests) in cases {
        let answered = keyed(KeyedRetry::new(), &Script::new(&[step])).await;
        assert_eq!(answered, (Ok(expected), requests), "{step:?}");
    }
}

#[tokio::test(start_paused = true)]
async fn replay_marker_of_the_service_makes_a_response_final() {
    let marker = HeaderName::from_static("x-replayed");
    let retry = || KeyedRetry::new().replay_marker(marker.clone());
    let renamed = Script::new(&[Ok((500, &[("x-replayed", "true")]))]);
    assert_eq!(keyed(retry(), &renamed).await, (Ok(500), 1));
    let usual = Script::new(&[Ok((500, &[("idempotent-replayed", "true")]))]);
    assert_eq!(keyed(retry(), &usual).await, (Ok(500), 3));
}

#[tokio::test(start_paused = true)]
async fn the_last_failure_is_returned_as_it_came() {
    let script = Script::new(&[Ok((503, &[])), Err(Failure::Broken)]);
    let answered = keyed(KeyedRetry::new().attempts(4), &script).await;
    assert_eq!(answered, (Err(Failure::Broken), 4));
    for attempts in [0, 1] {
        let script = Script::new(&[Ok((503, &[]))]);
        let answered = keyed(KeyedRetry::new().attempts(attempts), &script).await;
        assert_eq!(answered, (Ok(503), 1));
    }
}

#[tokio::test(start_paused = true)]
async fn a_post_without_a_key_is_retried_only_unsent() {
    for step in [
        Ok((503, &[][..])),
        Err(Failure::Broken),
        Err(Failure::Refused),
    ] {
        let answered = unkeyed(KeyedRetry::new(), &Script::new(&[step]), post()).await;
        assert_eq!(answered.1, 1, "{step:?}");
    }
    let refused = || KeyedRetry::new().unsent(|error| *error == Failure::Refused);
    for (failure, requests) in [(Failure::Refused, 3), (Failure::Broken, 1)] {
        let answered = unkeyed(refused(), &Script::new(&[Err(failure)]), post()).await;
        assert_eq!(answered, (Err(failure), requests));
    }
}

#[tokio::test(start_paused = true)]
async fn idempotent_methods_are_retried_without_a_key() {
    for method in ["GET", "PUT", "DELETE"] {
        for step in [Ok((503, &[][..])), Err(Failure::Broken)] {
            let request = Request::builder().method(method);
            let request = request.body(Full::default()).unwrap();
            let answered = unkeyed(KeyedRetry::new(), &Script::new(&[step]), request).await;
            assert_eq!(answered.1, 3, "{method} {step:?}");
        }
    }
}

#[tokio::test(start_paused = true)]
async fn other_methods_are_not_retried_without_a_key() {
    for method in ["POST", "PATCH", "CONNECT", "LOCK", "CHARGE"] {
        for step in [Ok((503, &[][..])), Err(Failure::Broken)] {
            let request = Request::builder().method(method);
            let request = request.body(Full::default()).unwrap();
            let answered = unkeyed(KeyedRetry::new(), &Script::new(&[step]), request).await;
            assert_eq!(answered.1, 1, "{method} {step:?}");
        }
    }
}

#[tokio::test(start_paused = true)]
async fn a_longer_retry_after_than_the_cap_is_returned_at_once() {
    for after in [
        "86400",
        "99999999999999999999999",
        "Thu, 06 Nov 2994 08:49:37 GMT",
    ] {
        let headers: &'static [(&str, &str)] = Box::leak(Box::new([("retry-after", after)]));
        let begun = Instant::now();
        let answered = keyed(KeyedRetry::new(), &Script::new(&[Ok((503, headers))])).await;
        assert_eq!((answered, begun.elapsed()), ((Ok(503), 1), Duration::ZERO));
    }
}

#[tokio::test(start_paused = true)]
async fn a_date_of_retry_after_counts_from_the_services_own_date() {
    let script = Script::new(&[
        Ok((
            503,
            &[
                ("date", "Sun, 06 Nov 1994 08:49:37 GMT"),
                ("retry-after", "Sun, 06 Nov 1994 08:49:57 GMT"),
            ],
        )),
        Ok((200, &[])),
    ]);
    let begun = Instant::now();
    let answered = keyed(KeyedRetry::new(), &script).await;
    assert_eq!(answered, (Ok(200), 2));
    assert_eq!(begun.elapsed().as_secs(), 20);
}

#[tokio::test(start_paused = true)]
async fn a_streamed_body_is_sent_once() {
    let script = Script::new(&[Ok((503, &[]))]);
    let client = ServiceBuilder::new()
        .layer(KeyLayer::uuid_v7())
        .layer(RetryLayer::new(KeyedRetry::<Failure>::new()))
        .service(script.clone());
    let request = Request::post("/").body(Streamed).unwrap();
    assert_eq!(status(client, request).await, Ok(503));
    assert_eq!(script.seen().len(), 1);
}

#[tokio::test(start_paused = true)]
async fn calls_to_a_service_that_is_down_stay_within_the_budget() {
    let script = Script::new(&[Ok((503, &[]))]);
    // 100 retries in ten seconds; no call succeeds and adds to them.
    let budget = Arc::new(TpsBudget::new(Duration::from_secs(10), 10, 0.0));
    let retry = KeyedRetry::new().attempts(5).budget(budget);
    let calls = (0..1_000).map(|_| {
        let client = ServiceBuilder::new()
            .layer(KeyLayer::uuid_v7())
            .layer(RetryLayer::new(retry.clone()))
            .service(script.clone());
        status(client, post())
    });
    let answers = join_all(calls).await;
    assert!(answers.iter().all(|answer| *answer == Ok(503)));
    let requests = script.seen().len();
    assert!((1_001..=1_100).contains(&requests), "{requests}");
}
