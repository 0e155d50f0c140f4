//! Rules 88 to 96: sealed responses, keyed fingerprints, digests of names, and ids of keys
//! in logs.

mod keys;
mod names;
mod operators;
mod providers;
mod quotas;
mod scans;
mod tampering;
mod watched;

use http::{HeaderMap, HeaderValue, StatusCode, header, request};
use tower_idempotency::{
    DynStore, Fingerprinting, IdempotencyBuilder, ReplayAuthorizer, ReplayDecision,
    sealing::{NameDigests, Sealing, SealingKey, Secret},
};

use self::watched::Watched;
use crate::{
    api::{Api, Ask, eventually, keyed, required},
    probe::{Probe, chunks_and_trailers},
    stores::{Place, memory, on_each_store},
};

on_each_store! {
    rule_88_a_sealed_response_replays_with_headers_and_trailers
    rule_88_a_sealed_tombstone_answers_as_a_readable_one
    rule_88_the_store_receives_nothing_readable
}

fn secret(filled: u8) -> Secret {
    Secret::from_bytes(&[filled; 32]).unwrap()
}

fn key(id: &str, filled: u8) -> SealingKey {
    SealingKey::new(id, &secret(filled)).unwrap()
}

/// Seals the records of `payments` with the key of November.
fn sealing() -> Sealing {
    Sealing::new("payments", key("2026-11", 11))
}

fn sealed(store: DynStore) -> IdempotencyBuilder<DynStore> {
    required(store).sealing(sealing())
}

async fn rule_88_a_sealed_response_replays_with_headers_and_trailers(place: &Place) {
    let probe = Probe::answering(|run| {
        let mut trailers = HeaderMap::new();
        trailers.insert("x-sum", HeaderValue::from_static("7"));
        let mut response = run.created();
        *response.body_mut() = chunks_and_trailers(&["paid ", "7"], trailers);
        response
            .headers_mut()
            .append("x-line", HeaderValue::from_static("a, b"));
        let opaque = HeaderValue::from_bytes(b"caf\xe9").unwrap();
        response.headers_mut().append("x-line", opaque);
        response
    });
    let api = Api::new(sealed(place.open().await), &probe);
    let first = api.send(keyed("K")).await;
    first.assert_run(1);
    for _ in 0..2 {
        api.send(keyed("K")).await.assert_replay_of(&first);
    }
    // Another process has the same keys.
    let other = Api::new(sealed(place.open().await), &probe);
    other.send(keyed("K")).await.assert_replay_of(&first);
    let differs = other.send(keyed("K").body("{}")).await;
    differs.assert_problem(422, "key-reused");
    assert_eq!(probe.runs(), 1);
}

async fn rule_88_a_sealed_tombstone_answers_as_a_readable_one(place: &Place) {
    let probe = Probe::answering(|run| {
        let mut response = run.created();
        let stream = HeaderValue::from_static("text/event-stream");
        response.headers_mut().insert(header::CONTENT_TYPE, stream);
        response
    });
    let api = Api::new(sealed(place.open().await), &probe);
    api.send(keyed("K")).await.assert_run(1);
    eventually(async || {
        let retry = api.send(keyed("K")).await;
        let problem = retry.problem()["type"].as_str().unwrap().to_owned();
        problem.ends_with("response-not-replayable").then_some(())
    })
    .await;
    assert_eq!(probe.runs(), 1);
}

async fn rule_88_the_store_receives_nothing_readable(place: &Place) {
    let probe = secret_answers();
    let store = Watched::new(place.open().await);
    let api = Api::new(hidden(DynStore::new(store.clone())), &probe);
    let first = api.send(secret_ask()).await;
    first.assert_run(1);
    api.send(secret_ask()).await.assert_replay_of(&first);
    let received = store.received();
    assert!(received.len() > 400);
    assert_nothing_readable(&received);
    // The same without secrets, so that the search can find something.
    let plain = Watched::new(place.open().await);
    let api = Api::new(required(DynStore::new(plain.clone())), &probe);
    api.send(secret_ask()).await.assert_run(2);
    assert!(contains(&plain.received(), b"k3y-s3cr3t"));
    assert!(contains(&plain.received(), b"answ3r-s3cr3t"));
}

/// A layer with every setting that hides something.
fn hidden(store: DynStore) -> IdempotencyBuilder<DynStore> {
    sealed(store)
        .fingerprint(Fingerprinting::bytes().keyed(&secret(1)))
        .name_digests(NameDigests::new(&secret(1)))
}

fn secret_ask() -> Ask {
    keyed("k3y-s3cr3t")
        .from("acct-s3cr3t")
        .body("{\"b0dy\":\"s3cr3t\"}")
}

fn secret_answers() -> Probe {
    Probe::answering(|run| {
        let operation = run.operation();
        assert_eq!(operation.scope().as_str(), "acct-s3cr3t");
        assert_eq!(operation.key().as_str(), "k3y-s3cr3t");
        let mut response = run.created();
        let header = HeaderValue::from_static("h3ader-s3cr3t");
        response.headers_mut().insert("x-token", header);
        *response.body_mut() = "answ3r-s3cr3t".into();
        response
    })
}

fn assert_nothing_readable(bytes: &[u8]) {
    for readable in ["s3cr3t", "acct", "k3y", "b0dy", "answ3r", "x-token"] {
        assert!(!contains(bytes, readable.as_bytes()), "{readable}");
    }
}

#[tokio::test]
async fn rule_35_an_authorizer_sees_the_attributes_of_a_sealed_response() {
    fn user(request: &request::Parts) -> Option<&str> {
        request.headers.get("x-user")?.to_str().ok()
    }

    let authorizer = ReplayAuthorizer::new(|request, record| {
        assert_eq!(record.status(), Some(StatusCode::CREATED));
        let decision = match user(request) == record.attribute("user") {
            true => ReplayDecision::Allow,
            false => ReplayDecision::Refuse,
        };
        async move { decision }
    });
    let authorizer = authorizer.attributes(|request| {
        let user = user(request).map(|user| ("user", user));
        user.into_iter().collect()
    });
    let store = Watched::new(memory());
    let builder = sealed(DynStore::new(store.clone())).authorize_replay(authorizer);
    let api = Api::new(builder, &Probe::counting());
    let first = api.send(keyed("K").header("x-user", "us3r")).await;
    first.assert_run(1);
    let other = api.send(keyed("K").header("x-user", "other")).await;
    other.assert_problem(403, "replay-refused");
    let replay = api.send(keyed("K").header("x-user", "us3r")).await;
    replay.assert_replay_of(&first);
    assert!(!contains(&store.received(), b"us3r"));
}

fn contains(bytes: &[u8], part: &[u8]) -> bool {
    bytes.windows(part.len()).any(|window| window == part)
}
