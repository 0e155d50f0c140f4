//! Rules 56, 57 and 60: owners that crash, hang or are taken over, and two
//! processes on one store.

use std::time::Duration;

use tower_idempotency::{
    DynStore, MemoryStore, Outcome, Recovery, RejectionKind, store::RecordState,
};

use crate::{
    api::{Api, eventually, keyed, record, required},
    crowd::{claimed_elsewhere, patient, the_only_runner},
    faulty::{Call, Fault, Faulty},
    probe::{Failure, Gate, Probe},
    stores::{Place, memory, on_each_store},
};

on_each_store! {
    rule_56_a_lapsed_lease_leaves_an_unknown_outcome
    rule_56_with_rerun_exactly_one_of_fifty_retries_runs
    rule_57_heartbeats_keep_a_lease_that_the_handler_outlives
    rule_57_a_fenced_owner_changes_nothing_and_answers_as_the_winner
    rule_57_an_owner_marked_unknown_completes_after_all
    rule_60_two_processes_keep_each_others_claims_and_records
}

async fn rule_56_a_lapsed_lease_leaves_an_unknown_outcome(place: &Place) {
    let store = place.open().await;
    let probe = Probe::counting();
    let api = Api::new(required(store.clone()), &probe);
    claimed_elsewhere(&store, "K", Duration::from_millis(800), DAY).await;
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
    let probe = Probe::deciding_behind(&gate, |run| {
        let mut response = run.created();
        let attempt = run.operation().attempt();
        response.headers_mut().insert("x-attempt", attempt.into());
        Ok(response)
    });
    let api = Api::new(patient(store.clone()).recovery(Recovery::Rerun), &probe);
    claimed_elsewhere(&store, "K", Duration::from_millis(300), DAY).await;
    let dead = record(&store, "K").await.unwrap();
    eventually(async || {
        let record = record(&store, "K").await.unwrap();
        matches!(record.state, RecordState::InProgress { lease_left: None }).then_some(())
    })
    .await;
    // Only the same request may take over.
    let other = api.send(keyed("K").body("{}")).await;
    other.assert_problem(422, "key-reused");
    let asked = (0..50).map(|_| api.spawn(keyed("K"))).collect();
    gate.arrival().await;
    let runner = the_only_runner(asked).await;
    gate.open();
    let first = runner.await.unwrap();
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
    let store = Faulty::new(place.open().await);
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
        (store.calls_of(Call::Renew) >= 9).then_some(())
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
    // The handler ends after all; no other request took over.
    gate.open();
    let late = owner.await.unwrap();
    late.assert_run(1);
    api.send(keyed("K")).await.assert_replay_of(&late);
}

async fn rule_57_a_fenced_owner_changes_nothing_and_answers_as_the_winner(place: &Place) {
    let gate = Gate::closed();
    let probe = Probe::behind(&gate);
    let cut_off = Faulty::new(place.open().await);
    let lease = Duration::from_millis(900);
    let slow = required(DynStore::new(cut_off.clone()))
        .lease(lease)
        .recovery(Recovery::Rerun);
    let slow = Api::new(slow, &probe);
    let other = required(place.open().await).recovery(Recovery::Rerun);
    let other = Api::new(other, &probe);

    // While the winner runs, the loser's client gets 409.
    let loser = slow.spawn(keyed("K"));
    gate.arrival().await;
    // From here on its heartbeats do not reach the store.
    cut_off.inject(Call::Renew, .., Fault::unavailable());
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
    let cut_off = Faulty::new(store.clone());
    cut_off.inject(Call::Renew, .., Fault::unavailable());
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
    let cut_off = Faulty::new(place.open().await);
    let short = Duration::from_millis(300);
    let slow = required(DynStore::new(cut_off.clone())).lease(short);
    let slow = Api::new(slow, &probe);
    let other = Api::new(required(place.open().await), &probe);
    let owner = slow.spawn(keyed("K"));
    gate.arrival().await;
    // From here on its heartbeats do not reach the store.
    cut_off.inject(Call::Renew, .., Fault::unavailable());
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

    // A key that one process releases runs in the other. An unknown outcome is
    // unknown in both.
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

const DAY: Duration = Duration::from_secs(24 * 3600);
