//! Finishes a run: its outcome is recorded, and only then the client is answered.

use std::{
    any::Any,
    panic::{AssertUnwindSafe, catch_unwind},
    pin::{Pin, pin},
};

use bytes::Bytes;
use futures_util::FutureExt as _;
use http::{Response, StatusCode, response};
use http_body::Body;

use super::{
    heartbeat::Heartbeat,
    limits::Permit,
    owned::{OwnedClaim, Transition},
    reply::{Reply, ServiceResult},
    spawn,
};
use crate::{
    Disposition, Outcome, Rejection, ResponseBody, Store,
    body::read::{Collected, collect},
    disposition::HandlerChoice,
    grpc,
    operation::{AsCommitted, Transacted},
    outcome::Notice,
    response::{ResponseSettings, correct_length, declared_length},
    store::{Release, Transitioned},
};

/// A running request, until its outcome is recorded.
pub(super) struct Run<S> {
    pub(super) claim: OwnedClaim<S>,
    pub(super) heartbeat: Heartbeat<S>,
    pub(super) permit: Permit,
}

/// The result of a call to the handler.
pub(super) type Called<R, E> = Result<Result<Response<R>, E>, Panicked>;

/// The handler panicked.
pub(super) struct Panicked;

impl From<Box<dyn Any + Send>> for Panicked {
    /// The panic's message may quote anything. Rust's panic hook prints it.
    fn from(_: Box<dyn Any + Send>) -> Self {
        Self
    }
}

/// Records the outcome of a run that ended, and returns the answer.
pub(super) async fn finish<S, R, E>(run: Run<S>, called: Called<R, E>) -> Reply<R, E>
where
    S: Store,
    R: Body<Data = Bytes> + Send + 'static,
    R::Error: Send,
{
    let operation = &run.claim.operation;
    // A response that is not sent is dropped at once: its body may hold what others
    // wait for.
    match (operation.transacted().await, called) {
        (Transacted::Committed { response }, called) => {
            Box::pin(reply_committed(run, called, response)).await
        }
        (Transacted::Superseded, called) => {
            drop(called);
            Box::pin(answer_superseded(run)).await
        }
        (Transacted::Unknown, called) => {
            drop(called);
            operation.log_failure();
            let response = run.refuse(Rejection::commit_unknown());
            Box::pin(end_unknown(run, Ok(response), None)).await
        }
        (Transacted::Aborted, Ok(Ok(response))) if is_success(status_of(&response)) => {
            let mut parts = response.into_parts().0;
            let choice = HandlerChoice::take_from(&mut parts.extensions).or(operation.choice());
            operation.log_failure();
            Box::pin(refuse_rolled_back(run, choice)).await
        }
        (_, Ok(Ok(response))) => {
            if status_of(&response).is_server_error() {
                operation.log_failure();
            }
            apply_disposition(run, response).await
        }
        (_, Ok(Err(error))) => {
            operation.log_failure();
            Box::pin(end_unknown(run, Err(error), Some(INNER_FAILED))).await
        }
        (_, Err(Panicked)) => {
            operation.log_failure();
            Box::pin(end_panicked(run)).await
        }
    }
}

/// Records the outcome of a handler that was stopped because its client left.
pub(super) async fn finish_cancelled<S, R, E>(run: Run<S>) -> Reply<R, E>
where
    S: Store,
    R: Body<Data = Bytes>,
{
    let reply = Reply::client_left(run.claim.id());
    // A commit that was under way was not stopped with the handler.
    if let Transacted::Committed { .. } = run.claim.operation.transacted().await {
        run.claim.shared.waiters.wake(run.claim.operation.name());
        return reply;
    }
    run.settings()
        .warnings
        .warn(CANCELLED, None, run.claim.id());
    record_in_background(run, Transition::MarkUnknown).await;
    reply
}

