//! What happens to a guarded request, from top to bottom:
//! key → scope → fingerprint → claim → run → record → replay.
#![expect(
    clippy::manual_async_fn,
    reason = "the future of an `async fn` has room for its arguments twice"
)]

mod acquire;
pub(crate) mod admission;
pub(crate) mod claim;
pub(crate) mod discard;
mod finish;
pub(crate) mod heartbeat;
pub(crate) mod owned;
pub(crate) mod read_body;
pub(crate) mod reconcile;
pub(crate) mod reply;
pub(crate) mod shared;
pub(crate) mod waiters;
pub(crate) mod withdraw;

use std::{
    any::Any,
    future::poll_fn,
    panic::{AssertUnwindSafe, catch_unwind},
    pin::{Pin, pin},
    sync::Arc,
    task::{Context, Poll, Waker},
};

use bytes::Bytes;
use futures_util::FutureExt as _;
use http::{Request, Response, StatusCode, request};
use http_body::Body;
use tokio::{sync::oneshot, time::Instant};
use tower::Service;

use self::{acquire::Turn, finish::INNER_FAILED};
use crate::{
    Operation, Outcome, Rejection, RequestBody, ResponseBody, Store, Word,
    body::error::BoxError,
    flow::admission::{Admitted, Noticed},
    flow::claim::Claimant,
    flow::heartbeat::Heartbeats,
    flow::owned::{Ending, Owned},
    flow::read_body::{Guarded, Upload},
    flow::reply::{Answer, Client, Reply, say_unrecorded},
    flow::shared::{Host, Share},
    flow::withdraw::Withdrawal,
    operation::Transacted,
    policy::Disconnect,
    rejection::Callback,
    store::{Claim, Grant},
};

/// Answers a guarded request. The body is read here, so that a client which
/// leaves during its upload leaves nothing behind; what follows is detached
/// from the client, which may leave at any moment.
pub(crate) fn guard<I, S, B, R>(
    host: Arc<Host<S>>,
    inner: I,
    admitted: Admitted,
    parts: request::Parts,
    body: B,
) -> impl Guarded<Answer<R, I::Error>> + Send + 'static
where
    I: Service<Request<RequestBody<B>>, Response = Response<R>> + Clone + Send + 'static,
    I::Future: Send,
    I::Error: Send + 'static,
    S: Store,
    B: Body<Data = Bytes> + Send + 'static,
    B::Error: Into<BoxError>,
    R: Body<Data = Bytes> + Send + 'static,
    R::Error: Send,
{
    let uploaded = Arc::clone(&host);
    Upload::new(uploaded, body, move |body, trailers, buffered| async move {
        let config = &host.config;
        let refuse = |rejection: Rejection| Ok(config.refuse_at_once(&rejection));
        let fingerprint = || config.fingerprinter.current(&parts, &body);
        let Ok((fingerprint, body_fault)) = catch_unwind(AssertUnwindSafe(fingerprint)) else {
            return refuse(Rejection::callback_panicked(Callback::Fingerprint));
        };
        let place = match host.permit() {
            Ok(place) => place,
            Err(rejection) => return refuse(rejection),
        };
        let claimant = Box::new(Claimant {
            name: admitted.name,
            claim: Claim::new(fingerprint, config.lease, config.retention),
            stale_from: admitted.stale_from,
            body_fault,
            parts,
            body,
            trailers,
            hold: None,
        });
        let (client, answer) = oneshot::channel();
        detach(run(
            Arc::clone(&host),
            inner,
            claimant,
            client,
            (place, buffered),
        ));
        // Only a panic of a callback, or the end of the runtime, drops the reply.
        answer
            .await
            .unwrap_or_else(|_| refuse(Rejection::task_panicked()))
    })
}

