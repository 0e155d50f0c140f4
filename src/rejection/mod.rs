//! Why a request was refused, as problem details (RFC 9457).

mod exceeded;
mod grpc;
mod kind;
mod render;

use std::{borrow::Cow, sync::Arc, time::Duration};

use http::{HeaderName, StatusCode};
use serde_json::json;

pub(crate) use self::exceeded::{Numbers, QuotaExceeded};
pub use self::kind::RejectionKind;
pub(crate) use self::render::{Renderer, RequestHead, custom};

use crate::{
    body::{error::BodyError, upload::UploadFault},
    error::{StoreError, StoreErrorKind},
    fingerprint::{BodyFault, Mismatch, RequestPart},
    key::{KeyFault, OperationId},
    telemetry::log::Warnings,
};

/// The reason for a response of the layer instead of the handler's. A refusal is
/// never recorded.
///
/// Its text names headers, settings and limits, and shows nothing of the key,
/// the stored request or the stored response.
#[derive(Clone, Debug)]
pub struct Rejection {
    kind: RejectionKind,
    status: StatusCode,
    detail: Cow<'static, str>,
    retry_after: Option<u64>,
    operation: Option<OperationId>,
    /// What an operator finds in the log, where the text for the client would say
    /// too much.
    warning: Option<&'static str>,
    cause: Option<Box<StoreError>>,
    exceeded: Option<Box<Numbers>>,
    mismatch: Option<Box<Mismatch>>,
    /// What the problem type begins with.
    types: Option<Arc<str>>,
}

