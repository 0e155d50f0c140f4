//! Rules 1 to 18: requests with, without and with invalid keys.

use std::time::{Duration, SystemTime, UNIX_EPOCH};

use axum::body::Body;
use http::{HeaderMap, HeaderValue, Method};
use tower_idempotency::{DynStore, Fingerprinting, KeySyntax, MemoryStore};

use crate::{
    api::{Api, Ask, ask, keyed, optional, record, required},
    client::{Http2, Wire, post},
    faulty::Faulty,
    probe::{Probe, Untouchable, bytes_of, chunks_and_trailers, streamed},
    stores::{Place, memory, on_each_store},
};

on_each_store! {
    rule_12_a_bare_and_a_quoted_spelling_are_one_key
    rule_14_keys_are_byte_exact_and_case_sensitive
    rule_15_keys_that_look_like_code_are_opaque_text
}

#[tokio::test]
async fn rule_01_a_quoted_key_is_accepted() {
    let (store, probe) = (memory(), Probe::counting());
    let api = Api::new(required(store.clone()), &probe);
    let answer = api
        .send(keyed("\"8e03978e-40d5-43dd-bc93-6894a57f9324\""))
        .await;
    answer.assert_live(201).assert_run(1);
    assert!(
        record(&store, "8e03978e-40d5-43dd-bc93-6894a57f9324")
            .await
            .is_some()
    );
}

#[tokio::test]
async fn rule_02_a_missing_required_key_gets_400_naming_the_header() {
    let (store, probe) = (MemoryStore::new(), Probe::counting());
    let api = Api::new(required(DynStore::new(store.clone())), &probe);
    let answer = api.send(ask("/count")).await;
    answer.assert_problem(400, "key-missing");
    assert!(
        answer.problem()["detail"]
            .as_str()
            .unwrap()
            .contains("Idempotency-Key")
    );
    assert_eq!(answer.retry_after(), None);

    let other = "x-request-key".parse().unwrap();
    let api = Api::new(required(DynStore::new(store.clone())).header(other), &probe);
    let answer = api.send(keyed("K")).await;
    answer.assert_problem(400, "key-missing");
    assert!(
        answer.problem()["detail"]
            .as_str()
            .unwrap()
            .contains("X-Request-Key")
    );
    assert_eq!((probe.runs(), store.len()), (0, 0));
    api.send(ask("/count").header("x-request-key", "K"))
        .await
        .assert_run(1);
}

#[tokio::test]
async fn rule_03_a_missing_optional_key_runs_without_a_record() {
    let (store, probe) = (MemoryStore::new(), Probe::counting());
    let api = Api::new(optional(DynStore::new(store.clone())), &probe);
    for number in 1..=2 {
        let answer = api.send(ask("/count")).await;
        answer.assert_live(201).assert_run(number);
        assert_eq!(answer.outcome, None);
    }
    assert_eq!(store.len(), 0);
}

#[tokio::test]
async fn rule_04_an_empty_key_is_never_an_absent_one() {
    let (store, probe) = (MemoryStore::new(), Probe::counting());
    let shared = || DynStore::new(store.clone());
    let permissive = || KeySyntax::compat().length(1..=1024).validate(|_| true);
    for builder in [
        required(shared()),
        optional(shared()),
        optional(shared()).key_syntax(permissive()),
    ] {
        let api = Api::new(builder, &probe);
        for key in ["", " ", "\"\"", "\"\";a=1"] {
            api.send(keyed(key))
                .await
                .assert_problem(400, "key-invalid");
        }
        let server = api.serve().await;
        let answer = Wire::open(&server)
            .await
            .ask(post("/count", "Idempotency-Key:\r\n", "{}"))
            .await;
        assert_eq!((answer.status, &*answer.problem()), (400, "key-invalid"));
    }
    assert_eq!((probe.runs(), store.len()), (0, 0));
    // No validator can allow it.
    let empty = KeySyntax::compat().length(0..=255);
    let refused = optional(shared()).key_syntax(empty).build().unwrap_err();
    assert_eq!(refused.setting(), "key_syntax");
}

