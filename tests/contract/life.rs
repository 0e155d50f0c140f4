//! Rules 73 to 77: unreadable records, the end of a process, events and metrics,
//! and invalid settings.

use std::{collections::BTreeMap, time::Duration};

use bytes::Bytes;
use http::{HeaderValue, Method, StatusCode, header};
use tower_idempotency::{
    BuildError, DynStore, Fingerprinting, IdempotencyBuilder, KeySyntax, MemoryStore, Store,
    StoreFailure,
    store::{RecordState, admin::RecordedResponse},
};

use crate::{
    api::{Api, ask, eventually, keyed, optional, record, required, settle},
    crowd::completed_elsewhere,
    faulty::{Call, Fault, Faulty, corrupt},
    probe::{Failure, Gate, Probe, data, streamed},
    stores::{Place, memory, on_each_store},
    told::Told,
};

on_each_store! {
    rule_73_an_unreadable_record_answers_503_and_never_runs
    rule_74_a_run_finishes_and_is_recorded_within_the_drain
}

async fn rule_73_an_unreadable_record_answers_503_and_never_runs(place: &Place) {
    let store = place.open().await;
    let probe = Probe::counting();
    let sound = RecordedResponse::new(http::Response::new(Bytes::from_static(b"hello")))
        .unwrap()
        .encode();
    let altered = |index: usize, to: u8| {
        let mut bytes = sound.to_vec();
        bytes[index] = to;
        Bytes::from(bytes)
    };
    let last = sound.len() - 1;
    let unreadable = [
        Bytes::new(),
        Bytes::from_static(b"garbage"),
        sound.slice(..last),
        altered(last, b'0'),
        // Another magic, a newer version, another kind.
        altered(0, b'x'),
        altered(2, sound[2] + 1),
        altered(3, 9),
    ];
    for (index, response) in unreadable.into_iter().enumerate() {
        let key = format!("K{index}");
        completed_elsewhere(&store, &key, response).await;
        // Not even on a route that may run unguarded.
        for builder in [
            required(store.clone()),
            required(store.clone()).store_failure(StoreFailure::RunUnguarded),
        ] {
            let api = Api::new(builder, &probe);
            let (counts, refused) = counted(api.send(keyed(&key))).await;
            refused.assert_problem(503, "store-unavailable");
            assert!(refused.retry_after() >= Some(1));
            assert_eq!(counts["store-unavailable"], 1);
            assert_eq!(counts["corrupt"], 1);
        }
    }
    assert_eq!(probe.runs(), 0);
    // A sound record is still read.
    completed_elsewhere(&store, "L", sound).await;
    let replay = Api::new(required(store), &probe).send(keyed("L")).await;
    assert!(replay.is_replay());
    assert_eq!(replay.body, "hello");
}

#[tokio::test]
async fn rule_73_corruption_reported_by_the_store_is_counted() {
    let faulty = Faulty::new(MemoryStore::new());
    faulty.inject(Call::Claim, .., corrupt());
    let probe = Probe::counting();
    let api = Api::new(required(DynStore::new(faulty)), &probe);
    let (counts, refused) = counted(api.send(keyed("K"))).await;
    refused.assert_problem(503, "store-unavailable");
    assert_eq!((counts["store-unavailable"], counts["corrupt"]), (1, 1));
    assert_eq!(probe.runs(), 0);
}

#[tokio::test(start_paused = true)]
async fn rule_73_waiter_on_a_record_that_becomes_unreadable_gets_503() {
    let (faulty, gate) = (Faulty::new(MemoryStore::new()), Gate::closed());
    faulty.inject(Call::Read, .., corrupt());
    let minute = Duration::from_secs(60);
    let patient = required(DynStore::new(faulty)).wait(minute);
    let api = Api::new(patient, &Probe::behind(&gate));
    let owner = api.spawn(keyed("K"));
    gate.arrival().await;
    let (counts, waiter) = counted(tokio::time::timeout(minute / 2, api.send(keyed("K")))).await;
    let waiter = waiter.expect("it waits");
    waiter.assert_problem(503, "store-unavailable");
    assert_eq!(counts["corrupt"], 1);
    gate.open();
    owner.await.unwrap().assert_live(201);
}

