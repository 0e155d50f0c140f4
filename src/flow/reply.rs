//! The answer to a guarded request.

use bytes::Bytes;
use http::Response;
use http_body::Body;

use super::{
    Client,
    acquire::NotRun,
    config::Config,
    decide::{Answer, Answered},
};
use crate::{
    OperationId, Outcome, Rejection, ResponseBody,
    log::Warnings,
    outcome::Notice,
    rejection::{Callback, RequestHead},
    response::{ResponseSettings, mark_unrecorded, recorded::RecordedResponse},
};

/// What the client receives: a response, or the inner service's own error.
pub(crate) type ServiceResult<R, E> = Result<Response<ResponseBody<R>>, E>;

/// The result for the client, with its outcome for the log.
pub(super) struct Reply<R: Body, E> {
    result: ServiceResult<R, E>,
    outcome: Outcome,
    operation: Option<OperationId>,
}

impl<R: Body, E> Reply<R, E> {
    pub(super) fn new(
        result: ServiceResult<R, E>,
        outcome: Outcome,
        operation: Option<OperationId>,
    ) -> Self {
        Self {
            result,
            outcome,
            operation,
        }
    }

    /// Says that the response is not recorded.
    pub(super) fn unrecorded(mut self) -> Self {
        if let Ok(response) = &mut self.result {
            mark_unrecorded(response);
            self.outcome = Outcome::Unrecorded;
        }
        self
    }

    /// Logs and counts the outcome, and returns the result for the client.
    pub(super) fn send(self, client: &Client, warnings: &Warnings) -> ServiceResult<R, E> {
        let Self {
            mut result,
            outcome,
            operation,
        } = self;
        if let Ok(response) = &mut result {
            response.extensions_mut().insert(outcome);
        }
        outcome.tell(operation);
        if client.has_left() && outcome != Outcome::Left {
            Notice::ClientGone.tell(warnings, operation);
        }
        result
    }
}

impl<R: Body<Data = Bytes>, E> Reply<R, E> {
    /// The answer in the handler's place.
    pub(super) fn refuse(
        settings: &ResponseSettings,
        head: &RequestHead,
        rejection: &Rejection,
    ) -> Self {
        Self {
            result: Ok(settings.refuse(rejection, head)),
            outcome: Outcome::Refused(rejection.kind()),
            operation: rejection.operation(),
        }
    }

    /// The client has left, and receives nothing.
    pub(super) fn client_left(operation: Option<OperationId>) -> Self {
        Self::new(
            Ok(Response::new(ResponseBody::default())),
            Outcome::Left,
            operation,
        )
    }

    /// The answer to a request that does not run.
    pub(super) fn not_run(config: &Config, head: &RequestHead, not_run: NotRun<E>) -> Self {
        match not_run {
            NotRun::Answered(answered) => Self::answered(config, head, answered),
            NotRun::Refused(rejection) => Self::refuse(&config.responses, head, &rejection),
            NotRun::NotReady(error) => Self::new(Err(error), Outcome::Unready, None),
            NotRun::ClientLeft => Self::client_left(None),
        }
    }

    /// What a record answers.
    pub(super) fn answered(
        config: &Config,
        head: &RequestHead,
        Answered {
            operation, answer, ..
        }: Answered,
    ) -> Self {
        let rejection = match answer {
            Answer::Completed { response } => {
                let settings = &config.responses;
                return Self::recorded(settings, head, operation, response, Outcome::Replayed);
            }
            Answer::InProgress { age, lease_left } => Rejection::in_progress(age, lease_left),
            Answer::Unknown => Rejection::outcome_unknown(),
            // The operation is not named: nothing of another request is shown.
            Answer::Mismatch(mismatch) => {
                let rejection = Rejection::key_reused(config.mismatch, mismatch);
                return Self::refuse(&config.responses, head, &rejection);
            }
            Answer::UnknownScheme => {
                return Self::refuse(&config.responses, head, &Rejection::scheme_unknown());
            }
            Answer::FingerprintPanicked => {
                let rejection = Rejection::callback_panicked(Callback::Fingerprint);
                return Self::refuse(&config.responses, head, &rejection);
            }
        };
        Self::refuse(&config.responses, head, &rejection.about(operation))
    }

    /// The recorded response: to the request that made it with [`Outcome::Recorded`], to
    /// others with [`Outcome::Replayed`].
    pub(super) fn recorded(
        settings: &ResponseSettings,
        head: &RequestHead,
        operation: OperationId,
        recorded: Bytes,
        outcome: Outcome,
    ) -> Self {
        let is_replay = outcome == Outcome::Replayed;
        let rejection = match RecordedResponse::decode(recorded) {
            Ok(recorded) => match recorded
                .into_whole()
                .and_then(|whole| settings.replay(whole))
            {
                Some(mut response) => {
                    if !is_replay {
                        response.headers_mut().remove(&settings.marker);
                    }
                    return Self::new(Ok(response), outcome, Some(operation));
                }
                None => Rejection::not_replayable(),
            },
            Err(error) => {
                Notice::Corrupt.tell(&settings.warnings, Some(operation));
                match is_replay {
                    true => Rejection::record_unreadable(&error),
                    false => Rejection::answer_unreadable(&error),
                }
            }
        };
        Self::refuse(settings, head, &rejection.about(operation))
    }
}
