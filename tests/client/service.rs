//! A service that answers by a script, and records its requests.

use std::{
    collections::VecDeque,
    future::{Ready, ready},
    sync::{Arc, Mutex},
    task::{Context, Poll},
};

use bytes::Bytes;
use http::{HeaderMap, HeaderValue, Request, Response, StatusCode};
use http_body_util::{Empty, Full};
use tower::{Service, ServiceExt as _};
use tower_idempotency::client::CloneBody;

/// The error of a client.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Failure {
    /// The connection was refused.
    Refused,
    /// The connection broke after the request had been sent.
    Broken,
}

/// One answer of the script.
pub(crate) type Step = Result<(u16, &'static [(&'static str, &'static str)]), Failure>;

/// Answers by its script, and with the last step for ever.
#[derive(Clone, Default)]
pub(crate) struct Script(Arc<Mutex<State>>);

#[derive(Default)]
struct State {
    steps: VecDeque<Step>,
    seen: Vec<HeaderMap>,
}

impl Script {
    pub(crate) fn new(steps: &[Step]) -> Self {
        let script = Self::default();
        script.0.lock().unwrap().steps = steps.iter().copied().collect();
        script
    }

    /// The headers of the requests so far.
    pub(crate) fn seen(&self) -> Vec<HeaderMap> {
        self.0.lock().unwrap().seen.clone()
    }

    pub(crate) fn keys(&self) -> Vec<Option<HeaderValue>> {
        let seen = self.seen();
        let keys = seen.iter().map(|headers| headers.get("idempotency-key"));
        keys.map(Option::<&HeaderValue>::cloned).collect()
    }
}

impl<B> Service<Request<B>> for Script {
    type Response = Response<Empty<Bytes>>;
    type Error = Failure;
    type Future = Ready<Result<Self::Response, Failure>>;

    fn poll_ready(&mut self, _: &mut Context<'_>) -> Poll<Result<(), Failure>> {
        Poll::Ready(Ok(()))
    }

    fn call(&mut self, request: Request<B>) -> Self::Future {
        let mut state = self.0.lock().unwrap();
        state.seen.push(request.headers().clone());
        let step = match state.steps.len() {
            0 => Ok((200, &[][..])),
            1 => state.steps[0],
            _ => state.steps.pop_front().unwrap(),
        };
        ready(step.map(|(status, headers)| {
            let mut response = Response::new(Empty::new());
            *response.status_mut() = StatusCode::from_u16(status).unwrap();
            for (name, value) in headers {
                let value = HeaderValue::from_static(value);
                response.headers_mut().append(*name, value);
            }
            response
        }))
    }
}

/// A body that is streamed: it cannot be sent again.
pub(crate) struct Streamed;

impl CloneBody for Streamed {
    fn try_clone(&self) -> Option<Self> {
        None
    }
}

pub(crate) fn post() -> Request<Full<Bytes>> {
    Request::post("/payments")
        .body(Full::from("amount=5"))
        .unwrap()
}

/// The status of the answer.
pub(crate) async fn status<C, B, R, E>(client: C, request: Request<B>) -> Result<u16, E>
where
    C: Service<Request<B>, Response = Response<R>, Error = E>,
{
    let response = client.oneshot(request).await?;
    Ok(response.status().as_u16())
}
