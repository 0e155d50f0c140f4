use std::time::Duration;

use axum::Router;
use tokio::{net::TcpListener, sync::oneshot, time};
use tower_idempotency::{IdempotencyLayer, Store};

/// Serves until `stop` resolves, as it does with Ctrl-C or SIGTERM.
async fn serve<S: Store>(
    listener: TcpListener,
    app: Router,
    idempotency: IdempotencyLayer<S>,
    stop: impl Future<Output = ()>,
) {
    let (stopping, stopped) = oneshot::channel::<()>();
    let server = axum::serve(listener, app).with_graceful_shutdown(async {
        let _ = stopped.await;
    });
    let server = tokio::spawn(server.into_future());

    stop.await;
    drop(stopping);
    // One deadline for both: the connected clients first, then those that left.
    let deadline = time::Instant::now() + Duration::from_secs(25);
    let _ = time::timeout_at(deadline, server).await;
    let drained = idempotency.drain(deadline - time::Instant::now()).await;
    if drained.left() > 0 {
        eprintln!("{} requests left to their leases", drained.left());
    }
}
