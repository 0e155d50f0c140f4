//! The layer and its settings.

use std::{collections::HashMap, fmt, sync::Arc, time::Duration};

use bytes::Bytes;
use http::{HeaderName, HeaderValue, Method, Response, StatusCode, request};
use tower::Layer;

use crate::{
    BuildError, Disconnect, Dispositions, Fingerprinting, Idempotency, KeptHeaders, KeySyntax,
    Recovery, Rejection, Scope, Store, StoreFailure,
    config::{
        ATTEMPTS, BODY_LIMIT, BUFFERED_BYTES, Config, IN_FLIGHT, KEY_HEADER, LATE_BYTES, LATE_TIME,
        LEASE, LONGEST_RUN, MARKER, REQUEST_TIME, RESPONSE_TIME, RETENTION, STORE_TIMEOUT, ScopeFn,
        UNKNOWN_RETENTION, WAITERS,
    },
    fingerprint::Fingerprinter,
    host::Host,
    log::Warnings,
    policy::Requirement,
    rejection::Renderer,
};

/// Makes retries of a request safe: the work is done once, and its response is
/// replayed.
///
/// See the [crate's documentation](crate) for what is promised. Clones share
/// their settings, their waiters and their running requests; so do all services
/// that one layer wraps.
///
/// ```
/// # use axum::{Router, body::Body, http::{Request, StatusCode}, routing::post};
/// # use tower::ServiceExt;
/// use tower_idempotency::{IdempotencyLayer, MemoryStore, Scope};
///
/// # #[tokio::main(flavor = "current_thread")]
/// # async fn main() -> Result<(), Box<dyn std::error::Error>> {
/// let layer = IdempotencyLayer::required(MemoryStore::new(), |parts| {
///     Scope::new(parts.headers.get("x-account")?.to_str().ok()?)
/// })
/// .build()?;
/// # let app = Router::new().route("/", post(StatusCode::CREATED).layer(layer));
/// # let request = || Request::post("/").header("idempotency-key", "k");
/// # let known = request().header("x-account", "acct_42").body(Body::empty())?;
/// # assert_eq!(app.clone().oneshot(known).await?.status(), StatusCode::CREATED);
/// # let unknown = request().body(Body::empty())?;
/// # assert_eq!(app.oneshot(unknown).await?.status(), StatusCode::FORBIDDEN);
/// # Ok(())
/// # }
/// ```
pub struct IdempotencyLayer<S> {
    host: Arc<Host<S>>,
}

impl<S: Store> IdempotencyLayer<S> {
    /// Guards requests and refuses those without a key with 400 `key-missing`.
    ///
    /// `scope` says whose key it is, from what an outer layer found out about
    /// the caller; `None` refuses the request with 403 `caller-unknown`. Take
    /// the caller's identity, never its credential: a token that is refreshed
    /// between two tries would run the operation twice.
    ///
    /// Nested routers shorten the path. With the feature `axum`, the original one
    /// is read from the `OriginalUri` of axum 0.8. Without the feature, and with
    /// another version of axum, the layer must stand outside of nested routers; see
    /// [`Fingerprinting`](Fingerprinting#path).
    pub fn required(
        store: S,
        scope: impl Fn(&request::Parts) -> Option<Scope> + Send + Sync + 'static,
    ) -> IdempotencyBuilder<S> {
        IdempotencyBuilder::new(store, Arc::new(scope), Requirement::Required)
    }

    /// Guards requests that have a key; those without one pass untouched.
    ///
    /// Otherwise as [`required`](Self::required).
    pub fn optional(
        store: S,
        scope: impl Fn(&request::Parts) -> Option<Scope> + Send + Sync + 'static,
    ) -> IdempotencyBuilder<S> {
        IdempotencyBuilder::new(store, Arc::new(scope), Requirement::Optional)
    }

