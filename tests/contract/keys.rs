//! Rules 8 and 11: the white space around a key, and keys that are UUIDs.

use std::{
    sync::{
        Arc, LazyLock,
        atomic::{AtomicUsize, Ordering},
    },
    time::{Duration, SystemTime, UNIX_EPOCH},
};

use http::StatusCode;
use tower_idempotency::{
    DynStore, IdempotencyBuilder, KeySyntax, MemoryStore, Outcome, Reconciler, Recovery,
    RejectionKind, Store as _, StoreFailure,
    store::{Claim, Claimed, Release, admin::Resolution},
};

use crate::{
    api::{Api, eventually, fingerprint, keyed, named, record, required},
    client::Http2,
    crowd::claimed_elsewhere,
    faulty::{Call, Fault, Faulty},
    probe::{Gate, Probe},
    stores::{Place, memory, on_each_store},
};

on_each_store! {
    rule_11_a_uuid_is_one_key_in_any_case
    rule_11_a_stale_key_gets_what_its_record_answers
    rule_11_a_stale_key_never_runs_without_an_answer
    rule_11_a_key_that_waited_for_a_release_is_stale
}

#[tokio::test]
async fn rule_08_a_tab_around_a_key_is_refused() {
    let (store, probe) = (MemoryStore::new(), Probe::counting());
    let strict = required(DynStore::new(store.clone())).key_syntax(KeySyntax::strict());
    for builder in [required(DynStore::new(store.clone())), strict] {
        let api = Api::new(builder, &probe);
        let server = api.serve().await;
        let mut http2 = Http2::open(&server).await;
        for key in [
            "\t\"K\"",
            "\"K\"\t",
            " \t\"K\" ",
            "\tK",
            "K\t",
            "K \t",
            "\t",
        ] {
            api.send(keyed(key))
                .await
                .assert_problem(400, "key-invalid");
            let answer = http2.ask(keyed(key).0).await;
            answer.assert_problem(400, "key-invalid");
        }
    }
    assert_eq!((probe.runs(), store.len()), (0, 0));
    let api = Api::new(required(memory()), &probe);
    api.send(keyed("  \"K\"  ")).await.assert_run(1);
}

async fn rule_11_a_uuid_is_one_key_in_any_case(place: &Place) {
    let store = place.open().await;
    let probe = Probe::answering(|run| {
        let mut response = run.created();
        *response.body_mut() = run.operation().key().as_str().to_owned().into();
        response
    });
    let uuids = required(store.clone()).key_syntax(KeySyntax::compat().uuid());
    let api = Api::new(uuids, &probe);
    let canonical = "3f2504e0-4f89-41d3-9a0c-0305e82c3301";
    let first = api.send(keyed(&canonical.to_uppercase())).await;
    first.assert_run(1);
    assert_eq!(first.body, canonical);
    for spelling in [
        canonical.to_owned(),
        format!("\"{canonical}\""),
        canonical.replace('f', "F"),
    ] {
        api.send(keyed(&spelling)).await.assert_replay_of(&first);
    }
    assert!(record(&store, canonical).await.is_some());
    for digit in ["0", "f", "F"] {
        let neither = "xxxxxxxx-xxxx-xxxx-xxxx-xxxxxxxxxxxx".replace('x', digit);
        api.send(keyed(&neither))
            .await
            .assert_problem(400, "key-invalid");
    }
    // Text that only looks like a UUID keeps its case.
    let api = Api::new(required(store), &probe);
    api.send(keyed(&canonical.to_uppercase()))
        .await
        .assert_run(2);
}

async fn rule_11_a_stale_key_gets_what_its_record_answers(place: &Place) {
    let store = place.open().await;
    let probe = Probe::answering(|run| {
        let mut response = run.created();
        if let Some(status) = run.request.headers().get("x-status") {
            *response.status_mut() = StatusCode::from_bytes(status.as_bytes()).unwrap();
        }
        if run.request.headers().contains_key("x-large") {
            *response.body_mut() = vec![b'x'; 2_000].into();
        }
        response
    });
    let wide = Api::new(wide(&store).max_response_body(1_000), &probe);
    let narrow = Api::new(narrow(&store), &probe);
    let mut runs = 0;
    // One record after the other, made while its key was fresh.
    for (header, live, retry, problem) in [
        (None, 201, 201, None),
        (Some(("x-status", "504")), 504, 409, Some("outcome-unknown")),
        (
            Some(("x-large", "1")),
            201,
            409,
            Some("response-not-replayable"),
        ),
        (Some(("x-status", "503")), 503, 400, Some("key-stale")),
        (Some(("x-status", "429")), 429, 400, Some("key-stale")),
    ] {
        let key = made_ago(HALF_AN_HOUR, runs);
        let asked = || match header {
            Some((name, value)) => keyed(&key).header(name, value),
            None => keyed(&key),
        };
        let first = wide.send(asked()).await;
        assert_eq!(first.status, live);
        runs += 1;
        let answer = eventually(async || {
            let answer = narrow.send(asked()).await;
            // A streamed response leaves its tombstone a moment later.
            let running = Outcome::Refused(RejectionKind::RequestInProgress);
            (answer.outcome != Some(running)).then_some(answer)
        })
        .await;
        assert_eq!(answer.status, retry, "{answer:?}");
        match problem {
            Some(problem) => {
                answer.assert_problem(retry, problem);
            }
            None => {
                answer.assert_replay_of(&first);
            }
        }
        let other = narrow.send(asked().body("{}")).await;
        match live {
            429 => other.assert_problem(400, "key-stale"),
            _ => other.assert_problem(422, "key-reused"),
        };
        assert_eq!(probe.runs(), runs);
    }
    // In progress, with a lease and with a lapsed one.
    for (lease, problem) in [
        (HOUR, "request-in-progress"),
        (Duration::ZERO, "outcome-unknown"),
    ] {
        let key = made_ago(HALF_AN_HOUR, runs + 100);
        runs += 1;
        claimed_elsewhere(&store, &key, lease, HOUR).await;
        // SQLite counts in milliseconds.
        tokio::time::sleep(Duration::from_millis(5)).await;
        for _ in 0..2 {
            let asked = narrow.send(keyed(&key)).await;
            asked.assert_problem(409, problem);
        }
        narrow
            .send(keyed(&key).body("{}"))
            .await
            .assert_problem(422, "key-reused");
    }
}

