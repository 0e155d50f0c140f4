//! The builder of a layer: its settings, their defaults and their limits.

use std::{fmt, sync::Arc, time::Duration};

use http::{HeaderName, HeaderValue, Method, Response, StatusCode, request};
use thiserror::Error;

#[cfg(all(feature = "sealing", feature = "tracing"))]
use crate::sealing::log_ids::LogIds;
#[cfg(feature = "sealing")]
use crate::sealing::{names::NameDigests, settings::Sealing};
use crate::{
    body::whole::WholeBody,
    fingerprint::{Fingerprinter, Fingerprinting},
    flow::config::{Config, PerScope, ScopeFn},
    key::{KeySyntax, Scope},
    layer::IdempotencyLayer,
    operation::{disposition::Dispositions, response_settings::ResponseSettings},
    policy::{
        ContentDigest, Disconnect, OversizedBody, Recovery, Requirement, StoreFailure,
        authorizer::ReplayAuthorizer,
        quota::{Quota, QuotaSetting},
    },
    rejection::{Rejection, custom},
    response::headers::KeptHeaders,
    store::Store,
};

/// Builds an [`IdempotencyLayer`].
///
/// Made by [`IdempotencyLayer::required`] and [`IdempotencyLayer::optional`], which
/// ask for the two settings that have no default. Every other setting has the default
/// that its method names.
///
/// ```
/// # use axum::{Router, body::Body, http::{Request, StatusCode}, routing::post};
/// # use tower::ServiceExt;
/// use std::time::Duration;
/// use tower_idempotency::{IdempotencyLayer, KeySyntax, MemoryStore, Scope};
///
/// # #[tokio::main(flavor = "current_thread")]
/// # async fn main() -> Result<(), Box<dyn std::error::Error>> {
/// let layer = IdempotencyLayer::required(MemoryStore::new(), |_| Some(Scope::single_tenant()))
///     .key_syntax(KeySyntax::compat().uuid())
///     .wait(Duration::from_secs(2))
///     .retention(Duration::from_secs(48 * 3600))
///     .build()?;
/// # let app = Router::new().route("/", post(StatusCode::CREATED).layer(layer));
/// # for (key, status) in [
/// #     ("8e03978e-40d5-43dd-bc93-6894a57f9324", StatusCode::CREATED),
/// #     ("no-uuid", StatusCode::BAD_REQUEST),
/// # ] {
/// #     let request = Request::post("/").header("idempotency-key", key).body(Body::empty())?;
/// #     assert_eq!(app.clone().oneshot(request).await?.status(), status);
/// # }
/// # Ok(())
/// # }
/// ```
#[must_use = "a builder does nothing until it is built"]
pub struct IdempotencyBuilder<S> {
    store: S,
    config: Config,
    fingerprinting: Fingerprinting,
    earlier: Vec<Fingerprinting>,
    heartbeat: Option<Duration>,
    store_timeout: Option<Duration>,
    documentation: Option<String>,
}

/// The constructors of a layer, which return its builder.
impl<S: Store> IdempotencyLayer<S> {
    /// Guards requests that have a key. Requests without one receive 400
    /// `key-missing`.
    ///
    /// `scope` returns whose key it is, from what an outer layer found out about the
    /// caller. `None` refuses the request with 403 `caller-unknown`. Take the caller's
    /// identity, never its credential: a token that is refreshed between two attempts
    /// would run the operation twice.
    ///
    /// Nested routers shorten the path. With the feature `axum`, the original one is
    /// read from the `OriginalUri` of axum 0.8. Without the feature, and with another
    /// version of axum, the layer must stand outside of nested routers; see
    /// [`Fingerprinting`](Fingerprinting#path).
    pub fn required(
        store: S,
        scope: impl Fn(&request::Parts) -> Option<Scope> + Send + Sync + 'static,
    ) -> IdempotencyBuilder<S> {
        IdempotencyBuilder::new(store, Arc::new(scope), Requirement::Required)
    }

    /// Guards requests that have a key. Requests without one run unguarded.
    ///
    /// `scope` is that of [`required`](Self::required).
    pub fn optional(
        store: S,
        scope: impl Fn(&request::Parts) -> Option<Scope> + Send + Sync + 'static,
    ) -> IdempotencyBuilder<S> {
        IdempotencyBuilder::new(store, Arc::new(scope), Requirement::Optional)
    }
}

