//! The layer in a build without the feature `axum`.

use std::{
    convert::Infallible,
    sync::{
        Arc,
        atomic::{AtomicUsize, Ordering},
    },
};

use bytes::Bytes;
use http::{Request, Response, StatusCode, Uri};
use http_body_util::{BodyExt as _, Full};
use tower::{Layer as _, ServiceExt as _, service_fn};
use tower_idempotency::{IdempotencyLayer, MemoryStore, Outcome, RequestBody, ResponseBody, Scope};

/// A service behind the layer, which counts its runs.
struct Api {
    layer: IdempotencyLayer<MemoryStore>,
    runs: Arc<AtomicUsize>,
}

/// What a client gets.
struct Answer {
    status: StatusCode,
    is_replay: bool,
    body: Bytes,
}

impl Api {
    fn new() -> Self {
        let scope = |_: &http::request::Parts| Some(Scope::single_tenant());
        let layer = IdempotencyLayer::required(MemoryStore::new(), scope);
        Self {
            layer: layer.build().unwrap(),
            runs: Arc::default(),
        }
    }

    /// Sends a payment to `uri`, as the layer sees it.
    async fn pay(&self, uri: &str) -> Answer {
        let request = Request::post(uri)
            .header("idempotency-key", "payment-7")
            .body(Full::from("amount=100"))
            .unwrap();
        self.send(request).await
    }

    async fn send(&self, request: Request<Full<Bytes>>) -> Answer {
        let runs = Arc::clone(&self.runs);
        let handler = service_fn(move |request: Request<RequestBody<Full<Bytes>>>| {
            let runs = Arc::clone(&runs);
            async move {
                let run = runs.fetch_add(1, Ordering::SeqCst) + 1;
                let (parts, body) = request.into_parts();
                let sent = body.collect().await.unwrap().to_bytes();
                let paid = format!("{run}: {} {}", parts.uri, String::from_utf8_lossy(&sent));
                Ok::<_, Infallible>(Response::new(Full::<Bytes>::from(paid)))
            }
        });
        let response = self.layer.layer(handler).oneshot(request).await.unwrap();
        Answer::read(response).await
    }
}

impl Answer {
    async fn read(response: Response<ResponseBody<Full<Bytes>>>) -> Self {
        let status = response.status();
        let is_replay = response.extensions().get() == Some(&Outcome::Replayed);
        let body = response.into_body().collect().await.unwrap().to_bytes();
        Self {
            status,
            is_replay,
            body,
        }
    }
}

#[tokio::test]
async fn rule_20_retry_is_replayed() {
    let api = Api::new();
    let first = api.pay("/payments").await;
    assert_eq!((first.status, first.is_replay), (StatusCode::OK, false));
    assert_eq!(first.body, "1: /payments amount=100");
    let retry = api.pay("/payments").await;
    assert_eq!((retry.status, retry.is_replay), (StatusCode::OK, true));
    assert_eq!(retry.body, first.body);
    assert_eq!(api.runs.load(Ordering::SeqCst), 1);
}

#[tokio::test]
async fn rule_26_another_path_or_query_is_a_mismatch() {
    for other in ["/refunds", "/payments?now", "/payments/7", "/"] {
        let api = Api::new();
        assert_eq!(api.pay("/payments").await.status, StatusCode::OK);
        let mismatch = api.pay(other).await;
        assert_eq!(mismatch.status, StatusCode::UNPROCESSABLE_ENTITY, "{other}");
        assert!(!mismatch.is_replay);
        assert!(api.pay("/payments").await.is_replay);
        assert_eq!(api.runs.load(Ordering::SeqCst), 1);
    }
}

/// Without `axum`, the layer has to stand outside of what shortens paths.
#[tokio::test]
async fn rule_28_fingerprint_has_the_uri_that_the_layer_sees() {
    let api = Api::new();
    let nested = |uri: &'static str| {
        let shortened = |mut request: Request<Full<Bytes>>| {
            let path = request.uri().path();
            let inner = path.strip_prefix("/v1").or(path.strip_prefix("/v2"));
            let inner: Uri = inner.unwrap().parse().unwrap();
            *request.uri_mut() = inner;
            request
        };
        let request = Request::post(uri)
            .header("idempotency-key", "payment-7")
            .body(Full::from("amount=100"))
            .unwrap();
        api.send(shortened(request))
    };
    assert!(!nested("/v1/payments").await.is_replay);
    assert!(nested("/v2/payments").await.is_replay);
    assert_eq!(
        nested("/v2/refunds").await.status,
        StatusCode::UNPROCESSABLE_ENTITY
    );
}
