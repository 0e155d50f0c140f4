//! Rules 62 to 68, 70 and 71: the parts of a replay, and of a refusal.

use axum::{Router, body::Body};
use bytes::Bytes;
use http::{HeaderMap, HeaderValue, Request, Response, StatusCode, header};
use tower::{ServiceBuilder, ServiceExt as _};
use tower_http::{
    compression::CompressionLayer,
    cors::{Any, CorsLayer},
    request_id::{MakeRequestUuid, SetRequestIdLayer},
};
use tower_idempotency::{DynStore, KeptHeaders, MemoryStore, Store, store::RecordState};

use crate::{
    api::{Answer, Api, keyed, record, required},
    client::{Http2, Wire, WireAnswer, keyed_post, post},
    faulty::{Call, Fault, Faulty},
    probe::{Gate, Probe, chunks_and_trailers},
    server::serve,
    stores::{Place, memory, on_each_store},
};

on_each_store! {
    rule_62_no_setting_replays_a_hop_by_hop_header
    rule_65_cookies_reach_the_first_client_and_never_the_store
    rule_66_lines_of_one_header_keep_their_order_and_their_bytes
    rule_68_trailers_are_replayed_as_trailers
    rule_71_a_record_replays_over_another_version_of_http
}

/// Answers with these header lines and this body.
fn answering(lines: &'static [(&'static str, &'static [u8])], body: &'static str) -> Probe {
    Probe::answering(move |run| {
        let mut response = run.created();
        for (name, value) in lines {
            let value = HeaderValue::from_bytes(value).unwrap();
            response.headers_mut().append(*name, value);
        }
        *response.body_mut() = body.into();
        response
    })
}

async fn rule_62_no_setting_replays_a_hop_by_hop_header(place: &Place) {
    let probe = answering(
        &[
            ("connection", b"x-hop, X-Other"),
            ("connection", b"x-third"),
            ("x-hop", b"1"),
            ("x-other", b"2"),
            ("x-third", b"3"),
            ("keep-alive", b"timeout=5"),
            ("proxy-connection", b"keep-alive"),
            ("te", b"trailers"),
            ("trailer", b"x-none"),
            ("upgrade", b"h2c"),
            ("x-end-to-end", b"4"),
        ],
        "hello",
    );
    let hops = [
        "connection",
        "x-hop",
        "x-other",
        "x-third",
        "keep-alive",
        "proxy-connection",
        "te",
        "trailer",
        "transfer-encoding",
        "upgrade",
    ];
    let all = hops.map(|name| name.parse().unwrap());
    let insisting = all
        .iter()
        .cloned()
        .fold(KeptHeaders::all_but_transient(), KeptHeaders::with);
    let choosing = KeptHeaders::only(all).with("x-end-to-end".parse().unwrap());
    let store = place.open().await;
    for (key, kept) in [
        ("K", KeptHeaders::default()),
        ("L", insisting),
        ("M", choosing),
    ] {
        let api = Api::new(required(store.clone()).kept_headers(kept), &probe);
        assert_eq!(api.send(keyed(key)).await.header("x-hop"), Some("1"));
        let replay = api.send(keyed(key)).await;
        assert!(replay.is_replay());
        assert_eq!(replay.header("x-end-to-end"), Some("4"));
        for hop in hops {
            assert!(!replay.headers.contains_key(hop), "{hop} for {key}");
        }
    }
    let server = Api::new(required(store), &probe).serve().await;
    let replay = Wire::open(&server).await.ask(keyed_post("K")).await;
    assert!(replay.is_replay());
    for hop in hops {
        assert_eq!(replay.text(hop), None, "{hop}");
    }
}

