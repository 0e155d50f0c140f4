//! A store on etcd: a backend of four calls below `CasStore`.
//!
//! ```text
//! etcd --auto-compaction-retention=1 &
//! cargo run --example etcd_store --features etcd
//! curl -i localhost:3000/orders -X POST -H 'Idempotency-Key: k'
//! ```
//!
//! A version is the revision of etcd that wrote the key, and so is a fence. The calls go to
//! etcd's JSON gateway, since its gRPC client needs `protoc` to build.

#![allow(clippy::print_stdout, reason = "it says where it listens")]

use std::{env, fmt::Display, net::Ipv4Addr, time::Duration};

use axum::{Router, routing::post};
use base64::{Engine as _, prelude::BASE64_STANDARD};
use bytes::Bytes;
use http::Request;
use http_body_util::{BodyExt as _, Full};
use hyper_util::{
    client::{
        self,
        legacy::{Client, connect::HttpConnector},
    },
    rt::TokioExecutor,
};
use serde_json::{Value, json};
use tokio::{net::TcpListener, time::timeout};
use tower::BoxError;
use tower_idempotency::{
    Fence, IdempotencyLayer, Operation, Scope, StoreError, Sweeper,
    store::cas::{CasStore, CompareAndSwap, Listed, Swap, Versioned},
};

#[tokio::main]
pub(crate) async fn main() -> Result<(), BoxError> {
    let url = env::var("ETCD_URL").unwrap_or_else(|_| "http://127.0.0.1:2379".to_owned());
    let store = CasStore::new(Etcd::new(&url, "idempotency/"));
    let _sweeper = Sweeper::new(store.clone()).spawn();
    let layer = IdempotencyLayer::required(store, |_| Some(Scope::single_tenant())).build()?;
    let order = |operation: Operation| async move { format!("ordered: {}\n", operation.id()) };
    let app = Router::new().route("/orders", post(order).layer(layer));
    let listener = TcpListener::bind((Ipv4Addr::LOCALHOST, 3000)).await?;
    println!("listening on {}", listener.local_addr()?);
    Ok(axum::serve(listener, app).await?)
}

/// A member of a cluster, and the prefix of the keys. Needs no TLS and no password.
#[derive(Clone, Debug)]
pub(crate) struct Etcd {
    client: Client<HttpConnector, Full<Bytes>>,
    url: String,
    prefix: String,
}

impl Etcd {
    pub(crate) fn new(url: &str, prefix: &str) -> Self {
        Self {
            client: Client::builder(TokioExecutor::new()).build_http(),
            url: format!("{url}/v3/kv"),
            prefix: prefix.to_owned(),
        }
    }

    /// Makes one call, whose answer is JSON.
    async fn call(&self, call: &str, request: &Value) -> Result<Value, StoreError> {
        let request = Request::post(format!("{}/{call}", self.url))
            .body(Full::from(request.to_string()))
            .map_err(StoreError::unavailable)?;
        let answer = async {
            let response = self.client.request(request).await;
            let (head, body) = response.map_err(not_answered)?.into_parts();
            let body = body.collect().await.map_err(StoreError::unavailable)?;
            let answer: Value =
                serde_json::from_slice(&body.to_bytes()).map_err(StoreError::unavailable)?;
            if head.status.is_success() {
                return Ok(answer);
            }
            // Etcd's messages quote no key.
            let message = answer["message"].as_str().unwrap_or_default();
            Err(match message.contains("database space exceeded") {
                true => StoreError::full("etcd's quota: compact and defragment it, or raise it"),
                false => StoreError::unavailable(format!("etcd: {} {message}", head.status)),
            })
        };
        let answer = timeout(TIMEOUT, answer).await;
        answer.unwrap_or_else(|_| Err(StoreError::timed_out()))
    }

