//! A gRPC service on tonic. Its unary method `Pay` needs a key; the health check does not.
//!
//! ```text
//! cargo run --example tonic --features tonic
//! grpcurl -plaintext -import-path examples -proto payments.proto \
//!     -H 'x-account: ann' -H 'idempotency-key: k' -d '{"cents": 500}' \
//!     localhost:3000 shop.Payments/Pay
//! ```
//!
//! The second time, the answer is replayed: its number stays. The messages and the service
//! are written by hand here, so that the example needs no `protoc`.

#![allow(clippy::print_stdout, reason = "it says where it listens")]

use std::{
    convert::Infallible,
    env,
    error::Error,
    net::Ipv4Addr,
    sync::atomic::{AtomicU64, Ordering},
    task::{Context, Poll},
    time::Duration,
};

use futures_util::future::BoxFuture;
use http::request;
use tokio::{net::TcpListener, signal};
use tonic::{
    Request, Response, Status,
    body::Body,
    server::{Grpc, NamedService},
    transport::server::{Router, Server, TcpIncoming},
};
use tonic_health::server::health_reporter;
use tonic_prost::ProstCodec;
use tower::{
    Service,
    layer::util::{Identity, Stack},
    service_fn,
};
use tower_idempotency::{IdempotencyLayer, MemoryStore, Operation, Scope, Store};

#[tokio::main]
pub(crate) async fn main() -> Result<(), Box<dyn Error>> {
    let idempotency = idempotency(MemoryStore::new())?;
    let port = env::var("PORT").map_or(Ok(3000), |port| port.parse())?;
    let listener = TcpListener::bind((Ipv4Addr::LOCALHOST, port)).await?;
    println!("listening on {}", listener.local_addr()?);
    router(idempotency.clone(), Counting)
        .await
        .serve_with_incoming_shutdown(TcpIncoming::from(listener), async {
            signal::ctrl_c().await.expect("Ctrl-C can be caught");
        })
        .await?;
    let drained = idempotency.drain(Duration::from_secs(25)).await;
    println!("{} requests are left to their leases", drained.left());
    Ok(())
}

/// The layer. Each gRPC call is a POST, so the path decides which of them need a
/// key.
pub(crate) fn idempotency<S: Store>(store: S) -> Result<IdempotencyLayer<S>, Box<dyn Error>> {
    let layer = IdempotencyLayer::required(store, caller)
        .guard_if(|parts| parts.uri.path() == PAY)
        .build()?;
    Ok(layer)
}

/// The owner of the key: a gateway in front has authenticated the caller.
fn caller(parts: &request::Parts) -> Option<Scope> {
    Scope::new(parts.headers.get("x-account")?.to_str().ok()?)
}

/// The server, with the layer around all of its services.
pub(crate) async fn router<S: Store, P: Provider>(
    idempotency: IdempotencyLayer<S>,
    provider: P,
) -> Router<Stack<IdempotencyLayer<S>, Identity>> {
    let (reporter, health) = health_reporter();
    reporter.set_serving::<Payments<P>>().await;
    Server::builder()
        .layer(idempotency)
        .add_service(health)
        .add_service(Payments { provider })
}

/// A payment provider, which takes an idempotency key.
pub(crate) trait Provider: Clone + Send + Sync + 'static {
    /// Returns the id of the charge.
    fn charge(
        &self,
        key: String,
        cents: u64,
    ) -> impl Future<Output = Result<String, Status>> + Send;
}

/// Numbers its charges.
#[derive(Clone)]
struct Counting;

impl Provider for Counting {
    async fn charge(&self, _: String, _: u64) -> Result<String, Status> {
        static CHARGES: AtomicU64 = AtomicU64::new(0);
        let number = CHARGES.fetch_add(1, Ordering::Relaxed) + 1;
        Ok(format!("ch_{number}"))
    }
}

#[derive(Clone, PartialEq, prost::Message)]
pub(crate) struct Payment {
    #[prost(uint64, tag = "1")]
    pub(crate) cents: u64,
}

#[derive(Clone, PartialEq, prost::Message)]
pub(crate) struct Receipt {
    #[prost(string, tag = "1")]
    pub(crate) charge: String,
}

/// The method's path: `/package.Service/Method`.
pub(crate) const PAY: &str = "/shop.Payments/Pay";

/// The code that `tonic-build` would generate for the service.
#[derive(Clone)]
pub(crate) struct Payments<P> {
    provider: P,
}

impl<P: Provider> Payments<P> {
    async fn pay(self, request: Request<Payment>) -> Result<Response<Receipt>, Status> {
        let cents = request.get_ref().cents;
        if cents == 0 {
            // Recorded, as a 400 is.
            return Err(Status::invalid_argument("nothing to pay"));
        }
        let operation = request
            .extensions()
            .get::<Operation>()
            .ok_or_else(|| Status::internal("no idempotency layer"))?;
        // A failure after this leaves the outcome unknown.
        operation.effects_started();
        let key = operation.derive("charge");
        let charge = self.provider.charge(key, cents).await?;
        Ok(Response::new(Receipt { charge }))
    }
}

impl<P> NamedService for Payments<P> {
    const NAME: &'static str = "shop.Payments";
}

impl<P: Provider> Service<http::Request<Body>> for Payments<P> {
    type Response = http::Response<Body>;
    type Error = Infallible;
    type Future = BoxFuture<'static, Result<Self::Response, Infallible>>;

    fn poll_ready(&mut self, _: &mut Context<'_>) -> Poll<Result<(), Infallible>> {
        Poll::Ready(Ok(()))
    }

    fn call(&mut self, request: http::Request<Body>) -> Self::Future {
        let payments = self.clone();
        Box::pin(async move {
            if request.uri().path() != PAY {
                return Ok(Status::unimplemented("no such method").into_http());
            }
            let codec = ProstCodec::<Receipt, Payment>::default();
            let pay = service_fn(move |request| payments.clone().pay(request));
            Ok(Grpc::new(codec).unary(pay, request).await)
        })
    }
}