async fn rule_74_a_run_finishes_and_is_recorded_within_the_drain(place: &Place) {
    let store = place.open().await;
    let gate = Gate::closed();
    let probe = Probe::behind(&gate);
    let api = Api::new(required(store.clone()), &probe);
    let attended = api.spawn(keyed("K"));
    let left = api.spawn(keyed("L"));
    gate.arrival().await;
    gate.arrival().await;
    left.abort();

    let layer = api.layer.clone();
    let draining = tokio::spawn(async move { layer.drain(Duration::from_secs(60)).await });
    settle().await;
    let refused = api.send(keyed("M")).await;
    refused.assert_problem(503, "draining");
    assert!(refused.retry_after() >= Some(1));
    // Replays are refused too; unguarded requests pass.
    api.send(keyed("K")).await.assert_problem(503, "draining");
    assert!(!draining.is_finished());
    gate.open();
    assert_eq!(draining.await.unwrap().left(), 0);
    attended.await.unwrap().assert_live(201);
    for key in ["K", "L"] {
        let state = record(&store, key).await.unwrap().state;
        assert!(matches!(state, RecordState::Completed { .. }), "{state:?}");
    }
    assert!(record(&store, "M").await.is_none());
    api.send(keyed("K").method(Method::GET))
        .await
        .assert_live(201);
}

#[test]
fn rule_74_a_run_that_outlasts_the_drain_keeps_its_lease() {
    let runtime = || {
        tokio::runtime::Builder::new_current_thread()
            .enable_all()
            .build()
            .unwrap()
    };
    let store = MemoryStore::new();
    let probe = Probe::behind(&Gate::closed());
    let short = || required(DynStore::new(store.clone())).lease(Duration::from_millis(300));
    let process = runtime();
    process.block_on(async {
        let api = Api::new(short(), &probe);
        let _client = api.spawn(keyed("K"));
        settle().await;
        let drained = api.layer.drain(Duration::from_millis(50)).await;
        assert_eq!(drained.left(), 1);
    });
    // Ends the process and its tasks.
    drop(process);
    runtime().block_on(async {
        let api = Api::new(short(), &probe);
        let before = api.send(keyed("K")).await;
        before.assert_problem(409, "request-in-progress");
        let after = eventually(async || {
            let answer = api.send(keyed("K")).await;
            answer.retry_after().is_none().then_some(answer)
        })
        .await;
        after.assert_problem(409, "outcome-unknown");
    });
    assert_eq!(probe.runs(), 1);
}

#[tokio::test(start_paused = true)]
async fn rule_74_dropping_a_drain_stops_no_run() {
    let gate = Gate::closed();
    let api = Api::new(required(memory()), &Probe::behind(&gate));
    let owner = api.spawn(keyed("K"));
    gate.arrival().await;
    let hurry = Duration::from_secs(1);
    let waited = tokio::time::timeout(hurry, api.layer.drain(Duration::from_secs(60))).await;
    assert!(waited.is_err());
    gate.open();
    owner.await.unwrap().assert_run(1);
    assert_eq!(api.layer.drain(hurry).await.left(), 0);
}

