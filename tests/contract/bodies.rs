//! Bodies of requests: late, large, slow or broken ones.

use std::{
    convert::Infallible,
    pin::Pin,
    sync::{
        Arc,
        atomic::{AtomicUsize, Ordering},
    },
    task::{Context, Poll},
    time::Duration,
};

use axum::{Router, body::Body, extract::DefaultBodyLimit, routing::post};
use bytes::Bytes;
use http::StatusCode;
use http_body::{Body as HttpBody, Frame};
use tokio::time::{Instant, sleep, timeout};
use tower::{Layer as _, ServiceExt as _};
use tower_http::{limit::RequestBodyLimitLayer, timeout::RequestBodyTimeoutLayer};
use tower_idempotency::{DynStore, MemoryStore};

use crate::{
    api::{Answer, Api, eventually, keyed, required, send, settle},
    client::{Http2, Wire, WireAnswer},
    faulty::Faulty,
    probe::{Frames, Probe, data, streamed},
    server::{Server, serve},
    stores::memory,
};

const GRACE: Duration = Duration::from_secs(1);

#[tokio::test(start_paused = true)]
async fn f107_a_body_that_ends_while_draining_is_refused() {
    let (store, probe) = (memory(), Probe::counting());
    let api = Api::new(required(store.clone()), &probe);
    let (frames, body) = streamed();
    let asked = api.spawn(keyed("K").body(body));
    frames.send(Ok(data("{\"amount\""))).unwrap();
    settle().await;
    assert_eq!(api.layer.drain(GRACE).await.left(), 0);
    frames.send(Ok(data(":1}"))).unwrap();
    drop(frames);
    asked.await.unwrap().assert_problem(503, "draining");
    // Nothing was claimed, so that another process runs it.
    assert_eq!(probe.runs(), 0);
    let other = Api::new(required(store), &probe);
    other.send(keyed("K")).await.assert_run(1);
}

#[tokio::test]
async fn f107_an_upload_over_a_socket_is_refused_while_draining() {
    let probe = Probe::counting();
    let api = Api::new(required(memory()), &probe);
    let server = api.serve().await;
    let mut wire = Wire::open(&server).await;
    let head = head("Content-Length: 12");
    wire.write(format!("{head}{{\"am")).await;
    server.start_of_a_request().await;
    assert_eq!(api.layer.drain(GRACE).await.left(), 0);
    let answer = wire.ask("ount\":1}").await;
    assert_eq!((answer.status, &*answer.problem()), (503, "draining"));
    assert_eq!(probe.runs(), 0);
}

// ---- an outer layer breaks the body ----

/// A handler behind the layer, with `outer` outside of it, over a socket.
async fn serve_behind(
    outer: impl FnOnce(Router) -> Router,
    probe: &Probe,
    store: &Faulty<MemoryStore>,
) -> Server {
    let probe = probe.clone();
    let handler = tower::service_fn(move |request| {
        let probe = probe.clone();
        async move { Ok::<_, Infallible>(probe.oneshot(request).await.unwrap()) }
    });
    let layer = required(DynStore::new(store.clone())).build().unwrap();
    serve(outer(Router::new().fallback_service(handler).layer(layer))).await
}

fn head(framing: &str) -> String {
    format!(
        "POST /count HTTP/1.1\r\nHost: test\r\nX-Account: acme-7\r\nIdempotency-Key: K\r\n{framing}\r\n\r\n"
    )
}

fn chunk(length: usize) -> String {
    format!("{length:x}\r\n{}\r\n", "x".repeat(length))
}

