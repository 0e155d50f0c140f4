//! What happens to a guarded request, from top to bottom:
//! key → scope → fingerprint → claim → run → record → replay.

use std::{any::Any, panic::AssertUnwindSafe, sync::Arc};

use bytes::Bytes;
use futures_util::FutureExt as _;
use http::{HeaderMap, HeaderValue, Method, Request, Response, StatusCode, header, response};
use http_body::Body;
use tokio::{
    sync::oneshot,
    time::{self, Instant},
};
use tower::{Service, ServiceExt as _};

use crate::{
    Operation, OperationId, Outcome, Rejection, RequestBody, ResponseBody, Store, StoreErrorKind,
    StoreFailure, Word,
    body::{Gathered, gather},
    claim::{self, Claimant, Claiming, Found, Seen},
    config::{Config, RECORDED},
    host::{Host, Share},
    lease::Heartbeats,
    outcome::Notice,
    policy::{Conclusion, Disconnect, Requirement},
    record::{RecordedResponse, WholeResponse},
    replay::replay,
    scope::RecordName,
    settle::{Ending, Owned},
    store::{Claim, Completion, Grant, Settlement},
};

/// What the layer has to do with a request, before its body is read.
pub(crate) enum Admission {
    Ignored,
    Refused(Rejection),
    Guarded(RecordName),
}

/// Marks a request that a layer has taken charge of: a second one on the same
/// request passes.
#[derive(Clone, Copy)]
struct Noticed;

impl<S: Store> Host<S> {
    /// Is this request ignored, refused or guarded? All that can be told from
    /// its head, so that a client which waits for `100 Continue` learns of a
    /// refusal first.
    pub(crate) fn admit<B: Body>(&self, parts: &http::request::Parts, body: &B) -> Admission {
        let config = &self.config;
        if !config.guards(parts) || parts.extensions.get::<Noticed>().is_some() {
            return Admission::Ignored;
        }
        let key = match config.syntax.read(&parts.headers, &config.header) {
            Ok(Some(key)) => key,
            Ok(None) if config.requirement == Requirement::Optional => return Admission::Ignored,
            Ok(None) => return Admission::Refused(Rejection::key_missing(&config.header)),
            Err(fault) => return Admission::Refused(Rejection::key(&config.header, &fault)),
        };
        let Some(scope) = (config.scope)(parts) else {
            return Admission::Refused(Rejection::caller_unknown());
        };
        if body.size_hint().lower() > config.request_limit as u64 {
            return Admission::Refused(Rejection::body_too_large(config.request_limit));
        }
        if self.tasks.is_draining() {
            return Admission::Refused(Rejection::draining());
        }
        if tokio::runtime::Handle::try_current().is_err() {
            return Admission::Refused(Rejection::runtime_missing());
        }
        Admission::Guarded(RecordName::new(scope, key))
    }

    /// The answer in the handler's place.
    pub(crate) fn refuse<R: Body<Data = Bytes>>(
        &self,
        rejection: &Rejection,
    ) -> Response<ResponseBody<R>> {
        self.config
            .renderer
            .render(rejection)
            .map(|body| ResponseBody::whole(body, None))
    }

    /// The same, with its outcome told: before there is an exchange to tell it.
    pub(crate) fn refuse_undetached<R: Body<Data = Bytes>>(
        &self,
        rejection: &Rejection,
    ) -> Response<ResponseBody<R>> {
        let outcome = Outcome::Refused(rejection.kind());
        outcome.tell(None);
        let mut response = self.refuse(rejection);
        response.extensions_mut().insert(outcome);
        response
    }
}

impl Config {
    /// Told from the method alone, so that most requests are not taken apart.
    pub(crate) fn never_guards(&self, method: &Method) -> bool {
        match &self.guard_if {
            None => !self.methods.contains(method),
            Some(_) => method.is_safe(),
        }
    }

    fn guards(&self, parts: &http::request::Parts) -> bool {
        !self.never_guards(&parts.method)
            && self.guard_if.as_ref().is_none_or(|guards| guards(parts))
    }
}