#[tokio::test]
async fn rule_63_a_replay_corrects_a_wrong_content_length() {
    for wrong in [&b"1"[..], b"9999", b"0"] {
        let probe = Probe::answering(move |run| {
            let mut response = run.created();
            let length = HeaderValue::from_bytes(wrong).unwrap();
            response
                .headers_mut()
                .insert(header::CONTENT_LENGTH, length);
            // The second key's response is released, not recorded.
            if run.operation().key().as_str() == "L" {
                *response.status_mut() = StatusCode::SERVICE_UNAVAILABLE;
            }
            *response.body_mut() = "hello".into();
            response
        });
        let server = Api::new(required(memory()), &probe).serve().await;
        let mut wire = Wire::open(&server).await;
        for (key, replays) in [
            ("K", false),
            ("K", true),
            ("L", false),
            ("L", false),
            ("K", true),
        ] {
            let answer = wire.ask(keyed_post(key)).await;
            assert_eq!(answer.body, b"hello");
            assert_eq!(answer.text("content-length").as_deref(), Some("5"));
            assert_eq!(answer.is_replay(), replays);
        }
        let mut http2 = Http2::open(&server).await;
        for key in ["K", "M", "M"] {
            let answer = http2.ask(keyed(key).0).await;
            assert_eq!(
                (&*answer.body, answer.header("content-length")),
                (&b"hello"[..], Some("5"))
            );
        }
    }
}

#[tokio::test]
async fn rule_64_a_replay_has_one_date_of_now_and_no_age() {
    let probe = answering(
        &[("date", b"Fri, 31 Dec 1999 23:59:59 GMT"), ("age", b"3600")],
        "hello",
    );
    let insisting = KeptHeaders::all_but_transient()
        .with(header::DATE)
        .with(header::AGE);
    let server = Api::new(required(memory()).kept_headers(insisting), &probe)
        .serve()
        .await;
    let mut wire = Wire::open(&server).await;
    let first = wire.ask(keyed_post("K")).await;
    assert_eq!(first.text("age").as_deref(), Some("3600"));
    let replay = wire.ask(keyed_post("K")).await;
    assert!(replay.is_replay());
    assert_eq!(replay.values("date").len(), 1);
    assert!(!replay.text("date").unwrap().contains("1999"));
    assert_eq!(replay.text("age"), None);
}

async fn rule_65_cookies_reach_the_first_client_and_never_the_store(place: &Place) {
    const SECRETS: &[(&str, &[u8])] = &[
        ("set-cookie", b"session=s3cr3t; Secure"),
        ("set-cookie", b"other=s3cr3t"),
        ("www-authenticate", b"Basic realm=s3cr3t"),
        ("authentication-info", b"nextnonce=s3cr3t"),
        ("proxy-authenticate", b"Basic realm=s3cr3t"),
        ("x-request-id", b"s3cr3t"),
        ("server-timing", b"s3cr3t"),
        ("via", b"1.1 s3cr3t"),
        ("server", b"s3cr3t"),
        ("alt-svc", b"h3=s3cr3t"),
        ("traceparent", b"s3cr3t"),
        ("tracestate", b"s3cr3t"),
        ("ratelimit", b"s3cr3t"),
        ("ratelimit-policy", b"s3cr3t"),
        ("x-ratelimit-remaining", b"s3cr3t"),
        ("access-control-allow-origin", b"s3cr3t"),
    ];
    let store = place.open().await;
    let probe = answering(SECRETS, "hello");
    let api = Api::new(required(store.clone()), &probe);
    let first = api.send(keyed("K")).await;
    let cookies: Vec<_> = first.headers.get_all(header::SET_COOKIE).iter().collect();
    assert_eq!(cookies, ["session=s3cr3t; Secure", "other=s3cr3t"]);
    let replay = api.send(keyed("K")).await;
    assert!(replay.is_replay());
    for (name, _) in SECRETS {
        assert!(!replay.headers.contains_key(*name), "{name}");
    }
    assert!(
        !kept(&store, "K")
            .await
            .windows(6)
            .any(|bytes| bytes == b"s3cr3t")
    );

    // Only `with_cookies` keeps cookies; `with` and `only` do not.
    for (key, kept_headers) in [
        (
            "L",
            KeptHeaders::all_but_transient().with(header::SET_COOKIE),
        ),
        ("M", KeptHeaders::only([header::SET_COOKIE])),
    ] {
        let api = Api::new(required(store.clone()).kept_headers(kept_headers), &probe);
        api.send(keyed(key)).await;
        assert!(
            !api.send(keyed(key))
                .await
                .headers
                .contains_key("set-cookie")
        );
        assert!(
            !kept(&store, key)
                .await
                .windows(6)
                .any(|bytes| bytes == b"s3cr3t")
        );
    }
    let opted_in = KeptHeaders::all_but_transient().with_cookies();
    let api = Api::new(required(store).kept_headers(opted_in), &probe);
    api.send(keyed("N")).await;
    let replay = api.send(keyed("N")).await;
    let cookies: Vec<_> = replay.headers.get_all(header::SET_COOKIE).iter().collect();
    assert_eq!(cookies, ["session=s3cr3t; Secure", "other=s3cr3t"]);
    assert!(replay.is_replay());
}