impl<S: Store> IdempotencyBuilder<S> {
    fn new(store: S, scope: ScopeFn, requirement: Requirement) -> Self {
        Self {
            store,
            fingerprinting: Fingerprinting::bytes(),
            earlier: Vec::new(),
            heartbeat: None,
            store_timeout: None,
            documentation: None,
            config: Config {
                requirement,
                scope,
                header: crate::key::HEADER,
                syntax: KeySyntax::compat(),
                methods: vec![Method::POST, Method::PATCH],
                guard_if: None,
                fingerprinter: Fingerprinter::new(Fingerprinting::bytes(), Vec::new()),
                mismatch: StatusCode::UNPROCESSABLE_ENTITY,
                wait: Duration::ZERO,
                max_waiters: 1_000,
                max_in_flight: 4_096,
                max_buffered_bytes: 256 * MIB,
                max_uploads: 4_096,
                per_scope: PerScope::default(),
                max_request_body: MIB,
                request_body_timeout: Duration::from_secs(10),
                content_digest: ContentDigest::Ignore,
                oversized_body: OversizedBody::Refuse,
                dispositions: Dispositions::standard(),
                recovery: Recovery::Refuse,
                authorizer: None,
                max_attempts: 5,
                store_failure: StoreFailure::Refuse,
                disconnect: Disconnect::Finish,
                unknown_retention: Duration::from_secs(7 * 24 * HOUR),
                heartbeat: Duration::from_secs(10),
                max_run_time: Duration::from_secs(15 * 60),
                quota: None,
                late_recording_timeout: Duration::from_secs(15 * 60),
                max_late_recording_bytes: 64 * MIB,
                #[cfg(feature = "sealing")]
                names: None,
                #[cfg(all(feature = "sealing", feature = "tracing"))]
                log_ids: None,
                responses: Arc::default(),
            },
        }
    }

    fn responses(&mut self) -> &mut ResponseSettings {
        Arc::make_mut(&mut self.config.responses)
    }

    /// Sets the header that carries the key. Defaults to `Idempotency-Key`.
    pub fn header(mut self, name: HeaderName) -> Self {
        self.config.header = name;
        self
    }

    /// Sets which keys are accepted. Defaults to [`KeySyntax::compat`].
    pub fn key_syntax(mut self, syntax: KeySyntax) -> Self {
        self.config.syntax = syntax;
        self
    }

    /// Sets the methods that are guarded. Requests with another method pass untouched,
    /// even if their key is malformed. Defaults to POST and PATCH.
    ///
    /// [`build`](Self::build) refuses safe methods.
    pub fn methods(mut self, methods: impl IntoIterator<Item = Method>) -> Self {
        self.config.methods = methods.into_iter().collect();
        self
    }

    /// Sets a function that decides for each request with an unsafe method whether it
    /// is guarded, in place of [`methods`](Self::methods). Defaults to none.
    pub fn guard_if(
        mut self,
        guards: impl Fn(&request::Parts) -> bool + Send + Sync + 'static,
    ) -> Self {
        self.config.guard_if = Some(Arc::new(guards));
        self
    }

    /// Sets what makes two requests the same request. Defaults to
    /// [`Fingerprinting::bytes`].
    pub fn fingerprint(mut self, fingerprinting: Fingerprinting) -> Self {
        self.fingerprinting = fingerprinting;
        self
    }

    /// Adds a form of fingerprint that was set before, so that the records made with
    /// it can be compared.
    ///
    /// Without it, their retries receive 503 until they expire. The plain forms of
    /// [`Fingerprinting`] are understood in any case, unless the current form is
    /// keyed. Defaults to none.
    pub fn earlier_fingerprint(mut self, fingerprinting: Fingerprinting) -> Self {
        self.earlier.push(fingerprinting);
        self
    }

    /// Sets the status for another request under a used key: 422, 400 or 409. Defaults
    /// to 422.
    pub fn mismatch_status(mut self, status: StatusCode) -> Self {
        self.config.mismatch = status;
        self
    }

    /// Sets how long a request waits for another one with the same key, before it
    /// receives 409 `request-in-progress`. Zero does not wait. Defaults to zero.
    ///
    /// A waiter holds no connection to the store and no readiness of the inner
    /// service. It is woken when the other request ends, in another process too if the
    /// store can tell. Otherwise it reads the record after pauses of 50 ms to one second.
    pub fn wait(mut self, timeout: Duration) -> Self {
        self.config.wait = timeout;
        self
    }

    /// Sets how many requests may wait at a time. Further ones receive 409 at once.
    /// Defaults to 1,000.
    pub fn max_waiters(mut self, requests: usize) -> Self {
        self.config.max_waiters = requests;
        self
    }

    /// Sets how many guarded requests may claim, wait or run at a time. Further ones
    /// receive 503. Defaults to 4,096.
    ///
    /// Requests whose client has left count too. As many outcomes may be recorded late
    /// beside them, and as many claims withdrawn.
    pub fn max_in_flight(mut self, requests: usize) -> Self {
        self.config.max_in_flight = requests;
        self
    }

