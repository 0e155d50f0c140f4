//! Rules 23 to 30 and 37: which requests are the same, and the parts that a 422
//! names.

use std::sync::{Arc, Mutex};

use bytes::Bytes;
use http::{HeaderName, Method, Response, header};
use serde_json::Value;
use tower_idempotency::{Fingerprinting, RequestPart};

use crate::{
    api::{Answer, Api, Ask, ask, keyed, required},
    client::{Http2, Wire},
    probe::{Gate, Probe, bytes_of},
    stores::{Place, memory, on_each_store},
};

on_each_store! {
    rule_23_a_mismatch_names_the_parts_that_differ
    rule_25_half_a_surrogate_pair_is_compared_as_spelled
    rule_37_white_space_in_the_media_type_does_not_matter
}

async fn rule_23_a_mismatch_names_the_parts_that_differ(place: &Place) {
    let gate = Gate::closed();
    let probe = Probe::behind(&gate);
    let settings = Fingerprinting::json()
        .header(header::CONTENT_LANGUAGE)
        .header(HeaderName::from_static("x-region"));
    let api = Api::new(required(place.open().await).fingerprint(settings), &probe);
    let first = || {
        ask("/orders/7?dry=1")
            .key("K")
            .header("x-region", "secret-region")
            .body("{\"secret\":1}")
    };
    let changes: [(Change, &[&str]); 12] = [
        (|ask| ask.method(Method::PATCH), &["method"]),
        (|ask| moved(ask, "/orders/8?dry=1"), &["path"]),
        (|ask| moved(ask, "/orders/7"), &["query"]),
        (|ask| moved(ask, "/orders/7?"), &["query"]),
        (
            |ask| ask.header("content-type", "text/json"),
            &["media type"],
        ),
        (
            |ask| ask.header("content-encoding", "br"),
            &["content encoding"],
        ),
        (
            |ask| ask.header("content-language", ""),
            &["content-language"],
        ),
        (|ask| ask.without("x-region"), &["x-region"]),
        (|ask| ask.body("{\"secret\":2}"), &["body"]),
        (|ask| ask.body(""), &["body"]),
        (
            |ask| moved(ask, "/?").method(Method::PATCH).body("[]"),
            &["method", "path", "query", "body"],
        ),
        (
            |ask| {
                let ask = ask.header("x-region", "other").without("content-type");
                ask.header("content-language", "de")
            },
            &["media type", "content-language", "x-region"],
        ),
    ];
    let owner = api.spawn(first());
    gate.arrival().await;
    // While the first request runs, and after it has completed.
    for round in 0..2 {
        for (change, differs) in &changes {
            let refused = api.send(change(first())).await;
            assert_mismatch(&refused, differs);
            let compared = [
                "method",
                "path",
                "query",
                "media type",
                "content encoding",
                "content-language",
                "x-region",
                "body",
            ];
            assert_eq!(strings(&refused.problem()["compared"]), compared);
            let text = String::from_utf8(refused.body.to_vec()).unwrap();
            for stored in ["orders", "dry", "secret", "POST", "PATCH"] {
                assert!(!text.contains(stored), "{text}");
            }
        }
        if round == 0 {
            gate.open();
        }
        while round == 0 && !owner.is_finished() {
            tokio::task::yield_now().await;
        }
    }
    let answered = owner.await.unwrap();
    api.send(first()).await.assert_replay_of(&answered);
    assert_eq!(probe.runs(), 1);
}

type Change = fn(Ask) -> Ask;

fn moved(mut ask: Ask, uri: &str) -> Ask {
    *ask.0.uri_mut() = uri.parse().unwrap();
    ask
}

#[tokio::test]
async fn rule_23_a_mismatch_describes_the_parts_that_differ() {
    let languages = Fingerprinting::bytes().header(header::CONTENT_LANGUAGE);
    let api = Api::new(
        required(memory()).fingerprint(languages),
        &Probe::counting(),
    );
    api.send(keyed("K")).await.assert_run(1);
    let detail = async |ask: Ask| {
        let refused = api.send(ask).await;
        refused.problem()["detail"].as_str().unwrap().to_owned()
    };
    let one = detail(keyed("K").header("content-language", "de")).await;
    assert!(one.contains("The header Content-Language differs"), "{one}");
    let compared = "compared: method, path, query, media type, content encoding, header Content-Language, body";
    assert!(one.contains(compared), "{one}");
    let several = detail(ask("/other").key("K").body("{}")).await;
    assert!(
        several.contains("These parts differ: path, body"),
        "{several}"
    );
}

