//! Which key a request gets.

use http::{HeaderName, HeaderValue, Request};
use tower::{Layer as _, Service as _, ServiceExt};
use tower_idempotency::client::{KeyLayer, OperationKey};
use uuid::Uuid;

use crate::service::{Script, post, status};

#[tokio::test]
async fn each_post_and_patch_gets_a_new_uuid() {
    let script = Script::new(&[]);
    let mut client = KeyLayer::uuid_v7().layer(script.clone());
    for method in ["POST", "PATCH", "POST"] {
        let request = Request::builder().method(method).body(()).unwrap();
        let ready = ServiceExt::<Request<()>>::ready(&mut client).await;
        ready.unwrap().call(request).await.unwrap();
    }
    let mut keys: Vec<_> = script.keys().into_iter().map(Option::unwrap).collect();
    assert!(keys.iter().all(HeaderValue::is_sensitive));
    for key in &keys {
        let uuid = Uuid::parse_str(key.to_str().unwrap()).unwrap();
        assert_eq!(uuid.get_version_num(), 7);
    }
    keys.dedup();
    assert_eq!(keys.len(), 3);
}

#[tokio::test]
async fn idempotent_methods_get_no_key() {
    let script = Script::new(&[]);
    for method in ["GET", "HEAD", "PUT", "DELETE", "OPTIONS"] {
        let client = KeyLayer::uuid_v7().layer(script.clone());
        let request = Request::builder().method(method).body(()).unwrap();
        status(client, request).await.unwrap();
    }
    assert_eq!(script.keys(), [const { None }; 5]);
}

#[tokio::test]
async fn a_callers_key_is_untouched() {
    let script = Script::new(&[]);
    let client = KeyLayer::uuid_v7().layer(script.clone());
    let mut request = post();
    let headers = request.headers_mut();
    headers.insert("idempotency-key", "\"mine\"".parse().unwrap());
    let other = OperationKey::new("other").unwrap();
    request.extensions_mut().insert(other);
    status(client, request).await.unwrap();
    assert_eq!(script.keys()[0].as_ref().unwrap(), "\"mine\"");
}

#[tokio::test]
async fn an_operation_key_is_sent_with_any_method() {
    let script = Script::new(&[]);
    let header = HeaderName::from_static("x-request-key");
    let layers = [
        KeyLayer::uuid_v7(),
        KeyLayer::uuid_v7().quoted(),
        KeyLayer::uuid_v7().header(header),
    ];
    for layer in layers {
        let mut request = Request::put("/orders/1").body(()).unwrap();
        let key = OperationKey::new("order-1").unwrap();
        request.extensions_mut().insert(key);
        status(layer.layer(script.clone()), request).await.unwrap();
    }
    let seen = script.seen();
    assert_eq!(seen[0]["idempotency-key"], "order-1");
    assert_eq!(seen[1]["idempotency-key"], "\"order-1\"");
    assert_eq!(seen[2]["x-request-key"], "order-1");
    assert!(!seen[2].contains_key("idempotency-key"));
}
