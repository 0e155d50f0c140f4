//! What happens to a guarded request, from top to bottom:
//! key → scope → fingerprint → claim → run → record → replay.

use std::{any::Any, panic::AssertUnwindSafe, sync::Arc};

use bytes::Bytes;
use futures_util::FutureExt as _;
use http::{HeaderMap, Request, Response, request, response};
use http_body::Body;
use tokio::time::{self, Instant};
use tower::{Service, ServiceExt as _};

use crate::{
    Operation, Outcome, RecordName, Recovery, Rejection, RequestBody, ResponseBody, Store,
    StoreErrorKind, StoreFailure, Word,
    admission::Noticed,
    body::{Gathered, gather},
    claim::{self, Claimant, Claiming, Found, Seen},
    config::Config,
    host::{Host, Share},
    keeping::{correct_length, declared_length},
    lease::Heartbeats,
    operation::Verdict,
    outcome::Notice,
    policy::{Conclusion, Disconnect},
    reconcile::{Reconciliation, reconcile},
    reply::{Answer, Reply, say_unrecorded},
    settle::{Ending, Owned},
    store::{Claim, Grant, Release, Settlement},
    transaction::{AsCommitted, Transacted},
};

/// Answers a guarded request. The body is read here, so that a client which
/// leaves during its upload leaves nothing behind; what follows is detached
/// from the client, which may leave at any moment.
pub(crate) async fn guard<I, S, B, R>(
    host: Arc<Host<S>>,
    inner: I,
    name: RecordName,
    parts: request::Parts,
    body: B,
) -> Answer<R, I::Error>
where
    I: Service<Request<RequestBody<B>>, Response = Response<R>> + Clone + Send + 'static,
    I::Future: Send,
    I::Error: Send + 'static,
    S: Store,
    B: Body<Data = Bytes> + Send + 'static,
    R: Body<Data = Bytes> + Send + 'static,
    R::Error: Send,
{
    let config = &host.config;
    let refuse = |rejection: Rejection| Ok(config.refuse_at_once(&rejection));
    let mut buffered = Share::empty();
    let room = |bytes| buffered.grow(&host.buffers, bytes);
    let (limit, within) = (config.request_limit, config.request_time);
    let (body, trailers) = match gather(body, limit, within, room).await {
        Gathered::Whole { data, trailers } => (data, trailers),
        Gathered::Outgrown { .. } => return refuse(Rejection::body_too_large(limit)),
        Gathered::Late { .. } => return refuse(Rejection::body_timeout(within)),
        Gathered::Broken { .. } => return refuse(Rejection::body_broken()),
        Gathered::Crowded { .. } => return refuse(Rejection::overloaded()),
    };
    let fingerprint = match config.fingerprinter.current(&parts, &body) {
        Ok(fingerprint) => fingerprint,
        Err(fault) => return refuse(Rejection::body_invalid(fault.0)),
    };
    let Some(place) = host.tasks.place() else {
        return refuse(Rejection::overloaded());
    };
    let claim = Claim::new(fingerprint, config.lease, config.retention);
    let claimant = Claimant {
        name,
        claim,
        parts,
        body,
    };
    let (reply, answer) = Reply::new(Arc::clone(config));
    let exchange = Exchange {
        host: Arc::clone(&host),
        reply,
        place: Some(place),
        buffered: Some(buffered),
    };
    host.tasks.detach(exchange.run(inner, claimant, trailers));
    // Only a panic of a callback, or the end of the runtime, drops the reply.
    answer
        .await
        .unwrap_or_else(|_| refuse(Rejection::handler_panicked()))
}

/// A guarded request once it is detached: it has a client, perhaps.
struct Exchange<S, R: Body, E> {
    host: Arc<Host<S>>,
    reply: Reply<R, E>,
    place: Option<Share>,
    buffered: Option<Share>,
}