    /// Sets how many bytes of request bodies may be held at a time, over all guarded
    /// requests whose handler has not started. Further ones receive 503. Defaults to
    /// 256 MiB.
    pub fn max_buffered_bytes(mut self, bytes: usize) -> Self {
        self.config.max_buffered_bytes = bytes;
        self
    }

    /// Sets how many bodies of guarded requests may be arriving at a time. Further ones
    /// receive 503. Defaults to 4,096.
    ///
    /// A body that is there at once does not count.
    pub fn max_uploads(mut self, requests: usize) -> Self {
        self.config.max_uploads = requests;
        self
    }

    /// Sets how many requests of one scope may wait at a time, counted while more than half
    /// of [`max_waiters`](Self::max_waiters) wait. Further ones receive 409 at once. Defaults
    /// to a quarter of `max_waiters`.
    ///
    /// So one scope can take three quarters of the limit, and the others have the rest. As
    /// long as less than half is taken, nothing is counted for a scope. A request of
    /// [`Scope::single_tenant`] counts for no scope, and may take all.
    pub fn max_waiters_per_scope(mut self, requests: usize) -> Self {
        self.config.per_scope.waiters = Some(requests);
        self
    }

    /// Sets how many guarded requests of one scope may claim, wait or run at a time, counted
    /// while more than half of [`max_in_flight`](Self::max_in_flight) do. Further ones receive
    /// 429 `scope-overloaded`. Defaults to a quarter of `max_in_flight`.
    ///
    /// Scopes are counted as for [`max_waiters_per_scope`](Self::max_waiters_per_scope).
    pub fn max_in_flight_per_scope(mut self, requests: usize) -> Self {
        self.config.per_scope.in_flight = Some(requests);
        self
    }

    /// Sets how many bytes of request bodies of one scope may be held at a time, counted
    /// while more than half of [`max_buffered_bytes`](Self::max_buffered_bytes) are. Further
    /// ones receive 429 `scope-overloaded`. Defaults to a quarter of `max_buffered_bytes`, or
    /// to [`max_request_body`](Self::max_request_body) if that is more.
    ///
    /// Scopes are counted as for [`max_waiters_per_scope`](Self::max_waiters_per_scope).
    pub fn max_buffered_bytes_per_scope(mut self, bytes: usize) -> Self {
        self.config.per_scope.buffered_bytes = Some(bytes);
        self
    }

    /// Sets how many bodies of guarded requests of one scope may be arriving at a time,
    /// counted while more than half of [`max_uploads`](Self::max_uploads) are. Further ones
    /// receive 429 `scope-overloaded`. Defaults to a quarter of `max_uploads`.
    ///
    /// Scopes are counted as for [`max_waiters_per_scope`](Self::max_waiters_per_scope).
    pub fn max_uploads_per_scope(mut self, requests: usize) -> Self {
        self.config.per_scope.uploads = Some(requests);
        self
    }

    /// Sets how much each scope may keep in the store at a time, over all processes.
    /// Defaults to no limit.
    ///
    /// A request whose record would exceed it receives 429 `quota-exceeded`, with a
    /// `Retry-After` of the time until enough records have expired. A retry of a record that
    /// exists is answered as always. Other scopes are not affected.
    ///
    /// A quota is approximate. The layer counts in its process, and once a second reports the
    /// scopes that had requests to the store, which adds up the counts of all processes. So a scope may exceed its quota by what all
    /// processes accept within two seconds, and by the requests that are claimed at the same
    /// moment. A process that crashes leaves up to a second uncounted. Records are counted
    /// for up to a twentieth longer than their retention, and for two seconds at least. A
    /// record that an operator forgets or resolves is counted until it would have expired.
    ///
    /// The first request of a scope in a process asks the store, and waits for the answer. A
    /// request that is refused reads its record instead of claiming it. While the store does
    /// not answer, each process counts alone.
    ///
    /// ```
    /// # use axum::{Router, body::Body, http::{Request, StatusCode}, routing::post};
    /// # use tower::ServiceExt;
    /// use tower_idempotency::{IdempotencyLayer, MemoryStore, Quota, Scope};
    ///
    /// # #[tokio::main(flavor = "current_thread")]
    /// # async fn main() -> Result<(), Box<dyn std::error::Error>> {
    /// let layer = IdempotencyLayer::required(MemoryStore::new(), |_| Some(Scope::single_tenant()))
    ///     .quota(Quota::unlimited().max_records(2))
    ///     .build()?;
    /// # let app = Router::new().route("/", post(StatusCode::CREATED).layer(layer));
    /// # for (key, status) in [("a", 201), ("b", 201), ("c", 429), ("a", 201)] {
    /// #     let request = Request::post("/").header("idempotency-key", key).body(Body::empty())?;
    /// #     assert_eq!(app.clone().oneshot(request).await?.status(), status);
    /// # }
    /// # Ok(())
    /// # }
    /// ```
    pub fn quota(mut self, quota: Quota) -> Self {
        self.config.quota = Some(QuotaSetting::Fixed(quota));
        self
    }