async fn rule_11_a_stale_key_never_runs_without_an_answer(place: &Place) {
    let store = place.open().await;
    let probe = Probe::counting();
    let asked = Arc::new(AtomicUsize::new(0));
    let count = Arc::clone(&asked);
    let hook = Reconciler::new(move |_| {
        count.fetch_add(1, Ordering::SeqCst);
        async { Some(Resolution::DidNotHappen) }
    });
    let recoveries = [Recovery::Refuse, Recovery::Rerun, Recovery::Reconcile(hook)];
    for (number, recovery) in recoveries.into_iter().enumerate() {
        let narrow = Api::new(narrow(&store).recovery(recovery), &probe);
        // Absent.
        let absent = narrow.send(keyed(&made_ago(HALF_AN_HOUR, 1))).await;
        absent.assert_problem(400, "key-stale");
        assert_eq!(absent.retry_after(), None);
        assert!(record(&store, &made_ago(HALF_AN_HOUR, 1)).await.is_none());
        // Expired.
        let key = made_ago(HALF_AN_HOUR, 2);
        let claim = Claim::new(fingerprint(keyed("K")).await, HOUR, Duration::ZERO);
        let claimed = store.claim(&named(&key), &claim).await.unwrap();
        if matches!(claimed, Claimed::Acquired(_)) {
            let name = named(&key);
            let released = store.release(&name, claim.token, Release::SameRequest);
            let _ = released.await.unwrap();
        }
        eventually(async || {
            let record = record(&store, &key).await.unwrap();
            record.expires_in.is_none().then_some(())
        })
        .await;
        for body in ["{\"amount\":1}", "{}"] {
            let expired = narrow.send(keyed(&key).body(body)).await;
            expired.assert_problem(400, "key-stale");
        }
        // A lapsed claim, which a fresh key would take over or reconcile.
        let key = made_ago(HALF_AN_HOUR, 3 + number);
        claimed_elsewhere(&store, &key, Duration::ZERO, HOUR).await;
        for _ in 0..2 {
            let lost = narrow.send(keyed(&key)).await;
            lost.assert_problem(409, "outcome-unknown");
        }
    }
    assert_eq!((probe.runs(), asked.load(Ordering::SeqCst)), (0, 0));
}

async fn rule_11_a_key_that_waited_for_a_release_is_stale(place: &Place) {
    let store = place.open().await;
    let (gate, probe) = failing_behind_a_gate();
    let key = made_ago(HALF_AN_HOUR, 1);
    let owner = Api::new(wide(&store), &probe).spawn(keyed(&key));
    gate.arrival().await;
    let patient = narrow(&store).wait(Duration::from_secs(60));
    let waiter = Api::new(patient, &probe).spawn(keyed(&key));
    tokio::time::sleep(Duration::from_millis(50)).await;
    assert!(!waiter.is_finished());
    gate.open();
    owner.await.unwrap().assert_live(503);
    waiter.await.unwrap().assert_problem(400, "key-stale");
    assert_eq!(probe.runs(), 1);
}

#[tokio::test(start_paused = true)]
async fn rule_11_a_key_grows_stale_while_it_waits() {
    let (gate, probe) = failing_behind_a_gate();
    let key = made_ago(HALF_AN_HOUR, 1);
    // The handler outlives the window, and heartbeats keep its claim.
    let patient = wide(&memory()).wait(2 * HOUR).max_run_time(2 * HOUR);
    let api = Api::new(patient, &probe);
    let owner = api.spawn(keyed(&key));
    gate.arrival().await;
    let waiter = api.spawn(keyed(&key));
    tokio::time::sleep(HALF_AN_HOUR + Duration::from_secs(1)).await;
    assert!(!waiter.is_finished());
    gate.open();
    owner.await.unwrap().assert_live(503);
    waiter.await.unwrap().assert_problem(400, "key-stale");
    assert_eq!(probe.runs(), 1);
}

