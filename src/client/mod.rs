//! The client's side: one key for all attempts of a call.
//!
//! [`KeyLayer`] gives each request its key, and [`KeyedRetry`] is the policy of a
//! [`RetryLayer`](tower::retry::RetryLayer) that sends it again only where that is safe.
//! Both work over any client that is a Tower service of `http::Request`.
//!
//! **Place `KeyLayer` outermost.** Below the retries, each attempt would have a key of its
//! own, and be done anew. A timeout below the retries bounds one attempt, and one outside
//! of them bounds the call.
//!
//! ```
//! # use std::{convert::Infallible, sync::{Arc, Mutex}, time::Duration};
//! # use http::{Request, Response, StatusCode};
//! # use http_body_util::{Empty, Full};
//! # use bytes::Bytes;
//! use tower::{Service, ServiceBuilder, ServiceExt, retry::RetryLayer, timeout::TimeoutLayer};
//! use tower_idempotency::client::{KeyLayer, KeyedRetry};
//!
//! # #[tokio::main(flavor = "current_thread", start_paused = true)]
//! # async fn main() -> Result<(), tower::BoxError> {
//! # let keys = Arc::new(Mutex::new(Vec::new()));
//! # let seen = Arc::clone(&keys);
//! # let client = tower::service_fn(move |request: Request<Full<Bytes>>| {
//! #     let mut seen = seen.lock().unwrap();
//! #     seen.push(request.headers()["idempotency-key"].clone());
//! #     let status = match seen.len() {
//! #         1 => StatusCode::SERVICE_UNAVAILABLE,
//! #         _ => StatusCode::CREATED,
//! #     };
//! #     let response = Response::builder().status(status).body(Empty::<Bytes>::new()).unwrap();
//! #     std::future::ready(Ok::<_, Infallible>(response))
//! # });
//! let mut client = ServiceBuilder::new()
//!     .layer(KeyLayer::uuid_v7())
//!     .layer(RetryLayer::new(KeyedRetry::new().attempts(5)))
//!     .layer(TimeoutLayer::new(Duration::from_secs(10)))
//!     .service(client);
//!
//! let request = Request::post("/payments").body(Full::from(r#"{"amount":5}"#))?;
//! let response = client.ready().await?.call(request).await?;
//! assert_eq!(response.status(), StatusCode::CREATED);
//! # let keys = keys.lock().unwrap();
//! # assert_eq!((keys.len(), &keys[0]), (2, &keys[1]));
//! # Ok(())
//! # }
//! ```
//!
//! # A crash of the client
//!
//! The key that [`KeyLayer`] makes is forgotten with the process. If the call must survive
//! it, insert an [`OperationKey`] into the request's extensions that comes from what
//! survives: the id of the order that is paid, for one.
//!
//! # Hedging
//!
//! Do not send a second request before the first is answered, as `tower::hedge` does. The
//! service answers the second one with 409 while the first runs, and hedging takes the
//! first answer.

mod key_layer;
mod operation_key;
mod retry;

pub use self::{
    key_layer::{KeyLayer, Keyed},
    operation_key::{InvalidKeyError, OperationKey},
    retry::{CloneBody, KeyedRetry},
};
