//! The way of a guarded request: read its body, acquire its key, run the handler, finish.

mod acquire;
pub(crate) mod admission;
mod authorize;
mod claim;
pub(crate) mod config;
mod decide;
pub(crate) mod discard;
pub(crate) mod drained;
mod finish;
mod guarded;
mod heartbeat;
mod judge;
mod limits;
pub(crate) mod outcome;
mod owned;
mod quotas;
mod read_body;
mod record;
mod reconcile;
mod reply;
mod request;
mod run;
pub(crate) mod shared;
mod store_call;
mod upload;
mod usage;
mod withdraw;
#[cfg(feature = "guard")]
pub(crate) mod work;

use std::{
    future::poll_fn,
    mem,
    pin::Pin,
    sync::{
        Arc,
        atomic::{AtomicBool, Ordering},
    },
    task::Poll,
};

use bytes::Bytes;
use http::{Request, Response, request::Parts};
use http_body::Body;
use tokio::runtime::Handle;
use tower::Service;

use self::{
    acquire::{Acquired, NotRun, acquire},
    admission::Admitted,
    config::{Config, Oversized},
    guarded::{GuardedFuture, Reading},
    limits::Permit,
    owned::OwnedClaim,
    read_body::ReadBody,
    reply::{HttpReply, Reply},
    request::{KeyedRequest, ReadRequest},
    run::{run, run_unguarded},
    shared::Shared,
    upload::{Detachable, OversizedRequest, discard_upload, run_oversized, upload},
};
pub(crate) use self::{guarded::GuardedRequest, reply::ServiceResult};
use crate::{
    body::{ReceivedBody, RequestBody, SentBody, upload::Upload},
    operation::request_name::RequestName,
    rejection::{Rejection, RequestHead},
    store::Store,
};

/// Marks a request that a layer guards. A second layer on the same request lets it pass.
#[derive(Clone, Copy)]
pub(crate) struct IsGuarded;

/// Guards a request.
pub(crate) fn guard<I, S, B, R>(
    shared: Arc<Shared<S>>,
    inner: I,
    admitted: Admitted,
    parts: Parts,
    body: B,
) -> GuardedRequest<R, I::Error>
where
    I: Service<Request<RequestBody<B>>, Response = Response<R>> + Clone + Send + 'static,
    I::Future: Send,
    I::Error: Send + 'static,
    S: Store,
    B: ReceivedBody + Send + 'static,
    R: SentBody,
{
    match admitted.oversized {
        Oversized::Refuse => guard_with(shared, inner, admitted, parts, body, |_| None),
        Oversized::Stream { .. } | Oversized::RunUnguarded => {
            let body = Detachable::new(body);
            guard_with(shared, inner, admitted, parts, body, |body| {
                body.get_mut().detach()
            })
        }
    }
}

/// The next step of a request whose body was read.
enum Next<B> {
    Acquire(KeyedRequest),
    Refuse(Rejection),
    /// Its body is too large.
    RunUnguarded(Box<OversizedRequest<B>>),
}