/// The bytes that the store keeps of a response.
async fn kept(store: &impl Store, key: &str) -> Bytes {
    match record(store, key).await.unwrap().state {
        RecordState::Completed { response } => response,
        other => panic!("not recorded: {other:?}"),
    }
}

async fn rule_66_lines_of_one_header_keep_their_order_and_their_bytes(place: &Place) {
    let probe = answering(
        &[
            ("link", b"</a>; rel=next, </b>; rel=prev"),
            ("vary", b"accept"),
            ("link", b"</c>; title=\"x, y\""),
            ("vary", b"origin"),
            ("x-obs", b"caf\xe9 \xff\x80"),
            ("x-empty", b""),
            ("x-tab", b"a\tb"),
            ("etag", b"W/\"1\""),
        ],
        "hello",
    );
    let api = Api::new(required(place.open().await), &probe);
    let server = api.serve().await;
    let mut wire = Wire::open(&server).await;
    let first = wire.ask(keyed_post("K")).await;
    let replay = wire.ask(keyed_post("K")).await;
    assert!(replay.is_replay() && !first.is_replay());
    assert_eq!(
        first.values("link"),
        [
            &b"</a>; rel=next, </b>; rel=prev"[..],
            b"</c>; title=\"x, y\""
        ]
    );
    assert_eq!(first.values("x-obs"), [b"caf\xe9 \xff\x80"]);
    assert_eq!(repeated(&first), repeated(&replay));
    assert_eq!(first.body, replay.body);
}

/// The header lines that a replay repeats.
fn repeated(answer: &WireAnswer) -> Vec<&(String, Vec<u8>)> {
    answer
        .lines
        .iter()
        .filter(|(name, _)| name != "date" && name != "idempotent-replayed")
        .collect()
}

#[tokio::test]
async fn rule_67_an_answer_without_content_gains_nothing() {
    for status in [204, 205, 304] {
        let probe = Probe::answering(move |_| {
            Response::builder()
                .status(status)
                .body(Body::empty())
                .unwrap()
        });
        let server = Api::new(required(memory()), &probe).serve().await;
        let mut wire = Wire::open(&server).await;
        let first = wire.ask(keyed_post("K")).await;
        let replay = wire.ask(keyed_post("K")).await;
        assert_eq!((first.status, replay.status), (status, status));
        assert!(replay.is_replay());
        assert_eq!(repeated(&first), repeated(&replay));
        assert!(replay.body.is_empty());
        if status == 204 {
            assert_eq!(replay.text("content-length"), None);
        }
        assert_eq!(replay.text("content-type"), None);
        // The connection still serves.
        assert!(wire.ask(keyed_post("K")).await.is_replay());

        let mut http2 = Http2::open(&server).await;
        let first = http2.ask(keyed("L").0).await;
        http2.ask(keyed("L").0).await.assert_replay_of(&first);
        assert_eq!(probe.runs(), 2);
    }
}

