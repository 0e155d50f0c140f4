//! The decoders of recorded responses and of records, and the replay of what they accept.

use bytes::Bytes;
use http::{HeaderMap, HeaderName, Request, StatusCode};
use tower_idempotency::{
    IdempotencyLayer, Scope, StoreErrorKind,
    store::{RecordState, admin::RecordedResponse, transition::StoredRecord},
};

use crate::{
    probe::{Probed, probe},
    record_store::RecordStore,
};

/// The bytes as a store returns them; and once more with a prefix and a checksum that fit,
/// so that the lines behind them are read.
pub fn record(data: &[u8]) {
    stored(data);
    response(&data.to_vec().into());
    if let Some((kind, rest)) = data.split_first() {
        response(&sealed(kind % 4, rest));
    }
}

fn stored(data: &[u8]) {
    match StoredRecord::from_bytes(data.to_vec().into()) {
        Ok(record) => {
            let bytes = record.to_bytes();
            let again = StoredRecord::from_bytes(bytes.clone()).expect("encoded here");
            assert_eq!(again, record);
            assert_eq!(again.to_bytes(), bytes);
            assert_eq!(bytes.len(), data.len());
        }
        Err(error) => assert_eq!(error.kind(), StoreErrorKind::Corrupt),
    }
}

fn response(bytes: &Bytes) {
    let (parts, body) = replay(bytes.clone());
    let decoded = match RecordedResponse::decode(bytes.clone()) {
        Ok(decoded) => decoded,
        Err(error) => {
            assert_eq!(error.kind(), StoreErrorKind::Corrupt);
            return refused(&parts, &body, "store-unavailable");
        }
    };
    let encoded = decoded.encode();
    let again = RecordedResponse::decode(encoded.clone()).expect("encoded here");
    assert_eq!(again.encode(), encoded);
    assert_eq!(encoded.len(), bytes.len(), "nothing is added or lost");
    let Some(status) = decoded.status() else {
        return refused(&parts, &body, "response-not-replayable");
    };
    if status.is_informational() {
        return refused(&parts, &body, "response-not-replayable");
    }
    let lines = Lines::of(bytes);
    assert_eq!(parts.status, status);
    assert_eq!(parts.headers["idempotent-replayed"], "true");
    assert_eq!(
        parts.headers.get_all("idempotent-replayed").iter().count(),
        1
    );
    let has_body = !matches!(status, StatusCode::NO_CONTENT | StatusCode::NOT_MODIFIED);
    assert_eq!(body, if has_body { lines.body } else { Bytes::new() });
    for name in lines
        .headers
        .keys()
        .filter(|name| is_kept(name, &lines.headers))
    {
        let replayed = parts.headers.get_all(name).iter();
        assert!(replayed.eq(lines.headers.get_all(name)), "{name}");
    }
    for name in parts.headers.keys() {
        let is_added = matches!(name.as_str(), "idempotent-replayed" | "trailer");
        assert!(is_added || is_kept(name, &lines.headers), "{name}");
        assert!(is_added || lines.headers.contains_key(name), "{name}");
    }
}

fn refused(parts: &http::response::Parts, body: &[u8], slug: &str) {
    let body = String::from_utf8_lossy(body);
    assert!(body.contains(slug), "{slug}: {parts:?} {body}");
    assert!(!parts.headers.contains_key("idempotent-replayed"));
}

/// The bytes of a response with this kind, and a checksum that fits.
fn sealed(kind: u8, rest: &[u8]) -> Bytes {
    let mut checksum = crc32fast::Hasher::new();
    checksum.update(&[VERSION, kind]);
    checksum.update(rest);
    let checksum = checksum.finalize().to_le_bytes();
    [b"ti", &[VERSION, kind][..], &checksum, rest]
        .concat()
        .into()
}

/// The response with this record, which is that of the request.
fn replay(response: Bytes) -> (http::response::Parts, Bytes) {
    let store = RecordStore::of_same_request(RecordState::Completed { response });
    let layer = IdempotencyLayer::required(store, |_| Some(Scope::single_tenant()));
    let request = Request::post("/").header("idempotency-key", "k");
    match probe(layer, request.body(Bytes::new()).expect("a valid request")) {
        Probed::Answered(parts, body) => (parts, body),
        Probed::Ran(_) => panic!("a completed operation ran again"),
    }
}

/// Read without checks from bytes that were decoded before.
struct Lines {
    headers: HeaderMap,
    body: Bytes,
}

impl Lines {
    fn of(bytes: &Bytes) -> Self {
        let mut at = 10;
        let headers = lines(bytes, &mut at);
        let _trailers = lines(bytes, &mut at);
        Self {
            headers,
            body: bytes.slice(at..),
        }
    }
}

fn lines(bytes: &[u8], at: &mut usize) -> HeaderMap {
    let mut number = |length: usize| {
        let number = bytes[*at..*at + length].iter().rev();
        *at += length;
        number.fold(0, |number, &byte| number << 8 | usize::from(byte))
    };
    let mut lines = HeaderMap::new();
    for _ in 0..number(2) {
        let mut text = |length| {
            let length = number(length);
            (0..length).map(|_| number(1) as u8).collect::<Vec<_>>()
        };
        let name = HeaderName::from_bytes(&text(2)).expect("decoded before");
        lines.append(name, text(4).try_into().expect("decoded before"));
    }
    lines
}

/// The default rules of `KeptHeaders`, by name.
fn is_kept(name: &HeaderName, headers: &HeaderMap) -> bool {
    const DROPPED: &str = " age connection content-length date idempotent-recorded \
        idempotent-replayed keep-alive proxy-connection te trailer transfer-encoding upgrade \
        set-cookie alt-svc authentication-info server server-timing traceparent tracestate via \
        www-authenticate x-request-id ";
    let is_hop = headers.get_all("connection").iter().any(|line| {
        let mut names = line.as_bytes().split(|&byte| byte == b',');
        names.any(|hop| {
            hop.trim_ascii()
                .eq_ignore_ascii_case(name.as_str().as_bytes())
        })
    });
    let name = name.as_str();
    let prefixes = ["access-control-", "proxy-", "ratelimit", "x-ratelimit-"];
    !is_hop
        && !DROPPED.contains(&format!(" {name} "))
        && prefixes.iter().all(|prefix| !name.starts_with(prefix))
}

const VERSION: u8 = 1;