/// `detach` takes a body out that was read in part.
fn guard_with<I, S, B, R, T>(
    shared: Arc<Shared<S>>,
    inner: I,
    admitted: Admitted,
    parts: Parts,
    body: T,
    detach: impl FnOnce(Pin<&mut T>) -> Option<Pin<Box<B>>> + Send + 'static,
) -> GuardedRequest<R, I::Error>
where
    I: Service<Request<RequestBody<B>>, Response = Response<R>> + Clone + Send + 'static,
    I::Future: Send,
    I::Error: Send + 'static,
    S: Store,
    B: ReceivedBody + Send + 'static,
    R: SentBody,
    T: ReceivedBody + Send + 'static,
{
    let client = Client::of(&shared.config, &admitted.name);
    let head = match shared.config.authorizer {
        None => RequestHead::new(&parts, &shared.config.responses.renderer),
        Some(_) => RequestHead::with_attributes(&parts, admitted.attributes),
    };
    let background = Background::new(admitted.runtime);
    let stale_from = admitted.stale_from;
    let oversized = admitted.oversized;
    let mut request = ReadRequest::unread(parts, admitted.digests);
    let reading = Reading {
        read: ReadBody::new(&shared, admitted.name, oversized),
        answer: {
            let (shared, client, head) = (Arc::clone(&shared), client.clone(), head.clone());
            move |read: ReadBody, body: Pin<&mut T>| {
                let rest = match read.is_cut {
                    true => detach(body),
                    false => None,
                };
                let name = read.name;
                let (body, trailers) = read.reader.into_parts();
                let mut buffered = read.buffered;
                let mut uploaded = None;
                let mut unguarded = None;
                match rest {
                    None => request.read(body, trailers),
                    Some(rest) => match request.check_upload() {
                        Some(check) => {
                            let held = mem::replace(&mut buffered, shared.buffers.empty_permit());
                            let held = (held, name.sent().scope().clone());
                            let limits = shared.config.upload_limits(oversized);
                            uploaded = Some(Box::new(upload(body, rest, check, limits, held)));
                        }
                        None => unguarded = Some(RequestBody::resumed(body, rest)),
                    },
                }
                let next = match unguarded {
                    Some(body) => Next::RunUnguarded(Box::new(OversizedRequest {
                        name,
                        stale_from,
                        request,
                        body,
                    })),
                    None => {
                        let request = KeyedRequest::new(&shared, name, stale_from, request);
                        request.map_or_else(Next::Refuse, Next::Acquire)
                    }
                };
                async move {
                    let reply = match next {
                        Next::Acquire(request) => {
                            let body = (uploaded, buffered);
                            process(&shared, &client, &head, inner, request, body).await
                        }
                        Next::Refuse(rejection) => {
                            Reply::refuse(&shared.config.responses, &head, &rejection)
                        }
                        Next::RunUnguarded(request) => {
                            let run = run_oversized(&shared, &head, inner, *request, buffered);
                            Box::pin(run).await
                        }
                    };
                    reply.send(&client, shared.config.warnings())
                }
            }
        },
    };
    GuardedFuture::new(shared, client, head, background, body, reading)
}

/// Refuses a request from its head.
pub(crate) fn refuse<S, R, E>(
    shared: &Shared<S>,
    parts: &Parts,
    rejection: &Rejection,
) -> ServiceResult<R, E>
where
    R: Body<Data = Bytes>,
{
    let settings = &shared.config.responses;
    let head = RequestHead::new(parts, &settings.renderer);
    Reply::refuse(settings, &head, rejection).send(&Client::default(), &settings.warnings)
}

/// Acquires the key of a request and runs its handler, or answers it without a run.
///
/// `uploaded`: the body of an upload. `buffered`: the permit of a body that was read.
async fn process<I, S, B, R>(
    shared: &Arc<Shared<S>>,
    client: &Client,
    head: &RequestHead,
    inner: I,
    mut request: KeyedRequest,
    (uploaded, buffered): (Option<Box<Upload<B>>>, Permit),
) -> HttpReply<R, I::Error>
where
    I: Service<Request<RequestBody<B>>, Response = Response<R>> + Clone,
    S: Store,
    B: ReceivedBody + Send + 'static,
    R: SentBody,
{
    let settings = &shared.config.responses;
    let permit = match shared.running_permit(request.name.sent().scope()) {
        Ok(permit) => permit,
        Err(rejection) => {
            discard_upload(shared, uploaded, request.what.headers());
            return Reply::refuse(settings, head, &rejection);
        }
    };
    #[cfg(feature = "sealing")]
    if let Err(rejection) = shared.config.load_key().await {
        discard_upload(shared, uploaded, request.what.headers());
        return Reply::refuse(settings, head, &rejection);
    }
    match acquire(shared, client, inner, &mut request).await {
        Ok(Acquired::Run { inner, granted }) => {
            let claim = OwnedClaim::new(Arc::clone(shared), &request, granted, head.clone());
            drop(buffered);
            run(claim, inner, (request, uploaded), client, permit).await
        }
        Ok(Acquired::RunUnguarded { inner }) => {
            let withdrawal = request.withdrawal(shared);
            drop(buffered);
            let run = run_unguarded(settings, head, inner, request.into_http(uploaded));
            let reply = Box::pin(run).await;
            if let Some(withdrawal) = withdrawal {
                spawn(withdrawal.run(permit));
            }
            reply
        }
        Err(not_run) => {
            #[cfg(feature = "sealing")]
            let not_run = match &settings.sealing {
                Some(_) => Box::pin(not_run.opened(&shared.config, &request.name)).await,
                None => not_run,
            };
            let withdrawal = request.withdrawal(shared);
            discard_upload(shared, uploaded, request.what.headers());
            // What the request holds is free before its client is answered.
            drop((request, buffered));
            if let Some(withdrawal) = withdrawal {
                spawn(withdrawal.run(permit));
            }
            match not_run {
                NotRun::Answered(answered) if shared.config.authorizer.is_some() => {
                    let answer = authorize::answer(&shared.config, client, head, answered);
                    Box::pin(answer).await
                }
                not_run => Reply::not_run(&shared.config, head, not_run),
            }
        }
    }
}