#[tokio::test]
async fn rule_61_an_outer_limit_on_chunks_is_413() {
    let (store, probe) = (Faulty::new(MemoryStore::new()), Probe::counting());
    let limited = |app: Router| app.layer(RequestBodyLimitLayer::new(1 << 10));
    let server = serve_behind(limited, &probe, &store).await;
    let mut wire = Wire::open(&server).await;
    let chunked = head("Transfer-Encoding: chunked");
    let chunks = format!("{}{}0\r\n\r\n", chunk(1 << 10), chunk(1 << 10));
    let refused = wire.ask(format!("{chunked}{chunks}")).await;
    assert_eq!(
        (refused.status, &*refused.problem()),
        (413, "body-too-large")
    );
    assert_eq!((probe.runs(), store.calls()), (0, vec![]));
    // The key is free, and the connection still serves.
    let smaller = format!("{chunked}{}0\r\n\r\n", chunk(1 << 10));
    assert_eq!(wire.ask(smaller).await.status, 201);

    // A client that writes before it reads gets the answer too.
    let large = format!("{START}X-Account: acme-7\r\nIdempotency-Key: L\r\n");
    let (_, refused) = write_then_read(&server, &large, 16 << 20, true).await;
    assert_eq!(
        (refused.status, &*refused.problem()),
        (413, "body-too-large")
    );

    let mut http2 = Http2::open(&server).await;
    let (frames, body) = streamed();
    for _ in 0..3 {
        let kibibyte = Bytes::from(vec![b'x'; 1 << 10]);
        frames.send(Ok(Frame::data(kibibyte))).unwrap();
    }
    drop(frames);
    let refused = http2.ask(keyed("L").body(body).0).await;
    refused.assert_problem(413, "body-too-large");
}

#[tokio::test]
async fn rule_61_an_outer_body_timeout_is_408() {
    let (store, probe) = (Faulty::new(MemoryStore::new()), Probe::counting());
    let bound = Duration::from_millis(50);
    let timed = move |app: Router| app.layer(RequestBodyTimeoutLayer::new(bound));
    let server = serve_behind(timed, &probe, &store).await;
    let started = format!("{}{{", head("Content-Length: 2"));
    let refused = Wire::open(&server).await.ask(started).await;
    assert_eq!((refused.status, &*refused.problem()), (408, "body-timeout"));
    assert_eq!(refused.text("retry-after").as_deref(), Some("1"));
    assert_eq!((probe.runs(), store.calls()), (0, vec![]));
    let whole = format!("{}{{}}", head("Content-Length: 2"));
    assert_eq!(Wire::open(&server).await.ask(whole).await.status, 201);
}

#[tokio::test]
async fn rule_52_an_extractors_body_limit_frees_the_key() {
    let layer = required(memory()).build().unwrap();
    let app = Router::new()
        .route("/count", post(async |body: Bytes| body.len().to_string()))
        .layer(layer)
        .layer(DefaultBodyLimit::max(1 << 10));
    let server = serve(app).await;
    let mut wire = Wire::open(&server).await;
    let chunked = head("Transfer-Encoding: chunked");
    let refused = wire
        .ask(format!("{chunked}{}0\r\n\r\n", chunk(2 << 10)))
        .await;
    assert_eq!(refused.status, 413);
    let smaller = wire.ask(format!("{chunked}{}0\r\n\r\n", chunk(512))).await;
    assert_eq!((smaller.status, &*smaller.body), (200, &b"512"[..]));
}

// ---- the request is refused before its body has arrived ----

/// Sends all of a request before it reads the answer.
async fn write_then_read(
    server: &Server,
    head: &str,
    length: usize,
    is_chunked: bool,
) -> (Wire, WireAnswer) {
    let framing = match is_chunked {
        true => "Transfer-Encoding: chunked".to_owned(),
        false => format!("Content-Length: {length}"),
    };
    let mut wire = Wire::open(server).await;
    wire.write(format!("{head}{framing}\r\n\r\n")).await;
    let piece = vec![b'x'; 64 << 10];
    for _ in 0..length / piece.len() {
        if is_chunked {
            wire.write("10000\r\n").await;
        }
        wire.write(&piece).await;
        if is_chunked {
            wire.write("\r\n").await;
        }
    }
    if is_chunked {
        wire.write("0\r\n\r\n").await;
    }
    let answer = wire.answer().await;
    (wire, answer)
}

const START: &str = "POST /count HTTP/1.1\r\nHost: test\r\n";

