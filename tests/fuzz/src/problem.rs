//! Refusals: problem details that a parser reads, errors of gRPC, and no secret in either.

use std::time::Duration;

use arbitrary::Unstructured;
use bytes::Bytes;
use http::{HeaderName, HeaderValue, Request, response};
use serde_json::Value;
use tower_idempotency::{
    Fingerprinting, IdempotencyLayer, Scope, StoreError,
    store::{RecordState, admin::RecordedResponse},
    test_support::{Fault, FaultyStore},
};

use crate::{
    probe::{Probed, fingerprint, probe},
    record_store::RecordStore,
};

/// The input chooses a refusal, and what its text is made of.
pub fn problem(data: &[u8]) {
    let _ = refuse(&mut Unstructured::new(data));
}

fn refuse(input: &mut Unstructured<'_>) -> arbitrary::Result<()> {
    let slug = *input.choose(&SLUGS)?;
    let is_grpc: bool = input.arbitrary()?;
    let header = name(input)?;
    let compared = [name(input)?, name(input)?];
    let types: String = input.arbitrary()?;
    let rest = input.bytes(input.len())?;

    let media_type = if is_grpc { GRPC } else { "application/json" };
    let mut request = Request::post("/").header("content-type", media_type);
    if slug != "key-missing" {
        request = request.header(&header, key(slug, rest));
    }
    let request = request.body(body(slug, rest)).expect("a valid request");
    let mut fingerprinting = Fingerprinting::json();
    for name in compared {
        fingerprinting = fingerprinting.header(name);
    }
    let store = FaultyStore::new(record(slug, &fingerprinting));
    if slug == "store-unavailable" && rest.len() % 2 == 0 {
        store.inject_all(Fault::Error(StoreError::unavailable(SECRET)));
    }
    let is_known = slug != "caller-unknown";
    let scope = move |_: &_| Scope::new(SECRET).filter(|_| is_known);
    let layer = IdempotencyLayer::required(store, scope)
        .header(header)
        .max_request_body(LARGEST)
        .fingerprint(fingerprinting)
        .problem_types(&*types);
    let Probed::Answered(parts, body) = probe(layer, request) else {
        panic!("the request ran");
    };

    shows_no_secret(&parts, &body);
    assert_eq!(parts.headers["cache-control"], "no-store");
    let seconds = parts.headers.get("retry-after").map(number);
    assert!(seconds.is_none_or(|seconds| seconds >= 1));
    match is_grpc {
        true => is_error(&parts, &body, seconds),
        false => is_problem(&parts, &body, &format!("{types}{slug}"), seconds),
    }
    Ok(())
}

/// RFC 9457 §3.1, and the members of this crate.
fn is_problem(parts: &response::Parts, body: &[u8], problem_type: &str, seconds: Option<u64>) {
    assert_eq!(parts.headers["content-type"], "application/problem+json");
    assert!(parts.status.is_client_error() || parts.status.is_server_error());
    let problem: Value = serde_json::from_slice(body).expect("a problem is JSON");
    assert_eq!(problem["type"], problem_type);
    assert_eq!(problem["status"], parts.status.as_u16());
    assert!(problem["title"].is_string() && problem["detail"].is_string());
    assert_eq!(problem["retryable"], seconds.is_some());
    assert_eq!(problem.get("retry_after").and_then(Value::as_u64), seconds);
    let names = |member: &str| {
        problem
            .get(member)
            .map(|names| names.as_array().unwrap().len())
    };
    let is_mismatch = problem_type.ends_with("key-reused");
    assert_eq!(names("compared").is_some(), is_mismatch);
    assert!(names("differs") <= names("compared"));
}

fn is_error(parts: &response::Parts, body: &[u8], seconds: Option<u64>) {
    assert_eq!(parts.status, 200);
    assert_eq!(parts.headers["content-type"], GRPC);
    assert!(body.is_empty());
    assert!((1..=16).contains(&number(&parts.headers["grpc-status"])));
    let message = parts.headers["grpc-message"].as_bytes();
    assert!(message.iter().all(|byte| (b' '..=b'~').contains(byte)));
    match seconds {
        Some(seconds) => {
            assert_eq!(number(&parts.headers["grpc-status"]), 14, "UNAVAILABLE");
            assert_eq!(
                number(&parts.headers["grpc-retry-pushback-ms"]),
                seconds * 1_000
            );
        }
        None => assert_eq!(parts.headers["grpc-retry-pushback-ms"], "-1"),
    }
}

fn shows_no_secret(parts: &response::Parts, body: &[u8]) {
    let is_secret = |text: &[u8]| {
        text.windows(SECRET.len())
            .any(|part| part == SECRET.as_bytes())
    };
    assert!(!is_secret(body), "{}", body.escape_ascii());
    for (name, value) in &parts.headers {
        assert!(!is_secret(value.as_bytes()), "{name}: {value:?}");
    }
}

/// A record that makes the layer refuse with this slug, if it gets that far.
fn record(slug: &str, fingerprinting: &Fingerprinting) -> RecordStore {
    let state = match slug {
        "request-in-progress" => RecordState::InProgress {
            lease_left: Some(Duration::from_secs(9)),
        },
        "outcome-unknown" => RecordState::Unknown,
        "response-not-replayable" => RecordState::Completed {
            response: RecordedResponse::tombstone().encode(),
        },
        _ => RecordState::Completed {
            response: SECRET.into(),
        },
    };
    let mut store = RecordStore::of_same_request(state);
    if slug == "key-reused" {
        let request = Request::post(format!("/{SECRET}?{SECRET}"))
            .header("idempotency-key", SECRET)
            .header("content-type", format!("text/plain;{SECRET}={SECRET}"));
        let request = request.body(SECRET.into()).expect("a valid request");
        store.fingerprint = fingerprint(fingerprinting.clone(), request);
    }
    store
}

fn key(slug: &str, rest: &[u8]) -> HeaderValue {
    let unfit = match slug {
        "key-invalid" => [b"\"", SECRET.as_bytes(), rest, b","].concat(),
        _ => SECRET.into(),
    };
    let plain = HeaderValue::from_static("\"secret-of-a-client,");
    HeaderValue::from_bytes(&unfit).unwrap_or(plain)
}

fn body(slug: &str, rest: &[u8]) -> Bytes {
    match slug {
        "body-too-large" => [SECRET.as_bytes(), rest, &[b' '; LARGEST]].concat(),
        _ => format!("\"{SECRET}\"").into(),
    }
    .into()
}

/// A header's name.
fn name(input: &mut Unstructured<'_>) -> arbitrary::Result<HeaderName> {
    let length = input.int_in_range(0..=9)?;
    let name = [b"x-", input.bytes(length)?].concat();
    Ok(HeaderName::from_bytes(&name).unwrap_or(HeaderName::from_static("x-key")))
}

fn number(value: &HeaderValue) -> u64 {
    value.to_str().unwrap().parse().unwrap()
}

/// The key, the scope, and parts of the stored request and of the response.
const SECRET: &str = "secret-of-a-client";
const GRPC: &str = "application/grpc";
const LARGEST: usize = 64;

const SLUGS: [&str; 9] = [
    "body-too-large",
    "caller-unknown",
    "key-invalid",
    "key-missing",
    "key-reused",
    "outcome-unknown",
    "request-in-progress",
    "response-not-replayable",
    "store-unavailable",
];
