//! The request's turn: it claims its key, waits for the owner before it, or asks
//! what became of that one; or it gets its answer without running.

use std::time::Duration;

use bytes::Bytes;
use http::{Request, Response};
use http_body::Body;
use tokio::time::{self, Instant};
use tower::{Service, ServiceExt as _};

use super::Exchange;
use crate::{
    Outcome, Recovery, Rejection, RequestBody, Store, StoreErrorKind, StoreFailure,
    config::Config,
    flow::claim::{self, Bar, Claimant, Claiming, Found, Seen},
    flow::reconcile::{Reconciliation, reconcile},
    outcome::Notice,
    store::Grant,
};

/// How the request's turn ended.
pub(super) enum Turn<I, E> {
    /// It may run, under the claim that was granted.
    Run {
        inner: I,
        grant: Grant,
        since: Instant,
    },
    /// It may run without a claim.
    RunUnguarded { inner: I },
    /// It does not run.
    Over(Over<E>),
}

/// The answer to a request that does not run.
pub(super) enum Over<E> {
    Seen(Seen),
    Refused(Rejection),
    /// The inner service failed before it could be called.
    Unready(E),
    /// The client left while it waited.
    Left,
}

impl<S, R, E> Exchange<'_, S, R, E>
where
    S: Store,
    R: Body<Data = Bytes> + Send + 'static,
    R::Error: Send,
    E: Send + 'static,
{
    /// Claims the key, and waits for its owner if the layer waits. A request that
    /// does not run holds nothing of the inner service when this returns.
    pub(super) async fn claim<I, B>(&mut self, mut inner: I, claimant: &mut Claimant) -> Turn<I, E>
    where
        I: Service<Request<RequestBody<B>>, Response = Response<R>, Error = E> + Clone,
    {
        let host = self.host;
        let mut wait_until = None;
        loop {
            let seen = match claim::claim(host, claimant).await {
                Claiming::Granted { grant, since } => {
                    return Turn::Run {
                        inner,
                        grant,
                        since,
                    };
                }
                Claiming::Found(seen) => seen,
                Claiming::Asking {
                    grant,
                    since,
                    may_run,
                } => {
                    let asked = Box::pin(self.reconcile(claimant, grant, since, may_run)).await;
                    return match asked {
                        Ok((grant, since)) => Turn::Run {
                            inner,
                            grant,
                            since,
                        },
                        Err(over) => Turn::Over(over),
                    };
                }
                Claiming::Barred(bar) => {
                    return Turn::Over(Over::Refused(host.config.barred(bar)));
                }
                Claiming::Contended => return Turn::Over(Over::Refused(Rejection::contended())),
                // What has been seen of the key is no longer in doubt: its work may
                // have been done.
                Claiming::Failed { error, seen: false }
                    if wait_until.is_none() && host.config.runs_unguarded(error.kind()) =>
                {
                    host.config.warnings.warn(
                        "claim failed, request runs unguarded",
                        Some(&error),
                        None,
                    );
                    return Turn::RunUnguarded { inner };
                }
                Claiming::Failed { error, .. } => {
                    if error.kind() == StoreErrorKind::Corrupt {
                        Notice::Corrupt.tell(&host.config.warnings, None);
                    }
                    return Turn::Over(Over::Refused(Rejection::claim_failed(&error)));
                }
            };
            let is_running = matches!(seen.found, Found::InProgress { .. });
            if !is_running || host.config.wait.is_zero() {
                return Turn::Over(Over::Seen(seen));
            }
            // Waiting holds no place of the inner service.
            inner = unready(inner);
            let until = *wait_until.get_or_insert_with(|| Instant::now() + host.config.wait);
            if let Some(over) = Box::pin(self.wait(claimant, seen, until)).await {
                return Turn::Over(over);
            }
            if let Some(over) = Box::pin(self.ready(&mut inner, until)).await {
                return Turn::Over(over);
            }
        }
    }

    /// Asks what became of the operation.
    async fn reconcile(
        &mut self,
        claimant: &mut Claimant,
        grant: Grant,
        since: Instant,
        may_run: bool,
    ) -> Result<(Grant, Instant), Over<E>> {
        let host = self.host;
        let unknown = || Over::Refused(Rejection::outcome_unknown().about(grant.operation));
        let Recovery::Reconcile(reconciler) = &host.config.recovery else {
            return Err(unknown());
        };
        match reconcile(host, reconciler, claimant, grant, since, may_run).await {
            Ok(Reconciliation::Run {
                claim,
                grant,
                since,
            }) => {
                claimant.claim = claim;
                claimant.hold = None;
                Ok((grant, since))
            }
            Ok(Reconciliation::Happened) => {
                claimant.hold = None;
                Err(match claim::look(host, claimant).await {
                    Ok(Some(seen)) => Over::Seen(seen),
                    Ok(None) => Over::Refused(Rejection::contended()),
                    Err(error) => {
                        Over::Refused(Rejection::record_unreadable(&error).about(grant.operation))
                    }
                })
            }
            Ok(Reconciliation::Unknown) => {
                claimant.hold = None;
                Err(unknown())
            }
            Err(error) => {
                host.config.warnings.warn(
                    "recording failed of what a `Reconciler` found out: the outcome stays unknown",
                    Some(&error),
                    Some(grant.operation),
                );
                Err(unknown())
            }
        }
    }

    /// Waits until the key can be claimed; otherwise returns the answer.
    async fn wait(
        &mut self,
        claimant: &Claimant,
        mut seen: Seen,
        until: Instant,
    ) -> Option<Over<E>> {
        let host = self.host;
        let Some(mut place) = host.waiters.enter(&claimant.name) else {
            return Some(Over::Seen(seen));
        };
        loop {
            let heard = place.listen();
            match claim::look(host, claimant).await {
                Ok(None) => return None,
                Ok(Some(now)) => seen = now,
                // Without an answer the last one stands, until the bound.
                Err(error) => host.config.warnings.warn(
                    "record not readable, the request waits on",
                    Some(&error),
                    Some(seen.operation),
                ),
            }
            let is_running = matches!(seen.found, Found::InProgress { .. });
            let is_over = Instant::now() >= until || host.is_draining();
            if !is_running || is_over {
                return Some(Over::Seen(seen));
            }
            tokio::select! {
                biased;
                () = heard => {}
                () = time::sleep_until(until) => {}
                () = host.drained() => {}
                () = self.reply.left() => return Some(Over::Left),
            }
        }
    }

    /// Waits for the inner service, no longer than for the owner before it, and at
    /// least for [`SHORTEST_READY`]. Returns the answer if it is not ready then.
    async fn ready<I, B>(&mut self, inner: &mut I, until: Instant) -> Option<Over<E>>
    where
        I: Service<Request<RequestBody<B>>, Response = Response<R>, Error = E>,
    {
        let until = until.max(Instant::now() + SHORTEST_READY);
        tokio::select! {
            biased;
            ready = time::timeout_at(until, inner.ready()) => match ready {
                Ok(Ok(_)) => None,
                Ok(Err(error)) => Some(Over::Unready(error)),
                Err(_) => Some(Over::Refused(Rejection::overloaded(
                    "inner service not ready within `wait` after another request had ended, \
                     request refused with 503",
                ))),
            },
            () = self.reply.left() => Some(Over::Left),
        }
    }

    /// Answers a request that does not run.
    pub(super) fn conclude(&mut self, over: Over<E>) {
        match over {
            Over::Seen(seen) => self.reply.answer(seen),
            Over::Refused(rejection) => self.reply.refuse(&rejection),
            Over::Unready(error) => self.reply.finish(Err(error), Outcome::Unready, None),
            Over::Left => self.reply.abandon(None),
        }
    }
}

impl Config {
    fn barred(&self, bar: Bar) -> Rejection {
        match bar {
            Bar::KeyStale => {
                let window = self.syntax.window().unwrap_or_default();
                Rejection::key_stale(&self.header, window)
            }
            Bar::BodyInvalid(fault) => Rejection::body_invalid(fault),
        }
    }

    /// Whether a request whose claim failed in this way may run all the same.
    /// An unreadable record is a record: its operation may have run. And a store
    /// that is only busy is there to ask.
    fn runs_unguarded(&self, kind: StoreErrorKind) -> bool {
        let cannot_answer = !matches!(kind, StoreErrorKind::Corrupt | StoreErrorKind::Overloaded);
        self.store_failure == StoreFailure::RunUnguarded && cannot_answer
    }
}

/// The shortest time that an inner service is given to become ready.
const SHORTEST_READY: Duration = Duration::from_secs(1);

/// Gives the readiness of `inner` back: a clone has none.
fn unready<I: Clone>(inner: I) -> I {
    inner.clone()
}
