//! Removes expired records in the background.

use std::{panic::AssertUnwindSafe, sync::Arc, time::Duration};

use futures_util::FutureExt as _;
use tokio::{sync::SetOnce, task::JoinHandle, time};

use super::{Purged, Store, StoreError};
use crate::{
    runtime::backoff::jittered,
    telemetry::log::{self, LogLimit},
};

/// A task that removes expired records, batch by batch.
///
/// Retention does not depend on it: an expired record is treated as absent
/// whether it was swept or not. Several processes may sweep one store.
///
/// ```
/// # #[tokio::main(flavor = "current_thread")] async fn main() {
/// use std::time::Duration;
/// use tower_idempotency::{MemoryStore, Sweeper};
///
/// let store = MemoryStore::new();
/// let sweeper = Sweeper::new(store).every(Duration::from_secs(30)).spawn();
/// // … serve …
/// let report = sweeper.stop().await;
/// assert_eq!(report.removed, 0);
/// # }
/// ```
#[derive(Debug)]
#[must_use = "a sweeper does nothing until it is spawned"]
pub struct Sweeper<S> {
    store: S,
    every: Duration,
    batch: u32,
    pause: Duration,
    unknown_retention: Duration,
    failures: LogLimit,
}

/// What a [`Sweeper`] sweeps: every [`Store`], and the inbox of a store.
///
/// The trait is not to be implemented by applications.
pub trait Sweep: Send + Sync + 'static {
    /// Removes up to `limit` expired rows.
    fn sweep(
        &self,
        limit: u32,
        unknown_retention: Duration,
    ) -> impl Future<Output = Result<Purged, StoreError>> + Send;
}

impl<S: Store> Sweep for S {
    fn sweep(
        &self,
        limit: u32,
        unknown_retention: Duration,
    ) -> impl Future<Output = Result<Purged, StoreError>> + Send {
        self.purge_expired(limit, unknown_retention)
    }
}

impl<S: Sweep> Sweeper<S> {
    /// A sweeper of `store`, or of an inbox.
    pub fn new(store: S) -> Self {
        Self {
            store,
            every: Duration::from_secs(60),
            batch: 500,
            pause: Duration::from_millis(10),
            unknown_retention: Duration::from_secs(7 * 24 * 3600),
            failures: LogLimit::new(),
        }
    }

    /// The time between two sweeps, at least 1 ms. Each is put off by up to a tenth of it
    /// at random, so that processes do not sweep in step. Defaults to 60 s.
    pub fn every(mut self, interval: Duration) -> Self {
        self.every = interval.max(SHORTEST_INTERVAL);
        self
    }

    /// How many records one call to the store looks at. Defaults to 500.
    pub fn batch(mut self, records: u32) -> Self {
        self.batch = records.max(1);
        self
    }

    /// The pause between two batches of a sweep, which leaves room for claims.
    /// Defaults to 10 ms.
    pub fn pause(mut self, between_batches: Duration) -> Self {
        self.pause = between_batches;
        self
    }

    /// For how long a record that expired while in progress, with a lapsed
    /// lease, is shown as unknown. Defaults to 7 days.
    pub fn unknown_retention(mut self, retention: Duration) -> Self {
        self.unknown_retention = retention;
        self
    }

    /// Starts sweeping.
    ///
    /// # Panics
    ///
    /// Outside a Tokio runtime.
    pub fn spawn(self) -> SweeperHandle {
        #[cfg(feature = "metrics")]
        crate::telemetry::metrics::describe();
        let stop = Arc::default();
        let sweeping = self.run(Arc::clone(&stop));
        let task = tokio::spawn(log::catch_panic(sweeping, ENDED));
        SweeperHandle { stop, task }
    }

    async fn run(self, stop: Arc<Stop>) -> SweepReport {
        let mut report = SweepReport::default();
        loop {
            if pause(&stop, self.every.saturating_add(jittered(self.every / 10))).await {
                return report;
            }
            let before = report;
            self.sweep_all(&stop, &mut report).await;
            report.sweeps += 1;
            report.tell(&before);
        }
    }

