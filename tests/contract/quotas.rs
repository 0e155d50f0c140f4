//! Rule 76: quotas for each scope.

use std::time::Duration;

use axum::response::IntoResponse as _;
use futures_util::poll;
use http::{Response, StatusCode};
use tower_idempotency::{
    DynStore, IdempotencyBuilder, MemoryStore, Quota, Reconciler, Recovery, SqliteStore, Store,
    StoreError,
    store::{Transitioned, UsageDelta, admin::Resolution},
};

use crate::{
    api::{Answer, Api, eventually, keyed, named, record, required, settle},
    faulty::{Call, Fault, Faulty, unsent},
    probe::{Probe, Run},
    stores::{Place, check, memory, on_each_store},
};

on_each_store! {
    rule_76_scope_over_its_quota_gets_429_until_its_records_expire
    rule_76_processes_share_one_quota
}

async fn rule_76_scope_over_its_quota_gets_429_until_its_records_expire(place: &Place) {
    let probe = Probe::counting();
    let short = of_records(place.open().await, 2)
        .lease(Duration::from_secs(1))
        .retention(Duration::from_millis(2_500));
    let api = Api::new(short, &probe);
    let first = api.send(keyed("K")).await;
    first.assert_run(1);
    api.send(keyed("L")).await.assert_run(2);
    let refused = api.send(keyed("M")).await;
    assert_over_quota(&refused);
    assert!((1..=6).contains(&refused.retry_after().unwrap()));
    assert!(record(api.layer.store(), "M").await.is_none());
    // Another scope is not affected, and neither is a record that exists.
    api.send(keyed("M").from("other")).await.assert_run(3);
    api.send(keyed("K")).await.assert_replay_of(&first);
    let mismatch = api.send(keyed("K").body("another")).await;
    mismatch.assert_problem(422, "key-reused");
    let later = eventually(async || {
        let answer = api.send(keyed("M")).await;
        (answer.status != StatusCode::TOO_MANY_REQUESTS).then_some(answer)
    })
    .await;
    later.assert_run(4);
}

async fn rule_76_processes_share_one_quota(place: &Place) {
    let probe = Probe::counting();
    let process = async || Api::new(of_records(place.open().await, 5), &probe);
    let (one, other) = (process().await, process().await);
    other.send(keyed("first")).await.assert_run(1);
    for key in ["a", "b", "c", "d"] {
        one.send(keyed(key)).await.assert_live(201);
    }
    // Each reports its own count, and then reads that of the other.
    for _ in 0..2 {
        tokio::time::sleep(INTERVAL).await;
        for api in [&one, &other] {
            assert!(api.send(keyed("first")).await.is_replay());
        }
    }
    tokio::time::sleep(INTERVAL).await;
    // A process that starts asks the store first.
    for api in [one, other, process().await] {
        assert_over_quota(&api.send(keyed("new")).await);
    }
    assert_eq!(probe.runs(), 5);
}

#[tokio::test(start_paused = true)]
async fn rule_76_bytes_count_with_their_responses() {
    let probe = Probe::answering(|run| {
        let mut response = run.created();
        *response.body_mut() = vec![b'x'; 1_000].into();
        response
    });
    // Two records of about 1,500 bytes fit; the last one may exceed the limit.
    let quota = Quota::unlimited().max_bytes(2_000);
    let api = Api::new(required(memory()).quota(quota), &probe);
    for key in ["K", "L"] {
        api.send(keyed(key)).await.assert_live(201);
    }
    let refused = api.send(keyed("M")).await;
    assert_over_quota(&refused);
    assert!(
        refused.problem()["detail"]
            .as_str()
            .unwrap()
            .contains("2000 bytes")
    );
    // A day, and the part of it by which records are counted for longer.
    let after = refused.retry_after().unwrap();
    assert!((86_400..93_000).contains(&after), "{after}");
    tokio::time::advance(Duration::from_secs(after)).await;
    api.send(keyed("M")).await.assert_live(201);
}

#[tokio::test(start_paused = true)]
async fn rule_76_retry_of_a_released_key_counts_once() {
    let probe = Probe::statuses(&[500, 500, 201, 201]);
    let store = memory();
    let api = Api::new(of_records(store.clone(), 2), &probe);
    for status in [500, 500, 201] {
        api.send(keyed("K")).await.assert_live(status);
        // The second process has the first one's count as well.
        tokio::time::sleep(INTERVAL).await;
    }
    api.send(keyed("L")).await.assert_live(201);
    tokio::time::sleep(INTERVAL).await;
    assert_eq!(kept(&store).await.0, 2);
    assert_over_quota(&api.send(keyed("M")).await);
}

