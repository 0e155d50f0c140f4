//! Acquires the key for a request: claims it, waits for another request with the key,
//! or asks a hook. Otherwise the request is answered without running.

use std::{pin::pin, sync::Arc, time::Duration};

use futures_util::FutureExt as _;
use tokio::time::{self, Instant};
use tower::{Service, ServiceExt as _};

use super::{
    Client,
    claim::{ClaimResult, Granted, claim, look_up},
    config::Config,
    decide::Answered,
    reconcile::{Reconciliation, reconcile},
    request::{Comparable, Ineligible, Keyed},
    shared::Shared,
    store_call::catch_panic,
};
#[cfg(feature = "sealing")]
use crate::key::RecordName;
use crate::{
    error::StoreErrorKind,
    operation::recovery::Recovery,
    policy::{Disconnect, StoreFailure},
    rejection::Rejection,
    runtime::backoff::Backoff,
    store::Store,
    telemetry::notice::Notice,
};

/// How a request may run.
pub(super) enum Acquired<I> {
    /// Under the claim that was granted.
    Run { inner: I, granted: Granted },
    /// Without a claim.
    RunUnguarded { inner: I },
}

/// Why a request does not run.
pub(super) enum NotRun<E> {
    Answered(Answered),
    Refused(Rejection),
    /// The inner service failed before it was called.
    NotReady(E),
    /// The client left while it waited.
    ClientLeft,
}

impl<E> NotRun<E> {
    /// Opens the response of the record with this name, if there is one.
    #[cfg(feature = "sealing")]
    pub(super) async fn opened(self, config: &Config, name: &RecordName) -> Self {
        match self {
            Self::Answered(answered) => Self::Answered(answered.opened(config, name).await),
            not_run => not_run,
        }
    }
}

/// Acquires the key. A request that does not run holds nothing of the inner service when
/// this returns.
pub(super) async fn acquire<I, S, W, Q>(
    shared: &Arc<Shared<S>>,
    client: &Client,
    mut inner: I,
    request: &mut Keyed<W>,
) -> Result<Acquired<I>, NotRun<I::Error>>
where
    I: Service<Q> + Clone,
    S: Store,
    W: Comparable,
{
    let config = &shared.config;
    let mut deadline = None;
    loop {
        let answered = match claim(shared, request).await {
            ClaimResult::Granted(granted) => return run(config, client, inner, granted),
            ClaimResult::Answered(answered) => answered,
            ClaimResult::Reconcile { granted, may_run } => {
                let granted = Box::pin(ask(shared, request, granted, may_run)).await?;
                return run(config, client, inner, granted);
            }
            ClaimResult::Ineligible(ineligible) => {
                return Err(NotRun::Refused(refuse_ineligible(config, ineligible)));
            }
            ClaimResult::OverQuota(exceeded) => {
                return Err(NotRun::Refused(Rejection::quota_exceeded(exceeded)));
            }
            ClaimResult::Contended => return Err(NotRun::Refused(Rejection::contended())),
            // A request that waited has seen a record: its work may have been done.
            ClaimResult::Failed {
                error,
                may_have_run: false,
            } if deadline.is_none() && runs_unguarded(config, error.kind()) => {
                let warnings = config.warnings();
                warnings.warn("claim failed, request runs unguarded", Some(&error), None);
                return Ok(Acquired::RunUnguarded { inner });
            }
            ClaimResult::Failed { error, .. } => {
                Notice::tell_if_corrupt(config.warnings(), &error, None);
                return Err(NotRun::Refused(Rejection::claim_failed(&error)));
            }
        };
        if !answered.is_in_progress() || config.wait.is_zero() {
            return Err(NotRun::Answered(answered));
        }
        // A waiter holds no readiness of the inner service: a clone has none.
        inner = I::clone(&inner);
        let deadline = *deadline.get_or_insert_with(|| Instant::now() + config.wait);
        Box::pin(wait(shared, client, request, answered, deadline)).await?;
        Box::pin(make_ready(client, &mut inner, deadline)).await?;
    }
}

/// A handler that would be stopped at once is not called: its claim is withdrawn.
fn run<I, E>(
    config: &Config,
    client: &Client,
    inner: I,
    granted: Granted,
) -> Result<Acquired<I>, NotRun<E>> {
    match config.disconnect == Disconnect::Cancel && client.has_left() {
        true => Err(NotRun::ClientLeft),
        false => Ok(Acquired::Run { inner, granted }),
    }
}

pub(super) fn refuse_ineligible(config: &Config, ineligible: Ineligible) -> Rejection {
    match ineligible {
        Ineligible::KeyStale => {
            let window = config.syntax.window().unwrap_or_default();
            Rejection::key_stale(&config.header, window)
        }
        Ineligible::BodyInvalid(fault) => Rejection::body_invalid(fault),
    }
}

/// Whether a request whose claim failed in this way may run nevertheless. An unreadable
/// record is a record: its operation may have run. A store that is only busy can be
/// asked.
fn runs_unguarded(config: &Config, kind: StoreErrorKind) -> bool {
    let cannot_answer = !matches!(kind, StoreErrorKind::Corrupt | StoreErrorKind::Overloaded);
    config.store_failure == StoreFailure::RunUnguarded && cannot_answer
}

