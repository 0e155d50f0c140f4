//! The task of a relay.

use std::{
    sync::{
        Arc,
        atomic::{AtomicU64, Ordering},
    },
    time::Duration,
};

use futures_util::FutureExt as _;
use tokio::{
    sync::watch,
    task::{JoinError, JoinSet},
    time::{self, Instant},
};

use super::{
    Event, Outbox, OutboxStore, Publish,
    outbox::sealed::{Settlement, Turn},
    publishing::{Publishing, STAGING_PAUSE},
};
#[cfg(feature = "metrics")]
use crate::telemetry::{
    log::Warnings,
    metrics::{LAG_DEAD, LAG_EVENTS, LAG_SECONDS, SNAPSHOT_SECONDS},
};
use crate::{
    error::StoreError,
    runtime::backoff::Backoff,
    store::Token,
    telemetry::log::{self, LogLimit},
};

/// A spawned relay.
pub(super) struct Run<S, P> {
    pub(super) outbox: Outbox<S>,
    pub(super) publishing: Arc<Publishing<P>>,
    pub(super) batch: usize,
    /// In bytes, as is `buffered`.
    pub(super) max_buffered: u64,
    pub(super) buffered: Arc<AtomicU64>,
    pub(super) size: BatchSize,
    pub(super) lease: Duration,
    pub(super) poll: Duration,
    pub(super) tasks: JoinSet<Ended>,
    pub(super) ended: Vec<Ended>,
    /// Whether a transaction stages the next event of a turn, which is due soon.
    pub(super) is_staging: bool,
    pub(super) failures: LogLimit,
}

/// A turn whose publications have ended, until it is settled.
pub(super) struct Ended {
    settlement: Settlement,
    lease_end: Instant,
}

impl<S, P, F> Run<S, P>
where
    S: OutboxStore,
    P: Fn(Event) -> F + Send + Sync + 'static,
    F: Future<Output = Publish> + Send + 'static,
{
    pub(super) async fn run(mut self) {
        // Aborted with the relay.
        let mut beside = JoinSet::new();
        if self.outbox.notifies {
            let listen = self.outbox.store.clone().listen();
            beside.spawn(log::catch_panic(listen, LISTENING_PANICKED).map(drop));
        }
        #[cfg(feature = "metrics")]
        {
            let report = report_lag(self.outbox.clone(), self.publishing.warnings.clone());
            beside.spawn(log::catch_panic(report, REPORT_PANICKED).map(drop));
        }
        let mut stop = self.publishing.stop.clone();
        let mut woken = self.outbox.store.wake().subscribe();
        let mut backoff = FAILURES;
        let mut is_due = true;
        loop {
            let is_stopped = *stop.borrow();
            let worked = match self.settle().await {
                Ok(settled) => {
                    is_due |= settled;
                    match is_due && !is_stopped {
                        true => self.take().await.map(|is_full| is_due = is_full),
                        false => Ok(()),
                    }
                }
                Err(error) => Err(error),
            };
            if let Err(error) = worked {
                log::warn(&self.failures, FAILED, Some(&error), None);
                time::sleep(backoff.pause()).await;
                is_due = true;
            } else {
                backoff = FAILURES;
            }
            if is_stopped && self.tasks.is_empty() && self.ended.is_empty() {
                return;
            }
            let may_take = is_due && !is_stopped && self.may_take();
            if may_take || !self.ended.is_empty() {
                continue;
            }
            let pause = match self.is_staging {
                true => self.poll.min(STAGING_PAUSE),
                false => self.poll,
            };
            tokio::select! {
                Some(ended) = self.tasks.join_next() => self.end(ended),
                _ = woken.changed(), if !is_stopped => is_due = true,
                () = time::sleep(pause), if !is_stopped => {
                    self.is_staging = false;
                    is_due = true;
                }
                () = stopped(&mut stop), if !is_stopped => {}
            }
        }
    }

    /// Keeps a turn until it is settled. One whose task panicked is left to its lease.
    fn end(&mut self, ended: Result<Ended, JoinError>) {
        match ended {
            Ok(ended) => self.ended.push(ended),
            Err(_panic) => self.publishing.warnings.warn(TASK_PANICKED, None, None),
        }
    }

    /// Settles the turns that have ended. Returns whether there were any.
    async fn settle(&mut self) -> Result<bool, StoreError> {
        while let Some(ended) = self.tasks.try_join_next() {
            self.end(ended);
        }
        let turns = self.ended.len();
        self.ended.retain(|ended| Instant::now() < ended.lease_end);
        if self.ended.len() < turns {
            self.publishing.warnings.warn(NOT_SETTLED, None, None);
        }
        if self.ended.is_empty() {
            return Ok(false);
        }
        let ended = std::mem::take(&mut self.ended);
        let (settlements, lease_ends): (Vec<_>, Vec<_>) = ended
            .into_iter()
            .map(|ended| (ended.settlement, ended.lease_end))
            .unzip();
        self.is_staging |= settlements
            .iter()
            .any(|settlement| settlement.pause == Some(STAGING_PAUSE));
        let settled = self.outbox.store.settle(&self.outbox.topic, &settlements);
        match settled.await {
            Ok(settled) => {
                if settled.len() < settlements.len() {
                    self.publishing.warnings.warn(NOT_SETTLED, None, None);
                }
                Ok(true)
            }
            Err(error) => {
                let ended = settlements.into_iter().zip(lease_ends);
                self.ended = ended
                    .map(|(settlement, lease_end)| Ended {
                        settlement,
                        lease_end,
                    })
                    .collect();
                Err(error)
            }
        }
    }

    /// Returns whether there is room for a turn and its events.
    fn may_take(&self) -> bool {
        let buffered = self.buffered.load(Ordering::Relaxed);
        self.tasks.len() < self.batch && buffered <= self.max_buffered / 2
    }

    /// Takes due turns, and returns whether there may be more.
    async fn take(&mut self) -> Result<bool, StoreError> {
        if !self.may_take() {
            return Ok(true);
        }
        let free = self.batch - self.tasks.len();
        let free_bytes = self.max_buffered - self.buffered.load(Ordering::Relaxed);
        let limit = self.size.of(free as u64).max(1) as usize;
        let token = Token::random();
        let lease_end = Instant::now() + self.lease;
        let (topic, lease) = (&self.outbox.topic, self.lease);
        let store = &self.outbox.store;
        let max_bytes = self.size.of(free_bytes);
        let turns = store.take(topic, token, limit as u32, max_bytes, lease);
        let turns = turns.await;
        let left = lease_end.saturating_duration_since(Instant::now());
        let is_in_time = left >= self.publishing.timeout;
        self.size.adapt(turns.is_ok() && is_in_time);
        let turns = turns?;
        if !is_in_time && !turns.is_empty() {
            self.publishing.warnings.warn(TAKEN_TOO_LATE, None, None);
        }
        let is_full = turns.len() == limit;
        for turn in turns {
            let publishing = Arc::clone(&self.publishing);
            let buffered = Buffered::new(&turn, &self.buffered);
            self.tasks.spawn(async move {
                let _buffered = buffered;
                let settlement = publishing.publish_all(turn, token, lease_end).await;
                Ended {
                    settlement,
                    lease_end,
                }
            });
        }
        Ok(is_full)
    }
}

