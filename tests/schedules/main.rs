//! Jobs that run once for each period.

mod clocks;
#[path = "../databases/mod.rs"]
mod databases;
mod jobs;
mod missed;
mod periods;
mod settings;
#[path = "../guard/stores.rs"]
mod stores;

use std::{
    convert::Infallible,
    future::{Ready, ready},
    sync::{Arc, Mutex},
    time::Duration,
};

use tower_idempotency::{
    Guard, GuardBuilder, MemoryStore, Operation, Ran, RunError, Store,
    schedule::{Job, Missed, Period, PeriodRun, Periods, jiff::Timestamp},
    test_support::FaultyStore,
};

/// A store whose clock a test sets.
pub(crate) fn store() -> FaultyStore<MemoryStore> {
    FaultyStore::new(MemoryStore::new())
}

pub(crate) fn set_now<S>(store: &FaultyStore<S>, now: &str) {
    let now: Timestamp = now.parse().unwrap();
    store.set_now(now.as_duration().try_into().unwrap());
}

/// A guard that keeps its records long enough for schedules.
pub(crate) fn keeping<S: Store>(store: S) -> GuardBuilder<S> {
    let (retention, unknown) = (days(400), days(400));
    Guard::builder(store)
        .retention(retention)
        .unknown_retention(unknown)
}

pub(crate) fn billing<S: Store>(store: S, missed: Missed) -> Job<S> {
    let months = Periods::monthly("Europe/Berlin").unwrap();
    let guard = keeping(store).build().unwrap();
    Job::builder(guard, "billing", months)
        .since("2026-07")
        .missed(missed)
        .unwrap()
}

pub(crate) const ALL: Missed = Missed::All { at_most: 12 };

pub(crate) fn days(days: u64) -> Duration {
    Duration::from_secs(days * 24 * 3600)
}

/// The labels of the periods that ran, in their order.
#[derive(Clone, Default)]
pub(crate) struct Runs(Arc<Mutex<Vec<String>>>);

impl Runs {
    /// Work that succeeds at once, with the label as its value.
    pub(crate) fn work(
        &self,
    ) -> impl Fn(Operation, Period) -> Ready<Result<String, Infallible>> + Send + Sync + use<> {
        let runs = self.clone();
        move |_, period| {
            runs.add(&period);
            ready(Ok(period.label().to_owned()))
        }
    }

    pub(crate) fn add(&self, period: &Period) {
        self.0.lock().unwrap().push(period.label().to_owned());
    }

    /// Returns the labels, and forgets them.
    pub(crate) fn take(&self) -> Vec<String> {
        std::mem::take(&mut *self.0.lock().unwrap())
    }
}

/// What a call returned for each period, in words.
pub(crate) fn told<T, E>(runs: &[PeriodRun<T, E>]) -> Vec<(&str, &'static str)> {
    let told = runs.iter().map(|run| {
        let result = match &run.result {
            Ok(Ran::Now(_)) => "now",
            Ok(Ran::Replayed(_)) => "replayed",
            Err(RunError::Failed(_)) => "failed",
            Err(RunError::InProgress) => "in progress",
            Err(RunError::OutcomeUnknown) => "unknown",
            Err(RunError::Mismatch) => "mismatch",
            _ => "another result",
        };
        (run.period.label(), result)
    });
    told.collect()
}