/// Replies with the response that was committed in the handler's transaction, whatever
/// the handler made of it.
async fn reply_committed<S, R, E>(run: Run<S>, called: Called<R, E>, recorded: Bytes) -> Reply<R, E>
where
    S: Store,
    R: Body<Data = Bytes>,
{
    let operation = &run.claim.operation;
    run.claim.shared.waiters.wake(operation.name());
    let settings = run.settings();
    let unchanged = match called {
        Ok(Ok(response)) if response.extensions().get::<AsCommitted>().is_some() => {
            unchanged(settings, response, &recorded).await
        }
        _ => None,
    };
    match unchanged {
        Some(response) => Reply::new(Ok(response), Outcome::Recorded, run.claim.id()),
        None => Reply::recorded(settings, operation.head(), operation.id(), recorded),
    }
}

/// Returns the committed response, with the headers that are not kept; or `None` if the
/// response was changed on its way.
async fn unchanged<R: Body<Data = Bytes>>(
    settings: &ResponseSettings,
    response: Response<R>,
    recorded: &Bytes,
) -> Option<Response<ResponseBody<R>>> {
    let (mut parts, body) = settings.cleaned(response).into_parts();
    HandlerChoice::take_from(&mut parts.extensions);
    let (max, timeout) = (settings.max_body, settings.body_timeout);
    let Collected::Whole {
        data,
        trailers: None,
    } = collect(pin!(body), max, timeout).await
    else {
        return None;
    };
    let kept = settings.completion(&parts, &data, None, None);
    (kept.response == *recorded).then(|| {
        correct_length(&mut parts, Some(data.len() as u64));
        Response::from_parts(parts, ResponseBody::whole(data, None))
    })
}

/// The commit failed, and the handler answered as if it had not. That counts as the
/// failure with which it should have answered: a retry runs.
async fn refuse_rolled_back<S, R, E>(run: Run<S>, choice: HandlerChoice) -> Reply<R, E>
where
    S: Store,
    R: Body<Data = Bytes> + Send + 'static,
    R::Error: Send,
{
    let is_unknown = choice.disposition == Some(Disposition::Unknown);
    if run.claim.operation.have_effects_started() || is_unknown {
        let response = run.refuse(Rejection::rolled_back_after_effects());
        return end_unknown(run, Ok(response), None).await;
    }
    let response = run.refuse(Rejection::rolled_back());
    let transition = Transition::Release(Release::SameRequest);
    end(run, transition, Ok(response), Outcome::Released).await
}

/// Applies the disposition of a response: the handler's own, or that of the tables.
async fn apply_disposition<S, R, E>(run: Run<S>, response: Response<R>) -> Reply<R, E>
where
    S: Store,
    R: Body<Data = Bytes> + Send + 'static,
    R::Error: Send,
{
    let operation = &run.claim.operation;
    let (mut parts, body) = run.settings().cleaned(response).into_parts();
    let choice = HandlerChoice::take_from(&mut parts.extensions).or(operation.choice());
    let dispositions = &run.claim.shared.config.dispositions;
    let disposition = || match choice.disposition {
        Some(disposition) => disposition,
        None => dispositions.of(&parts, operation.have_effects_started()),
    };
    let says_success = || is_success(grpc::status_of(parts.status, &parts.headers));
    let Ok(disposition) = catch_unwind(AssertUnwindSafe(disposition)) else {
        drop((parts, body));
        let response = run.refuse(Rejection::dispositions_panicked());
        return Box::pin(end_unknown(run, Ok(response), None)).await;
    };
    match disposition {
        Disposition::Release(release) => {
            let response = Response::from_parts(parts, ResponseBody::streamed(body));
            let transition = Transition::Release(release);
            Box::pin(end(run, transition, Ok(response), Outcome::Released)).await
        }
        Disposition::Unknown => {
            let response = Response::from_parts(parts, ResponseBody::streamed(body));
            Box::pin(end_unknown(run, Ok(response), Some(ANSWERED_UNKNOWN))).await
        }
        Disposition::Record if operation.is_uncommitted() && says_success() => {
            drop((parts, body));
            Box::pin(refuse_uncommitted(run)).await
        }
        Disposition::Record => record(run, parts, body, choice).await,
    }
}

