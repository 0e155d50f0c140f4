//! What all processes share: their logs, their server and their stop.

use std::{
    env,
    future::IntoFuture as _,
    io::{self, Read as _},
    net::Ipv4Addr,
    path::PathBuf,
    thread,
    time::Duration,
};

use axum::Router;
use tokio::{net::TcpListener, signal, sync::oneshot, time};
use tower_idempotency::Drained;
use tracing::{Level, info, warn};
use tracing_subscriber::{filter::Targets, fmt, prelude::*};

use crate::Error;

/// Writes the events of `RUST_LOG` to standard error, and those of this program to standard
/// output as JSON, if that is for the timeline.
pub(crate) fn start_logs(is_for_timeline: bool) -> Result<(), Error> {
    let levels: Targets = env::var("RUST_LOG").as_deref().unwrap_or("error").parse()?;
    let timeline = is_for_timeline.then(|| {
        let levels = Targets::new().with_target("storefront", Level::INFO);
        fmt::layer().json().flatten_event(true).with_filter(levels)
    });
    tracing_subscriber::registry()
        .with(timeline)
        .with(fmt::layer().with_writer(io::stderr).with_filter(levels))
        .init();
    Ok(())
}

/// Serves until the process is stopped, and lets the connected clients have their answers.
pub(crate) async fn serve(app: Router) -> Result<(), Error> {
    let listener = TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).await?;
    info!(address = %listener.local_addr()?, "listening");
    let (stop, stopped) = oneshot::channel::<()>();
    let server = axum::serve(listener, app).with_graceful_shutdown(async {
        let _ = stopped.await;
    });
    let server = tokio::spawn(server.into_future());
    told_to_stop().await;
    drop(stop);
    if time::timeout(GRACE, server).await.is_err() {
        warn!("some clients are still connected");
    }
    Ok(())
}

/// Says what a process leaves behind.
pub(crate) fn log_drained(drained: Drained) {
    if drained.left() > 0 {
        warn!(left = drained.left(), "runs left to their leases");
    }
}

/// Resolves when standard input is closed. The process that started this one closes it to
/// stop this one, or by its own end.
pub(crate) async fn told_to_stop() {
    // A terminal sends Ctrl-C to all processes; the first one tells the others.
    tokio::spawn(async { while signal::ctrl_c().await.is_ok() {} });
    let (closed, input_closed) = oneshot::channel();
    thread::spawn(move || {
        let _ = io::stdin().read_to_end(&mut Vec::new());
        let _ = closed.send(());
    });
    let _ = input_closed.await;
}

/// A setting from the process that started this one.
pub(crate) fn setting(variable: &str) -> Result<String, Error> {
    env::var(variable).map_err(|error| format!("{variable}: {error}").into())
}

/// The directory of the files.
pub(crate) fn directory() -> Result<PathBuf, Error> {
    setting(DIRECTORY).map(PathBuf::from)
}

/// The address of the network, to which all requests go.
pub(crate) fn network() -> Result<String, Error> {
    setting(NETWORK)
}

pub(crate) const DIRECTORY: &str = "STOREFRONT_DIRECTORY";
pub(crate) const NETWORK: &str = "STOREFRONT_NETWORK";

/// The time limit of each step of a stop.
pub(crate) const GRACE: Duration = Duration::from_secs(5);
