//! Tower middleware that makes a retried request safe.
//!
//! A client sends `POST /payments`, the server charges the card, the connection
//! drops. The client must retry; the server must not do the work twice. With an
//! `Idempotency-Key` on the request and an [`IdempotencyLayer`] around the
//! service,
//!
//! - **the handler runs once** for a key, however many identical requests
//!   arrive, at once or later, on one process or on many that share a store;
//! - **every retry gets the recorded response**: status, headers, body and
//!   trailers, marked `Idempotent-Replayed: true`;
//! - **an unknown outcome is shown, not guessed**: a retry after a crash, a panic or a
//!   response that broke off receives 409 `outcome-unknown` and does not run, unless the
//!   service chose [`Recovery::Rerun`];
//! - **the key belongs to its caller**, and to one request: another request
//!   under the same key gets 422, another caller its own run.
//!
//! It implements the semantics of
//! [draft-ietf-httpapi-idempotency-key-header-07](https://datatracker.ietf.org/doc/html/draft-ietf-httpapi-idempotency-key-header-07).
//!
//! # The way of a request
//!
//! ```text
//! head → body → fingerprint → claim ─┬─ granted ───────→ run → record → answer
//!                                    ├─ completed ─────→ replay
//!                                    ├─ in progress ───→ wait, or 409
//!                                    ├─ unknown ───────→ 409, or run again
//!                                    └─ another request → 422
//! ```
//!
//! The claim is one atomic transition in the [`Store`]. The handler is polled on its
//! caller's task. If the client leaves, the request moves to a task of its own, in the
//! tracing span of its caller, and runs to its end there. A heartbeat keeps its lease, and
//! its response is recorded before it is sent.
//!
//! The [guides](guide) explain the [choices](guide::choosing), the
//! [tests of a handler](guide::testing_your_handler) and [operation](guide::operating).
//!
//! # Example
//!
//! ```
//! use bytes::Bytes;
//! use http::{Request, Response, StatusCode};
//! use http_body_util::Full;
//! use tower::{ServiceBuilder, ServiceExt, service_fn};
//! use tower_idempotency::{IdempotencyLayer, MemoryStore, RequestBody, Scope};
//!
//! # #[tokio::main(flavor = "current_thread")]
//! # async fn main() -> Result<(), Box<dyn std::error::Error>> {
//! #[derive(Clone)]
//! struct Account(String);
//!
//! async fn pay(_: Request<RequestBody<Full<Bytes>>>) -> Result<Response<Full<Bytes>>, std::convert::Infallible> {
//!     let mut response = Response::new(Full::from("paid"));
//!     *response.status_mut() = StatusCode::CREATED;
//!     Ok(response)
//! }
//!
//! let layer = IdempotencyLayer::required(MemoryStore::new(), |parts| {
//!     // Whose key is it? The authentication in front of the layer knows.
//!     Scope::new(&parts.extensions.get::<Account>()?.0)
//! })
//! .build()?;
//! let service = ServiceBuilder::new().layer(layer).service(service_fn(pay));
//!
//! let request = || {
//!     Request::post("/payments")
//!         .extension(Account("acct_42".into()))
//!         .header("idempotency-key", "\"8e03978e-40d5-43dd-bc93-6894a57f9324\"")
//!         .body(Full::from("amount=100"))
//! };
//! let first = service.clone().oneshot(request()?).await?;
//! assert_eq!(first.status(), StatusCode::CREATED);
//! assert!(first.headers().get("idempotent-replayed").is_none());
//!
//! let retry = service.oneshot(request()?).await?;
//! assert_eq!(retry.status(), StatusCode::CREATED);
//! assert_eq!(retry.headers()["idempotent-replayed"], "true");
//! # Ok(())
//! # }
//! ```
//!
//! # Where the layer stands
//!
//! From the outside in: tracing → CORS → compression → timeout → rate limit →
//! authentication → **idempotency** → handler. What stands outside runs for a
//! replay too; what stands inside runs once. A second layer on the same request
//! notices and passes.
//!
//! A layer that catches panics stands **outside**. The idempotency layer catches
//! the panic of a handler itself: it answers 500 `handler-panicked`, and the
//! outcome is unknown. A layer inside turns the panic into an ordinary 500 first.
//! That is the handler's word that it did not do its work, so the key is released
//! and a retry runs the handler again.
//!
//! ```
//! # use std::convert::Infallible;
//! # use bytes::Bytes;
//! # use http::{Request, Response, StatusCode};
//! # use http_body_util::Full;
//! # use tower::{ServiceBuilder, ServiceExt, service_fn};
//! # use tower_idempotency::{IdempotencyLayer, MemoryStore, RequestBody, Scope};
//! use tower_http::catch_panic::CatchPanicLayer;
//!
//! # #[tokio::main(flavor = "current_thread")]
//! # async fn main() -> Result<(), Box<dyn std::error::Error>> {
//! async fn pay(_: Request<RequestBody<Full<Bytes>>>) -> Result<Response<Full<Bytes>>, Infallible> {
//!     panic!("after the card was charged")
//! }
//!
//! let idempotency = IdempotencyLayer::required(MemoryStore::new(), |_| {
//!     Some(Scope::single_tenant())
//! })
//! .build()?;
//! let service = ServiceBuilder::new()
//!     .layer(CatchPanicLayer::new())
//!     .layer(idempotency)
//!     .service(service_fn(pay));
//!
//! let request = || {
//!     Request::post("/payments")
//!         .header("idempotency-key", "8e03978e-40d5-43dd-bc93-6894a57f9324")
//!         .body(Full::<Bytes>::default())
//! };
//! let first = service.clone().oneshot(request()?).await?;
//! assert_eq!(first.status(), StatusCode::INTERNAL_SERVER_ERROR);
//!
//! // The handler does not run again: 409 `outcome-unknown`.
//! let retry = service.oneshot(request()?).await?;
//! assert_eq!(retry.status(), StatusCode::CONFLICT);
//! # Ok(())
//! # }
//! ```
//!
//! - In **axum**, `Router::layer` and `MethodRouter::layer` take it directly;
//!   `route_layer` keeps the 404s of unknown paths out. Inside one `ServiceBuilder`,
//!   directly above a `from_fn` middleware, use `IdempotencyLayer::for_axum`: the layer
//!   itself changes the type of the body.
//! - With **hyper**, wrap the service in `hyper_util::service::TowerToHyperService`.
//! - With **tonic**, guard unary calls only; see [gRPC](#grpc).
//!
//! # gRPC
//!
//! Guard unary calls only: a request is read to its end before it runs. The key comes as
//! metadata, `idempotency-key`. Guard the methods that need one with
//! [`guard_if`](IdempotencyBuilder::guard_if), by the path `/package.Service/Method`. A
//! layer for gRPC-Web stands outside, so that its requests arrive as those of gRPC.
//! Protobuf may encode one message in several ways. Clients resend the same bytes, or the
//! service compares messages with [`Fingerprinting::custom`].
//!
//! A refusal of a request with the media type `application/grpc` is a gRPC error. Its
//! trailer `problem-type` is the type of the problem.
//! [`render`](IdempotencyBuilder::render) is not asked. If the same call may get another
//! answer later, the code is `UNAVAILABLE`, and `grpc-retry-pushback-ms` says when to repeat
//! the call. Otherwise it is `-1`, so that a client's retry policy stops. A caller over its
//! quota or its part of a limit receives `RESOURCE_EXHAUSTED`, with the same pushback.
//!
//! | refusal | code |
//! |---|---|
//! | `request-in-progress`, `body-timeout`, `store-unavailable`, `authorization-unavailable`, `overloaded`, `draining` | `UNAVAILABLE` |
//! | `body-invalid`, if the body broke off | `UNAVAILABLE` |
//! | `outcome-unknown` or `rolled-back`, if repeating the call tells more | `UNAVAILABLE` |
//! | `key-missing`, `key-invalid`, `key-stale`, `key-reused`, `body-invalid`, `digest-invalid`, `digest-mismatch` | `INVALID_ARGUMENT` |
//! | `caller-unknown`, `replay-refused` | `PERMISSION_DENIED` |
//! | `body-too-large`, `quota-exceeded`, `scope-overloaded` | `RESOURCE_EXHAUSTED` |
//! | `outcome-unknown` | `FAILED_PRECONDITION`: an operator has to look |
//! | `response-not-replayable` | `ALREADY_EXISTS` |
//! | other | `INTERNAL` |
//!
//! The HTTP status of a gRPC response is always 200. [`Dispositions`] and
//! [`retention_for`](IdempotencyBuilder::retention_for) decide by the code of an error
//! instead, whether it is in the headers or in the trailers:
//!
//! | the handler's code | counts as | by default |
//! |---|---|---|
//! | `INVALID_ARGUMENT`, `FAILED_PRECONDITION`, `OUT_OF_RANGE` | 400 | recorded |
//! | `PERMISSION_DENIED` | 403 | recorded |
//! | `NOT_FOUND` | 404 | recorded |
//! | `ALREADY_EXISTS` | 409 | recorded |
//! | `UNAUTHENTICATED` | 401 | releases the key for any request |
//! | `UNIMPLEMENTED` | 501 | releases the key for the same request |
//! | `CANCELLED`, `UNKNOWN`, `DEADLINE_EXCEEDED`, `RESOURCE_EXHAUSTED`, `ABORTED`, `INTERNAL`, `UNAVAILABLE`, `DATA_LOSS` | 504 | leaves the outcome unknown |
//!
//! The last ones may come from another service through `?`, and that service may have done
//! its work. A handler that knows that nothing was done calls
//! [`Operation::set_disposition`] with [`Disposition::Release`]; a `tonic::Status` has no
//! extensions.
//!
//! A gRPC handler must not use `begin` and `commit` of a SQL store. A committed response
//! has no trailers, and the client receives it instead of the handler's. Write the
//! operation's [id](Operation::id) in a transaction of your own, and let a [`Reconciler`]
//! look it up.
//!
//! # Browsers
//!
//! Browsers send the key to another origin, and show the layer's headers to a
//! script, only if CORS allows it. Allow `Idempotency-Key`, and expose
//! `Idempotent-Replayed`, `Idempotent-Recorded` and `Retry-After`. The CORS layer
//! stands outside, so that it answers preflight requests itself and adds its
//! headers to refusals and replays too. The layer records no `Access-Control-*`
//! header.
//!
//! ```
//! # use axum::{Router, body::Body, routing::post};
//! # use http::{Request, StatusCode};
//! # use tower::ServiceExt;
//! # use tower_idempotency::{IdempotencyLayer, MemoryStore, Scope};
//! use http::{
//!     HeaderName, HeaderValue, Method,
//!     header::{CONTENT_TYPE, RETRY_AFTER},
//! };
//! use tower_http::cors::CorsLayer;
//!
//! # #[tokio::main(flavor = "current_thread")]
//! # async fn main() -> Result<(), Box<dyn std::error::Error>> {
//! # let idempotency =
//! #     IdempotencyLayer::required(MemoryStore::new(), |_| Some(Scope::single_tenant())).build()?;
//! # let pay = async || StatusCode::CREATED;
//! let cors = CorsLayer::new()
//!     .allow_origin(HeaderValue::from_static("https://shop.example"))
//!     .allow_methods([Method::POST])
//!     .allow_headers([CONTENT_TYPE, HeaderName::from_static("idempotency-key")])
//!     .expose_headers([
//!         RETRY_AFTER,
//!         HeaderName::from_static("idempotent-replayed"),
//!         HeaderName::from_static("idempotent-recorded"),
//!     ]);
//! let app = Router::new()
//!     .route("/payments", post(pay))
//!     .layer(idempotency)
//!     .layer(cors); // the outermost
//! # let request = |method: &str| {
//! #     Request::builder()
//! #         .uri("/payments")
//! #         .method(method)
//! #         .header("origin", "https://shop.example")
//! # };
//! # let preflight = request("OPTIONS")
//! #     .header("access-control-request-method", "POST")
//! #     .header("access-control-request-headers", "idempotency-key");
//! # let response = app.clone().oneshot(preflight.body(Body::empty())?).await?;
//! # assert_eq!(response.status(), StatusCode::OK);
//! # let allowed = response.headers()["access-control-allow-headers"].to_str()?;
//! # assert!(allowed.contains("idempotency-key"));
//! # for (key, status, replayed) in [
//! #     ("key", StatusCode::CREATED, false),
//! #     ("key", StatusCode::CREATED, true),
//! #     ("", StatusCode::BAD_REQUEST, false),
//! # ] {
//! #     let request = request("POST").header("idempotency-key", key);
//! #     let response = app.clone().oneshot(request.body(Body::empty())?).await?;
//! #     assert_eq!(response.status(), status);
//! #     assert_eq!(response.headers().contains_key("idempotent-replayed"), replayed);
//! #     let exposed = response.headers().get_all("access-control-expose-headers");
//! #     assert_eq!(exposed.iter().count(), 1);
//! #     let exposed = response.headers()["access-control-expose-headers"].to_str()?;
//! #     for name in ["idempotent-replayed", "idempotent-recorded", "retry-after"] {
//! #         assert!(exposed.contains(name));
//! #     }
//! #     assert_eq!(response.headers()["access-control-allow-origin"], "https://shop.example");
//! # }
//! # Ok(())
//! # }
//! ```
//!
//! # Logs and metrics
//!
//! Events (feature `tracing`) have the target `tower_idempotency`. No event or
//! metric shows a key, a scope, a token or a body. The field `operation` is the
//! operation's id, the same for all of its attempts.
//!
//! - **Each guarded request** is one event at DEBUG, with the field `outcome`. With the
//!   setting `log_ids` of the feature `sealing`, `key_id` names its key to those who know
//!   the secret.
//! - **Each failure** is a warning (WARN) that says what failed and what follows
//!   from it. `kind` and `error` are the cause with its sources, `hint` is a remedy.
//!   A layer logs at most one warning of a kind in 5 seconds. `suppressed` is the
//!   number that it left out since the last one.
//! - **Each notice** is one event, with the field `notice`: a warning, or an event
//!   at DEBUG if it needs no attention or the warning is left out.
//! - **Each sweep** that removed or changed a record is one event at INFO.
//!
//! A panic is logged without its message, which may quote anything. Rust's panic
//! hook prints it.
//!
//! Metrics (feature `metrics`) are counters with one label each. Each has a unit and a
//! description, which Prometheus shows as HELP. The layer gives them to the recorder when
//! it is built, and the sweeper when it is spawned: install the recorder before.
//!
//! | counter | label | values |
//! |---|---|---|
//! | `idempotency_requests_total` | `outcome` | [`Outcome::name`] |
//! | `idempotency_notices_total` | `notice` | the notices below |
//! | `idempotency_swept_total` | `what` | `removed`, `removed-unknown`, `marked-unknown` |
//! | `idempotency_outbox_events_total` | `what` | `staged`, `published`, `retried`, `dead` |
//!
//! A relay of an outbox sets two gauges with the label `topic`:
//! `idempotency_outbox_lag_events` and `idempotency_outbox_lag_seconds`.
//!
//! | outcome | the request |
//! |---|---|
//! | `recorded`, `released`, `unknown` | ran, and its response was recorded, released the key, or left the outcome unknown |
//! | `streamed` | ran, and its response was streamed to the client |
//! | `unrecorded` | ran, and its response was sent although it could not be recorded yet |
//! | `unguarded` | ran without a claim, since the store could not be asked or its body is too large |
//! | `replayed` | got a recorded response |
//! | `left` | was given up, since its client left |
//! | `unready` | did not run, since the inner service failed before |
//! | a slug of [`RejectionKind::slug`], as `key-reused` | was refused |
//!
//! | notice | what happened | level |
//! |---|---|---|
//! | `client-gone` | a client left before its answer was ready | DEBUG |
//! | `recorded-late` | an outcome was recorded after all, in the background | DEBUG |
//! | `tombstone` | a response that was sent as it came has ended; retries get 409 `response-not-replayable` | DEBUG |
//! | `corrupt` | a record cannot be read; the refusal is a warning with the cause | DEBUG |
//! | `superseded` | a run lost its key to another request or to an operator | WARN |
//! | `gave-up-recording` | an outcome could not be recorded within `late_recording_timeout`, and stays unknown | WARN |
//! | `gave-up-withdrawing` | a claim of a request that did not run could not be taken back | WARN |
//! | `unknown-expired` | a record expired while its outcome was unknown, and its key runs again | WARN |
//! | `stream-broken` | a response that was sent as it came broke off, or ended with a gRPC error; its outcome is unknown | WARN |
//! | `upload-unverified` | a handler answered with success although its upload was not verified | WARN |
//! | `uncommitted` | a handler answered with success, but did not commit its transaction | WARN |
//! | `commit-found`, `abort-found` | COMMIT was not answered, and its record shows that it succeeded, or was rolled back | WARN |
//!
//! # Features
//!
//! | feature | brings | default |
//! |---|---|---|
//! | `axum` | the [`Operation`] extractor, `OrRelease`, `IdempotencyLayer::for_axum`; the paths that clients sent to nested routers of axum 0.8 count | yes |
//! | `tracing` | events for outcomes, failures and notices | yes |
//! | `metrics` | counters of the same, through the `metrics` facade | |
//! | `guard` | [`Guard`]: work that is not HTTP, run once for each name | |
//! | `schedules` | `schedule`: jobs that run once for each hour, day, week or month | |
//! | `schedules-bundled-zones` | the same, with a database of time zones | |
//! | `multipart` | `Fingerprinting::multipart`: forms are compared part by part | |
//! | `sqlite` | `SqliteStore`: durable, one file, nothing to install | |
//! | `postgres` | `PostgresStore`: shared by many processes | |
//! | `redis` | `RedisStore`: a server, Sentinel or a cluster of Redis or Valkey | |
//! | `inbox` | `messages::Inbox`: each message of a broker is processed once, on PostgreSQL and SQLite | |
//! | `outbox` | `messages::{Outbox, Relay}`: events are published if and only if their transaction commits, on PostgreSQL and SQLite | |
//! | `sealing` | `sealing`: encrypted responses, keyed fingerprints, digests of names, and ids of keys for logs | |
//! | `client` | `client`: a key for each call, and retries that are safe, for clients that are Tower services | |
//! | `cache` | `store::CachedStore`: replays from this process's memory, in front of any store | |
//! | `conformance` | the contract of a [`Store`] as tests | |
//! | `test-support` | `test_support`: faulty stores, gates, and operations without a layer, for tests of handlers | |
//!
//! Features only add. Enabling one changes no type, and records that were made
//! without it are compared as before. [`MemoryStore`] is always there. The TLS of
//! sqlx is the application's choice: enable it on its own dependency on `sqlx`.

