//! The shop: an order, the stock that it takes and its response are one transaction.

use std::time::Duration;

use axum::{
    Json, Router,
    extract::State,
    response::{IntoResponse, Response},
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
    messages::{Event, MessageError},
    sqlx::{self, query},
};
use tracing::{info, warn};

use crate::{
    Error,
    database::{Database, on_database},
    ordered::{ORDERS, Ordered},
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
        // A run that has crashed may run again: all that it does is in its transaction.
        .recovery(Recovery::Rerun)
        .max_attempts(100)
        .build()?;
    let app = Router::new()
        .route("/guarded/orders", post(guarded).layer(idempotency.clone()))
        .route("/unguarded/orders", post(unguarded))
        .with_state(database);
    server::serve(app).await?;
    server::log_drained(idempotency.drain(server::GRACE).await);
    sweeper.stop().await;
    Ok(())
}

#[derive(Deserialize)]
struct Cart {
    cart: String,
}

/// One operation for all requests with its key. The order, the stock and the event are
/// committed with the response, or not at all.
async fn guarded(
    State(database): State<Database>,
    operation: Operation,
    OrRelease(Json(Cart { cart })): OrRelease<Json<Cart>>,
) -> Result<Response, Failure> {
    let id = operation.id();
    info!(cart, operation = %id, attempt = operation.attempt(), "run");
    let committed = on_database!(&database, |store, _pool| {
        let mut transaction = store.begin(&operation).await?;
        order!(store, transaction, id, cart);
        store.commit(&operation, transaction, ordered(id)).await?
    });
    info!(cart, operation = %id, "ordered");
    Ok(committed.into_response())
}

/// An operation of its own for each request. All else is the same.
async fn unguarded(
    State(database): State<Database>,
    Json(Cart { cart }): Json<Cart>,
) -> Result<Response, Failure> {
    let id = OperationId::random();
    info!(cart, operation = %id, "run");
    on_database!(&database, |store, pool| {
        let mut transaction = pool.begin().await?;
        order!(store, transaction, id, cart);
        transaction.commit().await?;
    });
    info!(cart, operation = %id, "ordered");
    Ok(ordered(id))
}

/// The work of an order, on either database.
macro_rules! order {
    ($store:ident, $transaction:ident, $id:ident, $cart:ident) => {
        let operation = $id.to_string();
        query(ORDER)
            .bind(&operation)
            .bind(&$cart)
            .execute(&mut *$transaction)
            .await?;
        query(TAKE).execute(&mut *$transaction).await?;
        let event = event($id, &$cart);
        let outbox = $store.outbox(ORDERS)?;
        outbox.stage(&mut *$transaction, event).await?;
    };
}
use order;

/// The event of an order. Its id is the same for all attempts of the operation.
fn event(id: OperationId, cart: &str) -> Event {
    let ordered = json!(Ordered {
        cart: cart.to_owned(),
        operation: id.to_string(),
    });
    Event::new(id.derive("ordered"), id.to_string(), ordered.to_string())
}

fn ordered(id: OperationId) -> Response {
    let location = [(LOCATION, format!("/orders/{id}"))];
    let body = Json(json!({ "order": id.to_string() }));
    (StatusCode::CREATED, location, body).into_response()
}

/// Why there is no order.
enum Failure {
    Transaction(CommitError),
    Event(MessageError),
}

impl From<CommitError> for Failure {
    fn from(error: CommitError) -> Self {
        Self::Transaction(error)
    }
}

impl From<sqlx::Error> for Failure {
    fn from(error: sqlx::Error) -> Self {
        Self::Transaction(error.into())
    }
}

impl From<MessageError> for Failure {
    fn from(error: MessageError) -> Self {
        Self::Event(error)
    }
}

impl IntoResponse for Failure {
    fn into_response(self) -> Response {
        match self {
            Self::Transaction(error) => error.into_response(),
            Self::Event(error) => {
                warn!(%error, "no event was staged");
                (StatusCode::SERVICE_UNAVAILABLE, [(RETRY_AFTER, "1")]).into_response()
            }
        }
    }
}

const ORDER: &str = "INSERT INTO orders (operation, cart) VALUES ($1, $2)";
const TAKE: &str = "UPDATE stock SET taken = taken + 1 WHERE item = 'pen'";
