//! What recovery does after an unknown outcome.

use std::convert::Infallible;

use tower_idempotency::{
    Guard, MemoryStore, Ran, Reconciler, Recovery, Store,
    store::admin::{RecordedResponse, Resolution},
};

use crate::{Runs, name, retry, stores::on_each_store, told};

on_each_store! {
    a_hook_supplies_the_value_of_work_that_happened;
    a_rerun_is_the_next_attempt;
}

async fn panicked<S: Store>(guard: &Guard<S>) {
    let panicked = guard.run(
        &name("job"),
        &"input",
        async |_| -> Result<usize, Infallible> { panic!("after its effect") },
    );
    assert_eq!(told(&panicked.await), "unknown");
}

async fn a_hook_supplies_the_value_of_work_that_happened(store: impl Store) {
    let hook = Reconciler::new(async |_| {
        let value = RecordedResponse::of_value(&41, "count/1").ok()?;
        Some(Resolution::Happened(value))
    });
    let of = Guard::builder(store).schema("count/1");
    let guard = of.recovery(Recovery::Reconcile(hook)).build().unwrap();
    let runs = Runs::default();
    panicked(&guard).await;
    for _ in 0..2 {
        let found = guard.run(&name("job"), &"input", runs.work()).await;
        assert_eq!(found.unwrap(), Ran::Replayed(41));
    }
    assert_eq!(runs.count(), 0);
}

async fn a_rerun_is_the_next_attempt(store: impl Store) {
    let guard = Guard::builder(store)
        .recovery(Recovery::Rerun)
        .build()
        .unwrap();
    panicked(&guard).await;
    let attempt = guard.run(&name("job"), &"input", async |operation| {
        Ok::<_, Infallible>(operation.attempt())
    });
    assert_eq!(attempt.await.unwrap(), Ran::Now(2));
}

#[tokio::test]
async fn a_hook_that_finds_nothing_lets_the_work_run() {
    let hook = Reconciler::new(async |_| Some(Resolution::DidNotHappen));
    let of = Guard::builder(MemoryStore::new());
    let guard = of.recovery(Recovery::Reconcile(hook)).build().unwrap();
    let runs = Runs::default();
    panicked(&guard).await;
    assert_eq!(retry(&guard, "job", &runs).await, "now");
    assert_eq!(retry(&guard, "job", &runs).await, "replayed");
}
