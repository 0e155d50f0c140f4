//! An order, its reservation of stock and its response, in one transaction.
//!
//! ```text
//! cargo run --example orders --features postgres   # an SQLite file
//! DATABASE_URL=postgres://app@localhost/app cargo run --example orders --features postgres
//! ```
//!
//! It prints curl lines to try. Kill it at any moment and start it again: an
//! order is there if and only if its response is.

#![allow(clippy::print_stdout, reason = "it says how to try it")]

use std::{env, error::Error, future::IntoFuture as _, net::Ipv4Addr, time::Duration};

use axum::{
    Json, Router,
    extract::State,
    response::{IntoResponse, Response},
    routing::post,
};
use http::{StatusCode, header::LOCATION};
use serde::Deserialize;
use serde_json::json;
use tokio::{
    net::TcpListener,
    signal,
    sync::oneshot,
    time::{self, Instant},
};
use tower_idempotency::{
    CommitError, Committed, DynStore, IdempotencyLayer, Operation, OrRelease, PostgresStore,
    Recovery, Scope, SqliteStore,
    sqlx::{PgPool, SqlitePool, query, query_scalar, raw_sql, sqlite::SqliteConnectOptions},
};

#[tokio::main]
async fn main() -> Result<(), Box<dyn Error>> {
    // The log has a warning with the cause of each failed transaction.
    tracing_subscriber::fmt().init();
    let (shop, store) = open().await?;
    let idempotency = IdempotencyLayer::required(store, |_| Some(Scope::single_tenant()))
        // The only effects are in the transaction. A run that crashed before its
        // COMMIT has done nothing, and its retry may run.
        .recovery(Recovery::Rerun)
        .build()?;
    let app = Router::new()
        .route("/orders", post(create).layer(idempotency.clone()))
        .with_state(shop);

    let port = env::var("PORT").map_or(Ok(3000), |port| port.parse())?;
    let listener = TcpListener::bind((Ipv4Addr::LOCALHOST, port)).await?;
    let address = listener.local_addr()?;
    println!(
        "listening on {address}; there are three pens. Try each line twice:

  curl -i {address}/orders -H 'Idempotency-Key: first' -H 'Content-Type: application/json' -d '{{\"item\":\"pen\",\"quantity\":2}}'
  curl -i {address}/orders -H 'Idempotency-Key: second' -H 'Content-Type: application/json' -d '{{\"item\":\"pen\",\"quantity\":2}}'
"
    );
    let (stop, stopped) = oneshot::channel::<()>();
    let server = axum::serve(listener, app).with_graceful_shutdown(async {
        let _ = stopped.await;
    });
    let server = tokio::spawn(server.into_future());
    stop_signal().await;
    drop(stop);
    // One deadline for both: first the orders whose clients are connected, then
    // those whose clients have left.
    let deadline = Instant::now() + GRACE;
    if time::timeout_at(deadline, server).await.is_err() {
        println!("some clients are still connected");
    }
    let drained = idempotency.drain(deadline - Instant::now()).await;
    if drained.left() > 0 {
        println!("{} orders left to their leases", drained.left());
    }
    Ok(())
}

/// The time limit of a stop, below the 30 s that most orchestrators wait.
const GRACE: Duration = Duration::from_secs(25);

#[derive(Deserialize)]
struct Order {
    item: String,
    quantity: i64,
}

async fn create(
    State(shop): State<Shop>,
    operation: Operation,
    OrRelease(Json(order)): OrRelease<Json<Order>>,
) -> Result<Response, CommitError> {
    if order.quantity < 1 {
        return Ok((StatusCode::UNPROCESSABLE_ENTITY, "nothing to order").into_response());
    }
    let committed: Committed = match shop {
        Shop::Postgres(store) => place!(store, operation, order),
        Shop::Sqlite(store) => place!(store, operation, order),
    };
    Ok(committed.into_response())
}

/// The database that the orders and their records share.
#[derive(Clone)]
enum Shop {
    Postgres(PostgresStore),
    Sqlite(SqliteStore),
}

/// Both databases understand the same statements, but their types differ.
macro_rules! place {
    ($store:ident, $operation:ident, $order:ident) => {{
        let mut transaction = $store.begin(&$operation).await?;
        let reserved = query("UPDATE stock SET pieces = pieces - $1 WHERE item = $2 AND pieces >= $1")
            .bind($order.quantity)
            .bind(&$order.item)
            .execute(&mut *transaction)
            .await?
            .rows_affected();
        let response = if reserved == 0 {
            // A response like any other: committed, and replayed even when there
            // is stock again.
            (StatusCode::CONFLICT, "out of stock").into_response()
        } else {
            let id: i64 = query_scalar("INSERT INTO orders (item, quantity) VALUES ($1, $2) RETURNING id")
                .bind(&$order.item)
                .bind($order.quantity)
                .fetch_one(&mut *transaction)
                .await?;
            let location = [(LOCATION, format!("/orders/{id}"))];
            (StatusCode::CREATED, location, Json(json!({ "order": id }))).into_response()
        };
        $store.commit(&$operation, transaction, response).await?
    }};
}
use place;

async fn open() -> Result<(Shop, DynStore), Box<dyn Error>> {
    if let Ok(url) = env::var("DATABASE_URL") {
        let store = PostgresStore::connect(&url).await?;
        store.migrate().await?;
        raw_sql(POSTGRES_TABLES)
            .execute(&PgPool::connect(&url).await?)
            .await?;
        return Ok((Shop::Postgres(store.clone()), DynStore::new(store)));
    }
    let file = env::temp_dir().join("tower-idempotency-orders.db");
    let store = SqliteStore::open(&file).await?;
    let pool = SqlitePool::connect_with(SqliteConnectOptions::new().filename(&file)).await?;
    raw_sql(SQLITE_TABLES).execute(&pool).await?;
    println!("orders and records are in {}", file.display());
    Ok((Shop::Sqlite(store.clone()), DynStore::new(store)))
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

const POSTGRES_TABLES: &str = "
CREATE TABLE IF NOT EXISTS stock (item text PRIMARY KEY, pieces bigint NOT NULL);
INSERT INTO stock VALUES ('pen', 3) ON CONFLICT DO NOTHING;
CREATE TABLE IF NOT EXISTS orders (
    id bigserial PRIMARY KEY,
    item text NOT NULL,
    quantity bigint NOT NULL
)";

const SQLITE_TABLES: &str = "
CREATE TABLE IF NOT EXISTS stock (item TEXT PRIMARY KEY, pieces INTEGER NOT NULL);
INSERT INTO stock VALUES ('pen', 3) ON CONFLICT DO NOTHING;
CREATE TABLE IF NOT EXISTS orders (
    id INTEGER PRIMARY KEY,
    item TEXT NOT NULL,
    quantity INTEGER NOT NULL
)";
