//! Rule 39: bodies that have a `Content-Digest`, and uploads that stream by it.

use std::{
    convert::Infallible,
    future::pending,
    pin::Pin,
    sync::{
        Arc, Mutex,
        atomic::{AtomicUsize, Ordering},
    },
    task::{Context, Poll},
    time::Duration,
};

use axum::body::Body;
use base64::{Engine as _, engine::general_purpose::STANDARD};
use bytes::Bytes;
use futures_util::{StreamExt as _, stream};
use http::{HeaderMap, HeaderValue, Response};
use http_body::{Body as HttpBody, Frame};
use http_body_util::BodyExt as _;
use sha2::{Digest as _, Sha256, Sha512};
use tokio::time::{Instant, sleep, timeout};
use tower_idempotency::{
    ContentDigest, DynStore, Fingerprinting, IdempotencyBuilder, MemoryStore, Release, SqliteStore,
    Store, store::RecordState,
};

use crate::{
    api::{Api, Ask, eventually, keyed, record, required, settle},
    client::{Http2, Wire},
    probe::{Failure, Frames, Probe, Run, streamed},
    stores::{Place, check, memory, on_each_store},
    told::Told,
};

on_each_store! {
    rule_39_a_wrong_digest_uses_no_key
    rule_39_an_upload_streams_and_its_retry_replays
    rule_39_a_wrong_upload_is_released_for_the_same_request
    rule_39_a_success_without_the_declared_body_is_unknown
}

const LIMIT: usize = 1 << 10;
const MAX_UPLOAD: u64 = 1 << 20;

pub(crate) fn sha256(body: &[u8]) -> String {
    format!("sha-256=:{}:", STANDARD.encode(Sha256::digest(body)))
}

fn verifying<S: Store>(store: S) -> IdempotencyBuilder<S> {
    let verify = ContentDigest::Verify;
    required(store)
        .max_request_body(LIMIT)
        .content_digest(verify)
}

fn streaming<S: Store>(store: S) -> IdempotencyBuilder<S> {
    let stream = ContentDigest::Stream {
        max_upload: MAX_UPLOAD,
    };
    required(store)
        .max_request_body(LIMIT)
        .content_digest(stream)
}

/// A request with this body in frames of 700 bytes, and this digest.
fn upload(body: &[u8], digest: &str) -> Ask {
    let (frames, streamed) = streamed();
    for frame in body.chunks(700) {
        send(&frames, frame);
    }
    keyed("K").header("content-digest", digest).body(streamed)
}

fn send(frames: &Frames, bytes: &[u8]) {
    let frame = Frame::data(Bytes::copy_from_slice(bytes));
    frames.send(Ok(frame)).unwrap();
}

fn large() -> Vec<u8> {
    (0..5_000_u32).map(|number| number as u8).collect()
}

/// Reads its body, and answers 201 with its length, or with this status if it broke.
fn reading(broken: u16) -> Probe {
    Probe::running(move |mut run: Run| async move {
        let body = std::mem::take(run.request.body_mut());
        Ok(match body.collect().await {
            Ok(whole) => run
                .created()
                .map(|_| whole.to_bytes().len().to_string().into()),
            Err(_) => run.status(broken),
        })
    })
}

async fn state(store: &impl Store) -> RecordState {
    record(store, "K").await.unwrap().state
}

#[track_caller]
fn assert_released(state: &RecordState) {
    let is_released = matches!(state, RecordState::Released(Release::SameRequest));
    assert!(is_released, "{state:?}");
}

// ---- bodies in memory ----

async fn rule_39_a_wrong_digest_uses_no_key(place: &Place) {
    let (store, probe) = (place.open().await, Probe::counting());
    for layer in [verifying(store.clone()), streaming(store.clone())] {
        let api = Api::new(layer, &probe);
        let wrong = keyed("K").header("content-digest", sha256(b"other"));
        let refused = api.send(wrong).await;
        refused.assert_problem(400, "digest-mismatch");
        let malformed = keyed("K").header("content-digest", "sha-256=1");
        api.send(malformed)
            .await
            .assert_problem(400, "digest-invalid");
        assert!(record(&store, "K").await.is_none());
        assert_eq!(probe.runs(), 0);
    }
    let api = Api::new(verifying(store), &probe);
    let right = || keyed("K").header("content-digest", sha256(b"{\"amount\":1}"));
    let first = api.send(right()).await;
    first.assert_run(1);
    api.send(right()).await.assert_replay_of(&first);
    // The digest stands for the bytes, and the bytes for the digest.
    api.send(keyed("K")).await.assert_replay_of(&first);
    let other = keyed("K")
        .body("{}")
        .header("content-digest", sha256(b"{}"));
    let refused = api.send(other).await;
    refused.assert_problem(422, "key-reused");
    assert_eq!(refused.problem()["differs"][0], "body");
}

