//! Faults that no rule names, each with its number in the list of
//! `tests/faults/main.rs`.

use std::{
    future::pending,
    sync::mpsc,
    time::{Duration, Instant},
};

use axum::{Router, body::Body};
use http::{HeaderMap, HeaderName, HeaderValue, Method, Request, StatusCode, header};
use http_body_util::BodyExt as _;
use proptest::{collection::vec, prop_oneof};
use tokio::runtime::{Builder, Runtime};
use tower::{Layer as _, ServiceExt as _};
use tower_http::{compression::CompressionLayer, decompression::RequestDecompressionLayer};
use tower_idempotency::{
    Disconnect, DynStore, KeptHeaders, MemoryStore, Outcome, PostgresStore, Recovery,
    RejectionKind, Store as _, StoreErrorKind,
    sqlx::{AssertSqlSafe, Connection as _, PgConnection, raw_sql},
    store::{Claim, Claimed, RecordState},
};

use crate::{
    api::{Answer, Api, eventually, keyed, named, record, required, send, settle},
    client::{Wire, keyed_post, post},
    faulty::{Call, Fault, Faulty},
    probe::{Failure, Gate, Probe, chunks_and_trailers, data, streamed},
    stores::{Place, check, memory},
};

#[tokio::test(start_paused = true)]
async fn f02_f42_a_dropped_request_runs_once_and_its_retry_succeeds() {
    let moment = Duration::from_millis(1);
    for moments in 0.. {
        // Claim, handler and recording each take time, so that a drop falls
        // before, into and after each.
        let store = Faulty::new(MemoryStore::new());
        for call in [Call::Claim, Call::Complete] {
            store.inject(call, .., Fault::Delay(3 * moment));
        }
        let probe = Probe::running(move |run| async move {
            tokio::time::sleep(3 * moment).await;
            Ok(run.created())
        });
        let api = Api::new(required(DynStore::new(store)), &probe);
        let first = tokio::time::timeout(moments * moment, api.send(keyed("K"))).await;
        tokio::time::sleep(Duration::from_secs(1)).await;
        let retry = api.send(keyed("K")).await;
        assert_eq!(
            (retry.status, &*retry.body),
            (StatusCode::CREATED, &b"{\"n\":1}"[..])
        );
        assert_eq!(probe.runs(), 1, "dropped after {moments} ms");
        if first.is_ok() {
            assert!(moments > 8, "it has three parts");
            return;
        }
    }
}

#[tokio::test]
async fn f03_a_client_that_pipelines_and_leaves_finds_its_answer() {
    let gate = Gate::closed();
    let api = Api::new(required(memory()), &Probe::behind(&gate));
    let server = api.serve().await;
    let mut wire = Wire::open(&server).await;
    // While bytes are unread, the server does not notice that the client left.
    for key in ["K", "L"] {
        let lines = format!("Idempotency-Key: {key}\r\n");
        wire.write(post("/count", &lines, "{\"amount\":1}")).await;
    }
    gate.arrival().await;
    drop(wire);
    settle().await;
    gate.open();
    let replay = eventually(async || {
        let answer = api.send(keyed("K")).await;
        answer.is_replay().then_some(answer)
    })
    .await;
    assert_eq!(replay.body, "{\"n\":1}");
}

#[tokio::test]
async fn f04_a_retry_gets_the_whole_answer_after_a_broken_download() {
    let probe = Probe::answering(|run| {
        let mut response = run.created();
        *response.body_mut() = vec![b'x'; 900_000].into();
        response
    });
    let api = Api::new(required(memory()), &probe);
    let server = api.serve().await;
    let mut wire = Wire::open(&server).await;
    wire.write(keyed_post("K")).await;
    assert!(wire.exactly(600).await.starts_with(b"HTTP/1.1 201"));
    drop(wire);
    let replay = api.send(keyed("K")).await;
    assert!(replay.is_replay());
    assert_eq!(replay.body, vec![b'x'; 900_000]);
    assert_eq!(probe.runs(), 1);
}

