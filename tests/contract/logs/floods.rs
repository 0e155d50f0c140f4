//! Many failures of one kind, and the descriptions of the metrics.

use std::time::Duration;

use http::Response;
use http_body_util::BodyExt as _;
use tokio::task::JoinSet;
use tower_idempotency::{DynStore, MemoryStore, Sweeper};

use super::{CLAIM_FAILED, HOUR, Log, answering, broken, secret};
use crate::{
    api::{Answer, Api, required, settle},
    faulty::{Call, Fault, Faulty, corrupt, full, overloaded},
    probe::{Probe, breaking_after},
    stores::memory,
};

#[tokio::test(start_paused = true)]
async fn f110_a_thousand_refusals_are_a_handful_of_events() {
    let log = Log::listen();
    let faulty = Faulty::new(MemoryStore::new());
    faulty.inject_all(Fault::unavailable());
    let api = Api::new(required(DynStore::new(faulty)), &Probe::counting());
    let mut asked = JoinSet::new();
    for number in 0..1_000 {
        let api = api.clone();
        asked.spawn(async move { api.send(secret(&number.to_string())).await });
    }
    let answers: Vec<Answer> = asked.join_all().await;
    assert!(answers.iter().all(|answer| answer.status == 503));
    assert!(log.warnings().len() < 10, "{:#?}", log.warnings());
    assert_eq!(log.so_far().0["store-unavailable"], 1_000);
    let before = log.all(CLAIM_FAILED).len();
    tokio::time::sleep(Duration::from_secs(6)).await;
    api.send(secret("next")).await;
    let events = log.all(CLAIM_FAILED);
    let suppressed: usize = events
        .iter()
        .map(|event| event.field("suppressed").parse::<usize>().unwrap())
        .sum();
    assert_eq!(suppressed + events.len(), 1_001);
    assert!(events.len() > before);
}

#[tokio::test(start_paused = true)]
async fn f110_a_thousand_unknown_outcomes_are_one_warning() {
    let log = Log::listen();
    let api = Api::new(required(memory()), &Probe::statuses(&[504]));
    for number in 0..1_000 {
        api.send(secret(&number.to_string())).await.assert_live(504);
    }
    assert_eq!(log.warnings().len(), 1, "{:#?}", log.warnings());
    // Each operation is an event of its own.
    assert_eq!(log.so_far().0["unknown"], 1_000);
    tokio::time::sleep(Duration::from_secs(6)).await;
    api.send(secret("next")).await;
    let last = log.warnings().pop().unwrap();
    assert_eq!(last.field("suppressed"), "999");
}

#[tokio::test(start_paused = true)]
async fn f110_a_thousand_notices_are_one_warning() {
    let log = Log::listen();
    let (_, store) = broken(Call::Complete, Fault::unavailable());
    let builder = required(store)
        .late_recording_timeout(Duration::from_secs(1))
        .max_late_recording_bytes(1 << 20);
    let api = Api::new(builder, &answering());
    for number in 0..1_000 {
        api.send(secret(&number.to_string())).await;
    }
    tokio::time::sleep(Duration::from_secs(4)).await;
    assert!(log.warnings().len() < 10, "{:#?}", log.warnings());
    log.only("recording of an outcome given up");
    assert_eq!(log.so_far().0["gave-up-recording"], 1_000);
}

#[tokio::test(start_paused = true)]
async fn f110_kinds_of_failures_do_not_suppress_one_another() {
    let log = Log::listen();
    let faulty = Faulty::new(MemoryStore::new());
    let store = DynStore::new(faulty.clone());
    let api = Api::new(required(store), &Probe::counting());
    for fault in [full(), corrupt(), overloaded()] {
        faulty.heal();
        faulty.inject(Call::Claim, .., fault);
        for _ in 0..2 {
            api.send(secret("K")).await;
        }
    }
    let kinds: Vec<_> = log
        .warnings()
        .iter()
        .map(|e| e.field("kind").to_owned())
        .collect();
    assert_eq!(kinds, ["full", "corrupt", "overloaded"]);
    // Another layer has its own limits.
    let other = Api::new(required(DynStore::new(faulty)), &Probe::counting());
    other.send(secret("K")).await;
    assert_eq!(log.warnings().len(), 4);
}

#[tokio::test(start_paused = true)]
async fn rule_75_a_layer_describes_each_metric_it_counts() {
    let log = Log::listen();
    let store = MemoryStore::new();
    let broken = Probe::answering(|_| Response::new(breaking_after(&["s3cr3t"])));
    let streaming = required(DynStore::new(store.clone())).max_response_body(1);
    let api = Api::new(streaming, &broken);
    let first = api.respond(secret("K").0).await.unwrap();
    first.into_body().collect().await.unwrap_err();
    settle().await;
    let names = ["idempotency_notices_total", "idempotency_requests_total"];
    assert_eq!(log.described(), Ok(names.map(str::to_owned).into()));
}

#[tokio::test(start_paused = true)]
async fn rule_75_a_sweeper_without_a_layer_describes_its_metric() {
    let store = MemoryStore::new();
    let api = Api::new(required(DynStore::new(store.clone())), &Probe::counting());
    api.send(secret("K")).await;
    let log = Log::listen();
    let sweeper = Sweeper::new(store).every(25 * HOUR).spawn();
    tokio::time::sleep(30 * HOUR).await;
    assert_eq!(sweeper.stop().await.removed, 1);
    let names = ["idempotency_swept_total".to_owned()];
    assert_eq!(log.described(), Ok(names.into()));
}
