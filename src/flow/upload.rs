//! Bodies over `max_request_body`: uploads whose digest is verified, and those that run
//! unguarded.

use std::{
    future::poll_fn,
    panic::AssertUnwindSafe,
    pin::Pin,
    sync::Arc,
    task::{Context, Poll},
};

use bytes::Bytes;
use futures_util::FutureExt as _;
use http::{HeaderMap, Request, Response};
use http_body::{Body, Frame, SizeHint};
use tokio::time::{self, Instant};
use tower::Service;

use super::{
    acquire::refuse_ineligible,
    config::{Config, Oversized},
    discard::{discard, waits_for_continue},
    finish::HttpFinished,
    judge::is_success,
    limits::Permit,
    record::{Finished, Run},
    reply::{HttpReply, Reply},
    request::{Ineligible, ReadRequest},
    run::run_unguarded,
    shared::Shared,
};
use crate::{
    body::{
        ReceivedBody, RequestBody, SentBody,
        digests::DigestCheck,
        grpc,
        upload::{Upload, UploadFault, UploadLimits, UploadState},
    },
    key::Scope,
    operation::request_name::RequestName,
    rejection::{Rejection, RequestHead},
    store::{OwnerTransition, RecordState, Release, Store},
    telemetry::notice::Notice,
};

/// A body that can be taken out after it was read in part.
pub(super) struct Detachable<B>(Option<Pin<Box<B>>>);

impl<B> Detachable<B> {
    pub(super) fn new(body: B) -> Self {
        Self(Some(Box::pin(body)))
    }

    pub(super) fn detach(&mut self) -> Option<Pin<Box<B>>> {
        self.0.take()
    }
}

impl<B: Body> Body for Detachable<B> {
    type Data = B::Data;
    type Error = B::Error;

    fn poll_frame(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<B::Data>, B::Error>>> {
        match &mut self.0 {
            Some(body) => body.as_mut().poll_frame(cx),
            None => Poll::Ready(None),
        }
    }

    fn is_end_stream(&self) -> bool {
        self.0.as_ref().is_none_or(Body::is_end_stream)
    }

    fn size_hint(&self) -> SizeHint {
        let body = self.0.as_ref();
        body.map_or_else(|| SizeHint::with_exact(0), Body::size_hint)
    }
}

impl Config {
    pub(super) fn upload_limits(&self, oversized: Oversized) -> UploadLimits {
        UploadLimits {
            max_bytes: oversized.max(self),
            timeout: self.request_body_timeout,
        }
    }
}

/// The body of an upload. `held` is the permit of the bytes that were read, in `scope`.
pub(super) fn upload<B: ReceivedBody + Send + 'static>(
    read: Bytes,
    rest: Pin<Box<B>>,
    check: DigestCheck,
    limits: UploadLimits,
    (mut held, scope): (Permit, Scope),
) -> Upload<B> {
    let hold = Box::new(move |bytes| held.resize(&scope, bytes).is_ok());
    Upload::new(read, rest, check, limits, hold)
}

/// Discards the body of an upload that does not run.
pub(super) fn discard_upload<S, B: ReceivedBody + Send + 'static>(
    shared: &Shared<S>,
    upload: Option<Box<Upload<B>>>,
    headers: &HeaderMap,
) {
    let Some(upload) = upload else {
        return;
    };
    // A client that waits for `100 Continue` got it when its body was read.
    let is_sending = upload.was_read() || !waits_for_continue(headers);
    if let Some(rest) = upload.into_rest().filter(|_| is_sending) {
        discard(&shared.discards, rest);
    }
}

/// A request whose body is too large.
pub(super) struct OversizedRequest<B> {
    pub(super) name: RequestName,
    /// From this moment on its key may start no run, if that is limited.
    pub(super) stale_from: Option<Instant>,
    pub(super) request: Box<ReadRequest>,
    pub(super) body: RequestBody<B>,
}

/// Runs a request unguarded whose body is too large, unless its key has a record, or is
/// stale. `buffered`: the permit of the part of the body that was read.
pub(super) async fn run_oversized<I, S, B, R>(
    shared: &Arc<Shared<S>>,
    head: &RequestHead,
    inner: I,
    oversized: OversizedRequest<B>,
    buffered: Permit,
) -> HttpReply<R, I::Error>
where
    I: Service<Request<RequestBody<B>>, Response = Response<R>>,
    S: Store,
    B: ReceivedBody + Send + 'static,
    R: SentBody,
{
    let (config, settings) = (&shared.config, &shared.config.responses);
    let OversizedRequest {
        name,
        stale_from,
        request,
        body,
    } = oversized;
    let rejection = match may_run_unguarded(shared, &name, stale_from).await {
        Ok(permit) => {
            drop(buffered);
            config.warnings().warn(RUNS_UNGUARDED, None, None);
            let run = run_unguarded(settings, head, inner, request.into_http(Some(body)));
            let reply = run.await;
            drop(permit);
            return reply;
        }
        Err(rejection) => rejection,
    };
    discard(&shared.discards, body);
    Reply::refuse(settings, head, &rejection)
}