#[tokio::test]
async fn rule_39_digests_are_ignored_by_default() {
    let api = Api::new(required(memory()), &Probe::counting());
    let wrong = keyed("K").header("content-digest", sha256(b"other"));
    let first = api.send(wrong).await;
    first.assert_run(1);
    api.send(keyed("K")).await.assert_replay_of(&first);
}

#[tokio::test]
async fn rule_39_a_digest_of_another_algorithm_counts_as_none() {
    let api = Api::new(streaming(memory()), &Probe::counting());
    let other = keyed("K").header("content-digest", "md5=:AAAA:");
    api.send(other).await.assert_run(1);
    let large = upload(&large(), "md5=:AAAA:").key("L");
    api.send(large).await.assert_problem(413, "body-too-large");
}

#[tokio::test]
async fn rule_39_every_declared_digest_counts() {
    let api = Api::new(verifying(memory()), &Probe::counting());
    let body = b"{\"amount\":1}";
    let sha512 = |body: &[u8]| format!("sha-512=:{}:", STANDARD.encode(Sha512::digest(body)));
    let both = format!("{}, {}", sha256(body), sha512(b"other"));
    let refused = api.send(keyed("K").header("content-digest", both)).await;
    refused.assert_problem(400, "digest-mismatch");
    let first = keyed("K").header("content-digest", sha512(body));
    let first = api.send(first).await;
    let retry = keyed("K").header("content-digest", sha256(body));
    api.send(retry).await.assert_replay_of(&first);
}

#[tokio::test]
async fn rule_39_a_digest_does_not_replace_the_structure_of_json() {
    let layer = streaming(memory()).fingerprint(Fingerprinting::json());
    let api = Api::new(layer, &Probe::counting());
    let with = |body: &'static str| {
        let digest = sha256(body.as_bytes());
        keyed("K").body(body).header("content-digest", digest)
    };
    let first = api.send(with("{\"a\":1}")).await;
    api.send(with("{ \"a\": 1 }"))
        .await
        .assert_replay_of(&first);
}

// ---- uploads ----

async fn rule_39_an_upload_streams_and_its_retry_replays(place: &Place) {
    let (body, probe) = (large(), reading(400));
    let api = Api::new(streaming(place.open().await), &probe);
    let ask = || upload(&body, &sha256(&body));
    let first = api.send(ask()).await;
    first.assert_live(201);
    assert_eq!(first.body, "5000");
    let other = Api::new(streaming(place.open().await), &probe);
    other.send(ask()).await.assert_replay_of(&first);
    let changed = upload(&body, &sha256(b"other"));
    other.send(changed).await.assert_problem(422, "key-reused");
    let undeclared = upload(&body, "").without("content-digest");
    other
        .send(undeclared)
        .await
        .assert_problem(413, "body-too-large");
    assert_eq!(probe.runs(), 1);
}

async fn rule_39_a_wrong_upload_is_released_for_the_same_request(place: &Place) {
    let (store, probe) = (place.open().await, reading(500));
    let api = Api::new(streaming(store.clone()), &probe);
    let right = large();
    let mut wrong = right.clone();
    wrong[4_999] ^= 1;
    let digest = sha256(&right);
    let refused = api.send(upload(&wrong, &digest)).await;
    refused.assert_problem(400, "digest-mismatch");
    assert_released(&state(&store).await);
    let another = upload(&wrong, &sha256(&wrong));
    api.send(another).await.assert_problem(422, "key-reused");
    // Its body arrives intact the second time.
    let retry = api.send(upload(&right, &digest)).await;
    assert_eq!(
        (retry.status.as_u16(), &retry.body[..]),
        (201, &b"5000"[..])
    );
    assert_eq!(probe.runs(), 2);
}

async fn rule_39_a_success_without_the_declared_body_is_unknown(place: &Place) {
    let (store, probe) = (place.open().await, reading(202));
    let api = Api::new(streaming(store.clone()), &probe);
    let ask = || upload(&large(), &sha256(b"other"));
    let answer = api.send(ask()).await;
    assert_eq!(answer.status, 202);
    assert_eq!(answer.header("idempotent-recorded"), Some("false"));
    assert!(matches!(state(&store).await, RecordState::Unknown));
    api.send(ask()).await.assert_problem(409, "outcome-unknown");
    assert_eq!(probe.runs(), 1);
}

