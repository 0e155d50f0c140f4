//! Real clients against a real service, over a connection that is cut.

use std::{
    net::{Ipv4Addr, SocketAddr},
    sync::{
        Arc,
        atomic::{AtomicUsize, Ordering},
    },
};

use axum::{Router, extract::State, response::IntoResponse, routing::post};
use bytes::Bytes;
use http::{Request, Response, StatusCode};
use http_body_util::Full;
use hyper_util::{
    client::legacy::Client,
    rt::{TokioExecutor, TokioTimer},
};
use tokio::{
    io::{self, AsyncReadExt as _, AsyncWriteExt as _},
    net::{TcpListener, TcpStream},
};
use tower::{Service, ServiceBuilder, ServiceExt as _, retry::RetryLayer, service_fn};
use tower_idempotency::{
    IdempotencyLayer, MemoryStore, Scope,
    client::{CloneBody, KeyLayer, KeyedRetry},
};

/// How often the handler has run.
type Runs = Arc<AtomicUsize>;

async fn pay(State(runs): State<Runs>) -> impl IntoResponse {
    let run = runs.fetch_add(1, Ordering::SeqCst) + 1;
    (StatusCode::CREATED, format!("charge {run}"))
}

/// Serves payments. Returns its address.
async fn serve(runs: Runs) -> SocketAddr {
    let layer =
        IdempotencyLayer::required(MemoryStore::new(), |_| Some(Scope::single_tenant())).build();
    let app = Router::new()
        .route("/payments", post(pay))
        .layer(layer.unwrap())
        .with_state(runs);
    let listener = TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).await.unwrap();
    let address = listener.local_addr().unwrap();
    tokio::spawn(axum::serve(listener, app).into_future());
    address
}

/// Forwards connections, and cuts the first `cuts` when the response arrives.
async fn cut_connections(to: SocketAddr, cuts: usize) -> SocketAddr {
    let listener = TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).await.unwrap();
    let address = listener.local_addr().unwrap();
    tokio::spawn(async move {
        for number in 0.. {
            let (mut client, _) = listener.accept().await.unwrap();
            let mut server = TcpStream::connect(to).await.unwrap();
            tokio::spawn(async move {
                if number >= cuts {
                    let _ = io::copy_bidirectional(&mut client, &mut server).await;
                    return;
                }
                let (mut from_client, _) = client.split();
                let (mut from_server, mut to_server) = server.split();
                let response = async {
                    let mut byte = [0];
                    from_server.read_exact(&mut byte).await
                };
                tokio::select! {
                    _ = io::copy(&mut from_client, &mut to_server) => {}
                    _ = response => {}
                }
                let _ = client.shutdown().await;
            });
        }
    });
    address
}

/// Pays over two connections that are cut, and twice over one that is not.
async fn pays_once<C, B, R>(client: C, body: B)
where
    C: Service<Request<B>, Response = Response<R>, Error: std::fmt::Debug> + Clone,
    B: CloneBody,
{
    let runs = Runs::default();
    let address = cut_connections(serve(Arc::clone(&runs)).await, 2).await;
    let client = ServiceBuilder::new()
        .layer(KeyLayer::uuid_v7())
        .layer(RetryLayer::new(KeyedRetry::new().attempts(4)))
        .service(client);
    let pay = async |body| {
        let uri = format!("http://{address}/payments");
        let request = Request::post(uri).body(body).unwrap();
        client.clone().oneshot(request).await.unwrap()
    };
    let response = pay(body.try_clone().unwrap()).await;
    assert_eq!(response.status(), StatusCode::CREATED);
    assert_eq!(response.headers()["idempotent-replayed"], "true");
    assert_eq!(runs.load(Ordering::SeqCst), 1);

    let another = pay(body).await;
    assert!(!another.headers().contains_key("idempotent-replayed"));
    assert_eq!(runs.load(Ordering::SeqCst), 2);
}

#[tokio::test]
async fn hyper_utils_client_pays_once_over_cut_connections() {
    let client = Client::builder(TokioExecutor::new())
        .pool_timer(TokioTimer::new())
        .build_http::<Full<Bytes>>();
    pays_once(client, Full::from("amount=5")).await;
}

#[tokio::test]
async fn reqwest_pays_once_over_cut_connections() {
    let client = reqwest::Client::new();
    let client = service_fn(move |request: Request<Bytes>| {
        let client = client.clone();
        async move {
            let response = client.execute(request.try_into()?).await?;
            Ok::<Response<reqwest::Body>, reqwest::Error>(response.into())
        }
    });
    pays_once(client, Bytes::from("amount=5")).await;
}
