//! Relays, and the events that they publish.

use std::{
    collections::{HashMap, HashSet},
    sync::{Arc, Mutex},
    time::Duration,
};

use tokio::time::{sleep, timeout};
use tower_idempotency::messages::{Event, Outbox, OutboxStore, Publish, Relay, RelayHandle};

use crate::shop::Shop;

/// The events that were published, in order.
#[derive(Clone, Default)]
pub(crate) struct Broker(Arc<Mutex<Vec<Event>>>);

impl Broker {
    pub(crate) fn publish(&self, event: Event) -> Publish {
        self.0.lock().unwrap().push(event);
        Publish::Done
    }

    /// The ids of all deliveries.
    pub(crate) fn deliveries(&self) -> Vec<String> {
        let events = self.0.lock().unwrap();
        events.iter().map(|event| event.id().to_owned()).collect()
    }

    /// The ids of the first deliveries of each aggregate, in order.
    pub(crate) fn streams(&self) -> HashMap<String, Vec<String>> {
        let (mut seen, mut streams) = (HashSet::new(), HashMap::<_, Vec<_>>::new());
        for event in &*self.0.lock().unwrap() {
            if seen.insert(event.id().to_owned()) {
                let stream = streams.entry(event.aggregate().to_owned());
                stream.or_default().push(event.id().to_owned());
            }
        }
        streams
    }
}

/// Spawns a relay that looks for events often.
pub(crate) fn spawn<S, F>(
    outbox: Outbox<S>,
    publish: impl Fn(Event) -> F + Send + Sync + 'static,
) -> RelayHandle
where
    S: OutboxStore,
    F: Future<Output = Publish> + Send + 'static,
{
    Relay::new(outbox, publish)
        .poll(Duration::from_millis(5))
        .spawn()
}

/// Spawns a relay that looks for events only when it is woken.
pub(crate) fn spawn_idle<S: OutboxStore>(outbox: Outbox<S>) -> (RelayHandle, Broker) {
    let broker = Broker::default();
    let publish = broker.clone();
    let relay = Relay::new(outbox, move |event: Event| {
        let published = publish.publish(event);
        async move { published }
    });
    (relay.poll(Duration::from_secs(3600)).spawn(), broker)
}

/// Stages events in a transaction of their own.
pub(crate) async fn stage<S: Shop>(shop: &S, events: impl IntoIterator<Item = Event>) {
    let mut transaction = shop.begin().await;
    let events = events.into_iter().collect();
    let outbox = shop.outbox("orders");
    let staged = outbox.stage_all(&mut transaction, events).await;
    staged.unwrap();
    transaction.commit().await.unwrap();
}

pub(crate) fn event(id: &str, aggregate: &str) -> Event {
    Event::new(id, aggregate, format!("payload of {id}"))
}

/// Waits until the tables are empty.
pub(crate) async fn until_all_is_published(shop: &impl Shop) {
    until(async || rows(shop).await.is_empty()).await;
}

pub(crate) async fn rows(shop: &impl Shop) -> Vec<String> {
    shop.all(
        "SELECT 'stream ' || aggregate FROM idempotency_streams
         UNION ALL SELECT 'turn ' || aggregate FROM idempotency_turns
         UNION ALL SELECT 'event ' || id FROM idempotency_events",
    )
    .await
}

pub(crate) async fn until(holds: impl AsyncFn() -> bool) {
    let wait = async {
        while !holds().await {
            sleep(Duration::from_millis(5)).await;
        }
    };
    timeout(Duration::from_secs(20), wait).await.unwrap();
}