#[tokio::test(start_paused = true)]
async fn rule_76_released_key_is_retried_over_the_quota() {
    let probe = Probe::statuses(&[500, 201]);
    let api = Api::new(of_records(memory(), 1), &probe);
    api.send(keyed("K")).await.assert_live(500);
    assert_over_quota(&api.send(keyed("L")).await);
    api.send(keyed("K")).await.assert_live(201).assert_run(2);
}

#[tokio::test(start_paused = true)]
async fn rule_76_unknown_outcome_counts_for_its_own_retention() {
    let probe = Probe::statuses(&[504, 201]);
    let api = Api::new(of_records(memory(), 1), &probe);
    api.send(keyed("K")).await.assert_live(504);
    for _ in 0..7 {
        assert_over_quota(&api.send(keyed("L")).await);
        tokio::time::advance(DAY).await;
    }
    tokio::time::advance(DAY / 2).await;
    api.send(keyed("L")).await.assert_live(201);
}

#[tokio::test(start_paused = true)]
async fn rule_76_response_with_another_retention_counts_for_that() {
    let probe = Probe::statuses(&[404, 201]);
    let builder = of_records(memory(), 1).retention_for(StatusCode::NOT_FOUND, 3 * DAY);
    let api = Api::new(builder, &probe);
    api.send(keyed("K")).await.assert_live(404);
    tokio::time::advance(2 * DAY).await;
    assert_over_quota(&api.send(keyed("L")).await);
    tokio::time::advance(2 * DAY).await;
    api.send(keyed("L")).await.assert_live(201);
}

#[tokio::test(flavor = "multi_thread")]
async fn rule_76_committed_response_counts_for_its_own_retention() {
    check(Place::sqlite().await, async |place: &Place| {
        let address = place.address();
        let path = address.strip_prefix("sqlite:").unwrap();
        let store = SqliteStore::open(path).await.unwrap();
        let committing = store.clone();
        let probe = Probe::running(move |run: Run| {
            let store = committing.clone();
            async move {
                let operation = run.operation();
                let transaction = store.begin(&operation).await.unwrap();
                let committed = store.commit(&operation, transaction, run.created());
                Ok(committed.await.into_response())
            }
        });
        let builder = of_records(DynStore::new(store), 1)
            .lease(Duration::from_secs(1))
            .retention(Duration::from_millis(1_500))
            .retention_for(StatusCode::CREATED, Duration::from_secs(60));
        let api = Api::new(builder, &probe);
        let first = api.send(keyed("K")).await;
        first.assert_live(201);
        tokio::time::sleep(Duration::from_secs(3)).await;
        assert_over_quota(&api.send(keyed("L")).await);
        api.send(keyed("K")).await.assert_replay_of(&first);
    })
    .await;
}

#[tokio::test(start_paused = true)]
async fn rule_76_rerun_after_a_hook_counts_for_its_own_retention() {
    let probe = Probe::statuses(&[504, 201, 201]);
    let hook = Reconciler::new(|_| async { Some(Resolution::DidNotHappen) });
    let builder = of_records(memory(), 1).recovery(Recovery::Reconcile(hook));
    let api = Api::new(builder, &probe);
    api.send(keyed("K")).await.assert_live(504);
    api.send(keyed("K")).await.assert_live(201);
    assert_over_quota(&api.send(keyed("L")).await);
    tokio::time::advance(DAY + DAY / 10).await;
    api.send(keyed("L")).await.assert_live(201);
}

#[tokio::test(start_paused = true)]
async fn rule_76_forgotten_record_counts_until_it_would_have_expired() {
    let (store, probe) = (memory(), Probe::counting());
    let api = Api::new(of_records(store.clone(), 1), &probe);
    api.send(keyed("K")).await.assert_run(1);
    let fence = record(&store, "K").await.unwrap().fence;
    let _ = store.forget(&named("K"), fence).await.unwrap();
    assert_over_quota(&api.send(keyed("L")).await);
    // Its own key runs again, and counts once.
    api.send(keyed("K")).await.assert_run(2);
    tokio::time::advance(DAY + DAY / 10).await;
    api.send(keyed("L")).await.assert_run(3);
}

#[tokio::test(start_paused = true)]
async fn rule_76_retry_of_a_record_kept_for_ever_runs() {
    let (store, probe) = (memory(), Probe::statuses(&[504, 201]));
    let api = Api::new(of_records(store.clone(), 1), &probe);
    api.send(keyed("K")).await.assert_live(504);
    let fence = record(&store, "K").await.unwrap().fence;
    let (name, resolution) = (named("K"), Resolution::DidNotHappen);
    let resolved = store.resolve(&name, fence, &resolution, Duration::MAX);
    assert_eq!(resolved.await.unwrap(), Transitioned::Applied);
    api.send(keyed("K")).await.assert_live(201).assert_run(2);
}

