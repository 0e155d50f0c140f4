//! Finishes a run: its outcome is recorded, and only then the client is answered.

use std::{
    panic::{AssertUnwindSafe, catch_unwind},
    pin::{Pin, pin},
    time::Duration,
};

use bytes::Bytes;
use futures_util::FutureExt as _;
use http::{Response, response};
use http_body::Body;

use super::{
    Client, authorize,
    judge::{Judged, Unrecorded, is_success},
    record::{Ended, Finished, Panicked, Run, record_in_background},
    reply::{HttpReply, Reply},
    spawn,
};
use crate::{
    body::{
        ResponseBody, SentBody, Trailers,
        collect::{Collected, collect},
        grpc,
        read::ReadEnd,
        upload::UploadState,
    },
    flow::outcome::Outcome,
    operation::{
        AsCommitted, Transacted, disposition::HandlerChoice, response_settings::ResponseSettings,
    },
    rejection::Rejection,
    response::{attributes::Attributes, correct_length, declared_length},
    store::{Completion, OwnerTransition, Release, Store, Transitioned},
    telemetry::notice::Notice,
};

/// The result of a call to the handler.
pub(super) type Called<R, E> = Result<Result<Response<R>, E>, Panicked>;

pub(super) type HttpFinished<R, E> = Finished<Response<ResponseBody<R>>, E>;

/// The next step of a run whose handler has ended.
enum Next<R: Body, E> {
    Record(HttpFinished<R, E>),
    /// The response is to be recorded: its body is collected first.
    Collect(Judged, R),
    /// The response that the handler's own transaction has recorded is the answer.
    AnswerCommitted {
        called: Called<R, E>,
        recorded: Bytes,
        completion: Completion,
    },
    /// Another claim's answer counts.
    AnswerSuperseded,
}

/// A response that is too large or endless to keep.
struct Streamed<R> {
    parts: response::Parts,
    read: Bytes,
    rest: Pin<Box<R>>,
    keep_for: Option<Duration>,
}

/// Records the outcome of a run that ended, and returns the answer.
///
/// An outcome that cannot be recorded in time is recorded in the background, after the
/// answer. If another claim has superseded this one, the client receives that one's
/// answer.
pub(super) async fn finish<S: Store, R: SentBody, E>(
    run: Run<S>,
    called: Called<R, E>,
    client: &Client,
) -> HttpReply<R, E> {
    let transacted = run.claim.operation.transacted().await;
    // Even a size hint of the response's body may panic.
    let next = catch_unwind(AssertUnwindSafe(|| run.next(transacted, called)));
    let next = next.unwrap_or_else(|_| run.refuse_unknown(Rejection::handler_panicked()));
    let finished = match next {
        Next::Record(finished) => finished,
        Next::Collect(judged, body) => match collect_response(&run, judged, body).await {
            Ok(finished) => finished,
            Err(streamed) if run.failed_before_upload(&streamed.parts) => {
                let (body, _) = ResponseBody::observed(streamed.read, streamed.rest, None);
                let response = Response::from_parts(streamed.parts, body);
                Finished::released(Release::SameRequest, Ok(response))
            }
            Err(streamed) => return stream(run, streamed),
        },
        Next::AnswerCommitted {
            called,
            recorded,
            completion,
        } => {
            run.claim.committed(completion);
            return Box::pin(answer_committed(&run, called, recorded)).await;
        }
        Next::AnswerSuperseded => return Box::pin(answer_superseded(&run, client)).await,
    };
    let finished = match run.claim.operation.upload() {
        Some(upload) => Box::pin(run.with_upload(upload, finished)).await,
        None => finished,
    };
    match run.claim.end(&finished.transition).await {
        Ok(Transitioned::Superseded) => {
            drop(finished);
            Box::pin(answer_superseded(&run, client)).await
        }
        ended => run.recorded(finished, ended.err()),
    }
}

impl<S: Store> Run<S> {
    /// Decides what the handler's end means. A response that is not sent is dropped at
    /// once: its body may hold what others wait for.
    fn next<R: SentBody, E>(&self, transacted: Transacted, called: Called<R, E>) -> Next<R, E> {
        match self.ended(transacted, called) {
            Ended::Committed {
                called,
                recorded,
                completion,
            } => Next::AnswerCommitted {
                called,
                recorded,
                completion,
            },
            Ended::Superseded => Next::AnswerSuperseded,
            Ended::Unknown(rejection) => self.refuse_unknown(rejection),
            Ended::Returned {
                result: Ok(response),
                is_aborted,
            } => self.judge_head(is_aborted, response),
            Ended::Returned {
                result: Err(error), ..
            } => {
                self.claim.operation.log_failure();
                Next::Record(self.unknown(Err(error), Some(INNER_FAILED)))
            }
        }
    }