#[tokio::test(start_paused = true)]
async fn f08_a_dripping_body_is_refused_and_claims_nothing() {
    let (store, probe) = (Faulty::new(MemoryStore::new()), Probe::counting());
    let api = Api::new(required(DynStore::new(store.clone())), &probe);
    let (frames, body) = streamed();
    let dripping = tokio::spawn(async move {
        let mut sent = 0;
        while frames.send(Ok(data("x"))).is_ok() {
            sent += 1;
            tokio::time::sleep(Duration::from_secs(1)).await;
        }
        sent
    });
    let late = api.send(keyed("K").body(body)).await;
    late.assert_problem(408, "body-timeout");
    // A byte each second is below the least rate.
    assert!((10..=12).contains(&dripping.await.unwrap()));
    assert_eq!((probe.runs(), store.calls()), (0, vec![]));
}

#[tokio::test]
async fn f12_a_recompressed_body_matches_where_an_outer_layer_unpacks_it() {
    let probe = Probe::counting();
    let service = Api::new(required(memory()), &probe).service();
    let packed = |time| {
        keyed("K")
            .header("content-encoding", "gzip")
            .body(gzip(time, b"{\"amount\":1}"))
    };
    // By the bytes received, another time of compression is another request.
    let first = send(service.clone(), packed(1)).await;
    first.assert_run(1);
    send(service.clone(), packed(1))
        .await
        .assert_replay_of(&first);
    send(service, packed(2))
        .await
        .assert_problem(422, "key-reused");

    let service = Api::new(required(memory()), &probe).service();
    let unpacking = RequestDecompressionLayer::new().layer(service);
    let first = send(unpacking.clone(), packed(1)).await;
    first.assert_run(2);
    send(unpacking.clone(), packed(2))
        .await
        .assert_replay_of(&first);
    send(unpacking, keyed("K")).await.assert_replay_of(&first);
}

/// A gzip file of one stored block, with this time of compression.
fn gzip(time: u8, content: &[u8]) -> Vec<u8> {
    let length = u16::try_from(content.len()).unwrap();
    let mut file = vec![0x1f, 0x8b, 8, 0, time, 0, 0, 0, 0, 0xff, 1];
    file.extend(length.to_le_bytes());
    file.extend((!length).to_le_bytes());
    file.extend(content);
    file.extend(crc32fast::hash(content).to_le_bytes());
    file.extend(u32::from(length).to_le_bytes());
    file
}

#[tokio::test]
async fn f16_request_trailers_reach_the_handler_and_do_not_count() {
    let probe = Probe::running(|run| async move {
        let mut response = run.created();
        let read = run.request.into_body().collect().await.unwrap();
        let sum = read.trailers().unwrap()["x-sum"].clone();
        response.headers_mut().insert("x-sum", sum);
        Ok(response)
    });
    let api = Api::new(required(memory()), &probe);
    let trailing = |sum| {
        let mut trailers = HeaderMap::new();
        trailers.insert("x-sum", HeaderValue::from_static(sum));
        keyed("K").body(chunks_and_trailers(&["{}"], trailers))
    };
    let first = api.send(trailing("1")).await;
    assert_eq!(first.header("x-sum"), Some("1"));
    api.send(trailing("2")).await.assert_replay_of(&first);
    assert_eq!(probe.runs(), 1);
}

#[tokio::test]
async fn f20_web_sockets_and_tunnels_pass_with_their_upgrade_extension() {
    /// Stands for the server's own extension.
    #[derive(Clone)]
    struct OnUpgrade;

    let store = MemoryStore::new();
    let probe = Probe::answering(|run| {
        assert!(run.request.extensions().get::<OnUpgrade>().is_some());
        run.status(101)
    });
    let api = Api::new(required(DynStore::new(store.clone())), &probe);
    for (number, method) in [(1, Method::GET), (2, Method::CONNECT), (3, Method::GET)] {
        let mut ask = keyed("K").method(method).header("upgrade", "websocket");
        ask.0.extensions_mut().insert(OnUpgrade);
        let answer = api.send(ask).await;
        answer.assert_live(101).assert_run(number);
        assert_eq!(answer.outcome, None);
    }
    assert_eq!(store.len(), 0);
}

#[tokio::test]
async fn f24_an_inner_compression_is_recorded_with_its_encoding() {
    let probe = Probe::answering(|run| {
        let mut response = run.created();
        *response.body_mut() = "compress me, ".repeat(200).into();
        response
    });
    let layer = required(memory()).build().unwrap();
    let service = layer.layer(CompressionLayer::new().layer(probe.clone()));
    let first = send(
        service.clone(),
        keyed("K").header("accept-encoding", "gzip"),
    )
    .await;
    assert_eq!(first.header("content-encoding"), Some("gzip"));
    assert!(first.body.len() < 2_600);
    // A replay is the first answer with its encoding, for any client. Only a
    // compression layer outside of this one serves each client its own encoding.
    for encodings in ["gzip", "identity"] {
        let retry = keyed("K").header("accept-encoding", encodings);
        send(service.clone(), retry).await.assert_replay_of(&first);
    }
    assert_eq!(probe.runs(), 1);
}

