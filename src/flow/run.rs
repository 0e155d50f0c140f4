//! Runs the handler.

use std::{
    future::poll_fn,
    panic::{AssertUnwindSafe, catch_unwind},
    task::Poll,
};

use bytes::Bytes;
use futures_util::FutureExt as _;
use http::{Request, Response};
use http_body::Body;
use tower::Service;

use super::{
    Client,
    finish::{Called, finish, finish_cancelled},
    limits::Permit,
    owned::OwnedClaim,
    record::{Panicked, Run},
    reply::{HttpReply, Reply},
    request::KeyedRequest,
};
use crate::{
    body::{RequestBody, ResponseBody, SentBody, upload::Upload},
    flow::outcome::Outcome,
    operation::{disposition::HandlerChoice, response_settings::ResponseSettings},
    policy::Disconnect,
    rejection::{Rejection, RequestHead},
    response::mark_unrecorded,
    store::Store,
};

/// Runs the handler while heartbeats renew its lease, and records its outcome.
pub(super) async fn run<I, S, B, R>(
    claim: OwnedClaim<S>,
    inner: I,
    (request, upload): (KeyedRequest, Option<Box<Upload<B>>>),
    client: &Client,
    permit: Permit,
) -> HttpReply<R, I::Error>
where
    I: Service<Request<RequestBody<B>>, Response = Response<R>>,
    S: Store,
    R: SentBody,
{
    let heartbeat = claim.shared.heartbeats.start(&claim.operation).await;
    let called = {
        if let Some(upload) = &upload {
            claim.operation.set_upload(upload.state());
        }
        let mut request = request.into_http(upload);
        request.extensions_mut().insert(claim.operation.clone());
        call(inner, request)
    };
    let disconnect = claim.shared.config.disconnect;
    let run = Run {
        claim,
        heartbeat,
        permit,
    };
    let called = match called {
        Ok(handler) => until_client_leaves(handler, client, disconnect).await,
        Err(panicked) => Some(Err(panicked)),
    };
    match called {
        Some(called) => finish(run, called, client).await,
        None => Box::pin(finish_cancelled(run)).await,
    }
}

/// Runs the handler without a claim.
pub(super) async fn run_unguarded<I, B, R>(
    settings: &ResponseSettings,
    head: &RequestHead,
    inner: I,
    request: Request<RequestBody<B>>,
) -> HttpReply<R, I::Error>
where
    I: Service<Request<RequestBody<B>>, Response = Response<R>>,
    R: Body<Data = Bytes>,
{
    let called = match call(inner, request) {
        Ok(handler) => handler.await,
        Err(panicked) => Err(panicked),
    };
    match called {
        Ok(Ok(response)) => {
            let mut response = settings.cleaned(response).map(ResponseBody::streamed);
            HandlerChoice::take_from(response.extensions_mut());
            mark_unrecorded(&mut response);
            Reply::new(Ok(response), Outcome::Unguarded, None)
        }
        Ok(Err(error)) => Reply::new(Err(error), Outcome::Unguarded, None),
        Err(Panicked) => Reply::refuse(settings, head, &Rejection::handler_panicked()),
    }
}

/// Calls the handler. A panic of `call` itself is caught too.
///
/// The future is boxed, so that its size does not count for the future around it.
fn call<I, B, R>(
    mut inner: I,
    request: Request<RequestBody<B>>,
) -> Result<impl Future<Output = Called<R, I::Error>> + Unpin, Panicked>
where
    I: Service<Request<RequestBody<B>>, Response = Response<R>>,
{
    let handler = catch_unwind(AssertUnwindSafe(|| inner.call(request)))?;
    let handler = AssertUnwindSafe(handler).catch_unwind();
    Ok(Box::pin(handler.map(|called| Ok(called?))))
}

/// Polls the handler to its end. With [`Disconnect::Cancel`], returns `None` once the
/// client has left.
async fn until_client_leaves<T>(
    mut handler: impl Future<Output = T> + Unpin,
    client: &Client,
    disconnect: Disconnect,
) -> Option<T> {
    poll_fn(|cx| {
        if disconnect == Disconnect::Cancel && client.has_left() {
            return Poll::Ready(None);
        }
        handler.poll_unpin(cx).map(Some)
    })
    .await
}
