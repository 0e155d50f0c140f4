//! Heartbeats: they renew the leases of running requests.
//!
//! They run on tasks of their own, so that a handler that never yields does not stop
//! them on a multi-threaded runtime. Most requests end before their first heartbeat is
//! due. Therefore one task of each runtime watches all young leases, and only a lease
//! whose first heartbeat is due gets a task of its own.

use std::{
    collections::VecDeque,
    mem,
    pin::pin,
    sync::{Arc, Weak},
    time::Duration,
};

use tokio::{
    runtime::{self, Handle},
    task::{JoinHandle, yield_now},
    time::{self, Instant},
};

use super::store_call::catch_panic;
use crate::{
    error::StoreError,
    operation::{Operation, Renewal, Transacted, WeakOperation},
    runtime::per_runtime::{PerRuntime, RuntimeState},
    store::{Store, Transitioned},
    telemetry::log::Warnings,
};

/// The heartbeats of a layer.
pub(crate) struct Heartbeats<S> {
    store: Arc<S>,
    settings: HeartbeatSettings,
    warnings: Warnings,
    schedules: PerRuntime<Schedule>,
}

#[derive(Clone, Copy)]
pub(crate) struct HeartbeatSettings {
    pub(crate) lease: Duration,
    pub(crate) interval: Duration,
    pub(crate) max_run_time: Duration,
    pub(crate) store_timeout: Duration,
}

/// The leases of one runtime whose first heartbeat is not due yet.
#[derive(Default)]
struct Schedule {
    /// Each with the time of its first heartbeat, in this order. Weak, so that an ended
    /// operation is freed.
    leases: VecDeque<(Instant, WeakOperation)>,
    /// How many of them have ended.
    ended: usize,
    watcher: Option<JoinHandle<()>>,
}

/// Keeps the lease of an operation renewed until it is dropped.
pub(crate) struct Heartbeat<S> {
    heartbeats: Arc<Heartbeats<S>>,
    runtime: runtime::Id,
    operation: Operation,
}

impl<S> Heartbeats<S> {
    pub(crate) fn new(store: Arc<S>, settings: HeartbeatSettings, warnings: Warnings) -> Self {
        Self {
            store,
            settings,
            warnings,
            schedules: PerRuntime::default(),
        }
    }
}

impl<S: Store> Heartbeats<S> {
    /// Starts to renew the lease of an operation.
    pub(crate) async fn start(self: &Arc<Self>, operation: &Operation) -> Heartbeat<S> {
        let runtime = Handle::current().id();
        let is_first = self.schedules.with(runtime, |schedule| {
            let now = Instant::now();
            schedule.forget_ended();
            // The watcher does so too, but a handler that blocks may delay it.
            schedule.start_due(self, now);
            let due = now + self.settings.interval;
            schedule.leases.push_back((due, operation.downgrade()));
            let is_first = schedule
                .watcher
                .as_ref()
                .is_none_or(JoinHandle::is_finished);
            if is_first {
                let watcher = watch(Arc::downgrade(self), runtime);
                schedule.watcher = Some(tokio::spawn(watcher));
            }
            is_first
        });
        let heartbeat = Heartbeat {
            heartbeats: Arc::clone(self),
            runtime,
            operation: operation.clone(),
        };
        // The watcher was spawned on this thread. A handler that blocks from its first
        // poll on would keep it from starting.
        if is_first {
            yield_now().await;
        }
        heartbeat
    }
}

impl<S> Drop for Heartbeat<S> {
    fn drop(&mut self) {
        // The lock of the lease is released first: the watcher takes the two locks in
        // the other order.
        let renewal = mem::replace(&mut *self.operation.lease().renewal(), Renewal::Ended);
        match renewal {
            Renewal::Scheduled => self
                .heartbeats
                .schedules
                .with(self.runtime, |schedule| schedule.ended += 1),
            // A call under way may be dropped: it is one atomic transition.
            Renewal::Running(task) => task.abort(),
            Renewal::Ended => {}
        }
    }
}

impl RuntimeState for Schedule {
    fn is_idle(&self) -> bool {
        let mut leases = self.leases.iter();
        self.watcher.as_ref().is_none_or(JoinHandle::is_finished)
            && leases.all(|(_, operation)| has_ended(operation))
    }
}

impl Schedule {
    /// Most leases end in the order in which they began: two are looked at for each
    /// that begins. Those behind a long run are forgotten together.
    fn forget_ended(&mut self) {
        for _ in 0..2 {
            let front = self.leases.front();
            if front.is_none_or(|(_, operation)| !has_ended(operation)) {
                break;
            }
            self.leases.pop_front();
            self.ended = self.ended.saturating_sub(1);
        }
        if self.ended > MIN_ENDED && self.ended * 2 > self.leases.len() {
            self.leases.retain(|(_, operation)| !has_ended(operation));
            self.ended = 0;
        }
    }

