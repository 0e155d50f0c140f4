//! A store that fails before and after the work.

use std::time::Duration;

use tokio::time::sleep;
use tower_idempotency::{
    MemoryStore, Ran, RunError, StoreErrorKind,
    test_support::{Fault, FaultyStore, StoreCall},
};

use crate::{Runs, guard, name, retry, told};

#[tokio::test(start_paused = true)]
async fn work_does_not_run_while_the_store_is_down() {
    let store = FaultyStore::new(MemoryStore::new());
    let (guard, runs) = (guard(store.clone()), Runs::default());
    store.inject(StoreCall::Claim, .., Fault::unavailable());
    let refused = guard.run(&name("job"), &"input", runs.work()).await;
    let Err(RunError::Store(error)) = refused else {
        panic!("work ran without a claim");
    };
    assert_eq!(error.kind(), StoreErrorKind::Unavailable);
    assert_eq!(runs.count(), 0);
}

/// The claim was made, and its answer was lost: it is withdrawn, since nothing ran.
#[tokio::test(start_paused = true)]
async fn a_claim_without_an_answer_is_withdrawn() {
    let store = FaultyStore::new(MemoryStore::new());
    let (guard, runs) = (guard(store.clone()), Runs::default());
    store.inject(StoreCall::Claim, 1..=1, Fault::HangAfterwards);
    assert_eq!(retry(&guard, "job", &runs).await, "store");
    sleep(Duration::from_secs(10)).await;
    assert_eq!(retry(&guard, "job", &runs).await, "now");
    assert_eq!(runs.count(), 1);
}

#[tokio::test(start_paused = true)]
async fn a_value_that_cannot_be_recorded_is_recorded_late() {
    let store = FaultyStore::new(MemoryStore::new());
    let (guard, runs) = (guard(store.clone()), Runs::default());
    store.inject(StoreCall::Complete, 1..=3, Fault::unavailable());
    let ran = guard.run(&name("job"), &"input", runs.work()).await;
    assert_eq!(ran.unwrap(), Ran::Unrecorded(1));
    assert_eq!(retry(&guard, "job", &runs).await, "in progress");
    assert_eq!(guard.drain(Duration::from_secs(60)).await.left(), 0);
    let guard = crate::guard(store);
    assert_eq!(retry(&guard, "job", &runs).await, "replayed");
    assert_eq!(runs.count(), 1);
}

#[tokio::test(start_paused = true)]
async fn an_error_of_work_reaches_its_caller_beside_one_of_the_store() {
    let store = FaultyStore::new(MemoryStore::new());
    let guard = guard(store.clone());
    store.inject(StoreCall::Release, .., Fault::unavailable());
    let failed = guard.run(&name("job"), &"input", async |_| Err::<usize, _>(7));
    assert_eq!(told(&failed.await), "failed");
}