    /// Decides about a response by its head.
    fn judge_head<R: SentBody, E>(&self, is_aborted: bool, response: Response<R>) -> Next<R, E> {
        let operation = &self.claim.operation;
        let (mut parts, body) = self.settings().cleaned(response).into_parts();
        let choice = HandlerChoice::take_from(&mut parts.extensions).or(operation.choice());
        let status = grpc::status_of(parts.status, &parts.headers, None);
        let mut judged = Judged {
            parts,
            choice,
            undone: self.undone(is_aborted),
            status: None,
        };
        let may_fail_later = is_success(status) && operation.head().is_grpc();
        if judged.undone.is_some() && may_fail_later {
            return Next::Collect(judged, body);
        }
        if let Some(unrecorded) = self.claim.judge(&judged, status) {
            let response = Response::from_parts(judged.parts, ResponseBody::streamed(body));
            return Next::Record(self.finished(unrecorded, response));
        }
        judged.status = Some(status);
        Next::Collect(judged, body)
    }

    /// Returns the end of a run whose response is not recorded.
    fn finished<R: SentBody, E>(
        &self,
        unrecorded: Unrecorded,
        response: Response<ResponseBody<R>>,
    ) -> HttpFinished<R, E> {
        match unrecorded {
            Unrecorded::Release(release) => Finished::released(release, Ok(response)),
            Unrecorded::Unknown => self.unknown(Ok(response), Some(ANSWERED_UNKNOWN)),
            Unrecorded::RolledBack => {
                let response = self.refuse(Rejection::rolled_back());
                Finished::released(Release::SameRequest, Ok(response))
            }
            Unrecorded::Refused(rejection) => self.unknown(Ok(self.refuse(rejection)), None),
        }
    }

    /// Whether the run failed before its upload was verified. Such a response is not recorded,
    /// streamed or not.
    fn failed_before_upload(&self, parts: &response::Parts) -> bool {
        let operation = &self.claim.operation;
        let is_unverified = |upload: &UploadState| upload.ended() != Some(Ok(()));
        operation.upload().is_some_and(is_unverified)
            && !is_success(grpc::status_of(parts.status, &parts.headers, None))
            && !operation.have_effects_started()
    }

    /// The outcome is unknown, and the client is refused.
    fn refuse_unknown<R: SentBody, E>(&self, rejection: Rejection) -> Next<R, E> {
        Next::Record(self.unknown(Ok(self.refuse(rejection)), None))
    }

    /// Returns the answer in the handler's place.
    pub(super) fn refuse<R: SentBody>(&self, rejection: Rejection) -> Response<ResponseBody<R>> {
        let operation = &self.claim.operation;
        let rejection = rejection.about(operation.id());
        self.settings().refuse(&rejection, operation.head())
    }
}

/// Collects a response that is to be recorded, unless its trailers say otherwise.
async fn collect_response<S: Store, R: SentBody, E>(
    run: &Run<S>,
    judged: Judged,
    body: R,
) -> Result<HttpFinished<R, E>, Streamed<R>> {
    let settings = run.settings();
    let keep_for = judged.choice.keep_for;
    let mut body = Box::pin(body);
    let mut read = Bytes::new();
    if !settings.is_streamed(&judged.parts) {
        let collected = collect(body.as_mut(), settings.max_body, settings.body_timeout);
        let Ok(collected) = AssertUnwindSafe(collected).catch_unwind().await else {
            let response = run.refuse(Rejection::handler_panicked());
            return Ok(run.unknown(Ok(response), None));
        };
        let Collected {
            data,
            trailers,
            end,
        } = collected;
        match end {
            Some(ReadEnd::Clean) => {
                // It may hold what others wait for, and recording takes time.
                drop(body);
                return Ok(record(run, judged, data, trailers));
            }
            Some(ReadEnd::Broken(error)) => {
                let broken = ResponseBody::broken(data, error);
                let response = Response::from_parts(judged.parts, broken);
                return Ok(run.unknown(Ok(response), Some(BROKE_OFF)));
            }
            Some(ReadEnd::TooLarge) | None => read = data,
        }
    }
    // Its trailers come too late to decide anything.
    match run.claim.judge_trailers(&judged, None) {
        Some(unrecorded) => {
            let (rest, _) = ResponseBody::observed(read, body, None);
            let response = Response::from_parts(judged.parts, rest);
            Ok(run.finished(unrecorded, response))
        }
        None => Err(Streamed {
            parts: judged.parts,
            read,
            rest: body,
            keep_for,
        }),
    }
}

/// Returns the end of a run with a whole response.
fn record<S: Store, R: SentBody, E>(
    run: &Run<S>,
    judged: Judged,
    data: Bytes,
    trailers: Trailers,
) -> HttpFinished<R, E> {
    let unrecorded = run.claim.judge_trailers(&judged, trailers.as_deref());
    let Judged {
        mut parts, choice, ..
    } = judged;
    if let Some(unrecorded) = unrecorded {
        let response = Response::from_parts(parts, ResponseBody::whole(data, trailers));
        return run.finished(unrecorded, response);
    }
    let settings = run.settings();
    let attributes = run.claim.operation.head().attributes();
    let trailers_kept = trailers.as_deref();
    let completion = settings.completion(&parts, &data, trailers_kept, attributes, choice.keep_for);
    correct_length(&mut parts, Some(data.len() as u64));
    let response = Response::from_parts(parts, ResponseBody::whole(data, trailers));
    Finished::completed(&run.claim.operation, completion, Ok(response))
}

