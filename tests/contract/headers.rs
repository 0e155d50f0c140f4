//! Rules 62 to 68 for every source of a record and for its replay.

use std::{future::ready, time::Duration};

use axum::body::Body;
use bytes::{BufMut as _, Bytes, BytesMut};
use http::{HeaderMap, HeaderValue, Response, StatusCode, header};
use http_body_util::{BodyExt as _, Full};
use tower_idempotency::{
    DynStore, KeptHeaders, MemoryStore, Reconciler, Recovery, Store as _,
    store::{
        RecordState, Transitioned,
        admin::{NotRecordableError, RecordedResponse, Resolution},
    },
};

use crate::{
    api::{Answer, Api, keyed, named, record, required},
    client::{Http2, Wire, post},
    crowd::completed_elsewhere,
    probe::{Failure, Probe, breaking_after, chunks_and_trailers, streamed},
    stores::{Place, memory, on_each_store},
};

on_each_store! {
    rule_68_trailers_pass_the_rules_of_headers
    rule_62_an_operators_response_passes_the_rules_of_headers
    rule_62_stored_bytes_pass_the_rules_when_they_are_replayed
    rule_69_a_stored_interim_status_is_not_replayed
}

/// Lines of which a replay keeps the last one alone.
const LINES: [(&str, &str); 14] = [
    ("connection", "close, x-hop"),
    ("content-length", "4096"),
    ("date", "Fri, 31 Dec 1999 23:59:59 GMT"),
    ("age", "77"),
    ("keep-alive", "timeout=5"),
    ("trailer", "x-none"),
    ("transfer-encoding", "chunked"),
    ("x-hop", "s3cr3t"),
    ("set-cookie", "session=s3cr3t"),
    ("server-timing", "s3cr3t"),
    ("www-authenticate", "s3cr3t"),
    ("idempotent-replayed", "s3cr3t"),
    ("idempotent-recorded", "false"),
    ("x-own", "kept"),
];

fn lines() -> HeaderMap {
    let lines = LINES.map(|(name, value)| (name.parse().unwrap(), value.parse().unwrap()));
    HeaderMap::from_iter(lines)
}

fn response() -> Response<Bytes> {
    let mut response = Response::new(Bytes::from_static(b"done"));
    *response.headers_mut() = lines();
    response
}

/// A replay over real connections, with the one line that is kept.
async fn replays_the_kept_line(api: &Api, key: &str) {
    let server = api.serve().await;
    let mut wire = Wire::open(&server).await;
    let request = post(
        "/count",
        &format!("Idempotency-Key: {key}\r\nTE: trailers\r\n"),
        "{\"amount\":1}",
    );
    for _ in 0..2 {
        // The connection still serves.
        let replay = wire.ask(&request).await;
        assert_eq!((replay.status, &*replay.body), (200, &b"done"[..]));
        assert_eq!(replay.values("idempotent-replayed"), [b"true"]);
        assert!(!replay.text("date").unwrap().contains("1999"));
        let others: Vec<_> = replay
            .lines
            .iter()
            .filter(|(name, _)| !HOPS.contains(&name.as_str()))
            .collect();
        assert_eq!(others, [&("x-own".to_owned(), b"kept".to_vec())]);
    }
    let replay = Http2::open(&server).await.ask(keyed(key).0).await;
    assert!(replay.is_replay());
    assert_eq!(
        (replay.status, &*replay.body),
        (StatusCode::OK, &b"done"[..])
    );
    for (name, value) in LINES {
        let is_kept = replay.headers.get(name).is_some_and(|kept| kept == value);
        assert_eq!(is_kept, name == "x-own", "{name}");
    }
}

/// Lines of the server's own, or of the marker.
const HOPS: [&str; 5] = [
    "content-length",
    "date",
    "idempotent-replayed",
    "trailer",
    "transfer-encoding",
];

fn holds_secret(bytes: &[u8]) -> bool {
    bytes.windows(6).any(|bytes| bytes == b"s3cr3t")
}