    /// Refuses new guarded requests with 503, and waits until those that run
    /// have ended and are recorded, for up to `grace` (25 s fits the 30 s that
    /// most orchestrators give).
    ///
    /// A request whose body is still arriving has not run: it is refused once its
    /// body is complete.
    ///
    /// Call it after the server has stopped accepting connections, and before
    /// the runtime ends: a request whose client has left still runs on a task
    /// that the server does not wait for. What has not ended by then is left to
    /// its lease. Dropping the future stops the waiting alone.
    ///
    /// The server's own graceful shutdown and `drain` share one deadline: each
    /// with a time of its own may take twice as long as the orchestrator waits.
    ///
    /// ```
    /// # use std::future::IntoFuture;
    /// # use axum::{Router, http::StatusCode, routing::post};
    /// # use tower_idempotency::{IdempotencyLayer, MemoryStore, Scope};
    /// use std::time::Duration;
    /// use tokio::{net::TcpListener, sync::oneshot, time::{Instant, timeout_at}};
    ///
    /// # #[tokio::main(flavor = "current_thread")]
    /// # async fn main() -> Result<(), Box<dyn std::error::Error>> {
    /// # let idempotency =
    /// #     IdempotencyLayer::required(MemoryStore::new(), |_| Some(Scope::single_tenant())).build()?;
    /// # let app = Router::new().route("/", post(StatusCode::CREATED).layer(idempotency.clone()));
    /// # let (sent, stop_signal) = oneshot::channel::<()>();
    /// let listener = TcpListener::bind("127.0.0.1:0").await?;
    /// # let address = listener.local_addr()?;
    /// let (stop, stopped) = oneshot::channel::<()>();
    /// let server = axum::serve(listener, app).with_graceful_shutdown(async {
    ///     let _ = stopped.await;
    /// });
    /// let server = tokio::spawn(server.into_future());
    /// # use tokio::io::{AsyncReadExt, AsyncWriteExt};
    /// # let mut client = tokio::net::TcpStream::connect(address).await?;
    /// # client.write_all(b"POST / HTTP/1.1\r\nhost: localhost\r\nidempotency-key: k\r\n\r\n").await?;
    /// # let mut status = [0; 12];
    /// # client.read_exact(&mut status).await?;
    /// # assert_eq!(&status, b"HTTP/1.1 201");
    /// # drop((sent, client));
    ///
    /// stop_signal.await.ok(); // Ctrl-C or SIGTERM
    /// drop(stop);
    /// let deadline = Instant::now() + Duration::from_secs(25);
    /// let _ = timeout_at(deadline, server).await;
    /// let drained = idempotency.drain(deadline - Instant::now()).await;
    /// assert_eq!(drained.left(), 0);
    /// # Ok(())
    /// # }
    /// ```
    pub async fn drain(&self, grace: Duration) -> Drained {
        Drained {
            left: self.host.drain(grace).await,
        }
    }

    /// The store that the layer was built with.
    #[must_use]
    pub fn store(&self) -> &S {
        &self.host.store
    }
}

impl<I, S> Layer<I> for IdempotencyLayer<S> {
    type Service = Idempotency<I, S>;

    fn layer(&self, inner: I) -> Self::Service {
        Idempotency::new(inner, Arc::clone(&self.host))
    }
}

impl<S> Clone for IdempotencyLayer<S> {
    fn clone(&self) -> Self {
        Self {
            host: Arc::clone(&self.host),
        }
    }
}

impl<S> fmt::Debug for IdempotencyLayer<S> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("IdempotencyLayer").finish_non_exhaustive()
    }
}

/// What [`IdempotencyLayer::drain`] left.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[must_use]
pub struct Drained {
    left: usize,
}

impl Drained {
    /// How many requests were still running, and how many outcomes and withdrawals
    /// were still to be written; their keys are left to their leases.
    #[must_use]
    pub fn left(&self) -> usize {
        self.left
    }
}

