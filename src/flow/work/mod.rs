//! The way of work under a key that is not HTTP: acquire its key, run it, record its value.

mod error;
mod ran;

use std::{
    convert::Infallible,
    future::{Ready, ready},
    panic::{AssertUnwindSafe, catch_unwind},
    pin::Pin,
    sync::Arc,
    task::{Context, Poll},
};

use bytes::Bytes;
use futures_util::FutureExt as _;
use http::{Response, StatusCode};
use serde::{Serialize, de::DeserializeOwned};
use tokio::runtime::Handle;
use tower::service_fn;

pub use self::{error::RunError, ran::Ran};
use super::{
    Background, Client,
    acquire::{Acquired, NotRun, acquire},
    decide::{Answer, Answered},
    judge::{Judged, Unrecorded},
    limits::Permit,
    owned::OwnedClaim,
    record::{Ended, Finished, Panicked, Run},
    reply::{Reply, RunAnswer},
    request::{Comparable, Keyed},
    shared::Shared,
    spawn,
};
use crate::{
    fingerprint::{Comparison, Fingerprint, Fingerprinter, InputFingerprints},
    flow::outcome::Outcome,
    key::{OperationId, RecordName},
    operation::{Operation, response_settings::ResponseSettings},
    rejection::{Rejection, RejectionKind, RequestHead},
    response::{attributes::Attributes, recorded::RecordedResponse},
    store::{Claim, Release, Store, Transitioned},
    telemetry::notice::Notice,
};

type WorkReply<T, E> = Reply<Ran<T>, RunError<E>>;

/// The fingerprints of an input say all of it.
impl Comparable for InputFingerprints {
    fn compare(&self, _: &Fingerprinter, recorded: &Fingerprint, _: &Fingerprint) -> Comparison {
        self.compare(recorded)
    }
}

impl<T> RunAnswer for Ran<T> {
    fn unrecorded(self) -> Self {
        Self::Unrecorded(self.into_inner())
    }
}

/// Drives work on its caller's task. If it is dropped after its first poll, the work moves
/// to a task of its own.
pub(crate) struct WorkFuture<A: 'static> {
    work: Option<Pin<Box<dyn Future<Output = A> + Send>>>,
    client: Client,
    /// `None` before the first poll.
    background: Option<Background>,
}

/// Runs work under a key, once it is polled.
pub(crate) fn work<S, T, E, F>(
    shared: &Arc<Shared<S>>,
    name: &RecordName,
    input: InputFingerprints,
    work: impl FnOnce(Operation) -> F + Send + 'static,
) -> WorkFuture<Result<Ran<T>, RunError<E>>>
where
    S: Store,
    T: Serialize + DeserializeOwned + Send + 'static,
    E: Send + 'static,
    F: Future<Output = Result<T, E>> + Send + 'static,
{
    let shared = Arc::clone(shared);
    let config = &shared.config;
    let name = config.name(name.clone());
    let client = Client::of(config, &name);
    let quotas = shared.quotas.as_ref();
    let quota = quotas.and_then(|quotas| quotas.of_work(name.scope()));
    let keyed = Keyed {
        name,
        claim: Claim::new(input.current, config.lease(), config.responses.retention),
        stale_from: None,
        body_fault: None,
        hold: None,
        quota,
        what: input,
    };
    WorkFuture {
        client: client.clone(),
        background: None,
        work: Some(Box::pin(async move {
            let reply = process(&shared, &client, keyed, work).await;
            reply.tell(&client, shared.config.warnings())
        })),
    }
}

impl<A> Future for WorkFuture<A> {
    type Output = A;

    /// # Panics
    ///
    /// If it is polled outside of a Tokio runtime, or after it was ready.
    fn poll(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<A> {
        if self.background.is_none() {
            self.background = Some(Background::new(Handle::current()));
        }
        // Taken out meanwhile: after a panic it is not polled again.
        let mut work = self.work.take().expect("`run` polled after its answer");
        let polled = work.as_mut().poll(cx);
        if polled.is_pending() {
            self.work = Some(work);
        }
        polled
    }
}

impl<A: 'static> Drop for WorkFuture<A> {
    fn drop(&mut self) {
        if let (Some(work), Some(background)) = (self.work.take(), self.background.take()) {
            self.client.leave();
            background.spawn(work.map(drop));
        }
    }
}