#[tokio::test]
async fn rule_23_a_renderer_sees_the_parts_that_differ() {
    let seen = Arc::new(Mutex::new(Vec::new()));
    let told = Arc::clone(&seen);
    let builder = required(memory())
        .fingerprint(Fingerprinting::custom("order/1", |_, body| body.to_vec()))
        .render(move |rejection, _| {
            let (compared, differs) = (rejection.compared(), rejection.differs());
            told.lock()
                .unwrap()
                .push((compared.to_vec(), differs.to_vec()));
            let mut response = Response::new(Bytes::from_static(b"refused"));
            *response.status_mut() = rejection.status();
            Some(response)
        });
    let api = Api::new(builder, &Probe::counting());
    api.send(ask("/count")).await;
    api.send(keyed("K")).await.assert_run(1);
    api.send(keyed("K").body("{}")).await;
    let custom = vec![RequestPart::Custom];
    assert_eq!(
        *seen.lock().unwrap(),
        [(vec![], vec![]), (custom.clone(), custom)]
    );
}

#[tokio::test]
async fn rule_23_a_mismatch_is_named_by_the_scheme_of_the_record() {
    let store = memory();
    let probe = Probe::counting();
    let before = Api::new(required(store.clone()), &probe);
    let first = before.send(keyed("K")).await;
    let languages = Fingerprinting::json().header(header::CONTENT_LANGUAGE);
    let after = Api::new(required(store).fingerprint(languages), &probe);
    after.send(keyed("K")).await.assert_replay_of(&first);
    let refused = after.send(moved(keyed("K"), "/count?a")).await;
    assert_mismatch(&refused, &["query"]);
    let compared = strings(&refused.problem()["compared"]);
    assert!(!compared.contains(&"content-language".to_owned()));
    // By bytes, a space counts.
    let refused = after.send(keyed("K").body("{\"amount\": 1}")).await;
    assert_mismatch(&refused, &["body"]);
}

#[tokio::test]
async fn rule_23_every_one_of_many_headers_is_compared() {
    let names = ["x-a", "x-b", "x-c", "x-d", "x-e", "x-f"];
    let settings = names
        .iter()
        .fold(Fingerprinting::bytes(), |settings, name| {
            settings.header(HeaderName::from_static(name))
        });
    let api = Api::new(required(memory()).fingerprint(settings), &Probe::counting());
    let first = api.send(keyed("K")).await;
    for name in names {
        let refused = api.send(keyed("K").header(name, "1")).await;
        refused.assert_problem(422, "key-reused");
        let differs = strings(&refused.problem()["differs"]);
        assert!(differs.contains(&name.to_owned()), "{differs:?}");
        assert!(differs.len() <= 2, "{differs:?}");
    }
    api.send(keyed("K")).await.assert_replay_of(&first);
}

async fn rule_25_half_a_surrogate_pair_is_compared_as_spelled(place: &Place) {
    let probe = Probe::counting();
    let by_structure = required(place.open().await).fingerprint(Fingerprinting::json());
    let api = Api::new(by_structure, &probe);
    for (number, (one, again, other)) in [
        (
            r#"{"\ud800k":1}"#,
            "{ \"\\uD800k\" :\t1 }\r\n",
            r#"{"\ud801k":1}"#,
        ),
        (
            r#"{"a":"\udfff"}"#,
            r#"{"\u0061":"\uDFFF"}"#,
            "{\"a\":\"\u{fffd}\"}",
        ),
        (
            r#"["\ud83d\ude00"]"#,
            "[\"\u{1f600}\"]",
            r#"["\ude00\ud83d"]"#,
        ),
    ]
    .into_iter()
    .enumerate()
    {
        let key = format!("K{number}");
        let first = api.send(keyed(&key).body(one)).await;
        first.assert_run(number + 1);
        api.send(keyed(&key).body(again))
            .await
            .assert_replay_of(&first);
        let refused = api.send(keyed(&key).body(other)).await;
        assert_mismatch(&refused, &["body"]);
    }
}

#[tokio::test]
async fn rule_25_a_document_may_be_nested_400_000_deep() {
    for settings in [
        Fingerprinting::json(),
        Fingerprinting::json_only(["/a"]),
        Fingerprinting::json_without(["/a"]),
    ] {
        let api = Api::new(required(memory()).fingerprint(settings), &Probe::counting());
        let deep = |end: &str| format!("{{\"a\":1,\"b\":{}{}}}", "[".repeat(400_000), end);
        let whole = || deep(&"]".repeat(400_000));
        let first = api.send(keyed("K").body(whole())).await;
        first.assert_run(1);
        api.send(keyed("K").body(whole()))
            .await
            .assert_replay_of(&first);
        let open = api.send(keyed("L").body(deep(&"]".repeat(399_999)))).await;
        open.assert_problem(400, "body-invalid");
    }
}

