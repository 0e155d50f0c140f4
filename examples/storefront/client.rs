//! The client of one endpoint, over HTTP.

use std::time::Duration;

use bytes::Bytes;
use http::{Request, Response, header::CONTENT_TYPE};
use http_body_util::Full;
use hyper::body::Incoming;
use hyper_util::rt::TokioExecutor;
use tower::{
    BoxError, ServiceBuilder, ServiceExt as _, retry::RetryLayer, timeout::TimeoutLayer,
    util::BoxCloneSyncService,
};
use tower_idempotency::client::{KeyLayer, KeyedRetry, OperationKey};

use crate::{Error, server};

/// Sends JSON under a key, and again under the same key where that may help.
#[derive(Clone)]
pub(crate) struct Client {
    address: String,
    service: BoxCloneSyncService<Request<Full<Bytes>>, Response<Incoming>, BoxError>,
}

impl Client {
    pub(crate) fn to(path: &str) -> Result<Self, Error> {
        let service = ServiceBuilder::new()
            // Outermost: all attempts of a call have one key.
            .layer(KeyLayer::uuid_v7())
            .layer(RetryLayer::new(KeyedRetry::new().attempts(6)))
            // For one attempt.
            .layer(TimeoutLayer::new(Duration::from_secs(5)))
            .service(
                hyper_util::client::legacy::Client::builder(TokioExecutor::new()).build_http(),
            );
        Ok(Self {
            address: format!("{}{path}", server::network()?),
            service: BoxCloneSyncService::new(service),
        })
    }

    /// Fails unless the answer is a success.
    pub(crate) async fn send(&self, key: &str, json: impl Into<Bytes>) -> Result<(), Error> {
        let request = Request::post(&self.address).header(CONTENT_TYPE, "application/json");
        let mut request = request.body(Full::from(json.into()))?;
        request.extensions_mut().insert(OperationKey::new(key)?);
        let status = self.service.clone().oneshot(request).await?.status();
        match status.is_success() {
            true => Ok(()),
            false => Err(format!("the answer is {status}").into()),
        }
    }
}
