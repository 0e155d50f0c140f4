//! The network between the page and the processes, with its faults.

use std::{io, time::Duration};

use axum::{
    Router,
    body::{Body, Bytes, to_bytes},
    extract::{Request, State},
    response::{IntoResponse as _, Response},
    routing::post,
};
use futures_util::stream;
use http::{StatusCode, Uri, header::LOCATION, header::RETRY_AFTER, uri::Scheme};
use hyper_util::{
    client::legacy::{Client, connect::HttpConnector},
    rt::TokioExecutor,
};
use serde::Deserialize;
use tokio::time;

use crate::{
    Error,
    faults::{Fault, Faults},
    processes::Processes,
    role::Role,
    timeline::{Event, Timeline},
};

#[derive(Clone)]
pub(crate) struct Network {
    processes: Processes,
    client: Client<HttpConnector, Body>,
}

impl Network {
    pub(crate) fn router(processes: Processes) -> Router {
        let mut client = Client::builder(TokioExecutor::new());
        // No process gets a connection of the one before it.
        let client = client.pool_max_idle_per_host(0).build_http();
        Router::new()
            .route("/guarded/orders", post(order))
            .route("/unguarded/orders", post(order))
            .route("/events", post(event))
            .route("/charges", post(charge))
            .with_state(Self { processes, client })
    }

    /// Passes a request to a process, once it listens.
    async fn pass(
        &self,
        role: Role,
        parts: http::request::Parts,
        body: Bytes,
    ) -> Result<Response, Error> {
        let address = self.processes.address(role).await;
        let mut uri = parts.uri.clone().into_parts();
        uri.scheme = Some(Scheme::HTTP);
        uri.authority = Some(address.to_string().parse()?);
        let mut request = Request::from_parts(parts, Body::from(body));
        *request.uri_mut() = Uri::from_parts(uri)?;
        Ok(self.client.request(request).await?.map(Body::new))
    }

    fn tell(&self, labels: &Labels, what: &str) {
        self.timeline().add(Event {
            cart: labels.cart.clone(),
            operation: labels.operation.clone(),
            ..Event::of("network", what)
        });
    }

    fn faults(&self) -> &Faults {
        &self.processes.faults
    }

    fn timeline(&self) -> &Timeline {
        &self.processes.timeline
    }
}

/// What the network reads of a request.
#[derive(Default, Deserialize)]
struct Labels {
    cart: Option<String>,
    operation: Option<String>,
}

/// From the page, or from the load, to the shop.
async fn order(State(network): State<Network>, request: Request) -> Response {
    let (parts, body, labels) = match read(request).await {
        Ok(read) => read,
        Err(refusal) => return refusal,
    };
    let tell = |what: &str, operation, status| {
        network.timeline().add(Event {
            cart: labels.cart.clone(),
            operation,
            status,
            ..Event::of("network", what)
        });
    };
    if let Some(cart) = &labels.cart {
        network.processes.pace.allowed(cart).await;
    }
    tell("request", None, None);
    let response = match network.pass(Role::Shop, parts, body).await {
        Ok(response) => response,
        Err(error) => {
            tracing::debug!(error, "no response of the shop");
            tell("connection lost", None, None);
            return cut();
        }
    };
    let operation = operation(&response);
    let status = Some(response.status().as_u16());
    if network.faults().take(Fault::DropResponse) {
        tell("response lost", operation, status);
        return cut();
    }
    match response.headers().contains_key("idempotent-replayed") {
        true => tell("replayed", operation, status),
        false => tell("answered", operation, status),
    }
    response
}

/// From the relay to the consumer.
async fn event(State(network): State<Network>, request: Request) -> Response {
    let (parts, body, labels) = match read(request).await {
        Ok(read) => read,
        Err(refusal) => return refusal,
    };
    let response = match network.pass(Role::Consumer, parts, body).await {
        Ok(response) => response,
        Err(error) => {
            tracing::debug!(error, "no response of the consumer");
            network.tell(&labels, "connection to the consumer lost");
            return cut();
        }
    };
    if network.faults().take(Fault::KillRelay) {
        network.processes.kill(Role::Relay);
        return cut();
    }
    response
}

/// From the consumer to the provider.
async fn charge(State(network): State<Network>, request: Request) -> Response {
    let (parts, body, labels) = match read(request).await {
        Ok(read) => read,
        Err(refusal) => return refusal,
    };
    let tell = |what| network.tell(&labels, what);
    if network.faults().is_on(Fault::SlowProvider) {
        tell("charge delayed");
        time::sleep(SLOW).await;
    }
    let response = match network.pass(Role::Provider, parts, body).await {
        Ok(response) => response,
        Err(error) => {
            tracing::debug!(error, "no response of the provider");
            tell("connection to the provider lost");
            return cut();
        }
    };
    if response.headers().contains_key("idempotent-replayed") {
        tell("charge replayed");
    }
    if network.faults().take(Fault::KillConsumer) {
        network.processes.kill(Role::Consumer);
        return cut();
    }
    if network.faults().take(Fault::ProviderUnavailable) {
        tell("charge answered 503");
        return (StatusCode::SERVICE_UNAVAILABLE, [(RETRY_AFTER, "1")]).into_response();
    }
    response
}

async fn read(request: Request) -> Result<(http::request::Parts, Bytes, Labels), Response> {
    let (parts, body) = request.into_parts();
    let body = to_bytes(body, LARGEST).await;
    let body = body.map_err(|_| StatusCode::PAYLOAD_TOO_LARGE.into_response())?;
    let labels = serde_json::from_slice(&body).unwrap_or_default();
    Ok((parts, body, labels))
}

/// The operation that a response of the shop is of: it is in the name of the order.
fn operation(response: &Response) -> Option<String> {
    let location = response.headers().get(LOCATION)?.to_str().ok()?;
    Some(location.strip_prefix("/orders/")?.to_owned())
}

/// A body that fails before its first byte, which closes the connection.
fn cut() -> Response {
    let lost = stream::iter([Err::<Bytes, _>(io::Error::other("the connection is cut"))]);
    Response::new(Body::from_stream(lost))
}

/// The largest body of a request.
const LARGEST: usize = 64 * 1024;

/// The delay of a request to a slow provider.
const SLOW: Duration = Duration::from_secs(1);