/// Without its body a request cannot be compared with a record. So a record of its key,
/// unless it is free for any request, keeps it from running.
async fn may_run_unguarded<S: Store>(
    shared: &Shared<S>,
    name: &RequestName,
    stale_from: Option<Instant>,
) -> Result<Permit, Rejection> {
    let config = &shared.config;
    let permit = shared.running_permit(name.sent().scope())?;
    let record = shared.call(|store| store.read(name)).await;
    let record = record.map_err(|error| {
        Notice::tell_if_corrupt(config.warnings(), &error, None);
        Rejection::claim_failed(&error)
    });
    let is_free = match record? {
        None => true,
        Some(record) => match record.state {
            RecordState::Released(Release::AnyRequest) => true,
            RecordState::InProgress { .. } => false,
            _ => record.expires_in.is_none(),
        },
    };
    if !is_free {
        return Err(Rejection::oversized_retry(config.max_request_body));
    }
    match stale_from.is_some_and(|from| Instant::now() >= from) {
        true => Err(refuse_ineligible(config, Ineligible::KeyStale)),
        false => Ok(permit),
    }
}

impl<S: Store> Run<S> {
    /// Returns the end of a run, which is not recorded unless its upload was verified.
    pub(super) async fn with_upload<R: SentBody, E>(
        &self,
        upload: &UploadState,
        finished: HttpFinished<R, E>,
    ) -> HttpFinished<R, E> {
        let status = finished.result.as_ref().ok().map(|response| {
            let (status, headers) = (response.status(), response.headers());
            grpc::status_of(status, headers, None)
        });
        let claims_success = status.is_some_and(is_success);
        let is_recorded = matches!(finished.transition, OwnerTransition::Complete(_));
        let verified = match is_recorded && claims_success {
            true => self.verified(upload).await,
            false => upload.ended().unwrap_or(Err(UploadFault::Unread)),
        };
        self.discard_upload(upload);
        match verified {
            Ok(()) => finished,
            Err(fault) => self.without_upload(finished, fault, claims_success),
        }
    }

    /// Returns the end of a run whose upload was not verified.
    fn without_upload<R: SentBody, E>(
        &self,
        finished: HttpFinished<R, E>,
        fault: UploadFault,
        claims_success: bool,
    ) -> HttpFinished<R, E> {
        let has_effects = self.claim.operation.have_effects_started();
        let release = match (&finished.transition, &finished.result) {
            (OwnerTransition::Complete(_), _) if claims_success || has_effects => {
                Notice::UploadUnverified(fault).tell(&self.settings().warnings, self.claim.id());
                return self.unknown(finished.result, None).unrecorded();
            }
            (OwnerTransition::Complete(_), _) => Release::SameRequest,
            (OwnerTransition::Release(release), _) => *release,
            // It failed because its body did.
            (_, Err(_)) if !has_effects && fault != UploadFault::Unread => Release::SameRequest,
            _ => return finished,
        };
        // The handler answered to an error of the layer.
        let result = match Rejection::upload(fault) {
            Some(rejection) => Ok(self.refuse(rejection)),
            None => finished.result,
        };
        Finished::released(release, result)
    }

    /// Reads what the handler has left of the upload, and returns how it ended.
    pub(super) async fn verified(&self, upload: &UploadState) -> Result<(), UploadFault> {
        let timeout = self.claim.shared.config.request_body_timeout;
        // The handler may hold the body in a task, or in its response.
        let changed = time::timeout(timeout, left_or_ended(upload)).await;
        if let Some(ended) = upload.ended() {
            return ended;
        }
        let left = changed.ok().and_then(|()| upload.take_left());
        let Some(mut left) = left else {
            return Err(UploadFault::Unread);
        };
        let verified = AssertUnwindSafe(poll_fn(|cx| left.poll_verified(cx))).catch_unwind();
        // A body that panicked is not read on.
        let verified = verified.await.map_err(|_panic| UploadFault::Unread)?;
        if verified.is_err() {
            discard(&self.claim.shared.discards, left.into_rest());
        }
        verified
    }

    /// Discards what the handler has left of the upload.
    pub(super) fn discard_upload(&self, upload: &UploadState) {
        if let Some(left) = upload.take_left() {
            discard(&self.claim.shared.discards, left.into_rest());
        }
    }
}

/// Resolves when an upload has ended, or its handler has dropped it.
async fn left_or_ended(upload: &UploadState) {
    while upload.ended().is_none() && !upload.is_left() {
        upload.changed().await;
    }
}

const RUNS_UNGUARDED: &str = "body over `max_request_body` and without a `Content-Digest` that counts, \
    request runs unguarded: raise `max_request_body`, or let clients declare digests and set \
    `ContentDigest::Stream`";
