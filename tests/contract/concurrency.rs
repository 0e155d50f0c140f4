//! Rules 40 to 61: many at once, clients that leave, and what fails.

use std::{
    sync::{
        Arc,
        atomic::{AtomicUsize, Ordering},
    },
    time::Duration,
};

use axum::{Router, body::Body};
use http::{Request, StatusCode};
use http_body_util::BodyExt as _;
use tokio::task::JoinHandle;
use tower::{Layer as _, ServiceExt as _, limit::ConcurrencyLimit};
use tower_http::timeout::TimeoutLayer;
use tower_idempotency::{
    Disposition, Dispositions, DynStore, IdempotencyBuilder, KeepFor, MemoryStore, Outcome,
    Recovery, RejectionKind, Store, StoreFailure,
    store::{Claim, Claimed, RecordState, Release, Transitioned},
};

use crate::{
    api::{
        Answer, Api, ask, eventually, fingerprint, keyed, named, optional, record, required, send,
        settle,
    },
    client::{Http2, Wire, post},
    faulty::{Call, Fault, Faulty},
    probe::{Failure, Gate, Probe, breaking_after, data, streamed},
    stores::{Place, memory, on_each_store},
};

on_each_store! {
    rule_40_of_a_hundred_at_once_one_runs
    rule_40_one_of_a_hundred_runs_and_the_others_replay
    rule_41_a_duplicate_of_a_running_request_gets_409
    rule_42_another_body_while_the_first_runs_is_a_mismatch
    rule_45_a_waiter_gets_the_replay_when_the_owner_completes
    rule_45_when_the_owner_releases_exactly_one_of_the_waiters_runs
    rule_46_the_client_closes_the_connection_and_the_handler_finishes
    rule_46_the_client_closes_its_half_and_the_handler_finishes
    rule_46_the_client_resets_the_stream_and_the_handler_finishes
    rule_49_a_panic_is_500_and_its_outcome_unknown
    rule_50_a_released_key_runs_again_for_the_same_request_alone
    rule_50_timeouts_and_gateway_errors_leave_an_unknown_outcome
    rule_51_refusals_of_the_handler_are_recorded
    rule_52_released_redirects_and_4xx_free_the_key
    rule_53_the_handlers_disposition_beats_the_table_and_is_removed
    rule_54_an_inner_error_passes_and_its_outcome_is_unknown
    rule_55_a_body_that_breaks_is_never_replayed_short
    rule_56_a_lapsed_lease_leaves_an_unknown_outcome
    rule_56_with_rerun_exactly_one_of_fifty_retries_runs
    rule_57_heartbeats_keep_a_lease_that_the_handler_outlives
    rule_57_a_fenced_owner_changes_nothing_and_answers_as_the_winner
    rule_57_an_owner_marked_unknown_completes_after_all
    rule_60_two_processes_keep_each_others_claims_and_records
}

/// A layer for many requests at once on a machine with little to spare.
fn patient(store: impl Store) -> IdempotencyBuilder<DynStore> {
    required(DynStore::new(store))
        .lease(Duration::from_secs(120))
        .store_timeout(Duration::from_secs(60))
}

async fn all<T>(asked: Vec<JoinHandle<T>>) -> Vec<T> {
    let mut answers = Vec::new();
    for each in asked {
        answers.push(each.await.unwrap());
    }
    answers
}

async fn rule_40_of_a_hundred_at_once_one_runs(place: &Place) {
    let gate = Gate::closed();
    let probe = Probe::behind(&gate);
    let api = Api::new(patient(place.open().await), &probe);
    let mut asked: Vec<_> = (0..100).map(|_| api.spawn(keyed("K"))).collect();
    gate.arrival().await;
    // The owner stays at the gate until all the others are answered.
    let mut refused = 0;
    while refused < 99 {
        let (ended, running): (Vec<_>, Vec<_>) =
            asked.into_iter().partition(JoinHandle::is_finished);
        for answer in all(ended).await {
            answer.assert_problem(409, "request-in-progress");
            refused += 1;
        }
        asked = running;
        tokio::time::sleep(Duration::from_millis(5)).await;
    }
    gate.open();
    let owner = all(asked).await.remove(0);
    owner.assert_run(1);
    assert_eq!(probe.runs(), 1);
    api.send(keyed("K")).await.assert_replay_of(&owner);
}

async fn rule_40_one_of_a_hundred_runs_and_the_others_replay(place: &Place) {
    let gate = Gate::closed();
    let probe = Probe::behind(&gate);
    let waiting = Duration::from_secs(60);
    let one = Api::new(patient(place.open().await).wait(waiting), &probe);
    let other = Api::new(patient(place.open().await).wait(waiting), &probe);
    let asked: Vec<_> = (0..50)
        .flat_map(|_| [one.spawn(keyed("K")), other.spawn(keyed("K"))])
        .collect();
    gate.arrival().await;
    gate.open();
    let answers = all(asked).await;
    let (first, replays): (Vec<_>, Vec<_>) =
        answers.into_iter().partition(|answer| !answer.is_replay());
    assert_eq!((first.len(), replays.len(), probe.runs()), (1, 99, 1));
    for replay in &replays {
        replay.assert_replay_of(&first[0]);
    }
}

async fn rule_41_a_duplicate_of_a_running_request_gets_409(place: &Place) {
    let gate = Gate::closed();
    let probe = Probe::behind(&gate);
    let api = Api::new(required(place.open().await), &probe);
    let owner = api.spawn(keyed("K"));
    gate.arrival().await;
    let refused = api.send(keyed("K")).await;
    refused.assert_problem(409, "request-in-progress");
    assert!(refused.retry_after() >= Some(1));
    assert_eq!(
        refused.outcome,
        Some(Outcome::Refused(RejectionKind::RequestInProgress))
    );
    gate.open();
    owner.await.unwrap().assert_run(1);
    assert_eq!(probe.runs(), 1);
}

#[tokio::test(start_paused = true)]
async fn rule_41_retry_after_grows_with_the_claim_within_its_lease() {
    let gate = Gate::closed();
    // No heartbeat before the lease has lapsed: it is not kept alive.
    let store = Faulty::over(MemoryStore::new());
    store.breaks(Call::Renew, .., Fault::Fails);
    let api = Api::new(required(DynStore::new(store)), &Probe::behind(&gate));
    let owner = api.spawn(keyed("K"));
    gate.arrival().await;
    let mut passed = 0;
    for (at, after) in [(0, 1), (1, 1), (5, 5), (14, 14), (18, 12), (28, 2), (30, 1)] {
        tokio::time::advance(Duration::from_secs(at - passed)).await;
        passed = at;
        let refused = api.send(keyed("K")).await;
        refused.assert_problem(409, "request-in-progress");
        assert_eq!(refused.retry_after(), Some(after), "at {at} s");
    }
    gate.open();
    owner.await.unwrap().assert_run(1);
}

