//! Settings of requests: which are guarded, and how they are read and compared.

use std::{sync::Arc, time::Duration};

use http::{HeaderName, Method, StatusCode, request};

use super::IdempotencyBuilder;
use crate::{
    fingerprint::Fingerprinting,
    key::KeySyntax,
    policy::{ContentDigest, OversizedBody},
    store::Store,
};

/// Settings of requests: which are guarded, and how they are read and compared.
impl<S: Store> IdempotencyBuilder<S> {
    /// Sets the header that carries the key. Defaults to `Idempotency-Key`.
    pub fn header(mut self, name: HeaderName) -> Self {
        self.settings.config.header = name;
        self
    }

    /// Sets which keys are accepted. Defaults to [`KeySyntax::compat`].
    pub fn key_syntax(mut self, syntax: KeySyntax) -> Self {
        self.settings.config.syntax = syntax;
        self
    }

    /// Sets the methods that are guarded. Requests with another method pass untouched,
    /// even if their key is malformed. Defaults to POST and PATCH.
    ///
    /// [`build`](Self::build) refuses safe methods.
    pub fn methods(mut self, methods: impl IntoIterator<Item = Method>) -> Self {
        self.settings.config.methods = methods.into_iter().collect();
        self
    }

    /// Sets a function that decides for each request with an unsafe method whether it
    /// is guarded, in place of [`methods`](Self::methods). Defaults to none.
    pub fn guard_if(
        mut self,
        guards: impl Fn(&request::Parts) -> bool + Send + Sync + 'static,
    ) -> Self {
        self.settings.config.guard_if = Some(Arc::new(guards));
        self
    }

    /// Sets what makes two requests the same request. Defaults to
    /// [`Fingerprinting::bytes`].
    pub fn fingerprint(mut self, fingerprinting: Fingerprinting) -> Self {
        self.settings.fingerprinting = fingerprinting;
        self
    }

    /// Adds a form of fingerprint that was set before, so that the records made with
    /// it can be compared.
    ///
    /// Without it, their retries receive 503 until they expire. The plain forms of
    /// [`Fingerprinting`] are understood in any case, unless the current form is
    /// keyed. Defaults to none.
    pub fn earlier_fingerprint(mut self, fingerprinting: Fingerprinting) -> Self {
        self.settings.earlier.push(fingerprinting);
        self
    }

    /// Sets the status for another request under a used key: 422, 400 or 409. Defaults
    /// to 422.
    pub fn mismatch_status(mut self, status: StatusCode) -> Self {
        self.settings.config.mismatch = status;
        self
    }

    /// Sets the largest body of a guarded request, in bytes. A larger one receives 413
    /// before anything is claimed. Defaults to 1 MiB.
    ///
    /// A client that writes its whole request before it reads sees this refusal too,
    /// and those for a faulty key or caller. The layer answers at once, and reads and
    /// discards the rest of the body meanwhile: up to 64 MiB and 10 s of it, for 256
    /// requests at a time. It reads nothing from a client that sent
    /// `Expect: 100-continue` and was refused from its head. If another limit outside of
    /// the layer refuses a body, the layer does not learn its length, and only the 10 s
    /// apply.
    pub fn max_request_body(mut self, bytes: usize) -> Self {
        self.settings.config.max_request_body = bytes;
        self
    }

    /// Sets how long the body of a guarded request may pause. After this time without a
    /// byte the request receives 408, and nothing is claimed. Defaults to 10 s.
    ///
    /// The same happens once the body has arrived for longer than this, and at less than
    /// 1 KiB a second on average. A larger [`max_request_body`](Self::max_request_body)
    /// needs no longer time.
    pub fn request_body_timeout(mut self, timeout: Duration) -> Self {
        self.settings.config.request_body_timeout = timeout;
        self
    }

    /// Sets whether the header `Content-Digest` is verified, and whether larger bodies that
    /// have it stream to the handler. Defaults to [`ContentDigest::Ignore`].
    ///
    /// [`build`](Self::build) refuses [`ContentDigest::Stream`] with
    /// [`Fingerprinting::custom`], whose function needs the body.
    pub fn content_digest(mut self, policy: ContentDigest) -> Self {
        self.settings.config.content_digest = policy;
        self
    }

    /// Sets what happens to a request with a key whose body is over
    /// [`max_request_body`](Self::max_request_body) and does not stream by its
    /// [`content_digest`](Self::content_digest). Defaults to [`OversizedBody::Refuse`].
    ///
    /// [`build`](Self::build) refuses [`OversizedBody::RunUnguarded`] where keys are
    /// required.
    pub fn oversized_body(mut self, policy: OversizedBody) -> Self {
        self.settings.config.oversized_body = policy;
        self
    }
}