/// Answers a guarded request. The body is read here, so that a client which
/// leaves during its upload leaves nothing behind; what follows is detached
/// from the client, which may leave at any moment.
pub(crate) async fn guard<I, S, B, R>(
    host: Arc<Host<S>>,
    inner: I,
    name: RecordName,
    parts: http::request::Parts,
    body: B,
) -> Result<Response<ResponseBody<R>>, I::Error>
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
    let refuse = |rejection: Rejection| Ok(host.refuse_undetached(&rejection));
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
    let (reply, answer) = oneshot::channel();
    let exchange = Exchange {
        host: Arc::clone(&host),
        reply: Some(reply),
        place: Some(place),
        buffered: Some(buffered),
    };
    host.tasks.detach(exchange.run(inner, claimant, trailers));
    // Only a panic of a callback, or the end of the runtime, drops the reply.
    answer
        .await
        .unwrap_or_else(|_| refuse(Rejection::handler_panicked()))
}

type Answer<R, E> = Result<Response<ResponseBody<R>>, E>;

/// A guarded request once it is detached: it has a client, perhaps.
struct Exchange<S, R: Body, E> {
    host: Arc<Host<S>>,
    reply: Option<oneshot::Sender<Answer<R, E>>>,
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
    async fn run<I, B>(mut self, inner: I, claimant: Claimant, trailers: Option<HeaderMap>)
    where
        I: Service<Request<RequestBody<B>>, Response = Response<R>, Error = E> + Clone + Send,
        I::Future: Send,
        B: Body<Data = Bytes> + Send,
    {
        let Some((inner, granted)) = self.claim(inner, &claimant).await else {
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
        let operation = Operation::new(name, grant);
        request.extensions_mut().insert(operation.clone());
        let heartbeats = Heartbeats::start(
            &owned.host,
            &owned.name,
            owned.token,
            since,
            operation.loss(),
        );
        let Some(answered) = self.attended(call(inner, request)).await else {
            return self.lose_unattended(&owned).await;
        };
        match answered {
            Ok(Ok(response)) => self.record(&owned, &operation, response).await,
            Ok(Err(error)) => self.lose(&owned, Err(error)).await,
            Err(_panic) => {
                let response = self.host.refuse(&Rejection::handler_panicked());
                self.lose(&owned, Ok(response)).await;
            }
        }
        drop(heartbeats);
    }

    /// Runs the handler, to its end or, if the layer wants that, until its client
    /// has left.
    async fn attended<T>(&mut self, handler: impl Future<Output = T>) -> Option<T> {
        match (self.host.config.disconnect, &mut self.reply) {
            (Disconnect::Cancel, Some(reply)) => tokio::select! {
                biased;
                answered = handler => Some(answered),
                () = reply.closed() => None,
            },
            (Disconnect::Finish, _) | (Disconnect::Cancel, None) => Some(handler.await),
        }
    }

    /// The handler was stopped with nobody left to answer.
    async fn lose_unattended(&mut self, owned: &Owned<S>) {
        self.reply = None;
        Outcome::Left.tell(owned.operation);
        match owned.settle(&Ending::Unknown).await {
            Ok(Settlement::Applied) => {}
            Ok(Settlement::Superseded) => Notice::LostOwnership.tell(owned.operation),
            Err(_) => self.settle_late(owned, &Ending::Unknown).await,
        }
    }

    /// Claims the key, and waits for its owner if the layer waits. `None` if
    /// the request has been answered; no grant if it may run unguarded.
    async fn claim<I, B>(
        &mut self,
        mut inner: I,
        claimant: &Claimant,
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
                Claiming::Contended => {
                    self.refuse(&Rejection::contended());
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
                self.answer(seen);
                return None;
            }
            // Waiting holds no place of the inner service.
            inner = unready(inner);
            let until = *wait_until.get_or_insert_with(|| Instant::now() + host.config.wait);
            if !self.wait(claimant, seen, until).await {
                return None;
            }
            if let Err(error) = inner.ready().await {
                self.finish(Err(error), Outcome::Unready, None);
                return None;
            }
        }
    }