#[tokio::test(start_paused = true)]
async fn rule_75_each_outcome_is_logged_and_counted_once_without_secrets() {
    let told = Told::listen();
    let faulty = Faulty::new(MemoryStore::new());
    let shared = || DynStore::new(faulty.clone());
    let gate = Gate::closed();
    let secret = |key: &str| {
        ask("/count")
            .key(&format!("k3y-s3cr3t-{key}"))
            .from("acct-s3cr3t")
            .body("{\"b0dy\":\"s3cr3t\"}")
    };
    let probe = {
        let held = gate.clone();
        Probe::running(move |run| {
            let gate = held.clone();
            async move {
                let mut response = run.created();
                response
                    .headers_mut()
                    .insert("x-answer", HeaderValue::from_static("s3cr3t"));
                match run.operation().key().as_str().rsplit('-').next().unwrap() {
                    "released" => *response.status_mut() = StatusCode::SERVICE_UNAVAILABLE,
                    "unknown" => return Err(Failure("unknown")),
                    "panics" => panic!("s3cr3t"),
                    "live" => {
                        let event_stream = HeaderValue::from_static("text/event-stream");
                        response
                            .headers_mut()
                            .insert(header::CONTENT_TYPE, event_stream);
                    }
                    "slow" => gate.pass().await,
                    _ => *response.body_mut() = "answ3r-s3cr3t".into(),
                }
                Ok(response)
            }
        })
    };
    let api = Api::new(required(shared()).max_request_body(100), &probe);
    let mut expected = BTreeMap::new();
    let mut expect = |outcome: &'static str| *expected.entry(outcome).or_insert(0) += 1;

    api.send(secret("a")).await.assert_live(201);
    expect("recorded");
    for _ in 0..2 {
        assert!(api.send(secret("a")).await.is_replay());
        expect("replayed");
    }
    api.send(secret("a").body("{}"))
        .await
        .assert_problem(422, "key-reused");
    expect("key-reused");
    api.send(secret("released")).await.assert_live(503);
    expect("released");
    assert!(api.respond(secret("unknown").0).await.is_err());
    expect("unknown");
    api.send(secret("unknown"))
        .await
        .assert_problem(409, "outcome-unknown");
    expect("outcome-unknown");
    api.send(secret("panics"))
        .await
        .assert_problem(500, "handler-panicked");
    expect("unknown");
    api.send(secret("live")).await.assert_live(201);
    expect("streamed");
    settle().await;
    expect("tombstone");
    api.send(secret("live"))
        .await
        .assert_problem(409, "response-not-replayable");
    expect("response-not-replayable");

    // Before there is a claim.
    api.send(secret("a").without("idempotency-key"))
        .await
        .assert_problem(400, "key-missing");
    expect("key-missing");
    api.send(secret("a").key("\"s3cr3t"))
        .await
        .assert_problem(400, "key-invalid");
    expect("key-invalid");
    api.send(secret("a").without("x-account"))
        .await
        .assert_problem(403, "caller-unknown");
    expect("caller-unknown");
    api.send(secret("a").body("s3cr3t".repeat(50)))
        .await
        .assert_problem(413, "body-too-large");
    expect("body-too-large");
    let (frames, body) = streamed();
    frames.send(Err(Failure("s3cr3t"))).unwrap();
    api.send(secret("a").body(body))
        .await
        .assert_problem(400, "body-invalid");
    expect("body-invalid");
    let (frames, body) = streamed();
    frames.send(Ok(data("s3cr3t"))).unwrap();
    api.send(secret("a").body(body))
        .await
        .assert_problem(408, "body-timeout");
    expect("body-timeout");

    // Clients that leave: one while it waits, one while its handler runs.
    let waiting = Api::new(required(shared()).wait(Duration::from_secs(60)), &probe);
    let owner = waiting.spawn(secret("slow"));
    gate.arrival().await;
    api.send(secret("slow"))
        .await
        .assert_problem(409, "request-in-progress");
    expect("request-in-progress");
    let waiter = waiting.spawn(secret("slow"));
    settle().await;
    waiter.abort();
    settle().await;
    expect("left");
    owner.abort();
    settle().await;
    gate.open();
    settle().await;
    expect("recorded");
    expect("client-gone");

    // A store that fails.
    faulty.inject(Call::Complete, 4.., Fault::unavailable());
    api.send(secret("late")).await;
    expect("unrecorded");
    faulty.heal();
    tokio::time::sleep(Duration::from_secs(60)).await;
    expect("recorded-late");
    faulty.inject_all(Fault::unavailable());
    api.send(secret("b"))
        .await
        .assert_problem(503, "store-unavailable");
    expect("store-unavailable");
    let probe = Probe::counting();
    let open = Api::new(
        required(shared()).store_failure(StoreFailure::RunUnguarded),
        &probe,
    );
    open.send(secret("b")).await;
    expect("unguarded");
    faulty.heal();

    // Unguarded requests have no event and no count.
    let unkeyed = Api::new(optional(shared()), &probe);
    unkeyed
        .send(secret("c").without("idempotency-key"))
        .await
        .assert_live(201);
    unkeyed
        .send(secret("c").method(Method::GET))
        .await
        .assert_live(201);

    let _ = api.layer.drain(Duration::from_secs(1)).await;
    api.send(secret("a")).await.assert_problem(503, "draining");
    expect("draining");

    let (events, counts, text) = told.so_far();
    assert_eq!(events, expected);
    assert_eq!(counts, expected);
    for secret in ["s3cr3t", "acct", "b0dy", "k3y", "answ3r"] {
        assert!(!text.contains(secret), "{secret} in {text}");
    }
}