#[tokio::test]
async fn rule_25_invalid_json_is_refused_and_leaves_the_key_free() {
    let probe = Probe::counting();
    let by_structure = required(memory()).fingerprint(Fingerprinting::json());
    let api = Api::new(by_structure, &probe);
    let invalid = [
        &b"{"[..],
        b"{}x",
        b" ",
        b"01",
        b"\"\x01\"",
        b"\"\xff\"",
        b"\"\xed\xa0\x80\"",
        b"{\"a\":1,\"\\u0061\":2}",
        b"\xef\xbb\xbf{}",
        b"\xa0{}",
    ];
    for body in invalid {
        let refused = api.send(keyed("K").body(body)).await;
        refused.assert_problem(400, "body-invalid");
        assert_eq!(refused.retry_after(), None);
    }
    let first = api.send(keyed("K")).await;
    first.assert_run(1);
    for body in invalid {
        // A request that differs in its body alone, and one that differs in its
        // path too.
        let refused = api.send(keyed("K").body(body)).await;
        refused.assert_problem(400, "body-invalid");
        let refused = api.send(ask("/other").key("K").body(body)).await;
        assert_mismatch(&refused, &["path", "body"]);
    }
    api.send(keyed("K")).await.assert_replay_of(&first);
    assert_eq!(probe.runs(), 1);
    // A body of another media type is no document.
    let text = keyed("L").header("content-type", "text/plain").body("{");
    api.send(text).await.assert_run(2);
}

#[tokio::test]
async fn rule_30_invalid_json_recorded_by_bytes_still_replays() {
    let store = memory();
    let probe = Probe::counting();
    let by_bytes = Api::new(required(store.clone()), &probe);
    let first = by_bytes.send(keyed("K").body("{")).await;
    let by_structure = required(store).fingerprint(Fingerprinting::json());
    let by_structure = Api::new(by_structure, &probe);
    by_structure
        .send(keyed("K").body("{"))
        .await
        .assert_replay_of(&first);
    by_structure
        .send(keyed("L").body("{"))
        .await
        .assert_problem(400, "body-invalid");
    assert_eq!(probe.runs(), 1);
}

#[tokio::test]
async fn rule_29_a_coded_body_is_compared_coded() {
    const CODED: &[u8] = b"(\xb5/\xfd\x04\x00 {\"a\":1}";
    let forms = [
        (Fingerprinting::bytes(), "application/json"),
        (Fingerprinting::json(), "application/json"),
        (Fingerprinting::json_only(["/a"]), "application/json"),
        (
            Fingerprinting::multipart(),
            "multipart/form-data; boundary=B1",
        ),
        (Fingerprinting::multipart(), "multipart/form-data"),
    ];
    for (settings, media_type) in forms {
        let echo = Probe::running(|run| async move {
            let mut response = run.created();
            *response.body_mut() = bytes_of(run.request.into_body()).await.into();
            Ok(response)
        });
        let api = Api::new(required(memory()).fingerprint(settings), &echo);
        let coded = || keyed("K").header("content-type", media_type).body(CODED);
        let with = |coding: &str| coded().header("content-encoding", coding);
        let first = api.send(with("gzip, zstd")).await;
        first.assert_run(1);
        assert_eq!(first.body, CODED);
        for same in ["GZIP,Zstd", "gzip\t, identity ,,zstd"] {
            api.send(with(same)).await.assert_replay_of(&first);
        }
        for other in ["gzip", "zstd, gzip", "br", "gzip zstd"] {
            assert_mismatch(&api.send(with(other)).await, &["content encoding"]);
        }
        for uncoded in [coded(), with("identity")] {
            let refused = api.send(uncoded).await;
            assert_mismatch(&refused, &["content encoding"]);
        }
        let body = api.send(with("gzip, zstd").body(&CODED[1..])).await;
        assert_mismatch(&body, &["body"]);
        assert_eq!(echo.runs(), 1);
    }
}

#[tokio::test]
async fn rule_29_the_coding_identity_is_none() {
    for settings in [Fingerprinting::bytes(), Fingerprinting::json()] {
        let api = Api::new(required(memory()).fingerprint(settings), &Probe::counting());
        let first = api.send(keyed("K")).await;
        for none in ["identity", "Identity", ""] {
            api.send(keyed("K").header("content-encoding", none))
                .await
                .assert_replay_of(&first);
        }
    }
}

#[tokio::test]
async fn rule_29_utf_8_on_a_json_type_does_not_count() {
    for settings in [
        Fingerprinting::bytes(),
        Fingerprinting::json(),
        Fingerprinting::multipart(),
    ] {
        let api = Api::new(required(memory()).fingerprint(settings), &Probe::counting());
        let of = |value: &str| keyed("K").header("content-type", value);
        let first = api.send(of("application/problem+json")).await;
        for same in [
            "application/problem+json;Charset=\"utf-8\"",
            "Application/Problem+JSON ; charset=UTF-8",
        ] {
            api.send(of(same)).await.assert_replay_of(&first);
        }
        for other in [
            "application/problem+json;charset=utf-16",
            "application/problem+json;profile=utf-8",
            "application/json;charset=utf-8",
        ] {
            assert_mismatch(&api.send(of(other)).await, &["media type"]);
        }
        let text = |value: &str| keyed("T").header("content-type", value);
        api.send(text("text/plain; charset=utf-8"))
            .await
            .assert_run(2);
        for other in ["text/plain; charset=utf-16", "text/plain"] {
            assert_mismatch(&api.send(text(other)).await, &["media type"]);
        }
    }
}