    /// Does `then` if the key was written last by the revision `expected`, or if there is no
    /// key and that is `None`. Otherwise reads it, in the same transaction.
    async fn swap(
        &self,
        key: &str,
        expected: Option<&u64>,
        then: Value,
    ) -> Result<Value, StoreError> {
        let (key, revision) = (self.encoded(key), expected.unwrap_or(&0).to_string());
        let transaction = json!({
            "compare": [{"key": key, "result": "EQUAL", "target": "MOD", "mod_revision": revision}],
            "success": [then],
            "failure": [{"request_range": {"key": key}}],
        });
        self.call("txn", &transaction).await
    }

    fn encoded(&self, key: impl Display) -> String {
        BASE64_STANDARD.encode(format!("{}{key}", self.prefix))
    }
}

impl CompareAndSwap for Etcd {
    type Version = u64;
    const FENCE: Option<fn(&u64) -> Fence> = Some(|revision| Fence::from(*revision));

    async fn get(&self, key: &str) -> Result<Option<Versioned<u64>>, StoreError> {
        let range = json!({"key": self.encoded(key)});
        let answer = self.call("range", &range).await?;
        answer["kvs"].get(0).map(versioned).transpose()
    }

    async fn put(
        &self,
        key: &str,
        value: Bytes,
        expected: Option<&u64>,
    ) -> Result<Swap<u64>, StoreError> {
        let value = BASE64_STANDARD.encode(value);
        let put = json!({"request_put": {"key": self.encoded(key), "value": value}});
        let answer = self.swap(key, expected, put).await?;
        if answer["succeeded"] == true {
            return Ok(Swap::Written(number(&answer["header"]["revision"])?));
        }
        let found = answer["responses"][0]["response_range"]["kvs"].get(0);
        Ok(Swap::Lost(found.map(versioned).transpose()?))
    }

    async fn delete(&self, key: &str, expected: &u64) -> Result<bool, StoreError> {
        let delete = json!({"request_delete_range": {"key": self.encoded(key)}});
        Ok(self.swap(key, Some(expected), delete).await?["succeeded"] == true)
    }

    async fn list(
        &self,
        prefix: &str,
        after: Option<&str>,
        limit: u32,
    ) -> Result<Listed<u64>, StoreError> {
        // The next key after another one has a NUL more. 0xff is in no UTF-8.
        let first = after.map_or_else(|| prefix.to_owned(), |after| format!("{after}\0"));
        let end = [self.prefix.as_bytes(), prefix.as_bytes(), &[0xff]].concat();
        let range = json!({
            "key": self.encoded(first),
            "range_end": BASE64_STANDARD.encode(end),
            "limit": limit.min(MOST_KEYS).to_string(),
        });
        let answer = self.call("range", &range).await?;
        let listed = answer["kvs"].as_array().into_iter().flatten();
        let listed = listed.map(|found| {
            let key = String::from_utf8(decoded(&found["key"])?);
            let key = key.map_err(|_| StoreError::corrupt("etcd: key"))?;
            Ok((key[self.prefix.len()..].to_owned(), versioned(found)?))
        });
        listed.collect()
    }
}

fn not_answered(error: client::legacy::Error) -> StoreError {
    let was_sent = !error.is_connect();
    let error = StoreError::unavailable(error);
    if was_sent { error } else { error.unsent() }
}

fn versioned(found: &Value) -> Result<Versioned<u64>, StoreError> {
    Ok(Versioned {
        value: decoded(&found["value"])?.into(),
        version: number(&found["mod_revision"])?,
    })
}

fn decoded(value: &Value) -> Result<Vec<u8>, StoreError> {
    let bytes = BASE64_STANDARD.decode(value.as_str().unwrap_or_default());
    bytes.map_err(|_| StoreError::corrupt("etcd: base64"))
}

/// The gateway writes 64-bit numbers as strings.
fn number(value: &Value) -> Result<u64, StoreError> {
    let number = value.as_str().and_then(|number| number.parse().ok());
    number.ok_or_else(|| StoreError::corrupt("etcd: revision"))
}

/// So many of the longest records, of 1.5 MiB, are still read in time.
const MOST_KEYS: u32 = 100;
const TIMEOUT: Duration = Duration::from_secs(4);