#[tokio::test]
async fn rule_61_a_client_that_writes_before_it_reads_sees_the_refusal() {
    let api = Api::new(required(memory()), &Probe::counting());
    let server = api.serve().await;
    let long = "k".repeat(300);
    let refusals = [
        (
            format!("X-Account: acme-7\r\nIdempotency-Key: {long}\r\n"),
            400,
            "key-invalid",
        ),
        ("X-Account: acme-7\r\n".to_owned(), 400, "key-missing"),
        ("Idempotency-Key: K\r\n".to_owned(), 403, "caller-unknown"),
        (
            "X-Account: acme-7\r\nIdempotency-Key: K\r\n".to_owned(),
            413,
            "body-too-large",
        ),
    ];
    for (lines, status, problem) in &refusals {
        for length in [8 << 20, 16 << 20] {
            for is_chunked in [false, true] {
                let head = format!("{START}{lines}");
                let (mut wire, answer) = write_then_read(&server, &head, length, is_chunked).await;
                assert_eq!((answer.status, &*answer.problem()), (*status, *problem));
                // The connection still serves.
                let next = format!(
                    "{START}X-Account: acme-7\r\nIdempotency-Key: next\r\nContent-Length: 0\r\n\r\n"
                );
                assert_eq!(wire.ask(next).await.status, 201);
            }
        }
    }
    let _ = api.layer.drain(GRACE).await;
    let head = format!("{START}{}", refusals[3].0);
    let (_, answer) = write_then_read(&server, &head, 512 << 10, false).await;
    assert_eq!((answer.status, &*answer.problem()), (503, "draining"));
}

/// Asserts this refusal of a client that waits for `100 Continue`. It never sends its body,
/// so the next request on the connection would count as that body.
async fn assert_closed_after(api: &Api, lines: &str, refusal: (u16, &str)) {
    let server = api.serve().await;
    let mut wire = Wire::open(&server).await;
    let head = format!("{START}X-Account: acme-7\r\nExpect: 100-Continue\r\n{lines}\r\n");
    let answer = wire.ask(head).await;
    assert_eq!((answer.status, &*answer.problem()), refusal);
    let rest = timeout(SECOND, wire.rest()).await;
    assert_eq!(rest.expect("it waits for the body"), b"");
}

#[tokio::test]
async fn rule_61_a_refused_client_that_waits_for_continue_sends_nothing() {
    let api = Api::new(required(memory()), &Probe::counting());
    let missing = "Content-Length: 9\r\n";
    assert_closed_after(&api, missing, (400, "key-missing")).await;
    let large = "Idempotency-Key: K\r\nContent-Length: 9000000\r\n";
    assert_closed_after(&api, large, (413, "body-too-large")).await;
}

/// Counts the frames of a body, and the bytes of them that are in memory.
#[derive(Clone, Default)]
struct Meter {
    frames: Arc<AtomicUsize>,
    held: Arc<AtomicUsize>,
    most_held: Arc<AtomicUsize>,
    dropped: Arc<AtomicUsize>,
}

struct Metered {
    meter: Meter,
    left: usize,
}

const FRAME: usize = 64 << 10;

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

impl Meter {
    /// A body of this number of frames.
    fn body(&self, frames: usize) -> Body {
        Body::new(Metered {
            meter: self.clone(),
            left: frames,
        })
    }

    fn frames(&self) -> usize {
        self.frames.load(Ordering::SeqCst)
    }

    fn dropped(&self) -> usize {
        self.dropped.load(Ordering::SeqCst)
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
        let meter = &self.meter;
        meter.frames.fetch_add(1, Ordering::SeqCst);
        let held = meter.held.fetch_add(FRAME, Ordering::SeqCst) + FRAME;
        meter.most_held.fetch_max(held, Ordering::SeqCst);
        let data = Counted(Arc::clone(&meter.held), vec![b'x'; FRAME]);
        Poll::Ready(Some(Ok(Frame::data(Bytes::from_owner(data)))))
    }
}

impl Drop for Metered {
    fn drop(&mut self) {
        self.meter.dropped.fetch_add(1, Ordering::SeqCst);
    }
}