#[tokio::test]
async fn rule_68_chosen_headers_leave_a_grpc_response_its_result() {
    let probe = Probe::answering(|_| {
        let mut trailers = HeaderMap::new();
        trailers.append("grpc-status", HeaderValue::from_static("0"));
        trailers.append("x-other", HeaderValue::from_static("1"));
        Response::new(chunks_and_trailers(&["message"], trailers))
    });
    let builder = required(memory()).kept_headers(KeptHeaders::only([]));
    let api = Api::new(builder, &probe);
    assert_eq!(api.send(keyed("K")).await.trailers.unwrap().len(), 2);
    let replay = api.send(keyed("K")).await;
    assert!(replay.is_replay());
    let trailers = replay.trailers.unwrap();
    assert_eq!(
        (trailers.len(), &trailers["grpc-status"]),
        (1, &HeaderValue::from_static("0"))
    );
}

async fn rule_68_trailers_are_replayed_as_trailers(place: &Place) {
    let probe = Probe::answering(|run| {
        let mut trailers = HeaderMap::new();
        trailers.append("x-sum", HeaderValue::from_static("5d41"));
        trailers.append("x-sum", HeaderValue::from_static("402a"));
        trailers.append("x-state", HeaderValue::from_static("done"));
        let mut response = run.created();
        let announced = HeaderValue::from_static("x-sum, x-state");
        response.headers_mut().insert(header::TRAILER, announced);
        *response.body_mut() = chunks_and_trailers(&["hel", "lo"], trailers);
        response
    });
    let api = Api::new(required(place.open().await), &probe);
    let first = api.send(keyed("K")).await;
    assert_eq!(
        first
            .trailers
            .as_ref()
            .unwrap()
            .get_all("x-sum")
            .iter()
            .count(),
        2
    );
    api.send(keyed("K")).await.assert_replay_of(&first);

    let server = api.serve().await;
    let mut wire = Wire::open(&server).await;
    let trailing = post(
        "/count",
        "Idempotency-Key: L\r\nTE: trailers\r\n",
        "{\"amount\":1}",
    );
    let over_http1 = wire.ask(&trailing).await;
    let replay = wire.ask(&trailing).await;
    assert!(replay.is_replay());
    assert_eq!((&*replay.body, replay.trailers.len()), (&b"hello"[..], 3));
    assert_eq!(replay.trailers, over_http1.trailers);
    assert!(wire.ask(&trailing).await.is_replay());
    let over_http2 = Http2::open(&server).await.ask(keyed("L").0).await;
    assert!(over_http2.is_replay());
    assert_eq!(
        (&over_http2.body, &over_http2.trailers),
        (&first.body, &first.trailers)
    );
    assert_eq!(probe.runs(), 2);
}