async fn rule_42_another_body_while_the_first_runs_is_a_mismatch(place: &Place) {
    let gate = Gate::closed();
    let probe = Probe::behind(&gate);
    for wait in [Duration::ZERO, Duration::from_secs(60)] {
        let api = Api::new(required(place.open().await).wait(wait), &probe);
        let key = format!("K{}", wait.as_secs());
        let owner = api.spawn(keyed(&key));
        gate.arrival().await;
        // At once, even where the same request would wait.
        let other = api.send(keyed(&key).body("{}")).await;
        other.assert_problem(422, "key-reused");
        gate.let_one_pass();
        owner.await.unwrap().assert_live(201);
    }
    assert_eq!(probe.runs(), 2);
}

#[tokio::test]
async fn rule_43_refusals_are_never_recorded() {
    let store = MemoryStore::new();
    let gate = Gate::closed();
    let probe = Probe::behind(&gate);
    let everything = required(DynStore::new(store.clone()))
        .dispositions(Dispositions::everything())
        .max_request_body(100);
    let api = Api::new(everything, &probe);
    api.send(ask("/count"))
        .await
        .assert_problem(400, "key-missing");
    api.send(keyed("\""))
        .await
        .assert_problem(400, "key-invalid");
    api.send(keyed("K").without("x-account"))
        .await
        .assert_problem(403, "caller-unknown");
    api.send(keyed("K").body("x".repeat(101)))
        .await
        .assert_problem(413, "body-too-large");
    assert_eq!(store.len(), 0);

    let owner = api.spawn(keyed("K"));
    gate.arrival().await;
    api.send(keyed("K"))
        .await
        .assert_problem(409, "request-in-progress");
    api.send(keyed("K").body("{}"))
        .await
        .assert_problem(422, "key-reused");
    gate.open();
    let owner = owner.await.unwrap();
    api.send(keyed("K")).await.assert_replay_of(&owner);
    assert_eq!((store.len(), probe.runs()), (1, 1));
}

#[tokio::test]
async fn rule_44_in_flight_is_never_an_interim_status_425_or_429() {
    for status in [100, 102, 103, 199, 425, 429] {
        let gate = Gate::closed();
        let builder = required(memory()).render(move |rejection, _| {
            assert_eq!(rejection.kind(), RejectionKind::RequestInProgress);
            Some(
                http::Response::builder()
                    .status(status)
                    .body("not now".into())
                    .unwrap(),
            )
        });
        let api = Api::new(builder, &Probe::behind(&gate));
        let owner = api.spawn(keyed("K"));
        gate.arrival().await;
        api.send(keyed("K"))
            .await
            .assert_problem(409, "request-in-progress");
        gate.open();
        owner.await.unwrap().assert_run(1);
    }
}

#[tokio::test]
async fn rule_44_a_renderer_may_answer_202_with_the_operations_address() {
    let gate = Gate::closed();
    let builder = required(memory()).render(|rejection, _| {
        let operation = rejection.operation()?;
        let response = http::Response::builder()
            .status(202)
            .header("location", format!("/operations/{operation}"))
            .header("cache-control", "max-age=60");
        Some(response.body("still at work".into()).unwrap())
    });
    let probe = Probe::behind(&gate);
    let api = Api::new(builder, &probe);
    let owner = api.spawn(keyed("K"));
    gate.arrival().await;
    let accepted = api.send(keyed("K")).await;
    assert_eq!(
        (accepted.status, &*accepted.body),
        (StatusCode::ACCEPTED, &b"still at work"[..])
    );
    assert_eq!(
        accepted.header("location").unwrap().len(),
        "/operations/".len() + 32
    );
    assert_eq!(accepted.header("cache-control"), Some("no-store"));
    assert_eq!(accepted.retry_after(), Some(1));
    // What it leaves to the default looks like the default.
    api.send(keyed("K").body("{}"))
        .await
        .assert_problem(422, "key-reused");
    gate.open();
    let owner = owner.await.unwrap();
    api.send(keyed("K")).await.assert_replay_of(&owner);
}

async fn rule_45_a_waiter_gets_the_replay_when_the_owner_completes(place: &Place) {
    let gate = Gate::closed();
    let probe = Probe::behind(&gate);
    let store = Faulty::over(place.open().await);
    let builder = patient(DynStore::new(store.clone())).wait(Duration::from_secs(60));
    let api = Api::new(builder, &probe);
    let owner = api.spawn(keyed("K"));
    gate.arrival().await;
    let waiters: Vec<_> = (0..10).map(|_| api.spawn(keyed("K"))).collect();
    // Each of them has seen that it has to wait.
    eventually(async || (store.count(Call::Read) >= 10).then_some(())).await;
    assert!(waiters.iter().all(|waiter| !waiter.is_finished()));
    gate.open();
    let owner = owner.await.unwrap();
    owner.assert_run(1);
    for answer in all(waiters).await {
        answer.assert_replay_of(&owner);
    }
    assert_eq!(probe.runs(), 1);
}

async fn rule_45_when_the_owner_releases_exactly_one_of_the_waiters_runs(place: &Place) {
    let gate = Gate::closed();
    let held = gate.clone();
    let probe = Probe::running(move |run| {
        let gate = held.clone();
        async move {
            gate.pass().await;
            let mut response = run.created();
            if run.number == 1 {
                *response.status_mut() = StatusCode::INTERNAL_SERVER_ERROR;
            }
            Ok(response)
        }
    });
    let store = Faulty::over(place.open().await);
    let builder = patient(DynStore::new(store.clone())).wait(Duration::from_secs(60));
    let api = Api::new(builder, &probe);
    let owner = api.spawn(keyed("K"));
    gate.arrival().await;
    let waiters: Vec<_> = (0..10).map(|_| api.spawn(keyed("K"))).collect();
    eventually(async || (store.count(Call::Read) >= 10).then_some(())).await;
    gate.let_one_pass();
    owner.await.unwrap().assert_live(500);
    // One of them has come to the gate; no second one comes.
    gate.arrival().await;
    gate.open();
    let answers = all(waiters).await;
    let (ran, replays): (Vec<_>, Vec<_>) =
        answers.into_iter().partition(|answer| !answer.is_replay());
    assert_eq!((ran.len(), replays.len(), probe.runs()), (1, 9, 2));
    ran[0].assert_run(2);
    for replay in &replays {
        replay.assert_replay_of(&ran[0]);
    }
}

#[tokio::test(start_paused = true)]
async fn rule_45_a_waiter_times_out_with_409_and_the_owner_completes() {
    let gate = Gate::closed();
    let probe = Probe::behind(&gate);
    let api = Api::new(required(memory()).wait(Duration::from_secs(7)), &probe);
    let owner = api.spawn(keyed("K"));
    gate.arrival().await;
    let start = tokio::time::Instant::now();
    api.send(keyed("K"))
        .await
        .assert_problem(409, "request-in-progress");
    assert!(start.elapsed() >= Duration::from_secs(7));
    gate.open();
    let owner = owner.await.unwrap();
    api.send(keyed("K")).await.assert_replay_of(&owner);
    assert_eq!(probe.runs(), 1);
}

