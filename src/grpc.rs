//! gRPC: each response has the HTTP status 200, and its result is in `grpc-status`.

use bytes::Bytes;
use http::{HeaderMap, HeaderName, HeaderValue, Response, StatusCode, header};

use crate::rejection::{Rejection, RejectionKind};

/// Whether a request is one of gRPC. Those of gRPC-Web, which browsers send, are not.
pub(crate) fn is_grpc(headers: &HeaderMap) -> bool {
    let Some(value) = headers.get(header::CONTENT_TYPE) else {
        return false;
    };
    let value = value.as_bytes();
    let Some((name, rest)) = value.split_at_checked(GRPC.len()) else {
        return false;
    };
    name.eq_ignore_ascii_case(GRPC.as_bytes())
        && matches!(rest.first(), None | Some(b'+' | b';' | b' '))
}

/// Returns the status of a response. For a gRPC error it is the one as which its code
/// counts. The code is in the trailers, or in the headers if there is no message.
///
/// A handler may pass on the code of another service, whose work may be done. So a code that
/// does not rule that out counts as 504.
pub(crate) fn status_of(
    status: StatusCode,
    headers: &HeaderMap,
    trailers: Option<&HeaderMap>,
) -> StatusCode {
    if status != StatusCode::OK {
        return status;
    }
    let code = headers.get(STATUS).or_else(|| trailers?.get(STATUS));
    match code.map(HeaderValue::as_bytes) {
        None | Some(b"0") => status,
        Some(b"3" | b"9" | b"11") => StatusCode::BAD_REQUEST,
        Some(b"5") => StatusCode::NOT_FOUND,
        Some(b"6") => StatusCode::CONFLICT,
        Some(b"7") => StatusCode::FORBIDDEN,
        Some(b"12") => StatusCode::NOT_IMPLEMENTED,
        Some(b"16") => StatusCode::UNAUTHORIZED,
        Some(_) => StatusCode::GATEWAY_TIMEOUT,
    }
}

/// Whether the trailers of a response have the code of an error.
pub(crate) fn is_error(trailers: &HeaderMap) -> bool {
    trailers.get(STATUS).is_some_and(|code| code != "0")
}

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

const GRPC: &str = "application/grpc";
const STATUS: HeaderName = HeaderName::from_static("grpc-status");
const MESSAGE: HeaderName = HeaderName::from_static("grpc-message");
/// Without these a response of gRPC has no result.
pub(crate) const RESULT: [HeaderName; 4] = [
    STATUS,
    MESSAGE,
    HeaderName::from_static("grpc-encoding"),
    HeaderName::from_static("grpc-status-details-bin"),
];
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

    use super::*;
    use crate::body::error::BodyError;

    #[test]
    fn media_types_of_grpc_are_told_from_others() {
        let is_grpc = |value| {
            let value = HeaderValue::from_static(value);
            is_grpc(&HeaderMap::from_iter([(header::CONTENT_TYPE, value)]))
        };
        for media_type in [
            "application/grpc",
            "Application/gRPC+proto",
            "application/grpc; charset=utf-8",
        ] {
            assert!(is_grpc(media_type), "{media_type}");
        }
        for media_type in ["application/grpc-web+proto", "application/grp", "text/grpc"] {
            assert!(!is_grpc(media_type), "{media_type}");
        }
    }

    #[test]
    fn errors_count_as_the_documented_statuses() {
        for (code, status) in [
            ("0", 200),
            ("1", 504),
            ("2", 504),
            ("3", 400),
            ("4", 504),
            ("5", 404),
            ("6", 409),
            ("7", 403),
            ("8", 504),
            ("9", 400),
            ("10", 504),
            ("11", 400),
            ("12", 501),
            ("13", 504),
            ("14", 504),
            ("15", 504),
            ("16", 401),
            ("17", 504),
            ("", 504),
        ] {
            let none = HeaderMap::new();
            let lines = HeaderMap::from_iter([(STATUS, HeaderValue::from_static(code))]);
            assert_eq!(status_of(StatusCode::OK, &lines, None), status, "{code}");
            assert_eq!(
                status_of(StatusCode::OK, &none, Some(&lines)),
                status,
                "{code}"
            );
            assert_eq!(status_of(StatusCode::BAD_GATEWAY, &lines, None), 502);
            assert_eq!(status_of(StatusCode::BAD_GATEWAY, &none, Some(&lines)), 502);
            assert_eq!(is_error(&lines), status != 200, "{code}");
        }
        let none = HeaderMap::new();
        assert_eq!(status_of(StatusCode::OK, &none, Some(&none)), 200);
        assert!(!is_error(&none));
    }

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