/// The handler says that it did its work, but has not committed a transaction that it
/// began.
///
/// Recording its response would promise work that is not there (I5). It may have done
/// its work in another way, or its transaction may still be open: the outcome is
/// unknown.
async fn refuse_uncommitted<S, R, E>(run: Run<S>) -> Reply<R, E>
where
    S: Store,
    R: Body<Data = Bytes> + Send + 'static,
    R::Error: Send,
{
    Notice::Uncommitted.tell(&run.settings().warnings, run.claim.id());
    let response = run.refuse(Rejection::uncommitted());
    end_unknown(run, Ok(response), None).await
}

/// Collects the response and records it, or streams it.
async fn record<S, R, E>(
    run: Run<S>,
    mut parts: response::Parts,
    body: R,
    choice: HandlerChoice,
) -> Reply<R, E>
where
    S: Store,
    R: Body<Data = Bytes> + Send + 'static,
    R::Error: Send,
{
    let mut body = Box::pin(body);
    let settings = run.settings();
    if settings.is_streamed(&parts) {
        return Box::pin(stream(run, parts, Bytes::new(), body, choice)).await;
    }
    let collected = collect(body.as_mut(), settings.max_body, settings.body_timeout);
    match AssertUnwindSafe(collected).catch_unwind().await {
        Ok(Collected::Whole { data, trailers }) => {
            // It may hold what others wait for, and recording takes time.
            drop(body);
            let completion = settings.completion(&parts, &data, trailers.as_ref(), choice.keep_for);
            correct_length(&mut parts, Some(data.len() as u64));
            let response = Response::from_parts(parts, ResponseBody::whole(data, trailers));
            let transition = Transition::Complete(completion);
            end(run, transition, Ok(response), Outcome::Recorded).await
        }
        Ok(Collected::Broken { read, error }) => {
            drop(body);
            let response = Response::from_parts(parts, ResponseBody::broken(read, error));
            Box::pin(end_unknown(run, Ok(response), Some(BROKE_OFF))).await
        }
        Ok(Collected::TooLarge { read } | Collected::TimedOut { read }) => {
            Box::pin(stream(run, parts, read, body, choice)).await
        }
        Err(_panic) => {
            drop((parts, body));
            Box::pin(end_panicked(run)).await
        }
    }
}

/// Streams the response. Once it has ended, a tombstone is recorded for it.
async fn stream<S, R, E>(
    run: Run<S>,
    parts: response::Parts,
    read: Bytes,
    rest: Pin<Box<R>>,
    choice: HandlerChoice,
) -> Reply<R, E>
where
    S: Store,
    R: Body<Data = Bytes> + Send + 'static,
    R::Error: Send,
{
    let (status, length) = (parts.status, declared_length(&parts));
    let (body, ended) = ResponseBody::observed(read, rest, length);
    let response = Response::from_parts(parts, body);
    let reply = Reply::new(Ok(response), Outcome::Streamed, run.claim.id());
    spawn(async move {
        let (transition, notice) = match ended.await {
            Ok(()) => {
                let tombstone = run.settings().tombstone(status, choice.keep_for);
                (Transition::Complete(tombstone), Notice::Tombstone)
            }
            Err(_) => (Transition::MarkUnknown, Notice::StreamBroken),
        };
        notice.tell(&run.settings().warnings, run.claim.id());
        record_in_background(run, transition).await;
    });
    reply
}

/// Records the outcome of a run whose client was answered or has left.
async fn record_in_background<S: Store>(run: Run<S>, transition: Transition) {
    match run.claim.end(&transition).await {
        Ok(Transitioned::Applied) => {}
        Ok(Transitioned::Superseded) => {
            Notice::Superseded.tell(&run.settings().warnings, run.claim.id());
        }
        Err(error) => {
            run.claim.warn_late(&error);
            run.record_late(transition).await;
        }
    }
}

async fn end_panicked<S, R, E>(run: Run<S>) -> Reply<R, E>
where
    S: Store,
    R: Body<Data = Bytes> + Send + 'static,
    R::Error: Send,
{
    let response = run.refuse(Rejection::handler_panicked());
    end_unknown(run, Ok(response), None).await
}