#[tokio::test(start_paused = true)]
async fn rule_70_refusals_are_problem_details_without_stored_data() {
    const KEY: &str = "k3y-s3cr3t";
    const BODY: &str = "{\"card\":\"b0dy-s3cr3t\"}";
    let gate = Gate::closed();
    let probe = Probe::deciding_behind(&gate, |run| {
        let mut response = run.created();
        response
            .headers_mut()
            .insert("x-stored", HeaderValue::from_static("h3ader-s3cr3t"));
        *response.body_mut() = "answ3r-s3cr3t".into();
        Ok(response)
    });
    let faulty = Faulty::new(MemoryStore::new());
    let builder = required(DynStore::new(faulty.clone()))
        .max_request_body(200)
        .documentation("https://docs.test/keys");
    let api = Api::new(builder, &probe);
    let asked = || keyed(KEY).from("acct-s3cr3t").body(BODY);
    let mut refusals = Vec::new();
    let mut refused = |answer: Answer, status: u16, slug: &str| {
        answer.assert_problem(status, slug);
        refusals.push(answer);
    };

    let owner = api.spawn(asked());
    gate.arrival().await;
    refused(api.send(asked()).await, 409, "request-in-progress");
    refused(api.send(asked().body("{}")).await, 422, "key-reused");
    gate.open();
    owner.await.unwrap().assert_run(1);
    refused(api.send(asked().body("{}")).await, 422, "key-reused");
    refused(
        api.send(asked().without("idempotency-key")).await,
        400,
        "key-missing",
    );
    refused(
        api.send(asked().key("\"k3y-s3cr3t")).await,
        400,
        "key-invalid",
    );
    refused(
        api.send(asked().key(&"k3y-s3cr3t".repeat(30))).await,
        400,
        "key-invalid",
    );
    refused(
        api.send(asked().without("x-account")).await,
        403,
        "caller-unknown",
    );
    refused(
        api.send(asked().body("b0dy-s3cr3t".repeat(20))).await,
        413,
        "body-too-large",
    );
    faulty.inject(Call::Claim, .., Fault::unavailable());
    refused(api.send(asked()).await, 503, "store-unavailable");

    for refusal in refusals {
        let text = format!(
            "{:?} {}",
            refusal.headers,
            String::from_utf8_lossy(&refusal.body)
        );
        assert!(!text.contains("s3cr3t"), "{text}");
        assert!(!text.contains("card"), "{text}");
        assert_eq!(
            refusal.header("link"),
            Some("<https://docs.test/keys>; rel=\"describedby\"")
        );
    }
    assert_eq!(probe.runs(), 1);
}

async fn rule_71_a_record_replays_over_another_version_of_http(place: &Place) {
    let probe = Probe::answering(|run| {
        let mut response = run.created();
        // HTTP/2 has no such header.
        let hop = HeaderValue::from_static("keep-alive");
        response.headers_mut().insert(header::CONNECTION, hop);
        response
    });
    let server = Api::new(required(place.open().await), &probe).serve().await;
    let (mut wire, mut http2) = (Wire::open(&server).await, Http2::open(&server).await);

    let over_http1 = wire.ask(keyed_post("K")).await;
    let replay = http2.ask(keyed("K").0).await;
    assert!(replay.is_replay() && !over_http1.is_replay());
    assert_eq!(replay.status, over_http1.status);
    assert_eq!(replay.body, over_http1.body);
    assert_eq!(
        replay.header("location").map(str::to_owned),
        over_http1.text("location")
    );

    let over_http2 = http2.ask(keyed("L").0).await;
    let replay = wire.ask(keyed_post("L")).await;
    assert!(replay.is_replay() && !over_http2.is_replay());
    assert_eq!(replay.body, over_http2.body);
    assert_eq!(
        replay.text("location").as_deref(),
        over_http2.header("location")
    );
    assert_eq!(probe.runs(), 2);
}

