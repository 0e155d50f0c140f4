//! A guarded request or input, on its way to its key.

use std::{
    panic::{AssertUnwindSafe, catch_unwind},
    sync::Arc,
};

use bytes::Bytes;
use http::{Request, request};
use tokio::time::Instant;

use super::{
    IsGuarded,
    config::Config,
    shared::Shared,
    withdraw::{Hold, Withdrawal},
};
use crate::{
    Rejection, RequestBody,
    body::Trailers,
    fingerprint::{BodyFault, Comparison, Fingerprint, Fingerprinter},
    rejection::Callback,
    scope::RecordName,
    store::Claim,
};

pub(super) struct Keyed<W> {
    pub(super) name: RecordName,
    pub(super) claim: Claim,
    /// From this moment on the key may start no run, if that is limited.
    pub(super) stale_from: Option<Instant>,
    /// Why the body cannot be compared, if it cannot.
    pub(super) body_fault: Option<BodyFault>,
    /// What the claim's token may hold in the store although nothing runs.
    pub(super) hold: Option<Hold>,
    pub(super) what: W,
}

pub(super) type KeyedRequest = Keyed<Box<ReadRequest>>;

/// A request whose body is in memory, once it was read.
pub(super) struct ReadRequest {
    parts: request::Parts,
    body: Bytes,
    trailers: Trailers,
}

impl ReadRequest {
    /// A request whose body is not read yet. Boxed, since it goes through many hands.
    pub(super) fn unread(parts: request::Parts) -> Box<Self> {
        Box::write(
            Box::new_uninit(),
            Self {
                parts,
                body: Bytes::new(),
                trailers: None,
            },
        )
    }

    pub(super) fn read(&mut self, body: Bytes, trailers: Trailers) {
        (self.body, self.trailers) = (body, trailers);
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
        fingerprinter.compare(recorded, own, &self.parts, &self.body)
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
    /// Takes the fingerprint of a request. Fails if a function of the application panics.
    pub(super) fn new(
        config: &Config,
        name: RecordName,
        stale_from: Option<Instant>,
        request: Box<ReadRequest>,
    ) -> Result<Self, Rejection> {
        let fingerprint = || config.fingerprinter.current(&request.parts, &request.body);
        let (fingerprint, body_fault) = catch_unwind(AssertUnwindSafe(fingerprint))
            .map_err(|_| Rejection::callback_panicked(Callback::Fingerprint))?;
        Ok(Self {
            name,
            claim: Claim::new(fingerprint, config.lease(), config.responses.retention),
            stale_from,
            body_fault,
            hold: None,
            what: request,
        })
    }

    /// Returns the request for the handler.
    pub(super) fn into_http<B>(self) -> Request<RequestBody<B>> {
        let ReadRequest {
            mut parts,
            body,
            trailers,
        } = *self.what;
        parts.extensions.insert(IsGuarded);
        Request::from_parts(parts, RequestBody::buffered(body, trailers))
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
            name: self.name.clone(),
            claim: Claim {
                reads_response: false,
                ..self.claim
            },
            hold,
        })
    }
}