proptest::proptest! {
    #[test]
    fn f25_any_header_lines_replay_unchanged(
        lines in vec((0..NAMES.len(), vec(prop_oneof![0x20_u8..=0x7e, 0x80_u8..=0xff], 0..20)), 0..20)
    ) {
        let sent = lines.clone();
        let probe = Probe::answering(move |run| {
            let mut response = run.created();
            for (name, value) in &sent {
                let value = HeaderValue::from_bytes(value).unwrap();
                response.headers_mut().append(NAMES[*name].clone(), value);
            }
            response
        });
        let kept = KeptHeaders::all_but_transient().with_cookies();
        let api = Api::new(required(memory()).kept_headers(kept), &probe);
        let replay = current_thread().block_on(async {
            api.send(keyed("K")).await;
            api.send(keyed("K")).await
        });
        proptest::prop_assert!(replay.is_replay());
        for (index, name) in NAMES.iter().enumerate() {
            let of_name = lines.iter().filter(|(other, _)| *other == index);
            let expected: Vec<_> = of_name.map(|(_, value)| &value[..]).collect();
            let found = replay.headers.get_all(name).iter();
            let found: Vec<_> = found.map(HeaderValue::as_bytes).collect();
            proptest::prop_assert_eq!(found, expected, "{}", name);
        }
    }
}

const NAMES: [HeaderName; 5] = [
    header::SET_COOKIE,
    header::CONTENT_DISPOSITION,
    header::LINK,
    header::VARY,
    HeaderName::from_static("x-own"),
];

