//! Rules 23 to 30, 36 and 37: requests that match a record, and requests that do not.

use std::sync::{
    Arc,
    atomic::{AtomicUsize, Ordering},
};

use axum::{Router, routing};
use http::{Method, StatusCode, header};
use tower_idempotency::{Fingerprinting, IdempotencyLayer, Scope};

use crate::{
    api::{Api, Ask, ask, keyed, required, send},
    client::{Http2, Wire},
    probe::{Probe, bytes_of, data, streamed},
    stores::{Place, memory, on_each_store},
};

on_each_store! {
    rule_23_a_changed_byte_mismatches_and_the_original_still_replays
    rule_26_another_path_or_method_is_a_mismatch
}

async fn rule_23_a_changed_byte_mismatches_and_the_original_still_replays(place: &Place) {
    let probe = Probe::counting();
    let api = Api::new(required(place.open().await), &probe);
    let first = api.send(keyed("K")).await;
    for body in ["{\"amount\":2}", "{\"amount\":1} ", "{\"amount\":1", ""] {
        let refused = api.send(keyed("K").body(body)).await;
        refused.assert_problem(422, "key-reused");
        assert_eq!(refused.retry_after(), None);
    }
    api.send(keyed("K")).await.assert_replay_of(&first);
    assert_eq!(probe.runs(), 1);
}

#[tokio::test]
async fn rule_23_the_status_of_a_mismatch_may_be_400_or_409() {
    for status in [400, 409, 422] {
        let probe = Probe::counting();
        let builder = required(memory()).mismatch_status(StatusCode::from_u16(status).unwrap());
        let api = Api::new(builder, &probe);
        api.send(keyed("K")).await;
        api.send(keyed("K").body("{}"))
            .await
            .assert_problem(status, "key-reused");
        assert_eq!(probe.runs(), 1);
    }
}

#[tokio::test]
async fn rule_24_reordered_members_mismatch_by_bytes_and_replay_by_structure() {
    let (one, other) = (
        r#"{"a":1,"b":{"c":2,"d":[3,4]}}"#,
        r#"{ "b": {"d":[3,4],"c":2}, "a":1 }"#,
    );
    let probe = Probe::counting();
    let bytes = Api::new(required(memory()), &probe);
    bytes.send(keyed("K").body(one)).await;
    bytes
        .send(keyed("K").body(other))
        .await
        .assert_problem(422, "key-reused");

    let by_structure = Api::new(
        required(memory()).fingerprint(Fingerprinting::json()),
        &probe,
    );
    let first = by_structure.send(keyed("K").body(one)).await;
    by_structure
        .send(keyed("K").body(other))
        .await
        .assert_replay_of(&first);
    let reordered = r#"{"a":1,"b":{"c":2,"d":[4,3]}}"#;
    by_structure
        .send(keyed("K").body(reordered))
        .await
        .assert_problem(422, "key-reused");
    assert_eq!(probe.runs(), 2);
}