async fn process<S, T, E, F>(
    shared: &Arc<Shared<S>>,
    client: &Client,
    mut keyed: Keyed<InputFingerprints>,
    work: impl FnOnce(Operation) -> F,
) -> WorkReply<T, E>
where
    S: Store,
    T: Serialize + DeserializeOwned,
    F: Future<Output = Result<T, E>>,
{
    let settings = &shared.config.responses;
    let permit = match shared.running_permit(keyed.name.sent().scope()) {
        Ok(permit) => permit,
        Err(rejection) => return Reply::refuse_work(settings, &rejection),
    };
    #[cfg(feature = "sealing")]
    if let Err(rejection) = shared.config.load_key().await {
        return Reply::refuse_work(settings, &rejection);
    }
    match acquire(shared, client, service_fn(always_ready), &mut keyed).await {
        Ok(Acquired::Run { granted, .. }) => {
            let head = RequestHead::default();
            let claim = OwnedClaim::new(Arc::clone(shared), &keyed, granted, head);
            run(claim, work, permit).await
        }
        Ok(Acquired::RunUnguarded { .. }) => {
            unreachable!("a guard has no `StoreFailure::RunUnguarded`")
        }
        Err(not_run) => {
            #[cfg(feature = "sealing")]
            let not_run = not_run.opened(&shared.config, &keyed.name).await;
            let withdrawal = keyed.withdrawal(shared);
            let reply = match not_run {
                NotRun::Answered(answered) => Reply::answer_work(shared, answered),
                NotRun::Refused(rejection) => Reply::refuse_work(settings, &rejection),
                NotRun::NotReady(error) => match error {},
                // Its caller is gone.
                NotRun::ClientLeft => Reply::new(Err(RunError::InProgress), Outcome::Left, None),
            };
            if let Some(withdrawal) = withdrawal {
                spawn(withdrawal.run(permit));
            }
            reply
        }
    }
}

/// Work has no readiness of its own for which a waiter would wait.
fn always_ready((): ()) -> Ready<Result<(), Infallible>> {
    ready(Ok(()))
}

/// Runs the work while heartbeats renew its lease, and records its value.
async fn run<S, T, E, F>(
    claim: OwnedClaim<S>,
    work: impl FnOnce(Operation) -> F,
    permit: Permit,
) -> WorkReply<T, E>
where
    S: Store,
    T: Serialize + DeserializeOwned,
    F: Future<Output = Result<T, E>>,
{
    let heartbeat = claim.shared.heartbeats.start(&claim.operation).await;
    let operation = claim.operation.clone();
    let called = match catch_unwind(AssertUnwindSafe(|| work(operation))) {
        Ok(work) => AssertUnwindSafe(work).catch_unwind().await,
        Err(panic) => Err(panic),
    };
    let run = Run {
        claim,
        heartbeat,
        permit,
    };
    finish(run, called.map_err(Panicked::from)).await
}

async fn finish<S, T, E>(run: Run<S>, called: Result<Result<T, E>, Panicked>) -> WorkReply<T, E>
where
    S: Store,
    T: Serialize + DeserializeOwned,
{
    let transacted = run.claim.operation.transacted().await;
    let finished = match run.ended(transacted, called) {
        Ended::Returned { result, is_aborted } => run.judge_result(result, is_aborted),
        Ended::Unknown(rejection) => {
            let error = run.refuse_work(rejection);
            run.unknown(Err(error), None)
        }
        Ended::Superseded => return answer_superseded(&run).await,
        Ended::Committed {
            recorded,
            completion,
            ..
        } => {
            let operation = &run.claim.operation;
            run.claim.committed(completion);
            return Reply::value(run.settings(), operation.id(), recorded, Outcome::Recorded);
        }
    };
    match run.claim.end(&finished.transition).await {
        Ok(Transitioned::Superseded) => answer_superseded(&run).await,
        ended => run.recorded(finished, ended.err()),
    }
}

impl<S: Store> Run<S> {
    /// Decides what the result of work means: a value counts as a response with status
    /// 200, and an error as one with 500.
    fn judge_result<T: Serialize, E>(
        &self,
        result: Result<T, E>,
        is_aborted: bool,
    ) -> Finished<Ran<T>, RunError<E>> {
        let (mut parts, ()) = Response::new(()).into_parts();
        parts.status = match result {
            Ok(_) => StatusCode::OK,
            Err(_) => StatusCode::INTERNAL_SERVER_ERROR,
        };
        let status = parts.status;
        let judged = Judged {
            parts,
            choice: self.claim.operation.choice(),
            undone: self.undone(is_aborted),
            status: Some(status),
        };
        let unrecorded = self.claim.judge(&judged, status);
        let keep_for = judged.choice.keep_for;
        let operation = &self.claim.operation;
        match (unrecorded, result) {
            (None, Ok(value)) => {
                let completion = self.settings().completion_of_value(&value, keep_for);
                let completion = completion.unwrap_or_else(|warning| {
                    let warnings = &self.settings().warnings;
                    warnings.warn(warning, None, self.claim.id());
                    self.settings()
                        .tombstone(status, &Attributes::new(), keep_for)
                });
                Finished::completed(operation, completion, Ok(Ran::Now(value)))
            }
            // The work says that it is done, and its error cannot be replayed.
            (None, Err(error)) => {
                let tombstone = self
                    .settings()
                    .tombstone(status, &Attributes::new(), keep_for);
                Finished::completed(operation, tombstone, Err(RunError::Failed(error)))
            }
            (Some(Unrecorded::Release(release)), result) => {
                Finished::released(release, unrecorded_result(result))
            }
            (Some(Unrecorded::Unknown), result) => {
                self.unknown(unrecorded_result(result), Some(LEFT_UNKNOWN))
            }
            (Some(Unrecorded::RolledBack), _) => {
                let error = self.refuse_work(Rejection::rolled_back());
                Finished::released(Release::SameRequest, Err(error))
            }
            (Some(Unrecorded::Refused(rejection)), _) => {
                self.unknown(Err(self.refuse_work(rejection)), None)
            }
        }
    }