    /// Sets a function that returns the [`quota`](Self::quota) of a request's scope, for
    /// plans that differ. Defaults to none.
    ///
    /// It is called for each guarded request after its body was read, so that it must be
    /// fast. If it panics, the request receives 500 `callback-panicked`. For
    /// [`Quota::unlimited`] nothing is counted.
    ///
    /// ```
    /// use tower_idempotency::{IdempotencyLayer, MemoryStore, Quota, Scope};
    ///
    /// # fn main() -> Result<(), tower_idempotency::BuildError> {
    /// #[derive(Clone, Copy)]
    /// struct Plan(u64); // your authentication puts it into the extensions
    ///
    /// let layer = IdempotencyLayer::required(MemoryStore::new(), |_| Some(Scope::single_tenant()))
    ///     .quota_by(|_scope, parts| {
    ///         let Plan(records) = *parts.extensions.get().unwrap_or(&Plan(1_000));
    ///         Quota::unlimited().max_records(records)
    ///     })
    ///     .build()?;
    /// # Ok(())
    /// # }
    /// ```
    pub fn quota_by(
        mut self,
        quota: impl Fn(&Scope, &request::Parts) -> Quota + Send + Sync + 'static,
    ) -> Self {
        self.config.quota = Some(QuotaSetting::By(Arc::new(quota)));
        self
    }

    /// Sets which responses are recorded. Defaults to [`Dispositions::standard`].
    pub fn dispositions(mut self, dispositions: Dispositions) -> Self {
        self.config.dispositions = dispositions;
        self
    }

    /// Sets what a retry receives while the outcome is unknown. Defaults to
    /// [`Recovery::Refuse`].
    pub fn recovery(mut self, recovery: Recovery) -> Self {
        self.config.recovery = recovery;
        self
    }

    /// Sets a hook that decides whether a request may receive a recorded response. Defaults
    /// to none: authentication outside of the layer decides.
    ///
    /// [`ReplayAuthorizer`] has an example.
    pub fn authorize_replay(mut self, authorizer: ReplayAuthorizer) -> Self {
        self.config.authorizer = Some(authorizer);
        self
    }

    /// Sets how often in a row an operation may start without a response, before its
    /// outcome is unknown even under [`Recovery::Rerun`]. Defaults to 5.
    ///
    /// A release resets the count to one if an attempt had an unknown outcome, otherwise
    /// to zero.
    pub fn max_attempts(mut self, attempts: u32) -> Self {
        self.config.max_attempts = attempts;
        self
    }

    /// Sets what happens if the store cannot answer a claim. Defaults to
    /// [`StoreFailure::Refuse`].
    pub fn store_failure(mut self, policy: StoreFailure) -> Self {
        self.config.store_failure = policy;
        self
    }

    /// Sets what happens to a running handler when its client leaves. Defaults to
    /// [`Disconnect::Finish`].
    pub fn disconnect(mut self, policy: Disconnect) -> Self {
        self.config.disconnect = policy;
        self
    }

    /// Sets the header that marks a replay, with the value `true`. Defaults to
    /// `Idempotent-Replayed`.
    pub fn replay_marker(mut self, name: HeaderName) -> Self {
        self.responses().marker = name;
        self
    }

    /// Sets which headers of a response are kept. Defaults to
    /// [`KeptHeaders::all_but_transient`].
    pub fn kept_headers(mut self, headers: KeptHeaders) -> Self {
        self.responses().kept_headers = headers;
        self
    }

    /// Sets how long a record is kept, counted from its claim. A retry after that runs
    /// again. Defaults to 24 hours.
    ///
    /// A response is kept for at least one lease from its recording.
    pub fn retention(mut self, retention: Duration) -> Self {
        self.responses().retention = retention;
        self
    }

    /// Sets how long responses with one status are kept, counted from the claim.
    /// Defaults to [`retention`](Self::retention). A [gRPC](crate#grpc) error has the status
    /// as which it counts.
    pub fn retention_for(mut self, status: StatusCode, retention: Duration) -> Self {
        self.responses()
            .retention_by_status
            .insert(status, retention);
        self
    }

    /// Sets how long an unknown outcome is shown, counted from the moment at which it
    /// became unknown. Defaults to 7 days.
    pub fn unknown_retention(mut self, retention: Duration) -> Self {
        self.config.unknown_retention = retention;
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
        self.config.max_request_body = bytes;
        self
    }