#[tokio::test(start_paused = true)]
async fn rule_39_the_handler_never_sees_the_end_of_a_wrong_upload() {
    let seen = Arc::new(AtomicUsize::new(0));
    let probe = Probe::running({
        let seen = Arc::clone(&seen);
        move |mut run: Run| {
            let seen = Arc::clone(&seen);
            async move {
                let mut body = std::mem::take(run.request.body_mut());
                while let Some(Ok(frame)) = body.frame().await {
                    seen.fetch_add(frame.data_ref().unwrap().len(), Ordering::SeqCst);
                }
                Ok(run.status(400))
            }
        }
    });
    let api = Api::new(streaming(memory()), &probe);
    // The last frames are empty: they must not release the data before them.
    let (frames, body) = streamed();
    for _ in 0..3 {
        send(&frames, &[b'x'; 700]);
    }
    send(&frames, b"");
    drop(frames);
    let wrong = keyed("K")
        .header("content-digest", sha256(b"other"))
        .body(body);
    api.send(wrong).await.assert_problem(400, "digest-mismatch");
    assert_eq!(seen.load(Ordering::SeqCst), 1_400);
}

#[tokio::test(start_paused = true)]
async fn rule_39_trailers_of_an_upload_arrive_after_its_data() {
    let trailers = Arc::new(Mutex::new(None));
    let probe = Probe::running({
        let trailers = Arc::clone(&trailers);
        move |mut run: Run| {
            let trailers = Arc::clone(&trailers);
            async move {
                let body = std::mem::take(run.request.body_mut()).collect().await;
                *trailers.lock().unwrap() = body.unwrap().trailers().cloned();
                Ok(run.created())
            }
        }
    });
    let api = Api::new(streaming(memory()), &probe);
    let (frames, body) = streamed();
    send(&frames, &large());
    let sum = HeaderMap::from_iter([("x-sum".parse().unwrap(), HeaderValue::from_static("1"))]);
    frames.send(Ok(Frame::trailers(sum.clone()))).unwrap();
    drop(frames);
    let ask = keyed("K")
        .header("content-digest", sha256(&large()))
        .body(body);
    api.send(ask).await.assert_run(1);
    assert_eq!(*trailers.lock().unwrap(), Some(sum));
}

#[tokio::test(start_paused = true)]
async fn rule_41_a_retry_during_an_upload_gets_409() {
    let patient = streaming(memory()).request_body_timeout(Duration::from_secs(600));
    let api = Api::new(patient, &reading(400));
    let (body, digest) = (large(), sha256(&large()));
    let (frames, arriving) = streamed();
    send(&frames, &body[..4_000]);
    let first = keyed("K").header("content-digest", &digest).body(arriving);
    let first = api.spawn(first);
    settle().await;
    // Heartbeats keep the lease of 30 s.
    for _ in 0..4 {
        let retry = api.send(upload(&body, &digest)).await;
        retry.assert_problem(409, "request-in-progress");
        sleep(Duration::from_secs(25)).await;
    }
    send(&frames, &body[4_000..]);
    drop(frames);
    let first = first.await.unwrap();
    first.assert_live(201);
    api.send(upload(&body, &digest))
        .await
        .assert_replay_of(&first);
}

#[tokio::test(start_paused = true)]
async fn rule_47_a_broken_upload_is_released() {
    let store = MemoryStore::new();
    for broken in [400, 503] {
        let api = Api::new(streaming(DynStore::new(store.clone())), &reading(broken));
        let (frames, body) = streamed();
        send(&frames, &large()[..3_000]);
        frames.send(Err(Failure("the connection broke"))).unwrap();
        let ask = keyed("K")
            .header("content-digest", sha256(&large()))
            .body(body);
        let refused = api.send(ask).await;
        refused.assert_problem(400, "body-invalid");
        assert_released(&state(&store).await);
    }
    let api = Api::new(streaming(DynStore::new(store)), &reading(400));
    let retry = api.send(upload(&large(), &sha256(&large()))).await;
    retry.assert_live(201);
}

#[tokio::test(start_paused = true)]
async fn rule_39_an_inner_error_over_a_broken_upload_is_released() {
    let store = MemoryStore::new();
    let probe = Probe::running(async |mut run: Run| {
        let body = std::mem::take(run.request.body_mut());
        match body.collect().await {
            Ok(_) => Ok(run.created()),
            Err(_) => Err(Failure("no body")),
        }
    });
    let api = Api::new(streaming(DynStore::new(store.clone())), &probe);
    let refused = api.send(upload(&large(), &sha256(b"other"))).await;
    refused.assert_problem(400, "digest-mismatch");
    assert_released(&state(&store).await);
}

