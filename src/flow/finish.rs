//! The end of a run: what became of it is written down, and only then its client
//! gets an answer.

use std::{
    panic::{AssertUnwindSafe, catch_unwind},
    pin::{Pin, pin},
};

use bytes::Bytes;
use futures_util::FutureExt as _;
use http::{Response, response};
use http_body::Body;

use super::{Exchange, claims_success};
use crate::{
    Operation, Outcome, Rejection, ResponseBody, Store, Word,
    body::{Gathered, gather},
    flow::owned::{Ending, Owned},
    flow::reply::{Answer, say_unrecorded},
    operation::{AsCommitted, Transacted, Verdict},
    outcome::Notice,
    policy::Conclusion,
    response::{correct_length, declared_length},
    store::{Release, Transitioned},
};

impl<S, R, E> Exchange<'_, S, R, E>
where
    S: Store,
    R: Body<Data = Bytes> + Send + 'static,
    R::Error: Send,
    E: Send + 'static,
{
    /// The response was committed in the handler's transaction: it is the
    /// answer, whatever the handler made of it.
    pub(super) async fn reply_committed(
        &mut self,
        owned: &Owned<'_, S>,
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
        let (limit, within) = (config.max_response_body, config.response_body_timeout);
        let Gathered::Whole {
            data,
            trailers: None,
        } = gather(pin!(body), limit, within).await
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
    pub(super) async fn lose_commit(&mut self, owned: &Owned<'_, S>) {
        let response = self.refusal(owned, Rejection::commit_unknown());
        self.lose(owned, Ok(response), None).await;
    }

    /// The commit failed, and the handler answered as if it had not. It is taken for
    /// the failure that the handler should have answered with: a retry runs.
    pub(super) async fn deny_success(
        &mut self,
        owned: &Owned<'_, S>,
        operation: &Operation,
        word: Word,
    ) {
        if operation.have_effects_started() || word.verdict() == Some(Verdict::Unknown) {
            let response = self.refusal(owned, Rejection::rolled_back_after_effects());
            return self.lose(owned, Ok(response), None).await;
        }
        let response = self.refusal(owned, Rejection::rolled_back());
        let ending = Ending::Released(Release::SameRequest);
        self.settle(owned, &ending, Outcome::Released.into(), Ok(response))
            .await;
    }

    /// The handler says that it did its work, but has not committed a transaction
    /// that it began.
    ///
    /// Recording its response would promise work that is not there (I5). It may have
    /// done its work in another way, or its transaction may still be open: so the
    /// outcome is unknown.
    async fn deny_uncommitted(&mut self, owned: &Owned<'_, S>) {
        Notice::Uncommitted.tell(&self.host.config.warnings, owned.operation);
        let response = self.refusal(owned, Rejection::uncommitted());
        self.lose(owned, Ok(response), None).await;
    }

    /// The handler was stopped with nobody left to answer.
    pub(super) async fn lose_unattended(&mut self, owned: &Owned<'_, S>, operation: &Operation) {
        self.reply.abandon(owned.operation);
        // A commit that was under way was not stopped with it.
        if let Transacted::Committed { .. } = operation.transacted().await {
            return owned.host.waiters.wake(&owned.name);
        }
        let warnings = &owned.host.config.warnings;
        warnings.warn(CANCELLED, None, owned.operation);
        match owned.settle(&Ending::Unknown).await {
            Ok(Transitioned::Applied) => {}
            Ok(Transitioned::Superseded) => Notice::Superseded.tell(warnings, owned.operation),
            Err(error) => {
                owned.warn_late(&error);
                self.settle_late(owned, &Ending::Unknown).await;
            }
        }
    }

    /// The answer in the handler's place.
    pub(super) fn refusal(
        &self,
        owned: &Owned<'_, S>,
        rejection: Rejection,
    ) -> Response<ResponseBody<R>> {
        let rejection = match owned.operation {
            Some(operation) => rejection.about(operation),
            None => rejection,
        };
        self.host.config.refuse(&rejection)
    }

    /// The handler has answered: do with its response what its word, or the
    /// tables, say; and only then reply.
    pub(super) fn record(
        &mut self,
        owned: &Owned<'_, S>,
        operation: &Operation,
        response: Response<R>,
    ) -> impl Future<Output = ()> + Send {
        async move {
            let (mut parts, body) = self.host.config.cleaned(response).into_parts();
            correct_length(&mut parts, body.size_hint().exact());
            let said = parts.extensions.remove::<Word>().unwrap_or_default();
            let word = said.or(operation.word());
            let config = &owned.host.config;
            let conclusion = || config.dispositions.conclude(&parts, word, operation);
            let Ok(conclusion) = catch_unwind(AssertUnwindSafe(conclusion)) else {
                drop((parts, body));
                let response = self.refusal(owned, Rejection::dispositions_panicked());
                return Box::pin(self.lose(owned, Ok(response), None)).await;
            };
            match conclusion {
                Conclusion::Release(release) => {
                    let response = Response::from_parts(parts, ResponseBody::streamed(body));
                    let ending = Ending::Released(release);
                    let finish = Outcome::Released.into();
                    Box::pin(self.settle(owned, &ending, finish, Ok(response))).await;
                }
                Conclusion::Unknown => {
                    let response = Response::from_parts(parts, ResponseBody::streamed(body));
                    Box::pin(self.lose(owned, Ok(response), Some(ANSWERED_UNKNOWN))).await;
                }
                Conclusion::Record
                    if claims_success(parts.status) && operation.is_uncommitted() =>
                {
                    drop((parts, body));
                    Box::pin(self.deny_uncommitted(owned)).await;
                }
                Conclusion::Record => self.keep(owned, parts, body, word).await,
            }
        }
    }

    /// Gathers the response and records it; or lets it go out as it comes.
    fn keep(
        &mut self,
        owned: &Owned<'_, S>,
        mut parts: response::Parts,
        body: R,
        word: Word,
    ) -> impl Future<Output = ()> + Send {
        let mut body = Box::pin(body);
        async move {
            let config = &owned.host.config;
            let gathered = if config.goes_out_live(&parts) {
                let read = Bytes::new();
                Gathered::Outgrown { read }
            } else {
                let (limit, within) = (config.max_response_body, config.response_body_timeout);
                let gathered = gather(body.as_mut(), limit, within);
                match AssertUnwindSafe(gathered).catch_unwind().await {
                    Ok(gathered) => gathered,
                    Err(_panic) => {
                        drop((parts, body));
                        let response = self.refusal(owned, Rejection::handler_panicked());
                        return Box::pin(self.lose(owned, Ok(response), None)).await;
                    }
                }
            };
            match gathered {
                Gathered::Whole { data, trailers } => {
                    // What it holds is not for as long as the recording takes.
                    drop(body);
                    let completion = config.completion(&parts, &data, trailers.as_ref(), word);
                    correct_length(&mut parts, Some(data.len() as u64));
                    let response = Response::from_parts(parts, ResponseBody::whole(data, trailers));
                    let ending = Ending::Completed(completion);
                    self.settle(owned, &ending, Outcome::Recorded.into(), Ok(response))
                        .await;
                }
                Gathered::Broken { read, error } => {
                    drop(body);
                    let response = Response::from_parts(parts, ResponseBody::broken(read, error));
                    Box::pin(self.lose(owned, Ok(response), Some(BROKE_OFF))).await;
                }
                Gathered::Outgrown { read } | Gathered::Late { read } => {
                    Box::pin(self.let_out(owned, parts, read, body, word)).await;
                }
            }
        }
    }

    /// The response goes out as it comes, and what is recorded is that it did.
    async fn let_out(
        &mut self,
        owned: &Owned<'_, S>,
        parts: response::Parts,
        read: Bytes,
        rest: Pin<Box<R>>,
        word: Word,
    ) {
        let config = &owned.host.config;
        let (status, length) = (parts.status, declared_length(&parts));
        let (body, ended) = ResponseBody::live(read, rest, length);
        let response = Response::from_parts(parts, body);
        self.reply
            .finish(Ok(response), Outcome::Streamed, owned.operation);
        let (ending, notice) = match ended.await {
            Ok(()) => {
                let tombstone = config.tombstone(status, word);
                (Ending::Completed(tombstone), Notice::Tombstone)
            }
            Err(_) => (Ending::Unknown, Notice::StreamBroken),
        };
        notice.tell(&config.warnings, owned.operation);
        match owned.settle(&ending).await {
            Ok(Transitioned::Applied) => {}
            Ok(Transitioned::Superseded) => {
                Notice::Superseded.tell(&config.warnings, owned.operation);
            }
            Err(error) => {
                owned.warn_late(&error);
                self.settle_late(owned, &ending).await;
            }
        }
    }

    /// There is no word of the handler: the outcome is unknown. `warning` says why,
    /// unless a warning has said it before.
    pub(super) async fn lose(
        &mut self,
        owned: &Owned<'_, S>,
        answer: Answer<R, E>,
        warning: Option<&'static str>,
    ) {
        let finish = Finish {
            outcome: Outcome::Unknown,
            warning,
        };
        self.settle(owned, &Ending::Unknown, finish, answer).await;
    }

    /// Another claim has superseded this one: its answer is the only one that
    /// an epoch has, and this handler's is not shown.
    pub(super) async fn answer_as_loser(&mut self, owned: &Owned<'_, S>) {
        Notice::Superseded.tell(&self.host.config.warnings, owned.operation);
        match owned.winner().await {
            Ok(Some(seen)) => self.reply.answer(seen),
            Ok(None) => self
                .reply
                .refuse(&Rejection::outcome_unknown().about(owned.operation)),
            Err(error) => self
                .reply
                .refuse(&Rejection::answer_unreadable(&error).about(owned.operation)),
        }
    }

    /// Writes the ending down, then replies; if it cannot be written, replies
    /// and goes on trying. If another claim has superseded this one, the client
    /// gets that one's answer.
    fn settle(
        &mut self,
        owned: &Owned<'_, S>,
        ending: &Ending,
        finish: Finish,
        mut answer: Answer<R, E>,
    ) -> impl Future<Output = ()> + Send {
        async move {
            let Finish {
                mut outcome,
                warning,
            } = finish;
            let settled = owned.settle(ending).await;
            if let Some(warning) = warning
                && !matches!(settled, Ok(Transitioned::Superseded))
            {
                let warnings = &self.host.config.warnings;
                warnings.warn(warning, None, owned.operation);
            }
            match settled {
                Ok(Transitioned::Applied) => {
                    self.reply.finish(answer, outcome, owned.operation);
                }
                Ok(Transitioned::Superseded) => Box::pin(self.answer_as_loser(owned)).await,
                Err(error) => {
                    owned.warn_late(&error);
                    if let (Ok(response), Ending::Completed(_)) = (&mut answer, ending) {
                        say_unrecorded(response);
                        outcome = Outcome::Unrecorded;
                    }
                    self.reply.finish(answer, outcome, owned.operation);
                    Box::pin(self.settle_late(owned, ending)).await;
                }
            }
        }
    }
}

/// The outcome of a run, and a warning about it.
#[derive(Clone, Copy)]
struct Finish {
    outcome: Outcome,
    warning: Option<&'static str>,
}

impl From<Outcome> for Finish {
    fn from(outcome: Outcome) -> Self {
        Self {
            outcome,
            warning: None,
        }
    }
}

const CANCELLED: &str = "client left and `Disconnect::Cancel` stopped the handler: its outcome is \
    unknown";
const ANSWERED_UNKNOWN: &str = "handler answered with a status or a word that leaves its outcome \
    unknown: look up what it did, and `resolve` the record";
const BROKE_OFF: &str = "response body broke off: its outcome is unknown, look up what the handler \
    did, and `resolve` the record";
/// Of an error of the inner service, which may say anything.
pub(super) const INNER_FAILED: &str = "inner service failed: its outcome is unknown, look up what \
    the handler did, and `resolve` the record";