/// Runs `task` to its end, whoever leaves, in the caller's tracing span.
///
/// Begins at once, on the caller's stack: what has nothing to wait for needs
/// no task of its own, and nobody can leave meanwhile. A panic ends it, as it
/// would end a task.
fn detach(task: impl Future<Output = ()> + Send + 'static) {
    let mut task = Box::pin(task);
    let mut cx = Context::from_waker(Waker::noop());
    let begun = catch_unwind(AssertUnwindSafe(|| task.as_mut().poll(&mut cx)));
    if !matches!(begun, Ok(Poll::Pending)) {
        return;
    }
    #[cfg(feature = "tracing")]
    let task = tracing::Instrument::in_current_span(task);
    // Polled again at once, with a waker of its own.
    spawn(task);
}

/// Runs `task` beside its caller, with the caller's subscriber.
fn spawn(task: impl Future<Output = ()> + Send + 'static) {
    #[cfg(feature = "tracing")]
    let task = tracing::instrument::WithSubscriber::with_current_subscriber(task);
    tokio::spawn(task);
}

/// From here on the request runs to its end, whoever leaves.
///
/// What seldom happens is boxed, so that the future of every request has no
/// room for it; and so are the handler and the end of its run, since allocators
/// have small pieces at hand.
fn run<I, S, B, R>(
    host: Arc<Host<S>>,
    inner: I,
    mut claimant: Box<Claimant>,
    client: Client<R, I::Error>,
    (place, buffered): (Share, Share),
) -> impl Future<Output = ()> + Send
where
    I: Service<Request<RequestBody<B>>, Response = Response<R>> + Clone + Send,
    I::Future: Send,
    I::Error: Send + 'static,
    S: Store,
    B: Body<Data = Bytes> + Send,
    R: Body<Data = Bytes> + Send + 'static,
    R::Error: Send,
{
    async move {
        let mut exchange = Exchange {
            host: &host,
            reply: Reply::new(&host.config, client),
            place: Some(place),
            buffered: Some(buffered),
        };
        match exchange.claim(inner, &mut claimant).await {
            Turn::Run {
                inner,
                grant,
                since,
            } => {
                let owned = Owned::new(&host, &claimant, grant);
                let request = exchange.passed_on(*claimant);
                exchange
                    .run_guarded(&owned, grant, since, inner, request)
                    .await;
            }
            Turn::RunUnguarded { inner } => {
                let withdrawal = claimant.withdrawal(&host);
                let request = exchange.passed_on(*claimant);
                Box::pin(exchange.run_unguarded(inner, request)).await;
                exchange.withdraw(withdrawal);
            }
            Turn::Over(over) => {
                let withdrawal = claimant.withdrawal(&host);
                // What the request holds is free before its client is answered.
                drop(claimant);
                exchange.buffered = None;
                exchange.conclude(over);
                exchange.withdraw(withdrawal);
            }
        }
    }
}

/// A guarded request once it is detached: it has a client, perhaps.
struct Exchange<'a, S, R: Body, E> {
    host: &'a Arc<Host<S>>,
    reply: Reply<'a, R, E>,
    place: Option<Share>,
    buffered: Option<Share>,
}