fn current_thread() -> Runtime {
    Builder::new_current_thread().enable_all().build().unwrap()
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn f30_another_thread_renews_the_lease_of_a_blocking_handler() {
    let store = Faulty::new(MemoryStore::new());
    let beats = store.clone();
    let probe = Probe::answering(move |run| {
        let begun = Instant::now();
        while beats.calls_of(Call::Renew) < 3 {
            assert!(begun.elapsed() < Duration::from_secs(30), "no heartbeat");
            std::thread::sleep(Duration::from_millis(10));
        }
        run.created()
    });
    let short = required(DynStore::new(store)).lease(Duration::from_millis(300));
    let api = Api::new(short, &probe);
    api.spawn(keyed("K")).await.unwrap().assert_run(1);
}

#[test]
fn f30_a_handler_that_blocks_the_only_thread_answers_as_winner() {
    let store = MemoryStore::new();
    let short = {
        let store = store.clone();
        move || {
            required(DynStore::new(store.clone()))
                .lease(Duration::from_millis(300))
                .recovery(Recovery::Rerun)
        }
    };
    let (go_on, wait) = mpsc::channel::<()>();
    let wait = std::sync::Mutex::new(wait);
    let (begin, begun) = mpsc::channel();
    let blocking = Probe::answering(move |run| {
        begin.send(()).unwrap();
        wait.lock().unwrap().recv().unwrap();
        run.created()
    });
    let owner = Api::new(short(), &blocking);
    let blocked = std::thread::spawn(move || {
        current_thread().block_on(async { owner.send(keyed("K")).await })
    });
    begun.recv().unwrap();
    let winner = Api::new(short(), &Probe::statuses(&[202]));
    let won = current_thread().block_on(eventually(async || {
        let answer = winner.send(keyed("K")).await;
        (answer.status == 202).then_some(answer)
    }));
    go_on.send(()).unwrap();
    blocked.join().unwrap().assert_replay_of(&won);
}

#[test]
fn f32_f40_a_request_that_kills_each_process_ends_as_unknown() {
    let store = MemoryStore::new();
    let gate = Gate::closed();
    let probe = Probe::behind(&gate);
    let process = || {
        let builder = required(DynStore::new(store.clone()))
            .lease(Duration::from_millis(300))
            .recovery(Recovery::Rerun)
            .max_attempts(3);
        Api::new(builder, &probe)
    };
    for _ in 0..3 {
        let runtime = current_thread();
        runtime.block_on(async {
            let api = process();
            loop {
                let mut asked = api.spawn(keyed("K"));
                tokio::select! {
                    () = gate.arrival() => break,
                    refused = &mut asked => {
                        refused.unwrap().assert_problem(409, "request-in-progress");
                        tokio::time::sleep(Duration::from_millis(20)).await;
                    }
                }
            }
        });
        // As in a crash, the handler and the heartbeats end.
        drop(runtime);
    }
    current_thread().block_on(async {
        let api = process();
        let told = eventually(async || {
            let answer = api.send(keyed("K")).await;
            answer.retry_after().is_none().then_some(answer)
        })
        .await;
        told.assert_problem(409, "outcome-unknown");
        api.send(keyed("K"))
            .await
            .assert_problem(409, "outcome-unknown");
    });
    assert_eq!(probe.runs(), 3);
}

#[tokio::test(start_paused = true)]
async fn f43_heartbeats_stop_however_their_owner_ends() {
    let store = Faulty::new(MemoryStore::new());
    let probe = Probe::running(|run| async move {
        let mut response = run.created();
        match run.operation().key().as_str() {
            "released" => *response.status_mut() = StatusCode::SERVICE_UNAVAILABLE,
            "panic" => panic!("as the test wants it"),
            "error" => return Err(Failure("as the test wants it")),
            "left" => pending().await,
            "live" => {
                let events = HeaderValue::from_static("text/event-stream");
                response.headers_mut().insert(header::CONTENT_TYPE, events);
            }
            _ => {}
        }
        Ok(response)
    });
    let builder = required(DynStore::new(store.clone())).disconnect(Disconnect::Cancel);
    let api = Api::new(builder, &probe);
    for key in ["recorded", "released", "panic", "error", "live", "left"] {
        let api = api.clone();
        let client = tokio::spawn(async move {
            if let Ok(response) = api.respond(keyed(key).0).await {
                Answer::of(response).await;
            }
        });
        // Long enough for heartbeats of an owner that still runs.
        tokio::time::sleep(Duration::from_secs(60)).await;
        client.abort();
        settle().await;
        let beats = store.calls_of(Call::Renew);
        assert_eq!(beats > 0, key == "left", "{key}");
        tokio::time::sleep(Duration::from_secs(3600)).await;
        assert_eq!(store.calls_of(Call::Renew), beats, "{key}");
    }
}

#[tokio::test]
async fn f49_clones_of_a_router_share_max_waiters() {
    let gate = Gate::closed();
    let probe = Probe::behind(&gate);
    let layer = required(memory())
        .wait(Duration::from_secs(60))
        .max_waiters(1)
        .build()
        .unwrap();
    let handler = tower::service_fn(move |request: Request<Body>| {
        let probe = probe.clone();
        async move { Ok::<_, std::convert::Infallible>(probe.oneshot(request).await.unwrap()) }
    });
    let app = Router::new().fallback_service(handler).layer(layer);
    let owner = tokio::spawn(send(app.clone(), keyed("K")));
    gate.arrival().await;
    let waiter = tokio::spawn(send(app.clone(), keyed("K")));
    settle().await;
    send(app.clone(), keyed("K"))
        .await
        .assert_problem(409, "request-in-progress");
    assert!(!waiter.is_finished());
    gate.open();
    let owner = owner.await.unwrap();
    waiter.await.unwrap().assert_replay_of(&owner);
}

#[tokio::test]
async fn f55_a_pool_without_a_free_connection_gives_503_until_freed() {
    check(Place::postgres().await, async |place: &Place| {
        let store = PostgresStore::builder(place.address().parse().unwrap())
            .max_connections(1)
            .acquire_timeout(Duration::from_millis(200))
            .lock_timeout(Duration::from_secs(20))
            .statement_timeout(Duration::from_secs(20))
            .connect()
            .await
            .unwrap();
        let probe = Probe::counting();
        let api = Api::new(required(DynStore::new(store.clone())), &probe);
        api.send(keyed("K")).await.assert_run(1);
        let fence = record(&store, "K").await.unwrap().fence;
        let mut other = PgConnection::connect(&place.address()).await.unwrap();
        let mut lock = other.begin().await.unwrap();
        run(&mut lock, "LOCK TABLE idempotency_records").await;
        // Occupies the only connection while it waits for the table.
        let busy = tokio::spawn({
            let store = store.clone();
            async move { store.forget(&named("K"), fence).await }
        });
        let refused = eventually(async || {
            let answer = api.send(keyed("L")).await;
            (answer.status != 201).then_some(answer)
        })
        .await;
        refused.assert_problem(503, "store-unavailable");
        assert!(refused.retry_after() >= Some(1));
        let ran = probe.runs();
        lock.rollback().await.unwrap();
        let _ = busy.await.unwrap().unwrap();
        api.send(keyed("M")).await.assert_run(ran + 1);
        store.close().await;
    })
    .await;
}

#[tokio::test]
async fn f57_a_claim_blocked_by_another_transaction_times_out() {
    check(Place::postgres().await, async |place: &Place| {
        let store = PostgresStore::builder(place.address().parse().unwrap())
            .lock_timeout(Duration::from_millis(300))
            .connect()
            .await
            .unwrap();
        let mut other = PgConnection::connect(&place.address()).await.unwrap();
        let mut claiming = other.begin().await.unwrap();
        run(
            &mut claiming,
            "INSERT INTO idempotency_records
                 (scope, key, state, attempt, takeovers, fence, claimed_at, lease_until,
                  expires_at, operation, token, fingerprint)
             SELECT 'acme-7', 'K', 1, 1, 0, 1, 1, 1, 1, decode(repeat('00', 16), 'hex'),
                  decode(repeat('00', 16), 'hex'), decode(repeat('00', 84), 'hex')",
        )
        .await;
        let hour = Duration::from_secs(3600);
        let claim = Claim::new(crate::api::fingerprint(keyed("K")).await, hour, hour);
        let error = store.claim(&named("K"), &claim).await.unwrap_err();
        assert_eq!(error.kind(), StoreErrorKind::TimedOut);
        claiming.rollback().await.unwrap();
        let claimed = store.claim(&named("K"), &claim).await.unwrap();
        assert!(matches!(claimed, Claimed::Acquired(_)), "{claimed:?}");
        store.close().await;
    })
    .await;
}

#[tokio::test(start_paused = true)]
async fn f97_a_herd_of_waiters_is_bounded_in_number_and_reads() {
    let store = Faulty::new(MemoryStore::new());
    let gate = Gate::closed();
    let builder = required(DynStore::new(store.clone()))
        .wait(Duration::from_secs(20))
        .max_waiters(100)
        .max_waiters_per_scope(100);
    let api = Api::new(builder, &Probe::behind(&gate));
    let owner = api.spawn(keyed("K"));
    gate.arrival().await;
    let herd: Vec<_> = (0..2_000).map(|_| api.spawn(keyed("K"))).collect();
    tokio::time::sleep(Duration::from_millis(1)).await;
    let waiting = herd.iter().filter(|asked| !asked.is_finished()).count();
    assert_eq!(waiting, 100);
    // Each waiter reads once a second at most, to notice an owner in another process.
    tokio::time::sleep(Duration::from_secs(10)).await;
    let reads = store.calls_of(Call::Read);
    assert!((500..=2_000).contains(&reads), "{reads} reads");
    gate.open();
    let owner = owner.await.unwrap();
    let mut replays = 0;
    for asked in herd {
        let answer = asked.await.unwrap();
        match answer.is_replay() {
            true => replays += 1,
            false => drop(answer.assert_problem(409, "request-in-progress")),
        }
    }
    owner.assert_run(1);
    assert_eq!(replays, 100);
}

#[tokio::test]
async fn f99_a_marker_that_the_client_sends_means_nothing() {
    let api = Api::new(required(memory()), &Probe::counting());
    let spoofed = || keyed("K").header("idempotent-replayed", "true");
    let first = api.send(spoofed()).await;
    first.assert_run(1);
    api.send(spoofed()).await.assert_replay_of(&first);
}

#[tokio::test]
async fn f100_a_replay_keeps_the_cache_control_of_its_response() {
    let probe = Probe::answering(|run| {
        let mut response = run.created();
        let private = HeaderValue::from_static("private, max-age=5");
        response
            .headers_mut()
            .insert(header::CACHE_CONTROL, private);
        response
    });
    let api = Api::new(required(memory()), &probe);
    let first = api.send(keyed("K")).await;
    let replay = api.send(keyed("K")).await;
    replay.assert_replay_of(&first);
    assert_eq!(replay.header("cache-control"), Some("private, max-age=5"));
    // Refusals are not cached.
    let refused = api.send(keyed("K").body("{}")).await;
    refused.assert_problem(422, "key-reused");
    assert_eq!(refused.header("cache-control"), Some("no-store"));
}

#[tokio::test(start_paused = true)]
async fn f59_a_claim_retries_when_its_record_vanishes() {
    let store = Faulty::new(MemoryStore::new());
    let probe = Probe::counting();
    let api = Api::new(required(DynStore::new(store.clone())), &probe);
    store.inject(Call::Claim, ..=2, Fault::Vanish);
    api.send(keyed("K")).await.assert_run(1);
    assert_eq!(store.calls_of(Call::Claim), 3);
    assert!(record(&store, "K").await.is_some());

    store.inject(Call::Claim, .., Fault::Vanish);
    let refused = api.send(keyed("L")).await;
    refused.assert_problem(503, "store-unavailable");
    assert!(refused.retry_after() >= Some(1));
    assert_eq!(probe.runs(), 1);
    store.heal();
    api.send(keyed("L")).await.assert_run(2);
}

/// Moves all times in the rows an hour into the past, as if the server's clock jumped
/// forward.
const CLOCK_JUMPS_FORWARD: &str = "UPDATE idempotency_records SET
    fence = fence - 3600000000,
    claimed_at = claimed_at - 3600000000,
    lease_until = lease_until - 3600000000,
    expires_at = expires_at - 3600000000";
const CLOCK_JUMPS_BACK: &str = "UPDATE idempotency_records SET
    fence = fence + 3600000000,
    claimed_at = claimed_at + 3600000000,
    lease_until = lease_until + 3600000000,
    expires_at = expires_at + 3600000000";

#[tokio::test]
async fn f81_a_clock_jumping_forward_fences_the_owner() {
    check(Place::postgres().await, async |place: &Place| {
        let gate = Gate::closed();
        let probe = Probe::behind(&gate);
        let rerun = required(place.open().await).recovery(Recovery::Rerun);
        let api = Api::new(rerun, &probe);
        let owner = api.spawn(keyed("K"));
        gate.arrival().await;
        let mut server = PgConnection::connect(&place.address()).await.unwrap();
        run(&mut server, CLOCK_JUMPS_FORWARD).await;
        let winner = api.spawn(keyed("K"));
        gate.arrival().await;
        // The owner answers first, but after the takeover.
        gate.let_one_pass();
        let lost = owner.await.unwrap();
        lost.assert_problem(409, "request-in-progress");
        gate.let_one_pass();
        let won = winner.await.unwrap();
        won.assert_run(2);
        api.send(keyed("K")).await.assert_replay_of(&won);
        assert_eq!(probe.runs(), 2);
    })
    .await;
}

#[tokio::test]
async fn f81_a_heartbeat_repairs_the_lease_after_a_clock_jumps_back() {
    check(Place::postgres().await, async |place: &Place| {
        let gate = Gate::closed();
        let probe = Probe::behind(&gate);
        let store = place.open().await;
        let lease = Duration::from_secs(3);
        let rerun = required(store.clone())
            .lease(lease)
            .recovery(Recovery::Rerun);
        let api = Api::new(rerun, &probe);
        let owner = api.spawn(keyed("K"));
        gate.arrival().await;
        let mut server = PgConnection::connect(&place.address()).await.unwrap();
        run(&mut server, CLOCK_JUMPS_BACK).await;
        let refused = api.send(keyed("K")).await;
        assert_eq!(
            refused.outcome,
            Some(Outcome::Refused(RejectionKind::RequestInProgress))
        );
        // The age of the claim is negative; `Retry-After` is still one second.
        assert_eq!(refused.retry_after(), Some(1));
        eventually(async || {
            let state = record(&store, "K").await.unwrap().state;
            let RecordState::InProgress { lease_left } = state else {
                panic!("{state:?}");
            };
            lease_left.is_none_or(|left| left <= lease).then_some(())
        })
        .await;
        gate.open();
        let first = owner.await.unwrap();
        first.assert_run(1);
        api.send(keyed("K")).await.assert_replay_of(&first);
        assert_eq!(probe.runs(), 1);
    })
    .await;
}

async fn run(connection: &mut PgConnection, statement: &'static str) {
    raw_sql(AssertSqlSafe(statement))
        .execute(connection)
        .await
        .unwrap();
}
