//! The operator's calls, and the sweeper.

use std::time::Duration;

use http::{Response, StatusCode};
use tower_idempotency::{
    DynStore, Fence, MemoryStore, Store, Sweeper,
    store::{
        RecordState, Transitioned,
        admin::{Filter, RecordedResponse, Resolution},
    },
};

use crate::{
    api::{Api, keyed, named, record, required},
    crowd::claimed_elsewhere,
    faulty::{Call, Fault, Faulty},
    probe::{Failure, Gate, Probe},
    stores::{Place, on_each_store},
};

on_each_store! {
    an_unknown_outcome_that_happened_is_replayed_from_then_on
    an_operation_resolved_as_undone_runs_for_the_same_request
    a_tombstone_ends_an_unknown_outcome_without_a_response
    a_crashed_request_is_found_and_resolved_without_a_retry
    an_operator_lists_unknown_outcomes_and_long_runs
    a_forgotten_record_lets_the_next_request_run
}

/// Runs K with an unknown outcome.
async fn lost(store: &DynStore) -> (Api, Probe, Fence) {
    let probe = Probe::running(|run| async move {
        match run.number {
            1 => Err(Failure("lost")),
            _ => Ok(run.created()),
        }
    });
    let api = Api::new(required(store.clone()), &probe);
    assert!(api.respond(keyed("K").0).await.is_err());
    api.send(keyed("K"))
        .await
        .assert_problem(409, "outcome-unknown");
    let fence = record(store, "K").await.unwrap().fence;
    (api, probe, fence)
}

const MINUTE: Duration = Duration::from_secs(60);

async fn an_unknown_outcome_that_happened_is_replayed_from_then_on(place: &Place) {
    let store = place.open().await;
    let (api, probe, seen) = lost(&store).await;
    let found = Response::builder()
        .status(StatusCode::CREATED)
        .header("location", "/payments/7")
        .body("paid after all")
        .unwrap();
    let happened = Resolution::Happened(RecordedResponse::new(found).unwrap());
    // Another fence than that of the last claim resolves nothing.
    let other = Fence::from(seen.get() + 1);
    let resolved = store
        .resolve(&named("K"), other, &happened, MINUTE)
        .await
        .unwrap();
    assert_eq!(resolved, Transitioned::Superseded);
    let resolved = store
        .resolve(&named("K"), seen, &happened, MINUTE)
        .await
        .unwrap();
    assert_eq!(resolved, Transitioned::Applied);
    for _ in 0..2 {
        let replay = api.send(keyed("K")).await;
        assert!(replay.is_replay());
        assert_eq!(
            (replay.status.as_u16(), &*replay.body),
            (201, &b"paid after all"[..])
        );
        assert_eq!(replay.header("location"), Some("/payments/7"));
    }
    assert_eq!(probe.runs(), 1);
}

async fn an_operation_resolved_as_undone_runs_for_the_same_request(place: &Place) {
    let store = place.open().await;
    let (api, probe, seen) = lost(&store).await;
    let before = record(&store, "K").await.unwrap();
    let resolved = store
        .resolve(&named("K"), seen, &Resolution::DidNotHappen, MINUTE)
        .await
        .unwrap();
    assert_eq!(resolved, Transitioned::Applied);
    api.send(keyed("K").body("{}"))
        .await
        .assert_problem(422, "key-reused");
    let first = api.send(keyed("K")).await;
    first.assert_live(201).assert_run(2);
    let after = record(&store, "K").await.unwrap();
    assert_eq!((after.operation, after.attempt), (before.operation, 2));
    api.send(keyed("K")).await.assert_replay_of(&first);
    assert_eq!(probe.runs(), 2);
}

async fn a_crashed_request_is_found_and_resolved_without_a_retry(place: &Place) {
    let store = place.open().await;
    claimed_elsewhere(&store, "K", Duration::from_millis(1), 60 * MINUTE).await;
    claimed_elsewhere(&store, "alive", MINUTE, 60 * MINUTE).await;
    tokio::time::sleep(Duration::from_millis(20)).await;
    let filter = Filter::in_progress_for(Duration::from_millis(10));
    let page = store.list(&filter, None, 10).await.unwrap();
    let response = Response::builder().status(201).body("paid after all");
    let response = RecordedResponse::new(response.unwrap()).unwrap();
    let happened = Resolution::Happened(response);
    for (name, record) in page.records {
        let is_crashed = name == named("K");
        let seen = record.fence;
        let resolved = store.resolve(&name, seen, &happened, MINUTE).await.unwrap();
        // A live lease protects its record.
        assert_eq!(resolved == Transitioned::Applied, is_crashed);
    }
    let probe = Probe::counting();
    let api = Api::new(required(store), &probe);
    let replay = api.send(keyed("K")).await;
    assert!(replay.is_replay());
    assert_eq!(replay.body, "paid after all");
    api.send(keyed("alive"))
        .await
        .assert_problem(409, "request-in-progress");
    assert_eq!(probe.runs(), 0);
}

