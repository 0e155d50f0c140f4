//! The layer.

#[cfg(feature = "axum")]
pub(crate) mod axum;
pub(crate) mod builder;
pub(crate) mod future;
pub(crate) mod service;

use std::{fmt, sync::Arc, time::Duration};

use tower::Layer;

use crate::{
    flow::{config::Config, drained::Drained, shared::Shared},
    layer::service::Idempotency,
    store::Store,
};

/// Makes retries of a request safe: the work is done once, and its response is
/// replayed.
///
/// The [crate's documentation](crate) lists its promises. Clones share their
/// settings, their waiters and their running requests; so do all services that one
/// layer wraps.
///
/// ```
/// # use axum::{Router, body::Body, http::{Request, StatusCode}, routing::post};
/// # use tower::ServiceExt;
/// # #[derive(Clone)]
/// # struct Account(String);
/// use tower_idempotency::{IdempotencyLayer, MemoryStore, Scope};
///
/// # #[tokio::main(flavor = "current_thread")]
/// # async fn main() -> Result<(), Box<dyn std::error::Error>> {
/// let layer = IdempotencyLayer::required(MemoryStore::new(), |parts| {
///     // The authentication in front of the layer puts it there.
///     Scope::new(&parts.extensions.get::<Account>()?.0)
/// })
/// .build()?;
/// # let app = Router::new().route("/", post(StatusCode::CREATED).layer(layer));
/// # let request = || Request::post("/").header("idempotency-key", "k");
/// # let known = request().extension(Account("acct_42".into())).body(Body::empty())?;
/// # assert_eq!(app.clone().oneshot(known).await?.status(), StatusCode::CREATED);
/// # let unknown = request().body(Body::empty())?;
/// # assert_eq!(app.oneshot(unknown).await?.status(), StatusCode::FORBIDDEN);
/// # Ok(())
/// # }
/// ```
pub struct IdempotencyLayer<S> {
    shared: Arc<Shared<S>>,
}

impl<S: Store> IdempotencyLayer<S> {
    pub(crate) fn new(store: S, config: Config) -> Self {
        Self {
            shared: Arc::new(Shared::new(store, config)),
        }
    }

    /// Refuses new guarded requests with 503, and waits until the running ones have ended
    /// and are recorded.
    ///
    /// It waits for up to `grace`: 25 s fit the 30 s that most orchestrators give.
    ///
    /// A request whose body is still arriving has not run: it is refused once its
    /// body is complete.
    ///
    /// Call it after the server has stopped accepting connections, and before the runtime
    /// ends. A request whose client has left still runs, on a task for which the server does
    /// not wait. A request that has not ended by then is left to its lease. Dropping the
    /// future stops only the waiting.
    ///
    /// The server's own graceful shutdown and `drain` share one deadline: each
    /// with a time of its own may take twice as long as the orchestrator waits.
    ///
    /// ```
    /// # use std::future::IntoFuture;
    /// # use axum::{Router, http::StatusCode, routing::post};
    /// # use tower_idempotency::{IdempotencyLayer, MemoryStore, Scope};
    /// use std::time::Duration;
    /// use tokio::{net::TcpListener, sync::oneshot, time::{Instant, timeout_at}};
    ///
    /// # #[tokio::main(flavor = "current_thread")]
    /// # async fn main() -> Result<(), Box<dyn std::error::Error>> {
    /// # let idempotency =
    /// #     IdempotencyLayer::required(MemoryStore::new(), |_| Some(Scope::single_tenant())).build()?;
    /// # let app = Router::new().route("/", post(StatusCode::CREATED).layer(idempotency.clone()));
    /// # let (sent, stop_signal) = oneshot::channel::<()>();
    /// let listener = TcpListener::bind("127.0.0.1:0").await?;
    /// # let address = listener.local_addr()?;
    /// let (stop, stopped) = oneshot::channel::<()>();
    /// let server = axum::serve(listener, app).with_graceful_shutdown(async {
    ///     let _ = stopped.await;
    /// });
    /// let server = tokio::spawn(server.into_future());
    /// # use tokio::io::{AsyncReadExt, AsyncWriteExt};
    /// # let mut client = tokio::net::TcpStream::connect(address).await?;
    /// # client.write_all(b"POST / HTTP/1.1\r\nhost: localhost\r\nidempotency-key: k\r\n\r\n").await?;
    /// # let mut status = [0; 12];
    /// # client.read_exact(&mut status).await?;
    /// # assert_eq!(&status, b"HTTP/1.1 201");
    /// # drop((sent, client));
    ///
    /// stop_signal.await.ok(); // Ctrl-C or SIGTERM
    /// drop(stop);
    /// let deadline = Instant::now() + Duration::from_secs(25);
    /// let _ = timeout_at(deadline, server).await;
    /// let drained = idempotency.drain(deadline - Instant::now()).await;
    /// assert_eq!(drained.left(), 0);
    /// # Ok(())
    /// # }
    /// ```
    pub async fn drain(&self, grace: Duration) -> Drained {
        self.shared.drain(grace).await
    }

    /// The store that the layer was built with.
    #[must_use]
    pub fn store(&self) -> &S {
        &self.shared.store
    }
}

impl<I, S> Layer<I> for IdempotencyLayer<S> {
    type Service = Idempotency<I, S>;

    fn layer(&self, inner: I) -> Self::Service {
        Idempotency::new(inner, Arc::clone(&self.shared))
    }
}

impl<S> Clone for IdempotencyLayer<S> {
    fn clone(&self) -> Self {
        Self {
            shared: Arc::clone(&self.shared),
        }
    }
}

impl<S> fmt::Debug for IdempotencyLayer<S> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("IdempotencyLayer").finish_non_exhaustive()
    }
}