impl<S, R, E> Exchange<'_, S, R, E>
where
    S: Store,
    R: Body<Data = Bytes> + Send + 'static,
    R::Error: Send,
    E: Send + 'static,
{
    /// The request for the handler, and for the layer's bound on bodies no more.
    fn passed_on<B>(&mut self, claimant: Claimant) -> Request<RequestBody<B>> {
        self.buffered = None;
        let Claimant {
            mut parts,
            body,
            trailers,
            ..
        } = claimant;
        parts.extensions.insert(Noticed);
        Request::from_parts(parts, RequestBody::buffered(body, trailers))
    }

    fn run_guarded<I, B>(
        &mut self,
        owned: &Owned<'_, S>,
        grant: Grant,
        since: Instant,
        inner: I,
        mut request: Request<RequestBody<B>>,
    ) -> impl Future<Output = ()> + Send
    where
        I: Service<Request<RequestBody<B>>, Response = Response<R>, Error = E> + Send,
        I::Future: Send,
        B: Body<Data = Bytes> + Send,
    {
        let config = Arc::clone(&self.host.config);
        let operation = Operation::new(config, owned.name.clone(), owned.token, grant, since);
        request.extensions_mut().insert(operation.clone());
        let handler = Box::pin(call(inner, request));
        async move {
            let heartbeats = Heartbeats::start(self.host, &operation);
            if heartbeats.is_first {
                tokio::task::yield_now().await;
            }
            match self.attend(handler).await {
                Some(answered) => {
                    let answered = answered.map_err(|_panic| Rejection::handler_panicked());
                    Box::pin(self.end(owned, &operation, answered)).await;
                }
                None => Box::pin(self.lose_unattended(owned, &operation)).await,
            }
            drop(heartbeats);
        }
    }

    /// Runs the handler, to its end or, if the layer wants that, until its client
    /// has left.
    fn attend<T>(
        &mut self,
        mut handler: Pin<Box<impl Future<Output = T> + Send>>,
    ) -> impl Future<Output = Option<T>> + Send {
        let cancels = self.host.config.disconnect == Disconnect::Cancel;
        async move {
            let mut left = pin!(self.reply.left());
            poll_fn(|cx| match handler.as_mut().poll(cx) {
                Poll::Ready(answered) => Poll::Ready(Some(answered)),
                Poll::Pending if cancels => left.as_mut().poll(cx).map(|()| None),
                Poll::Pending => Poll::Pending,
            })
            .await
        }
    }

    /// Nothing is left to run.
    fn end(
        &mut self,
        owned: &Owned<'_, S>,
        operation: &Operation,
        answered: Result<Result<Response<R>, E>, Rejection>,
    ) -> impl Future<Output = ()> + Send {
        async move {
            match (operation.transacted().await, answered) {
                (Transacted::Committed { response }, answered) => {
                    Box::pin(self.reply_committed(owned, answered, response)).await;
                }
                // A response that is not sent is dropped: its body may hold what
                // others wait for.
                (Transacted::Superseded, answered) => {
                    drop(answered);
                    Box::pin(self.answer_as_loser(owned)).await;
                }
                (Transacted::Unknown, answered) => {
                    drop(answered);
                    operation.log_failure();
                    Box::pin(self.lose_commit(owned)).await;
                }
                (Transacted::Aborted, Ok(Ok(response))) if claims_success(response.status()) => {
                    let said = response.extensions().get::<Word>().copied();
                    drop(response);
                    let word = said.unwrap_or_default().or(operation.word());
                    operation.log_failure();
                    Box::pin(self.deny_success(owned, operation, word)).await;
                }
                (_, Ok(Ok(response))) => {
                    if response.status().is_server_error() {
                        operation.log_failure();
                    }
                    self.record(owned, operation, response).await;
                }
                (_, Ok(Err(error))) => {
                    operation.log_failure();
                    Box::pin(self.lose(owned, Err(error), Some(INNER_FAILED))).await;
                }
                (_, Err(rejection)) => {
                    operation.log_failure();
                    let response = self.refusal(owned, rejection);
                    Box::pin(self.lose(owned, Ok(response), None)).await;
                }
            }
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
}

/// Late writes have bounds of their own, and no place among the running.
impl<S: Store, R: Body, E> Exchange<'_, S, R, E> {
    async fn settle_late(&mut self, owned: &Owned<'_, S>, ending: &Ending) {
        owned.settle_late(ending, self.place.take()).await;
    }

    /// Starts the withdrawal on a task that holds the request's name and claim only.
    fn withdraw(&mut self, withdrawal: Option<Withdrawal<S>>) {
        if let Some(withdrawal) = withdrawal {
            spawn(withdrawal.run(self.place.take()));
        }
    }
}

/// Runs the handler, catching a panic of `call` itself too.
fn call<I, B, R>(
    mut inner: I,
    request: Request<RequestBody<B>>,
) -> impl Future<Output = Result<Result<Response<R>, I::Error>, Box<dyn Any + Send>>>
where
    I: Service<Request<RequestBody<B>>, Response = Response<R>>,
{
    AssertUnwindSafe(async move { inner.call(request).await }).catch_unwind()
}

/// Whether a handler says that it did its work.
fn claims_success(status: StatusCode) -> bool {
    status.as_u16() < 400
}