#[tokio::test(start_paused = true)]
async fn rule_45_a_waiter_that_leaves_frees_its_permit() {
    let gate = Gate::closed();
    let probe = Probe::behind(&gate);
    let store = Faulty::over(MemoryStore::new());
    let one_waits = required(DynStore::new(store.clone()))
        .wait(Duration::from_secs(60))
        .max_waiters(1);
    let api = Api::new(one_waits, &probe);
    let owner = api.spawn(keyed("K"));
    gate.arrival().await;
    let first = api.spawn(keyed("K"));
    settle().await;
    // There is no room for a second one, which is told at once.
    let start = tokio::time::Instant::now();
    api.send(keyed("K"))
        .await
        .assert_problem(409, "request-in-progress");
    assert_eq!(start.elapsed(), Duration::ZERO);

    first.abort();
    settle().await;
    let second = api.spawn(keyed("K"));
    settle().await;
    assert!(!second.is_finished());
    gate.open();
    let owner = owner.await.unwrap();
    second.await.unwrap().assert_replay_of(&owner);
    assert_eq!(probe.runs(), 1);
}

#[tokio::test(start_paused = true)]
async fn rule_45_an_unknown_outcome_wakes_its_waiter_with_409_at_once() {
    let gate = Gate::closed();
    let held = gate.clone();
    let probe = Probe::running(move |_| {
        let gate = held.clone();
        async move {
            gate.pass().await;
            Err(Failure("it broke"))
        }
    });
    let api = Api::new(required(memory()).wait(Duration::from_secs(3600)), &probe);
    let owner = api.service();
    let owner = tokio::spawn(async move { owner.oneshot(keyed("K").0).await.is_err() });
    gate.arrival().await;
    let waiter = api.spawn(keyed("K"));
    settle().await;
    let start = tokio::time::Instant::now();
    gate.open();
    assert!(owner.await.unwrap());
    waiter.await.unwrap().assert_problem(409, "outcome-unknown");
    assert!(
        start.elapsed() < Duration::from_secs(2),
        "the paused clock has hardly moved"
    );
    assert_eq!(probe.runs(), 1);
}

#[tokio::test(start_paused = true)]
async fn rule_45_a_waiter_overtaken_by_another_request_gets_422() {
    let store = memory();
    let probe = Probe::counting();
    let waiting = required(store.clone()).wait(Duration::from_secs(60));
    let api = Api::new(waiting, &probe);
    let claim = claimed_by_a_dead_process(&store, Duration::from_secs(60)).await;
    let waiter = api.spawn(keyed("K"));
    settle().await;
    // Freed elsewhere, which wakes nobody here; then another request is quicker.
    let freed = store
        .release(&named("K"), claim.token, Release::AnyRequest)
        .await;
    assert_eq!(freed.unwrap(), Transitioned::Applied);
    let other = api.send(keyed("K").body("{}")).await;
    other.assert_run(1);
    waiter.await.unwrap().assert_problem(422, "key-reused");
    assert_eq!(probe.runs(), 1);
}

#[tokio::test]
async fn rule_45_waiters_do_not_hold_the_readiness_that_the_owner_needs() {
    let store = memory();
    let probe = Probe::counting();
    let layer = required(store.clone())
        .wait(Duration::from_secs(60))
        .build()
        .unwrap();
    // One place below the layer, for everybody.
    let service = layer.layer(ConcurrencyLimit::new(probe.clone(), 1));
    let asked = |key: &'static str| {
        let service = service.clone();
        tokio::spawn(async move { send(service, keyed(key)).await })
    };

    // The owner is elsewhere, so that nobody here gives the place back.
    let claim = Claim::new(fingerprint(keyed("K")).await, Duration::from_secs(60), DAY);
    assert!(matches!(
        store.claim(&named("K"), &claim).await,
        Ok(Claimed::Acquired(_))
    ));
    let waiters: Vec<_> = (0..10).map(|_| asked("K")).collect();
    for key in ["L1", "L2", "L3"] {
        asked(key).await.unwrap().assert_live(201);
    }
    assert!(waiters.iter().all(|waiter| !waiter.is_finished()));
    let _ = store
        .release(&named("K"), claim.token, Release::SameRequest)
        .await
        .unwrap();
    let answers = all(waiters).await;
    assert_eq!(
        answers.iter().filter(|answer| !answer.is_replay()).count(),
        1
    );
    assert!(answers.iter().all(|answer| answer.status == 201));
    assert_eq!(probe.runs(), 4);
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
    let request = post("/count", "Idempotency-Key: K\r\n", "{\"amount\":1}");
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
    // The server has dropped the request's future; the handler goes on.
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
    let (store, probe) = (Faulty::over(MemoryStore::new()), Probe::counting());
    let api = Api::new(required(DynStore::new(store.clone())), &probe);
    let server = api.serve().await;

    // Whether the server drops the request first, or the end of its body comes
    // first, is not said: either way nothing may come of it.
    let mut wire = Wire::open(&server).await;
    let all = post("/count", "Idempotency-Key: K\r\n", "{\"amount\":1}");
    wire.write(&all[..all.len() - 5]).await;
    server.start_of_a_request().await;
    drop(wire);
    server.end_of_a_request().await;

    let mut wire = Wire::open(&server).await;
    let head = "POST /count HTTP/1.1\r\nHost: test\r\nX-Account: acme\r\nTransfer-Encoding: chunked\r\nIdempotency-Key: K\r\n\r\n5\r\n{\"amo\r\n";
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

    // Without a socket, dropped while it reads.
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
    let (store, probe) = (Faulty::over(MemoryStore::new()), Probe::counting());
    let api = Api::new(required(DynStore::new(store.clone())), &probe);
    let broken = keyed("K").body(breaking_after(&["{\"amo"]));
    api.send(broken).await.assert_problem(400, "body-invalid");
    assert_eq!((probe.runs(), store.calls()), (0, vec![]));
}

