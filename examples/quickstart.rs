//! Payments that are safe to send twice.
//!
//! ```text
//! cargo run --example quickstart
//! ```
//!
//! It prints commands to try. `PORT` and `DB` choose another port and another file
//! for the records.

#![allow(clippy::print_stdout, reason = "it tells its reader what to try")]

use std::{
    env, error::Error, future::IntoFuture as _, net::Ipv4Addr, path::PathBuf, time::Duration,
};

use axum::{Json, Router, response::IntoResponse, routing::post};
use http::{StatusCode, header::LOCATION};
use serde::Deserialize;
use serde_json::json;
use tokio::{
    net::TcpListener,
    signal,
    sync::oneshot,
    time::{self, Instant},
};
use tower_idempotency::{IdempotencyLayer, Operation, OrRelease, Scope, SqliteStore};

#[tokio::main]
async fn main() -> Result<(), Box<dyn Error>> {
    // The store's failures are warnings in the log.
    tracing_subscriber::fmt().init();
    let file =
        env::var_os("DB").map_or_else(|| env::temp_dir().join("quickstart.db"), PathBuf::from);
    let store = SqliteStore::open(&file).await?;

    // The owner of a key. All callers are one here; `axum_postgres.rs` has
    // accounts.
    let idempotency =
        IdempotencyLayer::required(store, |_| Some(Scope::single_tenant())).build()?;

    let app = Router::new()
        .route("/payments", post(pay))
        .layer(idempotency.clone());

    let port = env::var("PORT").map_or(Ok(3000), |port| port.parse())?;
    let listener = TcpListener::bind((Ipv4Addr::LOCALHOST, port)).await?;
    println!("Records are kept in {}.", file.display());
    print_what_to_try(&format!("http://{}/payments", listener.local_addr()?));

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
        println!("Some clients are still connected.");
    }
    let drained = idempotency.drain(deadline - Instant::now()).await;
    if drained.left() > 0 {
        println!("{} payments are left to their leases.", drained.left());
    }
    Ok(())
}

/// The time limit of a stop, below the 30 s that most orchestrators wait.
const GRACE: Duration = Duration::from_secs(25);

#[derive(Deserialize)]
struct Payment {
    amount: u64,
    #[serde(default)]
    slow: bool,
}

/// JSON that cannot be read releases the key, so that it may be corrected.
async fn pay(
    operation: Operation,
    OrRelease(Json(payment)): OrRelease<Json<Payment>>,
) -> impl IntoResponse {
    if payment.slow {
        time::sleep(Duration::from_secs(10)).await;
    }
    println!("charged {}", payment.amount);

    // The same in every attempt of this payment, unlike a random id.
    let id = operation.derive("payment");
    let location = [(LOCATION, format!("/payments/{id}"))];
    let body = Json(json!({ "id": id, "amount": payment.amount }));
    (StatusCode::CREATED, location, body)
}

fn print_what_to_try(url: &str) {
    let json = "-H 'Content-Type: application/json'";
    // New in each run, since the file remembers the keys of the last one.
    let key = format!("order-{}", std::process::id());
    println!(
        "\
Try, in another terminal:

1. A payment: 201, and \"charged 500\" appears here.
   curl -i {url} {json} -H 'Idempotency-Key: {key}' -d '{{\"amount\":500}}'

2. The same line again: the same 201 with \"idempotent-replayed: true\", and no
   second charge.

3. The same key for another amount: 422, nothing runs.
   curl -i {url} {json} -H 'Idempotency-Key: {key}' -d '{{\"amount\":900}}'

4. No key: 400, nothing runs.
   curl -i {url} {json} -d '{{\"amount\":500}}'

5. A mistake: 422. Its key is still free for the corrected request, which is 201.
   curl -i {url} {json} -H 'Idempotency-Key: {key}-mistake' -d '{{\"amount\":\"500\"}}'
   curl -i {url} {json} -H 'Idempotency-Key: {key}-mistake' -d '{{\"amount\":500}}'

6. A payment that takes ten seconds: twice within them, the second is answered 409
   with a Retry-After; once more after them, it is replayed.
   curl -i {url} {json} -H 'Idempotency-Key: {key}-slow' -d '{{\"amount\":700,\"slow\":true}}'

7. Stop this server with Ctrl-C and start it again. Send a line from before the restart: it
   is still replayed.

8. Stop it with `kill -9` while a slow payment runs, and start it again. The payment's line
   from before gets 409 request-in-progress until the lease of 30 s ends, and then 409
   outcome-unknown. It does not run again.
"
    );
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
