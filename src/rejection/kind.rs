//! The kinds of refusals: one problem type each.

use http::StatusCode;

/// The kinds of [`Rejection`](crate::Rejection); each is one problem type.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum RejectionKind {
    /// 400: the route requires a key and there is none.
    KeyMissing,
    /// 400: the header is not a key.
    KeyInvalid,
    /// 400: the UUIDv7 is older than the window, and has no record to answer from.
    KeyStale,
    /// 403: the caller has no scope.
    CallerUnknown,
    /// 413: the request's body is larger than this layer or an outer one allows.
    BodyTooLarge,
    /// 408: the request's body came more slowly than this layer or an outer one
    /// allows.
    BodyTimeout,
    /// 400: the request's body could not be read to its end, or has no fingerprint.
    BodyInvalid,
    /// 422, unless set otherwise: the key belongs to another request.
    KeyReused,
    /// 409: the first request with this key is still running.
    RequestInProgress,
    /// 409: the first request may or may not have done its work. 503 for the first request
    /// itself.
    OutcomeUnknown,
    /// 409: it is done, but its response was not kept.
    ResponseNotReplayable,
    /// 503: the store cannot answer.
    StoreUnavailable,
    /// 503: too many guarded requests are running here.
    Overloaded,
    /// 503: this process is shutting down.
    Draining,
    /// 500: the handler's transaction was rolled back, though it answered as if
    /// it had been committed.
    RolledBack,
    /// 500: the handler panicked; the outcome is unknown.
    HandlerPanicked,
    /// 500: a function that the layer was built with panicked: the scope, a key's
    /// validator, the fingerprint or another one.
    CallbackPanicked,
    /// 500: the layer runs outside a Tokio runtime.
    RuntimeMissing,
}

impl RejectionKind {
    /// Returns the last segment of the problem type, which is the kind's name in
    /// metrics and logs too.
    #[must_use]
    pub fn slug(self) -> &'static str {
        self.problem().0
    }

    pub(super) fn status(self) -> StatusCode {
        self.problem().1
    }

    pub(super) fn title(self) -> &'static str {
        self.problem().2
    }

    /// Returns the slug, the status and the title.
    fn problem(self) -> (&'static str, StatusCode, &'static str) {
        match self {
            Self::KeyMissing => (
                "key-missing",
                StatusCode::BAD_REQUEST,
                "An idempotency key is required",
            ),
            Self::KeyInvalid => (
                "key-invalid",
                StatusCode::BAD_REQUEST,
                "The idempotency key is invalid",
            ),
            Self::KeyStale => (
                "key-stale",
                StatusCode::BAD_REQUEST,
                "The idempotency key is too old",
            ),
            Self::CallerUnknown => (
                "caller-unknown",
                StatusCode::FORBIDDEN,
                "The caller is unknown",
            ),
            Self::BodyTooLarge => (
                "body-too-large",
                StatusCode::PAYLOAD_TOO_LARGE,
                "The request body is too large",
            ),
            Self::BodyTimeout => (
                "body-timeout",
                StatusCode::REQUEST_TIMEOUT,
                "The request body came too slowly",
            ),
            Self::BodyInvalid => (
                "body-invalid",
                StatusCode::BAD_REQUEST,
                "The request body cannot be used",
            ),
            Self::KeyReused => (
                "key-reused",
                StatusCode::UNPROCESSABLE_ENTITY,
                "The idempotency key belongs to another request",
            ),
            Self::RequestInProgress => (
                "request-in-progress",
                StatusCode::CONFLICT,
                "The request is still in progress",
            ),
            Self::OutcomeUnknown => (
                "outcome-unknown",
                StatusCode::CONFLICT,
                "The outcome is unknown",
            ),
            Self::ResponseNotReplayable => (
                "response-not-replayable",
                StatusCode::CONFLICT,
                "The response was not kept",
            ),
            Self::StoreUnavailable => (
                "store-unavailable",
                StatusCode::SERVICE_UNAVAILABLE,
                "The idempotency store is unavailable",
            ),
            Self::Overloaded => (
                "overloaded",
                StatusCode::SERVICE_UNAVAILABLE,
                "Too many requests are in progress",
            ),
            Self::Draining => (
                "draining",
                StatusCode::SERVICE_UNAVAILABLE,
                "The service is shutting down",
            ),
            Self::RolledBack => (
                "rolled-back",
                StatusCode::INTERNAL_SERVER_ERROR,
                "The transaction was rolled back",
            ),
            Self::HandlerPanicked => (
                "handler-panicked",
                StatusCode::INTERNAL_SERVER_ERROR,
                "The handler failed",
            ),
            Self::CallbackPanicked => (
                "callback-panicked",
                StatusCode::INTERNAL_SERVER_ERROR,
                "The request could not be handled",
            ),
            Self::RuntimeMissing => (
                "runtime-missing",
                StatusCode::INTERNAL_SERVER_ERROR,
                "The service is not set up correctly",
            ),
        }
    }
}
