//! Rules 40 to 45: many requests at once, and requests that wait.

use std::time::Duration;

use http::StatusCode;
use tokio::time::{Instant, sleep};
use tower::{Layer as _, ServiceExt as _, limit::ConcurrencyLimit};
use tower_idempotency::{
    Dispositions, DynStore, MemoryStore, Outcome, RejectionKind, Store,
    store::{Release, Transitioned},
};

use crate::{
    api::{Api, ask, eventually, keyed, named, required, send, settle},
    crowd::{all, claimed_elsewhere, patient, the_only_runner},
    faulty::{Call, Fault, Faulty},
    probe::{Failure, Gate, Probe},
    stores::{Place, memory, on_each_store},
};

on_each_store! {
    rule_40_of_a_hundred_at_once_one_runs
    rule_40_one_of_a_hundred_runs_and_the_others_replay
    rule_41_a_duplicate_of_a_running_request_gets_409
    rule_42_another_body_while_the_first_runs_is_a_mismatch
    rule_45_a_waiter_gets_the_replay_when_the_owner_completes
    rule_45_when_the_owner_releases_exactly_one_of_the_waiters_runs
}

async fn rule_40_of_a_hundred_at_once_one_runs(place: &Place) {
    let gate = Gate::closed();
    let probe = Probe::behind(&gate);
    let api = Api::new(patient(place.open().await), &probe);
    let asked = (0..100).map(|_| api.spawn(keyed("K"))).collect();
    gate.arrival().await;
    // The owner stays at the gate until all the others are answered.
    let owner = the_only_runner(asked).await;
    gate.open();
    let owner = owner.await.unwrap();
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
    let store = Faulty::new(MemoryStore::new());
    store.inject(Call::Renew, .., Fault::unavailable());
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
        // A mismatch is refused at once, even where the same request would wait.
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
                    .body("not now")
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
        Some(response.body("still at work").unwrap())
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
    // Where the renderer returns `None`, the default rendering is sent.
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
    let store = Faulty::new(place.open().await);
    let builder = patient(DynStore::new(store.clone())).wait(Duration::from_secs(60));
    let api = Api::new(builder, &probe);
    let owner = api.spawn(keyed("K"));
    gate.arrival().await;
    let waiters: Vec<_> = (0..10).map(|_| api.spawn(keyed("K"))).collect();
    // Each of them has read the record and waits.
    eventually(async || (store.calls_of(Call::Read) >= 10).then_some(())).await;
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
    let probe = Probe::deciding_behind(&gate, |run| {
        Ok(run.status(if run.number == 1 { 500 } else { 201 }))
    });
    let store = Faulty::new(place.open().await);
    let builder = patient(DynStore::new(store.clone())).wait(Duration::from_secs(60));
    let api = Api::new(builder, &probe);
    let owner = api.spawn(keyed("K"));
    gate.arrival().await;
    let waiters: Vec<_> = (0..10).map(|_| api.spawn(keyed("K"))).collect();
    eventually(async || (store.calls_of(Call::Read) >= 10).then_some(())).await;
    gate.let_one_pass();
    owner.await.unwrap().assert_live(500);
    // One of them runs; no second one does.
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
async fn rule_45_the_store_wakes_a_waiter_of_another_layer() {
    let store = memory();
    let gate = Gate::closed();
    let probe = Probe::behind(&gate);
    let layer = || required(store.clone()).wait(Duration::from_secs(60));
    let (one, other) = (Api::new(layer(), &probe), Api::new(layer(), &probe));
    let owner = one.spawn(keyed("K"));
    gate.arrival().await;
    let waiter = other.spawn(keyed("K"));
    // Until the pauses of the waiter are long.
    sleep(Duration::from_secs(10)).await;
    let ended = Instant::now();
    gate.open();
    let owner = owner.await.unwrap();
    waiter.await.unwrap().assert_replay_of(&owner);
    assert_eq!(ended.elapsed(), Duration::ZERO);
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
    let store = Faulty::new(MemoryStore::new());
    let one_waits = required(DynStore::new(store.clone()))
        .wait(Duration::from_secs(60))
        .max_waiters(1);
    let api = Api::new(one_waits, &probe);
    let owner = api.spawn(keyed("K"));
    gate.arrival().await;
    let first = api.spawn(keyed("K"));
    settle().await;
    // A second waiter exceeds the limit and is refused at once.
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
    let probe = Probe::deciding_behind(&gate, |_| Err(Failure("it broke")));
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
    let claim = claimed_elsewhere(&store, "K", Duration::from_secs(60), DAY).await;
    let waiter = api.spawn(keyed("K"));
    settle().await;
    // A release by another process wakes no waiter here, so that another
    // request claims the key first.
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
    // One permit below the layer, for all requests.
    let service = layer.layer(ConcurrencyLimit::new(probe.clone(), 1));
    let asked = |key: &'static str| {
        let service = service.clone();
        tokio::spawn(async move { send(service, keyed(key)).await })
    };

    // The owner runs elsewhere, so that it holds no permit of this service.
    let claim = claimed_elsewhere(&store, "K", Duration::from_secs(60), DAY).await;
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

const DAY: Duration = Duration::from_secs(24 * 3600);