/// Sets the gauges of the lag, now and then. Beside the relay: counting many events takes
/// longer than publishing a few.
#[cfg(feature = "metrics")]
async fn report_lag<S: OutboxStore>(outbox: Outbox<S>, warnings: Warnings) {
    let set = |name, value: f64| {
        metrics::gauge!(name, "topic" => outbox.topic.clone()).set(value);
    };
    let mut interval = time::interval(LAG_INTERVAL);
    loop {
        interval.tick().await;
        match outbox.lag().await {
            Ok(lag) => {
                set(LAG_EVENTS, lag.events as f64);
                set(LAG_SECONDS, lag.oldest.as_secs_f64());
                set(LAG_DEAD, lag.dead as f64);
                let snapshot = lag.oldest_snapshot.unwrap_or_default();
                set(SNAPSHOT_SECONDS, snapshot.as_secs_f64());
            }
            Err(error) => warnings.warn(LAG_NOT_READ, Some(&error), None),
        }
    }
}

/// The size of a batch. It is halved after each take that fails or is too slow, because a
/// statement that its timeout ended may succeed for fewer events. It doubles after some takes
/// that succeed.
#[derive(Default)]
pub(super) struct BatchSize {
    halvings: u32,
    successes: u32,
}

impl BatchSize {
    fn of(&self, whole: u64) -> u64 {
        whole >> self.halvings
    }

    fn adapt(&mut self, is_success: bool) {
        self.successes += 1;
        if !is_success {
            self.halvings = (self.halvings + 1).min(MOST_HALVINGS);
            self.successes = 0;
        } else if self.successes == SUCCESSES_TO_DOUBLE {
            self.halvings = self.halvings.saturating_sub(1);
            self.successes = 0;
        }
    }
}

/// Counts the payloads of a turn until it is dropped.
struct Buffered {
    bytes: u64,
    total: Arc<AtomicU64>,
}

impl Buffered {
    fn new(turn: &Turn, total: &Arc<AtomicU64>) -> Self {
        let bytes = turn
            .events
            .iter()
            .map(|(_, event)| event.payload().len() as u64);
        let bytes = bytes.sum();
        let total = Arc::clone(total);
        total.fetch_add(bytes, Ordering::Relaxed);
        Self { bytes, total }
    }
}

impl Drop for Buffered {
    fn drop(&mut self) {
        self.total.fetch_sub(self.bytes, Ordering::Relaxed);
    }
}

async fn stopped(stop: &mut watch::Receiver<bool>) {
    // The handle sends before it is dropped.
    let _ = stop.wait_for(|stop| *stop).await;
}

#[cfg(feature = "metrics")]
const LAG_NOT_READ: &str = "lag of the outbox not read, its gauges keep their last values";
const FAILED: &str = "the relay cannot take or settle events: they stay in the outbox, and it tries \
    again";
#[cfg(feature = "metrics")]
const REPORT_PANICKED: &str = "report of the lag of the outbox panicked and has ended, its gauges \
    keep their last values: a recorder of metrics panics";
const LISTENING_PANICKED: &str =
    "listening for notifications panicked and has ended, the relay polls";
const TASK_PANICKED: &str = "task of a relay panicked, its events are published again after the lease: \
    a value that the publisher drops, or a recorder of metrics, panics";
const TAKEN_TOO_LATE: &str = "events were read for most of their lease, so that they are not published \
    in it: the next batch is half as large, raise `lease`";
const NOT_SETTLED: &str = "a relay published events and its lease ended before it could say so: they \
    may be published again, raise `lease`, or lower `batch`";
/// A batch of 2^20 aggregates becomes one.
const MOST_HALVINGS: u32 = 20;
const SUCCESSES_TO_DOUBLE: u32 = 8;
const FAILURES: Backoff = Backoff::new(Duration::from_millis(100), Duration::from_secs(5));
#[cfg(feature = "metrics")]
const LAG_INTERVAL: Duration = Duration::from_secs(30);
