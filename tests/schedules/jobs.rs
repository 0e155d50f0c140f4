//! Runs of periods: which are due, and what becomes of each.

use std::{convert::Infallible, time::Duration};

use futures_util::future::join_all;
use tower_idempotency::{
    Operation, Recovery, Store,
    schedule::{Job, Period, Periods},
    test_support::{Fault, FaultyStore, Gate, StoreCall},
};

use crate::{ALL, Runs, billing, keeping, set_now, store, stores::on_each_store, told};

on_each_store! {
    eight_schedulers_with_different_clocks_run_a_period_once;
}

/// Their clocks differ by up to an hour in each direction. That is more than the clock of
/// one store can differ between two calls.
async fn eight_schedulers_with_different_clocks_run_a_period_once(store: impl Store) {
    let (store, runs) = (std::sync::Arc::new(store), Runs::default());
    let ends = [
        "20:59", "21:00", "21:30", "21:59", "22:00", "22:15", "22:30", "23:00",
    ];
    let jobs = ends.map(|time| {
        let store = FaultyStore::new(store.clone());
        set_now(&store, &format!("2026-07-31T{time}:00Z"));
        let months = Periods::monthly("Europe/Berlin").unwrap();
        let guard = keeping(store)
            .wait(Duration::from_secs(30))
            .build()
            .unwrap();
        Job::builder(guard, "billing", months)
            .since("2026-07")
            .missed(ALL)
            .unwrap()
    });
    let answers = join_all(jobs.iter().map(|job| job.run_due(runs.work()))).await;
    assert_eq!(runs.take(), ["2026-07"]);
    for (answer, time) in answers.into_iter().zip(ends) {
        let answer = answer.unwrap();
        assert_eq!(answer.len(), usize::from(time >= "22:00"), "{time}");
        for run in answer {
            assert_eq!(run.result.unwrap().into_inner(), "2026-07");
        }
    }
}

#[tokio::test]
async fn a_period_is_due_at_its_end_and_runs_once() {
    let (store, runs) = (store(), Runs::default());
    let job = billing(store.clone(), ALL);
    set_now(&store, "2026-07-31T21:59:59.999999Z");
    assert!(job.run_due(runs.work()).await.unwrap().is_empty());
    set_now(&store, "2026-07-31T22:00:00Z");
    let first = job.run_due(runs.work()).await.unwrap();
    assert_eq!(told(&first), [("2026-07", "now")]);
    let again = job.run_due(runs.work()).await.unwrap();
    assert_eq!(told(&again), [("2026-07", "replayed")]);
    assert_eq!(runs.take(), ["2026-07"]);
}

#[tokio::test]
async fn nothing_runs_before_the_first_period() {
    let (store, runs) = (store(), Runs::default());
    let job = billing(store.clone(), ALL);
    set_now(&store, "2026-07-15T00:00:00Z");
    assert!(job.run_due(runs.work()).await.unwrap().is_empty());
    set_now(&store, "2026-10-15T00:00:00Z");
    let due = job.run_due(runs.work()).await.unwrap();
    let labels: Vec<_> = due.iter().map(|run| run.period.label()).collect();
    assert_eq!(labels, ["2026-07", "2026-08", "2026-09"]);
}

#[tokio::test]
async fn a_failed_period_runs_again_and_later_ones_still_run() {
    let (store, runs) = (store(), Runs::default());
    let job = billing(store.clone(), ALL);
    set_now(&store, "2026-09-15T00:00:00Z");
    let failing = runs.clone();
    let first = job.run_due(move |_: Operation, period: Period| {
        failing.add(&period);
        std::future::ready(match period.label() {
            "2026-07" => Err("no connection"),
            label => Ok(label.to_owned()),
        })
    });
    let first = first.await.unwrap();
    assert_eq!(told(&first), [("2026-07", "failed"), ("2026-08", "now")]);
    let second = job.run_due(runs.work()).await.unwrap();
    assert_eq!(told(&second), [("2026-07", "now"), ("2026-08", "replayed")]);
    assert_eq!(runs.take(), ["2026-07", "2026-08", "2026-07"]);
}