#[tokio::test]
async fn rule_75_the_outcome_is_an_extension_for_outer_layers() {
    use tower_idempotency::{Outcome, RejectionKind};
    let api = Api::new(required(memory()), &Probe::counting());
    assert_eq!(api.send(keyed("K")).await.outcome, Some(Outcome::Recorded));
    assert_eq!(api.send(keyed("K")).await.outcome, Some(Outcome::Replayed));
    let missing = api.send(ask("/count")).await.outcome;
    assert_eq!(missing, Some(Outcome::Refused(RejectionKind::KeyMissing)));
    assert_eq!(missing.unwrap().name(), "key-missing");
}

#[tokio::test]
async fn rule_75_debug_output_shows_no_secret() {
    let store = memory();
    let probe = Probe::answering(|run| {
        let operation = run.operation();
        let mut response = run.created();
        *response.body_mut() = format!(
            "{operation:?} {:?} {:?}",
            operation.key(),
            operation.scope()
        )
        .into();
        response
    });
    let api = Api::new(required(store.clone()), &probe);
    let answer = api
        .send(keyed("k3y-s3cr3t").from("acct-s3cr3t").body("b0dy-s3cr3t"))
        .await;
    let name = tower_idempotency::store::RecordName::new(
        tower_idempotency::Scope::new("acct-s3cr3t").unwrap(),
        tower_idempotency::Key::new("k3y-s3cr3t"),
    );
    let record = store.read(&name).await.unwrap().unwrap();
    let token = format!("{:?}", record.token.as_bytes());
    let text = format!(
        "{} {name:?} {record:?} {:?}",
        String::from_utf8_lossy(&answer.body),
        api.layer,
    );
    assert!(!text.contains("s3cr3t") && !text.contains(&token), "{text}");
}

#[test]
fn rule_77_durations_that_cannot_be_are_refused_by_name() {
    type Set = fn(IdempotencyBuilder<DynStore>, Duration) -> IdempotencyBuilder<DynStore>;
    let settings: [(&str, Set); 10] = [
        ("lease", |builder, duration| builder.lease(duration)),
        ("heartbeat", |builder, duration| builder.heartbeat(duration)),
        ("max_run_time", |builder, duration| {
            builder.max_run_time(duration)
        }),
        ("retention", |builder, duration| builder.retention(duration)),
        ("unknown_retention", |builder, duration| {
            builder.unknown_retention(duration)
        }),
        ("request_body_timeout", |builder, duration| {
            builder.request_body_timeout(duration)
        }),
        ("response_body_timeout", |builder, duration| {
            builder.response_body_timeout(duration)
        }),
        ("store_timeout", |builder, duration| {
            builder.store_timeout(duration)
        }),
        ("late_recording_timeout", |builder, duration| {
            builder.late_recording_timeout(duration)
        }),
        ("retention_for", |builder, duration| {
            builder.retention_for(StatusCode::OK, duration)
        }),
    ];
    let century = Duration::from_secs(100 * 365 * 24 * 3600);
    for (setting, set) in settings {
        for duration in [
            Duration::ZERO,
            Duration::from_nanos(1),
            century,
            Duration::MAX,
        ] {
            refuses(set(required(memory()), duration), setting);
        }
        set(required(memory()), Duration::from_secs(30))
            .heartbeat(SECOND)
            .store_timeout(SECOND)
            .lease(3 * SECOND)
            .build()
            .unwrap();
    }
    // A wait of zero is valid; a wait without an end is not.
    required(memory()).wait(Duration::ZERO).build().unwrap();
    refuses(required(memory()).wait(Duration::MAX), "wait");
}

#[test]
fn rule_77_durations_that_contradict_one_another_are_refused_by_name() {
    let builder = || required(memory());
    refuses(builder().lease(30 * SECOND).heartbeat(11 * SECOND), "lease");
    refuses(builder().heartbeat(11 * SECOND), "lease");
    builder()
        .lease(30 * SECOND)
        .heartbeat(10 * SECOND)
        .build()
        .unwrap();
    builder().lease(SECOND).build().unwrap();

    refuses(builder().retention(29 * SECOND), "retention");
    refuses(
        builder().unknown_retention(29 * SECOND),
        "unknown_retention",
    );
    refuses(builder().max_run_time(29 * SECOND), "max_run_time");
    refuses(
        builder().retention_for(StatusCode::OK, 29 * SECOND),
        "retention_for",
    );
    refuses(
        builder()
            .lease(24 * 3600 * SECOND + SECOND)
            .max_run_time(48 * 3600 * SECOND),
        "retention",
    );
    // The message names the setting, the limit and the value.
    let message = builder()
        .retention(29 * SECOND)
        .build()
        .unwrap_err()
        .to_string();
    assert!(message.contains("retention") && message.contains("29s") && message.contains("30s"));
}

