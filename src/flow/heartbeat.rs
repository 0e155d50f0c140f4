//! Who holds a claim, and for how long.

use std::{
    collections::VecDeque,
    mem,
    pin::pin,
    sync::{Arc, Mutex, MutexGuard, PoisonError, Weak},
};

use tokio::{
    runtime::{self, Handle},
    sync::SetOnce,
    task::{AbortHandle, JoinHandle},
    time::{self, Instant},
};

use crate::{
    Operation, Store, StoreError,
    config::Config,
    flow::claim::caught,
    flow::shared::Host,
    operation::{Transacted, WeakOperation},
    store::Transitioned,
};

/// The lease of one claim, as its owner knows it.
pub(crate) struct Lease {
    /// A moment before the store granted the claim.
    granted: Instant,
    /// Set when the lease is, or may be, over.
    lost: SetOnce<()>,
    age: Mutex<Age>,
}

enum Age {
    Young,
    Old(AbortHandle),
    Ended,
}

impl Lease {
    pub(crate) fn granted(since: Instant) -> Self {
        Self {
            granted: since,
            lost: SetOnce::new(),
            age: Mutex::new(Age::Young),
        }
    }

    pub(crate) fn is_lost(&self) -> bool {
        self.lost.initialized()
    }

    pub(crate) async fn lost(&self) {
        self.lost.wait().await;
    }

    fn lose(&self) {
        // It may have been lost before.
        let _ = self.lost.set(());
    }

    fn age(&self) -> MutexGuard<'_, Age> {
        self.age.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn has_ended(&self) -> bool {
        matches!(*self.age(), Age::Ended)
    }
}

/// Keeps a claim's lease alive while it exists, from tasks of their own: a handler
/// that never yields does not stop them on a multi-threaded runtime.
pub(crate) struct Heartbeats<'a> {
    leases: &'a Leases,
    runtime: runtime::Id,
    operation: Operation,
    /// Whether the task that watches over the leases began with this one. It
    /// does so on this thread, and a handler that blocks it from its first poll
    /// on would not let it.
    pub(crate) is_first: bool,
}

/// The leases of a layer's requests. Most of them end before their first
/// heartbeat is due: one task of each runtime watches over all that are younger,
/// and only those that grow older get tasks of their own.
#[derive(Default)]
pub(crate) struct Leases(Mutex<Vec<(runtime::Id, Young)>>);

#[derive(Default)]
struct Young {
    /// Each with the time of its first heartbeat, in this order. What ended keeps
    /// nothing alive.
    held: VecDeque<(Instant, WeakOperation)>,
    /// How many of them have ended.
    ended: usize,
    keeper: Option<JoinHandle<()>>,
}

impl<'a> Heartbeats<'a> {
    pub(crate) fn start<S: Store>(host: &'a Arc<Host<S>>, operation: &Operation) -> Self {
        let runtime = Handle::current().id();
        let is_first = host.leases.of(runtime, |young| {
            let now = Instant::now();
            young.forget_ended();
            // As the keeper does, should a handler that blocks hold that up.
            young.let_grow(host, now);
            let due = now + host.config.heartbeat;
            young.held.push_back((due, operation.downgrade()));
            let is_first = young.keeper.as_ref().is_none_or(JoinHandle::is_finished);
            if is_first {
                young.keeper = Some(tokio::spawn(keep(Arc::downgrade(host), runtime)));
            }
            is_first
        });
        Self {
            leases: &host.leases,
            runtime,
            operation: operation.clone(),
            is_first,
        }
    }
}

impl Drop for Heartbeats<'_> {
    fn drop(&mut self) {
        // Its lock is given back first: the keeper takes them the other way round.
        let before = mem::replace(&mut *self.operation.lease().age(), Age::Ended);
        match before {
            Age::Young => self.leases.of(self.runtime, |young| young.ended += 1),
            // A call under way may be dropped: it is one atomic transition.
            Age::Old(beat) => beat.abort(),
            Age::Ended => {}
        }
    }
}

impl Leases {
    fn of<T>(&self, runtime: runtime::Id, look: impl FnOnce(&mut Young) -> T) -> T {
        let mut runtimes = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        let place = runtimes.iter().position(|(id, _)| *id == runtime);
        let place = place.unwrap_or_else(|| {
            runtimes.retain(|(_, young)| !young.is_over());
            runtimes.push((runtime, Young::default()));
            runtimes.len() - 1
        });
        look(&mut runtimes[place].1)
    }
}

impl Young {
    /// Whether its runtime may have ended: another one begins anew.
    fn is_over(&self) -> bool {
        let mut held = self.held.iter();
        self.keeper.as_ref().is_none_or(JoinHandle::is_finished)
            && held.all(|(_, operation)| has_ended(operation))
    }