#[tokio::test]
async fn rule_05_two_lines_are_refused_equal_or_not() {
    let (store, probe) = (MemoryStore::new(), Probe::counting());
    let api = Api::new(optional(DynStore::new(store.clone())), &probe);
    for (one, other) in [
        ("\"a\"", "\"a\""),
        ("\"a\"", "\"b\""),
        ("\"a\"", ""),
        ("a", "a"),
    ] {
        let twice = ask("/count")
            .line("idempotency-key", one)
            .line("idempotency-key", other);
        api.send(twice).await.assert_problem(400, "key-invalid");
    }
    let server = api.serve().await;
    let lines = "Idempotency-Key: \"a\"\r\nX-Between: 1\r\nidempotency-key: \"a\"\r\n";
    let answer = Wire::open(&server)
        .await
        .ask(post("/count", lines, "{}"))
        .await;
    assert_eq!((answer.status, &*answer.problem()), (400, "key-invalid"));
    assert_eq!((probe.runs(), store.len()), (0, 0));
}

#[tokio::test]
async fn rule_06_one_line_with_two_members_is_refused() {
    refuses(&["\"a\", \"a\"", "\"a\",\"b\"", "\"a\", ", ",\"a\""]).await;
}

#[tokio::test]
async fn rule_07_a_broken_string_is_refused() {
    refuses(&[
        "\"a",
        "\"a\\x\"",
        "\"a\"b",
        "\"",
        "a\"",
        "\"a\\\"",
        "\"a\" \"b\"",
    ])
    .await;
}

#[tokio::test]
async fn rule_08_bytes_outside_visible_ascii_are_refused_without_a_panic() {
    let (store, probe) = (MemoryStore::new(), Probe::counting());
    let api = Api::new(optional(DynStore::new(store.clone())), &probe);
    let server = api.serve().await;
    // All keys come over one connection; none of them breaks it.
    let mut wire = Wire::open(&server).await;
    for byte in (0x80..=0xff).chain([b'\t']) {
        for quote in [&b"\""[..], b""] {
            let head = "POST /count HTTP/1.1\r\nHost: test\r\nX-Account: acme-7\r\nContent-Length: 0\r\nIdempotency-Key: ";
            let key = [quote, b"a", &[byte], b"b", quote].concat();
            let request = [head.as_bytes(), &key, b"\r\n\r\n"].concat();
            let answer = wire.ask(request).await;
            assert_eq!(
                (answer.status, &*answer.problem()),
                (400, "key-invalid"),
                "{byte:#x}"
            );
        }
    }
    assert_eq!((probe.runs(), store.len()), (0, 0));
}

#[tokio::test]
async fn rule_09_parameters_are_not_part_of_the_key() {
    let (store, probe) = (memory(), Probe::counting());
    let api = Api::new(required(store.clone()), &probe);
    let first = api.send(keyed("\"a\";foo=1")).await;
    first.assert_run(1);
    assert!(record(&store, "a").await.is_some());
    for spelling in ["\"a\"", "\"a\";foo=2;bar", "a"] {
        api.send(keyed(spelling)).await.assert_replay_of(&first);
    }
}

#[tokio::test]
async fn rule_10_a_key_has_1_to_255_characters() {
    let probe = Probe::counting();
    let api = Api::new(required(memory()), &probe);
    let longest = [
        "x".repeat(255),
        format!("\"{}\"", "y".repeat(255)),
        // The key is decoded.
        format!("\"{}\"", "\\\"".repeat(255)),
    ];
    for key in &longest {
        api.send(keyed(key)).await.assert_live(201);
    }
    assert_eq!(probe.runs(), longest.len());
    for key in ["x".repeat(256), format!("\"{}\"", "y".repeat(256))] {
        let answer = api.send(keyed(&key)).await;
        answer.assert_problem(400, "key-invalid");
        let detail = answer.problem()["detail"].as_str().unwrap().to_owned();
        assert!(
            detail.contains("Idempotency-Key") && detail.contains("255") && detail.contains("256")
        );
        assert!(!detail.contains("xxx") && !detail.contains("yyy"));
    }
    assert_eq!(probe.runs(), longest.len());
}