#[tokio::test(start_paused = true)]
async fn rule_50_a_broken_upload_after_effects_is_unknown() {
    let store = MemoryStore::new();
    let probe = Probe::running(async |mut run: Run| {
        run.operation().effects_started();
        let body = std::mem::take(run.request.body_mut());
        assert!(body.collect().await.is_err());
        Ok(run.status(if run.number == 1 { 500 } else { 400 }))
    });
    for (key, status) in [("K", 500), ("L", 400)] {
        let api = Api::new(streaming(DynStore::new(store.clone())), &probe);
        let ask = || upload(&large(), &sha256(b"other")).key(key);
        assert_eq!(api.send(ask()).await.status, status);
        api.send(ask()).await.assert_problem(409, "outcome-unknown");
    }
}

#[tokio::test(start_paused = true)]
async fn rule_49_a_panic_over_a_broken_upload_is_unknown() {
    let probe = Probe::running(async |mut run: Run| {
        let body = std::mem::take(run.request.body_mut());
        let _ = body.collect().await.unwrap();
        Ok(run.created())
    });
    let api = Api::new(streaming(memory()), &probe);
    let ask = || upload(&large(), &sha256(b"other"));
    api.send(ask())
        .await
        .assert_problem(500, "handler-panicked");
    api.send(ask()).await.assert_problem(409, "outcome-unknown");
}

// ---- handlers that answer before the end ----

#[tokio::test(start_paused = true)]
async fn rule_39_a_success_before_the_end_waits_for_the_rest() {
    let (store, probe) = (MemoryStore::new(), Probe::counting());
    let api = Api::new(streaming(DynStore::new(store.clone())), &probe);
    let (frames, body) = streamed();
    send(&frames, &large()[..2_000]);
    let ask = keyed("K")
        .header("content-digest", sha256(&large()))
        .body(body);
    let first = api.spawn(ask);
    settle().await;
    assert!(matches!(
        state(&store).await,
        RecordState::InProgress { .. }
    ));
    send(&frames, &large()[2_000..]);
    drop(frames);
    let first = first.await.unwrap();
    first.assert_run(1);
    let retry = api.send(upload(&large(), &sha256(&large()))).await;
    retry.assert_replay_of(&first);

    let told = Told::listen();
    let wrong = api.send(upload(&large(), &sha256(b"other")).key("L")).await;
    assert_eq!(wrong.header("idempotent-recorded"), Some("false"));
    let (events, counts, text) = told.so_far();
    assert_eq!((events["upload-unverified"], events["unknown"]), (1, 1));
    assert_eq!(counts["upload-unverified"], 1);
    assert!(text.contains("it is not the one that"), "{text}");
}

#[tokio::test(start_paused = true)]
async fn rule_39_a_refusal_before_the_end_is_released_at_once() {
    let store = MemoryStore::new();
    let api = Api::new(
        streaming(DynStore::new(store.clone())),
        &Probe::statuses(&[403]),
    );
    let (frames, body) = streamed();
    send(&frames, &large()[..2_000]);
    let ask = keyed("K")
        .header("content-digest", sha256(&large()))
        .body(body);
    api.send(ask).await.assert_live(403);
    assert_released(&state(&store).await);
    drop(frames);
}

#[tokio::test(start_paused = true)]
async fn rule_39_a_body_that_the_handler_keeps_unread_is_unknown() {
    let store = MemoryStore::new();
    let probe = Probe::running(async |mut run: Run| {
        let body = std::mem::take(run.request.body_mut());
        tokio::spawn(async move {
            let _body = body;
            pending::<()>().await;
        });
        Ok(run.created())
    });
    let api = Api::new(streaming(DynStore::new(store.clone())), &probe);
    let answer = api.send(upload(&large(), &sha256(&large()))).await;
    assert_eq!(answer.header("idempotent-recorded"), Some("false"));
    assert!(matches!(state(&store).await, RecordState::Unknown));
}