async fn rule_37_white_space_in_the_media_type_does_not_matter(place: &Place) {
    let probe = Probe::counting();
    let by_parts = required(place.open().await).fingerprint(Fingerprinting::multipart());
    let api = Api::new(by_parts, &probe);
    let form = |media_type: &str, boundary: &str| {
        keyed("K").header("content-type", media_type).body(format!(
            "--{boundary}\r\nContent-Disposition: form-data; name=\"a\"\r\n\r\n42\r\n--{boundary}--\r\n"
        ))
    };
    let first = api
        .send(form("multipart/form-data ; boundary=B1", "B1"))
        .await;
    first.assert_run(1);
    for (media_type, boundary) in [
        ("multipart/form-data;boundary=B2", "B2"),
        ("Multipart/Form-Data\t;\tBoundary=\"B 3\" ;", "B 3"),
        ("multipart/form-data; boundary=\"B\\4\"", "B4"),
    ] {
        api.send(form(media_type, boundary))
            .await
            .assert_replay_of(&first);
    }
    let charset = form("multipart/form-data; boundary=B1; charset=utf-8", "B1");
    assert_mismatch(&api.send(charset).await, &["media type"]);
    for media_type in [
        "multipart/form-data",
        "multipart/form-data; boundary=\"\"",
        "multipart/form-data; boundary=B1; boundary=B2",
    ] {
        api.send(form(media_type, "B1"))
            .await
            .assert_problem(400, "body-invalid");
    }
    assert_eq!(probe.runs(), 1);
}

#[tokio::test]
async fn rule_30_the_authority_counts_alike_over_http1_and_http2() {
    let probe = Probe::counting();
    let settings = Fingerprinting::bytes().authority();
    let api = Api::new(required(memory()).fingerprint(settings), &probe);
    let server = api.serve().await;
    let mut wire = Wire::open(&server).await;
    let request = |target: &str, host: &str| {
        format!(
            "POST {target} HTTP/1.1\r\nHost: {host}\r\nX-Account: acme-7\r\nIdempotency-Key: K\r\nContent-Length: 0\r\n\r\n"
        )
    };
    let first = wire.ask(request("/count", "test")).await;
    assert_eq!((first.status, first.is_replay()), (201, false));
    // The authority that the client sends over HTTP/2.
    let mut http2 = Http2::open(&server).await;
    let again = keyed("K").without("content-type").body("");
    assert!(http2.ask(again.0).await.is_replay());
    for (target, host) in [
        ("/count", "TEST"),
        ("/count", "test:80"),
        ("/count", "Test:443"),
        ("http://test/count", "elsewhere"),
    ] {
        assert!(wire.ask(request(target, host)).await.is_replay(), "{host}");
    }
    for (target, host) in [
        ("/count", "other"),
        ("/count", "test:8080"),
        ("/count", ""),
        ("http://other/count", "test"),
    ] {
        let other = wire.ask(request(target, host)).await;
        let problem: Value = serde_json::from_slice(&other.body).unwrap();
        assert_eq!(strings(&problem["differs"]), ["authority"], "{host}");
    }
    assert_eq!(probe.runs(), 1);
}

#[tokio::test]
async fn rule_30_the_authority_counts_only_where_chosen() {
    let api = Api::new(required(memory()), &Probe::counting());
    let server = api.serve().await;
    let mut wire = Wire::open(&server).await;
    for (host, is_replay) in [("one", false), ("other:8080", true)] {
        let answer = wire
            .ask(format!(
                "POST /count HTTP/1.1\r\nHost: {host}\r\nX-Account: acme-7\r\nIdempotency-Key: K\r\nContent-Length: 0\r\n\r\n"
            ))
            .await;
        assert_eq!((answer.status, answer.is_replay()), (201, is_replay));
    }
    let mut http2 = Http2::open(&server).await;
    let again = keyed("K").without("content-type").body("");
    assert!(http2.ask(again.0).await.is_replay());
}

#[track_caller]
fn assert_mismatch(refused: &Answer, differs: &[&str]) {
    refused.assert_problem(422, "key-reused");
    assert_eq!(strings(&refused.problem()["differs"]), differs);
}

fn strings(list: &Value) -> Vec<String> {
    let list = list.as_array().unwrap().iter();
    list.map(|name| name.as_str().unwrap().to_owned()).collect()
}