    /// Sets how long the body of a guarded request may pause. After this time without a
    /// byte the request receives 408, and nothing is claimed. Defaults to 10 s.
    ///
    /// The same happens once the body has arrived for longer than this, and at less than
    /// 1 KiB a second on average. A larger [`max_request_body`](Self::max_request_body)
    /// needs no longer time.
    pub fn request_body_timeout(mut self, timeout: Duration) -> Self {
        self.config.request_body_timeout = timeout;
        self
    }

    /// Sets whether the header `Content-Digest` is verified, and whether larger bodies that
    /// have it stream to the handler. Defaults to [`ContentDigest::Ignore`].
    ///
    /// [`build`](Self::build) refuses [`ContentDigest::Stream`] with
    /// [`Fingerprinting::custom`], whose function needs the body.
    pub fn content_digest(mut self, policy: ContentDigest) -> Self {
        self.config.content_digest = policy;
        self
    }

    /// Sets what happens to a request with a key whose body is over
    /// [`max_request_body`](Self::max_request_body) and does not stream by its
    /// [`content_digest`](Self::content_digest). Defaults to [`OversizedBody::Refuse`].
    ///
    /// [`build`](Self::build) refuses [`OversizedBody::RunUnguarded`] where keys are
    /// required.
    pub fn oversized_body(mut self, policy: OversizedBody) -> Self {
        self.config.oversized_body = policy;
        self
    }

    /// Sets the largest response body that is kept, in bytes. Defaults to 1 MiB.
    ///
    /// A larger one is streamed to the client and leaves a tombstone: retries receive
    /// 409 `response-not-replayable`.
    pub fn max_response_body(mut self, bytes: usize) -> Self {
        self.responses().max_body = bytes;
        self
    }

    /// Sets how long a response body may take to end. After that it is streamed, as one
    /// over [`max_response_body`](Self::max_response_body). Defaults to 5 s.
    pub fn response_body_timeout(mut self, timeout: Duration) -> Self {
        self.responses().body_timeout = timeout;
        self
    }

    /// Sets the media types whose responses are streamed and never kept. Defaults to
    /// `text/event-stream`.
    pub fn streamed_types(mut self, media_types: impl IntoIterator<Item = HeaderValue>) -> Self {
        self.responses().streamed_types = media_types.into_iter().collect();
        self
    }

    /// Sets the lease: the time after which a claim without a heartbeat counts as
    /// abandoned. Defaults to 30 s.
    ///
    /// After a crash, retries receive 409 `request-in-progress` until the lease lapses.
    pub fn lease(mut self, lease: Duration) -> Self {
        self.responses().lease = lease;
        self
    }

    /// Sets how often a running request renews its lease: at most a third of the lease.
    /// Defaults to a third of the lease.
    pub fn heartbeat(mut self, interval: Duration) -> Self {
        self.heartbeat = Some(interval);
        self
    }

    /// Sets how long the lease of a running request is renewed. A handler that hangs
    /// loses it after that. Defaults to 15 minutes.
    pub fn max_run_time(mut self, time: Duration) -> Self {
        self.config.max_run_time = time;
        self
    }

    /// Sets how long one call to the store may take: at most half of the lease, so that
    /// a failed heartbeat can be tried again before the lease lapses. Defaults to 5 s,
    /// or to a third of a lease that is shorter than 15 s.
    pub fn store_timeout(mut self, timeout: Duration) -> Self {
        self.store_timeout = Some(timeout);
        self
    }

    /// Sets how long the layer tries to record an outcome in the background, after the
    /// client was answered. Defaults to 15 minutes.
    pub fn late_recording_timeout(mut self, timeout: Duration) -> Self {
        self.config.late_recording_timeout = timeout;
        self
    }

    /// Sets how many bytes of responses may be held for late recording, over all
    /// requests. Outcomes beyond it stay unknown. Defaults to 64 MiB.
    pub fn max_late_recording_bytes(mut self, bytes: usize) -> Self {
        self.config.max_late_recording_bytes = bytes;
        self
    }

