//! The request's turn: it claims its key, waits for the owner before it, or asks
//! what became of that one; or it gets its answer without running.

use bytes::Bytes;
use http::{Request, Response};
use http_body::Body;
use tokio::time::{self, Instant};
use tower::{Service, ServiceExt as _};

use super::Exchange;
use crate::{
    Outcome, Recovery, Rejection, RequestBody, Store, StoreErrorKind, StoreFailure,
    claim::{self, Claimant, Claiming, Found, Seen},
    config::Config,
    outcome::Notice,
    reconcile::{Reconciliation, reconcile},
    settle::Owned,
    store::Grant,
};

impl<S, R, E> Exchange<'_, S, R, E>
where
    S: Store,
    R: Body<Data = Bytes> + Send + 'static,
    R::Error: Send,
    E: Send + 'static,
{
    /// Claims the key, and waits for its owner if the layer waits. `None` if
    /// the request has been answered; no grant if it may run unguarded.
    pub(super) async fn claim<I, B>(
        &mut self,
        mut inner: I,
        claimant: &mut Claimant,
    ) -> Option<(I, Option<(Grant, Instant)>)>
    where
        I: Service<Request<RequestBody<B>>, Response = Response<R>, Error = E> + Clone,
    {
        let host = self.host;
        let mut wait_until = None;
        loop {
            let seen = match claim::claim(host, claimant).await {
                Claiming::Granted { grant, since } => return Some((inner, Some((grant, since)))),
                Claiming::Found(seen) => seen,
                Claiming::Asking {
                    grant,
                    since,
                    may_run,
                } => {
                    let granted = Box::pin(self.reconcile(claimant, grant, since, may_run)).await?;
                    return Some((inner, Some(granted)));
                }
                Claiming::Contended => {
                    self.reply.refuse(&Rejection::contended());
                    return None;
                }
                // What has been seen of the key is no longer in doubt: its work may
                // have been done.
                Claiming::Failed { kind, seen: false }
                    if wait_until.is_none() && host.config.runs_unguarded(kind) =>
                {
                    return Some((inner, None));
                }
                Claiming::Failed { kind, .. } => {
                    Box::pin(self.refuse_failed(claimant, kind)).await;
                    return None;
                }
            };
            let is_running = matches!(seen.found, Found::InProgress { .. });
            if !is_running || host.config.wait.is_zero() {
                self.reply.answer(seen);
                return None;
            }
            // Waiting holds no place of the inner service.
            inner = unready(inner);
            let until = *wait_until.get_or_insert_with(|| Instant::now() + host.config.wait);
            if !Box::pin(self.wait(claimant, seen, until)).await {
                return None;
            }
            if let Err(error) = inner.ready().await {
                self.reply.finish(Err(error), Outcome::Unready, None);
                return None;
            }
        }
    }

    /// Asks what became of the operation. `None` if the request has been
    /// answered.
    async fn reconcile(
        &mut self,
        claimant: &mut Claimant,
        grant: Grant,
        since: Instant,
        may_run: bool,
    ) -> Option<(Grant, Instant)> {
        let host = self.host;
        let Recovery::Reconcile(reconciler) = &host.config.recovery else {
            self.reply.refuse(&Rejection::outcome_unknown());
            return None;
        };
        match reconcile(host, reconciler, claimant, grant, since, may_run).await {
            Ok(Reconciliation::Run {
                claim,
                grant,
                since,
            }) => {
                claimant.claim = claim;
                return Some((grant, since));
            }
            Ok(Reconciliation::Happened) => match claim::look(host, claimant).await {
                Ok(Some(seen)) => self.reply.answer(seen),
                Ok(None) => self.reply.refuse(&Rejection::contended()),
                Err(error) => {
                    let rejection = Rejection::store_unavailable(error.kind());
                    self.reply.refuse(&rejection);
                }
            },
            Ok(Reconciliation::Unknown) | Err(_) => {
                let rejection = Rejection::outcome_unknown().about(grant.operation);
                self.reply.refuse(&rejection);
            }
        }
        None
    }

    /// Waits until the key can be claimed; false if the request has been
    /// answered, or nobody is left to answer.
    async fn wait(&mut self, claimant: &Claimant, mut seen: Seen, until: Instant) -> bool {
        let host = self.host;
        let Some(mut place) = host.waiters.enter(&claimant.name) else {
            self.reply.answer(seen);
            return false;
        };
        loop {
            let heard = place.listen();
            match claim::look(host, claimant).await {
                Ok(None) => return true,
                Ok(Some(now)) => seen = now,
                // Without an answer the last one stands, until the bound.
                Err(_) => {}
            }
            let is_running = matches!(seen.found, Found::InProgress { .. });
            let is_over = Instant::now() >= until || host.is_draining();
            if !is_running || is_over {
                self.reply.answer(seen);
                return false;
            }
            tokio::select! {
                biased;
                () = heard => {}
                () = time::sleep_until(until) => {}
                () = host.drained() => {}
                () = self.reply.left() => {
                    self.reply.abandon(None);
                    return false;
                }
            }
        }
    }

    /// Answers 503, then takes back what may have been claimed.
    async fn refuse_failed(&mut self, claimant: &Claimant, kind: StoreErrorKind) {
        if kind == StoreErrorKind::Corrupt {
            Notice::Corrupt.tell(None);
        }
        self.reply.refuse(&Rejection::store_unavailable(kind));
        if matches!(kind, StoreErrorKind::Unavailable | StoreErrorKind::TimedOut) {
            self.withdraw(&Owned::new(self.host, claimant, None)).await;
        }
    }
}

impl Config {
    /// Whether a request whose claim failed in this way may run all the same.
    /// An unreadable record is a record: its operation may have run. And a store
    /// that is only busy is there to ask.
    fn runs_unguarded(&self, kind: StoreErrorKind) -> bool {
        let cannot_answer = !matches!(kind, StoreErrorKind::Corrupt | StoreErrorKind::Overloaded);
        self.store_failure == StoreFailure::RunUnguarded && cannot_answer
    }
}

/// Gives the readiness of `inner` back: a clone has none.
fn unready<I: Clone>(inner: I) -> I {
    inner.clone()
}
