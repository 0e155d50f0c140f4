//! Rule 72: how long a record is kept.

use std::time::Duration;

use http::StatusCode;
use tower_idempotency::{DynStore, MemoryStore, Store};

use crate::{
    api::{Api, eventually, keyed, record, required},
    probe::{Gate, Probe},
    stores::{Place, memory, on_each_store},
};

on_each_store! {
    rule_72_after_the_retention_the_key_runs_again_without_a_sweep
}

async fn rule_72_after_the_retention_the_key_runs_again_without_a_sweep(place: &Place) {
    let store = place.open().await;
    let probe = Probe::counting();
    let short = required(store.clone())
        .lease(Duration::from_secs(1))
        .retention(Duration::from_millis(2_500));
    let api = Api::new(short, &probe);
    let first = api.send(keyed("K")).await;
    first.assert_run(1);
    let before = record(&store, "K").await.unwrap();
    let second = eventually(async || {
        let left = record(&store, "K").await.unwrap().expires_in;
        let answer = api.send(keyed("K")).await;
        if answer.is_replay() {
            answer.assert_replay_of(&first);
            None
        } else {
            // The record may expire between two requests.
            assert!(
                left.is_none_or(|left| left < Duration::from_millis(1_000)),
                "{left:?}"
            );
            Some(answer)
        }
    })
    .await;
    second.assert_run(2);
    // Another operation and a larger fence; the request may differ.
    let after = record(&store, "K").await.unwrap();
    assert_ne!(after.operation, before.operation);
    assert!(after.fence > before.fence);
    assert_eq!(after.attempt, 1);
}

#[tokio::test(start_paused = true)]
async fn rule_72_the_retention_of_a_record_starts_at_its_claim() {
    let gate = Gate::closed();
    let probe = Probe::behind(&gate);
    let api = Api::new(required(memory()), &probe);
    let owner = api.spawn(keyed("K"));
    gate.arrival().await;
    // The retention counts from the claim, not from the completion.
    tokio::time::sleep(Duration::from_secs(60)).await;
    gate.open();
    let first = owner.await.unwrap();
    tokio::time::advance(DAY - Duration::from_secs(60)).await;
    // At the very end of its retention the record still exists.
    api.send(keyed("K")).await.assert_replay_of(&first);
    tokio::time::advance(Duration::from_millis(1)).await;
    api.send(keyed("K").body("another")).await.assert_run(2);
    api.send(keyed("K")).await.assert_problem(422, "key-reused");
}

#[tokio::test(start_paused = true)]
async fn rule_72_a_status_may_have_its_own_retention() {
    let probe = Probe::statuses(&[404, 201, 201]);
    let builder = required(memory()).retention_for(StatusCode::NOT_FOUND, Duration::from_secs(60));
    let api = Api::new(builder, &probe);
    let first = api.send(keyed("K")).await;
    tokio::time::advance(Duration::from_secs(60)).await;
    api.send(keyed("K")).await.assert_replay_of(&first);
    tokio::time::advance(Duration::from_millis(1)).await;
    let second = api.send(keyed("K")).await;
    second.assert_live(201).assert_run(2);
    tokio::time::advance(DAY - Duration::from_secs(1)).await;
    api.send(keyed("K")).await.assert_replay_of(&second);
}

#[tokio::test(start_paused = true)]
async fn rule_72_a_record_outlives_its_retention_while_its_handler_runs() {
    let gate = Gate::closed();
    let probe = Probe::behind(&gate);
    let store = MemoryStore::new();
    let builder = required(DynStore::new(store.clone())).retention(Duration::from_secs(30));
    let api = Api::new(builder, &probe);
    let owner = api.spawn(keyed("K"));
    gate.arrival().await;
    for _ in 0..10 {
        tokio::time::sleep(Duration::from_secs(30)).await;
        api.send(keyed("K"))
            .await
            .assert_problem(409, "request-in-progress");
        let purged = store.purge_expired(100, DAY).await.unwrap();
        assert_eq!(purged.touched(), 0);
    }
    gate.open();
    let first = owner.await.unwrap();
    first.assert_run(1);
    tokio::time::advance(Duration::from_secs(30)).await;
    api.send(keyed("K")).await.assert_replay_of(&first);
    tokio::time::advance(Duration::from_millis(1)).await;
    api.send(keyed("K")).await.assert_run(2);
}

#[tokio::test(start_paused = true)]
async fn rule_72_an_unknown_outcome_is_kept_for_its_retention() {
    let probe = Probe::statuses(&[504, 201]);
    let store = MemoryStore::new();
    let builder = required(DynStore::new(store.clone()))
        .retention(Duration::from_secs(60))
        .unknown_retention(3 * DAY);
    let api = Api::new(builder, &probe);
    api.send(keyed("K")).await.assert_live(504);
    for _ in 0..3 {
        tokio::time::advance(DAY).await;
        api.send(keyed("K"))
            .await
            .assert_problem(409, "outcome-unknown");
        assert_eq!(store.purge_expired(100, DAY).await.unwrap().touched(), 0);
    }
    tokio::time::advance(Duration::from_millis(1)).await;
    api.send(keyed("K")).await.assert_live(201).assert_run(2);
}

#[tokio::test(start_paused = true)]
async fn rule_72_an_unknown_outcome_is_kept_a_week_by_default() {
    let api = Api::new(required(memory()), &Probe::statuses(&[504, 201]));
    api.send(keyed("K")).await.assert_live(504);
    tokio::time::advance(7 * DAY).await;
    api.send(keyed("K"))
        .await
        .assert_problem(409, "outcome-unknown");
    tokio::time::advance(Duration::from_millis(1)).await;
    api.send(keyed("K")).await.assert_live(201);
}

const DAY: Duration = Duration::from_secs(24 * 3600);