#[test]
fn rule_77_other_settings_that_cannot_be_are_refused_by_name() {
    let builder = || required(memory());
    for safe in [Method::GET, Method::HEAD, Method::OPTIONS, Method::TRACE] {
        let message = refuses(builder().methods([Method::POST, safe.clone()]), "methods");
        assert!(message.contains(safe.as_str()));
    }
    refuses(builder().methods([]), "methods");
    let key = || "idempotency-key".parse().unwrap();
    refuses(builder().replay_marker(key()), "replay_marker");
    let renamed = || "x-key".parse::<http::HeaderName>().unwrap();
    refuses(
        builder().header(renamed()).replay_marker(renamed()),
        "replay_marker",
    );
    for status in [200, 201, 404, 425, 429, 500] {
        let status = StatusCode::from_u16(status).unwrap();
        refuses(builder().mismatch_status(status), "mismatch_status");
    }

    refuses(builder().max_waiters(0), "max_waiters");
    refuses(builder().max_waiters(usize::MAX), "max_waiters");
    refuses(builder().max_in_flight(0), "max_in_flight");
    refuses(builder().max_in_flight(usize::MAX), "max_in_flight");
    refuses(builder().max_buffered_bytes(0), "max_buffered_bytes");
    refuses(
        builder().max_buffered_bytes(usize::MAX),
        "max_buffered_bytes",
    );
    refuses(
        builder().max_buffered_bytes(1_000).max_request_body(1_001),
        "max_buffered_bytes",
    );
    refuses(
        builder().max_late_recording_bytes(0),
        "max_late_recording_bytes",
    );
    refuses(
        builder().max_late_recording_bytes(usize::MAX),
        "max_late_recording_bytes",
    );
    refuses(builder().max_attempts(0), "max_attempts");
    refuses(builder().max_response_body(usize::MAX), "max_response_body");
    let roomy = builder().max_buffered_bytes(300 << 20);
    refuses(roomy.max_request_body((256 << 20) + 1), "max_request_body");

    for syntax in [
        KeySyntax::compat().length(0..=255),
        KeySyntax::compat().length(1..=1025),
        #[expect(clippy::reversed_empty_ranges, reason = "that is what is refused")]
        KeySyntax::compat().length(2..=1),
        KeySyntax::strict().uuid_v7(Duration::ZERO),
    ] {
        refuses(builder().key_syntax(syntax), "key_syntax");
    }
    let nameless = || Fingerprinting::custom("", |_, _| Vec::new());
    refuses(builder().fingerprint(nameless()), "fingerprint");
    refuses(
        builder().fingerprint(Fingerprinting::json_only(["amount"])),
        "fingerprint",
    );
    refuses(
        builder().fingerprint(Fingerprinting::json_without([""; 0])),
        "fingerprint",
    );
    refuses(
        builder().earlier_fingerprint(nameless()),
        "earlier_fingerprint",
    );
    for url in ["", "not a url", "<x>", "a\nb"] {
        refuses(builder().documentation(url), "documentation");
    }
}

#[track_caller]
fn refuses(builder: IdempotencyBuilder<DynStore>, setting: &str) -> String {
    let error: BuildError = builder.build().expect_err(setting);
    assert_eq!(error.setting(), setting, "{error}");
    let message = error.to_string();
    assert!(
        message.starts_with(&format!("`{setting}` must ")),
        "{message}"
    );
    message
}

/// The counts of the future's run, by their one label.
async fn counted<T>(done: impl Future<Output = T>) -> (BTreeMap<&'static str, u64>, T) {
    let told = Told::listen();
    let done = done.await;
    let (_, counts, _) = told.so_far();
    (counts.into_iter().collect(), done)
}

const SECOND: Duration = Duration::from_secs(1);