#[tokio::test(start_paused = true)]
async fn rule_11_a_key_that_goes_stale_during_reconciliation_never_runs() {
    let store = memory();
    let key = made_ago(HALF_AN_HOUR, 1);
    claimed_elsewhere(&store, &key, Duration::ZERO, HOUR).await;
    tokio::time::sleep(Duration::from_millis(1)).await;
    let slow = Recovery::Reconcile(Reconciler::new(|_| async {
        tokio::time::sleep(HALF_AN_HOUR + Duration::from_secs(1)).await;
        Some(Resolution::DidNotHappen)
    }));
    let probe = Probe::counting();
    let api = Api::new(wide(&store).max_run_time(2 * HOUR).recovery(slow), &probe);
    let asked = api.send(keyed(&key)).await;
    asked.assert_problem(409, "outcome-unknown");
    assert_eq!(probe.runs(), 0);
}

#[tokio::test]
async fn rule_58_a_stale_key_never_runs_while_the_store_fails() {
    let store = Faulty::new(MemoryStore::new());
    let probe = Probe::counting();
    let open = narrow(&DynStore::new(store.clone())).store_failure(StoreFailure::RunUnguarded);
    let api = Api::new(open, &probe);
    store.inject_all(Fault::unavailable());
    let refused = api.send(keyed(&made_ago(HALF_AN_HOUR, 1))).await;
    refused.assert_problem(503, "store-unavailable");
    assert_eq!(probe.runs(), 0);
    // Nothing was claimed, so that nothing is withdrawn.
    assert_eq!(
        (store.calls_of(Call::Claim), store.calls_of(Call::Release)),
        (0, 0)
    );
    let unguarded = api.send(keyed(&made_ago(Duration::ZERO, 1))).await;
    assert_eq!((unguarded.status.as_u16(), probe.runs()), (201, 1));
}

#[tokio::test(start_paused = true)]
async fn rule_58_a_stale_key_is_answered_while_marking_hangs() {
    let faulty = Faulty::new(MemoryStore::new());
    let store = DynStore::new(faulty.clone());
    let key = made_ago(HALF_AN_HOUR, 1);
    claimed_elsewhere(&store, &key, Duration::ZERO, HOUR).await;
    tokio::time::sleep(Duration::from_millis(1)).await;
    faulty.inject(Call::MarkUnknown, .., Fault::Hang);
    let api = Api::new(narrow(&store), &Probe::counting());
    let asked = tokio::time::timeout(HALF_AN_HOUR, api.send(keyed(&key))).await;
    asked
        .expect("the request hangs")
        .assert_problem(409, "outcome-unknown");
}

#[tokio::test]
async fn rule_77_a_window_longer_than_a_retention_is_refused() {
    let with =
        |window: Duration| required(memory()).key_syntax(KeySyntax::compat().uuid_v7(window));
    let day = 24 * HOUR;
    let refuses = |builder: IdempotencyBuilder<DynStore>, setting: &str| {
        let error = builder.build().unwrap_err();
        assert_eq!(error.setting(), "key_syntax");
        assert!(error.to_string().contains(setting), "{error}");
    };
    let longer = day + Duration::from_secs(1);
    refuses(with(longer), "retention");
    refuses(with(longer).retention(day), "retention");
    refuses(with(day).unknown_retention(day - HOUR), "unknown_retention");
    refuses(
        with(day).retention_for(StatusCode::NOT_FOUND, HOUR),
        "retention_for",
    );
    let _ = with(day).build().unwrap();
    let _ = with(longer).retention(longer).build().unwrap();
    let plain = required(memory()).retention(HOUR);
    let _ = plain
        .key_syntax(KeySyntax::compat().uuid())
        .build()
        .unwrap();
}

/// A handler that answers 503 once the gate lets it.
fn failing_behind_a_gate() -> (Gate, Probe) {
    let gate = Gate::closed();
    let probe = Probe::deciding_behind(&gate, |run| Ok(run.status(503)));
    (gate, probe)
}

/// A layer for which a key made half an hour ago is fresh.
fn wide(store: &DynStore) -> IdempotencyBuilder<DynStore> {
    required(store.clone()).key_syntax(KeySyntax::compat().uuid_v7(HOUR))
}

/// A layer for which a key made half an hour ago is stale.
fn narrow(store: &DynStore) -> IdempotencyBuilder<DynStore> {
    required(store.clone()).key_syntax(KeySyntax::compat().uuid_v7(HOUR / 6))
}

/// The `number`-th UUID of version 7 made at that time.
fn made_ago(age: Duration, number: usize) -> String {
    static NOW: LazyLock<Duration> =
        LazyLock::new(|| SystemTime::now().duration_since(UNIX_EPOCH).unwrap());
    let millis = u64::try_from((*NOW - age).as_millis()).unwrap();
    let number = u8::try_from(number).unwrap();
    let uuid = uuid::Builder::from_unix_timestamp_millis(millis, &[number; 10]);
    uuid.into_uuid().to_string()
}

const HOUR: Duration = Duration::from_secs(3600);
const HALF_AN_HOUR: Duration = Duration::from_secs(1800);
