//! The client of the payment provider.

use std::time::Duration;

use bytes::Bytes;
use http::{Request, Response, StatusCode, header::CONTENT_TYPE};
use http_body_util::Full;
use hyper::body::Incoming;
use hyper_util::{client::legacy::Client, rt::TokioExecutor};
use serde::{Deserialize, Serialize};
use tower::{
    BoxError, ServiceBuilder, ServiceExt as _, retry::RetryLayer, timeout::TimeoutLayer,
    util::BoxCloneSyncService,
};
use tower_idempotency::client::{KeyLayer, KeyedRetry, OperationKey};

use crate::{Error, server};

/// What the provider is asked to charge.
#[derive(Debug, Deserialize, Serialize)]
pub(crate) struct Charge {
    pub(crate) cart: String,
    /// The operation that pays, which the provider shows in its own records.
    pub(crate) operation: String,
    pub(crate) cents: u32,
}

impl Charge {
    pub(crate) fn new(cart: &str, operation: &str) -> Self {
        Self {
            cart: cart.to_owned(),
            operation: operation.to_owned(),
            cents: 500,
        }
    }
}

/// Sends charges to the provider.
#[derive(Clone)]
pub(crate) struct Payments {
    address: String,
    keyed: HttpClient,
    plain: HttpClient,
}

type HttpClient = BoxCloneSyncService<Request<Full<Bytes>>, Response<Incoming>, BoxError>;

impl Payments {
    pub(crate) fn new() -> Result<Self, Error> {
        let client = Client::builder(TokioExecutor::new()).build_http();
        let one_attempt = TimeoutLayer::new(Duration::from_secs(5));
        let keyed = ServiceBuilder::new()
            .layer(KeyLayer::uuid_v7())
            .layer(RetryLayer::new(KeyedRetry::new().attempts(4)))
            .layer(one_attempt.clone())
            .service(client.clone());
        let plain = ServiceBuilder::new().layer(one_attempt).service(client);
        Ok(Self {
            address: format!("{}/charges", server::network()?),
            keyed: BoxCloneSyncService::new(keyed),
            plain: BoxCloneSyncService::new(plain),
        })
    }

    /// Charges once for each key, however often it is called.
    pub(crate) async fn charge(&self, key: &str, charge: &Charge) -> Result<(), Error> {
        let mut request = self.request(charge)?;
        request.extensions_mut().insert(OperationKey::new(key)?);
        charged(self.keyed.clone().oneshot(request).await?.status())
    }

    /// Charges as often as it is called.
    pub(crate) async fn charge_without_key(&self, charge: &Charge) -> Result<(), Error> {
        let request = self.request(charge)?;
        charged(self.plain.clone().oneshot(request).await?.status())
    }

    fn request(&self, charge: &Charge) -> Result<Request<Full<Bytes>>, Error> {
        let body = Full::from(serde_json::to_vec(charge)?);
        let request = Request::post(&self.address).header(CONTENT_TYPE, "application/json");
        Ok(request.body(body)?)
    }
}

fn charged(status: StatusCode) -> Result<(), Error> {
    match status.is_success() {
        true => Ok(()),
        false => Err(format!("the provider answered {status}").into()),
    }
}
