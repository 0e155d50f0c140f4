//! Asks a hook whether a request may receive a recorded response.

use std::panic::AssertUnwindSafe;

use bytes::Bytes;
use futures_util::FutureExt as _;
use http_body::Body;
use tokio::time;

use super::{
    Client,
    config::Config,
    decide::{Answer, Answered},
    reply::{HttpReply, Reply},
};
use crate::{
    policy::authorizer::{ReplayAuthorizer, ReplayDecision, ReplayedRecord},
    rejection::{Rejection, RequestHead},
    response::recorded::RecordedResponse,
};

/// What a record answers, if the request may receive it.
pub(super) async fn answer<R: Body<Data = Bytes>, E>(
    config: &Config,
    client: &Client,
    head: &RequestHead,
    answered: Answered,
) -> HttpReply<R, E> {
    let (Some(authorizer), Some(record)) = (&config.authorizer, replayed(&answered)) else {
        return Reply::answered(config, head, answered);
    };
    let operation = answered.operation;
    let decision = tokio::select! {
        biased;
        () = client.left() => return Reply::client_left(Some(operation)),
        decision = ask(authorizer, head, record) => decision,
    };
    match decision {
        Ok(ReplayDecision::Allow) => Reply::answered(config, head, answered),
        Ok(ReplayDecision::Refuse) => {
            let rejection = Rejection::replay_refused();
            Reply::refuse_about(&config.responses, head, &rejection, operation)
        }
        Ok(ReplayDecision::Unavailable) => {
            let rejection = Rejection::authorization_unavailable(UNAVAILABLE);
            Reply::refuse_about(&config.responses, head, &rejection, operation)
        }
        Err(rejection) => Reply::refuse_about(&config.responses, head, &rejection, operation),
    }
}

/// Returns the record for the hook, or `None` if the answer shows nothing of a response. One
/// that is not readable is refused without the hook.
fn replayed(answered: &Answered) -> Option<ReplayedRecord> {
    let Answer::Completed {
        response, record, ..
    } = &answered.answer
    else {
        return None;
    };
    let record = record.as_deref().cloned()?;
    let response = RecordedResponse::decode(response.clone()).ok()?;
    Some(record.with_response(&response))
}

async fn ask(
    authorizer: &ReplayAuthorizer,
    head: &RequestHead,
    record: ReplayedRecord,
) -> Result<ReplayDecision, Rejection> {
    // A head that was not kept cannot be shown to the hook.
    let Some(request) = head.parts() else {
        return Ok(ReplayDecision::Refuse);
    };
    let asked = AssertUnwindSafe(authorizer.ask(request, record)).catch_unwind();
    match time::timeout(authorizer.longest(), asked).await {
        Ok(Ok(decision)) => Ok(decision),
        Ok(Err(_panic)) => Err(Rejection::authorizer_panicked()),
        Err(_) => Err(Rejection::authorization_unavailable(TIMED_OUT)),
    }
}

const UNAVAILABLE: &str = "`ReplayAuthorizer` returned `Unavailable`, request refused with 503: find \
    out why the hook cannot decide";
const TIMED_OUT: &str = "`ReplayAuthorizer` took longer than its `timeout`, request refused with 503: \
    find out what the hook waits for, or raise `ReplayAuthorizer::timeout`";
