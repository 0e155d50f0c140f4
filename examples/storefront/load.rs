//! Many orders at once. Killed and started again, it sends all of them again, under the
//! same keys.

use std::{sync::Arc, time::Duration};

use bytes::Bytes;
use futures_util::{StreamExt as _, TryStreamExt as _, stream};
use http::{Request, StatusCode, header::CONTENT_TYPE};
use http_body_util::{BodyExt as _, Full};
use hyper_util::{client::legacy::Client, rt::TokioExecutor};
use serde_json::json;
use tower::{
    ServiceBuilder, ServiceExt as _,
    retry::{RetryLayer, budget::TpsBudget},
    timeout::TimeoutLayer,
};
use tower_idempotency::client::{KeyLayer, KeyedRetry, OperationKey};

use crate::{Error, server};

pub(crate) async fn run() -> Result<(), Error> {
    let (orders, prefix) = (server::setting(ORDERS)?.parse()?, server::setting(PREFIX)?);
    let retry = KeyedRetry::new()
        .attempts(100)
        .cap(Duration::from_secs(5))
        // All of these orders are to be placed, however long that takes.
        .budget(Arc::new(TpsBudget::new(
            Duration::from_secs(10),
            1_000,
            1.0,
        )));
    let client = ServiceBuilder::new()
        .layer(KeyLayer::uuid_v7())
        .layer(RetryLayer::new(retry))
        .layer(TimeoutLayer::new(Duration::from_secs(20)))
        .service(Client::builder(TokioExecutor::new()).build_http::<Full<Bytes>>());
    let address = format!("{}/guarded/orders", server::network()?);

    let order = async |number: u32| -> Result<(), Error> {
        let cart = format!("{prefix}{number}");
        let body = serde_json::to_vec(&json!({ "cart": cart }))?;
        let request = Request::post(&address).header(CONTENT_TYPE, "application/json");
        let mut request = request.body(Full::from(body))?;
        // Made from what survives the process, unlike a random one.
        request.extensions_mut().insert(OperationKey::new(&cart)?);
        let response = client.clone().oneshot(request).await?;
        match response.status() {
            StatusCode::CREATED => Ok(()),
            status => {
                let body = response.into_body().collect().await?.to_bytes();
                let body = String::from_utf8_lossy(&body);
                Err(format!("order {number}: {status} {body}").into())
            }
        }
    };
    let placed = stream::iter(0..orders).map(|number| Ok(order(number)));
    tokio::select! {
        placed = placed.try_for_each_concurrent(IN_FLIGHT, async |order| order.await) => placed,
        () = server::told_to_stop() => Ok(()),
    }
}

/// How many orders are placed at a time.
const IN_FLIGHT: usize = 32;

/// The variables that say how many orders there are, and what their carts' names begin with.
pub(crate) const ORDERS: &str = "STOREFRONT_ORDERS";
pub(crate) const PREFIX: &str = "STOREFRONT_PREFIX";