/// Constructors of refusals without parameters.
macro_rules! refusals {
    ($(
        $(#[$doc:meta])*
        $name:ident: $kind:ident $detail:literal $(.$setter:ident($value:expr))*;
    )*) => {
        $(
            $(#[$doc])*
            pub(crate) fn $name() -> Self {
                Self::new(RejectionKind::$kind, $detail)$(.$setter($value))*
            }
        )*
    };
}

impl Rejection {
    refusals! {
        caller_unknown: CallerUnknown
            "The key cannot be told apart from other callers' keys, because this request names no caller. Nothing ran."
            .warning("scope function returned None, request refused with 403: authentication must stand \
             outside of the idempotency layer, and leave what the function reads in the request");

        outcome_unknown: OutcomeUnknown
            "The first request with this key ended without an answer, and it is not known whether it did its work. It is not run again; look up its result, or ask the operator. Sending the same key again is safe and changes nothing.";

        /// As [`outcome_unknown`](Self::outcome_unknown), where the next request asks again.
        outcome_not_found_out: OutcomeUnknown
            "The first request with this key ended without an answer, and it could not be found out yet whether it did its work. Send the same request with the same key again later."
            .retry_after(1);

        rolled_back: RolledBack
            "The transaction of this request was rolled back: nothing was done. The same request may be sent again with the same key."
            .retry_after(1)
            .warning("transaction rolled back although the handler answered with success, request answered with 500: return the error of `commit`");

        rolled_back_after_effects: RolledBack
            "The transaction of this request was not committed, but the request may have done other work. It is not run again; look up its result, or ask the operator. Sending the same key again is safe and changes nothing."
            .warning("transaction rolled back although the handler answered with success, request answered with 500: its outcome is unknown, because the handler may have done other work");

        not_replayable: ResponseNotReplayable
            "The first request with this key did its work, but its response was not kept. It is not run again; look up its result.";

        digest_invalid: DigestInvalid
            "The header Content-Digest is not a dictionary with SHA-256 or SHA-512 digests as byte sequences. Correct it and send the request again; nothing ran, and the key is unused.";

        wrong_digest: DigestMismatch
            "The request body is not the one that the header Content-Digest declares. Nothing ran, and this request did not use the key.";

        replay_refused: ReplayRefused
            "This caller may not receive the response to an earlier request with this key. Nothing ran.";

        authorization_unavailable: AuthorizationUnavailable
            "It cannot be decided at the moment whether this caller may receive the response to an earlier request with this key. Nothing ran; send the same request with the same key again later."
            .retry_after(1)
            .warning("`ReplayAuthorizer` returned `Unavailable`, request refused with 503: find out why the hook cannot decide");

        authorization_timed_out: AuthorizationUnavailable
            "It cannot be decided at the moment whether this caller may receive the response to an earlier request with this key. Nothing ran; send the same request with the same key again later."
            .retry_after(1)
            .warning("`ReplayAuthorizer` took longer than its `timeout`, request refused with 503: find out what the hook waits for, or raise `ReplayAuthorizer::timeout`");

        authorizer_panicked: CallbackPanicked
            "The service failed before it could answer. This request did not run; sending the same key again is safe."
            .warning("`ReplayAuthorizer` panicked, request refused with 500: mend the hook");

        scheme_unknown: StoreUnavailable
            "The record of this key was made with other settings, so it cannot be told here whether it is the same request. Nothing ran. Send the same request with the same key again later."
            .retry_after(1)
            .warning("record made with another fingerprint setting or by a `Guard`, request refused with 503: name that setting with `earlier_fingerprint`, or enable the feature that it needs, `axum` or `multipart`");

        contended: StoreUnavailable
            "Too many requests with this key arrived at once; this one did not run. Send it again with the same key."
            .retry_after(1)
            .warning("claim failed, request refused with 503: the record of its key changed during each attempt");

        draining: Draining
            "This process is shutting down. This request did not run; send it again with the same key."
            .retry_after(1)
            .warning("request refused with 503: `drain` was called, and this process accepts no more requests with a key");

        handler_panicked: HandlerPanicked
            "The request failed in the middle of its work, and it is not known how much of it was done. Sending the same key again is safe."
            .warning("handler or response body panicked, request answered with 500: its outcome is unknown");

        runtime_missing: RuntimeMissing
            "The idempotency layer needs a Tokio runtime and is not called in one. Nothing ran."
            .warning("no Tokio runtime, request refused with 500: call the layer inside of one");
    }

    pub(crate) fn key_missing(header: &HeaderName) -> Self {
        Self::new(
            RejectionKind::KeyMissing,
            format!(
                "This request needs the header {}: one key for each operation, kept over all retries of it.",
                spelled(header)
            ),
        )
    }

    pub(crate) fn key(header: &HeaderName, fault: &KeyFault) -> Self {
        let header = spelled(header);
        match fault {
            KeyFault::Invalid(reason) => Self::new(
                RejectionKind::KeyInvalid,
                format!(
                    "The header {header} is not a valid key: {reason}. Correct it and send the request again; nothing ran."
                ),
            ),
            KeyFault::Length { allowed, got } => Self::new(
                RejectionKind::KeyInvalid,
                format!(
                    "The header {header} is not a valid key: a key has {} to {} characters, and this one has {got}. Correct it and send the request again; nothing ran.",
                    allowed.start(),
                    allowed.end()
                ),
            ),
        }
    }

    pub(crate) fn key_stale(header: &HeaderName, window: Duration) -> Self {
        Self::new(
            RejectionKind::KeyStale,
            format!(
                "The UUID in the header {} was made more than {} seconds ago, too long for a request to run. Nothing ran. If the operation is still wanted, look up whether it happened before sending it with a new key.",
                spelled(header),
                window.as_secs()
            ),
        )
    }

    /// The answer to an upload that the layer broke, in the handler's place. `None` if the
    /// handler did not read it to its end, so that its answer counts.
    pub(crate) fn upload(fault: UploadFault) -> Option<Self> {
        let (kind, reason) = match fault {
            UploadFault::WrongDigest => (
                RejectionKind::DigestMismatch,
                "The request body is not the one that the header Content-Digest declares"
                    .to_owned(),
            ),
            UploadFault::TooLarge { max } => (
                RejectionKind::BodyTooLarge,
                format!("With an idempotency key, an upload may have up to {max} bytes"),
            ),
            UploadFault::Broken(BodyError::TooLarge) => (
                RejectionKind::BodyTooLarge,
                "The request body exceeds a limit that stands before the idempotency layer"
                    .to_owned(),
            ),
            UploadFault::TooSlow | UploadFault::Broken(BodyError::TimedOut) => (
                RejectionKind::BodyTimeout,
                "The request body came too slowly".to_owned(),
            ),
            UploadFault::Overloaded => (
                RejectionKind::Overloaded,
                "Too many requests with idempotency keys are in progress here".to_owned(),
            ),
            UploadFault::Broken(BodyError::Broken) => (
                RejectionKind::BodyInvalid,
                "The request body could not be read to its end".to_owned(),
            ),
            UploadFault::Unread => return None,
        };
        let is_passing = matches!(
            kind,
            RejectionKind::BodyTimeout | RejectionKind::Overloaded | RejectionKind::BodyInvalid
        );
        let rejection = Self::new(
            kind,
            format!(
                "{reason}. The request was not completed, and the same request may be sent again with the same key."
            ),
        );
        Some(match is_passing {
            true => rejection.retry_after(1),
            false => rejection,
        })
    }

    /// Its key has a record, with which it cannot be compared.
    pub(crate) fn oversized_retry(limit: usize) -> Self {
        Self::new(
            RejectionKind::BodyTooLarge,
            format!(
                "With an idempotency key that was used before, a request body may have up to {limit} bytes. Nothing ran."
            ),
        )
    }

    pub(crate) fn body_too_large(limit: u64) -> Self {
        Self::new(
            RejectionKind::BodyTooLarge,
            format!(
                "With an idempotency key, a request body may have up to {limit} bytes. Nothing ran, and the key is unused."
            ),
        )
    }

    pub(crate) fn body_timeout(within: Duration) -> Self {
        Self::new(
            RejectionKind::BodyTimeout,
            format!("The request body came too slowly: no byte for {} seconds, or fewer than {MIN_BYTES_PER_SECOND} bytes a second. Nothing ran; the same key may be sent again.", within.as_secs_f64()),
        )
        .retry_after(1)
    }

    pub(crate) fn body_broken(error: BodyError) -> Self {
        match error {
            BodyError::TooLarge => Self::new(
                RejectionKind::BodyTooLarge,
                "The request body exceeds a limit that stands before the idempotency layer. Nothing ran, and the key is unused.",
            ),
            BodyError::TimedOut => Self::new(
                RejectionKind::BodyTimeout,
                "The request body exceeded a timeout that stands before the idempotency layer. Nothing ran; the same key may be sent again.",
            )
            .retry_after(1),
            BodyError::Broken => Self::new(
                RejectionKind::BodyInvalid,
                "The request body could not be read to its end. Nothing ran; the same key may be sent again.",
            )
            .retry_after(1),
        }
    }

    pub(crate) fn body_invalid(fault: BodyFault) -> Self {
        Self::new(
            RejectionKind::BodyInvalid,
            format!(
                "The request body cannot be used with an idempotency key: {}. Nothing ran, and this request did not use the key.",
                fault.0
            ),
        )
    }

    pub(crate) fn key_reused(status: StatusCode, mismatch: Box<Mismatch>) -> Self {
        let Mismatch { compared, differs } = &*mismatch;
        let which = match &differs[..] {
            [] => "It cannot be told which part differs".to_owned(),
            [part] => format!("The {} differs", named(part)),
            parts => format!("These parts differ: {}", list(parts)),
        };
        let compared = list(compared);
        Self {
            status,
            mismatch: Some(mismatch),
            ..Self::new(
                RejectionKind::KeyReused,
                format!(
                    "This key was used for a different request. {which}; compared: {compared}. Send that request unchanged, or this one with a new key. Nothing ran."
                ),
            )
        }
    }

    pub(crate) fn in_progress(age: Duration, lease_left: Duration) -> Self {
        Self::new(
            RejectionKind::RequestInProgress,
            "The first request with this key is still running. Send the same request with the same key again later.",
        )
        .retry_after(age.min(lease_left).as_secs())
    }

    pub(crate) fn commit_unknown() -> Self {
        Self {
            status: StatusCode::SERVICE_UNAVAILABLE,
            ..Self::new(
                RejectionKind::OutcomeUnknown,
                "The connection to the database broke at the last step, and it is not known whether this request did its work. It is not run again; send the same key later to learn its outcome.",
            )
        }
        .retry_after(1)
        .warning("COMMIT was not answered, request answered with 503: its outcome is unknown until the database shows it")
    }

    /// As [`rolled_back_after_effects`](Self::rolled_back_after_effects); a notice is
    /// the warning.
    pub(crate) fn uncommitted() -> Self {
        Self {
            warning: None,
            ..Self::rolled_back_after_effects()
        }
    }

    /// Nothing ran: the claim failed.
    pub(crate) fn claim_failed(error: &StoreError) -> Self {
        Self::store_unavailable(error, "claim failed, request refused with 503")
    }

    /// Nothing ran: its response could not have been sealed.
    #[cfg(feature = "sealing")]
    pub(crate) fn sealing_key_missing(error: &StoreError) -> Self {
        Self::store_unavailable(error, "sealing key not available, request refused with 503")
    }

    /// Nothing ran, and the record of the first request cannot be read.
    pub(crate) fn record_unreadable(error: &StoreError) -> Self {
        Self::store_unavailable(error, "record not readable, request refused with 503")
    }

    /// The handler ran, and its answer is in a record that cannot be read.
    pub(crate) fn answer_unreadable(error: &StoreError) -> Self {
        Self::new(
            RejectionKind::StoreUnavailable,
            "This request may have done its work, but what is recorded of it cannot be read at the moment. Send the same request with the same key again later to get its answer.",
        )
        .retry_after(1)
        .caused(
            "record not readable after the run, request answered with 503",
            error,
        )
    }

    fn store_unavailable(error: &StoreError, warning: &'static str) -> Self {
        let reason = match error.kind() {
            StoreErrorKind::Unavailable | StoreErrorKind::TimedOut => {
                "It cannot be told whether this request was sent before"
            }
            StoreErrorKind::Overloaded => "Too many requests wait for an answer already",
            StoreErrorKind::Full => "No further keys can be kept at the moment",
            StoreErrorKind::Corrupt => "What is recorded for this key cannot be read here",
        };
        Self::new(
            RejectionKind::StoreUnavailable,
            format!(
                "{reason}, so nothing ran. Send the same request with the same key again later."
            ),
        )
        .retry_after(1)
        .caused(warning, error)
    }

    pub(crate) fn overloaded(warning: &'static str) -> Self {
        Self::new(
            RejectionKind::Overloaded,
            "Too many requests with idempotency keys are in progress here. This one did not run; send it again with the same key.",
        )
        .retry_after(1)
        .warning(warning)
    }

    /// As [`overloaded`](Self::overloaded), by the requests of one scope.
    pub(crate) fn scope_overloaded(warning: &'static str) -> Self {
        Self::new(
            RejectionKind::ScopeOverloaded,
            "Too many requests of this caller are in progress here. This one did not run; send it again with the same key.",
        )
        .retry_after(1)
        .warning(warning)
    }

    /// A new record would exceed the quota of its scope.
    pub(crate) fn quota_exceeded(exceeded: QuotaExceeded) -> Self {
        let QuotaExceeded {
            unit,
            limit,
            retry_after,
            ..
        } = exceeded;
        Self::new(
            RejectionKind::QuotaExceeded,
            format!(
                "This caller may keep up to {limit} {unit} for its idempotency keys, and they are used up. Nothing ran, and the key is unused. Send the request again when older keys have expired."
            ),
        )
        .retry_after(retry_after)
        .warning("scope has used up its `quota`, request refused with 429: raise the quota, or shorten `retention`")
        .exceeding(exceeded.numbers())
    }

    /// A panic of the layer itself, or of a function that it does not catch.
    pub(crate) fn task_panicked() -> Self {
        Self::handler_panicked().warning(
            "task of a request panicked, request answered with 500: its outcome is unknown",
        )
    }

    /// While its body is read, a request has claimed nothing.
    pub(crate) fn body_panicked() -> Self {
        Self::new(
            RejectionKind::CallbackPanicked,
            "The service failed before this request ran. Nothing ran, and the key is unused.",
        )
        .warning("body of a request panicked, request refused with 500: nothing ran")
    }

    /// Before the run nothing is claimed.
    pub(crate) fn callback_panicked(callback: Callback) -> Self {
        Self::new(
            RejectionKind::CallbackPanicked,
            "The service failed before this request ran. Nothing ran, and the key is unused.",
        )
        .warning(callback.warning())
    }

    /// After the run its outcome is unknown.
    pub(crate) fn dispositions_panicked() -> Self {
        Self::new(
            RejectionKind::CallbackPanicked,
            "The service failed after this request ran, and its response was lost. Sending the same key again is safe.",
        )
        .warning(Callback::Dispositions.warning())
    }

    fn renderer_panicked(retry_after: Option<u64>) -> Self {
        Self {
            retry_after,
            ..Self::new(
                RejectionKind::CallbackPanicked,
                "The request was refused, and the service failed to say why. Sending the same key again is safe.",
            )
        }
        .warning(Callback::Renderer.warning())
    }

    pub(crate) fn about(mut self, operation: impl Into<Option<OperationId>>) -> Self {
        self.operation = operation.into();
        self
    }

    fn new(kind: RejectionKind, detail: impl Into<Cow<'static, str>>) -> Self {
        Self {
            kind,
            status: kind.status(),
            detail: detail.into(),
            retry_after: None,
            operation: None,
            warning: None,
            cause: None,
            exceeded: None,
            mismatch: None,
            types: None,
        }
    }

    fn warning(mut self, warning: &'static str) -> Self {
        self.warning = Some(warning);
        self
    }

    /// Adds the numbers of a limit to its warning.
    pub(crate) fn exceeding(self, numbers: Numbers) -> Self {
        Self {
            exceeded: Some(Box::new(numbers)),
            ..self
        }
    }

    fn caused(self, warning: &'static str, cause: &StoreError) -> Self {
        Self {
            cause: Some(Box::new(cause.clone())),
            ..self.warning(warning)
        }
    }

    #[cfg(feature = "guard")]
    pub(crate) fn cause(&self) -> Option<&StoreError> {
        self.cause.as_deref()
    }

    /// Logs its warning, if it has one.
    pub(crate) fn log(&self, warnings: &Warnings) {
        match (self.warning, &self.exceeded) {
            (Some(warning), Some(exceeded)) => warnings.warn_exceeded(warning, exceeded),
            (Some(warning), None) => {
                warnings.warn(warning, self.cause.as_deref(), self.operation);
            }
            (None, _) => {}
        }
    }

    fn retry_after(mut self, seconds: u64) -> Self {
        self.retry_after = Some(seconds.max(1));
        self
    }

    /// Returns the `type` of the problem, such as
    /// `urn:tower-idempotency:problem:key-reused`. It begins with what
    /// [`problem_types`](crate::IdempotencyBuilder::problem_types) sets.
    #[must_use]
    pub fn problem_type(&self) -> String {
        let base = self.types.as_deref().unwrap_or(render::PROBLEM_TYPES);
        format!("{base}{}", self.kind.slug())
    }

    /// Returns the title of the problem, which is the same for all refusals of a kind.
    #[must_use]
    pub fn title(&self) -> &'static str {
        self.kind.title()
    }

    /// Returns the problem details (RFC 9457) that the default renderer sends.
    #[must_use]
    pub fn to_json(&self) -> serde_json::Value {
        let mut problem = json!({
            "type": self.problem_type(),
            "title": self.title(),
            "status": self.status.as_u16(),
            "detail": self.detail,
            "retryable": self.retry_after.is_some(),
        });
        if let Some(seconds) = self.retry_after {
            problem["retry_after"] = seconds.into();
        }
        if let Some(mismatch) = &self.mismatch {
            problem["compared"] = names(&mismatch.compared).into();
            problem["differs"] = names(&mismatch.differs).into();
        }
        problem
    }

    /// Which kind of refusal it is.
    #[must_use]
    pub fn kind(&self) -> RejectionKind {
        self.kind
    }

    /// The status of the answer.
    #[must_use]
    pub fn status(&self) -> StatusCode {
        self.status
    }

    /// What happened and whether the same key may be sent again, for people.
    #[must_use]
    pub fn detail(&self) -> &str {
        &self.detail
    }

    /// After how many seconds the same request may be sent again, if waiting
    /// can change the answer.
    #[must_use]
    pub fn retry_after_seconds(&self) -> Option<u64> {
        self.retry_after
    }

    /// The operation that the key belongs to, if it is the caller's own and the
    /// same request.
    #[must_use]
    pub fn operation(&self) -> Option<OperationId> {
        self.operation
    }

    /// The parts of the request that were compared with the request that the key
    /// belongs to. Empty unless the kind is
    /// [`KeyReused`](RejectionKind::KeyReused).
    #[must_use]
    pub fn compared(&self) -> &[RequestPart] {
        self.mismatch
            .as_ref()
            .map_or(&[], |mismatch| &mismatch.compared)
    }

    /// Those of the [`compared`](Self::compared) parts that differ. The rejection
    /// shows no other part of the recorded request.
    #[must_use]
    pub fn differs(&self) -> &[RequestPart] {
        self.mismatch
            .as_ref()
            .map_or(&[], |mismatch| &mismatch.differs)
    }
}

/// What a handler answers to a failed transaction.
#[cfg(any(feature = "postgres", feature = "sqlite"))]
impl Rejection {
    refusals! {
        no_transaction: StoreUnavailable
            "The database cannot serve this request now, and nothing of it was committed. Send the same request with the same key again later."
            .retry_after(1);

        aborted: RolledBack
            "The transaction of this request was rolled back. Sending the same request again with the same key is safe."
            .retry_after(1);

        not_committed: RolledBack
            "The transaction of this request could not be committed and was rolled back.";
    }
}

/// A function that the application gave to the layer.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Callback {
    /// The scope, `guard_if`, a key's validator, or the attributes of a `ReplayAuthorizer`.
    Admission,
    Fingerprint,
    Quota,
    Dispositions,
    Renderer,
}