/// The client of a request.
#[derive(Clone, Default)]
struct Client(Arc<ClientState>);

#[derive(Default)]
struct ClientState {
    has_left: AtomicBool,
    /// The id of its key in logs.
    #[cfg(all(feature = "sealing", feature = "tracing"))]
    key_id: Option<String>,
}

impl Client {
    /// The client that sent this scope and key.
    fn of(config: &Config, name: &RequestName) -> Self {
        #[cfg(all(feature = "sealing", feature = "tracing"))]
        if let Some(log_ids) = &config.log_ids
            && tracing::enabled!(target: "tower_idempotency", tracing::Level::DEBUG)
        {
            return Self(Arc::new(ClientState {
                has_left: AtomicBool::new(false),
                key_id: Some(log_ids.of(name.sent())),
            }));
        }
        let _ = (config, name);
        Self::default()
    }

    /// Returns the id of its key in logs.
    fn key_id(&self) -> Option<&str> {
        #[cfg(all(feature = "sealing", feature = "tracing"))]
        return self.0.key_id.as_deref();
        #[cfg(not(all(feature = "sealing", feature = "tracing")))]
        None
    }

    /// The request is polled again after this: nothing has to be woken.
    fn leave(&self) {
        self.0.has_left.store(true, Ordering::Release);
    }

    fn has_left(&self) -> bool {
        self.0.has_left.load(Ordering::Acquire)
    }

    /// Resolves when the client has left.
    async fn left(&self) {
        poll_fn(|_| match self.has_left() {
            true => Poll::Ready(()),
            false => Poll::Pending,
        })
        .await;
    }
}

/// Where a request continues when its client has left: in the tracing span of its caller.
struct Background {
    runtime: Handle,
    #[cfg(feature = "tracing")]
    span: tracing::Span,
}

impl Background {
    fn new(runtime: Handle) -> Self {
        Self {
            runtime,
            #[cfg(feature = "tracing")]
            span: tracing::Span::current(),
        }
    }

    fn spawn(self, task: impl Future<Output = ()> + Send + 'static) {
        #[cfg(feature = "tracing")]
        let task = tracing::Instrument::instrument(task, self.span);
        #[cfg(feature = "tracing")]
        let task = tracing::instrument::WithSubscriber::with_current_subscriber(task);
        self.runtime.spawn(task);
    }
}

/// Runs what outlives the answer of a request on a task of its own, in the current span.
fn spawn(task: impl Future<Output = ()> + Send + 'static) {
    #[cfg(feature = "tracing")]
    let task = tracing::Instrument::in_current_span(task);
    #[cfg(feature = "tracing")]
    let task = tracing::instrument::WithSubscriber::with_current_subscriber(task);
    tokio::spawn(task);
}
