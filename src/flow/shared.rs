//! What all clones of a layer share in this process.

use std::{
    sync::{
        Arc,
        atomic::{AtomicBool, Ordering},
    },
    time::Duration,
};

use tokio::{sync::SetOnce, time};

use super::{
    config::Config,
    discard::MAX_DISCARDS,
    drained::Drained,
    heartbeat::{HeartbeatSettings, Heartbeats},
    limits::{Full, Limit, Permit},
    quotas::Quotas,
    store_call,
};
use crate::{
    error::StoreError,
    key::{RecordName, Scope},
    rejection::Rejection,
    store::{OwnerTransition, Store, Token, Transition, Transitioned, waiters::Waiters},
};

pub(crate) struct Shared<S> {
    pub(crate) store: Arc<S>,
    pub(crate) config: Config,
    pub(crate) waiters: Waiters,
    pub(crate) heartbeats: Arc<Heartbeats<S>>,
    pub(crate) quotas: Option<Arc<Quotas<S>>>,
    is_draining: AtomicBool,
    /// Wakes the waiters when draining starts.
    drain_started: SetOnce<()>,
    /// Guarded requests that claim, wait or run.
    running: Limit,
    /// Bytes of request bodies, until their handler runs.
    pub(crate) buffers: Limit,
    /// Request bodies that are still arriving.
    uploads: Limit,
    /// Requests that wait for another one. They are in `waiters` too.
    waiting: Limit,
    /// Refused bodies that are read to their end.
    pub(crate) discards: Limit,
    /// Outcomes that are recorded late, and the bytes of their responses.
    pub(crate) late: Limit,
    pub(crate) late_bytes: Limit,
    /// Claims in doubt that are withdrawn.
    pub(crate) withdrawals: Limit,
}

impl<S: Store> Shared<S> {
    pub(crate) fn new(store: S, config: Config) -> Self {
        let store = Arc::new(store);
        let limits = config.per_scope;
        let limit = |max, per_scope: Option<usize>| {
            Limit::with_scopes(max, per_scope.unwrap_or_else(|| part_of(max)))
        };
        Self {
            waiters: Waiters::new(config.max_waiters),
            quotas: Quotas::new(&store, &config),
            heartbeats: Arc::new(Heartbeats::new(
                Arc::clone(&store),
                HeartbeatSettings {
                    lease: config.lease(),
                    interval: config.heartbeat,
                    max_run_time: config.max_run_time,
                    store_timeout: config.store_timeout(),
                },
                config.warnings().clone(),
            )),
            is_draining: AtomicBool::new(false),
            drain_started: SetOnce::new(),
            running: limit(config.max_in_flight, limits.in_flight),
            buffers: limit(
                config.max_buffered_bytes,
                Some(limits.buffered_bytes.unwrap_or_else(|| {
                    part_of(config.max_buffered_bytes).max(config.max_request_body)
                })),
            ),
            uploads: limit(config.max_uploads, limits.uploads),
            waiting: limit(config.max_waiters, limits.waiters),
            discards: Limit::new(MAX_DISCARDS),
            late: Limit::new(config.max_in_flight),
            late_bytes: Limit::new(config.max_late_recording_bytes),
            withdrawals: Limit::new(config.max_in_flight),
            store,
            config,
        }
    }

    /// Runs one call to the store for up to the store timeout. A panic of the store is an
    /// error, also one before its future is returned.
    pub(crate) fn call<'s, T, F>(
        &'s self,
        call: impl FnOnce(&'s S) -> F,
    ) -> impl Future<Output = Result<T, StoreError>>
    where
        F: Future<Output = Result<T, StoreError>>,
    {
        let call = async { call(&self.store).await };
        store_call::bounded(self.config.store_timeout(), call)
    }

    /// Ends a claim in its owner's place, and wakes the waiters.
    pub(crate) async fn end(
        &self,
        name: &RecordName,
        token: Token,
        transition: OwnerTransition,
    ) -> Result<Transitioned, StoreError> {
        let transition = Transition::Owner(token, transition);
        let ended = self.call(|store| store.transition(name, transition)).await;
        self.waiters.wake(name);
        ended
    }
}

impl<S: Store> Shared<S> {
    /// Returns how many requests and background tasks are left after `grace`.
    pub(crate) async fn drain(&self, grace: Duration) -> Drained {
        self.is_draining.store(true, Ordering::SeqCst);
        // It may have started before.
        let _ = self.drain_started.set(());
        let emptied = async {
            while self.left() > 0 {
                self.running.emptied().await;
                self.late.emptied().await;
                self.withdrawals.emptied().await;
            }
            if let Some(quotas) = &self.quotas {
                quotas.report().await;
            }
        };
        let _ = time::timeout(grace, emptied).await;
        Drained { left: self.left() }
    }
}

impl<S> Shared<S> {
    pub(crate) fn is_draining(&self) -> bool {
        self.is_draining.load(Ordering::SeqCst)
    }

    /// Resolves when draining starts.
    pub(crate) async fn drain_started(&self) {
        self.drain_started.wait().await;
    }

    /// Returns a permit to run, which is held for as long as the request runs.
    ///
    /// A request takes its permit first and then reads the flag; `drain` sets the flag
    /// first and then counts the permits. So a request that is not counted sees the
    /// flag and does not run.
    pub(crate) fn running_permit(&self, scope: &Scope) -> Result<Permit, Rejection> {
        let permit = self.running.acquire(scope).map_err(|full| match full {
            Full::Process(exceeded) => Rejection::overloaded(
                "too many requests claim, wait or run, this one did not: raise `max_in_flight`, or \
                 find out why they take long",
            )
            .exceeding(exceeded.numbers("requests", "this one")),
            Full::Scope(exceeded) => Rejection::scope_overloaded(
                "too many requests of one scope claim, wait or run, this one did not: raise \
                 `max_in_flight_per_scope`, or find out why they take long",
            )
            .exceeding(exceeded.numbers(
                "requests of a scope beyond half of `max_in_flight`",
                "this one",
            )),
        })?;
        match self.is_draining() {
            true => Err(Rejection::draining()),
            false => Ok(permit),
        }
    }

    /// Returns a permit for a body that is still arriving.
    pub(crate) fn upload_permit(&self, scope: &Scope) -> Result<Permit, Rejection> {
        self.uploads.acquire(scope).map_err(|full| match full {
            Full::Process(exceeded) => Rejection::overloaded(
                "too many request bodies are arriving, request refused with 503: raise \
                 `max_uploads`, or lower `request_body_timeout`",
            )
            .exceeding(exceeded.numbers("bodies", "this one")),
            Full::Scope(exceeded) => Rejection::scope_overloaded(
                "too many request bodies of one scope are arriving, request refused with 429: \
                 raise `max_uploads_per_scope`, or lower `request_body_timeout`",
            )
            .exceeding(
                exceeded.numbers("bodies of a scope beyond half of `max_uploads`", "this one"),
            ),
        })
    }

    /// Returns a permit to wait, or `None` if too many requests do.
    pub(crate) fn waiting_permit(&self, scope: &Scope) -> Option<Permit> {
        self.waiting.acquire(scope).ok()
    }

    fn left(&self) -> usize {
        self.running.taken() + self.late.taken() + self.withdrawals.taken()
    }
}

/// Returns what one scope may take of a limit beyond its half, unless it is set: all but a
/// quarter of the limit, rounded down.
fn part_of(max: usize) -> usize {
    max - max / 2 - max / 4
}