#[tokio::test(start_paused = true)]
async fn rule_39_a_rest_that_panics_leaves_an_unknown_outcome() {
    for content_type in ["application/json", "text/event-stream"] {
        let store = MemoryStore::new();
        let probe = Probe::running(async move |run: Run| {
            let mut response = run.created();
            let content_type = HeaderValue::from_static(content_type);
            response.headers_mut().insert("content-type", content_type);
            Ok(response)
        });
        let api = Api::new(streaming(DynStore::new(store.clone())), &probe);
        let begun = stream::iter([Ok::<_, Infallible>(Bytes::from(large()).slice(..2_000))]);
        let body = begun.chain(stream::poll_fn(|_| panic!("on purpose")));
        let ask = keyed("K")
            .header("content-digest", sha256(&large()))
            .body(Body::from_stream(body));
        assert_eq!(api.send(ask).await.status, 201);
        settle().await;
        assert!(matches!(state(&store).await, RecordState::Unknown));
    }
}

#[tokio::test(start_paused = true)]
async fn rule_69_a_response_that_streams_its_upload_is_recorded_after_it() {
    let store = MemoryStore::new();
    let probe = Probe::running(async |mut run: Run| {
        let body = std::mem::take(run.request.body_mut());
        let mut response = Response::new(body);
        let events = HeaderValue::from_static("text/event-stream");
        response.headers_mut().insert("content-type", events);
        Ok(response)
    });
    let api = Api::new(streaming(DynStore::new(store.clone())), &probe);
    let echoed = api.send(upload(&large(), &sha256(&large()))).await;
    assert_eq!(echoed.body, large());
    settle().await;
    let retry = api.send(upload(&large(), &sha256(&large()))).await;
    retry.assert_problem(409, "response-not-replayable");
}

#[tokio::test(start_paused = true)]
async fn rule_69_a_streamed_response_to_a_wrong_upload_is_unknown() {
    let store = MemoryStore::new();
    let probe = Probe::answering(|run| {
        let mut response = run.created();
        let events = HeaderValue::from_static("text/event-stream");
        response.headers_mut().insert("content-type", events);
        response
    });
    let api = Api::new(streaming(DynStore::new(store.clone())), &probe);
    let ask = || upload(&large(), &sha256(b"other"));
    api.send(ask()).await.assert_live(201);
    settle().await;
    assert!(matches!(state(&store).await, RecordState::Unknown));
    api.send(ask()).await.assert_problem(409, "outcome-unknown");
}

#[tokio::test(start_paused = true)]
async fn rule_39_a_streamed_refusal_of_an_upload_is_released() {
    for digest in [sha256(&large()), sha256(b"other")] {
        let (store, probe) = (MemoryStore::new(), streaming_refusals());
        let api = Api::new(streaming(DynStore::new(store.clone())), &probe);
        let refused = api.send(upload(&large(), &digest)).await;
        refused.assert_live(422);
        settle().await;
        assert_released(&state(&store).await);
    }
    // A handler that has read a wrong upload.
    let store = MemoryStore::new();
    let probe = Probe::running(async |mut run: Run| {
        let body = std::mem::take(run.request.body_mut());
        assert!(body.collect().await.is_err());
        Ok(streamed_refusal(&run))
    });
    let api = Api::new(streaming(DynStore::new(store.clone())), &probe);
    let refused = api.send(upload(&large(), &sha256(b"other"))).await;
    refused.assert_problem(400, "digest-mismatch");
    assert_released(&state(&store).await);
}

/// Refuses uploads without reading them.
fn streaming_refusals() -> Probe {
    Probe::running(async |run: Run| Ok(streamed_refusal(&run)))
}

fn streamed_refusal(run: &Run) -> Response<Body> {
    let mut response = run.status(422);
    let events = HeaderValue::from_static("text/event-stream");
    response.headers_mut().insert("content-type", events);
    response
}

// ---- limits ----

#[tokio::test(start_paused = true)]
async fn rule_61_an_upload_over_its_limit_is_413() {
    let store = MemoryStore::new();
    let limited = ContentDigest::Stream { max_upload: 4_000 };
    let layer = streaming(DynStore::new(store.clone())).content_digest(limited);
    let api = Api::new(layer, &reading(500));
    let refused = api.send(upload(&large(), &sha256(&large()))).await;
    refused.assert_problem(413, "body-too-large");
    assert_released(&state(&store).await);
    // One that declares its length claims nothing.
    let whole = keyed("L").header("content-digest", sha256(&large()));
    let refused = api.send(whole.body(large())).await;
    refused.assert_problem(413, "body-too-large");
    assert!(record(&store, "L").await.is_none());
}

