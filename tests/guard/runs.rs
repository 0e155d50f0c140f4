//! Work while it runs: its lease, its caller, and its panics.

use std::{convert::Infallible, time::Duration};

use tokio::{
    sync::{mpsc, oneshot},
    time::sleep,
};
use tower_idempotency::{
    Guard, MemoryStore, Operation, Ran, RunError, Store,
    store::Transitioned,
    test_support::{Fault, FaultyStore, StoreCall},
};

use crate::{LEASE, Runs, guard, name, retry, short, stores::on_each_store, told};

on_each_store! {
    a_panic_leaves_the_outcome_unknown;
    work_of_ten_leases_runs_once;
    work_of_a_dropped_caller_goes_on_and_is_replayed;
}

async fn a_panic_leaves_the_outcome_unknown(store: impl Store) {
    let (guard, runs) = (guard(store), Runs::default());
    let panicked = guard.run(
        &name("late"),
        &"input",
        async |_| -> Result<usize, Infallible> {
            tokio::task::yield_now().await;
            panic!("after the card was charged")
        },
    );
    assert_eq!(told(&panicked.await), "unknown");
    assert_eq!(retry(&guard, "late", &runs).await, "unknown");
    let at_once = |_: Operation| -> std::future::Ready<Result<usize, Infallible>> {
        panic!("before there is a future")
    };
    let panicked = guard.run(&name("at once"), &"input", at_once);
    assert_eq!(told(&panicked.await), "unknown");
    assert_eq!(retry(&guard, "at once", &runs).await, "unknown");
    assert_eq!(runs.count(), 0);
}

async fn work_of_ten_leases_runs_once(store: impl Store) {
    let guard = short(store).wait(Duration::from_secs(60)).build().unwrap();
    let runs = Runs::default();
    let (long, others) = (runs.clone(), runs.clone());
    let first = guard.run(&name("job"), &"input", async move |_| {
        let count = long.add();
        sleep(LEASE * 10).await;
        Ok::<_, Infallible>(count)
    });
    let waiting = async {
        sleep(LEASE * 2).await;
        guard.run(&name("job"), &"input", others.work()).await
    };
    let (first, waited) = tokio::join!(first, waiting);
    assert_eq!(first.unwrap(), Ran::Now(1));
    assert_eq!(waited.unwrap(), Ran::Replayed(1));
    assert_eq!(runs.count(), 1);
}

async fn work_of_a_dropped_caller_goes_on_and_is_replayed(store: impl Store) {
    let guard = Guard::builder(store)
        .wait(Duration::from_secs(30))
        .build()
        .unwrap();
    let runs = Runs::default();
    let (entered, mut started) = mpsc::channel(1);
    let (release, released) = oneshot::channel::<()>();
    let dropped = runs.clone();
    let call = guard.run(&name("job"), &"input", async move |_| {
        entered.send(()).await.unwrap();
        released.await.unwrap();
        Ok::<_, Infallible>(dropped.add())
    });
    {
        let mut call = Box::pin(call);
        tokio::select! {
            _ = &mut call => panic!("the work ended before it was released"),
            _ = started.recv() => {}
        }
    }
    release.send(()).unwrap();
    assert_eq!(retry(&guard, "job", &runs).await, "replayed");
    assert_eq!(runs.count(), 1);
}

#[tokio::test]
async fn a_call_that_is_never_polled_runs_nothing() {
    let (guard, runs) = (guard(MemoryStore::new()), Runs::default());
    drop(guard.run(&name("job"), &"input", runs.work()));
    tokio::task::yield_now().await;
    assert_eq!(guard.drain(Duration::from_secs(5)).await.left(), 0);
    assert_eq!(runs.count(), 0);
    assert!(guard.store().read(&name("job")).await.unwrap().is_none());
}

#[tokio::test(start_paused = true)]
async fn a_waiter_that_is_dropped_is_given_up() {
    let guard = short(MemoryStore::new())
        .wait(Duration::from_secs(60))
        .build()
        .unwrap();
    let runs = Runs::default();
    let (release, released) = oneshot::channel::<()>();
    let first = tokio::spawn(guard.run(&name("job"), &"input", async move |_| {
        released.await.unwrap();
        Ok::<_, Infallible>(1)
    }));
    sleep(LEASE).await;
    let waiter = guard.run(&name("job"), &"input", runs.work());
    assert!(tokio::time::timeout(LEASE, waiter).await.is_err());
    release.send(()).unwrap();
    assert_eq!(first.await.unwrap().unwrap(), Ran::Now(1));
    assert_eq!(guard.drain(Duration::from_secs(5)).await.left(), 0);
    assert_eq!(runs.count(), 0);
}

#[tokio::test(start_paused = true)]
async fn a_lost_lease_is_seen_and_the_value_still_recorded() {
    let guard = short(MemoryStore::new())
        .max_run_time(LEASE)
        .build()
        .unwrap();
    let runs = Runs::default();
    let ran = guard.run(&name("job"), &"input", async |operation: Operation| {
        operation.lease_lost().await;
        Ok::<_, Infallible>(7)
    });
    assert_eq!(ran.await.unwrap(), Ran::Now(7));
    assert_eq!(retry(&guard, "job", &runs).await, "replayed");
}

/// Only the answer of the claim that superseded a run counts.
#[tokio::test]
async fn a_superseded_run_receives_what_the_record_holds() {
    use tower_idempotency::store::admin::{RecordedResponse, Resolution};
    let store = std::sync::Arc::new(MemoryStore::new());
    let guard = guard(store.clone());
    let name = name("job");
    let (to_resolve, resolved_name) = (store.clone(), name.clone());
    let ran = guard.run(&name, &"input", async move |operation: Operation| {
        let marked = to_resolve.read(&resolved_name).await.unwrap().unwrap();
        let token = marked.token;
        let _ = to_resolve
            .mark_unknown(&resolved_name, token, LEASE)
            .await
            .unwrap();
        let value = RecordedResponse::of_value(&8, "").unwrap();
        let happened = Resolution::Happened(value);
        let _ = to_resolve
            .resolve(&resolved_name, operation.fence(), &happened, LEASE)
            .await
            .unwrap();
        Ok::<_, Infallible>(7)
    });
    assert_eq!(ran.await.unwrap(), Ran::Replayed(8));
}

#[tokio::test(start_paused = true)]
async fn superseded_run_whose_record_is_unreadable_is_unknown() {
    let store = FaultyStore::new(MemoryStore::new());
    let guard = guard(store.clone());
    let name = name("job");
    let (to_forget, forgotten) = (store.clone(), name.clone());
    let ran = guard.run(&name, &"input", async move |operation: Operation| {
        let forgot = to_forget.forget(&forgotten, operation.fence()).await;
        assert_eq!(forgot.unwrap(), Transitioned::Applied);
        to_forget.inject(StoreCall::Read, .., Fault::unavailable());
        Ok::<_, Infallible>(7)
    });
    // Not `Store`, which says that nothing ran.
    let error = ran.await.unwrap_err();
    assert!(matches!(error, RunError::OutcomeUnknown), "{error:?}");
}