async fn a_tombstone_ends_an_unknown_outcome_without_a_response(place: &Place) {
    let store = place.open().await;
    let (api, probe, seen) = lost(&store).await;
    let happened = Resolution::Happened(RecordedResponse::tombstone());
    let resolved = store
        .resolve(&named("K"), seen, &happened, MINUTE)
        .await
        .unwrap();
    assert_eq!(resolved, Transitioned::Applied);
    api.send(keyed("K"))
        .await
        .assert_problem(409, "response-not-replayable");
    assert_eq!(probe.runs(), 1);
}

async fn an_operator_lists_unknown_outcomes_and_long_runs(place: &Place) {
    let store = place.open().await;
    lost(&store).await;
    let gate = Gate::closed();
    let slow = Api::new(required(store.clone()), &Probe::behind(&gate));
    let owner = slow.spawn(keyed("L"));
    gate.arrival().await;
    let unknown = store
        .list(&Filter::unknown(), None, 10)
        .await
        .unwrap()
        .records;
    let names: Vec<_> = unknown
        .iter()
        .map(|(name, _)| name.key().as_str())
        .collect();
    assert_eq!(names, ["K"]);
    assert!(matches!(unknown[0].1.state, RecordState::Unknown));
    tokio::time::sleep(Duration::from_millis(20)).await;
    let running = store
        .list(&Filter::in_progress_for(Duration::from_millis(5)), None, 10)
        .await
        .unwrap()
        .records;
    let names: Vec<_> = running
        .iter()
        .map(|(name, _)| name.key().as_str())
        .collect();
    assert_eq!(names, ["L"]);
    let hour = Filter::in_progress_for(Duration::from_secs(3600));
    let page = store.list(&hour, None, 10).await.unwrap();
    assert!(page.records.is_empty());
    gate.open();
    owner.await.unwrap().assert_run(1);
}

async fn a_forgotten_record_lets_the_next_request_run(place: &Place) {
    let store = place.open().await;
    let (api, probe, seen) = lost(&store).await;
    let forgotten = store.forget(&named("K"), seen).await.unwrap();
    assert_eq!(forgotten, Transitioned::Applied);
    api.send(keyed("K").body("any"))
        .await
        .assert_live(201)
        .assert_run(2);
    assert!(record(&store, "K").await.unwrap().fence > seen);
    assert_eq!(probe.runs(), 2);
}

#[tokio::test(start_paused = true)]
async fn a_sweeper_removes_expired_records_and_reports_its_counts() {
    let store = MemoryStore::new();
    let probe = Probe::statuses(&[201, 504, 503]);
    let minute = Duration::from_secs(60);
    let builder = required(DynStore::new(store.clone()))
        .retention(minute)
        .unknown_retention(minute);
    let api = Api::new(builder, &probe);
    for key in ["completed", "unknown", "released"] {
        api.send(keyed(key)).await;
    }
    let gate = Gate::closed();
    let running = Api::new(
        required(DynStore::new(store.clone())),
        &Probe::behind(&gate),
    );
    let owner = running.spawn(keyed("running"));
    gate.arrival().await;

    // With batches of one, a sweep repeats until nothing is due.
    let sweeper = Sweeper::new(store.clone())
        .every(10 * minute)
        .batch(1)
        .spawn();
    tokio::time::sleep(5 * minute).await;
    assert_eq!(store.len(), 4, "expired, and not swept yet");
    tokio::time::sleep(7 * minute).await;
    assert_eq!(store.len(), 1);
    let report = sweeper.stop().await;
    assert_eq!(
        (report.sweeps, report.removed, report.removed_unknown),
        (1, 3, 1)
    );
    assert_eq!((report.marked_unknown, report.failures), (0, 0));
    gate.open();
    owner.await.unwrap().assert_run(1);

    // It has stopped.
    tokio::time::sleep(Duration::from_secs(48 * 3600)).await;
    assert_eq!(store.len(), 1);
}

#[tokio::test(start_paused = true)]
async fn a_sweeper_survives_store_failures_and_stops_when_dropped() {
    let faulty = Faulty::new(MemoryStore::new());
    faulty.inject(Call::PurgeExpired, 1..=2, Fault::unavailable());
    let minute = Duration::from_secs(60);
    let sweeper = Sweeper::new(DynStore::new(faulty.clone()))
        .every(minute)
        .spawn();
    tokio::time::sleep(10 * minute).await;
    let swept = faulty.calls_of(Call::PurgeExpired);
    assert!(swept >= 3);
    let report = sweeper.stop().await;
    assert_eq!(report.failures, 2);

    let sweeper = Sweeper::new(DynStore::new(faulty.clone()))
        .every(minute)
        .spawn();
    drop(sweeper);
    tokio::time::sleep(10 * minute).await;
    assert_eq!(faulty.calls_of(Call::PurgeExpired), swept);
}
