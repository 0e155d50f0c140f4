//! The handler, and what its clients receive.

use std::{
    panic::resume_unwind,
    sync::{Arc, Mutex, MutexGuard},
};

use bytes::Bytes;
use futures_util::{future::pending, stream};
use http::{Request, Response};
use http_body::Frame;
use http_body_util::{BodyExt as _, Full, StreamBody, combinators::UnsyncBoxBody};
use tokio::time::sleep;
use tower::{Layer as _, ServiceExt as _, service_fn, util::BoxCloneService};
use tower_idempotency::{IdempotencyLayer, KeepFor, Operation, RequestBody, ResponseBody, Store};

use super::{
    SLOW,
    model::SHORT_RETENTION,
    steps::{End, Plan},
};

pub(super) type Service =
    BoxCloneService<Request<Full<Bytes>>, Response<ResponseBody<Body>>, Failed>;

type Body = UnsyncBoxBody<Bytes, Failed>;

/// The error of a handler and of a body.
#[derive(Debug)]
pub(super) struct Failed;

impl std::fmt::Display for Failed {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("it failed")
    }
}

impl std::error::Error for Failed {}

/// The operations of the handler's runs.
#[derive(Default)]
pub(super) struct Runs(Mutex<Vec<Operation>>);

impl Runs {
    pub(super) fn count(&self) -> usize {
        self.list().len()
    }

    pub(super) fn last(&self) -> Option<Operation> {
        self.list().last().cloned()
    }

    /// Returns the number of the run, from 1.
    fn add(&self, operation: &Operation) -> usize {
        let mut list = self.list();
        list.push(operation.clone());
        list.len()
    }

    fn list(&self) -> MutexGuard<'_, Vec<Operation>> {
        self.0.lock().expect("nothing panics under this lock")
    }
}

/// What a client receives.
#[derive(Debug)]
pub(super) enum Received {
    Whole(Response<Bytes>),
    /// The body broke off after the head.
    Broken(#[expect(dead_code, reason = "for the message of a failure")] http::StatusCode),
    Failed,
}

pub(super) fn service<S: Store>(layer: &IdempotencyLayer<S>, runs: Arc<Runs>) -> Service {
    let handler = service_fn(move |request| handle(Arc::clone(&runs), request));
    BoxCloneService::new(layer.layer(handler))
}

pub(super) async fn received(service: Service, request: Request<Bytes>) -> Received {
    let Ok(response) = service.oneshot(request.map(Full::new)).await else {
        return Received::Failed;
    };
    let (parts, body) = response.into_parts();
    match body.collect().await {
        Ok(body) => Received::Whole(Response::from_parts(parts, body.to_bytes())),
        Err(_) => Received::Broken(parts.status),
    }
}

async fn handle(
    runs: Arc<Runs>,
    request: Request<RequestBody<Full<Bytes>>>,
) -> Result<Response<Body>, Failed> {
    let extensions = request.extensions();
    let plan: &Plan = extensions.get().expect("sent with the request");
    let operation: &Operation = extensions.get().expect("the request is guarded");
    let run = runs.add(operation);
    if plan.starts_effects {
        operation.effects_started();
    }
    if plan.is_slow {
        sleep(SLOW).await;
    }
    let (status, breaks) = match plan.end {
        // Without the panic hook, which ends the process under libFuzzer.
        End::Panics => resume_unwind(Box::new("a handler")),
        End::Fails => return Err(Failed),
        End::Hangs => pending().await,
        End::Breaks(status) => (status, true),
        End::Answers(status) | End::Streams(status) => (status, false),
    };
    let text = Ok(Frame::data(plan.text(run).into()));
    let frames = [text].into_iter().chain(breaks.then_some(Err(Failed)));
    let frames = stream::iter(frames.collect::<Vec<_>>());
    let mut response = Response::new(StreamBody::new(frames).boxed_unsync());
    *response.status_mut() = status;
    if let Some(disposition) = plan.disposition {
        operation.set_disposition(disposition);
    }
    if plan.keeps_short {
        response.extensions_mut().insert(KeepFor(SHORT_RETENTION));
    }
    Ok(response)
}