    /// Waits until the key can be claimed; false if the request has been
    /// answered, or nobody is left to answer.
    async fn wait(&mut self, claimant: &Claimant, mut seen: Seen, until: Instant) -> bool {
        let host = Arc::clone(&self.host);
        let Some(mut place) = host.waiters.enter(&claimant.name) else {
            self.answer(seen);
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
            if !is_running || Instant::now() >= until {
                self.answer(seen);
                return false;
            }
            let left = match &mut self.reply {
                Some(reply) => reply.closed(),
                None => return false,
            };
            tokio::select! {
                () = heard => {}
                () = time::sleep_until(until) => {}
                () = left => {
                    Outcome::Left.tell(None);
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
        self.refuse(&Rejection::store_unavailable(kind));
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
                let mut response = self.cleaned(response).map(ResponseBody::streamed);
                response.extensions_mut().remove::<Word>();
                say_unrecorded(&mut response);
                self.finish(Ok(response), Outcome::Unguarded, None);
            }
            Ok(Err(error)) => self.finish(Err(error), Outcome::Unguarded, None),
            Err(_panic) => self.refuse(&Rejection::handler_panicked()),
        }
    }

    /// The handler has answered: do with its response what its word, or the
    /// tables, say; and only then reply.
    async fn record(&mut self, owned: &Owned<S>, operation: &Operation, response: Response<R>) {
        let (mut parts, body) = self.cleaned(response).into_parts();
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
            Conclusion::Record => {
                let retention = word
                    .retention()
                    .unwrap_or_else(|| config.retention_of(parts.status))
                    .min(crate::config::LONGEST);
                let completion = |recorded: &RecordedResponse| {
                    Completion::new(recorded.encode(), retention, config.lease)
                };
                self.keep(owned, parts, body, completion).await;
            }
        }
    }