mod layer;
mod flow;

mod key;
mod fingerprint;
mod operation;
mod response;
mod rejection;
mod policy;

mod body;
mod runtime;
mod telemetry;
mod error;

#[cfg(any(doc, doctest))]
pub mod guide;
pub mod store;
#[cfg(any(feature = "postgres", feature = "sqlite"))]
mod transaction;
#[cfg(feature = "client")]
pub mod client;
#[cfg(all(
    any(feature = "inbox", feature = "outbox"),
    any(feature = "postgres", feature = "sqlite")
))]
pub mod messages;
#[cfg(feature = "guard")]
mod guard;
#[cfg(feature = "sealing")]
mod secret;
#[cfg(feature = "sealing")]
pub mod sealing;
#[cfg(feature = "schedules")]
pub mod schedule;
#[cfg(feature = "conformance")]
pub mod conformance;
#[cfg(feature = "test-support")]
pub mod test_support;
#[cfg(feature = "axum")]
mod axum;

#[cfg(feature = "guard")]
pub use self::guard::{Guard, GuardBuilder, Ran, RunError};
#[cfg(feature = "redis")]
pub use self::store::{RedisStore, RedisStoreBuilder};
#[cfg(feature = "axum")]
pub use self::{
    axum::{NotGuarded, OrRelease},
    layer::axum::{AxumIdempotency, AxumIdempotencyLayer, AxumResponseFuture},
};
pub use self::{
    body::{RequestBody, ResponseBody, whole::WholeBody},
    error::{StoreError, StoreErrorKind},
    fingerprint::{Fingerprinting, RequestPart},
    flow::{config::error::BuildError, drained::Drained, outcome::Outcome},
    key::{Key, KeySyntax, OperationId, Scope},
    layer::{
        IdempotencyLayer, builder::IdempotencyBuilder, future::ResponseFuture, service::Idempotency,
    },
    operation::{
        Operation,
        disposition::{Disposition, Dispositions, KeepFor},
        recovery::{Reconciler, Recovery},
    },
    policy::{
        ContentDigest, Disconnect, OversizedBody, StoreFailure,
        authorizer::{ReplayAuthorizer, ReplayDecision, ReplayedRecord},
        quota::Quota,
    },
    rejection::{Rejection, RejectionKind},
    response::{attributes::Attributes, headers::KeptHeaders},
    store::{DynStore, Fence, MemoryStore, Release, Store, Sweeper},
};
#[cfg(feature = "postgres")]
pub use self::{store::PostgresStore, transaction::postgres::PostgresTransaction};
#[cfg(feature = "sqlite")]
pub use self::{store::SqliteStore, transaction::sqlite::SqliteTransaction};

#[cfg(feature = "__simulate")]
#[doc(hidden)]
pub use self::runtime::backoff::repeatable::seed_jitter;
#[cfg(any(feature = "postgres", feature = "sqlite"))]
pub use self::transaction::{
    OperationTransaction,
    commit::CommitFuture,
    error::CommitError,
    kind::CommitErrorKind,
    response::{CommitResponse, Committed},
};
/// The sqlx that the SQL stores are built on, so that an application names the
/// same version of its types.
#[cfg(any(feature = "postgres", feature = "sqlite"))]
pub use sqlx;

#[cfg(all(doctest, feature = "axum", feature = "postgres"))]
#[doc = include_str!("../README.md")]
struct Readme;
