//! A production service: accounts, PostgreSQL, timeouts, logs, and an orderly
//! stop.
//!
//! ```text
//! DATABASE_URL=postgres://app@localhost/app RUST_LOG=debug \
//!     cargo run --example axum_postgres --features postgres
//! curl -i localhost:3000/payments -H 'Authorization: Bearer ann-laptop' \
//!     -H 'Idempotency-Key: order-1' -H 'Content-Type: application/json' -d '{"amount":500}'
//! ```
//!
//! Ann's telephone (`Bearer ann-phone`) gets the same response replayed; Bob
//! (`Bearer bob-laptop`) may use the same key for a payment of his own.

#![allow(clippy::print_stdout, reason = "it says where it listens")]

use std::{env, error::Error, future::IntoFuture as _, net::Ipv4Addr, time::Duration};

use axum::{
    Json, Router,
    extract::Request,
    middleware::{self, Next},
    response::{IntoResponse, Response},
    routing::post,
};
use http::{
    StatusCode,
    header::{AUTHORIZATION, LOCATION},
    request,
};
use serde::Deserialize;
use serde_json::json;
use tokio::{
    net::TcpListener,
    signal,
    sync::oneshot,
    time::{self, Instant},
};
use tower::ServiceBuilder;
use tower_http::{timeout::TimeoutLayer, trace::TraceLayer};
use tower_idempotency::{IdempotencyLayer, Operation, OrRelease, PostgresStore, Scope, Sweeper};
use tracing_subscriber::{filter::Targets, fmt, prelude::*};

#[tokio::main]
async fn main() -> Result<(), Box<dyn Error>> {
    // Logs warnings, unless RUST_LOG is set. They name each failure and its cause.
    let levels: Targets = env::var("RUST_LOG").as_deref().unwrap_or("info").parse()?;
    tracing_subscriber::registry()
        .with(fmt::layer())
        .with(levels)
        .init();

    let url = env::var("DATABASE_URL")
        .map_err(|_| "DATABASE_URL is not set; it is as postgres://app@localhost/app")?;
    let store = PostgresStore::connect(&url).await?;
    store.migrate().await?;
    let sweeper = Sweeper::new(store.clone()).spawn();
    let idempotency = IdempotencyLayer::required(store.clone(), caller).build()?;

    let app = Router::new().route("/payments", post(pay)).layer(
        // The outermost layer first. A request that times out still runs, and its
        // retry gets the real response. A refused caller uses no key.
        ServiceBuilder::new()
            .layer(TraceLayer::new_for_http())
            .layer(TimeoutLayer::with_status_code(
                StatusCode::GATEWAY_TIMEOUT,
                Duration::from_secs(20),
            ))
            .layer(middleware::from_fn(authenticate))
            .layer(idempotency.clone()),
    );

    let port = env::var("PORT").map_or(Ok(3000), |port| port.parse())?;
    let listener = TcpListener::bind((Ipv4Addr::LOCALHOST, port)).await?;
    println!("listening on {}", listener.local_addr()?);
    let (stop, stopped) = oneshot::channel::<()>();
    let server = axum::serve(listener, app).with_graceful_shutdown(async {
        let _ = stopped.await;
    });
    let server = tokio::spawn(server.into_future());
    stop_signal().await;
    drop(stop);
    // One deadline for both: first the payments whose clients are connected, then
    // those whose clients have left.
    let deadline = Instant::now() + GRACE;
    if time::timeout_at(deadline, server).await.is_err() {
        tracing::warn!("some clients are still connected");
    }
    let drained = idempotency.drain(deadline - Instant::now()).await;
    if drained.left() > 0 {
        tracing::warn!(left = drained.left(), "payments left to their leases");
    }
    sweeper.stop().await;
    store.close().await;
    Ok(())
}

/// The time limit of a stop, below the 30 s that most orchestrators wait.
const GRACE: Duration = Duration::from_secs(25);

/// The caller, which the idempotency layer reads.
#[derive(Clone, Copy)]
struct Account(&'static str);

async fn authenticate(mut request: Request, next: Next) -> Response {
    let token = request
        .headers()
        .get(AUTHORIZATION)
        .and_then(|value| value.to_str().ok()?.strip_prefix("Bearer "));
    let Some((_, account)) = TOKENS.iter().find(|(known, _)| token == Some(known)) else {
        return StatusCode::UNAUTHORIZED.into_response();
    };
    request.extensions_mut().insert(Account(account));
    next.run(request).await
}

/// The account, not its token, which may differ in the retry.
fn caller(parts: &request::Parts) -> Option<Scope> {
    let Account(account) = parts.extensions.get()?;
    Scope::new(account)
}

#[derive(Deserialize)]
struct Payment {
    amount: u64,
}

/// A body that is not a payment releases the key: the corrected request may use it.
async fn pay(operation: Operation, OrRelease(Json(payment)): OrRelease<Json<Payment>>) -> Response {
    if payment.amount == 0 {
        // Recorded: the retry gets the same answer.
        return (StatusCode::UNPROCESSABLE_ENTITY, "nothing to pay").into_response();
    }
    // After this line a failure may have charged the card, and its retry must not
    // run.
    operation.effects_started();
    let provider_key = operation.derive("payments");
    match charge(&provider_key, payment.amount).await {
        Ok(charge) => {
            let location = [(LOCATION, format!("/payments/{charge}"))];
            let body = Json(json!({ "id": charge, "amount": payment.amount }));
            (StatusCode::CREATED, location, body).into_response()
        }
        // An unknown outcome: retries get 409 until an operator resolves it.
        Err(NoAnswer) => StatusCode::BAD_GATEWAY.into_response(),
    }
}

/// The provider did not answer; it may have charged the card.
struct NoAnswer;

/// Stands for the payment provider, which charges once for each idempotency key.
async fn charge(provider_key: &str, amount: u64) -> Result<String, NoAnswer> {
    time::sleep(Duration::from_millis(50)).await;
    match amount {
        ..=1_000_000 => Ok(format!("ch_{provider_key}")),
        _ => Err(NoAnswer),
    }
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

/// Stands for a table of sessions: token and account.
const TOKENS: [(&str, &str); 3] = [
    ("ann-laptop", "acct_ann"),
    ("ann-phone", "acct_ann"),
    ("bob-laptop", "acct_bob"),
];
