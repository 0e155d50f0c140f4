//! Connections: HTTP/1.1 and HTTP/2 with prior knowledge, until a signal.

use std::{io, pin::pin, time::Duration};

use axum::Router;
use hyper_util::{
    rt::{TokioExecutor, TokioIo, TokioTimer},
    server::{conn::auto, graceful::GracefulShutdown},
    service::TowerToHyperService,
};
use tokio::{
    net::{TcpListener, TcpStream},
    time::{self, Instant},
};

/// Accepts connections until `stop`, and returns those still open.
pub(crate) async fn serve(
    listener: TcpListener,
    app: Router,
    stop: impl Future<Output = ()>,
) -> Connections {
    let mut builder = auto::Builder::new(TokioExecutor::new());
    builder.http1().timer(TokioTimer::new());
    builder.http2().timer(TokioTimer::new());
    let graceful = GracefulShutdown::new();
    let service = TowerToHyperService::new(app);
    let mut stop = pin!(stop);
    loop {
        let stream = tokio::select! {
            stream = accept(&listener) => stream,
            () = &mut stop => return Connections(graceful),
        };
        let connection = builder
            .serve_connection(TokioIo::new(stream), service.clone())
            .into_owned();
        let connection = graceful.watch(connection);
        tokio::spawn(async move {
            if let Err(error) = connection.await {
                tracing::debug!(error, "connection broken");
            }
        });
    }
}

/// The connections that were open when the server stopped accepting.
pub(crate) struct Connections(GracefulShutdown);

impl Connections {
    /// Lets each finish its requests and accept no more.
    pub(crate) async fn end_before(self, end: Instant) {
        if time::timeout_at(end, self.0.shutdown()).await.is_err() {
            tracing::warn!("connections still open");
        }
    }
}

/// Resolves with the first SIGTERM or Ctrl-C. Both are caught from this call on.
pub(crate) fn stop_signal() -> io::Result<impl Future<Output = ()>> {
    #[cfg(unix)]
    {
        use tokio::signal::unix::{SignalKind, signal};
        let mut terminate = signal(SignalKind::terminate())?;
        let mut interrupt = signal(SignalKind::interrupt())?;
        Ok(async move {
            tokio::select! {
                _ = terminate.recv() => {}
                _ = interrupt.recv() => {}
            }
        })
    }
    #[cfg(not(unix))]
    Ok(async {
        let _ = tokio::signal::ctrl_c().await;
    })
}

async fn accept(listener: &TcpListener) -> TcpStream {
    loop {
        match listener.accept().await {
            Ok((stream, _)) => {
                // Sends each chunk as soon as it is produced.
                let _ = stream.set_nodelay(true);
                return stream;
            }
            // Probably out of file descriptors; some connections will close.
            Err(error) => {
                tracing::warn!(%error, "cannot accept");
                time::sleep(Duration::from_millis(100)).await;
            }
        }
    }
}