#[tokio::test]
async fn rule_25_by_structure_numbers_keep_their_spelling_and_duplicates_are_refused() {
    for fingerprinting in [
        Fingerprinting::json(),
        Fingerprinting::json_only(["/n"]),
        Fingerprinting::json_without(["/attempt"]),
    ] {
        let probe = Probe::counting();
        let api = Api::new(required(memory()).fingerprint(fingerprinting), &probe);
        for (index, (one, other)) in [
            (r#"{"n":9007199254740993}"#, r#"{"n":9007199254740992}"#),
            (r#"{"n":1}"#, r#"{"n":1.0}"#),
            (r#"{"n":1}"#, r#"{"n":"1"}"#),
            (r#"{"n":null}"#, r#"{}"#),
            (r#"{"n":1e2}"#, r#"{"n":100}"#),
            (r#"{"n":0}"#, r#"{"n":-0}"#),
        ]
        .into_iter()
        .enumerate()
        {
            let key = format!("K{index}");
            api.send(keyed(&key).body(one)).await.assert_live(201);
            api.send(keyed(&key).body(other))
                .await
                .assert_problem(422, "key-reused");
            assert_eq!(probe.runs(), index + 1);
        }
        for body in [
            r#"{"n":1,"n":1}"#,
            r#"{"n":1,"\u006e":2}"#,
            "{\"n\":",
            "[1,]",
        ] {
            api.send(keyed("L").body(body))
                .await
                .assert_problem(400, "body-invalid");
        }
        assert_eq!(probe.runs(), 6);
        // The key is still free.
        api.send(keyed("L").body("{\"n\":1}")).await.assert_run(7);
    }
}

#[tokio::test]
async fn rule_25_chosen_and_excluded_fields_decide() {
    let probe = Probe::counting();
    let only = Fingerprinting::json_only(["/amount", "/to/iban"]);
    let api = Api::new(required(memory()).fingerprint(only), &probe);
    let first = api
        .send(keyed("K").body(r#"{"amount":1,"to":{"iban":"X"},"try":1}"#))
        .await;
    let again = keyed("K").body(r#"{"try":2,"to":{"iban":"X","bic":"Y"},"amount":1}"#);
    api.send(again).await.assert_replay_of(&first);
    let other = keyed("K").body(r#"{"amount":1,"to":{"iban":"Z"}}"#);
    api.send(other).await.assert_problem(422, "key-reused");

    let without = Fingerprinting::json_without(["/meta/attempt"]);
    let api = Api::new(required(memory()).fingerprint(without), &probe);
    let first = api
        .send(keyed("K").body(r#"{"a":1,"meta":{"attempt":1,"b":2}}"#))
        .await;
    for body in [
        r#"{"a":1,"meta":{"attempt":2,"b":2}}"#,
        r#"{"a":1,"meta":{"b":2}}"#,
    ] {
        api.send(keyed("K").body(body))
            .await
            .assert_replay_of(&first);
    }
    let other = keyed("K").body(r#"{"a":1,"meta":{"attempt":1,"b":3}}"#);
    api.send(other).await.assert_problem(422, "key-reused");
    assert_eq!(probe.runs(), 2);
}

async fn rule_26_another_path_or_method_is_a_mismatch(place: &Place) {
    let probe = Probe::counting();
    let api = Api::new(required(place.open().await), &probe);
    let first = api.send(keyed("K")).await;
    for uri in ["/count/1", "/count/", "/Count", "/coun", "//count", "/"] {
        api.send(ask(uri).key("K"))
            .await
            .assert_problem(422, "key-reused");
    }
    api.send(keyed("K").method(Method::PATCH))
        .await
        .assert_problem(422, "key-reused");
    api.send(keyed("K")).await.assert_replay_of(&first);
    assert_eq!(probe.runs(), 1);
}

#[tokio::test]
async fn rule_26_a_scope_with_the_endpoint_makes_them_two_operations() {
    let probe = Probe::counting();
    let by_endpoint = IdempotencyLayer::required(memory(), |parts| {
        Some(Scope::new("acme-7")?.with_endpoint(parts.uri.path()))
    });
    let api = Api::new(by_endpoint, &probe);
    let first = api.send(ask("/one").key("K")).await;
    api.send(ask("/other").key("K")).await.assert_run(2);
    api.send(ask("/one").key("K"))
        .await
        .assert_replay_of(&first);
}

#[tokio::test]
async fn rule_27_another_query_is_a_mismatch() {
    let probe = Probe::counting();
    let api = Api::new(required(memory()), &probe);
    let first = api.send(ask("/count?dry=1&a=2").key("K")).await;
    for uri in [
        "/count",
        "/count?",
        "/count?dry=0&a=2",
        "/count?a=2&dry=1",
        "/count?dry=1&a=2&",
    ] {
        api.send(ask(uri).key("K"))
            .await
            .assert_problem(422, "key-reused");
    }
    api.send(ask("/count?dry=1&a=2").key("K"))
        .await
        .assert_replay_of(&first);
    assert_eq!(probe.runs(), 1);
}

#[tokio::test]
async fn rule_28_equal_paths_under_two_prefixes_are_two_requests() {
    let layer = required(memory()).build().unwrap();
    let runs = Arc::new(AtomicUsize::new(0));
    let counted = Arc::clone(&runs);
    // The layer is inside of each nested router, which sees `/things` alone.
    let inner = Router::new()
        .route(
            "/things",
            routing::post(async move || {
                (
                    StatusCode::CREATED,
                    counted.fetch_add(1, Ordering::SeqCst).to_string(),
                )
            }),
        )
        .layer(layer);
    let nested = Router::new()
        .nest("/v1", inner.clone())
        .nest("/v2", inner.clone());
    let app = nested.merge(inner);
    let first = send(app.clone(), ask("/v1/things").key("K")).await;
    first.assert_live(201);
    for other in ["/v2/things", "/things"] {
        send(app.clone(), ask(other).key("K"))
            .await
            .assert_problem(422, "key-reused");
    }
    send(app.clone(), ask("/v1/things").key("K"))
        .await
        .assert_replay_of(&first);
    assert_eq!(runs.load(Ordering::SeqCst), 1);
    send(app.clone(), ask("/things").key("L"))
        .await
        .assert_live(201);
    send(app, ask("/v2/things").key("L"))
        .await
        .assert_problem(422, "key-reused");
    assert_eq!(runs.load(Ordering::SeqCst), 2);
}

#[tokio::test]
async fn rule_29_another_media_type_mismatches_and_another_spelling_replays() {
    let of = |value: &'static str| keyed("K").header("content-type", value);
    let probe = Probe::counting();
    let api = Api::new(required(memory()), &probe);
    let first = api
        .send(of("application/json; charset=utf-8; profile=\"x\""))
        .await;
    for value in [
        "Application/JSON;CHARSET=UTF-8;profile=x",
        "application/json ;profile=x ; charset=\"utf-8\"",
    ] {
        api.send(of(value)).await.assert_replay_of(&first);
    }
    for value in [
        "application/xml",
        "application/json",
        "application/json; charset=latin1; profile=x",
        "",
    ] {
        api.send(of(value)).await.assert_problem(422, "key-reused");
    }
    api.send(keyed("K").without("content-type"))
        .await
        .assert_problem(422, "key-reused");
    assert_eq!(probe.runs(), 1);
}

#[tokio::test]
async fn rule_30_headers_that_change_from_try_to_try_do_not_count() {
    for fingerprinting in [
        Fingerprinting::bytes(),
        Fingerprinting::json(),
        Fingerprinting::multipart(),
    ] {
        let probe = Probe::counting();
        let api = Api::new(required(memory()).fingerprint(fingerprinting), &probe);
        let first = api
            .send(keyed("K").header("authorization", "Bearer one"))
            .await;
        for (name, value) in [
            ("user-agent", "another/2"),
            (
                "traceparent",
                "00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01",
            ),
            ("date", "Tue, 15 Nov 1994 08:12:31 GMT"),
            ("authorization", "Bearer refreshed"),
            ("signature", "sig1=:YWJj:"),
            ("signature-input", "sig1=();created=1"),
            ("accept-encoding", "gzip"),
            ("accept", "text/html"),
            ("x-request-id", "2"),
            ("cookie", "a=b"),
        ] {
            api.send(keyed("K").header(name, value))
                .await
                .assert_replay_of(&first);
        }
        assert_eq!(probe.runs(), 1);
    }
}

#[tokio::test]
async fn rule_30_a_header_counts_when_it_was_chosen() {
    let probe = Probe::counting();
    let languages = Fingerprinting::bytes().header(header::CONTENT_LANGUAGE);
    let api = Api::new(required(memory()).fingerprint(languages), &probe);
    let first = api.send(keyed("K")).await;
    for value in ["", "de"] {
        let other = keyed("K").header("content-language", value);
        api.send(other).await.assert_problem(422, "key-reused");
    }
    api.send(keyed("K")).await.assert_replay_of(&first);
}

#[tokio::test]
async fn rule_30_a_custom_fingerprint_alone_decides() {
    let by_order = Fingerprinting::custom("order/1", |parts, _| {
        parts.headers["x-order"].as_bytes().to_vec()
    });
    let probe = Probe::counting();
    let api = Api::new(required(memory()).fingerprint(by_order), &probe);
    let first = api.send(keyed("K").header("x-order", "1")).await;
    let same = ask("/elsewhere")
        .key("K")
        .body("another")
        .header("x-order", "1");
    api.send(same).await.assert_replay_of(&first);
    let other = keyed("K").header("x-order", "2");
    api.send(other).await.assert_problem(422, "key-reused");
}

#[tokio::test]
async fn rule_30_earlier_fingerprints_are_compared_and_unknown_ones_refused() {
    let store = memory();
    let probe = Probe::counting();
    let earlier = || Fingerprinting::bytes().header(header::CONTENT_LANGUAGE);
    let before = Api::new(required(store.clone()).fingerprint(earlier()), &probe);
    let first = before.send(keyed("K")).await;
    let plain = Api::new(required(store.clone()), &probe);
    let plain_first = plain.send(keyed("L")).await;

    let aware = required(store.clone())
        .fingerprint(Fingerprinting::json())
        .earlier_fingerprint(earlier());
    let aware = Api::new(aware, &probe);
    aware.send(keyed("K")).await.assert_replay_of(&first);
    aware.send(keyed("L")).await.assert_replay_of(&plain_first);
    aware
        .send(keyed("K").body("{}"))
        .await
        .assert_problem(422, "key-reused");

    // The fingerprints cannot be compared, so that this is neither a replay nor a
    // mismatch.
    let refused = plain.send(keyed("K")).await;
    refused.assert_problem(503, "store-unavailable");
    assert!(refused.retry_after() >= Some(1));
    assert_eq!(probe.runs(), 2);
}

#[tokio::test]
async fn rule_36_an_empty_body_equals_an_absent_body_only() {
    let probe = Probe::counting();
    let api = Api::new(required(memory()), &probe);
    let server = api.serve().await;
    let mut wire = Wire::open(&server).await;
    let head = "POST /count HTTP/1.1\r\nHost: test\r\nX-Account: acme-7\r\nIdempotency-Key: K\r\n";
    let first = wire.ask(format!("{head}\r\n")).await;
    assert_eq!((first.status, first.is_replay()), (201, false));
    for framing in [
        "Content-Length: 0\r\n\r\n",
        "Transfer-Encoding: chunked\r\n\r\n0\r\n\r\n",
    ] {
        let again = wire.ask(format!("{head}{framing}")).await;
        assert!(again.is_replay());
        assert_eq!((again.status, again.body), (201, first.body.clone()));
    }
    let other = wire
        .ask(format!("{head}Content-Length: 2\r\n\r\n{{}}"))
        .await;
    assert_eq!((other.status, &*other.problem()), (422, "key-reused"));
    assert_eq!(probe.runs(), 1);
}

#[tokio::test]
async fn rule_36_neither_the_framing_nor_the_borders_of_chunks_matter() {
    let echo = Probe::running(|run| async move {
        let mut response = run.created();
        *response.body_mut() = bytes_of(run.request.into_body()).await.into();
        Ok(response)
    });
    let api = Api::new(required(memory()), &echo);
    let server = api.serve().await;
    let mut wire = Wire::open(&server).await;
    let head = "POST /count HTTP/1.1\r\nHost: test\r\nX-Account: acme-7\r\nIdempotency-Key: K\r\n";
    let framings = [
        "Content-Length: 11\r\n\r\nhello world",
        "Transfer-Encoding: chunked\r\n\r\nb\r\nhello world\r\n0\r\n\r\n",
        "Transfer-Encoding: chunked\r\n\r\n1\r\nh\r\n9;ext=1\r\nello worl\r\n01\r\nd\r\n0\r\n\r\n",
        "Transfer-Encoding: chunked\r\n\r\n6\r\nhello \r\n5\r\nworld\r\n0\r\nX-Sum: 1\r\n\r\n",
    ];
    for (index, framing) in framings.into_iter().enumerate() {
        let answer = wire.ask(format!("{head}{framing}")).await;
        assert_eq!((answer.status, &*answer.body), (201, &b"hello world"[..]));
        assert_eq!(answer.is_replay(), index > 0);
    }
    // The same body over HTTP/2, in other frames.
    let (frames, body) = streamed();
    for chunk in ["hel", "lo wo", "", "rld"] {
        frames.send(Ok(data(chunk))).unwrap();
    }
    drop(frames);
    let over_http2 = keyed("K").without("content-type").body(body);
    assert!(
        Http2::open(&server)
            .await
            .ask(over_http2.0)
            .await
            .is_replay()
    );
    let other = wire
        .ask(format!(
            "{head}Transfer-Encoding: chunked\r\n\r\nb\r\nhello_world\r\n0\r\n\r\n"
        ))
        .await;
    assert_eq!((other.status, &*other.problem()), (422, "key-reused"));
    assert_eq!(echo.runs(), 1);
}

#[tokio::test]
async fn rule_37_a_multipart_body_with_a_new_boundary_replays_by_parts() {
    let probe = Probe::counting();
    let by_parts = required(memory()).fingerprint(Fingerprinting::multipart());
    let api = Api::new(by_parts, &probe);
    let first = api.send(form("one", "42")).await;
    first.assert_run(1);
    api.send(form("two", "42")).await.assert_replay_of(&first);
    api.send(form("one", "43"))
        .await
        .assert_problem(422, "key-reused");
    let broken = form("one", "42").body("no parts at all");
    api.send(broken).await.assert_problem(400, "body-invalid");
    let nameless = form("one", "42").header("content-type", "multipart/form-data");
    api.send(nameless).await.assert_problem(400, "body-invalid");
    assert_eq!(probe.runs(), 1);
}

#[tokio::test]
async fn rule_37_a_new_multipart_boundary_is_a_mismatch_by_bytes() {
    for (settings, media_type) in [
        (Fingerprinting::bytes(), "multipart/form-data"),
        (Fingerprinting::json(), "multipart/form-data"),
        (Fingerprinting::multipart(), "multipart/mixed"),
    ] {
        let probe = Probe::counting();
        let api = Api::new(required(memory()).fingerprint(settings), &probe);
        let typed = |boundary: &str| {
            let media_type = format!("{media_type}; boundary={boundary}");
            form(boundary, "42").header("content-type", media_type)
        };
        let first = api.send(typed("one")).await;
        let refused = api.send(typed("two")).await;
        refused.assert_problem(422, "key-reused");
        api.send(typed("one")).await.assert_replay_of(&first);
        assert_eq!(probe.runs(), 1);
    }
}

fn form(boundary: &str, amount: &str) -> Ask {
    keyed("K")
        .header("content-type", format!("multipart/form-data; boundary={boundary}"))
        .body(format!(
            "--{boundary}\r\nContent-Disposition: form-data; name=\"amount\"\r\n\r\n{amount}\r\n--{boundary}--\r\n"
        ))
}
