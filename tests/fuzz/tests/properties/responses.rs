//! What a handler answers is replayed unchanged.

use bytes::Bytes;
use http::{HeaderMap, HeaderName, HeaderValue, Request, Response, StatusCode};
use http_body_util::{BodyExt as _, Full, combinators::UnsyncBoxBody};
use proptest::{collection::vec, prelude::*, sample::select};
use tokio::runtime::{Builder, Runtime};
use tower::{Layer as _, ServiceExt as _, service_fn};
use tower_idempotency::{Dispositions, IdempotencyLayer, KeptHeaders, MemoryStore, Scope, Store};

proptest! {
    /// Rules 20, 66, 67 and 68.
    #[test]
    fn a_response_comes_back_byte_for_byte(
        status in 200_u16..600,
        headers in lines(),
        trailers in lines(),
        body in vec(any::<u8>(), 0..40),
    ) {
        let layer = IdempotencyLayer::required(MemoryStore::new(), |_| Some(Scope::single_tenant()))
            .dispositions(Dispositions::everything())
            .kept_headers(KeptHeaders::all_but_transient().with_cookies())
            .build()
            .unwrap();
        let status = StatusCode::from_u16(status).unwrap();
        let response = || {
            let trailers = Some(Ok(trailers.clone())).filter(|_| !trailers.is_empty());
            let body = Full::from(body.clone()).with_trailers(async { trailers }).boxed_unsync();
            let mut response = Response::new(body);
            *response.status_mut() = status;
            *response.headers_mut() = headers.clone();
            response
        };
        let request = || {
            let request = Request::post("/").header("idempotency-key", "k");
            request.body(Bytes::new()).unwrap()
        };
        let (first, mut replay) = current_thread().block_on(async {
            let first = answer(&layer, request(), response).await;
            let nothing = || Response::new(UnsyncBoxBody::default());
            (first, answer(&layer, request(), nothing).await)
        });
        prop_assert_eq!(&first, &Answer { status, headers: headers.clone(), body: body.clone(), trailers: trailers.clone() });
        prop_assert_eq!(replay.headers.remove("idempotent-replayed").unwrap(), "true");
        let announced = replay.headers.remove("trailer");
        if matches!(status.as_u16(), 204 | 304) {
            prop_assert!(replay.body.is_empty() && replay.trailers.is_empty());
            prop_assert_eq!((replay.status, replay.headers), (status, headers));
        } else {
            prop_assert_eq!(announced.is_some(), !trailers.is_empty());
            prop_assert_eq!(replay, first);
        }
    }
}

#[derive(Debug, PartialEq)]
pub(crate) struct Answer {
    pub(crate) status: StatusCode,
    pub(crate) headers: HeaderMap,
    pub(crate) body: Vec<u8>,
    pub(crate) trailers: HeaderMap,
}

/// Sends one request to a handler with this response behind the layer.
pub(crate) async fn answer<S: Store>(
    layer: &IdempotencyLayer<S>,
    request: Request<Bytes>,
    response: impl Fn() -> Response<UnsyncBoxBody<Bytes, std::convert::Infallible>>,
) -> Answer {
    let response = response();
    let response = std::sync::Mutex::new(Some(response));
    let response = std::sync::Arc::new(response);
    let service = layer.layer(service_fn(move |_| {
        let response = response.lock().unwrap().take().unwrap();
        async { Ok::<_, http::Error>(response) }
    }));
    let response = service.oneshot(request.map(Full::new)).await.unwrap();
    let (parts, body) = response.into_parts();
    let body = body.collect().await.unwrap();
    Answer {
        status: parts.status,
        headers: parts.headers,
        trailers: body.trailers().cloned().unwrap_or_default(),
        body: body.to_bytes().to_vec(),
    }
}

pub(crate) fn current_thread() -> Runtime {
    let mut builder = Builder::new_current_thread();
    builder.enable_time().start_paused(true).build().unwrap()
}

fn lines() -> impl Strategy<Value = HeaderMap> {
    let value = vec(
        prop_oneof![0x20_u8..=0x7e, 0x80_u8..=0xff, Just(b'\t')],
        0..12,
    );
    vec((select(&NAMES[..]), value), 0..8).prop_map(|lines| {
        let lines = lines.into_iter().map(|(name, value)| {
            let value = HeaderValue::from_bytes(&value).unwrap();
            (name, value)
        });
        let mut map = HeaderMap::new();
        for (name, value) in lines {
            map.append(name, value);
        }
        map
    })
}

/// Those that are kept both as headers and as trailers.
static NAMES: [HeaderName; 5] = [
    http::header::CONTENT_DISPOSITION,
    http::header::ETAG,
    http::header::LINK,
    HeaderName::from_static("x-own"),
    HeaderName::from_static("x-a-rather-long-name-that-is-not-a-standard-one"),
];
