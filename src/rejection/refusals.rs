//! The refusals: when each happens, and what it says.

use std::{
    fmt::{self, Write as _},
    time::Duration,
};

use http::{HeaderName, StatusCode};

use super::{QuotaExceeded, Rejection, RejectionKind};
use crate::{
    body::{error::BodyError, progress::MIN_BYTES_PER_SECOND, upload::UploadFault},
    error::{StoreError, StoreErrorKind},
    fingerprint::{BodyFault, Mismatch, RequestPart},
    key::KeyFault,
};

/// Constructors: parameters, kind, and detail. The detail is a literal of `format!`, and
/// may have arguments.
macro_rules! refusals {
    ($(
        $(#[$doc:meta])*
        $name:ident($($parameter:ident: $type:ty),*): $kind:ident
            $detail:literal $(, $argument:expr)*;
            $($(.$setter:ident($value:expr))+;)?
    )*) => {
        $(
            $(#[$doc])*
            pub(crate) fn $name($($parameter: $type),*) -> Self {
                Self::new(RejectionKind::$kind, format_args!($detail $(, $argument)*))
                    $($(.$setter($value))+)?
            }
        )*
    };
}

impl Rejection {
    refusals! {
        key_missing(header: &HeaderName): KeyMissing
            "This request needs the header {}: one key for each operation, kept over all retries of it.",
            Spelled(header);

        key(header: &HeaderName, fault: &KeyFault): KeyInvalid
            "The header {} is not a valid key: {fault}. Correct it and send the request again; nothing ran.",
            Spelled(header);

        key_stale(header: &HeaderName, window: Duration): KeyStale
            "The UUID in the header {} was made more than {} seconds ago, too long for a request to run. Nothing ran. If the operation is still wanted, look up whether it happened before sending it with a new key.",
            Spelled(header), window.as_secs();

        caller_unknown(): CallerUnknown
            "The key cannot be told apart from other callers' keys, because this request names no caller. Nothing ran.";
            .warning("scope function returned None, request refused with 403: authentication must stand \
             outside of the idempotency layer, and leave what the function reads in the request");

        digest_invalid(): DigestInvalid
            "The header Content-Digest is not a dictionary with SHA-256 or SHA-512 digests as byte sequences. Correct it and send the request again; nothing ran, and the key is unused.";

        wrong_digest(): DigestMismatch
            "The request body is not the one that the header Content-Digest declares. Nothing ran, and this request did not use the key.";

        body_too_large(limit: u64): BodyTooLarge
            "With an idempotency key, a request body may have up to {limit} bytes. Nothing ran, and the key is unused.";

        /// Its key has a record, with which it cannot be compared.
        oversized_retry(limit: usize): BodyTooLarge
            "With an idempotency key that was used before, a request body may have up to {limit} bytes. Nothing ran.";

        body_timeout(within: Duration): BodyTimeout
            "The request body came too slowly: no byte for {} seconds, or fewer than {MIN_BYTES_PER_SECOND} bytes a second. Nothing ran; the same key may be sent again.",
            within.as_secs_f64();
            .retry_after(1);

        body_invalid(fault: BodyFault): BodyInvalid
            "The request body cannot be used with an idempotency key: {}. Nothing ran, and this request did not use the key.",
            fault.0;

        /// While its body is read, a request has claimed nothing.
        body_panicked(): CallbackPanicked
            "The service failed before this request ran. Nothing ran, and the key is unused.";
            .warning("body of a request panicked, request refused with 500: nothing ran");

        overloaded(warning: &'static str): Overloaded
            "Too many requests with idempotency keys are in progress here. This one did not run; send it again with the same key.";
            .retry_after(1).warning(warning);

        /// As [`overloaded`](Self::overloaded), by the requests of one scope.
        scope_overloaded(warning: &'static str): ScopeOverloaded
            "Too many requests of this caller are in progress here. This one did not run; send it again with the same key.";
            .retry_after(1).warning(warning);

        draining(): Draining
            "This process is shutting down. This request did not run; send it again with the same key.";
            .retry_after(1)
            .warning("`drain` was called, nothing ran: this process accepts no more keys");

        runtime_missing(): RuntimeMissing
            "The idempotency layer needs a Tokio runtime and is not called in one. Nothing ran.";
            .warning("no Tokio runtime, request refused with 500: call the layer inside of one");

        in_progress(age: Duration, lease_left: Duration): RequestInProgress
            "The first request with this key is still running. Send the same request with the same key again later.";
            .retry_after(age.min(lease_left).as_secs());

        contended(): StoreUnavailable
            "Too many requests with this key arrived at once; this one did not run. Send it again with the same key.";
            .retry_after(1)
            .warning("claim failed, nothing ran: the record of its key changed during each attempt");

        scheme_unknown(): StoreUnavailable
            "The record of this key was made with other settings, so it cannot be told here whether it is the same request. Nothing ran. Send the same request with the same key again later.";
            .retry_after(1)
            .warning("record made with another fingerprint setting or by a `Guard`, request refused with 503: name that setting with `earlier_fingerprint`, or enable the feature that it needs, `axum` or `multipart`");

        /// The handler ran, and its answer is in a record that cannot be read.
        answer_unreadable(error: &StoreError): StoreUnavailable
            "This request may have done its work, but what is recorded of it cannot be read at the moment. Send the same request with the same key again later to get its answer.";
            .retry_after(1)
            .warning("record not readable after the run, request answered with 503")
            .caused(error);

        outcome_unknown(): OutcomeUnknown
            "The first request with this key ended without an answer, and it is not known whether it did its work. It is not run again; look up its result, or ask the operator. Sending the same key again is safe and changes nothing.";

        /// As [`outcome_unknown`](Self::outcome_unknown), where the next request asks again.
        outcome_not_found_out(): OutcomeUnknown
            "The first request with this key ended without an answer, and it could not be found out yet whether it did its work. Send the same request with the same key again later.";
            .retry_after(1);

        commit_unknown(): OutcomeUnknown
            "The connection to the database broke at the last step, and it is not known whether this request did its work. It is not run again; send the same key later to learn its outcome.";
            .with_status(StatusCode::SERVICE_UNAVAILABLE)
            .retry_after(1)
            .warning("COMMIT was not answered, request answered with 503: its outcome is unknown until the database shows it");

        not_replayable(): ResponseNotReplayable
            "The first request with this key did its work, but its response was not kept. It is not run again; look up its result.";

        rolled_back(): RolledBack
            "The transaction of this request was rolled back: nothing was done. The same request may be sent again with the same key.";
            .retry_after(1)
            .warning("transaction rolled back although the handler answered with success, request answered with 500: return the error of `commit`");

        /// A notice is the warning.
        uncommitted(): RolledBack
            "The transaction of this request was not committed, but the request may have done other work. It is not run again; look up its result, or ask the operator. Sending the same key again is safe and changes nothing.";

        replay_refused(): ReplayRefused
            "This caller may not receive the response to an earlier request with this key. Nothing ran.";

        authorization_unavailable(warning: &'static str): AuthorizationUnavailable
            "It cannot be decided at the moment whether this caller may receive the response to an earlier request with this key. Nothing ran; send the same request with the same key again later.";
            .retry_after(1).warning(warning);

        authorizer_panicked(): CallbackPanicked
            "The service failed before it could answer. This request did not run; sending the same key again is safe.";
            .warning("`ReplayAuthorizer` panicked, request refused with 500: mend the hook");

        handler_panicked(): HandlerPanicked
            "The request failed in the middle of its work, and it is not known how much of it was done. Sending the same key again is safe.";
            .warning("handler or response body panicked, request answered with 500: its outcome is unknown");

        /// Before the run nothing is claimed.
        callback_panicked(callback: Callback): CallbackPanicked
            "The service failed before this request ran. Nothing ran, and the key is unused.";
            .warning(callback.warning());

        /// After the run its outcome is unknown.
        dispositions_panicked(): CallbackPanicked
            "The service failed after this request ran, and its response was lost. Sending the same key again is safe.";
            .warning(Callback::Dispositions.warning());

        renderer_panicked(): CallbackPanicked
            "The request was refused, and the service failed to say why. Sending the same key again is safe.";
            .warning(Callback::Renderer.warning());
    }

    /// As [`uncommitted`](Self::uncommitted), after an attempt to commit.
    pub(crate) fn rolled_back_after_effects() -> Self {
        Self::uncommitted().warning(
            "transaction rolled back although the handler answered with success, request answered \
             with 500: its outcome is unknown, because the handler may have done other work",
        )
    }

    /// A panic of the layer itself, or of a function that it does not catch.
    pub(crate) fn task_panicked() -> Self {
        Self::handler_panicked().warning(
            "task of a request panicked, request answered with 500: its outcome is unknown",
        )
    }

    /// The body broke while it was read into memory.
    pub(crate) fn body_broken(error: BodyError) -> Self {
        let kind = RejectionKind::of_body(error);
        Self::of_passing(
            kind,
            format_args!("Nothing ran, and the key is unused: {error}."),
        )
    }

    /// The answer to an upload that the layer broke, in the handler's place. `None` if the
    /// handler did not read it to its end, so that its answer counts.
    pub(crate) fn upload(fault: UploadFault) -> Option<Self> {
        let kind = match fault {
            UploadFault::WrongDigest => RejectionKind::DigestMismatch,
            UploadFault::TooLarge { .. } => RejectionKind::BodyTooLarge,
            UploadFault::TooSlow { .. } => RejectionKind::BodyTimeout,
            UploadFault::Overloaded => RejectionKind::Overloaded,
            UploadFault::Broken(error) => RejectionKind::of_body(error),
            UploadFault::Unread => return None,
        };
        Some(Self::of_passing(
            kind,
            format_args!(
                "The request was not completed, and the same request may be sent again with the same key: {fault}."
            ),
        ))
    }

    /// A refusal because of a body, which may pass without a change of the request unless the
    /// body is too large or another one.
    fn of_passing(kind: RejectionKind, detail: fmt::Arguments<'_>) -> Self {
        let rejection = Self::new(kind, detail);
        match kind {
            RejectionKind::BodyTooLarge | RejectionKind::DigestMismatch => rejection,
            _ => rejection.retry_after(1),
        }
    }

    pub(crate) fn key_reused(status: StatusCode, mismatch: Box<Mismatch>) -> Self {
        let Mismatch { compared, differs } = &*mismatch;
        let which = match &differs[..] {
            [] => "It cannot be told which part differs".to_owned(),
            [part] => format!("The {} differs", named(part)),
            parts => format!("These parts differ: {}", list(parts)),
        };
        let compared = list(compared);
        let detail = format_args!(
            "This key was used for a different request. {which}; compared: {compared}. Send that request unchanged, or this one with a new key. Nothing ran."
        );
        let rejection = Self::new(RejectionKind::KeyReused, detail).with_status(status);
        Self {
            mismatch: Some(mismatch),
            ..rejection
        }
    }

    /// Nothing ran: the claim failed.
    pub(crate) fn claim_failed(error: &StoreError) -> Self {
        Self::store_unavailable(error, "claim failed, nothing ran")
    }

    /// Nothing ran: its response could not have been sealed.
    #[cfg(feature = "sealing")]
    pub(crate) fn sealing_key_missing(error: &StoreError) -> Self {
        Self::store_unavailable(error, "sealing key not available, nothing ran")
    }

    /// Nothing ran, and the record of the first request cannot be read.
    pub(crate) fn record_unreadable(error: &StoreError) -> Self {
        Self::store_unavailable(error, "record not readable, nothing ran")
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
        let detail = format_args!(
            "{reason}, so nothing ran. Send the same request with the same key again later."
        );
        Self::new(RejectionKind::StoreUnavailable, detail)
            .retry_after(1)
            .warning(warning)
            .caused(error)
    }

    /// A new record would exceed the quota of its scope.
    pub(crate) fn quota_exceeded(exceeded: QuotaExceeded) -> Self {
        let QuotaExceeded { unit, limit, .. } = exceeded;
        let detail = format_args!(
            "This caller may keep up to {limit} {unit} for its idempotency keys, and they are used up. Nothing ran, and the key is unused. Send the request again when older keys have expired."
        );
        Self::new(RejectionKind::QuotaExceeded, detail)
            .retry_after(exceeded.retry_after)
            .warning("scope has used up its `quota`, request refused with 429: raise the quota, or shorten `retention`")
            .exceeding(exceeded.numbers())
    }
}

/// What a handler answers to a failed transaction.
#[cfg(any(feature = "postgres", feature = "sqlite"))]
impl Rejection {
    refusals! {
        no_transaction(): StoreUnavailable
            "The database cannot serve this request now, and nothing of it was committed. Send the same request with the same key again later.";
            .retry_after(1);

        aborted(): RolledBack
            "The transaction of this request was rolled back. Sending the same request again with the same key is safe.";
            .retry_after(1);

        not_committed(): RolledBack
            "The transaction of this request could not be committed and was rolled back.";
    }
}

impl RejectionKind {
    fn of_body(error: BodyError) -> Self {
        match error {
            BodyError::TooLarge => Self::BodyTooLarge,
            BodyError::TimedOut => Self::BodyTimeout,
            BodyError::Broken => Self::BodyInvalid,
        }
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

/// The parts of a request in a sentence.
fn list(parts: &[RequestPart]) -> String {
    parts.iter().map(named).collect::<Vec<_>>().join(", ")
}

fn named(part: &RequestPart) -> String {
    match part {
        RequestPart::Header(name) => format!("header {}", Spelled(name)),
        part => part.to_string(),
    }
}

/// A header name as people write it.
struct Spelled<'a>(&'a HeaderName);

impl fmt::Display for Spelled<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let mut starts_word = true;
        for letter in self.0.as_str().chars() {
            f.write_char(match starts_word {
                true => letter.to_ascii_uppercase(),
                false => letter,
            })?;
            starts_word = letter == '-';
        }
        Ok(())
    }
}
