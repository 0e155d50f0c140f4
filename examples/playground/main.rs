//! The server that the black-box cases run against, over real sockets.
//!
//! It listens on `127.0.0.1:$PORT` (0 picks a port), speaks HTTP/1.1 and HTTP/2
//! with prior knowledge, and prints `listening on 127.0.0.1:PORT` once it is
//! ready. `Authorization: Bearer ACCOUNT.SUFFIX` makes the caller ACCOUNT.
//!
//! ```text
//! PORT=3000 RUNS=/tmp/runs cargo run --example playground --all-features
//! curl -i localhost:3000/count -X POST -H 'Authorization: Bearer ann.1' -H 'Idempotency-Key: k'
//! curl localhost:3000/runs?path=/count
//! ```
//!
//! `settings.rs` lists the environment variables, `handlers.rs` the endpoints,
//! `operator.rs` the calls for tests.

#![allow(
    clippy::print_stdout,
    clippy::print_stderr,
    reason = "it tells whoever started it where it listens, or why it does not"
)]

mod caller;
#[path = "../etcd_store.rs"]
#[allow(dead_code, reason = "its backend is used, and its server is not")]
mod etcd_store;
mod handlers;
mod operator;
mod orders;
mod runs;
mod server;
mod settings;
mod stores;

use std::{env, io, net::Ipv4Addr, process::ExitCode};

use axum::{Router, error_handling::HandleErrorLayer, middleware};
use http::StatusCode;
use tokio::{net::TcpListener, time::Instant};
use tower::ServiceBuilder;
use tower_http::{limit::RequestBodyLimitLayer, timeout::TimeoutLayer};
use tower_idempotency::{DynStore, IdempotencyLayer, Sweeper};
use tracing_subscriber::{filter::Targets, fmt, prelude::*};

use self::{
    orders::Orders,
    runs::Runs,
    server::{serve, stop_signal},
    settings::{Malformed, Settings},
};

#[tokio::main]
async fn main() -> ExitCode {
    match run().await {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) if error.is::<Malformed>() => {
            eprintln!("playground: {error}");
            ExitCode::from(2)
        }
        Err(error) => {
            eprintln!("playground: {error}");
            ExitCode::FAILURE
        }
    }
}

async fn run() -> Result<(), Box<dyn std::error::Error>> {
    let settings = Settings::from_environment()?;
    start_logs()?;
    let (store, orders) = stores::open(&settings.store, settings.is_pooled, settings.pages).await?;
    let layer = settings.layer(store.clone())?;
    let runs = Runs::new(settings.runs.clone());
    let sweeper = settings
        .sweep
        .map(|interval| Sweeper::new(store.clone()).every(interval).spawn());

    let stop = stop_signal()?;
    let listener = TcpListener::bind((Ipv4Addr::LOCALHOST, settings.port)).await?;
    println!("listening on {}", listener.local_addr()?);
    let connections = serve(listener, app(&settings, &layer, store, runs, orders), stop).await;

    let end = Instant::now() + settings.grace;
    // Connections first: a request that they are still sending is one for which
    // the layer must wait.
    connections.end_before(end).await;
    let drained = layer.drain(end - Instant::now()).await;
    if drained.left() > 0 {
        tracing::warn!(left = drained.left(), "requests left to their leases");
    }
    if let Some(sweeper) = sweeper {
        sweeper.stop().await;
    }
    Ok(())
}

/// All but the operator's endpoints runs behind a timeout and a body limit, if
/// they are set, the authentication and the layer.
fn app(
    settings: &Settings,
    layer: &IdempotencyLayer<DynStore>,
    store: DynStore,
    runs: Runs,
    orders: Orders,
) -> Router {
    let everything_else = ServiceBuilder::new()
        .layer(HandleErrorLayer::new(
            |error: handlers::Failed| async move {
                (StatusCode::INTERNAL_SERVER_ERROR, error.to_string())
            },
        ))
        .layer(layer.clone())
        .service(handlers::fallible(runs.clone(), orders.clone()));
    // A layer inside of a nested router sees the shortened path, which two routers
    // may share.
    let counters = handlers::counters(runs.clone()).layer(layer.clone());
    let mut app = Router::new()
        .nest("/v1", counters.clone())
        .nest("/v2", counters)
        .fallback_service(everything_else)
        .layer(middleware::from_fn(caller::authenticate));
    if let Some(limit) = settings.outer_body_limit {
        app = app.layer(RequestBodyLimitLayer::new(limit));
    }
    if let Some(bound) = settings.timeout {
        app = app.layer(TimeoutLayer::with_status_code(
            StatusCode::GATEWAY_TIMEOUT,
            bound,
        ));
    }
    app.merge(operator::router(store, runs, orders))
}

/// Logs to standard error at the level of `RUST_LOG`.
fn start_logs() -> Result<(), Malformed> {
    let levels = env::var("RUST_LOG").unwrap_or_default();
    let levels: Targets = match &*levels {
        "" => "warn",
        levels => levels,
    }
    .parse()
    .map_err(|error| Malformed::new("RUST_LOG", error))?;
    tracing_subscriber::registry()
        .with(fmt::layer().with_writer(io::stderr))
        .with(levels)
        .init();
    Ok(())
}
