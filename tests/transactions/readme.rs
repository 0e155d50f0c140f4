//! The code of README.md, word for word, mounted and served.

use std::sync::Arc;

use axum::{Extension, Router, body::Body, response::Response, routing::post};
use http::{Request, StatusCode};
use tokio::{
    io::AsyncWriteExt as _,
    net::{TcpListener, TcpStream},
    sync::Notify,
};
use tower::ServiceExt as _;
use tower_idempotency::{IdempotencyLayer, MemoryStore, Scope, sqlx::query_scalar};

use crate::shop::with_postgres;

const README: &str = include_str!("../../README.md");

mod pay {
    include!("readme/pay.rs");

    pub(super) fn router() -> Router {
        app()
            .unwrap()
            .layer(axum::Extension(Account("acct_42".to_owned())))
    }
}

mod order {
    include!("readme/order.rs");

    pub(super) fn route() -> axum::routing::MethodRouter<PostgresStore> {
        axum::routing::post(order)
    }
}

#[expect(clippy::print_stderr, reason = "README has no logger")]
mod serve {
    use std::future::IntoFuture as _;
    include!("readme/serve.rs");

    pub(super) async fn run<S: Store>(
        listener: TcpListener,
        app: Router,
        idempotency: IdempotencyLayer<S>,
        stop: impl Future<Output = ()>,
    ) {
        serve(listener, app, idempotency, stop).await;
    }
}

async fn ask(app: &Router, path: &str) -> Response {
    let request = Request::post(path)
        .header("idempotency-key", "8e03978e")
        .body(Body::empty())
        .unwrap();
    app.clone().oneshot(request).await.unwrap()
}

async fn assert_created_once(app: &Router, path: &str) {
    for replayed in [false, true] {
        let response = ask(app, path).await;
        assert_eq!(response.status(), StatusCode::CREATED);
        let marked = response.headers().contains_key("idempotent-replayed");
        assert_eq!(marked, replayed);
    }
}

#[tokio::test]
async fn readme_payment_is_made_once() {
    assert!(README.contains(include_str!("readme/pay.rs")));
    assert_created_once(&pay::router(), "/payments").await;
}

#[tokio::test(flavor = "multi_thread")]
async fn readme_order_is_made_once() {
    assert!(README.contains(include_str!("readme/order.rs")));
    with_postgres(async |shop| {
        shop.execute(
            "CREATE TABLE stock (item text PRIMARY KEY, pieces int);
             INSERT INTO stock VALUES ('pen', 3)",
        )
        .await;
        let layer =
            IdempotencyLayer::required(shop.store.clone(), |_| Some(Scope::single_tenant()));
        let app = Router::new()
            .route("/orders", order::route().layer(layer.build().unwrap()))
            .with_state(shop.store.clone());
        assert_created_once(&app, "/orders").await;
        let pieces: i32 = query_scalar("SELECT pieces FROM stock")
            .fetch_one(&shop.pool)
            .await
            .unwrap();
        assert_eq!(pieces, 2);
    })
    .await;
}

#[tokio::test(start_paused = true)]
async fn readme_server_stops_within_one_deadline() {
    let layer = IdempotencyLayer::required(MemoryStore::new(), |_| Some(Scope::single_tenant()))
        .build()
        .unwrap();
    let begun = Arc::new(Notify::new());
    // Runs for longer than the server waits, and keeps its connection open.
    let endless = async |Extension(begun): Extension<Arc<Notify>>| {
        begun.notify_one();
        std::future::pending::<()>().await;
    };
    let app = Router::new()
        .route("/", post(endless).layer(layer.clone()))
        .layer(Extension(Arc::clone(&begun)));
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let mut client = TcpStream::connect(listener.local_addr().unwrap())
        .await
        .unwrap();
    let request = "POST / HTTP/1.1\r\nhost: localhost\r\nidempotency-key: k\r\n\r\n";
    client.write_all(request.as_bytes()).await.unwrap();
    let started = tokio::time::Instant::now();
    serve::run(listener, app, layer, begun.notified()).await;
    let waited = started.elapsed().as_secs();
    assert!((25..40).contains(&waited), "{waited} s");
    drop(client);
    assert!(README.contains(include_str!("readme/serve.rs")));
}
