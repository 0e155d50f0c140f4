//! gRPC: each response has the HTTP status 200, and its result is in `grpc-status`.

use http::{HeaderMap, HeaderName, HeaderValue, StatusCode, header};

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

pub(crate) const GRPC: &str = "application/grpc";
pub(crate) const STATUS: HeaderName = HeaderName::from_static("grpc-status");
pub(crate) const MESSAGE: HeaderName = HeaderName::from_static("grpc-message");
/// Without these a response of gRPC has no result.
pub(crate) const RESULT: [HeaderName; 4] = [
    STATUS,
    MESSAGE,
    HeaderName::from_static("grpc-encoding"),
    HeaderName::from_static("grpc-status-details-bin"),
];

#[cfg(test)]
mod tests {
    use super::*;

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
}