#[tokio::test(start_paused = true)]
async fn rule_76_crashed_process_leaves_a_second_uncounted_at_most() {
    let (store, probe) = (memory(), Probe::counting());
    let crashing = tokio::runtime::Builder::new_current_thread()
        .enable_time()
        .start_paused(true)
        .build()
        .unwrap();
    let api = Api::new(of_records(store.clone(), 2), &probe);
    let crashed = std::thread::spawn(move || {
        crashing.block_on(async {
            api.send(keyed("K")).await.assert_run(1);
            tokio::time::sleep(INTERVAL).await;
            api.send(keyed("L")).await.assert_run(2);
        });
        // Its tasks end with the runtime.
    });
    crashed.join().unwrap();
    assert_eq!(kept(&store).await.0, 1);
    let other = Api::new(of_records(store, 2), &probe);
    other.send(keyed("M")).await.assert_run(3);
    assert_over_quota(&other.send(keyed("N")).await);
}

#[tokio::test(start_paused = true)]
async fn rule_76_runtime_that_ends_in_a_report_loses_no_other_scope() {
    let faulty = Faulty::new(MemoryStore::new());
    let api = Api::new(
        of_records(DynStore::new(faulty.clone()), 9),
        &Probe::counting(),
    );
    // Each scope asks once. The first call of the report does not end.
    let scopes = MOST_SCOPES + 1;
    faulty.inject(Call::AddUsage, scopes + 1..=scopes + 1, Fault::Hang);
    let ended = std::thread::spawn(move || {
        let runtime = tokio::runtime::Builder::new_current_thread()
            .enable_time()
            .start_paused(true)
            .build()
            .unwrap();
        runtime.block_on(async {
            for other in 1..scopes {
                let other = format!("other-{other}");
                api.send(keyed("K").from(&other)).await.assert_live(201);
            }
            api.send(keyed("K")).await.assert_live(201);
            tokio::time::sleep(INTERVAL).await;
        });
        api
    });
    let api = ended.join().unwrap();
    assert_eq!(faulty.calls_of(Call::AddUsage), scopes + 1);
    assert_eq!(kept(&faulty).await.0, 0);
    api.send(keyed("L")).await.assert_live(201);
    tokio::time::sleep(INTERVAL).await;
    assert_eq!(kept(&faulty).await.0, 2);
}

#[tokio::test(start_paused = true)]
async fn rule_76_request_that_nobody_polls_delays_no_other() {
    let faulty = Faulty::new(MemoryStore::new());
    let store = DynStore::new(faulty.clone());
    let api = Api::new(of_records(store, 9), &Probe::counting());
    faulty.inject(Call::AddUsage, ..=1, Fault::Delay(INTERVAL));
    let mut first = Box::pin(api.send(keyed("K")));
    while faulty.calls_of(Call::AddUsage) == 0 {
        assert!(poll!(first.as_mut()).is_pending());
        settle().await;
    }
    let other = tokio::time::timeout(2 * INTERVAL, api.send(keyed("L"))).await;
    other.expect("it waits for the first one").assert_run(1);
    first.await.assert_run(2);
}

#[tokio::test(start_paused = true)]
async fn rule_76_drained_process_leaves_nothing_uncounted() {
    let (store, probe) = (memory(), Probe::counting());
    let api = Api::new(of_records(store.clone(), 2), &probe);
    api.send(keyed("K")).await.assert_run(1);
    assert_eq!(api.layer.drain(DAY).await.left(), 0);
    let (records, bytes) = kept(&store).await;
    let name = ("acme-7".len() + "K".len()) as i64;
    assert_eq!(records, 1);
    assert!(bytes > 256 + name, "the response counts: {bytes}");
}

#[tokio::test(start_paused = true)]
async fn rule_76_failing_sums_leave_each_process_its_own_count() {
    for fault in [
        Fault::unavailable(),
        unsent(),
        Fault::Hang,
        Fault::Panic("a bug"),
    ] {
        let faulty = Faulty::new(MemoryStore::new());
        faulty.inject(Call::AddUsage, .., fault);
        let probe = Probe::counting();
        let api = Api::new(of_records(DynStore::new(faulty.clone()), 2), &probe);
        api.send(keyed("K")).await.assert_run(1);
        tokio::time::sleep(10 * INTERVAL).await;
        api.send(keyed("L")).await.assert_run(2);
        tokio::time::sleep(10 * INTERVAL).await;
        assert_over_quota(&api.send(keyed("M")).await);
        assert!(faulty.calls_of(Call::AddUsage) > 1);
    }
}

