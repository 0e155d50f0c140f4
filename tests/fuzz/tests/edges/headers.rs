//! Which headers and trailers a replay has.

use http::{HeaderMap, HeaderName, HeaderValue, Response, header};
use tower_idempotency::{KeptHeaders, Operation};

use crate::service::{Answer, keyed, layer, send};

const ALL: [&str; 16] = [
    "access-control-allow-origin",
    "age",
    "connection",
    "content-type",
    "date",
    "etag",
    "idempotent-recorded",
    "location",
    "proxy-status",
    "server",
    "set-cookie",
    "te",
    "x-hop",
    "x-own",
    "x-ratelimit-limit",
    "x-request-id",
];

/// The names of the headers and of the trailers of a replay.
async fn replayed(kept: KeptHeaders) -> [String; 2] {
    let layer = layer()
        .kept_headers(kept)
        .replay_marker(MARKER)
        .build()
        .unwrap();
    let handler = |_: &Operation| {
        let mut lines = HeaderMap::new();
        for name in ALL {
            let value = if name == "connection" {
                "close, X-Hop"
            } else {
                "1"
            };
            lines.insert(name, HeaderValue::from_static(value));
        }
        lines.insert(MARKER, HeaderValue::from_static("1"));
        let mut response = Response::new("");
        *response.headers_mut() = lines.clone();
        (response, lines)
    };
    send(&layer, keyed("k"), handler).await;
    let Answer { response, trailers } = send(&layer, keyed("k"), handler).await;
    assert_eq!(response.headers()[MARKER], "true");
    assert_eq!(response.headers().get_all(MARKER).iter().count(), 1);
    [response.headers(), &trailers].map(|lines| {
        let names = lines
            .keys()
            .filter(|name| *name != MARKER && *name != header::TRAILER);
        let mut names: Vec<_> = names.map(HeaderName::as_str).collect();
        names.sort_unstable();
        names.join(" ")
    })
}

#[tokio::test(start_paused = true)]
async fn rule_62_most_headers_are_kept_by_default() {
    let kept = replayed(KeptHeaders::all_but_transient()).await;
    assert_eq!(kept, ["content-type etag location x-own", "etag x-own"]);
    assert_eq!(replayed(KeptHeaders::default()).await, kept);
}

#[tokio::test(start_paused = true)]
async fn rule_62_a_list_of_headers_keeps_no_others() {
    let kept = replayed(KeptHeaders::only([
        header::ETAG,
        header::SERVER,
        header::DATE,
    ]))
    .await;
    assert_eq!(kept, ["content-type etag server", "etag server"]);
}

#[tokio::test(start_paused = true)]
async fn rule_62_settings_add_and_drop_headers() {
    let kept = KeptHeaders::all_but_transient()
        .with(header::SERVER)
        .with(header::AGE)
        .with(HeaderName::from_static("x-hop"))
        .without(header::ETAG)
        .without(header::CONTENT_TYPE);
    assert_eq!(
        replayed(kept.clone()).await,
        ["location server x-own", "server x-own"]
    );
    let back = kept.with(header::ETAG).without(header::SERVER);
    assert_eq!(replayed(back).await, ["etag location x-own", "etag x-own"]);
}

#[tokio::test(start_paused = true)]
async fn rule_65_cookies_are_kept_on_demand_only() {
    let kept = KeptHeaders::only([header::SET_COOKIE]).with(header::SET_COOKIE);
    assert_eq!(replayed(kept.clone()).await, ["content-type", ""]);
    assert_eq!(
        replayed(kept.with_cookies()).await,
        ["content-type set-cookie", ""]
    );
}

const MARKER: HeaderName = HeaderName::from_static("x-replay");