    /// Gives each lease whose first heartbeat is due a task of its own.
    fn start_due<S: Store>(&mut self, heartbeats: &Arc<Heartbeats<S>>, now: Instant) {
        while self.leases.front().is_some_and(|(due, _)| *due <= now)
            && let Some((_, operation)) = self.leases.pop_front()
        {
            let Some(operation) = operation.upgrade() else {
                self.ended = self.ended.saturating_sub(1);
                continue;
            };
            let mut renewal = operation.lease().renewal();
            match *renewal {
                Renewal::Ended => self.ended = self.ended.saturating_sub(1),
                _ => {
                    let task = renew(Arc::clone(heartbeats), operation.clone());
                    *renewal = Renewal::Running(tokio::spawn(task).abort_handle());
                }
            }
        }
    }
}

fn has_ended(operation: &WeakOperation) -> bool {
    let operation = operation.upgrade();
    operation.is_none_or(|operation| operation.lease().has_ended())
}

/// Gives leases tasks of their own when their first heartbeat is due. Ends when there
/// was no lease for the time of a heartbeat.
async fn watch<S: Store>(heartbeats: Weak<Heartbeats<S>>, runtime: runtime::Id) {
    let mut was_idle = false;
    while let Some(heartbeats) = heartbeats.upgrade() {
        let wake = heartbeats.schedules.with(runtime, |schedule| {
            let now = Instant::now();
            schedule.start_due(&heartbeats, now);
            let is_idle = schedule.leases.is_empty();
            if is_idle && was_idle {
                schedule.watcher = None;
                return None;
            }
            was_idle = is_idle;
            // A lease that begins meanwhile is due later.
            let next = now + heartbeats.settings.interval;
            let front = schedule.leases.front();
            Some(front.map_or(next, |(due, _)| next.min(*due)))
        });
        drop(heartbeats);
        let Some(wake) = wake else {
            return;
        };
        time::sleep_until(wake).await;
    }
}

/// Renews a lease until it is superseded, or until `max_run_time` has passed.
///
/// If the store may see the lease lapsed, because no renewal succeeded in time, the
/// operation's `lease_lost` resolves. The renewals continue: a lapsed lease that no other
/// request has taken over is still its owner's.
async fn renew<S: Store>(heartbeats: Arc<Heartbeats<S>>, operation: Operation) {
    let HeartbeatSettings {
        lease: length,
        interval,
        max_run_time,
        store_timeout,
    } = heartbeats.settings;
    let warnings = &heartbeats.warnings;
    let (name, token, lease) = (operation.name(), operation.token(), operation.lease());
    let last = lease.granted + max_run_time;
    let mut until = lease.granted + length;
    let mut next = Instant::now();
    loop {
        if !lease.is_lost() {
            next = next.min(until);
        }
        time::sleep_until(next.min(last)).await;
        let asked = Instant::now();
        if asked >= last {
            if lose(&operation).await {
                warnings.warn(RAN_TOO_LONG, None, Some(operation.id()));
            }
            return;
        }
        if asked >= until && !lease.is_lost() && !lapse(&operation, warnings).await {
            return;
        }
        let renewed = catch_panic(async { heartbeats.store.renew(name, token, length).await });
        let mut renewed = pin!(time::timeout(store_timeout, renewed));
        // A renewal that hangs does not hide the end of the lease.
        let lapses = async {
            match lease.is_lost() {
                true => std::future::pending().await,
                false => time::sleep_until(until).await,
            }
        };
        let answered = tokio::select! {
            biased;
            answered = &mut renewed => answered,
            () = lapses => {
                if !lapse(&operation, warnings).await {
                    return;
                }
                renewed.await
            }
        };
        let failure = match answered {
            Ok(Ok(Transitioned::Applied)) => {
                until = asked + length;
                next = asked + interval;
                continue;
            }
            Ok(Ok(Transitioned::Superseded)) => {
                lose(&operation).await;
                return;
            }
            Ok(Err(error)) => error,
            Err(_) => StoreError::timed_out(),
        };
        // A transaction that is being committed may hold the record.
        if !operation.is_committing() {
            warnings.warn(NOT_RENEWED, Some(&failure), Some(operation.id()));
        }
        // The store may be back before the lease lapses: ask more often.
        next = Instant::now() + interval / 4;
    }
}

/// Loses a lease that has lapsed; see [`lose`].
async fn lapse(operation: &Operation, warnings: &Warnings) -> bool {
    let is_lost = lose(operation).await;
    if is_lost {
        warnings.warn(LAPSED, None, Some(operation.id()));
    }
    is_lost
}

/// Marks the lease as lost, and returns true, unless the operation has committed its own
/// transaction: its record is completed then.
async fn lose(operation: &Operation) -> bool {
    let is_committed = matches!(operation.transacted().await, Transacted::Committed { .. });
    if !is_committed {
        operation.lease().lose();
    }
    !is_committed
}

/// Fewer ended leases than this are not worth a walk.
const MIN_ENDED: usize = 4096;

const NOT_RENEWED: &str = "renewal of a lease failed, it is tried again: the lease is lost if none \
    succeeds before its end";
const LAPSED: &str = "lease lapsed without a renewal: retries get 409 outcome-unknown or run, and \
    `lease_lost()` resolves";
const RAN_TOO_LONG: &str = "run takes longer than `max_run_time`, its lease is no longer renewed: find \
    out why the handler hangs, or raise `max_run_time`";