#[tokio::test]
async fn a_panic_leaves_a_period_unknown_until_it_is_resolved() {
    use tower_idempotency::store::admin::{RecordedResponse, Resolution};
    let (store, runs) = (store(), Runs::default());
    let job = billing(store.clone(), ALL);
    set_now(&store, "2026-08-15T00:00:00Z");
    let panicked = job.run_due(
        async |_: Operation, _: Period| -> Result<String, Infallible> {
            panic!("in the middle of the invoices")
        },
    );
    assert_eq!(told(&panicked.await.unwrap()), [("2026-07", "unknown")]);
    let again = job.run_due(runs.work()).await.unwrap();
    assert_eq!(told(&again), [("2026-07", "unknown")]);
    let name = job.record_of(&again[0].period);
    assert_eq!(name.scope().as_str(), "~schedules");
    assert_eq!(name.key().as_str(), "billing:2026-07");
    let record = store.read(&name).await.unwrap().unwrap();
    let value = RecordedResponse::of_value("2026-07", "").unwrap();
    let happened = Resolution::Happened(value);
    let resolved = store
        .resolve(&name, record.fence, &happened, Duration::ZERO)
        .await;
    assert!(resolved.is_ok());
    let resolved = job.run_due(runs.work()).await.unwrap();
    assert_eq!(told(&resolved), [("2026-07", "replayed")]);
    assert!(runs.take().is_empty());
}

#[tokio::test]
async fn a_rerun_repeats_a_period_with_the_next_attempt() {
    let store = store();
    let months = Periods::monthly("Europe/Berlin").unwrap();
    let guard = keeping(store.clone())
        .recovery(Recovery::Rerun)
        .build()
        .unwrap();
    let job = Job::builder(guard, "billing", months)
        .since("2026-07")
        .missed(ALL)
        .unwrap();
    set_now(&store, "2026-08-15T00:00:00Z");
    for attempt in [1, 2] {
        let run = job.run_due(async |operation: Operation, _: Period| {
            assert_eq!(operation.attempt(), 2, "the first attempt panics");
            Ok::<_, Infallible>(operation.attempt())
        });
        let expected = if attempt == 1 { "unknown" } else { "now" };
        assert_eq!(told(&run.await.unwrap()), [("2026-07", expected)]);
    }
}

#[tokio::test]
async fn a_changed_zone_or_kind_is_a_mismatch_and_runs_nothing() {
    let (store, runs) = (store(), Runs::default());
    set_now(&store, "2026-08-15T00:00:00Z");
    let first = billing(store.clone(), ALL)
        .run_due(runs.work())
        .await
        .unwrap();
    assert_eq!(told(&first), [("2026-07", "now")]);
    let guard = keeping(store.clone()).build().unwrap();
    let months = Periods::monthly("America/Santiago").unwrap();
    let moved = Job::builder(guard, "billing", months)
        .since("2026-07")
        .missed(ALL)
        .unwrap();
    let moved = moved.run_due(runs.work()).await.unwrap();
    assert_eq!(told(&moved), [("2026-07", "mismatch")]);
    assert_eq!(runs.take(), ["2026-07"]);
}

/// The periods run in order: those behind it wait for the next call.
#[tokio::test]
async fn a_period_that_runs_elsewhere_ends_the_call() {
    let (store, runs) = (store(), Runs::default());
    set_now(&store, "2026-09-15T00:00:00Z");
    let (one, other) = (billing(store.clone(), ALL), billing(store.clone(), ALL));
    let gate = Gate::closed();
    let held = gate.clone();
    let elsewhere = tokio::spawn(async move {
        let work = move |_: Operation, period: Period| {
            let held = held.clone();
            async move {
                held.pass().await;
                Ok::<_, Infallible>(period.label().to_owned())
            }
        };
        one.run_due(work).await
    });
    gate.arrival().await;
    let ended = other.run_due(runs.work()).await.unwrap();
    assert_eq!(told(&ended), [("2026-07", "in progress")]);
    gate.open();
    let elsewhere = elsewhere.await.unwrap().unwrap();
    assert_eq!(told(&elsewhere), [("2026-07", "now"), ("2026-08", "now")]);
    assert!(runs.take().is_empty());
}

#[tokio::test(start_paused = true)]
async fn a_store_that_fails_ends_the_call_before_any_work() {
    let (store, runs) = (store(), Runs::default());
    set_now(&store, "2026-09-15T00:00:00Z");
    let job = billing(store.clone(), ALL);
    store.inject(StoreCall::Claim, .., Fault::unavailable());
    let refused = job.run_due(runs.work()).await.unwrap();
    assert_eq!(told(&refused), [("2026-07", "another result")]);
    store.inject(StoreCall::Now, .., Fault::unavailable());
    assert!(job.run_due(runs.work()).await.is_err());
    assert!(runs.take().is_empty());
}