#[tokio::test(start_paused = true)]
async fn rule_61_an_upload_that_stops_is_408_and_a_slow_handler_is_not() {
    let api = Api::new(streaming(memory()), &reading(500));
    let (frames, body) = streamed();
    send(&frames, &large()[..2_000]);
    let ask = keyed("K")
        .header("content-digest", sha256(&large()))
        .body(body);
    let refused = api.send(ask).await;
    refused.assert_problem(408, "body-timeout");
    drop(frames);

    let slow = Probe::running(async |mut run: Run| {
        let mut body = std::mem::take(run.request.body_mut());
        let mut length = 0;
        while let Some(frame) = body.frame().await {
            sleep(Duration::from_secs(60)).await;
            length += frame.unwrap().data_ref().unwrap().len();
        }
        assert_eq!(length, 5_000);
        Ok(run.created())
    });
    let api = Api::new(streaming(memory()), &slow);
    let answer = api.send(upload(&large(), &sha256(&large()))).await;
    answer.assert_run(1);
}

/// Sends the body of an upload, with a pause between its parts.
fn dripping(part: usize, pause: Duration) -> Ask {
    let (frames, body) = streamed();
    send(&frames, &large()[..2_000]);
    tokio::spawn(async move {
        for (index, part) in large()[2_000..].chunks(part).enumerate() {
            if index > 0 {
                sleep(pause).await;
            }
            if frames.send(Ok(Frame::data(part.to_vec().into()))).is_err() {
                return;
            }
        }
    });
    keyed("K")
        .header("content-digest", sha256(&large()))
        .body(body)
}

#[tokio::test(start_paused = true)]
async fn rule_61_an_upload_that_drips_is_408() {
    let api = Api::new(streaming(memory()), &reading(500));
    let start = Instant::now();
    let refused = api.send(dripping(1, Duration::from_secs(5))).await;
    refused.assert_problem(408, "body-timeout");
    // 10 s, and a second for each kibibyte.
    assert_eq!(start.elapsed().as_secs(), 11);
}

#[tokio::test(start_paused = true)]
async fn rule_61_the_time_of_the_handler_does_not_count() {
    let slow = Probe::running(async |mut run: Run| {
        let mut body = std::mem::take(run.request.body_mut());
        while let Some(frame) = body.frame().await {
            frame.unwrap();
            sleep(Duration::from_secs(60)).await;
        }
        Ok(run.created())
    });
    let api = Api::new(streaming(memory()), &slow);
    // The handler receives a part when the next one is there, and then waits for a second.
    let answer = api.send(dripping(500, Duration::from_secs(61))).await;
    answer.assert_run(1);
}

/// Counts the bytes of its frames that are in memory.
#[derive(Clone, Default)]
struct Meter {
    held: Arc<AtomicUsize>,
    most_held: Arc<AtomicUsize>,
}

struct Metered {
    meter: Meter,
    left: usize,
}

struct Counted(Arc<AtomicUsize>, Vec<u8>);

impl AsRef<[u8]> for Counted {
    fn as_ref(&self) -> &[u8] {
        &self.1
    }
}

impl Drop for Counted {
    fn drop(&mut self) {
        self.0.fetch_sub(self.1.len(), Ordering::SeqCst);
    }
}

impl HttpBody for Metered {
    type Data = Bytes;
    type Error = Infallible;