impl Callback {
    fn warning(self) -> &'static str {
        match self {
            Self::Admission => {
                "scope function, `guard_if`, key validator or `ReplayAuthorizer::attributes` panicked, request refused with 500"
            }
            Self::Fingerprint => "fingerprint function panicked, request refused with 500",
            Self::Quota => "function of `quota_by` panicked, request refused with 500",
            Self::Dispositions => {
                "function of `Dispositions::by` panicked, request answered with 500: its outcome is unknown"
            }
            Self::Renderer => "function of `render` panicked, refusal answered with 500",
        }
    }
}

/// The parts of a request as programs read them.
fn names(parts: &[RequestPart]) -> Vec<String> {
    parts.iter().map(ToString::to_string).collect()
}

/// The parts of a request in a sentence.
fn list(parts: &[RequestPart]) -> String {
    parts.iter().map(named).collect::<Vec<_>>().join(", ")
}

fn named(part: &RequestPart) -> String {
    match part {
        RequestPart::Header(name) => format!("header {}", spelled(name)),
        part => part.to_string(),
    }
}

/// Header names as people write them.
fn spelled(name: &HeaderName) -> String {
    name.as_str()
        .split('-')
        .map(|part| {
            let mut letters = part.chars();
            let first = letters.next().map(|letter| letter.to_ascii_uppercase());
            first.into_iter().chain(letters).collect::<String>()
        })
        .collect::<Vec<_>>()
        .join("-")
}

/// The least average rate at which the body of a request has to arrive.
pub(crate) const MIN_BYTES_PER_SECOND: u64 = 1 << 10;