impl<S, R, E> Exchange<S, R, E>
where
    S: Store,
    R: Body<Data = Bytes> + Send + 'static,
    R::Error: Send,
    E: Send + 'static,
{
    async fn run<I, B>(mut self, inner: I, mut claimant: Claimant, trailers: Option<HeaderMap>)
    where
        I: Service<Request<RequestBody<B>>, Response = Response<R>, Error = E> + Clone + Send,
        I::Future: Send,
        B: Body<Data = Bytes> + Send,
    {
        let Some((inner, granted)) = self.claim(inner, &mut claimant).await else {
            return;
        };
        let grant = granted.map(|(grant, _)| grant);
        let owned = Owned::new(Arc::clone(&self.host), &claimant, grant);
        let Claimant {
            name,
            mut parts,
            body,
            ..
        } = claimant;
        self.buffered = None;
        parts.extensions.insert(Noticed);
        let mut request = Request::from_parts(parts, RequestBody::buffered(body, trailers));
        let Some((grant, since)) = granted else {
            self.run_unguarded(inner, request).await;
            return self.withdraw(&owned).await;
        };
        let config = Arc::clone(&owned.host.config);
        let operation = Operation::new(config, name, owned.token, grant);
        request.extensions_mut().insert(operation.clone());
        let heartbeats = Heartbeats::start(
            &owned.host,
            &owned.name,
            owned.token,
            since,
            operation.loss(),
        );
        let Some(answered) = self.attended(call(inner, request)).await else {
            return self.lose_unattended(&owned, &operation).await;
        };
        let answered = answered.map_err(|_panic| Rejection::handler_panicked());
        match operation.transacted().await {
            Transacted::Committed { response } => {
                self.reply_committed(&owned, answered, response).await;
            }
            Transacted::Superseded => self.answer_as_loser(&owned).await,
            Transacted::Unknown => self.lose_commit(&owned).await,
            transacted => match answered {
                Ok(Ok(response))
                    if matches!(transacted, Transacted::Aborted) && claims_success(&response) =>
                {
                    let said = response.extensions().get::<Word>().copied();
                    let word = said.unwrap_or_default().or(operation.word());
                    self.deny_success(&owned, &operation, word).await;
                }
                Ok(Ok(response)) => self.record(&owned, &operation, response).await,
                Ok(Err(error)) => self.lose(&owned, Err(error)).await,
                Err(rejection) => {
                    let response = self.host.config.refuse(&rejection);
                    self.lose(&owned, Ok(response)).await;
                }
            },
        }
        drop(heartbeats);
    }

    /// The response was committed in the handler's transaction: it is the
    /// answer, whatever the handler made of it.
    async fn reply_committed(
        &mut self,
        owned: &Owned<S>,
        answered: Result<Result<Response<R>, E>, Rejection>,
        recorded: Bytes,
    ) {
        owned.host.waiters.wake(&owned.name);
        let unchanged = match answered {
            Ok(Ok(response)) if response.extensions().get::<AsCommitted>().is_some() => {
                self.unchanged(response, &recorded).await
            }
            _ => None,
        };
        match unchanged {
            Some(response) => self
                .reply
                .finish(Ok(response), Outcome::Recorded, owned.operation),
            None => self.reply.answer_recorded(recorded, owned.operation),
        }
    }

    /// The response as it was committed, with the headers that are not kept;
    /// `None` if anybody has changed it on its way.
    async fn unchanged(
        &mut self,
        response: Response<R>,
        recorded: &Bytes,
    ) -> Option<Response<ResponseBody<R>>> {
        let config = &self.host.config;
        let (mut parts, body) = config.cleaned(response).into_parts();
        parts.extensions.remove::<Word>();
        let (limit, within) = (config.response_limit, config.response_time);
        let Gathered::Whole {
            data,
            trailers: None,
        } = gather(body, limit, within, |_| true).await
        else {
            return None;
        };
        let kept = config.completion(&parts, &data, None, Word::default());
        (kept.response == *recorded).then(|| {
            correct_length(&mut parts, Some(data.len() as u64));
            Response::from_parts(parts, ResponseBody::whole(data, None))
        })
    }

    /// The answer to COMMIT got lost, and nobody could say what became of it.
    async fn lose_commit(&mut self, owned: &Owned<S>) {
        let response = self.host.config.refuse(&Rejection::commit_unknown());
        self.lose(owned, Ok(response)).await;
    }

    /// The transaction was rolled back, and the handler has not noticed.
    async fn deny_success(&mut self, owned: &Owned<S>, operation: &Operation, word: Word) {
        if operation.effects_began() || word.verdict() == Some(Verdict::Unknown) {
            let rejection = Rejection::rolled_back_after_effects();
            let response = self.host.config.refuse(&rejection);
            return self.lose(owned, Ok(response)).await;
        }
        let response = self.host.config.refuse(&Rejection::rolled_back());
        let ending = Ending::Released(Release::Bound);
        self.settle(owned, &ending, Outcome::Released, Ok(response))
            .await;
    }

    /// Runs the handler, to its end or, if the layer wants that, until its client
    /// has left.
    async fn attended<T>(&mut self, handler: impl Future<Output = T>) -> Option<T> {
        match self.host.config.disconnect {
            Disconnect::Finish => Some(handler.await),
            Disconnect::Cancel => tokio::select! {
                biased;
                answered = handler => Some(answered),
                () = self.reply.left() => None,
            },
        }
    }

    /// The handler was stopped with nobody left to answer.
    async fn lose_unattended(&mut self, owned: &Owned<S>, operation: &Operation) {
        self.reply.abandon(owned.operation);
        // A commit that was under way was not stopped with it.
        if let Transacted::Committed { .. } = operation.transacted().await {
            return owned.host.waiters.wake(&owned.name);
        }
        match owned.settle(&Ending::Unknown).await {
            Ok(Settlement::Applied) => {}
            Ok(Settlement::Superseded) => Notice::LostOwnership.tell(owned.operation),
            Err(_) => self.settle_late(owned, &Ending::Unknown).await,
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
        let host = Arc::clone(&self.host);
        let Recovery::Reconcile(reconciler) = &host.config.recovery else {
            self.reply.refuse(&Rejection::outcome_unknown());
            return None;
        };
        match reconcile(&host, reconciler, claimant, grant, since, may_run).await {
            Ok(Reconciliation::Run {
                claim,
                grant,
                since,
            }) => {
                claimant.claim = claim;
                return Some((grant, since));
            }
            Ok(Reconciliation::Happened) => match claim::look(&host, claimant).await {
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

    /// Claims the key, and waits for its owner if the layer waits. `None` if
    /// the request has been answered; no grant if it may run unguarded.
    async fn claim<I, B>(
        &mut self,
        mut inner: I,
        claimant: &mut Claimant,
    ) -> Option<(I, Option<(Grant, Instant)>)>
    where
        I: Service<Request<RequestBody<B>>, Response = Response<R>, Error = E> + Clone,
    {
        let host = Arc::clone(&self.host);
        let mut wait_until = None;
        loop {
            let seen = match claim::claim(&host, claimant).await {
                Claiming::Granted { grant, since } => return Some((inner, Some((grant, since)))),
                Claiming::Found(seen) => seen,
                Claiming::Asking {
                    grant,
                    since,
                    may_run,
                } => {
                    let granted = self.reconcile(claimant, grant, since, may_run).await?;
                    return Some((inner, Some(granted)));
                }
                Claiming::Contended => {
                    self.reply.refuse(&Rejection::contended());
                    return None;
                }
                Claiming::Failed { kind } if host.config.runs_unguarded(kind) => {
                    return Some((inner, None));
                }
                Claiming::Failed { kind } => {
                    self.refuse_failed(claimant, kind).await;
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
            if !self.wait(claimant, seen, until).await {
                return None;
            }
            if let Err(error) = inner.ready().await {
                self.reply.finish(Err(error), Outcome::Unready, None);
                return None;
            }
        }
    }

    /// Waits until the key can be claimed; false if the request has been
    /// answered, or nobody is left to answer.
    async fn wait(&mut self, claimant: &Claimant, mut seen: Seen, until: Instant) -> bool {
        let host = Arc::clone(&self.host);
        let Some(mut place) = host.waiters.enter(&claimant.name) else {
            self.reply.answer(seen);
            return false;
        };
        loop {
            let heard = place.listen();
            match claim::look(&host, claimant).await {
                Ok(None) => return true,
                Ok(Some(now)) => seen = now,
                // Without an answer the last one stands, until the bound.
                Err(_) => {}
            }
            let is_running = matches!(seen.found, Found::InProgress { .. });
            let is_over = Instant::now() >= until || host.tasks.is_draining();
            if !is_running || is_over {
                self.reply.answer(seen);
                return false;
            }
            tokio::select! {
                () = heard => {}
                () = time::sleep_until(until) => {}
                () = host.tasks.drained() => {}
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
            let host = Arc::clone(&self.host);
            self.withdraw(&Owned::new(host, claimant, None)).await;
        }
    }

    async fn run_unguarded<I, B>(&mut self, inner: I, request: Request<RequestBody<B>>)
    where
        I: Service<Request<RequestBody<B>>, Response = Response<R>, Error = E> + Send,
        I::Future: Send,
        B: Body<Data = Bytes> + Send,
    {
        match call(inner, request).await {
            Ok(Ok(response)) => {
                let mut response = self
                    .host
                    .config
                    .cleaned(response)
                    .map(ResponseBody::streamed);
                response.extensions_mut().remove::<Word>();
                say_unrecorded(&mut response);
                self.reply.finish(Ok(response), Outcome::Unguarded, None);
            }
            Ok(Err(error)) => self.reply.finish(Err(error), Outcome::Unguarded, None),
            Err(_panic) => self.reply.refuse(&Rejection::handler_panicked()),
        }
    }

    /// The handler has answered: do with its response what its word, or the
    /// tables, say; and only then reply.
    async fn record(&mut self, owned: &Owned<S>, operation: &Operation, response: Response<R>) {
        let (mut parts, body) = self.host.config.cleaned(response).into_parts();
        correct_length(&mut parts, body.size_hint().exact());
        let said = parts.extensions.remove::<Word>().unwrap_or_default();
        let word = said.or(operation.word());
        let config = &owned.host.config;
        match config.dispositions.conclude(&parts, word, operation) {
            Conclusion::Release(release) => {
                let response = Response::from_parts(parts, ResponseBody::streamed(body));
                self.settle(
                    owned,
                    &Ending::Released(release),
                    Outcome::Released,
                    Ok(response),
                )
                .await;
            }
            Conclusion::Unknown => {
                let response = Response::from_parts(parts, ResponseBody::streamed(body));
                self.lose(owned, Ok(response)).await;
            }
            Conclusion::Record => self.keep(owned, parts, body, word).await,
        }
    }

    /// Gathers the response and records it; or lets it go out as it comes.
    async fn keep(&mut self, owned: &Owned<S>, mut parts: response::Parts, body: R, word: Word) {
        let config = &owned.host.config;
        let gathered = if config.goes_out_live(&parts) {
            Gathered::Outgrown {
                read: Bytes::new(),
                rest: Box::pin(body),
            }
        } else {
            gather(body, config.response_limit, config.response_time, |_| true).await
        };
        match gathered {
            Gathered::Whole { data, trailers } => {
                let completion = config.completion(&parts, &data, trailers.as_ref(), word);
                correct_length(&mut parts, Some(data.len() as u64));
                let response = Response::from_parts(parts, ResponseBody::whole(data, trailers));
                let ending = Ending::Completed(completion);
                self.settle(owned, &ending, Outcome::Recorded, Ok(response))
                    .await;
            }
            Gathered::Broken { read, error } => {
                let response = Response::from_parts(parts, ResponseBody::broken(read, error));
                self.lose(owned, Ok(response)).await;
            }
            Gathered::Outgrown { read, rest }
            | Gathered::Late { read, rest }
            | Gathered::Crowded { read, rest } => {
                let (status, length) = (parts.status, declared_length(&parts));
                let (body, ended) = ResponseBody::live(read, rest, length);
                let response = Response::from_parts(parts, body);
                self.reply
                    .finish(Ok(response), Outcome::Live, owned.operation);
                let (ending, notice) = match ended.await {
                    Ok(()) => {
                        let tombstone = config.tombstone(status, word);
                        (Ending::Completed(tombstone), Notice::Tombstone)
                    }
                    Err(_) => (Ending::Unknown, Notice::LiveBroken),
                };
                notice.tell(owned.operation);
                match owned.settle(&ending).await {
                    Ok(Settlement::Applied) => {}
                    Ok(Settlement::Superseded) => Notice::LostOwnership.tell(owned.operation),
                    Err(_) => self.settle_late(owned, &ending).await,
                }
            }
        }
    }

    /// There is no word of the handler: the outcome is unknown.
    async fn lose(&mut self, owned: &Owned<S>, answer: Answer<R, E>) {
        self.settle(owned, &Ending::Unknown, Outcome::Unknown, answer)
            .await;
    }

    /// Another claim has superseded this one: its answer is the only one that
    /// an epoch has, and this handler's is not shown.
    async fn answer_as_loser(&mut self, owned: &Owned<S>) {
        Notice::LostOwnership.tell(owned.operation);
        match owned.winner().await {
            Ok(Some(seen)) => self.reply.answer(seen),
            Ok(None) => self.reply.refuse(&Rejection::outcome_unknown()),
            Err(error) => self
                .reply
                .refuse(&Rejection::store_unavailable(error.kind())),
        }
    }

    /// Writes the ending down, then replies; if it cannot be written, replies
    /// and goes on trying. If another claim has superseded this one, the client
    /// gets that one's answer.
    async fn settle(
        &mut self,
        owned: &Owned<S>,
        ending: &Ending,
        outcome: Outcome,
        mut answer: Answer<R, E>,
    ) {
        match owned.settle(ending).await {
            Ok(Settlement::Applied) => {
                self.reply.finish(answer, outcome, owned.operation);
            }
            Ok(Settlement::Superseded) => {
                self.answer_as_loser(owned).await;
            }
            Err(_) => {
                let mut outcome = outcome;
                if let (Ok(response), Ending::Completed(_)) = (&mut answer, ending) {
                    say_unrecorded(response);
                    outcome = Outcome::Unrecorded;
                }
                self.reply.finish(answer, outcome, owned.operation);
                self.settle_late(owned, ending).await;
            }
        }
    }
}

/// Late writes have bounds of their own, and no place among the running.
impl<S: Store, R: Body, E> Exchange<S, R, E> {
    async fn settle_late(&mut self, owned: &Owned<S>, ending: &Ending) {
        self.place = None;
        owned.settle_late(ending).await;
    }

    async fn withdraw(&mut self, owned: &Owned<S>) {
        self.place = None;
        self.buffered = None;
        owned.withdraw().await;
    }
}

impl Config {
    /// Whether a request whose claim failed in this way may run all the same.
    /// An unreadable record is a record: its operation may have run.
    fn runs_unguarded(&self, kind: StoreErrorKind) -> bool {
        self.store_failure == StoreFailure::RunUnguarded && kind != StoreErrorKind::Corrupt
    }
}

/// Runs the handler, catching a panic of `call` itself too.
async fn call<I, B, R>(
    mut inner: I,
    request: Request<RequestBody<B>>,
) -> Result<Result<Response<R>, I::Error>, Box<dyn Any + Send>>
where
    I: Service<Request<RequestBody<B>>, Response = Response<R>>,
{
    AssertUnwindSafe(async move { inner.call(request).await })
        .catch_unwind()
        .await
}

/// Whether a handler says that it did its work.
fn claims_success<R>(response: &Response<R>) -> bool {
    response.status().as_u16() < 400
}

/// Gives the readiness of `inner` back: a clone has none.
fn unready<I: Clone>(inner: I) -> I {
    inner.clone()
}
