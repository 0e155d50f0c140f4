//! The relay: publishes what the shop has staged.

use std::time::Duration;

use tower_idempotency::messages::{Event, Publish, Relay};
use tracing::{debug, info};

use crate::{
    Error,
    client::Client,
    database::{Database, on_database},
    ordered::{ORDERS, Ordered},
    server,
};

pub(crate) async fn run() -> Result<(), Error> {
    let database = Database::open(&server::directory()?).await?;
    let consumer = Client::to("/events")?;
    let publish = move |event: Event| {
        let consumer = consumer.clone();
        async move { publish(&consumer, &event).await }
    };
    let relay = on_database!(&database, |store, _pool| {
        Relay::new(store.outbox(ORDERS)?, publish)
            // Short, so that a visitor sees another relay take over. A third of it is the
            // time limit of one publication.
            .lease(Duration::from_secs(6))
            .poll(Duration::from_millis(100))
            .spawn()
    });
    server::told_to_stop().await;
    relay.stop(server::GRACE).await;
    Ok(())
}

/// Sends an event to the consumer, under its id. Done when the consumer has it.
async fn publish(consumer: &Client, event: &Event) -> Publish {
    let Ok(Ordered { cart, operation }) = serde_json::from_slice(event.payload()) else {
        return Publish::Reject;
    };
    match consumer.send(event.id(), event.payload().clone()).await {
        Ok(()) => {
            info!(cart, operation, "published");
            Publish::Done
        }
        Err(error) => {
            debug!(error, "not published");
            Publish::Retry
        }
    }
}