async fn rule_68_trailers_pass_the_rules_of_headers(place: &Place) {
    let probe = Probe::answering(|run| {
        let mut trailers = lines();
        trailers.insert(header::CONTENT_TYPE, HeaderValue::from_static("s3cr3t"));
        trailers.insert(header::LOCATION, HeaderValue::from_static("s3cr3t"));
        let mut response = run.created();
        let hop = HeaderValue::from_static("x-hop");
        response.headers_mut().insert(header::CONNECTION, hop);
        *response.body_mut() = chunks_and_trailers(&["do", "ne"], trailers);
        response
    });
    let store = place.open().await;
    // Set-Cookie is no trailer, even where cookies are kept.
    for (key, kept) in [
        ("K", KeptHeaders::all_but_transient()),
        ("L", KeptHeaders::all_but_transient().with_cookies()),
        ("M", KeptHeaders::only(["x-own".parse().unwrap()])),
    ] {
        let api = Api::new(required(store.clone()).kept_headers(kept), &probe);
        let first = api.send(keyed(key)).await;
        assert_eq!(first.trailers.unwrap()["set-cookie"], "session=s3cr3t");
        let RecordState::Completed { response } = record(&store, key).await.unwrap().state else {
            panic!("it is not recorded");
        };
        assert!(!holds_secret(&response));
        let server = api.serve().await;
        let replay = Http2::open(&server).await.ask(keyed(key).0).await;
        assert!(replay.is_replay());
        let kept = HeaderMap::from_iter([("x-own".parse().unwrap(), "kept".parse().unwrap())]);
        assert_eq!((&*replay.body, replay.trailers), (&b"done"[..], Some(kept)));
        let lines = format!("Idempotency-Key: {key}\r\nTE: trailers\r\n");
        let request = post("/count", &lines, "{\"amount\":1}");
        let replay = Wire::open(&server).await.ask(request).await;
        assert_eq!(replay.trailers, [("x-own".to_owned(), b"kept".to_vec())]);
        assert_eq!(replay.text("trailer").as_deref(), Some("x-own"));
    }
    // Trailers can be chosen, as headers can.
    let none = KeptHeaders::only([header::LOCATION]);
    let api = Api::new(required(store).kept_headers(none), &probe);
    api.send(keyed("N")).await;
    assert_eq!(api.send(keyed("N")).await.trailers, None);
}

async fn rule_62_an_operators_response_passes_the_rules_of_headers(place: &Place) {
    let store = place.open().await;
    let supplied = RecordedResponse::new(response()).unwrap().encode();
    // Headers that no setting keeps are not stored.
    for name in ["x-hop", "idempotent-recorded", "content-length", "1999"] {
        let stored = String::from_utf8_lossy(&supplied);
        assert!(!stored.contains(name), "{name}");
    }
    completed_elsewhere(&store, "K", supplied).await;
    let probe = Probe::counting();
    replays_the_kept_line(&Api::new(required(store.clone()), &probe), "K").await;
    // The settings of the layer decide on the other headers.
    let kept = KeptHeaders::all_but_transient()
        .with_cookies()
        .without("x-own".parse().unwrap());
    let api = Api::new(required(store).kept_headers(kept), &probe);
    let replay = api.send(keyed("K")).await;
    assert_eq!(replay.header("set-cookie"), Some("session=s3cr3t"));
    assert_eq!(replay.header("x-own"), None);
    assert_eq!(probe.runs(), 0);
}

/// The bytes of a record with any status, headers and trailers, also such as the
/// layer never writes.
fn bytes_of(status: u16, headers: &HeaderMap, trailers: &HeaderMap) -> Bytes {
    let mut bytes = BytesMut::new();
    bytes.put_u16_le(status);
    for lines in [headers, trailers] {
        bytes.put_u16_le(u16::try_from(lines.len()).unwrap());
        for (name, value) in lines {
            bytes.put_u16_le(u16::try_from(name.as_str().len()).unwrap());
            bytes.put_slice(name.as_str().as_bytes());
            bytes.put_u32_le(u32::try_from(value.len()).unwrap());
            bytes.put_slice(value.as_bytes());
        }
    }
    bytes.put_slice(b"done");
    let mut checksum = crc32fast::Hasher::new();
    checksum.update(&[1, 0]);
    checksum.update(&bytes);
    let checksum = checksum.finalize().to_le_bytes();
    [b"ti\x01\0", &checksum[..], &bytes].concat().into()
}

async fn rule_62_stored_bytes_pass_the_rules_when_they_are_replayed(place: &Place) {
    let store = place.open().await;
    completed_elsewhere(&store, "K", bytes_of(200, &lines(), &HeaderMap::new())).await;
    completed_elsewhere(&store, "L", bytes_of(200, &lines(), &lines())).await;
    let probe = Probe::counting();
    let api = Api::new(required(store), &probe);
    replays_the_kept_line(&api, "K").await;
    replays_the_kept_line(&api, "L").await;
    let trailers = api.send(keyed("L")).await.trailers.unwrap();
    let names: Vec<_> = trailers.keys().map(header::HeaderName::as_str).collect();
    assert_eq!(names, ["x-own"]);
    assert_eq!(probe.runs(), 0);
}

async fn rule_69_a_stored_interim_status_is_not_replayed(place: &Place) {
    let store = place.open().await;
    let probe = Probe::counting();
    let api = Api::new(required(store.clone()), &probe);
    let server = api.serve().await;
    let mut wire = Wire::open(&server).await;
    for status in [100, 101, 103, 199] {
        let key = format!("K{status}");
        let stored = bytes_of(status, &HeaderMap::new(), &HeaderMap::new());
        completed_elsewhere(&store, &key, stored).await;
        let lines = format!("Idempotency-Key: {key}\r\n");
        let refused = wire.ask(post("/count", &lines, "{\"amount\":1}")).await;
        assert_eq!(
            (refused.status, &*refused.problem()),
            (409, "response-not-replayable")
        );
    }
    assert_eq!(probe.runs(), 0);
}

