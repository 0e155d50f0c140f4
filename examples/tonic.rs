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
    net::Ipv4Addr,
    sync::atomic::{AtomicU64, Ordering},
    task::{Context, Poll},
    time::Duration,
};

use futures_util::future::BoxFuture;
use http::request;
use tokio::{
    net::TcpListener,
    signal,
    sync::oneshot,
    time::{self, Instant},
};
use tonic::{
    Request, Response, Status,
    body::Body,
    server::{Grpc, NamedService},
    transport::server::{Server, TcpIncoming},
};
use tonic_health::server::health_reporter;
use tonic_prost::ProstCodec;
use tower::{BoxError, Service, service_fn};
use tower_idempotency::{
    Disposition, IdempotencyLayer, MemoryStore, Operation, Release, Scope, Store,
};

#[tokio::main]
pub(crate) async fn main() -> Result<(), BoxError> {
    let idempotency = idempotency(MemoryStore::new())?;
    let port = env::var("PORT").map_or(Ok(3000), |port| port.parse())?;
    let listener = TcpListener::bind((Ipv4Addr::LOCALHOST, port)).await?;
    println!("listening on {}", listener.local_addr()?);
    let left = serve(listener, idempotency, Counting, stop_signal()).await?;
    println!("{left} payments are left to their leases");
    Ok(())
}

/// Serves until `stop`, and ends within [`GRACE`] after it. Returns how many payments are
/// left to their leases.
pub(crate) async fn serve<S: Store, P: Provider>(
    listener: TcpListener,
    idempotency: IdempotencyLayer<S>,
    provider: P,
    stop: impl Future<Output = ()>,
) -> Result<usize, BoxError> {
    let (mut reporter, health) = health_reporter();
    reporter.set_serving::<Payments<P>>().await;
    let (stopping, stopped) = oneshot::channel::<()>();
    let server = Server::builder()
        // Around all of the services.
        .layer(idempotency.clone())
        .add_service(health)
        .add_service(Payments { provider })
        .serve_with_incoming_shutdown(TcpIncoming::from(listener), async {
            let _ = stopped.await;
        });
    let server = tokio::spawn(server);
    stop.await;
    drop(stopping);
    // This ends the streams of `Health.Watch`, for which the server would wait.
    for service in ["", Payments::<P>::NAME] {
        reporter.clear_service_status(service).await;
    }
    // One deadline for both: first the payments whose clients are connected, then those
    // whose clients have left.
    let deadline = Instant::now() + GRACE;
    match time::timeout_at(deadline, server).await {
        Ok(ended) => ended??,
        Err(_) => println!("some clients are still connected"),
    }
    let drained = idempotency.drain(deadline - Instant::now()).await;
    Ok(drained.left())
}

/// The time limit of a stop, below the 30 s that most orchestrators wait.
const GRACE: Duration = Duration::from_secs(25);

/// Resolves with Ctrl-C or SIGTERM.
async fn stop_signal() {
    let interrupt = async {
        signal::ctrl_c().await.expect("Ctrl-C can be caught");
    };
    #[cfg(unix)]
    let terminate = async {
        signal::unix::signal(signal::unix::SignalKind::terminate())
            .expect("SIGTERM can be caught")
            .recv()
            .await;
    };
    #[cfg(not(unix))]
    let terminate = std::future::pending();
    tokio::select! {
        () = interrupt => {}
        () = terminate => {}
    }
}
/// The layer. Each gRPC call is a POST, so the path decides which of them need a
/// key.
pub(crate) fn idempotency<S: Store>(store: S) -> Result<IdempotencyLayer<S>, BoxError> {
    let layer = IdempotencyLayer::required(store, caller)
        .guard_if(|parts| parts.uri.path() == PAY)
        .build()?;
    Ok(layer)
}

/// The owner of the key: a gateway in front has authenticated the caller.
fn caller(parts: &request::Parts) -> Option<Scope> {
    Scope::new(parts.headers.get("x-account")?.to_str().ok()?)
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
        if cents > 1_000_000 {
            // Nothing was done, and the limit may be raised: the same call may run again.
            // Without this, the layer would take the outcome for unknown.
            operation.set_disposition(Disposition::Release(Release::SameRequest));
            return Err(Status::resource_exhausted("over the limit"));
        }
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
