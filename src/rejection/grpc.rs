//! Refusals as errors of gRPC.

use bytes::Bytes;
use http::{HeaderName, HeaderValue, Response, header};

use super::{Rejection, RejectionKind};
use crate::body::grpc::{GRPC, MESSAGE, STATUS};

/// Returns a refusal as a response without a message ("Trailers-Only"), whose trailers are
/// its headers.
pub(crate) fn trailers_only(rejection: &Rejection) -> Response<Bytes> {
    let mut response = Response::new(Bytes::new());
    let headers = response.headers_mut();
    headers.insert(header::CONTENT_TYPE, HeaderValue::from_static(GRPC));
    headers.insert(STATUS, code(rejection).into());
    let message = percent_encoded(rejection.detail());
    let lines = [
        (MESSAGE, HeaderValue::try_from(message)),
        (
            PROBLEM_TYPE,
            HeaderValue::try_from(rejection.problem_type()),
        ),
    ];
    for (name, value) in lines {
        if let Ok(value) = value {
            headers.insert(name, value);
        }
    }
    // Without it, a client's policy may retry a refusal that is final.
    let pushback = match rejection.retry_after_seconds() {
        Some(seconds) => (seconds.saturating_mul(1000)).min(i32::MAX as u64).into(),
        None => HeaderValue::from_static("-1"),
    };
    headers.insert(PUSHBACK, pushback);
    response
}

/// Returns the code of a refusal. UNAVAILABLE is the one that clients' policies retry. For
/// ABORTED they would begin again, with a new key. A caller over its limit should not retry
/// by itself.
fn code(rejection: &Rejection) -> u16 {
    use RejectionKind as Kind;
    match rejection.kind() {
        Kind::BodyTooLarge | Kind::QuotaExceeded | Kind::ScopeOverloaded => RESOURCE_EXHAUSTED,
        _ if rejection.retry_after_seconds().is_some() => UNAVAILABLE,
        Kind::KeyMissing
        | Kind::KeyInvalid
        | Kind::KeyStale
        | Kind::KeyReused
        | Kind::BodyInvalid
        | Kind::DigestInvalid
        | Kind::DigestMismatch => INVALID_ARGUMENT,
        Kind::CallerUnknown | Kind::ReplayRefused => PERMISSION_DENIED,
        Kind::OutcomeUnknown => FAILED_PRECONDITION,
        Kind::ResponseNotReplayable => ALREADY_EXISTS,
        Kind::BodyTimeout
        | Kind::RequestInProgress
        | Kind::StoreUnavailable
        | Kind::AuthorizationUnavailable
        | Kind::Overloaded
        | Kind::Draining => UNAVAILABLE,
        Kind::RolledBack
        | Kind::HandlerPanicked
        | Kind::CallbackPanicked
        | Kind::RuntimeMissing => INTERNAL,
    }
}

/// Encodes all but printable ASCII, and `%`.
fn percent_encoded(text: &str) -> String {
    let mut encoded = String::with_capacity(text.len());
    for byte in text.bytes() {
        match byte {
            b' '..=b'~' if byte != b'%' => encoded.push(byte.into()),
            _ => encoded.push_str(&format!("%{byte:02X}")),
        }
    }
    encoded
}

const PUSHBACK: HeaderName = HeaderName::from_static("grpc-retry-pushback-ms");
const PROBLEM_TYPE: HeaderName = HeaderName::from_static("problem-type");

const INVALID_ARGUMENT: u16 = 3;
const ALREADY_EXISTS: u16 = 6;
const PERMISSION_DENIED: u16 = 7;
const RESOURCE_EXHAUSTED: u16 = 8;
const FAILED_PRECONDITION: u16 = 9;
const INTERNAL: u16 = 13;
const UNAVAILABLE: u16 = 14;

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use http::StatusCode;

    use super::*;
    use crate::body::error::BodyError;

    #[test]
    fn refusals_that_may_be_sent_again_are_unavailable() {
        for (rejection, code, pushback) in [
            (Rejection::draining(), "14", "1000"),
            (Rejection::commit_unknown(), "14", "1000"),
            (Rejection::rolled_back(), "14", "1000"),
            (Rejection::rolled_back_after_effects(), "13", "-1"),
            (Rejection::outcome_unknown(), "9", "-1"),
            (Rejection::outcome_not_found_out(), "14", "1000"),
            (
                Rejection::in_progress(Duration::from_secs(7), Duration::from_secs(9)),
                "14",
                "7000",
            ),
            (Rejection::body_broken(BodyError::Broken), "14", "1000"),
            (Rejection::body_broken(BodyError::TimedOut), "14", "1000"),
            (Rejection::body_broken(BodyError::TooLarge), "8", "-1"),
            (Rejection::not_replayable(), "6", "-1"),
            (Rejection::body_too_large(1), "8", "-1"),
            (Rejection::caller_unknown(), "7", "-1"),
        ] {
            let response = trailers_only(&rejection);
            assert_eq!(response.status(), StatusCode::OK);
            let headers = response.headers();
            assert_eq!(headers[STATUS], code, "{rejection:?}");
            assert_eq!(headers[PUSHBACK], pushback, "{rejection:?}");
        }
    }

    #[test]
    fn message_outside_of_printable_ascii_is_encoded() {
        assert_eq!(percent_encoded("50 % für\t1"), "50 %25 f%C3%BCr%091");
    }
}