    /// Sets a function that renders refusals. `None` leaves one to the default,
    /// `application/problem+json`. The function is not asked for a request of
    /// [gRPC](crate#grpc), whose client reads no body of HTTP.
    ///
    /// A function that returns `None` alone names a body: `None::<Response<()>>`.
    ///
    /// `Cache-Control: no-store` and `Retry-After` are set in any case. The body is any
    /// [`WholeBody`]. A response with an interim status or 425 is not used, and one with 429
    /// only for a refusal that has this status. Neither is one with trailers or whose body is
    /// not ready as a whole.
    ///
    /// ```
    /// # use axum::{Router, body::Body, http::{Request, StatusCode}, routing::post};
    /// # use tower::ServiceExt;
    /// use axum::{Json, response::IntoResponse};
    /// use serde_json::json;
    /// use tower_idempotency::{IdempotencyLayer, MemoryStore, Scope};
    ///
    /// # #[tokio::main(flavor = "current_thread")]
    /// # async fn main() -> Result<(), Box<dyn std::error::Error>> {
    /// let layer = IdempotencyLayer::required(MemoryStore::new(), |_| Some(Scope::single_tenant()))
    ///     .render(|rejection, _| {
    ///         let error = json!({ "code": rejection.kind().slug(), "message": rejection.detail() });
    ///         Some((rejection.status(), Json(error)).into_response())
    ///     })
    ///     .build()?;
    /// # let app = Router::new().route("/", post(StatusCode::CREATED).layer(layer));
    /// # let response = app.oneshot(Request::post("/").body(Body::empty())?).await?;
    /// # assert_eq!(response.status(), StatusCode::BAD_REQUEST);
    /// # let body = axum::body::to_bytes(response.into_body(), 1000).await?;
    /// # assert!(body.starts_with(b"{\"code\":\"key-missing\""));
    /// # Ok(())
    /// # }
    /// ```
    pub fn render<B: WholeBody>(
        mut self,
        render: impl Fn(&Rejection, &request::Parts) -> Option<Response<B>> + Send + Sync + 'static,
    ) -> Self {
        self.responses().renderer.custom = Some(custom(render));
        self
    }

    /// Sets the beginning of the `type` of a refusal. Defaults to
    /// `urn:tower-idempotency:problem:`.
    pub fn problem_types(mut self, base: impl Into<String>) -> Self {
        self.responses().renderer.types = base.into().into();
        self
    }

    /// Sets the URL of your documentation. Refusals link to it with
    /// `rel="describedby"`. Defaults to none.
    pub fn documentation(mut self, url: impl Into<String>) -> Self {
        self.documentation = Some(url.into());
        self
    }

    /// Encrypts the responses in the store, and refuses those that do not open with 503.
    /// Defaults to none, which stores them readable.
    ///
    /// Every process that shares the store needs the same keys; see the guide on
    /// [sealing](crate::guide::sealing).
    #[cfg(feature = "sealing")]
    pub fn sealing(mut self, sealing: Sealing) -> Self {
        self.responses().sealing = Some(sealing);
        self
    }

    /// Replaces the scope and the key of each record with digests. Defaults to none, which
    /// stores them readable.
    ///
    /// [`Operation::scope`](crate::Operation::scope) and [`key`](crate::Operation::key)
    /// return the readable ones. Every process that shares the store needs the same secret, for
    /// as long as records are kept: under another one, retries run again.
    #[cfg(feature = "sealing")]
    pub fn name_digests(mut self, digests: NameDigests) -> Self {
        self.config.names = Some(digests);
        self
    }

    /// Gives the event of each outcome the field `key_id`, an id of the key that may be
    /// logged. Defaults to none.
    #[cfg(all(feature = "sealing", feature = "tracing"))]
    pub fn log_ids(mut self, ids: LogIds) -> Self {
        self.config.log_ids = Some(ids);
        self
    }

    /// Returns the layer.
    ///
    /// With the feature `metrics`, it describes the crate's metrics to the recorder. One
    /// that is installed later counts them without a description.
    ///
    /// # Errors
    ///
    /// A [`BuildError`] names the first setting that is refused, its limit and its value:
    ///
    /// - a duration that is zero, overflows or contradicts another;
    /// - a limit of zero;
    /// - a safe method;
    /// - bodies that stream, where a function needs them;
    /// - a required key, and bodies that run unguarded;
    /// - a lease shorter than three heartbeats;
    /// - a window of UUIDv7 keys longer than a retention;
    /// - a `Sealing` without the name of a table, or with two keys of one id.
    pub fn build(self) -> Result<IdempotencyLayer<S>, BuildError> {
        let mut config = self.config;
        let documentation = self.documentation.as_deref().map(link).transpose()?;
        let responses = Arc::make_mut(&mut config.responses);
        responses.renderer.documentation = documentation;
        responses.store_timeout = self
            .store_timeout
            .unwrap_or_else(|| LONGEST_STORE_TIMEOUT.min(responses.lease / 3));
        config.heartbeat = self.heartbeat.unwrap_or(responses.lease / 3);
        let current = ("fingerprint", &self.fingerprinting);
        let earlier = self.earlier.iter();
        let earlier = earlier.map(|form| ("earlier_fingerprint", form));
        for (setting, form) in std::iter::once(current).chain(earlier) {
            if let Some(fault) = form.fault() {
                return Err(BuildError::new(setting, fault));
            }
        }
        let streams = matches!(config.content_digest, ContentDigest::Stream { .. });
        if streams && self.fingerprinting.is_custom() {
            return Err(BuildError::new("content_digest", CUSTOM));
        }
        #[cfg(feature = "sealing")]
        if let Some(fault) = responses.sealing.as_ref().and_then(Sealing::fault) {
            return Err(BuildError::new("sealing", fault));
        }
        config.fingerprinter = Fingerprinter::new(self.fingerprinting, self.earlier);
        check(&config)?;
        #[cfg(feature = "metrics")]
        crate::telemetry::metrics::describe();
        Ok(IdempotencyLayer::new(self.store, config))
    }
}