/// Ends a run without a response of its handler: the outcome is unknown. `warning` says
/// why, unless a warning has said so before.
async fn end_unknown<S, R, E>(
    run: Run<S>,
    result: ServiceResult<R, E>,
    warning: Option<&'static str>,
) -> Reply<R, E>
where
    S: Store,
    R: Body<Data = Bytes> + Send + 'static,
    R::Error: Send,
{
    let ended = run.claim.end(&Transition::MarkUnknown).await;
    if let Some(warning) = warning
        && !matches!(ended, Ok(Transitioned::Superseded))
    {
        run.settings().warnings.warn(warning, None, run.claim.id());
    }
    let reply = Reply::new(result, Outcome::Unknown, run.claim.id());
    match ended {
        Ok(Transitioned::Applied) => reply,
        Ok(Transitioned::Superseded) => answer_superseded(run).await,
        Err(error) => {
            run.claim.warn_late(&error);
            spawn(run.record_late(Transition::MarkUnknown));
            reply
        }
    }
}

/// Records the transition, and returns the answer. If the transition cannot be recorded
/// in time, the answer is returned nevertheless, and recording continues in the
/// background. If another claim has superseded this one, the client receives that one's
/// answer.
async fn end<S, R, E>(
    run: Run<S>,
    transition: Transition,
    result: ServiceResult<R, E>,
    outcome: Outcome,
) -> Reply<R, E>
where
    S: Store,
    R: Body<Data = Bytes> + Send + 'static,
    R::Error: Send,
{
    match run.claim.end(&transition).await {
        Ok(Transitioned::Applied) => Reply::new(result, outcome, run.claim.id()),
        Ok(Transitioned::Superseded) => Box::pin(answer_superseded(run)).await,
        Err(error) => {
            run.claim.warn_late(&error);
            let reply = Reply::new(result, outcome, run.claim.id());
            let reply = match transition {
                Transition::Complete(_) => reply.unrecorded(),
                Transition::Release(_) | Transition::MarkUnknown => reply,
            };
            spawn(run.record_late(transition));
            reply
        }
    }
}

/// Answers with the record of the claim that superseded this one: only that answer
/// counts, and this handler's is not shown.
async fn answer_superseded<S, R, E>(run: Run<S>) -> Reply<R, E>
where
    S: Store,
    R: Body<Data = Bytes>,
{
    let config = &run.claim.shared.config;
    let operation = &run.claim.operation;
    Notice::Superseded.tell(config.warnings(), run.claim.id());
    let rejection = match run.claim.superseding().await {
        Ok(Some(answered)) => return Reply::answered(config, operation.head(), answered),
        Ok(None) => Rejection::outcome_unknown(),
        Err(error) => Rejection::answer_unreadable(&error),
    };
    let rejection = rejection.about(operation.id());
    Reply::refuse(&config.responses, operation.head(), &rejection)
}

impl<S: Store> Run<S> {
    fn settings(&self) -> &ResponseSettings {
        &self.claim.shared.config.responses
    }

    /// Returns the answer in the handler's place.
    fn refuse<R: Body<Data = Bytes>>(&self, rejection: Rejection) -> Response<ResponseBody<R>> {
        let operation = &self.claim.operation;
        let rejection = rejection.about(operation.id());
        self.settings().refuse(&rejection, operation.head())
    }

    /// Records the transition late. Heartbeats keep the lease meanwhile.
    async fn record_late(self, transition: Transition) {
        self.claim.record_late(&transition, self.permit).await;
        drop(self.heartbeat);
    }
}

fn status_of<B>(response: &Response<B>) -> StatusCode {
    grpc::status_of(response.status(), response.headers())
}

/// Whether a handler says that it did its work.
fn is_success(status: StatusCode) -> bool {
    status.as_u16() < 400
}

const CANCELLED: &str = "client left and `Disconnect::Cancel` stopped the handler: its outcome is \
    unknown";
const ANSWERED_UNKNOWN: &str = "handler answered with a status or a disposition that leaves its \
    outcome unknown: look up what it did, and `resolve` the record";
const BROKE_OFF: &str = "response body broke off: its outcome is unknown, look up what the handler \
    did, and `resolve` the record";
/// The error of an inner service may quote anything, so it is not logged.
const INNER_FAILED: &str = "inner service failed: its outcome is unknown, look up what the handler \
    did, and `resolve` the record";