    /// One sweep: batches until nothing more is due.
    async fn sweep_all(&self, stop: &Stop, report: &mut SweepReport) {
        loop {
            let purged = async {
                let retention = self.unknown_retention;
                Sweep::sweep(&self.store, self.batch, retention).await
            };
            match AssertUnwindSafe(purged).catch_unwind().await {
                Ok(Ok(purged)) => {
                    report.add(purged);
                    if purged.touched() < u64::from(self.batch) {
                        return;
                    }
                }
                Ok(Err(error)) => return self.fail(report, FAILED, Some(&error)),
                Err(_panic) => return self.fail(report, PANICKED, None),
            }
            if pause(stop, self.pause).await {
                return;
            }
        }
    }

    fn fail(&self, report: &mut SweepReport, message: &str, error: Option<&StoreError>) {
        report.failures += 1;
        let error = error.map(|error| error as _);
        log::warn(&self.failures, message, error, None);
    }
}

/// Stops a sweeper. Dropping it stops the sweeper too, after its batch.
#[derive(Debug)]
#[must_use = "the sweeper stops when its handle is dropped"]
pub struct SweeperHandle {
    stop: Arc<Stop>,
    /// Returns `None` after a panic.
    task: JoinHandle<Option<SweepReport>>,
}

impl SweeperHandle {
    /// Lets the current batch end, stops, and returns the counts of all sweeps.
    pub async fn stop(mut self) -> SweepReport {
        let _ = self.stop.set(());
        let report = (&mut self.task).await.ok().flatten();
        report.unwrap_or_default()
    }
}

impl Drop for SweeperHandle {
    fn drop(&mut self) {
        // It may have been stopped before.
        let _ = self.stop.set(());
    }
}

/// What a sweeper did since it started.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub struct SweepReport {
    /// Sweeps, each of one or more batches.
    pub sweeps: u64,
    /// Records removed.
    pub removed: u64,
    /// Of those removed, the ones whose outcome was still unknown.
    pub removed_unknown: u64,
    /// Records in progress that became unknown.
    pub marked_unknown: u64,
    /// Sweeps that the store broke off, or in which it panicked. Each is logged at
    /// WARN with its cause, at most one in 5 seconds.
    pub failures: u64,
}

impl SweepReport {
    fn add(&mut self, purged: Purged) {
        self.removed += purged.removed;
        self.removed_unknown += purged.removed_unknown;
        self.marked_unknown += purged.marked_unknown;
    }

    /// One event for a sweep that did something.
    fn tell(&self, before: &Self) {
        let removed = self.removed - before.removed;
        let removed_unknown = self.removed_unknown - before.removed_unknown;
        let marked_unknown = self.marked_unknown - before.marked_unknown;
        if removed + marked_unknown == 0 {
            return;
        }
        #[cfg(feature = "tracing")]
        tracing::info!(
            target: "tower_idempotency",
            removed,
            removed_unknown,
            marked_unknown,
            "expired records swept"
        );
        #[cfg(feature = "metrics")]
        {
            use crate::telemetry::metrics::SWEPT;
            metrics::counter!(SWEPT, "what" => "removed").increment(removed);
            metrics::counter!(SWEPT, "what" => "removed-unknown").increment(removed_unknown);
            metrics::counter!(SWEPT, "what" => "marked-unknown").increment(marked_unknown);
        }
        let _ = removed_unknown;
    }
}

/// Set when the sweeper is to stop.
type Stop = SetOnce<()>;

/// Returns whether the sweeper was stopped meanwhile.
async fn pause(stop: &Stop, duration: Duration) -> bool {
    time::timeout(duration, stop.wait()).await.is_ok()
}

const SHORTEST_INTERVAL: Duration = Duration::from_millis(1);
const FAILED: &str = "sweep failed, expired records stay in the store until the next one";
const ENDED: &str = "sweeper panicked and has ended, expired records stay in the store: restart the \
    process, and find out whether a recorder of metrics panics";
const PANICKED: &str = "sweep panicked, expired records stay in the store until the next one";