/// Streams the response. Once it has ended, a tombstone is recorded for it.
fn stream<S: Store, R: SentBody, E>(run: Run<S>, streamed: Streamed<R>) -> HttpReply<R, E> {
    let Streamed {
        parts,
        read,
        rest,
        keep_for,
    } = streamed;
    let status = grpc::status_of(parts.status, &parts.headers, None);
    let length = declared_length(&parts);
    let (body, ended) = ResponseBody::observed(read, rest, length);
    let response = Response::from_parts(parts, body);
    let reply = Reply::new(Ok(response), Outcome::Streamed, run.claim.id());
    spawn(async move {
        let ended = ended.await;
        let verified = match run.claim.operation.upload() {
            Some(upload) if ended.is_ok() => run.verified(upload).await,
            _ => Ok(()),
        };
        let (transition, notice) = match (ended, verified) {
            (Ok(()), Err(fault)) => (
                run.claim.shared.config.mark_unknown(),
                Notice::UploadUnverified(fault),
            ),
            (Ok(()), Ok(())) => {
                let attributes = run.claim.operation.head().attributes();
                let tombstone = run.settings().tombstone(status, attributes, keep_for);
                let kept = run.claim.operation.kept(tombstone);
                (OwnerTransition::Complete(kept), Notice::Tombstone)
            }
            (Err(_), _) => (run.claim.shared.config.mark_unknown(), Notice::StreamBroken),
        };
        notice.tell(&run.settings().warnings, run.claim.id());
        record_in_background(run, transition).await;
    });
    reply
}

/// Answers with the response that was committed in the handler's transaction, whatever
/// the handler made of it.
async fn answer_committed<S: Store, R: SentBody, E>(
    run: &Run<S>,
    called: Called<R, E>,
    recorded: Bytes,
) -> HttpReply<R, E> {
    let operation = &run.claim.operation;
    let settings = run.settings();
    let unchanged = match called {
        Ok(Ok(response)) if response.extensions().get::<AsCommitted>().is_some() => {
            let attributes = operation.head().attributes();
            unchanged(settings, response, attributes, &recorded).await
        }
        _ => None,
    };
    match unchanged {
        Some(response) => Reply::new(Ok(response), Outcome::Recorded, run.claim.id()),
        None => Reply::recorded(
            settings,
            operation.head(),
            operation.id(),
            recorded,
            Outcome::Recorded,
        ),
    }
}

/// Returns the committed response, with the headers that are not kept; or `None` if the
/// response was changed on its way.
async fn unchanged<R: SentBody>(
    settings: &ResponseSettings,
    response: Response<R>,
    attributes: &Attributes,
    recorded: &Bytes,
) -> Option<Response<ResponseBody<R>>> {
    let (mut parts, body) = settings.cleaned(response).into_parts();
    HandlerChoice::take_from(&mut parts.extensions);
    let (max, timeout) = (settings.max_body, settings.body_timeout);
    let Collected {
        data,
        trailers: None,
        end: Some(ReadEnd::Clean),
    } = collect(pin!(body), max, timeout).await
    else {
        return None;
    };
    let kept = settings.completion(&parts, &data, None, attributes, None);
    (kept.response == *recorded).then(|| {
        correct_length(&mut parts, Some(data.len() as u64));
        Response::from_parts(parts, ResponseBody::whole(data, None))
    })
}

/// Answers with the record of the claim that superseded this one: only that answer
/// counts, and this handler's is not shown.
async fn answer_superseded<S: Store, R: SentBody, E>(
    run: &Run<S>,
    client: &Client,
) -> HttpReply<R, E> {
    let config = &run.claim.shared.config;
    let operation = &run.claim.operation;
    Notice::Superseded.tell(config.warnings(), run.claim.id());
    let rejection = match run.claim.superseding().await {
        Ok(Some(answered)) => {
            #[cfg(feature = "sealing")]
            let answered = answered.opened(config, operation.name()).await;
            return authorize::answer(config, client, operation.head(), answered).await;
        }
        Ok(None) => Rejection::outcome_unknown(),
        Err(error) => {
            Notice::tell_if_corrupt(config.warnings(), &error, run.claim.id());
            Rejection::answer_unreadable(&error)
        }
    };
    let rejection = rejection.about(operation.id());
    Reply::refuse(&config.responses, operation.head(), &rejection)
}

/// Records the outcome of a handler that was stopped because its client left.
pub(super) async fn finish_cancelled<S: Store, R: SentBody, E>(run: Run<S>) -> HttpReply<R, E> {
    let reply = Reply::client_left(run.claim.id());
    // A commit that was under way was not stopped with the handler.
    if let Transacted::Committed { completion, .. } = run.claim.operation.transacted().await {
        run.claim.committed(completion);
        return reply;
    }
    run.settings()
        .warnings
        .warn(CANCELLED, None, run.claim.id());
    let mark_unknown = run.claim.shared.config.mark_unknown();
    record_in_background(run, mark_unknown).await;
    reply
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
