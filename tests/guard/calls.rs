//! Calls with one name: which of them run.

use std::{convert::Infallible, time::Duration};

use futures_util::future::join_all;
use serde::Serialize;
use tower_idempotency::{Disposition, Guard, MemoryStore, Quota, Ran, Release, RunError, Store};

use crate::{Runs, guard, name, retry, stores::on_each_store, told};

on_each_store! {
    hundred_callers_run_once_and_return_one_value;
    another_input_is_a_mismatch;
    an_error_releases_the_name_for_the_same_input;
    an_error_after_effects_started_leaves_the_outcome_unknown;
}

async fn hundred_callers_run_once_and_return_one_value(store: impl Store) {
    let guard = Guard::builder(store)
        .wait(Duration::from_secs(30))
        .build()
        .unwrap();
    let runs = Runs::default();
    let name = name("job");
    let calls = (0..100).map(|_| {
        let runs = runs.clone();
        guard.run(&name, &"input", async move |_| {
            tokio::time::sleep(Duration::from_millis(50)).await;
            Ok::<_, Infallible>(format!("value {}", runs.add()))
        })
    });
    let answers = join_all(calls).await;
    let now = answers.iter().filter(|answer| told(answer) == "now");
    assert_eq!(now.count(), 1);
    for answer in answers {
        assert_eq!(answer.unwrap().into_inner(), "value 1");
    }
    assert_eq!(runs.count(), 1);
}

async fn another_input_is_a_mismatch(store: impl Store) {
    #[derive(Serialize)]
    struct Order {
        item: &'static str,
        pieces: u32,
    }
    #[derive(Serialize)]
    struct SameOrder {
        pieces: u32,
        item: &'static str,
    }
    let (guard, runs, name) = (guard(store), Runs::default(), name("job"));
    let (item, pieces) = ("pen", 2);
    let first = guard.run(&name, &Order { item, pieces }, runs.work()).await;
    assert_eq!(told(&first), "now");
    let same = SameOrder { pieces, item };
    assert_eq!(
        told(&guard.run(&name, &same, runs.work()).await),
        "replayed"
    );
    let other = Order { item, pieces: 3 };
    assert_eq!(
        told(&guard.run(&name, &other, runs.work()).await),
        "mismatch"
    );
    assert_eq!(runs.count(), 1);
}

async fn an_error_releases_the_name_for_the_same_input(store: impl Store) {
    let (guard, runs, name) = (guard(store), Runs::default(), name("job"));
    let failing = runs.clone();
    let failed = guard.run(&name, &"input", async move |_| {
        failing.add();
        Err::<usize, _>("no connection")
    });
    assert!(matches!(
        failed.await,
        Err(RunError::Failed("no connection"))
    ));
    let other = guard.run(&name, &"another", runs.work()).await;
    assert_eq!(told(&other), "mismatch");
    assert_eq!(retry(&guard, "job", &runs).await, "now");
    assert_eq!(retry(&guard, "job", &runs).await, "replayed");
    assert_eq!(runs.count(), 2);
}

async fn an_error_after_effects_started_leaves_the_outcome_unknown(store: impl Store) {
    let (guard, runs) = (guard(store), Runs::default());
    let failed = guard.run(&name("job"), &"input", async |operation| {
        operation.effects_started();
        Err::<usize, _>("the provider did not answer")
    });
    assert_eq!(told(&failed.await), "failed");
    assert_eq!(retry(&guard, "job", &runs).await, "unknown");
    assert_eq!(runs.count(), 0);
}

#[tokio::test]
async fn work_decides_by_its_disposition() {
    let (guard, runs) = (guard(MemoryStore::new()), Runs::default());
    for (key, disposition, ends, retried) in [
        (
            "release",
            Disposition::Release(Release::AnyRequest),
            "unrecorded",
            "now",
        ),
        ("unknown", Disposition::Unknown, "unrecorded", "unknown"),
        ("record", Disposition::Record, "now", "replayed"),
    ] {
        let ran = guard.run(&name(key), &"input", async move |operation| {
            operation.set_disposition(disposition);
            Ok::<_, Infallible>(7)
        });
        assert_eq!(told(&ran.await), ends);
        assert_eq!(retry(&guard, key, &runs).await, retried);
    }
}

/// The work says that it is done. Its error has no form that could be replayed.
#[tokio::test]
async fn a_recorded_error_is_never_run_again() {
    let (guard, runs) = (guard(MemoryStore::new()), Runs::default());
    let failed = guard.run(&name("job"), &"input", async |operation| {
        operation.set_disposition(Disposition::Record);
        Err::<usize, _>("declined")
    });
    assert_eq!(told(&failed.await), "failed");
    assert_eq!(retry(&guard, "job", &runs).await, "not replayable");
}

#[tokio::test]
async fn limits_and_draining_refuse_work_before_it_runs() {
    let store = MemoryStore::new();
    let guard = Guard::builder(store).max_in_flight(1).build().unwrap();
    let runs = Runs::default();
    let (entered, mut started) = tokio::sync::mpsc::channel(1);
    let (release, released) = tokio::sync::oneshot::channel::<()>();
    let first = tokio::spawn(guard.run(&name("first"), &"input", async move |_| {
        entered.send(()).await.unwrap();
        released.await.unwrap();
        Ok::<_, Infallible>(1)
    }));
    started.recv().await.unwrap();
    assert_eq!(retry(&guard, "second", &runs).await, "overloaded");
    release.send(()).unwrap();
    assert!(matches!(first.await.unwrap(), Ok(Ran::Now(1))));
    assert_eq!(guard.drain(Duration::from_secs(5)).await.left(), 0);
    assert_eq!(retry(&guard, "second", &runs).await, "draining");
    assert_eq!(runs.count(), 0);
}

#[tokio::test]
async fn rule_76_quota_refuses_further_names_alone() {
    let quota = Quota::unlimited().max_records(1);
    let guard = Guard::builder(MemoryStore::new()).quota(quota);
    let (guard, runs) = (guard.build().unwrap(), Runs::default());
    for (key, told) in [
        ("first", "now"),
        ("second", "quota exceeded"),
        ("first", "replayed"),
    ] {
        assert_eq!(retry(&guard, key, &runs).await, told);
    }
    assert_eq!(runs.count(), 1);
}

#[tokio::test]
async fn an_input_that_is_not_json_runs_nothing() {
    let (guard, runs) = (guard(MemoryStore::new()), Runs::default());
    let input = std::collections::HashMap::from([((1, 2), 3)]);
    let ran = guard.run(&name("job"), &input, runs.work()).await;
    assert_eq!(told(&ran), "input invalid");
    assert_eq!(runs.count(), 0);
}

#[test]
fn settings_have_the_limits_of_the_layer() {
    let guard = || Guard::builder(MemoryStore::new());
    for (built, text) in [
        (
            guard().lease(Duration::ZERO).build(),
            "`lease` must be at least 1ms, got 0ns",
        ),
        (
            guard().max_value(1 << 30).build(),
            "`max_value` must be at most 268435456 bytes, got 1073741824",
        ),
        (
            guard().schema("x".repeat(256)).build(),
            "`schema` must have a name of at most 255 bytes, got 256",
        ),
        (
            guard().max_attempts(0).build(),
            "`max_attempts` must be at least 1, got 0",
        ),
    ] {
        assert_eq!(built.unwrap_err().to_string(), text);
    }
}