impl<S> fmt::Debug for IdempotencyBuilder<S> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("IdempotencyBuilder").finish_non_exhaustive()
    }
}

/// A setting that is not possible. Its text names the setting, the limit and the value.
#[derive(Clone, Debug, PartialEq, Eq, Error)]
#[error("`{setting}` {reason}")]
pub struct BuildError {
    setting: &'static str,
    reason: String,
}

impl BuildError {
    pub(crate) fn new(setting: &'static str, reason: impl Into<String>) -> Self {
        Self {
            setting,
            reason: reason.into(),
        }
    }

    /// Returns the name of the builder's method.
    #[must_use]
    pub fn setting(&self) -> &'static str {
        self.setting
    }
}

/// Fails with the reason unless the condition of a setting holds.
macro_rules! ensure {
    ($setting:expr => $holds:expr, $($reason:tt)+) => {
        if !$holds {
            return Err(BuildError::new($setting, format!($($reason)+)));
        }
    };
}

/// For the builder of a guard.
#[cfg(feature = "guard")]
impl<S: Store> IdempotencyBuilder<S> {
    pub(crate) fn build_guard(mut self, schema: String) -> Result<IdempotencyLayer<S>, BuildError> {
        let length = schema.len();
        ensure!("schema" => length <= LONGEST_SCHEMA,
            "must have a name of at most {LONGEST_SCHEMA} bytes, got {length}");
        self.responses().schema = Some(schema);
        self.build().map_err(|error| match error.setting {
            "max_response_body" => BuildError::new("max_value", error.reason),
            _ => error,
        })
    }
}

fn check(config: &Config) -> Result<(), BuildError> {
    check_durations(config)?;
    check_limits(config)?;
    if let Some(fault) = config.syntax.fault() {
        return Err(BuildError::new("key_syntax", fault));
    }
    check_window(config)?;
    for method in &config.methods {
        ensure!("methods" => !method.is_safe(), "must be unsafe, got {method}");
    }
    let guards_any = !config.methods.is_empty() || config.guard_if.is_some();
    ensure!("methods" => guards_any, "must name at least one method, got none");
    let (header, marker) = (&config.header, &config.responses.marker);
    ensure!("replay_marker" => marker != header,
        "must differ from `header`, got {marker} for both");
    let mismatch = config.mismatch.as_u16();
    ensure!("mismatch_status" => matches!(mismatch, 400 | 409 | 422),
        "must be 400, 409 or 422, got {mismatch}");
    Ok(())
}

fn check_durations(config: &Config) -> Result<(), BuildError> {
    let (lease, heartbeat, wait) = (config.lease(), config.heartbeat, config.wait);
    let store_timeout = config.store_timeout();
    let others = [
        ("lease", lease),
        ("heartbeat", heartbeat),
        ("request_body_timeout", config.request_body_timeout),
        ("response_body_timeout", config.responses.body_timeout),
        ("store_timeout", store_timeout),
        ("late_recording_timeout", config.late_recording_timeout),
    ];
    let run_time = ("max_run_time", config.max_run_time);
    let authorizer = config.authorizer.as_ref();
    let authorizer = authorizer.map(|authorizer| ("authorize_replay", authorizer.longest()));
    let all = retentions(config).chain([run_time]).chain(others);
    for (setting, time) in all.chain(authorizer) {
        ensure!(setting => time >= SHORTEST, "must be at least {SHORTEST:?}, got {time:?}");
        ensure!(setting => time <= TEN_YEARS, "must be at most 10 years, got {time:?}");
    }
    ensure!("wait" => wait <= TEN_YEARS, "must be at most 10 years, got {wait:?}");
    let three = heartbeat.saturating_mul(3);
    ensure!("lease" => lease >= three,
        "must be at least 3 × `heartbeat` ({three:?}), got {lease:?}");
    ensure!("store_timeout" => lease >= store_timeout.saturating_mul(2),
        "must be at most half of `lease` ({:?}), got {store_timeout:?}", lease / 2);
    for (setting, time) in retentions(config).chain([run_time]) {
        ensure!(setting => time >= lease, "must be at least `lease` ({lease:?}), got {time:?}");
    }
    Ok(())
}

