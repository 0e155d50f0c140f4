//! A guarded request or input, on its way to its key.

use std::{
    panic::{AssertUnwindSafe, catch_unwind},
    sync::Arc,
};

use bytes::Bytes;
use http::{HeaderMap, Request, request};
use tokio::time::Instant;

use super::{
    IsGuarded,
    quotas::RequestQuota,
    shared::Shared,
    withdraw::{Hold, Withdrawal},
};
use crate::{
    body::{
        RequestBody, Trailers,
        digests::{DeclaredDigests, DigestCheck},
        upload::Upload,
    },
    fingerprint::{BodyFault, Comparison, Content, Fingerprint, Fingerprinter},
    operation::request_name::RequestName,
    rejection::{Callback, Rejection},
    store::{Claim, Store},
};

pub(super) struct Keyed<W> {
    pub(super) name: RequestName,
    pub(super) claim: Claim,
    /// From this moment on the key may start no run, if that is limited.
    pub(super) stale_from: Option<Instant>,
    /// Why the body cannot be compared, if it cannot.
    pub(super) body_fault: Option<BodyFault>,
    /// What the claim's token may hold in the store although nothing runs.
    pub(super) hold: Option<Hold>,
    /// What the quota of its scope needs, if there is one.
    pub(super) quota: Option<Box<RequestQuota>>,
    pub(super) what: W,
}

pub(super) type KeyedRequest = Keyed<Box<ReadRequest>>;

/// A request whose body is in memory, once it was read, or streams as an upload.
pub(super) struct ReadRequest {
    parts: request::Parts,
    body: Bytes,
    trailers: Trailers,
    /// Those that the client declares.
    digests: Option<Box<DeclaredDigests>>,
    is_upload: bool,
}

impl ReadRequest {
    /// A request whose body is not read yet. Boxed, since it goes through many hands.
    pub(super) fn unread(
        parts: request::Parts,
        digests: Option<Box<DeclaredDigests>>,
    ) -> Box<Self> {
        Box::write(
            Box::new_uninit(),
            Self {
                parts,
                body: Bytes::new(),
                trailers: None,
                digests,
                is_upload: false,
            },
        )
    }

    pub(super) fn read(&mut self, body: Bytes, trailers: Trailers) {
        (self.body, self.trailers) = (body, trailers);
    }

    /// Makes it an upload, and returns what checks its body. Returns `None` if the client
    /// declares no digest.
    pub(super) fn check_upload(&mut self) -> Option<DigestCheck> {
        let digests = self.digests.as_deref()?;
        self.is_upload = true;
        Some(DigestCheck::new(digests.clone()))
    }

    /// The body, as its fingerprint sees it.
    fn content(&self) -> Content<'_> {
        match self.digests.as_deref() {
            Some(digests) if self.is_upload => Content::declared(digests),
            digests => Content::whole(&self.body, digests),
        }
    }

    /// Whether the body, if it is in memory, has the declared digests.
    fn has_digests(&self) -> bool {
        let digests = self.digests.as_deref().filter(|_| !self.is_upload);
        digests.is_none_or(|digests| digests.are_of(&self.body))
    }

    pub(super) fn headers(&self) -> &HeaderMap {
        &self.parts.headers
    }

    /// Returns the request for the handler, with the body `upload` in the place of its own.
    pub(super) fn into_http<B>(self, body: Option<RequestBody<B>>) -> Request<RequestBody<B>> {
        let mut parts = self.parts;
        parts.extensions.insert(IsGuarded);
        let body = body.unwrap_or_else(|| RequestBody::buffered(self.body, self.trailers));
        Request::from_parts(parts, body)
    }
}

/// A request or an input, to be compared with the record of its key.
pub(super) trait Comparable {
    /// Compares it, whose fingerprint is `own`, with what made `recorded`.
    fn compare(
        &self,
        fingerprinter: &Fingerprinter,
        recorded: &Fingerprint,
        own: &Fingerprint,
    ) -> Comparison;
}

impl Comparable for Box<ReadRequest> {
    fn compare(
        &self,
        fingerprinter: &Fingerprinter,
        recorded: &Fingerprint,
        own: &Fingerprint,
    ) -> Comparison {
        fingerprinter.compare(recorded, own, &self.parts, self.content())
    }
}

/// Why a request may not run, whatever the store says. It receives what the record
/// answers without a run.
#[derive(Clone, Copy)]
pub(super) enum Ineligible {
    /// Its key was made too long ago.
    KeyStale,
    BodyInvalid(BodyFault),
}

impl KeyedRequest {
    /// Takes the fingerprint of a request. Fails if a function of the application panics, or
    /// its body has another digest than its client declares.
    pub(super) fn new<S: Store>(
        shared: &Shared<S>,
        name: RequestName,
        stale_from: Option<Instant>,
        request: Box<ReadRequest>,
    ) -> Result<Self, Rejection> {
        let config = &shared.config;
        if !request.has_digests() {
            return Err(Rejection::wrong_digest());
        }
        let fingerprint = || {
            let content = request.content();
            config.fingerprinter.current(&request.parts, content)
        };
        let (fingerprint, body_fault) = catch_unwind(AssertUnwindSafe(fingerprint))
            .map_err(|_| Rejection::callback_panicked(Callback::Fingerprint))?;
        let quota = match &shared.quotas {
            Some(quotas) => quotas.of_request(&name, &request.parts)?,
            None => None,
        };
        Ok(Self {
            name,
            claim: Claim::new(fingerprint, config.lease(), config.responses.retention),
            stale_from,
            body_fault,
            hold: None,
            quota,
            what: request,
        })
    }

    /// As [`ReadRequest::into_http`], with the body of an upload if it is one.
    pub(super) fn into_http<B>(self, upload: Option<Box<Upload<B>>>) -> Request<RequestBody<B>> {
        self.what.into_http(upload.map(RequestBody::upload))
    }
}

impl<W> Keyed<W> {
    pub(super) fn ineligible(&self) -> Option<Ineligible> {
        match self.body_fault {
            Some(fault) => Some(Ineligible::BodyInvalid(fault)),
            None => self.is_stale().then_some(Ineligible::KeyStale),
        }
    }

    /// Whether the key may start no run any more.
    pub(super) fn is_stale(&self) -> bool {
        self.stale_from.is_some_and(|from| Instant::now() >= from)
    }

    /// Returns what undoes the claim, if the store may have it.
    pub(super) fn withdrawal<S>(&self, shared: &Arc<Shared<S>>) -> Option<Withdrawal<S>> {
        self.hold.map(|hold| Withdrawal {
            shared: Arc::clone(shared),
            name: self.name.clone().into_kept(),
            claim: Claim {
                reads_response: false,
                ..self.claim
            },
            hold,
        })
    }
}