#[tokio::test]
async fn rule_10_a_key_of_64_kib_is_refused_before_any_work() {
    let (store, probe) = (Faulty::new(MemoryStore::new()), Probe::counting());
    let hashes = Fingerprinting::custom("none", |_, _| panic!("a fingerprint was made"));
    let api = Api::new(
        required(DynStore::new(store.clone())).fingerprint(hashes),
        &probe,
    );
    let server = api.serve().await;
    let mut wire = Wire::open(&server).await;
    let long = "x".repeat(64 << 10);
    for key in [long.clone(), format!("\"{long}\"")] {
        let lines = format!("Idempotency-Key: {key}\r\n");
        let answer = wire.ask(post("/count", &lines, "{}")).await;
        assert_eq!((answer.status, &*answer.problem()), (400, "key-invalid"));
    }
    assert_eq!((probe.runs(), store.calls()), (0, vec![]));
}

#[tokio::test]
async fn rule_11_bare_uuids_are_accepted_unless_the_syntax_is_strict() {
    let uuid = "8e03978e-40d5-43dd-bc93-6894a57f9324";
    let probe = Probe::counting();
    let api = Api::new(required(memory()), &probe);
    api.send(keyed(uuid)).await.assert_run(1);

    let strict = Api::new(required(memory()).key_syntax(KeySyntax::strict()), &probe);
    strict
        .send(keyed(uuid))
        .await
        .assert_problem(400, "key-invalid");
    strict
        .send(keyed(&format!("\"{uuid}\"")))
        .await
        .assert_run(2);
}

#[tokio::test]
async fn rule_11_other_syntaxes_accept_uuids_or_validated_keys_only() {
    let probe = Probe::counting();
    let uuids = Api::new(
        required(memory()).key_syntax(KeySyntax::compat().uuid()),
        &probe,
    );
    for key in [
        "test",
        "123",
        "8e03978e40d543ddbc936894a57f9324",
        "8e03978e-40d5-43dd-bc93-6894a57f932g",
        "00000000-0000-0000-0000-000000000000",
        "FFFFFFFF-ffff-ffff-ffff-ffffffffffff",
    ] {
        uuids
            .send(keyed(key))
            .await
            .assert_problem(400, "key-invalid");
    }
    let first = uuids
        .send(keyed("8e03978e-40d5-43dd-bc93-6894a57f9324"))
        .await;
    first.assert_run(1);
    let upper = "8E03978E-40D5-43DD-BC93-6894A57F9324";
    uuids.send(keyed(upper)).await.assert_replay_of(&first);

    let day = Duration::from_secs(24 * 3600);
    let recent = KeySyntax::strict().uuid_v7(day);
    let api = Api::new(required(memory()).key_syntax(recent), &probe);
    let now = SystemTime::now().duration_since(UNIX_EPOCH).unwrap();
    api.send(keyed(&uuid_v7(now))).await.assert_run(2);
    let stale = api.send(keyed(&uuid_v7(now - 2 * day))).await;
    stale.assert_problem(400, "key-stale");
    assert_eq!(stale.retry_after(), None);
    for key in [
        uuid_v7(now + day),
        "\"8e03978e-40d5-43dd-bc93-6894a57f9324\"".to_owned(),
    ] {
        api.send(keyed(&key))
            .await
            .assert_problem(400, "key-invalid");
    }

    let prefixed = KeySyntax::compat()
        .length(5..=20)
        .validate(|key| key.starts_with("pay_"));
    let api = Api::new(required(memory()).key_syntax(prefixed), &probe);
    for key in ["pay_", "refund_1", "pay_01234567890123456789"] {
        api.send(keyed(key))
            .await
            .assert_problem(400, "key-invalid");
    }
    api.send(keyed("pay_1")).await.assert_run(3);
}