/// Asks the hook whether the operation happened.
async fn ask<S: Store, W: Comparable, E>(
    shared: &Arc<Shared<S>>,
    request: &mut Keyed<W>,
    granted: Granted,
    may_run: bool,
) -> Result<Granted, NotRun<E>> {
    let operation = granted.grant.operation;
    let unknown = || NotRun::Refused(Rejection::outcome_not_found_out().about(operation));
    let Recovery::Reconcile(reconciler) = &shared.config.recovery else {
        return Err(unknown());
    };
    let reconciled = match reconcile(shared, reconciler, request, granted, may_run).await {
        Ok(reconciled) => reconciled,
        Err(error) => {
            shared.config.warnings().warn(
                "recording failed of what a `Reconciler` found out: the outcome stays unknown",
                Some(&error),
                Some(operation),
            );
            return Err(unknown());
        }
    };
    match reconciled {
        Reconciliation::Run(granted) => Ok(granted),
        Reconciliation::Happened => Err(match look_up(shared, request).await {
            Ok(Some(answered)) => NotRun::Answered(answered),
            Ok(None) => NotRun::Refused(Rejection::contended()),
            Err(error) => {
                let warnings = shared.config.warnings();
                Notice::tell_if_corrupt(warnings, &error, Some(operation));
                NotRun::Refused(Rejection::record_unreadable(&error).about(operation))
            }
        }),
        Reconciliation::Unknown => Err(unknown()),
    }
}

/// Waits until the key can be claimed.
///
/// The record is read when its claim has ended in this process, when the store says so of
/// another process, and after pauses that grow.
async fn wait<S: Store, W: Comparable, E>(
    shared: &Shared<S>,
    client: &Client,
    request: &Keyed<W>,
    mut answered: Answered,
    deadline: Instant,
) -> Result<(), NotRun<E>> {
    let permit = shared.waiting_permit(request.name.sent().scope());
    let (Some(_permit), Some(waiter)) = (permit, shared.waiters.enter(&request.name)) else {
        return Err(NotRun::Answered(answered));
    };
    let warnings = shared.config.warnings();
    let mut backoff = Backoff::new(FIRST_PAUSE, LONGEST_PAUSE);
    loop {
        let fence = answered.fence;
        // Resolves at most once for each claim, so that no store makes this loop spin.
        let mut ended = pin!(catch_panic(shared.store.wait(&request.name, fence)).fuse());
        while answered.fence == fence {
            let woken = waiter.listen();
            match look_up(shared, request).await {
                Ok(None) => return Ok(()),
                Ok(Some(now)) => answered = now,
                Err(error) if error.kind() == StoreErrorKind::Corrupt => {
                    let operation = answered.operation;
                    Notice::tell_if_corrupt(warnings, &error, Some(operation));
                    let rejection = Rejection::record_unreadable(&error).about(operation);
                    return Err(NotRun::Refused(rejection));
                }
                // Without an answer the last one counts, until the deadline.
                Err(error) => warnings.warn(
                    "record not readable, the request goes on waiting",
                    Some(&error),
                    Some(answered.operation),
                ),
            }
            let is_over = Instant::now() >= deadline || shared.is_draining();
            if !answered.is_in_progress() || is_over {
                return Err(NotRun::Answered(answered));
            }
            tokio::select! {
                biased;
                () = client.left() => return Err(NotRun::ClientLeft),
                _ = time::timeout(backoff.pause(), woken) => {}
                () = time::sleep_until(deadline) => {}
                () = shared.drain_started() => {}
                told = &mut ended => if let Err(error) = told {
                    warnings.warn(
                        "store does not tell when a claim ends, the record is read after pauses",
                        Some(&error),
                        Some(answered.operation),
                    );
                }
            }
        }
    }
}

/// Waits for the inner service until the deadline, and for [`MIN_READY_TIMEOUT`] at
/// least.
async fn make_ready<I, Q>(
    client: &Client,
    inner: &mut I,
    deadline: Instant,
) -> Result<(), NotRun<I::Error>>
where
    I: Service<Q>,
{
    let deadline = deadline.max(Instant::now() + MIN_READY_TIMEOUT);
    tokio::select! {
        biased;
        () = client.left() => Err(NotRun::ClientLeft),
        ready = time::timeout_at(deadline, inner.ready()) => match ready {
            Ok(Ok(_)) => Ok(()),
            Ok(Err(error)) => Err(NotRun::NotReady(error)),
            Err(_) => Err(NotRun::Refused(Rejection::overloaded(
                "inner service not ready within `wait` after another request had ended, request \
                 refused with 503",
            ))),
        },
    }
}

/// The pauses after which a waiter reads the record although nothing woke it.
const FIRST_PAUSE: Duration = Duration::from_millis(50);
const LONGEST_PAUSE: Duration = Duration::from_secs(1);
/// The shortest time in which an inner service may become ready.
const MIN_READY_TIMEOUT: Duration = Duration::from_secs(1);
