use axum::{Json, Router, http::StatusCode, routing::post};
use tower_idempotency::{IdempotencyLayer, MemoryStore, Operation, Scope};

#[derive(Clone)]
struct Account(String); // your authentication puts it into the extensions

async fn pay(operation: Operation) -> (StatusCode, Json<&'static str>) {
    // The same for every attempt: hand it to the payment provider as its key.
    let _downstream_key = operation.derive("payments");
    (StatusCode::CREATED, Json("paid"))
}

fn app() -> Result<Router, tower_idempotency::BuildError> {
    let idempotency = IdempotencyLayer::required(MemoryStore::new(), |parts| {
        Scope::new(&parts.extensions.get::<Account>()?.0)
    })
    .build()?;
    Ok(Router::new().route("/payments", post(pay).layer(idempotency)))
}