async fn rule_12_a_bare_and_a_quoted_spelling_are_one_key(place: &Place) {
    let probe = Probe::counting();
    let api = Api::new(required(place.open().await), &probe);
    let first = api.send(keyed("K")).await;
    api.send(keyed("\"K\"")).await.assert_replay_of(&first);
    api.send(keyed(" K ")).await.assert_replay_of(&first);
    assert_eq!(probe.runs(), 1);
}

#[tokio::test]
async fn rule_13_bare_keys_have_no_separators() {
    refuses(&["a,b", "a;b", "a b", "a\\b", "a\"b", "a;foo=1", "a, a"]).await;
}

async fn rule_14_keys_are_byte_exact_and_case_sensitive(place: &Place) {
    let probe = Probe::counting();
    let api = Api::new(required(place.open().await), &probe);
    let keys = [
        "\"Key\"",
        "\"key\"",
        "\"KEY\"",
        "\"key \"",
        "\" key\"",
        "\"ke\\\\y\"",
        "\"k-ey\"",
        "\"k_ey\"",
    ];
    let mut first = Vec::new();
    for key in keys {
        first.push(api.send(keyed(key)).await);
    }
    assert_eq!(probe.runs(), keys.len());
    for (key, first) in keys.iter().zip(&first) {
        api.send(keyed(key)).await.assert_replay_of(first);
    }
}

async fn rule_15_keys_that_look_like_code_are_opaque_text(place: &Place) {
    let probe = Probe::counting();
    let api = Api::new(required(place.open().await), &probe);
    let keys = [
        "\"'; DROP TABLE idempotency; --\"",
        "*",
        "a:b",
        "../x",
        "%",
        "_",
        "{a}",
        "$1",
        "?",
        "\"a\\\"b\"",
    ];
    let mut first = Vec::new();
    for key in keys {
        first.push(api.send(keyed(key)).await);
    }
    assert_eq!(probe.runs(), keys.len());
    for (key, first) in keys.iter().zip(&first) {
        api.send(keyed(key)).await.assert_replay_of(first);
    }
}

#[tokio::test]
async fn rule_16_a_key_in_trailers_is_absent() {
    let (store, probe) = (MemoryStore::new(), Probe::counting());
    let chunked = "POST /count HTTP/1.1\r\nHost: test\r\nX-Account: acme-7\r\nTE: trailers\r\nTrailer: Idempotency-Key\r\nTransfer-Encoding: chunked\r\n\r\n2\r\n{}\r\n0\r\nIdempotency-Key: \"K\"\r\n\r\n";
    let in_trailers = || {
        let mut trailers = HeaderMap::new();
        trailers.insert("idempotency-key", HeaderValue::from_static("\"K\""));
        ask("/count").body(chunks_and_trailers(&["{}"], trailers)).0
    };

    let api = Api::new(required(DynStore::new(store.clone())), &probe);
    let server = api.serve().await;
    let answer = Wire::open(&server).await.ask(chunked).await;
    assert_eq!((answer.status, &*answer.problem()), (400, "key-missing"));
    let answer = Http2::open(&server).await.ask(in_trailers()).await;
    answer.assert_problem(400, "key-missing");
    assert_eq!(probe.runs(), 0);

    let api = Api::new(optional(DynStore::new(store.clone())), &probe);
    let server = api.serve().await;
    assert_eq!(Wire::open(&server).await.ask(chunked).await.status, 201);
    Http2::open(&server)
        .await
        .ask(in_trailers())
        .await
        .assert_run(2);
    assert_eq!(store.len(), 0);
}