#[tokio::test]
async fn rule_71_outer_layers_add_their_headers_to_a_replay_exactly_once() {
    let probe = Probe::answering(|run| {
        let mut response = run.created();
        *response.body_mut() = "compress me, ".repeat(200).into();
        response
    });
    let inner = probe.clone();
    let handler = tower::service_fn(move |request: Request<Body>| {
        let inner = inner.clone();
        async move { Ok::<_, std::convert::Infallible>(inner.oneshot(request).await.unwrap()) }
    });
    let app = Router::new().fallback_service(handler).layer(
        ServiceBuilder::new()
            .layer(SetRequestIdLayer::x_request_id(MakeRequestUuid))
            .layer(tower_http::request_id::PropagateRequestIdLayer::x_request_id())
            .layer(
                CorsLayer::new()
                    .allow_origin(Any)
                    .expose_headers(["idempotent-replayed".parse().unwrap()]),
            )
            .layer(CompressionLayer::new())
            .layer(required(memory()).build().unwrap()),
    );
    let server = serve(app).await;
    let asked = || {
        keyed("K")
            .header("origin", "https://shop.test")
            .header("accept-encoding", "gzip")
    };
    let lines = "Idempotency-Key: K\r\nOrigin: https://shop.test\r\nAccept-Encoding: gzip\r\n";
    let mut wire = Wire::open(&server).await;
    let mut http2 = Http2::open(&server).await;
    let first = http2.ask(asked().0).await;
    assert!(!first.is_replay());
    let mut ids = vec![first.header("x-request-id").unwrap().to_owned()];
    for _ in 0..2 {
        let replay = http2.ask(asked().0).await;
        assert!(replay.is_replay());
        assert_eq!(replay.body, first.body);
        for (name, value) in [
            ("access-control-allow-origin", "*"),
            ("access-control-expose-headers", "idempotent-replayed"),
            ("content-encoding", "gzip"),
        ] {
            let values: Vec<_> = replay.headers.get_all(name).iter().collect();
            assert_eq!(values, [value], "{name}");
        }
        ids.push(replay.header("x-request-id").unwrap().to_owned());

        let replay = wire.ask(post("/count", lines, "{\"amount\":1}")).await;
        assert!(replay.is_replay());
        assert_eq!(replay.values("access-control-allow-origin"), [b"*"]);
        assert_eq!(replay.values("content-encoding"), [b"gzip"]);
        assert_eq!(replay.body, first.body);
        ids.push(replay.text("x-request-id").unwrap());
    }
    // Each answer has the id of its own request.
    ids.sort();
    ids.dedup();
    assert_eq!(ids.len(), 5);
    // A client without gzip gets the bytes that the handler sent.
    let plain = http2.ask(asked().without("accept-encoding").0).await;
    assert_eq!(
        (plain.body.len(), plain.header("content-encoding")),
        (2_600, None)
    );
    assert_eq!(probe.runs(), 1);
}

#[tokio::test]
async fn the_layer_strips_its_own_headers_from_a_handlers_response() {
    for status in [201, 503] {
        let probe = Probe::answering(move |run| {
            let mut response = run.status(status);
            for name in ["idempotent-replayed", "idempotent-recorded"] {
                response
                    .headers_mut()
                    .insert(name, HeaderValue::from_static("true"));
            }
            response
        });
        let api = Api::new(required(memory()), &probe);
        api.send(keyed("K")).await.assert_live(status);
    }
}

#[tokio::test]
async fn the_marker_may_have_another_name() {
    let builder = required(memory()).replay_marker("x-again".parse().unwrap());
    let api = Api::new(builder, &Probe::counting());
    assert_eq!(api.send(keyed("K")).await.header("x-again"), None);
    let replay = api.send(keyed("K")).await;
    assert_eq!(replay.header("x-again"), Some("true"));
    assert!(!replay.headers.contains_key("idempotent-replayed"));
}

#[tokio::test]
async fn an_allow_list_keeps_its_own_and_body_headers() {
    let probe = answering(
        &[
            ("x-one", b"1"),
            ("server", b"s"),
            ("content-encoding", b"identity"),
        ],
        "hello",
    );
    let replayed = async |kept: KeptHeaders| {
        let api = Api::new(required(memory()).kept_headers(kept), &probe);
        api.send(keyed("K")).await;
        let replay = api.send(keyed("K")).await;
        let mut names: Vec<_> = replay.headers.keys().map(ToString::to_string).collect();
        names.sort();
        names
    };
    assert_eq!(
        replayed(KeptHeaders::only([header::LOCATION])).await,
        [
            "content-encoding",
            "content-type",
            "idempotent-replayed",
            "location"
        ]
    );
    assert_eq!(
        replayed(
            KeptHeaders::all_but_transient()
                .with(header::SERVER)
                .without(header::LOCATION)
        )
        .await,
        [
            "content-encoding",
            "content-type",
            "idempotent-replayed",
            "server",
            "x-one",
            "x-run"
        ]
    );
}