    /// Most end in the order in which they began: two steps for each that begins.
    /// Behind one that goes on they gather, and are forgotten together.
    fn forget_ended(&mut self) {
        for _ in 0..2 {
            let front = self.held.front();
            if front.is_none_or(|(_, operation)| !has_ended(operation)) {
                break;
            }
            self.held.pop_front();
            self.ended = self.ended.saturating_sub(1);
        }
        if self.ended > SPARE && self.ended * 2 > self.held.len() {
            self.held.retain(|(_, operation)| !has_ended(operation));
            self.ended = 0;
        }
    }

    /// Gives each lease whose first heartbeat is due a task of its own.
    fn let_grow<S: Store>(&mut self, host: &Arc<Host<S>>, now: Instant) {
        while self.held.front().is_some_and(|(due, _)| *due <= now)
            && let Some((_, operation)) = self.held.pop_front()
        {
            let Some(operation) = operation.upgrade() else {
                self.ended = self.ended.saturating_sub(1);
                continue;
            };
            let mut age = operation.lease().age();
            match *age {
                Age::Ended => self.ended = self.ended.saturating_sub(1),
                _ => {
                    let beat = tokio::spawn(beat(Arc::clone(host), operation.clone()));
                    *age = Age::Old(beat.abort_handle());
                }
            }
        }
    }
}

fn has_ended(operation: &WeakOperation) -> bool {
    let operation = operation.upgrade();
    operation.is_none_or(|operation| operation.lease().has_ended())
}

/// Gives each lease a task of its own once its first heartbeat is due, and ends
/// when there was none for as long as that takes.
async fn keep<S: Store>(host: Weak<Host<S>>, runtime: runtime::Id) {
    let mut was_idle = false;
    while let Some(host) = host.upgrade() {
        let wake = host.leases.of(runtime, |young| {
            let now = Instant::now();
            young.let_grow(&host, now);
            let is_idle = young.held.is_empty();
            if is_idle && was_idle {
                young.keeper = None;
                return None;
            }
            was_idle = is_idle;
            // What comes meanwhile is due later.
            let next = now + host.config.heartbeat;
            Some(young.held.front().map_or(next, |(due, _)| next.min(*due)))
        });
        drop(host);
        let Some(wake) = wake else {
            return;
        };
        time::sleep_until(wake).await;
    }
}

/// Extends the lease until it is superseded, or past the longest run. If it is
/// not extended for so long that the store may see it lapsed, it may be lost:
/// that is said, and it is tried on, since a lapsed lease that nobody has taken
/// over is still its owner's.
async fn beat<S: Store>(host: Arc<Host<S>>, operation: Operation) {
    let config = &host.config;
    let (name, token, lease) = (operation.name(), operation.token(), operation.lease());
    let last = lease.granted + config.max_run_time;
    let mut until = lease.granted + config.lease;
    let mut next = Instant::now();
    loop {
        if !lease.is_lost() {
            next = next.min(until);
        }
        time::sleep_until(next.min(last)).await;
        let asked = Instant::now();
        if asked >= last {
            if lose(&operation).await {
                config.warnings.warn(TOO_LONG, None, Some(operation.id()));
            }
            return;
        }
        if asked >= until && !lease.is_lost() && !lapse(&operation, config).await {
            return;
        }
        let renewed = caught(host.store.renew(name, token, config.lease));
        let mut renewed = pin!(time::timeout(config.store_timeout, renewed));
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
                if !lapse(&operation, config).await {
                    return;
                }
                renewed.await
            }
        };
        let failure = match answered {
            Ok(Ok(Transitioned::Applied)) => {
                until = asked + config.lease;
                next = asked + config.heartbeat;
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
            config
                .warnings
                .warn(NOT_RENEWED, Some(&failure), Some(operation.id()));
        }
        // The store may be back before the lease lapses: ask more often.
        next = Instant::now() + config.heartbeat / 4;
    }
}

/// As [`lose`], of a lease that has lapsed.
async fn lapse(operation: &Operation, config: &Config) -> bool {
    let is_lost = lose(operation).await;
    if is_lost {
        let operation = Some(operation.id());
        config.warnings.warn(LAPSED, None, operation);
    }
    is_lost
}

/// Marks the lease as lost, unless the operation has committed its own
/// transaction: its claim has ended then, and its record is completed. Returns
/// whether the lease is lost.
async fn lose(operation: &Operation) -> bool {
    let committed = matches!(operation.transacted().await, Transacted::Committed { .. });
    if !committed {
        operation.lease().lose();
    }
    !committed
}

/// The ended leases that are never worth a walk.
const SPARE: usize = 4096;

const NOT_RENEWED: &str = "renewal of a lease failed, it is tried again: the lease is lost if none succeeds before its end";
const LAPSED: &str = "lease lapsed without a renewal: retries get 409 outcome-unknown or run, and \
    `lease_lost()` resolves";
const TOO_LONG: &str = "run takes longer than `max_run_time`, its lease is no longer renewed: find out \
    why the handler hangs, or raise `max_run_time`";