#[tokio::test]
async fn rule_17_other_methods_pass_unbuffered_even_with_a_malformed_key() {
    let store = MemoryStore::new();
    let probe = Probe::running(|run| async move {
        assert!(run.request.headers().contains_key("idempotency-key"));
        assert!(
            run.request
                .extensions()
                .get::<tower_idempotency::Operation>()
                .is_none()
        );
        let mut response = run.created();
        *response.body_mut() = bytes_of(run.request.into_body()).await.into();
        Ok(response)
    });
    let api = Api::new(required(DynStore::new(store.clone())), &probe);
    let methods = [
        Method::GET,
        Method::HEAD,
        Method::OPTIONS,
        Method::TRACE,
        Method::PUT,
        Method::DELETE,
    ];
    let mut runs = 0;
    for method in methods {
        for key in ["\"K\"", "\"K\"", "\"broken", ""] {
            // The handler runs before the body has ended, so that nothing buffers
            // it.
            let (frames, body) = streamed();
            let asked = api.spawn(keyed(key).method(method.clone()).body(body));
            runs += 1;
            while probe.runs() < runs {
                tokio::task::yield_now().await;
            }
            frames.send(Ok(crate::probe::data("un"))).unwrap();
            frames.send(Ok(crate::probe::data("touched"))).unwrap();
            drop(frames);
            let answer = asked.await.unwrap();
            answer.assert_live(201);
            assert_eq!((&*answer.body, answer.outcome), (&b"untouched"[..], None));
        }
    }
    assert_eq!(store.len(), 0);
}

#[tokio::test]
async fn rule_18_the_key_is_checked_before_store_handler_and_body() {
    let (store, probe) = (Faulty::new(MemoryStore::new()), Probe::counting());
    let api = Api::new(required(DynStore::new(store.clone())), &probe);
    let unread = |ask: Ask| {
        let ask = ask.header("expect", "100-continue");
        ask.body(Body::new(Untouchable))
    };
    api.send(unread(ask("/count")))
        .await
        .assert_problem(400, "key-missing");
    for key in ["", "\"\"", "\"a", "\"a\", \"a\"", "a b", "\"é\""] {
        let answer = api.send(unread(keyed(key))).await;
        answer.assert_problem(400, "key-invalid");
    }
    let anonymous = unread(keyed("K")).without("x-account");
    api.send(anonymous)
        .await
        .assert_problem(403, "caller-unknown");
    assert_eq!((probe.runs(), store.calls()), (0, vec![]));
}

#[tokio::test]
async fn rule_18_a_refusal_comes_before_100_continue() {
    let probe = Probe::counting();
    let server = Api::new(required(memory()), &probe).serve().await;
    let head = |lines: &str| {
        format!(
            "POST /count HTTP/1.1\r\nHost: test\r\nX-Account: acme-7\r\nContent-Length: 2\r\nExpect: 100-continue\r\n{lines}\r\n"
        )
    };
    let answer = Wire::open(&server).await.ask(head("")).await;
    assert_eq!((answer.status, &*answer.problem()), (400, "key-missing"));

    let mut wire = Wire::open(&server).await;
    let told = wire.ask(head("Idempotency-Key: K\r\n")).await;
    assert_eq!((told.status, probe.runs()), (100, 0));
    assert_eq!(wire.ask("{}").await.status, 201);
}

/// Asserts that each key is refused on routes of both kinds and by both syntaxes.
async fn refuses(keys: &[&str]) {
    let (store, probe) = (MemoryStore::new(), Probe::counting());
    let shared = || DynStore::new(store.clone());
    for builder in [
        required(shared()),
        optional(shared()),
        required(shared()).key_syntax(KeySyntax::strict()),
    ] {
        let api = Api::new(builder, &probe);
        for key in keys {
            api.send(keyed(key))
                .await
                .assert_problem(400, "key-invalid");
        }
    }
    assert_eq!((probe.runs(), store.len()), (0, 0));
}

/// A quoted UUID of version 7 made at this time.
fn uuid_v7(at: Duration) -> String {
    let millis = u64::try_from(at.as_millis()).unwrap();
    let uuid = uuid::Builder::from_unix_timestamp_millis(millis, &[7; 10]).into_uuid();
    format!("\"{uuid}\"")
}
