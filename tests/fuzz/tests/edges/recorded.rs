//! Responses that an operator records.

use http::{Response, StatusCode};
use tower_idempotency::store::admin::{NotRecordableError, RecordedResponse};

#[test]
fn an_operators_response_loses_the_headers_of_a_message() {
    let response = Response::builder()
        .status(StatusCode::CREATED)
        .header("date", "now")
        .header("connection", "x-hop")
        .header("x-hop", "1")
        .header("etag", "1");
    let recorded = RecordedResponse::new(response.body("paid").unwrap()).unwrap();
    let plain = Response::builder()
        .status(StatusCode::CREATED)
        .header("etag", "1");
    let plain = plain.body("paid").unwrap();
    assert_eq!(recorded.status(), Some(StatusCode::CREATED));
    assert_eq!(
        recorded.encode(),
        RecordedResponse::new(plain).unwrap().encode()
    );
    assert_eq!(RecordedResponse::tombstone().status(), None);
}

#[test]
fn an_interim_status_is_not_recordable() {
    let response = Response::builder().status(103).body("").unwrap();
    let refused = RecordedResponse::new(response).unwrap_err();
    assert_eq!(
        refused,
        NotRecordableError::InterimStatus(StatusCode::EARLY_HINTS)
    );
}

#[test]
fn debug_shows_no_response() {
    let response = Response::builder().header("x", "secret").body("secret");
    let recorded = RecordedResponse::new(response.unwrap()).unwrap();
    let shown = format!("{recorded:?}");
    assert!(
        shown.contains("200") && shown.contains("6 bytes"),
        "{shown}"
    );
    assert!(!shown.contains("secret"), "{shown}");
}
