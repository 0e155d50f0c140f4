//! The answer to the client: one, told and sent once.

use bytes::Bytes;
use http::{HeaderValue, Response};
use http_body::Body;
use tokio::sync::oneshot;

use crate::{
    OperationId, Outcome, Rejection, ResponseBody, StoreError,
    config::{Config, RECORDED},
    flow::claim::{Found, Seen},
    outcome::Notice,
    rejection::Callback,
    response::recorded::RecordedResponse,
};

/// What the client gets: a response, or the inner service's own error.
pub(crate) type Answer<R, E> = Result<Response<ResponseBody<R>>, E>;

pub(crate) type Client<R, E> = oneshot::Sender<Answer<R, E>>;

/// The way back to a client, who may have left.
pub(crate) struct Reply<'a, R: Body, E> {
    config: &'a Config,
    client: Option<Client<R, E>>,
}

impl<'a, R, E> Reply<'a, R, E>
where
    R: Body<Data = Bytes>,
{
    pub(crate) fn new(config: &'a Config, client: Client<R, E>) -> Self {
        let client = Some(client);
        Self { config, client }
    }

    /// Ends when the client has left, and never if it has its answer.
    pub(crate) async fn left(&mut self) {
        match &mut self.client {
            Some(client) => client.closed().await,
            None => std::future::pending().await,
        }
    }

    /// Tells the outcome, and sends the answer to the client, if it is still
    /// there.
    pub(crate) fn finish(
        &mut self,
        mut answer: Answer<R, E>,
        outcome: Outcome,
        operation: Option<OperationId>,
    ) {
        let Some(client) = self.client.take() else {
            return;
        };
        if let Ok(response) = &mut answer {
            response.extensions_mut().insert(outcome);
        }
        outcome.tell(operation);
        if client.send(answer).is_err() {
            Notice::ClientGone.tell(&self.config.warnings, operation);
        }
    }

    /// The client has left, and nothing is sent.
    pub(crate) fn abandon(&mut self, operation: Option<OperationId>) {
        self.client = None;
        Outcome::Left.tell(operation);
    }

    pub(crate) fn refuse(&mut self, rejection: &Rejection) {
        let response = self.config.refuse(rejection);
        let outcome = Outcome::Refused(rejection.kind());
        self.finish(Ok(response), outcome, rejection.operation());
    }

    /// What the record that is there answers.
    pub(crate) fn answer(&mut self, Seen { operation, found }: Seen) {
        let rejection = match found {
            Found::Completed { response } => return self.replay(operation, response),
            Found::InProgress { age, lease_left } => Rejection::in_progress(age, lease_left),
            Found::Unknown => Rejection::outcome_unknown(),
            // Nothing of the other request is shown.
            Found::OtherRequest(mismatch) => {
                return self.refuse(&Rejection::key_reused(self.config.mismatch, mismatch));
            }
            Found::OtherScheme => return self.refuse(&Rejection::scheme_unknown()),
            Found::Panicked => {
                return self.refuse(&Rejection::callback_panicked(Callback::Fingerprint));
            }
        };
        self.refuse(&rejection.about(operation));
    }

    /// The recorded response to the request that made it: no replay.
    pub(crate) fn answer_recorded(&mut self, recorded: Bytes, operation: Option<OperationId>) {
        match self.response(recorded) {
            Ok(Some(mut response)) => {
                response.headers_mut().remove(&self.config.marker);
                self.finish(Ok(response), Outcome::Recorded, operation);
            }
            Ok(None) => self.refuse(&Rejection::not_replayable().about(operation)),
            Err(error) => self.refuse_unreadable(Rejection::answer_unreadable(&error), operation),
        }
    }

    fn replay(&mut self, operation: OperationId, recorded: Bytes) {
        match self.response(recorded) {
            Ok(Some(response)) => self.finish(Ok(response), Outcome::Replayed, Some(operation)),
            Ok(None) => self.refuse(&Rejection::not_replayable().about(operation)),
            Err(error) => {
                self.refuse_unreadable(Rejection::record_unreadable(&error), Some(operation));
            }
        }
    }

    fn refuse_unreadable(&mut self, rejection: Rejection, operation: Option<OperationId>) {
        Notice::Corrupt.tell(&self.config.warnings, operation);
        self.refuse(&rejection.about(operation));
    }

    /// `None` if there is no response that could be replayed.
    fn response(&self, recorded: Bytes) -> Result<Option<Response<ResponseBody<R>>>, StoreError> {
        let recorded = RecordedResponse::decode(recorded)?;
        Ok(recorded
            .into_whole()
            .and_then(|whole| self.config.replay(whole)))
    }
}

impl Config {
    /// The answer in the handler's place.
    pub(crate) fn refuse<R: Body<Data = Bytes>>(
        &self,
        rejection: &Rejection,
    ) -> Response<ResponseBody<R>> {
        rejection.log(&self.warnings);
        self.renderer
            .render(rejection, &self.warnings)
            .map(|body| ResponseBody::whole(body, None))
    }

    /// The same before there is a [`Reply`], with its outcome told.
    pub(crate) fn refuse_at_once<R: Body<Data = Bytes>>(
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

/// Says to the client that its response is not recorded.
pub(crate) fn say_unrecorded<B>(response: &mut Response<B>) {
    response
        .headers_mut()
        .insert(RECORDED, HeaderValue::from_static("false"));
}