fn retentions(config: &Config) -> impl Iterator<Item = (&'static str, Duration)> {
    let by_status = config.responses.retention_by_status.values();
    [
        ("retention", config.responses.retention),
        ("unknown_retention", config.unknown_retention),
    ]
    .into_iter()
    .chain(by_status.map(|retention| ("retention_for", *retention)))
}

/// A key that outlives its record would run its operation a second time.
fn check_window(config: &Config) -> Result<(), BuildError> {
    let window = config.syntax.window().unwrap_or_default();
    for (setting, retention) in retentions(config) {
        ensure!("key_syntax" => window <= retention,
            "must have a window of UUIDv7 keys of at most `{setting}` ({retention:?}), got {window:?}");
    }
    Ok(())
}

fn check_limits(config: &Config) -> Result<(), BuildError> {
    let (buffered, body) = (config.max_buffered_bytes, config.max_request_body);
    for (setting, limit) in [
        ("max_waiters", config.max_waiters),
        ("max_in_flight", config.max_in_flight),
        ("max_buffered_bytes", buffered),
        ("max_uploads", config.max_uploads),
        ("max_late_recording_bytes", config.max_late_recording_bytes),
    ] {
        ensure!(setting => (1..=LARGEST_LIMIT).contains(&limit),
            "must be 1 to {LARGEST_LIMIT}, got {limit}");
    }
    if let ContentDigest::Stream { max_upload } = config.content_digest {
        ensure!("content_digest" => max_upload >= body as u64,
            "must have a `max_upload` of at least `max_request_body` ({body}), got {max_upload}");
    }
    ensure!("oversized_body" => config.oversized_body == OversizedBody::Refuse
            || config.requirement == Requirement::Optional,
        "must be `Refuse` where keys are required, got `RunUnguarded`");
    if let Some(QuotaSetting::Fixed(quota)) = config.quota {
        ensure!("quota" => quota.records > 0 && quota.bytes > 0,
            "must allow at least 1 record and 1 byte, got {quota:?}");
    }
    ensure!("max_attempts" => config.max_attempts > 0, "must be at least 1, got 0");
    ensure!("max_buffered_bytes" => buffered >= body,
        "must be at least `max_request_body` ({body}), got {buffered}");
    let per_scope = &config.per_scope;
    for (setting, limit, of, max) in [
        (
            "max_waiters_per_scope",
            per_scope.waiters,
            "max_waiters",
            config.max_waiters,
        ),
        (
            "max_in_flight_per_scope",
            per_scope.in_flight,
            "max_in_flight",
            config.max_in_flight,
        ),
        (
            "max_uploads_per_scope",
            per_scope.uploads,
            "max_uploads",
            config.max_uploads,
        ),
        (
            "max_buffered_bytes_per_scope",
            per_scope.buffered_bytes,
            "max_buffered_bytes",
            buffered,
        ),
    ] {
        let limit = limit.unwrap_or(max);
        ensure!(setting => (1..=max).contains(&limit),
            "must be 1 to `{of}` ({max}), got {limit}");
    }
    let of_scope = per_scope.buffered_bytes.unwrap_or(body);
    ensure!("max_buffered_bytes_per_scope" => of_scope >= body,
        "must be at least `max_request_body` ({body}), got {of_scope}");
    // A record's lengths are 32-bit numbers, and stores limit a value to one gibibyte.
    for (setting, limit) in [
        ("max_request_body", body),
        ("max_response_body", config.responses.max_body),
    ] {
        ensure!(setting => limit <= LARGEST_BODY,
            "must be at most {LARGEST_BODY} bytes, got {limit}");
    }
    Ok(())
}

fn link(url: &str) -> Result<HeaderValue, BuildError> {
    let is_sound = !url.is_empty() && !url.contains(['<', '>', ' ']);
    Some(format!("<{url}>; rel=\"describedby\""))
        .filter(|_| is_sound)
        .and_then(|link| HeaderValue::try_from(link).ok())
        .ok_or_else(|| BuildError::new("documentation", format!("must be a URL, got {url:?}")))
}

/// Far below the range of the stores' clocks.
const TEN_YEARS: Duration = Duration::from_secs(10 * 365 * 24 * HOUR);
const HOUR: u64 = 3600;
const CUSTOM: &str =
    "must not be `Stream` with `Fingerprinting::custom`, whose function needs the body";
const MIB: usize = 1 << 20;
const LONGEST_STORE_TIMEOUT: Duration = Duration::from_secs(5);
const SHORTEST: Duration = Duration::from_millis(1);
const LARGEST_BODY: usize = 256 * MIB;
#[cfg(feature = "guard")]
const LONGEST_SCHEMA: usize = u8::MAX as usize;
const LARGEST_LIMIT: usize = u32::MAX as usize >> 3;