#[tokio::test]
async fn rule_61_a_refused_stream_disturbs_no_other_stream() {
    let probe = Probe::counting();
    let server = Api::new(required(memory()), &probe).serve().await;
    let mut http2 = Http2::open(&server).await;
    let long = "k".repeat(300);
    // 8 MiB each, eight times what the connection's window holds.
    for round in 1..=8 {
        let meter = Meter::default();
        let mut refused = http2.clone();
        let upload = keyed(&long).body(meter.body(128)).0;
        let refused = tokio::spawn(async move { refused.ask(upload).await });
        let other = http2.ask(keyed(&format!("K{round}")).0).await;
        other.assert_run(round);
        refused.await.unwrap().assert_problem(400, "key-invalid");
        // The server reads all of it, and does not reset the stream.
        eventually(async || (meter.frames() == 128).then_some(())).await;
    }
    // It also reads a body whose size shows only at its end.
    let meter = Meter::default();
    let refused = http2.ask(keyed("K").body(meter.body(128)).0).await;
    refused.assert_problem(413, "body-too-large");
    eventually(async || (meter.frames() == 128).then_some(())).await;
}

#[tokio::test]
async fn rule_61_a_refused_body_is_discarded_frame_by_frame() {
    let api = Api::new(required(memory()), &Probe::counting());
    let meter = Meter::default();
    let refused = api.send(keyed("\"").body(meter.body(512))).await;
    refused.assert_problem(400, "key-invalid");
    settle().await;
    assert_eq!((meter.frames(), meter.dropped()), (512, 1));
    assert_eq!(meter.most_held.load(Ordering::SeqCst), FRAME);
    // The layer frees the part that it had buffered.
    let meter = Meter::default();
    let refused = api.send(keyed("K").body(meter.body(512))).await;
    refused.assert_problem(413, "body-too-large");
    settle().await;
    assert_eq!((meter.frames(), meter.dropped()), (512, 1));
    assert!(meter.most_held.load(Ordering::SeqCst) <= 2 * FRAME);
}

#[tokio::test(start_paused = true)]
async fn rule_61_discarding_is_bounded_in_bytes_time_and_number() {
    let api = Api::new(required(memory()), &Probe::counting());
    let meter = Meter::default();
    let refused = api.send(keyed("\"").body(meter.body(usize::MAX))).await;
    refused.assert_problem(400, "key-invalid");
    settle().await;
    // 64 MiB, and the frame that exceeds them.
    assert_eq!((meter.frames(), meter.dropped()), (1_025, 1));

    // Empty frames count too.
    let (frames, body) = streamed();
    api.send(keyed("\"").body(body)).await;
    for _ in 0..100_000 {
        let _ = frames.send(Ok(data("")));
    }
    let ended = timeout(SECOND, frames.closed()).await;
    assert!(ended.is_ok(), "it is still read");

    let start = Instant::now();
    let mut held = Vec::new();
    for _ in 0..300 {
        let (frames, body) = streamed();
        let refused = api.send(keyed("\"").body(body)).await;
        refused.assert_problem(400, "key-invalid");
        held.push(frames);
    }
    settle().await;
    let reading = held.iter().filter(|frames| !frames.is_closed()).count();
    assert_eq!(reading, 256);
    held[0].closed().await;
    assert!((10..11).contains(&start.elapsed().as_secs()));
    settle().await;
    assert!(held.iter().all(Frames::is_closed));
    // Other bodies are read again.
    let meter = Meter::default();
    api.send(keyed("\"").body(meter.body(3))).await;
    settle().await;
    assert_eq!(meter.frames(), 3);
}

#[tokio::test]
async fn rule_61_a_refused_upload_holds_nothing_of_the_inner_service() {
    let probe = Probe::counting();
    let layer = required(memory()).max_request_body(10).build().unwrap();
    let limited = tower::limit::ConcurrencyLimitLayer::new(1).layer(probe.clone());
    let service = layer.layer(limited);
    let (frames, body) = streamed();
    frames.send(Ok(data("more than ten bytes"))).unwrap();
    let refused = send(service.clone(), keyed("K").body(body)).await;
    refused.assert_problem(413, "body-too-large");
    settle().await;
    assert!(!frames.is_closed(), "it is read on");
    send(service, keyed("K").body("{}")).await.assert_run(1);
}