#[tokio::test(start_paused = true)]
async fn rule_76_sum_that_was_not_sent_is_added_later_once() {
    let faulty = Faulty::new(MemoryStore::new());
    faulty.inject(Call::AddUsage, ..=3, unsent());
    let api = Api::new(
        of_records(DynStore::new(faulty.clone()), 2),
        &Probe::counting(),
    );
    api.send(keyed("K")).await.assert_run(1);
    for _ in 0..5 {
        tokio::time::sleep(INTERVAL).await;
        api.send(keyed("K")).await;
    }
    assert_eq!(kept(&faulty).await.0, 1);
}

#[tokio::test(start_paused = true)]
async fn rule_76_idle_layer_and_layer_without_quota_ask_for_no_sums() {
    let faulty = Faulty::new(MemoryStore::new());
    let store = DynStore::new(faulty.clone());
    let without = Api::new(required(store.clone()), &Probe::counting());
    without.send(keyed("K")).await.assert_run(1);
    tokio::time::sleep(DAY).await;
    assert_eq!(faulty.calls_of(Call::AddUsage), 0);
    let api = Api::new(of_records(store, 9), &Probe::counting());
    for key in ["L", "M", "N"] {
        api.send(keyed(key)).await.assert_live(201);
    }
    // One asks for the scope, and one adds.
    tokio::time::sleep(DAY).await;
    assert_eq!(faulty.calls_of(Call::AddUsage), 2);
    assert_eq!(faulty.calls_of(Call::Read), 0);
}

#[tokio::test(start_paused = true)]
async fn rule_76_function_chooses_the_quota_of_a_request() {
    let probe = Probe::counting();
    let builder = required(memory()).quota_by(|scope, parts| match scope.as_str() {
        "panics" => panic!("a bug"),
        "free" => Quota::unlimited().max_records(1),
        "none" => Quota::unlimited().max_records(0),
        _ if parts.headers.contains_key("x-plan") => Quota::unlimited().max_records(2),
        _ => Quota::unlimited(),
    });
    let api = Api::new(builder, &probe);
    api.send(keyed("K").from("free")).await.assert_run(1);
    assert_over_quota(&api.send(keyed("L").from("free")).await);
    assert_over_quota(&api.send(keyed("K").from("none")).await);
    for key in ["K", "L", "M"] {
        api.send(keyed(key)).await.assert_live(201);
    }
    let panicked = api.send(keyed("K").from("panics")).await;
    panicked.assert_problem(500, "callback-panicked");
    assert_eq!(probe.runs(), 4);
}

#[tokio::test]
async fn rule_76_custom_renderer_may_answer_429_to_a_quota_alone() {
    let builder = of_records(memory(), 1).render(|_, _| {
        let mut response = Response::new("rendered".to_owned());
        *response.status_mut() = StatusCode::TOO_MANY_REQUESTS;
        Some(response)
    });
    let api = Api::new(builder, &Probe::counting());
    api.send(keyed("K")).await.assert_run(1);
    let refused = api.send(keyed("L")).await;
    assert_eq!(
        (refused.status.as_u16(), &refused.body[..]),
        (429, &b"rendered"[..])
    );
    assert!(refused.retry_after().is_some());
    api.send(keyed("")).await.assert_problem(400, "key-invalid");
}

#[tokio::test]
async fn rule_77_quota_that_allows_nothing_is_refused() {
    for quota in [
        Quota::unlimited().max_records(0),
        Quota::unlimited().max_bytes(0),
    ] {
        let error = required(memory()).quota(quota).build().unwrap_err();
        assert_eq!(error.setting(), "quota");
    }
}

/// A layer that lets each scope keep this many records.
fn of_records(store: DynStore, records: u64) -> IdempotencyBuilder<DynStore> {
    required(store).quota(Quota::unlimited().max_records(records))
}

#[track_caller]
fn assert_over_quota(answer: &Answer) {
    answer.assert_problem(429, "quota-exceeded");
    assert!(answer.retry_after().is_some());
}

/// What the store has added up for the usual caller: records and bytes.
async fn kept(store: &impl Store) -> (i64, i64) {
    let asked = [UsageDelta::none(named("K").scope().clone())];
    let usage: Result<_, StoreError> = store.add_usage(&asked).await;
    let usage = usage.unwrap().unwrap();
    let sum = |kept: fn(&tower_idempotency::store::Usage) -> i64| usage.iter().map(kept).sum();
    (sum(|usage| usage.records), sum(|usage| usage.bytes))
}

/// How many scopes one call to the store reports.
const MOST_SCOPES: usize = 100;
/// After this, the store has been told.
const INTERVAL: Duration = Duration::from_millis(1_100);
const DAY: Duration = Duration::from_secs(24 * 3600);
