//! For axum applications: extractors, and the handler's word with `?`.
//!
//! ```
//! use axum::{Router, http::StatusCode, response::IntoResponse, routing::post};
//! use tower_idempotency::{IdempotencyLayer, MemoryStore, Operation, Scope, Word};
//!
//! async fn pay(operation: Operation, amount: String) -> Result<String, impl IntoResponse> {
//!     let Ok(amount) = amount.parse::<u32>() else {
//!         // Nothing was done: the corrected request may use the same key.
//!         return Err((StatusCode::BAD_REQUEST, Word::release(), "no amount"));
//!     };
//!     Ok(format!("{amount} charged as {}", operation.derive("payments")))
//! }
//!
//! # fn main() -> Result<(), tower_idempotency::BuildError> {
//! let layer = IdempotencyLayer::required(MemoryStore::new(), |_| Some(Scope::single_tenant()));
//! let app: Router = Router::new().route("/payments", post(pay).layer(layer.build()?));
//! # let _ = app;
//! # Ok(())
//! # }
//! ```

use std::convert::Infallible;

use ::axum::{
    extract::{FromRequestParts, OptionalFromRequestParts},
    response::{IntoResponse, IntoResponseParts, Response, ResponseParts},
};
use http::{StatusCode, request};

use crate::{Operation, Word};

/// 500 if the request is not guarded: the route has no layer, its method is not
/// one of the guarded, or it came without a key. Extract `Option<Operation>`
/// where that is expected.
impl<S: Sync> FromRequestParts<S> for Operation {
    type Rejection = NotGuarded;

    async fn from_request_parts(
        parts: &mut request::Parts,
        _state: &S,
    ) -> Result<Self, Self::Rejection> {
        parts.extensions.get().cloned().ok_or(NotGuarded(()))
    }
}

impl<S: Sync> OptionalFromRequestParts<S> for Operation {
    type Rejection = Infallible;

    async fn from_request_parts(
        parts: &mut request::Parts,
        _state: &S,
    ) -> Result<Option<Self>, Self::Rejection> {
        Ok(parts.extensions.get().cloned())
    }
}

/// Why an [`Operation`] cannot be extracted.
#[derive(Clone, Copy, Debug)]
pub struct NotGuarded(());

impl IntoResponse for NotGuarded {
    fn into_response(self) -> Response {
        (
            StatusCode::INTERNAL_SERVER_ERROR,
            "this request is not guarded by an idempotency layer",
        )
            .into_response()
    }
}

impl std::fmt::Display for NotGuarded {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("this request is not guarded by an idempotency layer")
    }
}

impl std::error::Error for NotGuarded {}

/// `(StatusCode::BAD_REQUEST, Word::release(), "…")` as a handler's response.
impl IntoResponseParts for Word {
    type Error = Infallible;

    fn into_response_parts(self, mut response: ResponseParts) -> Result<ResponseParts, Infallible> {
        response.extensions_mut().insert(self);
        Ok(response)
    }
}

#[cfg(any(feature = "postgres", feature = "sqlite"))]
impl IntoResponse for crate::Committed {
    fn into_response(self) -> Response {
        self.into_http().map(::axum::body::Body::new)
    }
}

/// As [`CommitError::into_http`](crate::CommitError::into_http): logs the error,
/// and shows nothing of what the database said.
#[cfg(any(feature = "postgres", feature = "sqlite"))]
impl IntoResponse for crate::CommitError {
    fn into_response(self) -> Response {
        self.into_http().map(::axum::body::Body::new)
    }
}
