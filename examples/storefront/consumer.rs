//! The consumer: pays for each order once, however often its event arrives.

use axum::{Json, Router, extract::State, routing::post};
use http::{HeaderMap, StatusCode};
use tower_idempotency::{
    Sweeper,
    messages::{MessageError, Received},
    sqlx::query,
};
use tracing::{info, warn};

use crate::{
    Error,
    client::Client,
    database::{Database, on_database},
    ordered::Ordered,
    provider::Charge,
    server,
};

pub(crate) async fn run() -> Result<(), Error> {
    let database = Database::open(&server::directory()?).await?;
    let sweeper = on_database!(&database, |store, _pool| {
        Sweeper::new(store.inbox(PAYMENTS)?).spawn()
    });
    let app = Router::new()
        .route("/events", post(receive))
        .with_state(Consumer {
            database,
            provider: Client::to("/charges")?,
        });
    server::serve(app).await?;
    sweeper.stop().await;
    Ok(())
}

#[derive(Clone)]
struct Consumer {
    database: Database,
    provider: Client,
}

/// Acknowledges an event by 204. It is delivered again after anything else.
async fn receive(
    State(consumer): State<Consumer>,
    headers: HeaderMap,
    Json(ordered): Json<Ordered>,
) -> StatusCode {
    let id = headers
        .get("idempotency-key")
        .and_then(|id| id.to_str().ok());
    let Some(id) = id else {
        return StatusCode::BAD_REQUEST;
    };
    let Ordered { cart, operation } = &ordered;
    match consumer.pay(id, &ordered).await {
        Ok(Received::First(())) => info!(cart, operation, "consumed"),
        Ok(Received::Repeat) => info!(cart, operation, "repeat ignored"),
        Err(error) => {
            warn!(error, "not consumed");
            return StatusCode::SERVICE_UNAVAILABLE;
        }
    }
    StatusCode::NO_CONTENT
}

impl Consumer {
    /// Charges, and remembers it. The charge is outside of the transaction: a crash between
    /// them repeats it, under the same key, and the provider replays its answer.
    async fn pay(&self, id: &str, ordered: &Ordered) -> Result<Received<()>, Error> {
        let charge = serde_json::to_vec(&Charge::of(ordered))?;
        self.provider.send(id, charge).await?;
        let received = on_database!(&self.database, |store, _pool| {
            let inbox = store.inbox(PAYMENTS)?;
            let received = inbox.receive(id, async |transaction| {
                let payment = query(PAYMENT).bind(&ordered.operation).bind(&ordered.cart);
                payment.execute(&mut *transaction).await?;
                Ok::<_, MessageError>(())
            });
            received.await?
        });
        Ok(received)
    }
}

/// The name of the consumer.
pub(crate) const PAYMENTS: &str = "payments";

const PAYMENT: &str = "INSERT INTO payments (operation, cart) VALUES ($1, $2)";