// ---- the body arrives slowly ----

const SECOND: Duration = Duration::from_secs(1);

/// Sends a piece of this length each second, and returns how long the answer took.
async fn upload(api: &Api, pieces: usize, length: usize, ends: bool) -> (Answer, u64) {
    let (frames, body) = streamed();
    let sending = tokio::spawn(async move {
        for _ in 0..pieces {
            let piece = Frame::data(Bytes::from(vec![b'x'; length]));
            if frames.send(Ok(piece)).is_err() {
                return;
            }
            sleep(SECOND).await;
        }
        if !ends {
            frames.closed().await;
        }
    });
    let start = Instant::now();
    let answer = api.send(keyed("K").body(body)).await;
    let took = start.elapsed().as_secs();
    sending.abort();
    (answer, took)
}

#[tokio::test(start_paused = true)]
async fn f08_a_slow_upload_passes() {
    // 900 kB at 60 kB/s.
    let api = Api::new(required(memory()), &Probe::counting());
    let (answer, took) = upload(&api, 15, 60_000, true).await;
    assert_eq!((answer.status, took), (StatusCode::CREATED, 15));
    // Just above the least rate.
    let api = Api::new(required(memory()), &Probe::counting());
    let (answer, took) = upload(&api, 200, 1_100, true).await;
    assert_eq!((answer.status, took), (StatusCode::CREATED, 200));
    // A larger limit needs no other setting.
    let large = required(memory()).max_request_body(16 << 20);
    let api = Api::new(large, &Probe::counting());
    let (answer, took) = upload(&api, 160, 100_000, true).await;
    assert_eq!((answer.status, took), (StatusCode::CREATED, 160));
}

#[tokio::test(start_paused = true)]
async fn f08_an_upload_that_stops_is_408_after_the_timeout() {
    let (store, probe) = (Faulty::new(MemoryStore::new()), Probe::counting());
    let api = Api::new(required(DynStore::new(store.clone())), &probe);
    let (answer, took) = upload(&api, 0, 0, false).await;
    answer.assert_problem(408, "body-timeout");
    assert_eq!((answer.retry_after(), took), (Some(1), 10));
    // Its last byte came after 2 s.
    let (answer, took) = upload(&api, 3, 4_000, false).await;
    answer.assert_problem(408, "body-timeout");
    assert_eq!(took, 12);
    // Empty frames are no progress.
    let (answer, took) = upload(&api, 100, 0, false).await;
    answer.assert_problem(408, "body-timeout");
    assert_eq!(took, 10);
    assert_eq!((probe.runs(), store.calls()), (0, vec![]));

    let hasty = required(memory()).request_body_timeout(2 * SECOND);
    let (answer, took) = upload(&Api::new(hasty, &probe), 3, 4_000, false).await;
    answer.assert_problem(408, "body-timeout");
    assert_eq!(took, 4);
}

#[tokio::test(start_paused = true)]
async fn f08_an_upload_below_the_floor_is_408() {
    let (store, probe) = (Faulty::new(MemoryStore::new()), Probe::counting());
    let api = Api::new(required(DynStore::new(store.clone())), &probe);
    // In t seconds 500 B/s amount to 1 KiB/s in t - 10 seconds.
    let (answer, took) = upload(&api, usize::MAX, 500, false).await;
    answer.assert_problem(408, "body-timeout");
    assert!((19..=20).contains(&took), "{took}");
    // A quick start allows a longer pause, but not one without an end.
    let (frames, body) = streamed();
    let quick = Frame::data(Bytes::from(vec![b'x'; 100 << 10]));
    frames.send(Ok(quick)).unwrap();
    let dripping = tokio::spawn(async move {
        while frames.send(Ok(data("x"))).is_ok() {
            sleep(SECOND).await;
        }
    });
    let start = Instant::now();
    let answer = api.send(keyed("K").body(body)).await;
    answer.assert_problem(408, "body-timeout");
    assert_eq!(start.elapsed().as_secs(), 110);
    dripping.await.unwrap();
    assert_eq!((probe.runs(), store.calls()), (0, vec![]));
}
