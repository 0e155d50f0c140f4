//! The layer on hyper, without a framework.
//!
//! ```text
//! cargo run --example hyper --features http2
//! curl -i localhost:3000/ -d hello -H 'X-Account: ann' -H 'Idempotency-Key: k'
//! ```
//!
//! The second time, the answer is replayed: its number stays.

#![allow(clippy::print_stdout, reason = "it says where it listens")]

use std::{
    convert::Infallible,
    env,
    error::Error,
    net::Ipv4Addr,
    pin::pin,
    sync::atomic::{AtomicU64, Ordering},
    time::Duration,
};

use http::{Request, Response, request};
use http_body_util::{BodyExt as _, Full};
use hyper::body::{Bytes, Incoming};
use hyper_util::{
    rt::{TokioExecutor, TokioIo, TokioTimer},
    server::{conn::auto, graceful::GracefulShutdown},
    service::TowerToHyperService,
};
use tokio::{
    net::TcpListener,
    signal,
    time::{self, Instant},
};
use tower::ServiceBuilder;
use tower_idempotency::{IdempotencyLayer, MemoryStore, RequestBody, Scope};

#[tokio::main]
async fn main() -> Result<(), Box<dyn Error>> {
    let idempotency = IdempotencyLayer::required(MemoryStore::new(), caller).build()?;
    let service = ServiceBuilder::new()
        .layer(idempotency.clone())
        .service_fn(answer);
    let service = TowerToHyperService::new(service);

    let port = env::var("PORT").map_or(Ok(3000), |port| port.parse())?;
    let listener = TcpListener::bind((Ipv4Addr::LOCALHOST, port)).await?;
    println!("listening on {}", listener.local_addr()?);

    let mut server = auto::Builder::new(TokioExecutor::new());
    server.http1().timer(TokioTimer::new());
    server.http2().timer(TokioTimer::new());
    let connections = GracefulShutdown::new();
    let mut stop = pin!(stop_signal());
    loop {
        let accepted = tokio::select! {
            accepted = listener.accept() => accepted,
            () = &mut stop => break,
        };
        let Ok((stream, _)) = accepted else {
            // Probably out of file descriptors; some connections will close.
            time::sleep(Duration::from_millis(100)).await;
            continue;
        };
        let connection = server
            .serve_connection(TokioIo::new(stream), service.clone())
            .into_owned();
        // A broken connection concerns its client alone.
        tokio::spawn(connections.watch(connection));
    }
    drop(listener);

    // One deadline for both: first the clients that are connected, then the work
    // of those that have left.
    let deadline = Instant::now() + GRACE;
    if time::timeout_at(deadline, connections.shutdown())
        .await
        .is_err()
    {
        println!("some clients are still connected");
    }
    let drained = idempotency.drain(deadline - Instant::now()).await;
    if drained.left() > 0 {
        println!("{} requests are left to their leases", drained.left());
    }
    Ok(())
}

/// The time limit of a stop, below the 30 s that most orchestrators wait.
const GRACE: Duration = Duration::from_secs(25);

/// The owner of the key: a gateway in front has authenticated the caller.
fn caller(parts: &request::Parts) -> Option<Scope> {
    Scope::new(parts.headers.get("x-account")?.to_str().ok()?)
}

async fn answer(
    request: Request<RequestBody<Incoming>>,
) -> Result<Response<Full<Bytes>>, Infallible> {
    static RUNS: AtomicU64 = AtomicU64::new(0);
    let run = RUNS.fetch_add(1, Ordering::Relaxed) + 1;
    // Only a body that streams can break here; a guarded one has arrived.
    let length = match request.into_body().collect().await {
        Ok(body) => body.to_bytes().len(),
        Err(_) => 0,
    };
    let text = format!("run {run} got {length} bytes\n");
    Ok(Response::new(Full::from(text)))
}

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
