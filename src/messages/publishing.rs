//! How a relay publishes the events of one turn.

use std::{
    panic::AssertUnwindSafe,
    sync::{
        Arc,
        atomic::{AtomicU64, Ordering},
    },
    time::Duration,
};

use futures_util::FutureExt as _;
use tokio::{
    sync::watch,
    time::{self, Instant},
};

use super::{
    Counted, Event, GiveUp, Publish, count,
    outbox::sealed::{Settlement, Turn},
};
use crate::{runtime::backoff::Backoff, store::Token, telemetry::log::Warnings};

/// How the events of a turn are published.
pub(super) struct Publishing<P> {
    pub(super) publish: P,
    pub(super) timeout: Duration,
    pub(super) give_up: GiveUp,
    pub(super) stop: watch::Receiver<bool>,
    pub(super) counts: Arc<Counts>,
    pub(super) warnings: Warnings,
}

impl<P, F> Publishing<P>
where
    P: Fn(Event) -> F + Send + Sync + 'static,
    F: Future<Output = Publish> + Send + 'static,
{
    /// Publishes the events of a turn in order, up to the first that is not published.
    ///
    /// After a turn that failed or was not settled, publishes the first event alone. It is
    /// settled at once, so that its attempts are not counted for the next event.
    pub(super) async fn publish_all(
        &self,
        turn: Turn,
        token: Token,
        lease_end: Instant,
    ) -> Settlement {
        let mut settlement = Settlement {
            aggregate: turn.aggregate,
            token,
            through: 0,
            // Taken, but not tried.
            attempts: turn.attempts - 1,
            // Without events, a turn stays as long as a transaction stages the next one.
            pause: Some(match turn.events.is_empty() {
                true => STAGING_PAUSE,
                false => Duration::ZERO,
            }),
            is_all: false,
        };
        let mut failing_for = turn.failing_for;
        let (is_alone, last) = (turn.attempts > 1, turn.events.len().saturating_sub(1));
        for (index, (position, event)) in turn.events.into_iter().enumerate() {
            let left = lease_end.saturating_duration_since(Instant::now());
            if *self.stop.borrow() || left < self.timeout {
                return settlement;
            }
            // Its attempts may have ended their processes.
            let is_given_up = self.give_up.is_reached(settlement.attempts, failing_for);
            let published = match is_given_up {
                true => Publish::Reject,
                false => {
                    settlement.attempts += 1;
                    self.publish(event.clone()).await
                }
            };
            match published {
                Publish::Done => {
                    self.count(Counted::Published, &event);
                    settlement.through = position;
                    settlement.attempts = 0;
                    failing_for = Duration::ZERO;
                    if is_alone && index < last {
                        return settlement;
                    }
                    continue;
                }
                Publish::Retry if !self.give_up.is_reached(settlement.attempts, failing_for) => {
                    self.count(Counted::Retried, &event);
                    settlement.pause = Some(RETRIES.after(settlement.attempts));
                }
                Publish::Retry | Publish::Reject => {
                    self.count(Counted::Dead, &event);
                    settlement.pause = None;
                }
            }
            return settlement;
        }
        settlement.is_all = turn.is_whole;
        settlement
    }

    async fn publish(&self, event: Event) -> Publish {
        // The closure may panic before it returns its future.
        let publish = async { (self.publish)(event).await };
        let publish = AssertUnwindSafe(publish).catch_unwind();
        match time::timeout(self.timeout, publish).await {
            Ok(Ok(published)) => return published,
            Ok(Err(_)) => self.warnings.warn(PANICKED, None, None),
            Err(_) => {
                let limit = format!("limit {} s", self.timeout.as_secs_f64());
                self.warnings.warn_exceeded(TOO_SLOW, limit);
            }
        }
        Publish::Retry
    }

    fn count(&self, counted: Counted, event: &Event) {
        let count_in_report = match counted {
            Counted::Staged => return,
            Counted::Published => &self.counts.published,
            Counted::Retried => &self.counts.retried,
            Counted::Dead => &self.counts.dead,
        };
        count_in_report.fetch_add(1, Ordering::Relaxed);
        count(counted, 1);
        #[cfg(feature = "tracing")]
        match counted {
            Counted::Dead => tracing::warn!(
                target: "tower_idempotency",
                event = event.id(),
                "an event is dead, and later ones of its aggregate wait: `requeue` or `discard` it"
            ),
            _ => tracing::debug!(
                target: "tower_idempotency",
                event = event.id(),
                what = counted.name(),
                "outbox event"
            ),
        }
        let _ = event;
    }
}

/// What a relay reports.
#[derive(Debug, Default)]
pub(super) struct Counts {
    pub(super) published: AtomicU64,
    pub(super) retried: AtomicU64,
    pub(super) dead: AtomicU64,
}

const PANICKED: &str = "publisher of a relay panicked, its event stays and is tried again: mend the \
    publisher";
const TOO_SLOW: &str = "publisher of a relay took longer than a third of `lease`, its event stays and \
    is tried again: find out why the broker hangs, or raise `lease`";
/// Until a turn is due again whose next event is being staged.
pub(super) const STAGING_PAUSE: Duration = Duration::from_millis(50);
const RETRIES: Backoff = Backoff::new(Duration::from_secs(1), Duration::from_secs(60));