    fn poll_frame(
        mut self: Pin<&mut Self>,
        _: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, Infallible>>> {
        let Some(left) = self.left.checked_sub(1) else {
            return Poll::Ready(None);
        };
        self.left = left;
        let held = self.meter.held.fetch_add(FRAME, Ordering::SeqCst) + FRAME;
        self.meter.most_held.fetch_max(held, Ordering::SeqCst);
        let data = Counted(Arc::clone(&self.meter.held), vec![0; FRAME]);
        Poll::Ready(Some(Ok(Frame::data(Bytes::from_owner(data)))))
    }
}

const FRAME: usize = 64 << 10;

#[tokio::test]
async fn rule_61_an_upload_of_64_mib_takes_no_memory() {
    let frames = (64 << 20) / FRAME;
    let mut digest = Sha256::new();
    for _ in 0..frames {
        digest.update([0; FRAME]);
    }
    let digest = format!("sha-256=:{}:", STANDARD.encode(digest.finalize()));
    let probe = Probe::running(async |mut run: Run| {
        let mut body = std::mem::take(run.request.body_mut());
        while let Some(frame) = body.frame().await {
            frame.unwrap();
        }
        Ok(run.created())
    });
    // Two frames are held at a time, and they count.
    let stream = ContentDigest::Stream {
        max_upload: 64 << 20,
    };
    let layer = streaming(memory()).max_request_body(FRAME);
    let layer = layer.content_digest(stream).max_buffered_bytes(2 * FRAME);
    let api = Api::new(layer, &probe);
    for _ in 0..2 {
        let meter = Meter::default();
        let body = Body::new(Metered {
            meter: meter.clone(),
            left: frames,
        });
        let ask = keyed("K").header("content-digest", &digest).body(body);
        assert_eq!(api.send(ask).await.status, 201);
        let most = meter.most_held.load(Ordering::SeqCst);
        assert!(most <= 5 * FRAME, "{most} bytes");
    }
    assert_eq!(probe.runs(), 1);
}

// ---- changed settings ----

#[tokio::test(start_paused = true)]
async fn rule_39_a_changed_limit_starts_no_second_run() {
    let (body, digest) = (large(), sha256(&large()));
    for (first, second) in [(LIMIT, 1 << 20), (1 << 20, LIMIT)] {
        let (store, probe) = (memory(), reading(400));
        let before = Api::new(streaming(store.clone()).max_request_body(first), &probe);
        let first = before.send(upload(&body, &digest)).await;
        first.assert_live(201);
        let after = Api::new(streaming(store.clone()).max_request_body(second), &probe);
        after
            .send(upload(&body, &digest))
            .await
            .assert_replay_of(&first);
        assert_eq!(probe.runs(), 1);
    }
    // A JSON body that was compared by its structure cannot be compared by its digest.
    let json = || Fingerprinting::json();
    let (store, probe) = (memory(), Probe::counting());
    let text = format!("{{\"a\":\"{}\"}}", "x".repeat(2_000));
    let ask = || upload(text.as_bytes(), &sha256(text.as_bytes()));
    let whole = streaming(store.clone())
        .max_request_body(4_000)
        .fingerprint(json());
    Api::new(whole, &probe).send(ask()).await.assert_run(1);
    let streams = Api::new(streaming(store).fingerprint(json()), &probe);
    let refused = streams.send(ask()).await;
    refused.assert_problem(503, "store-unavailable");
    assert_eq!(probe.runs(), 1);
}

#[tokio::test(start_paused = true)]
async fn rule_39_a_layer_without_uploads_still_knows_their_records() {
    let (store, probe) = (memory(), reading(400));
    let streams = Api::new(streaming(store.clone()), &probe);
    let first = streams.send(upload(&large(), &sha256(&large()))).await;
    let plain = Api::new(required(store), &probe);
    // The header is ignored there: the bytes are hashed.
    let retry = upload(&large(), &sha256(b"other"));
    plain.send(retry).await.assert_replay_of(&first);
    let other = upload(b"other", &sha256(&large()));
    plain.send(other).await.assert_problem(422, "key-reused");
    assert_eq!(probe.runs(), 1);
}

// ---- transactions ----

#[tokio::test]
async fn i5_an_unverified_upload_is_not_committed() {
    check(Place::sqlite().await, unverified_upload_is_not_committed).await;
}

async fn unverified_upload_is_not_committed(place: &Place) {
    let address = place.address();
    let store = SqliteStore::open(address.strip_prefix("sqlite:").unwrap());
    let store = store.await.unwrap();
    let probe = Probe::running({
        let store = store.clone();
        move |mut run: Run| {
            let store = store.clone();
            async move {
                let operation = run.operation();
                if run.number == 2 {
                    let body = std::mem::take(run.request.body_mut());
                    body.collect().await.unwrap();
                }
                let transaction = store.begin(&operation).await.unwrap();
                Ok(
                    match store.commit(&operation, transaction, "stored").await {
                        Ok(committed) => committed.into_http().map(Body::new),
                        Err(_) => run.status(500),
                    },
                )
            }
        }
    });
    let api = Api::new(streaming(DynStore::new(store.clone())), &probe);
    let ask = || upload(&large(), &sha256(&large()));
    api.send(ask()).await.assert_live(500);
    let second = api.send(ask()).await;
    assert_eq!(second.body, "stored");
    api.send(ask()).await.assert_replay_of(&second);
    store.close().await;
}

// ---- sockets ----

fn head(framing: &str, digest: &str) -> String {
    format!(
        "POST /count HTTP/1.1\r\nHost: test\r\nX-Account: acme-7\r\nIdempotency-Key: K\r\nContent-Digest: {digest}\r\n{framing}\r\n\r\n"
    )
}

#[tokio::test]
async fn rule_39_uploads_over_sockets_are_the_same_in_each_framing() {
    let probe = reading(500);
    let api = Api::new(streaming(memory()), &probe);
    let server = api.serve().await;
    let body = "x".repeat(200_000);
    let digest = sha256(body.as_bytes());
    let whole = head(&format!("Content-Length: {}", body.len()), &digest);
    let mut wire = Wire::open(&server).await;
    let first = wire.ask(format!("{whole}{body}")).await;
    assert_eq!((first.status, &first.body[..]), (201, &b"200000"[..]));

    let chunked = head("Transfer-Encoding: chunked", &digest);
    let chunks = format!("{:x}\r\n{body}\r\n0\r\n\r\n", body.len());
    let retry = wire.ask(format!("{chunked}{chunks}")).await;
    assert!(retry.is_replay(), "{retry:?}");

    let mut http2 = Http2::open(&server).await;
    let ask = || {
        keyed("K")
            .header("content-digest", &digest)
            .without("content-type")
    };
    let retry = http2.ask(ask().body(body.clone()).0).await;
    assert!(retry.is_replay(), "{retry:?}");
    let fresh = http2.ask(ask().key("L").body(body.clone()).0).await;
    fresh.assert_live(201);
    let wrong = http2
        .ask(ask().key("M").body(body.replace('x', "y")).0)
        .await;
    wrong.assert_problem(400, "digest-mismatch");
    assert_eq!(probe.runs(), 3);
}

#[tokio::test]
async fn rule_39_a_replayed_upload_is_answered_before_its_body() {
    let api = Api::new(streaming(memory()), &reading(500));
    let server = api.serve().await;
    let body = "x".repeat(200_000);
    let length = format!("Content-Length: {}", body.len());
    let head = head(&length, &sha256(body.as_bytes()));
    let mut wire = Wire::open(&server).await;
    assert_eq!(wire.ask(format!("{head}{body}")).await.status, 201);
    // Not a byte of its body was sent.
    let retry = wire.ask(&head).await;
    assert!(retry.is_replay(), "{retry:?}");
    // A client that sends its body nevertheless keeps its connection.
    wire.write(&body).await;
    let next = wire.ask(format!("{head}{body}")).await;
    assert!(next.is_replay(), "{next:?}");
}

#[tokio::test]
async fn rule_39_a_replayed_upload_that_waits_for_continue_is_not_read() {
    let api = Api::new(streaming(memory()), &reading(500));
    let server = api.serve().await;
    let body = "x".repeat(200_000);
    let length = format!("Content-Length: {}", body.len());
    let digest = sha256(body.as_bytes());
    let first = format!("{}{body}", head(&length, &digest));
    let first = Wire::open(&server).await.ask(first).await;
    assert_eq!(first.status, 201);
    let waiting = head(&format!("{length}\r\nExpect: 100-continue"), &digest);
    let mut wire = Wire::open(&server).await;
    let retry = wire.ask(waiting).await;
    assert!(retry.is_replay(), "{retry:?}");
    // The next request on the connection would count as the body.
    let rest = timeout(Duration::from_secs(1), wire.rest()).await;
    assert_eq!(rest.expect("it waits for the body"), b"");
}

#[tokio::test]
async fn rule_47_a_client_that_leaves_during_its_upload_frees_the_key() {
    let (store, probe) = (MemoryStore::new(), reading(400));
    let api = Api::new(streaming(DynStore::new(store.clone())), &probe);
    let server = api.serve().await;
    let body = "x".repeat(200_000);
    let length = format!("Content-Length: {}", body.len());
    let head = head(&length, &sha256(body.as_bytes()));
    let mut wire = Wire::open(&server).await;
    wire.write(format!("{head}{}", &body[..100_000])).await;
    eventually(async || (probe.runs() == 1).then_some(())).await;
    drop(wire);
    let released = eventually(async || {
        let state = state(&store).await;
        (!matches!(state, RecordState::InProgress { .. })).then_some(state)
    });
    assert_released(&released.await);
    let retry = Wire::open(&server).await.ask(format!("{head}{body}")).await;
    assert_eq!((retry.status, probe.runs()), (201, 2));
}

#[tokio::test]
async fn rule_77_uploads_that_cannot_be_compared_are_refused_when_built() {
    let custom = Fingerprinting::custom("one", |_, body| body.to_vec());
    let faults = [
        streaming(memory()).fingerprint(custom).build(),
        streaming(memory())
            .content_digest(ContentDigest::Stream { max_upload: 1 })
            .build(),
    ];
    for fault in faults {
        assert_eq!(fault.unwrap_err().setting(), "content_digest");
    }
}
