//! The shop: an order, the stock that it takes and its response are one transaction.

use std::time::Duration;

use axum::{
    Json, Router,
    extract::State,
    response::{IntoResponse as _, Response},
    routing::post,
};
use http::{
    StatusCode,
    header::{LOCATION, RETRY_AFTER},
};
use serde::Deserialize;
use serde_json::json;
use tower_idempotency::{
    CommitError, IdempotencyLayer, Operation, OperationId, OrRelease, Recovery, Scope, Sweeper,
    sqlx::query,
};
use tracing::{info, warn};

use crate::{
    Error,
    database::{Database, on_database},
    payments::{Charge, Payments},
    server,
};

pub(crate) async fn run() -> Result<(), Error> {
    let database = Database::open(&server::directory()?).await?;
    let store = database.store();
    let sweeper = Sweeper::new(store.clone()).spawn();
    let idempotency = IdempotencyLayer::required(store, |_| Some(Scope::single_tenant()))
        // Short, so that a visitor sees what follows a crash.
        .lease(Duration::from_secs(2))
        .store_timeout(Duration::from_secs(1))
        .wait(Duration::from_secs(5))
        // A run that has crashed may run again: the charge has a key of its own, and all
        // else is in the transaction.
        .recovery(Recovery::Rerun)
        .max_attempts(100)
        .build()?;
    let app = Router::new()
        .route("/guarded/orders", post(guarded).layer(idempotency.clone()))
        .route("/unguarded/orders", post(unguarded))
        .with_state(Shop {
            database,
            payments: Payments::new()?,
        });
    server::serve(app, &idempotency).await?;
    sweeper.stop().await;
    Ok(())
}

#[derive(Clone)]
struct Shop {
    database: Database,
    payments: Payments,
}

#[derive(Deserialize)]
struct Cart {
    cart: String,
}

/// One operation for all requests with its key: its id names the order, and the key of
/// the charge is derived from it.
async fn guarded(
    State(shop): State<Shop>,
    operation: Operation,
    OrRelease(Json(Cart { cart })): OrRelease<Json<Cart>>,
) -> Result<Response, CommitError> {
    let id = operation.id().to_string();
    info!(cart, operation = id, attempt = operation.attempt(), "run");
    let charge = Charge::new(&cart, &id);
    let key = operation.derive("charge");
    if let Err(error) = shop.payments.charge(&key, &charge).await {
        return Ok(not_charged(&error));
    }
    let response = ordered(&id);
    let committed = on_database!(&shop.database, |store, _pool| {
        let mut transaction = store.begin(&operation).await?;
        query(TAKE).execute(&mut *transaction).await?;
        let order = query(ORDER).bind(&id).bind(&cart);
        order.execute(&mut *transaction).await?;
        store.commit(&operation, transaction, response).await?
    });
    info!(cart, operation = id, "ordered");
    Ok(committed.into_response())
}

/// An operation of its own for each request.
async fn unguarded(
    State(shop): State<Shop>,
    Json(Cart { cart }): Json<Cart>,
) -> Result<Response, CommitError> {
    let id = OperationId::random().to_string();
    info!(cart, operation = id, "run");
    let charge = Charge::new(&cart, &id);
    if let Err(error) = shop.payments.charge_without_key(&charge).await {
        return Ok(not_charged(&error));
    }
    on_database!(&shop.database, |_store, pool| {
        let mut transaction = pool.begin().await?;
        query(TAKE).execute(&mut *transaction).await?;
        let order = query(ORDER).bind(&id).bind(&cart);
        order.execute(&mut *transaction).await?;
        transaction.commit().await?;
    });
    info!(cart, operation = id, "ordered");
    Ok(ordered(&id))
}

fn ordered(id: &str) -> Response {
    let location = [(LOCATION, format!("/orders/{id}"))];
    (StatusCode::CREATED, location, Json(json!({ "order": id }))).into_response()
}

/// Releases the key for the same request, which asks the provider with the same key again.
fn not_charged(error: &Error) -> Response {
    warn!(error, "not charged");
    let retry = [(RETRY_AFTER, "1")];
    let message = "The payment provider does not answer.";
    (StatusCode::SERVICE_UNAVAILABLE, retry, message).into_response()
}

const TAKE: &str = "UPDATE stock SET taken = taken + 1 WHERE item = 'pen'";
const ORDER: &str = "INSERT INTO orders (operation, cart) VALUES ($1, $2)";
