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
#[cfg(feature = "sealing")]
use crate::error::StoreErrorKind;
use crate::{
    body::ResponseBody,
    flow::outcome::Outcome,
    key::OperationId,
    operation::response_settings::ResponseSettings,
    rejection::{Callback, Rejection, RequestHead},
    response::{mark_unrecorded, recorded::RecordedResponse},
    telemetry::{log::Warnings, notice::Notice},
};

/// What the client receives: a response, or the inner service's own error.
pub(crate) type ServiceResult<R, E> = Result<Response<ResponseBody<R>>, E>;

/// The result for the caller, with its outcome for the log.
pub(super) struct Reply<A, E> {
    result: Result<A, E>,
    outcome: Outcome,
    operation: Option<OperationId>,
}

pub(super) type HttpReply<R, E> = Reply<Response<ResponseBody<R>>, E>;

/// What a run returns to its caller.
pub(super) trait RunAnswer {
    /// Says that it is not recorded.
    fn unrecorded(self) -> Self;
}

impl<R: Body> RunAnswer for Response<ResponseBody<R>> {
    fn unrecorded(mut self) -> Self {
        mark_unrecorded(&mut self);
        self
    }
}

impl<A, E> Reply<A, E> {
    pub(super) fn new(
        result: Result<A, E>,
        outcome: Outcome,
        operation: Option<OperationId>,
    ) -> Self {
        Self {
            result,
            outcome,
            operation,
        }
    }

    /// Says that the answer is not recorded.
    pub(super) fn unrecorded(mut self) -> Self
    where
        A: RunAnswer,
    {
        if self.result.is_ok() {
            self.result = self.result.map(A::unrecorded);
            self.outcome = Outcome::Unrecorded;
        }
        self
    }

    /// Logs and counts the outcome, and returns the result.
    pub(super) fn tell(self, client: &Client, warnings: &Warnings) -> Result<A, E> {
        let Self {
            result,
            outcome,
            operation,
        } = self;
        outcome.tell(operation, client.key_id());
        if client.has_left() && outcome != Outcome::Left {
            Notice::ClientGone.tell(warnings, operation);
        }
        result
    }
}

impl<R: Body<Data = Bytes>, E> HttpReply<R, E> {
    /// Logs and counts the outcome, and returns the result for the client.
    pub(super) fn send(mut self, client: &Client, warnings: &Warnings) -> ServiceResult<R, E> {
        if let Ok(response) = &mut self.result {
            response.extensions_mut().insert(self.outcome);
        }
        self.tell(client, warnings)
    }

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

    /// As [`refuse`](Self::refuse). The log alone names the operation, not the refusal.
    pub(super) fn refuse_about(
        settings: &ResponseSettings,
        head: &RequestHead,
        rejection: &Rejection,
        operation: OperationId,
    ) -> Self {
        Self {
            operation: Some(operation),
            ..Self::refuse(settings, head, rejection)
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
    pub(super) fn answered(config: &Config, head: &RequestHead, answered: Answered) -> Self {
        let (operation, settings) = (answered.operation, &config.responses);
        match answered.recorded(config) {
            Ok(response) => Self::recorded(settings, head, operation, response, Outcome::Replayed),
            Err(rejection) => Self::refuse(settings, head, &rejection),
        }
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
                .and_then(|whole| whole.replay(&settings.kept_headers, &settings.marker))
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

impl Answered {
    /// Returns the recorded bytes, or why there are none.
    pub(super) fn recorded(self, config: &Config) -> Result<Bytes, Rejection> {
        let rejection = match self.answer {
            Answer::Completed { response, .. } => return Ok(response),
            #[cfg(feature = "sealing")]
            Answer::Unreadable(error) => {
                if error.kind() == StoreErrorKind::Corrupt {
                    Notice::Corrupt.tell(config.warnings(), Some(self.operation));
                }
                Rejection::record_unreadable(&error)
            }
            Answer::InProgress { age, lease_left } => Rejection::in_progress(age, lease_left),
            Answer::Unknown => Rejection::outcome_unknown(),
            // The operation is not named: nothing of another request is shown.
            Answer::Mismatch(mismatch) => {
                return Err(Rejection::key_reused(config.mismatch, mismatch));
            }
            Answer::UnknownScheme => return Err(Rejection::scheme_unknown()),
            Answer::FingerprintPanicked => {
                return Err(Rejection::callback_panicked(Callback::Fingerprint));
            }
        };
        Err(rejection.about(self.operation))
    }
}
