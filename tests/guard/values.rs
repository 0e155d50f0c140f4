//! Values that are replayed, and those that cannot be.

use std::{collections::HashMap, convert::Infallible};

use serde::{Deserialize, Serialize};
use tower_idempotency::{Guard, MemoryStore, Ran, RunError, Store};

use crate::{Runs, guard, name, retry, stores::on_each_store, told};

on_each_store! {
    a_value_is_replayed_as_it_was;
    a_value_that_cannot_be_written_never_runs_again;
    a_changed_type_is_unreadable_and_runs_nothing;
    another_schema_is_unreadable_and_runs_nothing;
}

#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
struct Invoice {
    number: u64,
    lines: Vec<(String, u32)>,
    note: Option<String>,
}

async fn a_value_is_replayed_as_it_was(store: impl Store) {
    let guard = guard(store);
    let invoice = Invoice {
        number: u64::MAX,
        lines: vec![("Füller".to_owned(), 2)],
        note: None,
    };
    let made = invoice.clone();
    let bill = || {
        let made = made.clone();
        guard.run(&name("job"), &(), async move |_| Ok::<_, Infallible>(made))
    };
    assert_eq!(bill().await.unwrap(), Ran::Now(invoice.clone()));
    assert_eq!(bill().await.unwrap(), Ran::Replayed(invoice));
}

/// JSON has no keys that are pairs.
async fn a_value_that_cannot_be_written_never_runs_again(store: impl Store) {
    let (guard, runs) = (guard(store), Runs::default());
    let work = || {
        let runs = runs.clone();
        guard.run(&name("job"), &(), async move |_| {
            Ok::<_, Infallible>(HashMap::from([((1, 2), runs.add())]))
        })
    };
    let Ok(Ran::Now(value)) = work().await else {
        panic!("the value is not returned to its caller");
    };
    assert_eq!(value[&(1, 2)], 1);
    assert_eq!(told(&work().await), "not replayable");
    assert_eq!(runs.count(), 1);
}

async fn a_changed_type_is_unreadable_and_runs_nothing(store: impl Store) {
    let (guard, runs) = (guard(store), Runs::default());
    let ran = guard.run(&name("job"), &"input", async |_| {
        Ok::<_, Infallible>("a secret text".to_owned())
    });
    assert_eq!(told(&ran.await), "now");
    let read = guard.run(&name("job"), &"input", runs.work()).await;
    let Err(RunError::Unreadable(error)) = read else {
        panic!("a text is replayed as a number");
    };
    assert!(!error.to_string().contains("secret"), "{error}");
    assert_eq!(runs.count(), 0);
}

async fn another_schema_is_unreadable_and_runs_nothing(store: impl Store) {
    let store = std::sync::Arc::new(store);
    let of = |schema: &str| {
        Guard::builder(store.clone())
            .schema(schema)
            .build()
            .unwrap()
    };
    let runs = Runs::default();
    assert_eq!(retry(&of("count/1"), "job", &runs).await, "now");
    assert_eq!(retry(&of("count/2"), "job", &runs).await, "unreadable");
    assert_eq!(retry(&of("count/1"), "job", &runs).await, "replayed");
    assert_eq!(runs.count(), 1);
}

#[tokio::test]
async fn a_value_over_the_limit_never_runs_again() {
    let (of, runs) = (Guard::builder(MemoryStore::new()), Runs::default());
    let guard = of.max_value(20).build().unwrap();
    let ran = guard.run(&name("job"), &"input", async |_| {
        Ok::<_, Infallible>("x".repeat(20))
    });
    assert_eq!(told(&ran.await), "now");
    assert_eq!(retry(&guard, "job", &runs).await, "not replayable");
    assert_eq!(retry(&guard, "small", &runs).await, "now");
}

/// Serialising it panics.
#[derive(Deserialize)]
struct Broken;

impl Serialize for Broken {
    fn serialize<S>(&self, _: S) -> Result<S::Ok, S::Error>
    where
        S: serde::Serializer,
    {
        panic!("no JSON of this value");
    }
}

#[tokio::test]
async fn a_value_that_panics_while_it_is_written_never_runs_again() {
    let (guard, runs) = (guard(MemoryStore::new()), Runs::default());
    let ran = guard.run(&name("job"), &"input", async |_| {
        Ok::<_, Infallible>(Broken)
    });
    assert_eq!(told(&ran.await), "now");
    assert_eq!(retry(&guard, "job", &runs).await, "not replayable");
}
