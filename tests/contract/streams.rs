//! Rule 69: responses that are streamed, because they are too large, too slow or
//! endless.

use std::time::Duration;

use axum::body::Body;
use bytes::Bytes;
use http::{HeaderMap, HeaderValue, Response, StatusCode, header};
use http_body::Frame;
use http_body_util::BodyExt as _;
use tower_idempotency::{Dispositions, Outcome};

use crate::{
    api::{Answer, Api, eventually, keyed, required, settle},
    client::{Http2, Wire, keyed_post},
    probe::{Frames, Gate, Probe, data, streamed},
    stores::{Place, memory, on_each_store},
};

on_each_store! {
    rule_69_an_oversized_response_is_streamed_and_leaves_a_tombstone
}

/// A handler whose body the test sends, frame by frame.
fn live(
    gate: &Gate,
    content_type: &'static str,
) -> (Probe, std::sync::Arc<std::sync::Mutex<Option<Frames>>>) {
    let frames = std::sync::Arc::new(std::sync::Mutex::new(None));
    let (slot, gate) = (frames.clone(), gate.clone());
    let probe = Probe::running(move |run| {
        let (slot, gate) = (slot.clone(), gate.clone());
        async move {
            let (frames, body) = streamed();
            *slot.lock().unwrap() = Some(frames);
            gate.pass().await;
            let mut response = run.created();
            let content_type = HeaderValue::from_static(content_type);
            response
                .headers_mut()
                .insert(header::CONTENT_TYPE, content_type);
            *response.body_mut() = body;
            Ok(response)
        }
    });
    (probe, frames)
}

async fn rule_69_an_oversized_response_is_streamed_and_leaves_a_tombstone(place: &Place) {
    let gate = Gate::closed();
    gate.open();
    let (probe, frames) = live(&gate, "text/plain");
    let api = Api::new(required(place.open().await).max_response_body(10), &probe);
    let asked = {
        let api = api.clone();
        tokio::spawn(async move { api.respond(keyed("K").0).await.unwrap() })
    };
    gate.arrival().await;
    let frames = frames.lock().unwrap().take().unwrap();
    frames.send(Ok(data("0123456"))).unwrap();
    frames.send(Ok(data("789abc"))).unwrap();
    // The body is known to be too large, so that it is sent before its end.
    let response = asked.await.unwrap();
    assert_eq!(response.extensions().get(), Some(&Outcome::Streamed));
    assert_eq!(response.status(), StatusCode::CREATED);
    let mut body = response.into_body();
    let read = body.frame().await.unwrap().unwrap().into_data().unwrap();
    assert_eq!(read, "0123456789abc");
    api.send(keyed("K"))
        .await
        .assert_problem(409, "request-in-progress");
    frames.send(Ok(data("and more"))).unwrap();
    let read = body.frame().await.unwrap().unwrap().into_data().unwrap();
    assert_eq!(read, "and more");
    api.send(keyed("K"))
        .await
        .assert_problem(409, "request-in-progress");
    let mut trailers = HeaderMap::new();
    trailers.insert("x-sum", HeaderValue::from_static("1"));
    frames.send(Ok(Frame::trailers(trailers))).unwrap();
    drop(frames);
    assert!(body.frame().await.unwrap().unwrap().is_trailers());
    assert!(body.frame().await.is_none());
    let after = eventually(async || {
        let answer = api.send(keyed("K")).await;
        (answer.retry_after().is_none()).then_some(answer)
    })
    .await;
    after.assert_problem(409, "response-not-replayable");
    api.send(keyed("K").body("{}"))
        .await
        .assert_problem(422, "key-reused");
    assert_eq!(probe.runs(), 1);
}

/// The known size of a body before its end.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Size {
    /// Reported by the body itself.
    Known,
    /// Reported by `Content-Length` alone, where a server stops reading.
    Declared,
    Unknown,
}

#[tokio::test]
async fn rule_69_a_large_response_reaches_the_client_whole_over_every_version() {
    // Sizes known and unknown, at the limit and above it.
    for (length, size) in [
        (100, Size::Known),
        (100, Size::Declared),
        (101, Size::Known),
        (101, Size::Declared),
        (101, Size::Unknown),
        (1 << 20, Size::Known),
        (1 << 20, Size::Declared),
        (1 << 20, Size::Unknown),
    ] {
        let probe = Probe::answering(move |run| {
            let mut response = run.created();
            let bytes = Bytes::from(vec![b'x'; length]);
            if size == Size::Declared {
                let declared = HeaderValue::from(length);
                response
                    .headers_mut()
                    .insert(header::CONTENT_LENGTH, declared);
            }
            *response.body_mut() = if size == Size::Known {
                bytes.into()
            } else {
                let (frames, body) = streamed();
                for chunk in bytes.chunks(7_000) {
                    frames
                        .send(Ok(Frame::data(bytes.slice_ref(chunk))))
                        .unwrap();
                }
                body
            };
            response
        });
        let api = Api::new(required(memory()).max_response_body(100), &probe);
        let server = api.serve().await;
        let mut wire = Wire::open(&server).await;
        assert_eq!(wire.ask(keyed_post("K")).await.body.len(), length);
        let mut http2 = Http2::open(&server).await;
        assert_eq!(http2.ask(keyed("L").0).await.body.len(), length);
        for key in ["K", "L"] {
            let retry = eventually(async || {
                let answer = api.send(keyed(key)).await;
                answer.retry_after().is_none().then_some(answer)
            })
            .await;
            if length == 100 {
                assert!(retry.is_replay());
            } else {
                retry.assert_problem(409, "response-not-replayable");
            }
        }
        // The connection still serves.
        assert_eq!(wire.ask(keyed_post("M")).await.body.len(), length);
        assert_eq!(probe.runs(), 3);
    }
}

