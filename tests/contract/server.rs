//! A service on a real socket, over HTTP/1.1 and HTTP/2 with prior knowledge.

use std::{
    error::Error,
    net::SocketAddr,
    pin::Pin,
    sync::Arc,
    task::{Context, Poll},
};

use axum::body::Body;
use bytes::Bytes;
use http::{Request, Response};
use http_body::Body as HttpBody;
use hyper::service::service_fn;
use hyper_util::{
    rt::{TokioExecutor, TokioIo},
    server::conn::auto,
};
use tokio::{net::TcpListener, sync::Semaphore, task::JoinHandle};
use tower::{Service, ServiceExt as _};

/// A server that ends with the test.
pub(crate) struct Server {
    pub(crate) address: SocketAddr,
    progress: Arc<Progress>,
    accepting: JoinHandle<()>,
}

impl Server {
    /// Waits until one more request was dropped before its answer.
    pub(crate) async fn abandonment(&self) {
        self.progress.abandoned.acquire().await.unwrap().forget();
    }

    /// Waits until the head of one more request has arrived.
    pub(crate) async fn start_of_a_request(&self) {
        self.progress.started.acquire().await.unwrap().forget();
    }

    /// Waits until one more request has ended, answered or not.
    pub(crate) async fn end_of_a_request(&self) {
        self.progress.any.acquire().await.unwrap().forget();
    }
}

struct Progress {
    started: Semaphore,
    any: Semaphore,
    abandoned: Semaphore,
}

impl Drop for Server {
    fn drop(&mut self) {
        self.accepting.abort();
    }
}

pub(crate) async fn serve<S, R>(service: S) -> Server
where
    S: Service<Request<Body>, Response = Response<R>> + Clone + Send + 'static,
    S::Future: Send,
    S::Error: Into<Box<dyn Error + Send + Sync>> + Send,
    R: HttpBody<Data = Bytes> + Send + 'static,
    R::Error: Into<Box<dyn Error + Send + Sync>>,
{
    let listener = TcpListener::bind(("127.0.0.1", 0)).await.unwrap();
    let address = listener.local_addr().unwrap();
    let progress = Arc::new(Progress {
        started: Semaphore::new(0),
        any: Semaphore::new(0),
        abandoned: Semaphore::new(0),
    });
    let watch = Arc::clone(&progress);
    let accepting = tokio::spawn(async move {
        loop {
            let (stream, _) = listener.accept().await.unwrap();
            let service = service.clone();
            let watch = Arc::clone(&watch);
            tokio::spawn(async move {
                let service = service_fn(move |request: Request<hyper::body::Incoming>| {
                    watch.started.add_permits(1);
                    Watched {
                        answer: Box::pin(service.clone().oneshot(request.map(Body::new))),
                        progress: Arc::clone(&watch),
                        answered: false,
                    }
                });
                // Some tests break their connection.
                let _ = auto::Builder::new(TokioExecutor::new())
                    .serve_connection(TokioIo::new(stream), service)
                    .await;
            });
        }
    });
    Server {
        address,
        progress,
        accepting,
    }
}

/// Reports the end of a request, and whether it was answered.
struct Watched<F> {
    answer: Pin<Box<F>>,
    progress: Arc<Progress>,
    answered: bool,
}

impl<F: Future> Future for Watched<F> {
    type Output = F::Output;

    fn poll(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<F::Output> {
        let answer = self.answer.as_mut().poll(cx);
        self.answered = answer.is_ready();
        answer
    }
}

impl<F> Drop for Watched<F> {
    fn drop(&mut self) {
        self.progress.any.add_permits(1);
        if !self.answered {
            self.progress.abandoned.add_permits(1);
        }
    }
}