    /// Gathers the response and records it; or lets it go out as it comes.
    async fn keep(
        &mut self,
        owned: &Owned<S>,
        mut parts: response::Parts,
        body: R,
        completion: impl Fn(&RecordedResponse) -> Completion,
    ) {
        let config = &owned.host.config;
        let limit = config.response_limit;
        let gathered = if config.goes_out_live(&parts) {
            Gathered::Outgrown {
                read: Bytes::new(),
                rest: Box::pin(body),
            }
        } else {
            gather(body, limit, config.response_time, |_| true).await
        };
        match gathered {
            Gathered::Whole { data, trailers } => {
                let recorded = RecordedResponse::whole(WholeResponse {
                    status: parts.status,
                    headers: config.kept_headers.keep(&parts.headers, &config.marker),
                    body: data.clone(),
                    trailers: trailers.clone().unwrap_or_default(),
                });
                let mut completion_of_it = completion(&recorded);
                if completion_of_it.response.len() > limit.saturating_add(HEADER_ROOM) {
                    completion_of_it = completion(&RecordedResponse::tombstone());
                }
                correct_length(&mut parts, Some(data.len() as u64));
                let response = Response::from_parts(parts, ResponseBody::whole(data, trailers));
                let ending = Ending::Completed(completion_of_it);
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
                let length = declared_length(&parts);
                let (body, ended) = ResponseBody::live(read, rest, length);
                let response = Response::from_parts(parts, body);
                self.finish(Ok(response), Outcome::Live, owned.operation);
                let (ending, notice) = match ended.await {
                    Ok(()) => {
                        let tombstone = completion(&RecordedResponse::tombstone());
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
                self.finish(answer, outcome, owned.operation);
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
                self.finish(answer, outcome, owned.operation);
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

/// Replies.
impl<S, R, E> Exchange<S, R, E>
where
    S: Store,
    R: Body<Data = Bytes>,
{
    /// What the record that is there answers.
    fn answer(&mut self, Seen { operation, found }: Seen) {
        let config = &self.host.config;
        let rejection = match found {
            Found::Completed { response } => return self.replay(operation, response),
            Found::InProgress { age, lease_left } => Rejection::in_progress(age, lease_left),
            Found::Unknown => Rejection::outcome_unknown(),
            // Nothing of the other request is shown.
            Found::OtherRequest => return self.refuse(&Rejection::key_reused(config.mismatch)),
            Found::OtherScheme => return self.refuse(&Rejection::scheme_unknown()),
        };
        self.refuse(&rejection.about(operation));
    }

    fn replay(&mut self, operation: OperationId, recorded: Bytes) {
        match RecordedResponse::decode(recorded).map(RecordedResponse::into_whole) {
            Ok(Some(whole)) => {
                let response = replay(whole, &self.host.config.marker);
                self.finish(Ok(response), Outcome::Replayed, Some(operation));
            }
            Ok(None) => self.refuse(&Rejection::not_replayable().about(operation)),
            Err(error) => {
                Notice::Corrupt.tell(Some(operation));
                self.refuse(&Rejection::store_unavailable(error.kind()));
            }
        }
    }

    /// Another claim has superseded this one: its answer is the only one that
    /// an epoch has, and this handler's is not shown.
    async fn answer_as_loser(&mut self, owned: &Owned<S>) {
        Notice::LostOwnership.tell(owned.operation);
        match owned.winner().await {
            Ok(Some(seen)) => self.answer(seen),
            Ok(None) => self.refuse(&Rejection::outcome_unknown()),
            Err(error) => self.refuse(&Rejection::store_unavailable(error.kind())),
        }
    }

    fn refuse(&mut self, rejection: &Rejection) {
        let response = self.host.refuse(rejection);
        self.finish(
            Ok(response),
            Outcome::Refused(rejection.kind()),
            rejection.operation(),
        );
    }

    /// Tells the outcome, once, and sends the answer to the client, if it is
    /// still there.
    fn finish(
        &mut self,
        mut answer: Answer<R, E>,
        outcome: Outcome,
        operation: Option<OperationId>,
    ) {
        if let Ok(response) = &mut answer {
            response.extensions_mut().insert(outcome);
        }
        outcome.tell(operation);
        let Some(reply) = self.reply.take() else {
            return;
        };
        if reply.send(answer).is_err() {
            Notice::ClientGone.tell(operation);
        }
    }

    /// The handler's response without the layer's own headers, which only the
    /// layer may set.
    fn cleaned(&self, mut response: Response<R>) -> Response<R> {
        let headers = response.headers_mut();
        headers.remove(&self.host.config.marker);
        headers.remove(RECORDED);
        response
    }
}

impl Config {
    /// Whether a request whose claim failed in this way may run all the same.
    /// An unreadable record is a record: its operation may have run.
    fn runs_unguarded(&self, kind: StoreErrorKind) -> bool {
        self.store_failure == StoreFailure::RunUnguarded && kind != StoreErrorKind::Corrupt
    }

    /// Whether a response is known from its head not to be kept.
    fn goes_out_live(&self, response: &response::Parts) -> bool {
        response.status.is_informational()
            || response
                .headers
                .get(header::CONTENT_TYPE)
                .is_some_and(|value| self.live_types.iter().any(|live| essence_is(value, live)))
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

/// Gives the readiness of `inner` back: a clone has none.
fn unready<I: Clone>(inner: I) -> I {
    inner.clone()
}

fn say_unrecorded<B>(response: &mut Response<B>) {
    response
        .headers_mut()
        .insert(RECORDED, HeaderValue::from_static("false"));
}

fn essence_is(value: &HeaderValue, media_type: &HeaderValue) -> bool {
    let essence = value.as_bytes().split(|&byte| byte == b';').next();
    essence
        .unwrap_or_default()
        .trim_ascii()
        .eq_ignore_ascii_case(media_type.as_bytes())
}

/// hyper sends a handler's `Content-Length` as it is, even when it is wrong,
/// and the connection breaks. A 304 describes another response's length.
fn correct_length(parts: &mut response::Parts, length: Option<u64>) {
    let Some(length) = length else {
        return;
    };
    if parts.headers.contains_key(header::CONTENT_LENGTH)
        && parts.status != StatusCode::NOT_MODIFIED
    {
        if parts.status == StatusCode::NO_CONTENT {
            parts.headers.remove(header::CONTENT_LENGTH);
        } else {
            parts.headers.insert(header::CONTENT_LENGTH, length.into());
        }
    }
}

/// The length that a server will stop at.
fn declared_length(parts: &response::Parts) -> Option<u64> {
    parts
        .headers
        .get(header::CONTENT_LENGTH)?
        .to_str()
        .ok()?
        .parse()
        .ok()
}

/// What the lines of a kept response may take beside its body.
const HEADER_ROOM: usize = 64 << 10;
