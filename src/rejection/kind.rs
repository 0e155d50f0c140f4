//! The kinds of refusals: one problem type each.

use http::StatusCode;

/// Each kind is listed once, with its status, its slug and its title.
macro_rules! kinds {
    ($($(#[$doc:meta])* $kind:ident = $status:ident, $slug:literal, $title:literal;)*) => {
        /// The kinds of [`Rejection`](crate::Rejection); each is one problem type.
        #[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
        #[non_exhaustive]
        pub enum RejectionKind {
            $($(#[$doc])* $kind,)*
        }

        impl RejectionKind {
            /// Returns the slug, the status and the title.
            fn problem(self) -> (&'static str, StatusCode, &'static str) {
                match self {
                    $(Self::$kind => ($slug, StatusCode::$status, $title),)*
                }
            }
        }
    };
}

kinds! {
    /// 400: the route requires a key and there is none.
    KeyMissing = BAD_REQUEST, "key-missing", "An idempotency key is required";
    /// 400: the header is not a key.
    KeyInvalid = BAD_REQUEST, "key-invalid", "The idempotency key is invalid";
    /// 400: the UUIDv7 is older than the window, and has no record to answer from.
    KeyStale = BAD_REQUEST, "key-stale", "The idempotency key is too old";
    /// 403: the caller has no scope.
    CallerUnknown = FORBIDDEN, "caller-unknown", "The caller is unknown";
    /// 413: the request's body is larger than this layer or an outer one allows.
    BodyTooLarge = PAYLOAD_TOO_LARGE, "body-too-large", "The request body is too large";
    /// 408: the request's body came more slowly than this layer or an outer one
    /// allows.
    BodyTimeout = REQUEST_TIMEOUT, "body-timeout", "The request body came too slowly";
    /// 400: the request's body could not be read to its end, or has no fingerprint.
    BodyInvalid = BAD_REQUEST, "body-invalid", "The request body cannot be used";
    /// 400: the header `Content-Digest` is malformed.
    DigestInvalid = BAD_REQUEST, "digest-invalid", "The digest of the request body is invalid";
    /// 400: the body is not the one that `Content-Digest` declares.
    DigestMismatch = BAD_REQUEST, "digest-mismatch", "The request body has another digest";
    /// 422, unless set otherwise: the key belongs to another request.
    KeyReused =
        UNPROCESSABLE_ENTITY, "key-reused", "The idempotency key belongs to another request";
    /// 409: the first request with this key is still running.
    RequestInProgress = CONFLICT, "request-in-progress", "The request is still in progress";
    /// 409: the first request may or may not have done its work. 503 for the first request
    /// itself.
    OutcomeUnknown = CONFLICT, "outcome-unknown", "The outcome is unknown";
    /// 409: it is done, but its response was not kept.
    ResponseNotReplayable = CONFLICT, "response-not-replayable", "The response was not kept";
    /// 403: the [`ReplayAuthorizer`](crate::ReplayAuthorizer) refused the replay.
    ReplayRefused = FORBIDDEN, "replay-refused", "The response may not be replayed to this caller";
    /// 503: the [`ReplayAuthorizer`](crate::ReplayAuthorizer) cannot decide.
    AuthorizationUnavailable =
        SERVICE_UNAVAILABLE, "authorization-unavailable", "The replay cannot be authorized now";
    /// 503: the store cannot answer.
    StoreUnavailable =
        SERVICE_UNAVAILABLE, "store-unavailable", "The idempotency store is unavailable";
    /// 503: too many guarded requests are running here.
    Overloaded = SERVICE_UNAVAILABLE, "overloaded", "Too many requests are in progress";
    /// 429: the scope keeps as much in the store as its [`Quota`](crate::Quota) allows.
    QuotaExceeded = TOO_MANY_REQUESTS, "quota-exceeded", "The quota of idempotency keys is used up";
    /// 429: too many guarded requests of one scope are in progress here.
    ScopeOverloaded =
        TOO_MANY_REQUESTS, "scope-overloaded", "Too many requests of this caller are in progress";
    /// 503: this process is shutting down.
    Draining = SERVICE_UNAVAILABLE, "draining", "The service is shutting down";
    /// 500: the handler's transaction was rolled back, though it answered as if
    /// it had been committed.
    RolledBack = INTERNAL_SERVER_ERROR, "rolled-back", "The transaction was rolled back";
    /// 500: the handler panicked; the outcome is unknown.
    HandlerPanicked = INTERNAL_SERVER_ERROR, "handler-panicked", "The handler failed";
    /// 500: a function that the layer was built with panicked (the scope, a key's
    /// validator, the fingerprint or another one), or the body of the request.
    CallbackPanicked =
        INTERNAL_SERVER_ERROR, "callback-panicked", "The request could not be handled";
    /// 500: the layer runs outside a Tokio runtime.
    RuntimeMissing =
        INTERNAL_SERVER_ERROR, "runtime-missing", "The service is not set up correctly";
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
}