#[tokio::test(start_paused = true)]
async fn rule_69_a_slow_response_is_streamed_after_its_timeout() {
    let gate = Gate::closed();
    gate.open();
    let (probe, frames) = live(&gate, "text/plain");
    let api = Api::new(required(memory()), &probe);
    let asked = {
        let api = api.clone();
        tokio::spawn(async move { api.respond(keyed("K").0).await.unwrap() })
    };
    gate.arrival().await;
    let frames = frames.lock().unwrap().take().unwrap();
    frames.send(Ok(data("slow"))).unwrap();
    let start = tokio::time::Instant::now();
    let response = asked.await.unwrap();
    assert!(start.elapsed() >= Duration::from_secs(5));
    let mut body = response.into_body();
    assert_eq!(
        body.frame().await.unwrap().unwrap().into_data().unwrap(),
        "slow"
    );
    // The stream lasts longer than a lease.
    tokio::time::sleep(Duration::from_secs(120)).await;
    api.send(keyed("K"))
        .await
        .assert_problem(409, "request-in-progress");
    drop(frames);
    assert!(body.frame().await.is_none());
    settle().await;
    api.send(keyed("K"))
        .await
        .assert_problem(409, "response-not-replayable");
    assert_eq!(probe.runs(), 1);
}

#[tokio::test]
async fn rule_69_event_streams_and_streamed_types_are_sent_at_once() {
    for content_type in [
        "text/event-stream",
        "Text/Event-Stream; charset=utf-8",
        "application/x-live",
    ] {
        let gate = Gate::closed();
        gate.open();
        let (probe, frames) = live(&gate, content_type);
        let builder =
            required(memory()).streamed_types([HeaderValue::from_static("application/x-live")]);
        let api = Api::new(builder, &probe);
        // The answer arrives before any frame of the body.
        let response = api.respond(keyed("K").0).await.unwrap();
        assert_eq!(response.extensions().get(), Some(&Outcome::Streamed));
        let frames = frames.lock().unwrap().take().unwrap();
        frames.send(Ok(data("one"))).unwrap();
        drop(frames);
        assert_eq!(Answer::of(response).await.body, "one");
        settle().await;
        api.send(keyed("K"))
            .await
            .assert_problem(409, "response-not-replayable");
        assert_eq!(probe.runs(), 1);
    }
}

#[tokio::test]
async fn rule_69_a_broken_or_abandoned_stream_leaves_an_unknown_outcome() {
    for breaks in [true, false] {
        let gate = Gate::closed();
        gate.open();
        let (probe, frames) = live(&gate, "text/event-stream");
        let api = Api::new(required(memory()), &probe);
        let response = api.respond(keyed("K").0).await.unwrap();
        let frames = frames.lock().unwrap().take().unwrap();
        frames.send(Ok(data("one"))).unwrap();
        if breaks {
            let broken = Err(crate::probe::Failure("it broke"));
            frames.send(broken).unwrap();
            let error = response.into_body().collect().await.unwrap_err();
            assert_eq!(error.to_string(), "it broke");
        } else {
            drop(response);
            assert!(
                frames.send(Ok(data("two"))).is_err(),
                "the body was dropped"
            );
        }
        settle().await;
        api.send(keyed("K"))
            .await
            .assert_problem(409, "outcome-unknown");
        assert_eq!(probe.runs(), 1);
    }
}

#[tokio::test]
async fn rule_69_an_upgrade_is_not_recorded() {
    let probe = Probe::answering(|_| {
        Response::builder()
            .status(101)
            .header("upgrade", "x")
            .body(Body::empty())
            .unwrap()
    });
    let api = Api::new(
        required(memory()).dispositions(Dispositions::everything()),
        &probe,
    );
    let response = api.respond(keyed("K").0).await.unwrap();
    assert_eq!(response.status(), StatusCode::SWITCHING_PROTOCOLS);
    assert_eq!(response.extensions().get(), Some(&Outcome::Streamed));
    drop(response);
    settle().await;
    // Never a replay: an interim status would break the connection.
    let retry = api.send(keyed("K")).await;
    assert_eq!(retry.status, StatusCode::CONFLICT);
    assert_eq!(probe.runs(), 1);
}