#[tokio::test(start_paused = true)]
async fn rule_47_a_slow_upload_is_refused_before_any_claim() {
    let (store, probe) = (Faulty::over(MemoryStore::new()), Probe::counting());
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

async fn rule_49_a_panic_is_500_and_its_outcome_unknown(place: &Place) {
    let store = place.open().await;
    // In the future, and in `call` itself.
    let later = Probe::running(|_| async { panic!("the handler's secret") });
    let at_once = Probe::answering(|_| panic!("the handler's secret"));
    for (key, probe) in [("K", later), ("L", at_once)] {
        let api = Api::new(required(store.clone()), &probe);
        let answer = api.send(keyed(key)).await;
        answer.assert_problem(500, "handler-panicked");
        assert!(!String::from_utf8_lossy(&answer.body).contains("secret"));
        assert_eq!(answer.outcome, Some(Outcome::Unknown));
        for _ in 0..2 {
            let retry = api.send(keyed(key)).await;
            retry.assert_problem(409, "outcome-unknown");
            assert_eq!(retry.retry_after(), None);
        }
        api.send(keyed(key).body("{}"))
            .await
            .assert_problem(422, "key-reused");
        assert_eq!(probe.runs(), 1);
    }
}

async fn rule_50_a_released_key_runs_again_for_the_same_request_alone(place: &Place) {
    let store = place.open().await;
    for script in [
        &[500, 201][..],
        &[501, 201],
        &[503, 201],
        &[505, 201],
        &[599, 201],
    ] {
        let probe = Probe::statuses(script);
        let api = Api::new(required(store.clone()), &probe);
        let key = format!("K{}", script[0]);
        let failed = api.send(keyed(&key)).await;
        failed.assert_live(script[0]).assert_run(1);
        assert_eq!(failed.outcome, Some(Outcome::Released));
        api.send(keyed(&key).body("{}"))
            .await
            .assert_problem(422, "key-reused");
        let first = api.send(keyed(&key)).await;
        first.assert_live(201).assert_run(2);
        api.send(keyed(&key)).await.assert_replay_of(&first);
        assert_eq!(probe.runs(), 2);
    }
}

async fn rule_50_timeouts_and_gateway_errors_leave_an_unknown_outcome(place: &Place) {
    let store = place.open().await;
    for status in [408, 502, 504, 500, 503] {
        let probe = Probe::answering(move |run| {
            // 500 and 503 say that nothing was done, unless something was.
            if matches!(status, 500 | 503) {
                run.operation().effects_started();
            }
            let mut response = run.created();
            *response.status_mut() = StatusCode::from_u16(status).unwrap();
            response
        });
        let api = Api::new(required(store.clone()), &probe);
        let key = format!("K{status}");
        let answer = api.send(keyed(&key)).await;
        answer.assert_live(status).assert_run(1);
        assert_eq!(answer.outcome, Some(Outcome::Unknown));
        api.send(keyed(&key))
            .await
            .assert_problem(409, "outcome-unknown");
        assert_eq!(probe.runs(), 1);
    }
}

async fn rule_51_refusals_of_the_handler_are_recorded(place: &Place) {
    let store = place.open().await;
    for script in [&[400][..], &[403], &[404], &[409], &[412], &[422], &[451]] {
        let probe = Probe::statuses(script);
        let api = Api::new(required(store.clone()), &probe);
        let key = format!("K{}", script[0]);
        let first = api.send(keyed(&key)).await;
        first.assert_live(script[0]);
        api.send(keyed(&key)).await.assert_replay_of(&first);
        assert_eq!(probe.runs(), 1);
    }
}

async fn rule_52_released_redirects_and_4xx_free_the_key(place: &Place) {
    let store = place.open().await;
    for status in [307, 308, 401, 407, 413, 415, 421, 425, 429] {
        let probe = Probe::answering(move |run| {
            let mut response = run.created();
            if run.number <= 2 {
                *response.status_mut() = StatusCode::from_u16(status).unwrap();
            }
            response
        });
        let api = Api::new(required(store.clone()), &probe);
        let key = format!("K{status}");
        api.send(keyed(&key))
            .await
            .assert_live(status)
            .assert_run(1);
        api.send(keyed(&key))
            .await
            .assert_live(status)
            .assert_run(2);
        let first = api.send(keyed(&key).body("{\"corrected\":true}")).await;
        first.assert_live(201).assert_run(3);
        let again = api.send(keyed(&key).body("{\"corrected\":true}")).await;
        again.assert_replay_of(&first);
        // Now it is bound to the corrected one.
        api.send(keyed(&key))
            .await
            .assert_problem(422, "key-reused");
        assert_eq!(probe.runs(), 3);
    }
}

type Says = fn(&crate::probe::Run, &mut http::Response<Body>);

async fn rule_53_the_handlers_disposition_beats_the_table_and_is_removed(place: &Place) {
    let store = place.open().await;
    let record_500: [Says; 2] = [
        |_, response| _ = response.extensions_mut().insert(Disposition::Record),
        |run, _| run.operation().set_disposition(Disposition::Record),
    ];
    let release_201: [Says; 2] = [
        |_, response| {
            _ = response
                .extensions_mut()
                .insert(Disposition::Release(Release::AnyRequest));
        },
        |run, _| {
            run.operation()
                .set_disposition(Disposition::Release(Release::AnyRequest));
        },
    ];
    let unknown_201: [Says; 2] = [
        |_, response| _ = response.extensions_mut().insert(Disposition::Unknown),
        |run, _| run.operation().set_disposition(Disposition::Unknown),
    ];
    let saying = |status: u16, says: Says| {
        Probe::answering(move |run| {
            let mut response = run.created();
            *response.status_mut() = StatusCode::from_u16(status).unwrap();
            says(&run, &mut response);
            response
        })
    };
    let unseen = async |api: &Api, key: &str| {
        let response = api.respond(keyed(key).0).await.unwrap();
        assert!(response.extensions().get::<Disposition>().is_none());
        Answer::of(response).await
    };
    for (index, says) in record_500.into_iter().enumerate() {
        let (key, probe) = (format!("record{index}"), saying(500, says));
        let api = Api::new(required(store.clone()), &probe);
        let first = unseen(&api, &key).await;
        first.assert_live(500);
        api.send(keyed(&key)).await.assert_replay_of(&first);
        assert_eq!(probe.runs(), 1);
    }
    for (index, says) in release_201.into_iter().enumerate() {
        let (key, probe) = (format!("release{index}"), saying(201, says));
        // Not even a layer that records everything records it.
        let everything = required(store.clone()).dispositions(Dispositions::everything());
        let api = Api::new(everything, &probe);
        unseen(&api, &key).await.assert_live(201).assert_run(1);
        api.send(keyed(&key)).await.assert_live(201).assert_run(2);
        // Free for any request.
        api.send(keyed(&key).body("{}"))
            .await
            .assert_live(201)
            .assert_run(3);
    }
    for (index, says) in unknown_201.into_iter().enumerate() {
        let (key, probe) = (format!("unknown{index}"), saying(201, says));
        let api = Api::new(required(store.clone()), &probe);
        unseen(&api, &key).await.assert_live(201);
        api.send(keyed(&key))
            .await
            .assert_problem(409, "outcome-unknown");
        assert_eq!(probe.runs(), 1);
    }
}

#[tokio::test(start_paused = true)]
async fn rule_53_keep_for_sets_the_retention_of_the_response() {
    let store = memory();
    let minute = Duration::from_secs(60);
    let on_the_response: Says = |_, response| {
        let keep_for = KeepFor(Duration::from_secs(60));
        response.extensions_mut().insert(keep_for);
    };
    let on_the_operation: Says = |run, _| run.operation().keep_for(Duration::from_secs(60));
    let with_a_verdict: Says = |_, response| {
        *response.status_mut() = StatusCode::INTERNAL_SERVER_ERROR;
        response.extensions_mut().insert(Disposition::Record);
        let keep_for = KeepFor(Duration::from_secs(60));
        response.extensions_mut().insert(keep_for);
    };
    for (key, says) in [
        ("K", on_the_response),
        ("L", on_the_operation),
        ("M", with_a_verdict),
    ] {
        let probe = Probe::answering(move |run| {
            let mut response = run.created();
            says(&run, &mut response);
            response
        });
        let api = Api::new(required(store.clone()), &probe);
        let first = api.send(keyed(key)).await;
        tokio::time::advance(minute - Duration::from_millis(1)).await;
        api.send(keyed(key)).await.assert_replay_of(&first);
        tokio::time::advance(Duration::from_millis(2)).await;
        api.send(keyed(key)).await.assert_run(2);
    }
}

#[tokio::test]
async fn rule_53_the_response_wins_over_the_operation() {
    let probe = Probe::answering(|run| {
        run.operation().set_disposition(Disposition::Unknown);
        let mut response = run.created();
        response.extensions_mut().insert(Disposition::Record);
        response
    });
    let api = Api::new(required(memory()), &probe);
    let first = api.send(keyed("K")).await;
    api.send(keyed("K")).await.assert_replay_of(&first);
}

#[tokio::test]
async fn rule_53_a_disposition_is_a_part_of_an_axum_response() {
    let runs = Arc::new(AtomicUsize::new(0));
    let counted = Arc::clone(&runs);
    let app = Router::new()
        .route(
            "/count",
            axum::routing::post(async move || {
                counted.fetch_add(1, Ordering::SeqCst);
                (
                    StatusCode::BAD_REQUEST,
                    Disposition::Release(Release::AnyRequest),
                    "correct it",
                )
            }),
        )
        .layer(required(memory()).build().unwrap());
    for _ in 0..2 {
        send(app.clone(), keyed("K")).await.assert_live(400);
    }
    assert_eq!(runs.load(Ordering::SeqCst), 2);
}

async fn rule_54_an_inner_error_passes_and_its_outcome_is_unknown(place: &Place) {
    let probe = Probe::running(|_| async { Err(Failure("the very error")) });
    let api = Api::new(required(place.open().await), &probe);
    let error = api.respond(keyed("K").0).await.unwrap_err();
    assert_eq!(error.0, "the very error");
    api.send(keyed("K"))
        .await
        .assert_problem(409, "outcome-unknown");
    assert_eq!(probe.runs(), 1);
}

async fn rule_55_a_body_that_breaks_is_never_replayed_short(place: &Place) {
    let probe = Probe::answering(|run| {
        let mut response = run.created();
        *response.body_mut() = breaking_after(&["the first ", "half"]);
        response
    });
    let api = Api::new(required(place.open().await), &probe);
    let server = api.serve().await;
    let mut wire = Wire::open(&server).await;
    wire.write(post("/count", "Idempotency-Key: K\r\n", "{\"amount\":1}"))
        .await;
    // The first client is not told that this was all …
    let rest = wire.rest().await;
    assert!(!rest.ends_with(b"0\r\n\r\n"), "{}", rest.escape_ascii());
    // … though nothing of what there was is lost.
    let response = api.respond(keyed("L").0).await.unwrap();
    assert_eq!(response.status(), StatusCode::CREATED);
    let mut body = response.into_body();
    let read = body.frame().await.unwrap().unwrap().into_data().unwrap();
    assert_eq!(read, "the first half");
    assert_eq!(
        body.frame().await.unwrap().unwrap_err().to_string(),
        "the body broke"
    );
    for _ in 0..2 {
        for key in ["K", "L"] {
            let retry = api.send(keyed(key)).await;
            retry.assert_problem(409, "outcome-unknown");
        }
    }
    assert_eq!(probe.runs(), 2);
}

/// Claims K for an owner that is gone.
async fn claimed_by_a_dead_process(store: &impl Store, lease: Duration) -> Claim {
    let claim = Claim::new(fingerprint(keyed("K")).await, lease, DAY);
    let claimed = store.claim(&named("K"), &claim).await.unwrap();
    assert!(matches!(claimed, Claimed::Acquired(_)));
    claim
}

async fn rule_56_a_lapsed_lease_leaves_an_unknown_outcome(place: &Place) {
    let store = place.open().await;
    let probe = Probe::counting();
    let api = Api::new(required(store.clone()), &probe);
    claimed_by_a_dead_process(&store, Duration::from_millis(800)).await;
    let before = api.send(keyed("K")).await;
    before.assert_problem(409, "request-in-progress");
    assert_eq!(before.retry_after(), Some(1));
    let after = eventually(async || {
        let answer = api.send(keyed("K")).await;
        (answer.problem()["type"] != before.problem()["type"]).then_some(answer)
    })
    .await;
    after.assert_problem(409, "outcome-unknown");
    assert_eq!(after.retry_after(), None);
    let unknown = record(&store, "K").await.unwrap();
    assert!(matches!(unknown.state, RecordState::Unknown), "{unknown:?}");
    api.send(keyed("K").body("{}"))
        .await
        .assert_problem(422, "key-reused");
    assert_eq!(probe.runs(), 0);
}

async fn rule_56_with_rerun_exactly_one_of_fifty_retries_runs(place: &Place) {
    let store = place.open().await;
    let gate = Gate::closed();
    let held = gate.clone();
    let probe = Probe::running(move |run| {
        let gate = held.clone();
        async move {
            gate.pass().await;
            let mut response = run.created();
            let attempt = run.operation().attempt();
            response.headers_mut().insert("x-attempt", attempt.into());
            Ok(response)
        }
    });
    let api = Api::new(patient(store.clone()).recovery(Recovery::Rerun), &probe);
    claimed_by_a_dead_process(&store, Duration::from_millis(300)).await;
    let dead = record(&store, "K").await.unwrap();
    eventually(async || {
        let record = record(&store, "K").await.unwrap();
        matches!(record.state, RecordState::InProgress { lease_left: None }).then_some(())
    })
    .await;
    // To take over is for the same request alone.
    let other = api.send(keyed("K").body("{}")).await;
    other.assert_problem(422, "key-reused");
    let mut asked: Vec<_> = (0..50).map(|_| api.spawn(keyed("K"))).collect();
    gate.arrival().await;
    let mut refused = 0;
    while refused < 49 {
        let (ended, running): (Vec<_>, Vec<_>) =
            asked.into_iter().partition(JoinHandle::is_finished);
        for answer in all(ended).await {
            answer.assert_problem(409, "request-in-progress");
            refused += 1;
        }
        asked = running;
        tokio::time::sleep(Duration::from_millis(5)).await;
    }
    gate.open();
    let first = all(asked).await.remove(0);
    first.assert_run(1);
    assert_eq!((probe.runs(), first.header("x-attempt")), (1, Some("2")));
    let taken_over = record(&store, "K").await.unwrap();
    assert_eq!(taken_over.operation, dead.operation);
    assert!(taken_over.fence > dead.fence);
    api.send(keyed("K")).await.assert_replay_of(&first);
}

#[tokio::test]
async fn rule_56_rerun_ends_after_the_attempts_that_were_set() {
    let probe = Probe::running(|_| async { Err(Failure("again")) });
    let builder = required(memory()).recovery(Recovery::Rerun).max_attempts(3);
    let api = Api::new(builder, &probe);
    for _ in 0..3 {
        assert!(api.respond(keyed("K").0).await.is_err());
    }
    for _ in 0..2 {
        api.send(keyed("K"))
            .await
            .assert_problem(409, "outcome-unknown");
    }
    assert_eq!(probe.runs(), 3);
}

async fn rule_57_heartbeats_keep_a_lease_that_the_handler_outlives(place: &Place) {
    let gate = Gate::closed();
    let probe = Probe::behind(&gate);
    let store = Faulty::over(place.open().await);
    // Slow machines: six heartbeats have to fail before the lease lapses.
    let builder = required(DynStore::new(store.clone()))
        .lease(Duration::from_millis(1_800))
        .heartbeat(Duration::from_millis(300))
        .recovery(Recovery::Rerun);
    let api = Api::new(builder, &probe);
    let owner = api.spawn(keyed("K"));
    gate.arrival().await;
    eventually(async || {
        api.send(keyed("K"))
            .await
            .assert_problem(409, "request-in-progress");
        (store.count(Call::Renew) >= 9).then_some(())
    })
    .await;
    gate.open();
    let owner = owner.await.unwrap();
    owner.assert_run(1);
    api.send(keyed("K")).await.assert_replay_of(&owner);
    assert_eq!(probe.runs(), 1);
}

#[tokio::test(start_paused = true)]
async fn rule_57_a_hanging_handler_loses_its_lease_after_max_run_time() {
    let gate = Gate::closed();
    let probe = Probe::behind(&gate);
    let api = Api::new(required(memory()), &probe);
    let owner = api.spawn(keyed("K"));
    gate.arrival().await;
    for _ in 0..15 {
        api.send(keyed("K"))
            .await
            .assert_problem(409, "request-in-progress");
        tokio::time::sleep(Duration::from_secs(60)).await;
    }
    tokio::time::sleep(Duration::from_secs(31)).await;
    api.send(keyed("K"))
        .await
        .assert_problem(409, "outcome-unknown");
    // It ends after all, and nobody has taken over.
    gate.open();
    let late = owner.await.unwrap();
    late.assert_run(1);
    api.send(keyed("K")).await.assert_replay_of(&late);
}

async fn rule_57_a_fenced_owner_changes_nothing_and_answers_as_the_winner(place: &Place) {
    let gate = Gate::closed();
    let probe = Probe::behind(&gate);
    let cut_off = Faulty::over(place.open().await);
    let lease = Duration::from_millis(900);
    let slow = required(DynStore::new(cut_off.clone()))
        .lease(lease)
        .recovery(Recovery::Rerun);
    let slow = Api::new(slow, &probe);
    let other = required(place.open().await).recovery(Recovery::Rerun);
    let other = Api::new(other, &probe);

    // While the winner runs, the loser's client is told that it runs.
    let loser = slow.spawn(keyed("K"));
    gate.arrival().await;
    // From here on its heartbeats do not reach the store.
    cut_off.breaks(Call::Renew, .., Fault::Fails);
    let winner = loop {
        // Refused while the lease lives; then one comes to the gate.
        let mut asked = other.spawn(keyed("K"));
        tokio::select! {
            () = gate.arrival() => break asked,
            refused = &mut asked => {
                refused.unwrap().assert_problem(409, "request-in-progress");
                tokio::time::sleep(Duration::from_millis(20)).await;
            }
        }
    };
    gate.let_one_pass();
    let lost = loser.await.unwrap();
    lost.assert_problem(409, "request-in-progress");
    gate.let_one_pass();
    let won = winner.await.unwrap();
    won.assert_run(2);
    other.send(keyed("K")).await.assert_replay_of(&won);
    assert_eq!(probe.runs(), 2);
}

#[tokio::test(start_paused = true)]
async fn rule_57_a_fenced_owners_client_gets_the_winners_recorded_answer() {
    let store = MemoryStore::new();
    let gate = Gate::closed();
    let cut_off = Faulty::over(store.clone());
    cut_off.breaks(Call::Renew, .., Fault::Fails);
    let loser = required(DynStore::new(cut_off)).recovery(Recovery::Rerun);
    let loser = Api::new(loser, &Probe::behind(&gate));
    let winner = required(DynStore::new(store.clone())).recovery(Recovery::Rerun);
    let winner = Api::new(winner, &Probe::statuses(&[202]));

    let lost = loser.spawn(keyed("K"));
    gate.arrival().await;
    tokio::time::advance(Duration::from_secs(31)).await;
    let won = winner.send(keyed("K")).await;
    won.assert_live(202);
    gate.open();
    lost.await.unwrap().assert_replay_of(&won);
    winner.send(keyed("K")).await.assert_replay_of(&won);
}

async fn rule_57_an_owner_marked_unknown_completes_after_all(place: &Place) {
    let gate = Gate::closed();
    let probe = Probe::behind(&gate);
    let cut_off = Faulty::over(place.open().await);
    let short = Duration::from_millis(300);
    let slow = required(DynStore::new(cut_off.clone())).lease(short);
    let slow = Api::new(slow, &probe);
    let other = Api::new(required(place.open().await), &probe);
    let owner = slow.spawn(keyed("K"));
    gate.arrival().await;
    // From here on its heartbeats do not reach the store.
    cut_off.breaks(Call::Renew, .., Fault::Fails);
    eventually(async || {
        let answer = other.send(keyed("K")).await;
        let unknown = answer.outcome == Some(Outcome::Refused(RejectionKind::OutcomeUnknown));
        unknown.then_some(())
    })
    .await;
    gate.open();
    let owner = owner.await.unwrap();
    owner.assert_run(1);
    other.send(keyed("K")).await.assert_replay_of(&owner);
    assert_eq!(probe.runs(), 1);
}

#[tokio::test(start_paused = true)]
async fn rule_58_while_the_store_cannot_be_reached_nothing_runs() {
    for fault in [
        Fault::Fails,
        Fault::LosesItsAnswer,
        Fault::Hangs,
        Fault::HangsAfterwards,
        Fault::IsFull,
        Fault::IsCorrupt,
    ] {
        let store = MemoryStore::new();
        let faulty = Faulty::over(store.clone());
        faulty.breaks_down(&fault);
        let probe = Probe::counting();
        for wait in [Duration::ZERO, Duration::from_secs(3)] {
            let api = Api::new(required(DynStore::new(faulty.clone())).wait(wait), &probe);
            let start = tokio::time::Instant::now();
            let refused = api.send(keyed("K")).await;
            refused.assert_problem(503, "store-unavailable");
            assert!(
                start.elapsed() <= Duration::from_secs(10),
                "on the paused clock"
            );
            assert!(refused.retry_after() >= Some(1));
        }
        assert_eq!(probe.runs(), 0);
        // Once it can, the key is not stuck: what was claimed is withdrawn.
        faulty.heals();
        tokio::time::sleep(Duration::from_secs(60)).await;
        let api = Api::new(required(DynStore::new(faulty)), &probe);
        api.send(keyed("K")).await.assert_live(201).assert_run(1);
    }
}

#[tokio::test(start_paused = true)]
async fn rule_58_a_request_recovers_its_claim_after_a_lost_answer() {
    let faulty = Faulty::over(MemoryStore::new());
    faulty.breaks(Call::Claim, 1..=1, Fault::LosesItsAnswer);
    let probe = Probe::counting();
    let api = Api::new(required(DynStore::new(faulty)), &probe);
    let first = api.send(keyed("K")).await;
    first.assert_live(201).assert_run(1);
    api.send(keyed("K")).await.assert_replay_of(&first);
}

#[tokio::test(start_paused = true)]
async fn rule_58_a_failing_store_does_not_rerun_a_recorded_request() {
    let faulty = Faulty::over(MemoryStore::new());
    let probe = Probe::counting();
    let api = Api::new(required(DynStore::new(faulty.clone())), &probe);
    let first = api.send(keyed("K")).await;
    faulty.breaks_down(&Fault::Fails);
    api.send(keyed("K"))
        .await
        .assert_problem(503, "store-unavailable");
    faulty.heals();
    tokio::time::sleep(Duration::from_secs(60)).await;
    api.send(keyed("K")).await.assert_replay_of(&first);
    assert_eq!(probe.runs(), 1);
}

#[tokio::test(start_paused = true)]
async fn rule_58_a_route_may_run_unguarded_with_a_marker() {
    let faulty = Faulty::over(MemoryStore::new());
    faulty.breaks_down(&Fault::Fails);
    let probe = Probe::answering(|run| {
        let guarded = run
            .request
            .extensions()
            .get::<tower_idempotency::Operation>()
            .is_some();
        let mut response = run.created();
        response
            .headers_mut()
            .insert("x-guarded", guarded.to_string().parse().unwrap());
        response.extensions_mut().insert(Disposition::Record);
        response
    });
    let builder = required(DynStore::new(faulty.clone())).store_failure(StoreFailure::RunUnguarded);
    let api = Api::new(builder, &probe);
    for number in 1..=2 {
        let response = api.respond(keyed("K").0).await.unwrap();
        assert!(response.extensions().get::<Disposition>().is_none());
        let answer = Answer::of(response).await;
        assert_eq!(answer.status, StatusCode::CREATED);
        assert_eq!(answer.header("x-run"), Some(&*number.to_string()));
        assert_eq!(answer.header("x-guarded"), Some("false"));
        assert_eq!(answer.header("idempotent-recorded"), Some("false"));
        assert_eq!(answer.outcome, Some(Outcome::Unguarded));
        assert!(!answer.is_replay());
    }
    // An unreadable record is a record: it does not run past that.
    faulty.heals();
    faulty.breaks_down(&Fault::IsCorrupt);
    api.send(keyed("K"))
        .await
        .assert_problem(503, "store-unavailable");
    assert_eq!(probe.runs(), 2);
}

#[tokio::test(start_paused = true)]
async fn an_overloaded_store_refuses_and_nothing_runs_unguarded() {
    let faulty = Faulty::over(MemoryStore::new());
    let probe = Probe::answering(|run| run.created());
    let builder = required(DynStore::new(faulty.clone())).store_failure(StoreFailure::RunUnguarded);
    let api = Api::new(builder, &probe);
    faulty.breaks_down(&Fault::IsOverloaded);
    let answer = api.send(keyed("K")).await;
    answer.assert_problem(503, "store-unavailable");
    assert_eq!(answer.header("retry-after"), Some("1"));
    // At once, and no more is asked of it.
    assert_eq!(faulty.count(Call::Claim), 1);
    assert_eq!(faulty.count(Call::Release), 0);
    assert_eq!(probe.runs(), 0);
    faulty.heals();
    api.send(keyed("K")).await.assert_run(1);
}

#[tokio::test(start_paused = true)]
async fn rule_58_a_request_that_saw_a_record_never_runs_unguarded() {
    // The claim shows a record that could be claimed again, and then the store
    // breaks.
    let faulty = Faulty::over(MemoryStore::new());
    let probe = Probe::answering(|run| {
        let mut response = run.created();
        *response.status_mut() = StatusCode::INTERNAL_SERVER_ERROR;
        response
    });
    let builder = required(DynStore::new(faulty.clone())).store_failure(StoreFailure::RunUnguarded);
    let api = Api::new(builder, &probe);
    api.send(keyed("K")).await.assert_live(500);
    faulty.breaks(Call::Reclaim, .., Fault::Fails);
    api.send(keyed("K"))
        .await
        .assert_problem(503, "store-unavailable");
    assert_eq!(probe.runs(), 1);

    // A waiter has seen an owner at work, and then the store breaks.
    let gate = Gate::closed();
    let held = gate.clone();
    let probe = Probe::running(move |run| {
        let gate = held.clone();
        async move {
            gate.pass().await;
            let mut response = run.created();
            *response.status_mut() = StatusCode::INTERNAL_SERVER_ERROR;
            Ok(response)
        }
    });
    let faulty = Faulty::over(MemoryStore::new());
    faulty.breaks(Call::Claim, 3.., Fault::Fails);
    let builder = required(DynStore::new(faulty.clone()))
        .store_failure(StoreFailure::RunUnguarded)
        .wait(Duration::from_secs(60));
    let api = Api::new(builder, &probe);
    let owner = api.spawn(keyed("K"));
    gate.arrival().await;
    let waiter = api.spawn(keyed("K"));
    eventually(async || (faulty.count(Call::Read) >= 1).then_some(())).await;
    gate.open();
    owner.await.unwrap().assert_live(500);
    waiter
        .await
        .unwrap()
        .assert_problem(503, "store-unavailable");
    assert_eq!(probe.runs(), 1);
}

#[tokio::test(start_paused = true)]
async fn rule_59_an_unrecorded_response_is_sent_and_recorded_late() {
    for fault in [
        Fault::Fails,
        Fault::Hangs,
        Fault::LosesItsAnswer,
        Fault::HangsAfterwards,
    ] {
        let faulty = Faulty::over(MemoryStore::new());
        faulty.breaks(Call::Complete, .., fault);
        let probe = Probe::counting();
        let api = Api::new(required(DynStore::new(faulty.clone())), &probe);
        let start = tokio::time::Instant::now();
        let mut first = api.send(keyed("K")).await;
        assert!(
            start.elapsed() <= Duration::from_secs(6),
            "on the paused clock"
        );
        assert_eq!(
            (first.status.as_u16(), &*first.body),
            (201, &b"{\"n\":1}"[..])
        );
        assert_eq!(first.header("idempotent-recorded"), Some("false"));
        assert_eq!(first.outcome, Some(Outcome::Unrecorded));
        let retry = api.send(keyed("K")).await;
        assert!(retry.is_replay() || retry.status == 409, "{retry:?}");
        // Past the lease, too: the claim is kept alive.
        tokio::time::sleep(Duration::from_secs(120)).await;
        let retry = api.send(keyed("K")).await;
        assert!(retry.is_replay() || retry.status == 409, "{retry:?}");
        faulty.heals();
        tokio::time::sleep(Duration::from_secs(60)).await;
        first.headers.remove("idempotent-recorded");
        api.send(keyed("K")).await.assert_replay_of(&first);
        assert_eq!(probe.runs(), 1);
    }
}

#[tokio::test(start_paused = true)]
async fn rule_59_a_response_never_recorded_never_runs_again() {
    let faulty = Faulty::over(MemoryStore::new());
    faulty.breaks(Call::Complete, .., Fault::Fails);
    let probe = Probe::counting();
    let api = Api::new(required(DynStore::new(faulty.clone())), &probe);
    api.send(keyed("K")).await;
    for _ in 0..40 {
        tokio::time::sleep(Duration::from_secs(30)).await;
        assert_eq!(api.send(keyed("K")).await.status, StatusCode::CONFLICT);
    }
    api.send(keyed("K"))
        .await
        .assert_problem(409, "outcome-unknown");
    assert_eq!(probe.runs(), 1);
}

#[tokio::test(start_paused = true)]
async fn rule_59_late_recording_is_bounded_in_bytes() {
    let faulty = Faulty::over(MemoryStore::new());
    faulty.breaks(Call::Complete, .., Fault::Fails);
    let probe = Probe::counting();
    let small = required(DynStore::new(faulty.clone()))
        .late_recording_timeout(Duration::from_secs(900))
        .max_late_recording_bytes(8);
    let api = Api::new(small, &probe);
    let answer = api.send(keyed("K")).await;
    assert_eq!(answer.header("idempotent-recorded"), Some("false"));
    settle().await;
    let tried = faulty.count(Call::Complete);
    faulty.heals();
    tokio::time::sleep(Duration::from_secs(120)).await;
    assert_eq!(faulty.count(Call::Complete), tried);
    api.send(keyed("K"))
        .await
        .assert_problem(409, "outcome-unknown");
    assert_eq!(probe.runs(), 1);
}

#[tokio::test(start_paused = true)]
async fn rule_59_a_failed_release_or_unknown_mark_is_written_late() {
    for (status, call) in [(503, Call::Release), (504, Call::MarkUnknown)] {
        let faulty = Faulty::over(MemoryStore::new());
        faulty.breaks(call, 1..=3, Fault::Fails);
        let probe = Probe::answering(move |run| {
            let mut response = run.created();
            *response.status_mut() = StatusCode::from_u16(status).unwrap();
            response
        });
        let api = Api::new(required(DynStore::new(faulty.clone())), &probe);
        api.send(keyed("K")).await.assert_live(status);
        api.send(keyed("K"))
            .await
            .assert_problem(409, "request-in-progress");
        tokio::time::sleep(Duration::from_secs(5)).await;
        let retry = api.send(keyed("K")).await;
        if status == 503 {
            retry.assert_live(503).assert_run(2);
        } else {
            retry.assert_problem(409, "outcome-unknown");
        }
    }
}

async fn rule_60_two_processes_keep_each_others_claims_and_records(place: &Place) {
    let gate = Gate::closed();
    let probe = Probe::behind(&gate);
    let one = Api::new(required(place.open().await), &probe);
    let other = Api::new(required(place.open().await), &probe);
    let owner = one.spawn(keyed("K"));
    gate.arrival().await;
    other
        .send(keyed("K"))
        .await
        .assert_problem(409, "request-in-progress");
    other
        .send(keyed("K").body("{}"))
        .await
        .assert_problem(422, "key-reused");
    gate.open();
    let first = owner.await.unwrap();
    other.send(keyed("K")).await.assert_replay_of(&first);
    other
        .send(keyed("K").body("{}"))
        .await
        .assert_problem(422, "key-reused");

    // What one releases, the other runs; what one does not know, neither does.
    let script = Probe::statuses(&[503, 504]);
    let one = Api::new(required(place.open().await), &script);
    let other = Api::new(required(place.open().await), &script);
    one.send(keyed("L")).await.assert_live(503).assert_run(1);
    other.send(keyed("L")).await.assert_live(504).assert_run(2);
    one.send(keyed("L"))
        .await
        .assert_problem(409, "outcome-unknown");
    assert_eq!((probe.runs(), script.runs()), (1, 2));
}

#[tokio::test]
async fn rule_61_a_body_over_the_limit_is_refused_without_claim() {
    let (store, probe) = (Faulty::over(MemoryStore::new()), Probe::counting());
    let builder = required(DynStore::new(store.clone())).max_request_body(1_000);
    let api = Api::new(builder, &probe);
    // It says so at once.
    let told = keyed("K").body("x".repeat(1_001));
    let told = api.send(told).await;
    told.assert_problem(413, "body-too-large");
    assert!(told.problem()["detail"].as_str().unwrap().contains("1000"));
    // It turns out.
    let (frames, body) = streamed();
    let asked = api.spawn(keyed("K").body(body));
    let chunk = || Ok(http_body::Frame::data(vec![b'x'; 400].into()));
    for _ in 0..3 {
        frames.send(chunk()).unwrap();
    }
    asked.await.unwrap().assert_problem(413, "body-too-large");
    assert_eq!((probe.runs(), store.calls()), (0, vec![]));
    // Exactly the cap is not over it, and the key is free for it.
    api.send(keyed("K").body("x".repeat(1_000)))
        .await
        .assert_run(1);
}

#[tokio::test]
async fn rule_61_the_limit_covers_every_framing_of_keyed_requests() {
    let probe = Probe::counting();
    let api = Api::new(optional(memory()).max_request_body(4), &probe);
    let server = api.serve().await;
    let head = "POST /count HTTP/1.1\r\nHost: test\r\nX-Account: acme\r\n";
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

const DAY: Duration = Duration::from_secs(24 * 3600);