    /// Returns the error in the place of what the work returned.
    fn refuse_work<E>(&self, rejection: Rejection) -> RunError<E> {
        let rejection = rejection.about(self.claim.operation.id());
        rejection.log(&self.settings().warnings);
        RunError::of(&rejection)
    }
}

fn unrecorded_result<T, E>(result: Result<T, E>) -> Result<Ran<T>, RunError<E>> {
    result.map(Ran::Unrecorded).map_err(RunError::Failed)
}

/// Answers with the record of the claim that superseded this one.
async fn answer_superseded<S, T, E>(run: &Run<S>) -> WorkReply<T, E>
where
    S: Store,
    T: DeserializeOwned,
{
    let shared = &run.claim.shared;
    Notice::Superseded.tell(shared.config.warnings(), run.claim.id());
    let rejection = match run.claim.superseding().await {
        Ok(Some(answered)) => {
            #[cfg(feature = "sealing")]
            let answered = answered
                .opened(&shared.config, run.claim.operation.name())
                .await;
            return Reply::answer_work(shared, answered);
        }
        Ok(None) => Rejection::outcome_unknown(),
        Err(error) => {
            let warnings = shared.config.warnings();
            Notice::tell_if_corrupt(warnings, &error, run.claim.id());
            Rejection::answer_unreadable(&error)
        }
    };
    let rejection = rejection.about(run.claim.operation.id());
    Reply::refuse_work(run.settings(), &rejection)
}

impl<T: DeserializeOwned, E> WorkReply<T, E> {
    /// What a record answers.
    fn answer_work<S>(shared: &Shared<S>, answered: Answered) -> Self {
        let settings = &shared.config.responses;
        if let Answer::UnknownScheme = answered.answer {
            settings.warnings.warn(OTHER_KIND, None, None);
            let outcome = Outcome::Refused(RejectionKind::KeyReused);
            return Self::new(Err(RunError::OtherKind), outcome, None);
        }
        let operation = answered.operation;
        match answered.recorded(&shared.config) {
            Ok(recorded) => Self::value(settings, operation, recorded, Outcome::Replayed),
            Err(rejection) => Self::refuse_work(settings, &rejection),
        }
    }

    /// The recorded value: to the run that made it with [`Outcome::Recorded`], to others
    /// with [`Outcome::Replayed`].
    fn value(
        settings: &ResponseSettings,
        operation: OperationId,
        recorded: Bytes,
        outcome: Outcome,
    ) -> Self {
        let schema = settings.schema.as_deref().unwrap_or_default();
        let value = RecordedResponse::decode(recorded);
        let error = match value.and_then(|recorded| recorded.to_value(schema)) {
            Ok(Some(value)) => {
                let ran = match outcome {
                    Outcome::Replayed => Ran::Replayed(value),
                    _ => Ran::Now(value),
                };
                return Self::new(Ok(ran), outcome, Some(operation));
            }
            Ok(None) => {
                let rejection = Rejection::not_replayable().about(operation);
                return Self::refuse_work(settings, &rejection);
            }
            Err(error) => error,
        };
        Notice::Corrupt.tell(&settings.warnings, Some(operation));
        let rejection = match outcome {
            Outcome::Replayed => Rejection::record_unreadable(&error),
            _ => Rejection::answer_unreadable(&error),
        };
        let rejection = rejection.about(operation);
        rejection.log(&settings.warnings);
        let outcome = Outcome::Refused(rejection.kind());
        Self::new(Err(RunError::Unreadable(error)), outcome, Some(operation))
    }
}

impl<T, E> WorkReply<T, E> {
    fn refuse_work(settings: &ResponseSettings, rejection: &Rejection) -> Self {
        rejection.log(&settings.warnings);
        let outcome = Outcome::Refused(rejection.kind());
        Self::new(Err(RunError::of(rejection)), outcome, rejection.operation())
    }
}

const LEFT_UNKNOWN: &str = "work failed after its effects had started, or chose so: its outcome is \
    unknown, look up what it did, and `resolve` the record";
const OTHER_KIND: &str = "record of a request, or made by another version, nothing ran: give work \
    names that no layer uses";