#[test]
fn rule_69_an_operators_response_needs_a_final_status() {
    for status in [100, 101, 103, 199] {
        let status = StatusCode::from_u16(status).unwrap();
        let mut interim = response();
        *interim.status_mut() = status;
        let error = RecordedResponse::new(interim).unwrap_err();
        assert_eq!(error, NotRecordableError::InterimStatus(status));
        assert!(error.to_string().contains(&status.to_string()), "{error}");
    }
    assert!(RecordedResponse::new(response()).is_ok());
}

#[tokio::test]
async fn rule_68_an_operators_response_is_that_of_a_handler() {
    let trailers = HeaderMap::from_iter([("x-sum".parse().unwrap(), "5d41".parse().unwrap())]);
    let body = Full::from("{}").with_trailers(ready(Some(Ok(trailers))));
    let found = RecordedResponse::new(Response::new(Body::new(body))).unwrap();
    let store = MemoryStore::new();
    let probe = Probe::running(|_| async { Err(Failure("lost")) });
    let api = Api::new(required(DynStore::new(store.clone())), &probe);
    assert!(api.respond(keyed("K").0).await.is_err());
    let fence = record(&store, "K").await.unwrap().fence;
    let happened = Resolution::Happened(found);
    let name = named("K");
    let resolved = store.resolve(&name, fence, &happened, Duration::ZERO);
    assert_eq!(resolved.await.unwrap(), Transitioned::Applied);
    let replay = api.send(keyed("K")).await;
    assert!(replay.is_replay());
    assert_eq!(
        (&*replay.body, &replay.trailers.unwrap()["x-sum"]),
        (&b"{}"[..], &HeaderValue::from_static("5d41"))
    );

    let (_open, streamed) = streamed();
    let error = RecordedResponse::new(Response::new(streamed)).unwrap_err();
    assert_eq!(error, NotRecordableError::BodyNotWhole);
    let broken = Response::new(breaking_after(&["half"]));
    assert!(RecordedResponse::new(broken).is_err());
}

/// A layer whose hook returns this response for a lost run.
fn reconciled(status: u16) -> (Api, Probe) {
    let probe = Probe::running(|_| async { Err(Failure("lost")) });
    let hook = Reconciler::new(move |_| async move {
        let stored = bytes_of(status, response().headers(), &HeaderMap::new());
        Some(Resolution::Happened(
            RecordedResponse::decode(stored).unwrap(),
        ))
    });
    let builder = required(memory()).recovery(Recovery::Reconcile(hook));
    (Api::new(builder, &probe), probe)
}

#[tokio::test]
async fn rule_62_a_hooks_response_passes_the_rules_of_headers() {
    let (api, probe) = reconciled(200);
    assert!(api.respond(keyed("K").0).await.is_err());
    replays_the_kept_line(&api, "K").await;
    assert_eq!(probe.runs(), 1);
}

#[tokio::test]
async fn rule_69_a_hooks_interim_status_leaves_a_tombstone() {
    let (api, probe) = reconciled(101);
    assert!(api.respond(keyed("K").0).await.is_err());
    for _ in 0..2 {
        api.send(keyed("K"))
            .await
            .assert_problem(409, "response-not-replayable");
    }
    assert_eq!(probe.runs(), 1);
}

#[tokio::test]
async fn rule_67_a_stored_body_of_a_204_is_not_replayed() {
    let store = memory();
    let mut trailers = HeaderMap::new();
    trailers.insert("x-own", HeaderValue::from_static("kept"));
    let api = Api::new(required(store.clone()), &Probe::counting());
    let server = api.serve().await;
    for status in [204, 304] {
        let key = format!("K{status}");
        completed_elsewhere(&store, &key, bytes_of(status, &HeaderMap::new(), &trailers)).await;
        let replay = Http2::open(&server).await.ask(keyed(&key).0).await;
        assert_empty(&replay, status);
        assert_empty(&api.send(keyed(&key)).await, status);
        let mut wire = Wire::open(&server).await;
        let lines = format!("Idempotency-Key: {key}\r\n");
        for _ in 0..2 {
            let request = post("/count", &lines, "{\"amount\":1}");
            assert_eq!(wire.ask(request).await.status, status);
        }
    }
}

#[track_caller]
fn assert_empty(replay: &Answer, status: u16) {
    assert!(replay.is_replay());
    assert_eq!((replay.status.as_u16(), replay.body.len()), (status, 0));
    assert_eq!((&replay.trailers, replay.header("trailer")), (&None, None));
}