/// The settings of an [`IdempotencyLayer`] to be.
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
                header: KEY_HEADER,
                syntax: KeySyntax::compat(),
                methods: vec![Method::POST, Method::PATCH],
                guard_if: None,
                fingerprinter: Fingerprinter::new(Fingerprinting::bytes(), Vec::new()),
                mismatch: StatusCode::UNPROCESSABLE_ENTITY,
                wait: Duration::ZERO,
                waiters: WAITERS,
                in_flight: IN_FLIGHT,
                buffered_bytes: BUFFERED_BYTES,
                dispositions: Dispositions::standard(),
                recovery: Recovery::Refuse,
                attempts: ATTEMPTS,
                store_failure: StoreFailure::Refuse,
                disconnect: Disconnect::Finish,
                marker: MARKER,
                kept_headers: KeptHeaders::all_but_transient(),
                retention: RETENTION,
                retention_by_status: HashMap::new(),
                unknown_retention: UNKNOWN_RETENTION,
                request_limit: BODY_LIMIT,
                request_time: REQUEST_TIME,
                response_limit: BODY_LIMIT,
                response_time: RESPONSE_TIME,
                live_types: vec![HeaderValue::from_static("text/event-stream")],
                lease: LEASE,
                heartbeat: LEASE / 3,
                longest_run: LONGEST_RUN,
                store_timeout: STORE_TIMEOUT,
                late_time: LATE_TIME,
                late_bytes: LATE_BYTES,
                renderer: Renderer::standard(),
                warnings: Warnings::default(),
            },
        }
    }

    /// The header that carries the key. Defaults to `Idempotency-Key`.
    pub fn header(mut self, name: HeaderName) -> Self {
        self.config.header = name;
        self
    }

    /// Which keys are accepted. Defaults to [`KeySyntax::compat`].
    pub fn key_syntax(mut self, syntax: KeySyntax) -> Self {
        self.config.syntax = syntax;
        self
    }

    /// The methods that are guarded; all others pass untouched, even with a
    /// malformed key. Safe methods are refused when the layer is built.
    /// Defaults to POST and PATCH.
    pub fn methods(mut self, methods: impl IntoIterator<Item = Method>) -> Self {
        self.config.methods = methods.into_iter().collect();
        self
    }

    /// Decides for each request with an unsafe method whether it is guarded, in
    /// place of [`methods`](Self::methods). Defaults to none.
    pub fn guard_if(
        mut self,
        guards: impl Fn(&request::Parts) -> bool + Send + Sync + 'static,
    ) -> Self {
        self.config.guard_if = Some(Arc::new(guards));
        self
    }

    /// What makes two requests the same request. Defaults to
    /// [`Fingerprinting::bytes`].
    pub fn fingerprint(mut self, fingerprinting: Fingerprinting) -> Self {
        self.fingerprinting = fingerprinting;
        self
    }

    /// A form of fingerprint that was in force before, so that records made
    /// under it can still be compared. Without it, their retries get 503 until
    /// they expire. Defaults to the plain forms of [`Fingerprinting`], which
    /// are always understood.
    pub fn earlier_fingerprint(mut self, fingerprinting: Fingerprinting) -> Self {
        self.earlier.push(fingerprinting);
        self
    }

    /// The status for a used key with another request: 422, 400 or 409.
    /// Defaults to 422.
    pub fn mismatch_status(mut self, status: StatusCode) -> Self {
        self.config.mismatch = status;
        self
    }

    /// How long a request waits for another one with the same key to end,
    /// before it is answered 409. A waiter holds no connection to the store and
    /// no readiness of the inner service. Zero does not wait. Defaults to zero.
    pub fn wait(mut self, bound: Duration) -> Self {
        self.config.wait = bound;
        self
    }

    /// How many requests may wait at once; further ones get 409 at once.
    /// Defaults to 1,000.
    pub fn waiters(mut self, requests: usize) -> Self {
        self.config.waiters = requests;
        self
    }

    /// How many guarded requests may be claiming, waiting or running at once,
    /// those whose client has left included; further ones get 503. As many late
    /// writes may be under way beside them. Defaults to 4,096.
    pub fn in_flight(mut self, requests: usize) -> Self {
        self.config.in_flight = requests;
        self
    }

    /// How many bytes of request bodies may be held at once, over all guarded
    /// requests whose handler has not started; further ones get 503. Defaults to
    /// 256 MiB.
    pub fn buffered_bytes(mut self, bytes: usize) -> Self {
        self.config.buffered_bytes = bytes;
        self
    }

    /// Which responses are recorded. Defaults to [`Dispositions::standard`].
    pub fn dispositions(mut self, dispositions: Dispositions) -> Self {
        self.config.dispositions = dispositions;
        self
    }

    /// What a retry gets when the outcome is unknown. Defaults to
    /// [`Recovery::Refuse`].
    pub fn recovery(mut self, recovery: Recovery) -> Self {
        self.config.recovery = recovery;
        self
    }

    /// How often an operation may be started in a row without an answer, before
    /// its outcome is unknown even under [`Recovery::Rerun`]. After an answer
    /// that released the key, a row goes on from one where there was one before.
    /// Defaults to 5.
    pub fn attempts(mut self, attempts: u32) -> Self {
        self.config.attempts = attempts;
        self
    }

    /// What happens when the store cannot answer a claim. Defaults to
    /// [`StoreFailure::Refuse`].
    pub fn store_failure(mut self, policy: StoreFailure) -> Self {
        self.config.store_failure = policy;
        self
    }

    /// What happens to a running handler when its client leaves. Defaults to
    /// [`Disconnect::Finish`].
    pub fn disconnect(mut self, policy: Disconnect) -> Self {
        self.config.disconnect = policy;
        self
    }

    /// The header that marks a replay, with the value `true`. Defaults to
    /// `Idempotent-Replayed`.
    pub fn replay_marker(mut self, name: HeaderName) -> Self {
        self.config.marker = name;
        self
    }

    /// Which headers of a response are kept. Defaults to
    /// [`KeptHeaders::all_but_transient`].
    pub fn kept_headers(mut self, headers: KeptHeaders) -> Self {
        self.config.kept_headers = headers;
        self
    }

    /// How long a record is kept, counted from its claim; a response is kept
    /// for one lease from its recording at least. A retry after that runs
    /// again. Defaults to 24 hours.
    pub fn retention(mut self, retention: Duration) -> Self {
        self.config.retention = retention;
        self
    }

    /// How long responses of one status are kept, counted from the claim.
    /// Defaults to [`retention`](Self::retention).
    pub fn retention_for(mut self, status: StatusCode, retention: Duration) -> Self {
        self.config.retention_by_status.insert(status, retention);
        self
    }

    /// How long an unknown outcome is shown, counted from when it became
    /// unknown. Defaults to 7 days.
    pub fn unknown_retention(mut self, retention: Duration) -> Self {
        self.config.unknown_retention = retention;
        self
    }

    /// The largest body of a guarded request, in bytes; a larger one gets 413
    /// before anything is claimed. Defaults to 1 MiB.
    ///
    /// A client that writes its whole request before it reads sees the refusal
    /// too, this one and those for a faulty key or caller. The layer answers at
    /// once, and reads and discards the rest of the body meanwhile: up to 64 MiB
    /// and 10 s of it, for 256 requests at once. It reads nothing of a client
    /// that sent `Expect: 100-continue` and was refused from its head. Of a body that
    /// another limit outside of the layer refuses, the layer does not learn the
    /// length: only the 10 s bound how much of it is read.
    pub fn request_limit(mut self, bytes: usize) -> Self {
        self.config.request_limit = bytes;
        self
    }

    /// How long the body of a guarded request may pause. After this time without
    /// a byte the request gets 408, and nothing is claimed. The same happens once
    /// the body has arrived for longer than this, and at less than 1 KiB a second
    /// on average. A larger [`request_limit`](Self::request_limit) needs no longer
    /// time. Defaults to 10 s.
    pub fn request_time(mut self, within: Duration) -> Self {
        self.config.request_time = within;
        self
    }

    /// The largest response body that is kept, in bytes. A larger one goes out
    /// as it comes and leaves a tombstone: retries get 409
    /// `response-not-replayable`. Defaults to 1 MiB.
    pub fn response_limit(mut self, bytes: usize) -> Self {
        self.config.response_limit = bytes;
        self
    }

    /// How long a response body may take to end; then it goes out as it comes,
    /// as one over [`response_limit`](Self::response_limit). Defaults to 5 s.
    pub fn response_time(mut self, within: Duration) -> Self {
        self.config.response_time = within;
        self
    }

    /// A media type whose responses go out as they come and are never kept.
    /// Defaults to `text/event-stream` alone.
    pub fn live_type(mut self, media_type: HeaderValue) -> Self {
        self.config.live_types.push(media_type);
        self
    }

    /// How long a claim lives without a heartbeat: after a crash, retries are
    /// told "in progress" for so long. Defaults to 30 s.
    pub fn lease(mut self, lease: Duration) -> Self {
        self.config.lease = lease;
        self
    }

    /// How often a running request extends its lease; at most a third of the
    /// lease. Defaults to a third of the lease.
    pub fn heartbeat(mut self, interval: Duration) -> Self {
        self.heartbeat = Some(interval);
        self
    }

    /// For how long a running request's lease is extended; a handler that hangs
    /// loses it then. Defaults to 15 minutes.
    pub fn longest_run(mut self, bound: Duration) -> Self {
        self.config.longest_run = bound;
        self
    }

    /// How long one call to the store may take: at most half of the lease, so that
    /// a heartbeat that fails can be tried again before the lease lapses. Defaults
    /// to 5 s, or to a third of a lease that is shorter than 15 s.
    pub fn store_timeout(mut self, bound: Duration) -> Self {
        self.store_timeout = Some(bound);
        self
    }

    /// For how long, and with how many bytes in all, responses that could not
    /// be recorded are tried again in the background. Defaults to 15 minutes
    /// and 64 MiB.
    pub fn late_recording(mut self, within: Duration, bytes: usize) -> Self {
        self.config.late_time = within;
        self.config.late_bytes = bytes;
        self
    }

    /// Renders refusals; `None` leaves one to the default. `Cache-Control:
    /// no-store` and `Retry-After` are set in any case; an answer with an
    /// interim status, 425 or 429 is not used. Defaults to
    /// `application/problem+json`.
    pub fn render(
        mut self,
        render: impl Fn(&Rejection) -> Option<Response<Bytes>> + Send + Sync + 'static,
    ) -> Self {
        self.config.renderer.custom = Some(Arc::new(render));
        self
    }

    /// What the `type` of a refusal begins with. Defaults to
    /// `urn:tower-idempotency:problem:`.
    pub fn problem_types(mut self, base: impl Into<String>) -> Self {
        self.config.renderer.types = base.into();
        self
    }

    /// The address of your documentation; refusals link to it with
    /// `rel="describedby"`. Defaults to none.
    pub fn documentation(mut self, url: impl Into<String>) -> Self {
        self.documentation = Some(url.into());
        self
    }

    /// The layer.
    ///
    /// # Errors
    ///
    /// A [`BuildError`] that names the first setting that cannot be: a zero,
    /// overflowing or contradictory duration, a lease shorter than three
    /// heartbeats, a window of UUIDv7 keys longer than a retention, a safe method,
    /// an empty bound.
    pub fn build(self) -> Result<IdempotencyLayer<S>, BuildError> {
        let mut config = self.config;
        config.heartbeat = self.heartbeat.unwrap_or(config.lease / 3);
        config.store_timeout = self
            .store_timeout
            .unwrap_or_else(|| STORE_TIMEOUT.min(config.lease / 3));
        for (setting, form) in std::iter::once(("fingerprint", &self.fingerprinting)).chain(
            self.earlier
                .iter()
                .map(|form| ("earlier_fingerprint", form)),
        ) {
            if let Some(fault) = form.fault() {
                return Err(BuildError::new(setting, fault));
            }
        }
        config.fingerprinter = Fingerprinter::new(self.fingerprinting, self.earlier);
        config.renderer.documentation = self.documentation.as_deref().map(link).transpose()?;
        config.check()?;
        Ok(IdempotencyLayer {
            host: Arc::new(Host::new(self.store, config)),
        })
    }
}

fn link(url: &str) -> Result<HeaderValue, BuildError> {
    let sound = !url.is_empty() && !url.contains(['<', '>', ' ']);
    Some(format!("<{url}>; rel=\"describedby\""))
        .filter(|_| sound)
        .and_then(|link| HeaderValue::try_from(link).ok())
        .ok_or_else(|| BuildError::new("documentation", "it is not a URL"))
}

impl<S> fmt::Debug for IdempotencyBuilder<S> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("IdempotencyBuilder").finish_non_exhaustive()
    }
}
