//! Work under a key that is not HTTP, on each kind of store.

mod calls;
mod commits;
#[path = "../databases/mod.rs"]
mod databases;
mod hooks;
mod logs;
mod processes;
mod requests;
mod runs;
#[path = "../scan/mod.rs"]
mod scan;
mod sealing;
mod store_failures;
mod stores;
#[allow(dead_code, reason = "it serves other tests too")]
#[path = "../contract/told.rs"]
mod told;
mod values;

use std::{
    convert::Infallible,
    sync::{
        Arc,
        atomic::{AtomicUsize, Ordering},
    },
    time::Duration,
};

use tower_idempotency::{
    Guard, GuardBuilder, Key, Operation, Ran, RunError, Scope, Store, store::RecordName,
};

/// A name of its own scope.
pub(crate) fn name(key: &str) -> RecordName {
    scan::secret(key);
    RecordName::new(Scope::single_tenant(), Key::new(key))
}

/// A guard with the default settings.
pub(crate) fn guard<S: Store>(store: S) -> Guard<S> {
    Guard::builder(store).build().unwrap()
}

/// A guard whose leases lapse within a test.
pub(crate) fn short<S: Store>(store: S) -> GuardBuilder<S> {
    Guard::builder(store).lease(LEASE)
}

/// Counts how often work ran. Each run returns the count as its value.
#[derive(Clone, Default)]
pub(crate) struct Runs(Arc<AtomicUsize>);

impl Runs {
    pub(crate) fn count(&self) -> usize {
        self.0.load(Ordering::SeqCst)
    }

    pub(crate) fn add(&self) -> usize {
        self.0.fetch_add(1, Ordering::SeqCst) + 1
    }

    /// Work that succeeds at once.
    pub(crate) fn work(&self) -> impl FnOnce(Operation) -> Once + Send + use<> {
        let runs = self.clone();
        move |_| std::future::ready(Ok(runs.add()))
    }
}

type Once = std::future::Ready<Result<usize, Infallible>>;

/// What a call returned, without its types.
pub(crate) fn told<T, E>(result: &Result<Ran<T>, RunError<E>>) -> &'static str {
    match result {
        Ok(Ran::Now(_)) => "now",
        Ok(Ran::Replayed(_)) => "replayed",
        Ok(Ran::Unrecorded(_)) => "unrecorded",
        Err(RunError::Failed(_)) => "failed",
        Err(RunError::InProgress) => "in progress",
        Err(RunError::OutcomeUnknown) => "unknown",
        Err(RunError::RolledBack) => "rolled back",
        Err(RunError::Mismatch) => "mismatch",
        Err(RunError::OtherKind) => "other kind",
        Err(RunError::NotReplayable) => "not replayable",
        Err(RunError::Unreadable(_)) => "unreadable",
        Err(RunError::InputInvalid(_)) => "input invalid",
        Err(RunError::Store(_)) => "store",
        Err(RunError::Overloaded) => "overloaded",
        Err(RunError::QuotaExceeded) => "quota exceeded",
        Err(RunError::Draining) => "draining",
        Err(_) => "another error",
    }
}

/// Calls with work that counts, and tells what came of it.
pub(crate) async fn retry<S: Store>(guard: &Guard<S>, key: &str, runs: &Runs) -> &'static str {
    told(&guard.run(&name(key), &"input", runs.work()).await)
}

pub(crate) const LEASE: Duration = Duration::from_secs(1);
