//! What happens to a guarded request, from top to bottom:
//! key → scope → fingerprint → claim → run → record → replay.

mod ending;
mod turn;

use std::{any::Any, panic::AssertUnwindSafe, sync::Arc};

use bytes::Bytes;
use futures_util::FutureExt as _;
use http::{HeaderMap, Request, Response, request};
use http_body::Body;
use tower::Service;

use crate::{
    Operation, Outcome, RecordName, Rejection, RequestBody, ResponseBody, Store, Word,
    admission::Noticed,
    body::{Gathered, gather},
    claim::Claimant,
    host::{Host, Share},
    lease::Heartbeats,
    policy::Disconnect,
    reply::{Answer, Reply, say_unrecorded},
    settle::{Ending, Owned},
    store::Claim,
    transaction::Transacted,
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
        // Their task begins on this thread, and a handler that blocks it from its
        // first poll on would not let it.
        tokio::task::yield_now().await;
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
