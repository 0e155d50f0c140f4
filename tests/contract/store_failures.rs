//! Rules 58 and 59: a store that fails before the run, and one that fails after it.

use std::time::Duration;

use http::StatusCode;
use tower_idempotency::{Disposition, DynStore, MemoryStore, Outcome, StoreFailure};

use crate::{
    api::{Answer, Api, eventually, keyed, required, settle},
    faulty::{Call, Fault, Faulty, corrupt, full, overloaded},
    probe::{Gate, Probe},
};

#[tokio::test(start_paused = true)]
async fn rule_58_while_the_store_cannot_be_reached_nothing_runs() {
    for fault in [
        Fault::unavailable(),
        Fault::LoseAnswer,
        Fault::Hang,
        Fault::HangAfterwards,
        full(),
        corrupt(),
    ] {
        let store = MemoryStore::new();
        let faulty = Faulty::new(store.clone());
        faulty.inject_all(fault);
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
        // Once the store answers, the claim is withdrawn and the key is free.
        faulty.heal();
        tokio::time::sleep(Duration::from_secs(60)).await;
        let api = Api::new(required(DynStore::new(faulty)), &probe);
        api.send(keyed("K")).await.assert_live(201).assert_run(1);
    }
}

#[tokio::test(start_paused = true)]
async fn rule_58_a_request_recovers_its_claim_after_a_lost_answer() {
    let faulty = Faulty::new(MemoryStore::new());
    faulty.inject(Call::Claim, 1..=1, Fault::LoseAnswer);
    let probe = Probe::counting();
    let api = Api::new(required(DynStore::new(faulty)), &probe);
    let first = api.send(keyed("K")).await;
    first.assert_live(201).assert_run(1);
    api.send(keyed("K")).await.assert_replay_of(&first);
}

#[tokio::test(start_paused = true)]
async fn rule_58_a_failing_store_does_not_rerun_a_recorded_request() {
    let faulty = Faulty::new(MemoryStore::new());
    let probe = Probe::counting();
    let api = Api::new(required(DynStore::new(faulty.clone())), &probe);
    let first = api.send(keyed("K")).await;
    faulty.inject_all(Fault::unavailable());
    api.send(keyed("K"))
        .await
        .assert_problem(503, "store-unavailable");
    faulty.heal();
    tokio::time::sleep(Duration::from_secs(60)).await;
    api.send(keyed("K")).await.assert_replay_of(&first);
    assert_eq!(probe.runs(), 1);
}

#[tokio::test(start_paused = true)]
async fn rule_58_a_route_may_run_unguarded_with_a_marker() {
    let faulty = Faulty::new(MemoryStore::new());
    faulty.inject_all(Fault::unavailable());
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
    // An unreadable record still prevents an unguarded run.
    faulty.heal();
    faulty.inject_all(corrupt());
    api.send(keyed("K"))
        .await
        .assert_problem(503, "store-unavailable");
    assert_eq!(probe.runs(), 2);
}

#[tokio::test(start_paused = true)]
async fn an_overloaded_store_refuses_and_nothing_runs_unguarded() {
    let faulty = Faulty::new(MemoryStore::new());
    let probe = Probe::answering(|run| run.created());
    let builder = required(DynStore::new(faulty.clone())).store_failure(StoreFailure::RunUnguarded);
    let api = Api::new(builder, &probe);
    faulty.inject_all(overloaded());
    let answer = api.send(keyed("K")).await;
    answer.assert_problem(503, "store-unavailable");
    assert_eq!(answer.header("retry-after"), Some("1"));
    // The refusal comes at once, after one call.
    assert_eq!(faulty.calls_of(Call::Claim), 1);
    assert_eq!(faulty.calls_of(Call::Release), 0);
    assert_eq!(probe.runs(), 0);
    faulty.heal();
    api.send(keyed("K")).await.assert_run(1);
}

#[tokio::test(start_paused = true)]
async fn rule_58_a_request_that_saw_a_record_never_runs_unguarded() {
    // The claim finds a record that may be claimed again; then the store fails.
    let faulty = Faulty::new(MemoryStore::new());
    let probe = Probe::answering(|run| run.status(500));
    let builder = required(DynStore::new(faulty.clone())).store_failure(StoreFailure::RunUnguarded);
    let api = Api::new(builder, &probe);
    api.send(keyed("K")).await.assert_live(500);
    faulty.inject(Call::Reclaim, .., Fault::unavailable());
    api.send(keyed("K"))
        .await
        .assert_problem(503, "store-unavailable");
    assert_eq!(probe.runs(), 1);

    // A waiter has read a running record; then the store fails.
    let gate = Gate::closed();
    let probe = Probe::deciding_behind(&gate, |run| Ok(run.status(500)));
    let faulty = Faulty::new(MemoryStore::new());
    faulty.inject(Call::Claim, 3.., Fault::unavailable());
    let builder = required(DynStore::new(faulty.clone()))
        .store_failure(StoreFailure::RunUnguarded)
        .wait(Duration::from_secs(60));
    let api = Api::new(builder, &probe);
    let owner = api.spawn(keyed("K"));
    gate.arrival().await;
    let waiter = api.spawn(keyed("K"));
    eventually(async || (faulty.calls_of(Call::Read) >= 1).then_some(())).await;
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
        Fault::unavailable(),
        Fault::Hang,
        Fault::LoseAnswer,
        Fault::HangAfterwards,
    ] {
        let faulty = Faulty::new(MemoryStore::new());
        faulty.inject(Call::Complete, .., fault);
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
        // Heartbeats keep the claim alive past its lease.
        tokio::time::sleep(Duration::from_secs(120)).await;
        let retry = api.send(keyed("K")).await;
        assert!(retry.is_replay() || retry.status == 409, "{retry:?}");
        faulty.heal();
        tokio::time::sleep(Duration::from_secs(60)).await;
        first.headers.remove("idempotent-recorded");
        api.send(keyed("K")).await.assert_replay_of(&first);
        assert_eq!(probe.runs(), 1);
    }
}

#[tokio::test(start_paused = true)]
async fn rule_59_a_response_never_recorded_never_runs_again() {
    let faulty = Faulty::new(MemoryStore::new());
    faulty.inject(Call::Complete, .., Fault::unavailable());
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
    let faulty = Faulty::new(MemoryStore::new());
    faulty.inject(Call::Complete, .., Fault::unavailable());
    let probe = Probe::counting();
    let small = required(DynStore::new(faulty.clone()))
        .late_recording_timeout(Duration::from_secs(900))
        .max_late_recording_bytes(8);
    let api = Api::new(small, &probe);
    let answer = api.send(keyed("K")).await;
    assert_eq!(answer.header("idempotent-recorded"), Some("false"));
    settle().await;
    let tried = faulty.calls_of(Call::Complete);
    faulty.heal();
    tokio::time::sleep(Duration::from_secs(120)).await;
    assert_eq!(faulty.calls_of(Call::Complete), tried);
    api.send(keyed("K"))
        .await
        .assert_problem(409, "outcome-unknown");
    assert_eq!(probe.runs(), 1);
}

#[tokio::test(start_paused = true)]
async fn rule_59_a_failed_release_or_unknown_mark_is_written_late() {
    for (status, call) in [(503, Call::Release), (504, Call::MarkUnknown)] {
        let faulty = Faulty::new(MemoryStore::new());
        faulty.inject(call, 1..=3, Fault::unavailable());
        let probe = Probe::statuses(&[status]);
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
