//! The payloads that a relay has in memory.

use std::{
    sync::{
        Arc,
        atomic::{AtomicUsize, Ordering},
    },
    time::Duration,
};

use tokio::{sync::Semaphore, time::sleep};
use tower_idempotency::messages::{Event, Relay, RelayHandle};

use super::relay::{Broker, stage, until, until_all_is_published};
use crate::shop::{Shop, with_each_database};

with_each_database! {
    relay_reads_no_more_payloads_than_its_limit;
    payload_beyond_the_limit_is_published_alone;
}

/// A relay whose publications wait for a permit.
struct Held {
    broker: Broker,
    begun: Arc<AtomicUsize>,
    gate: Arc<Semaphore>,
    relay: RelayHandle,
}

impl Held {
    fn spawn(shop: &impl Shop, max_buffered_bytes: usize) -> Self {
        let broker = Broker::default();
        let begun = Arc::<AtomicUsize>::default();
        let gate = Arc::new(Semaphore::new(0));
        let (publish, began, held) = (broker.clone(), Arc::clone(&begun), Arc::clone(&gate));
        let relay = Relay::new(shop.outbox("orders"), move |event: Event| {
            let (publish, held) = (publish.clone(), Arc::clone(&held));
            began.fetch_add(1, Ordering::SeqCst);
            async move {
                held.acquire().await.unwrap().forget();
                publish.publish(event)
            }
        })
        .max_buffered_bytes(max_buffered_bytes)
        .poll(Duration::from_millis(5))
        .spawn();
        Self {
            broker,
            begun,
            gate,
            relay,
        }
    }

    /// Waits until this number of publications has begun, and asserts that no other follows.
    async fn assert_begun(&self, publications: usize) {
        until(async || self.begun.load(Ordering::SeqCst) >= publications).await;
        // Twenty looks of the relay.
        sleep(Duration::from_millis(100)).await;
        assert_eq!(self.begun.load(Ordering::SeqCst), publications);
    }

    async fn publish_all(self, shop: &impl Shop, events: usize) {
        self.gate.add_permits(events);
        until_all_is_published(shop).await;
        let report = self.relay.stop(Duration::from_secs(10)).await;
        assert_eq!((report.published, report.retried), (events as u64, 0));
        let streams = self.broker.streams();
        assert!(streams.values().all(|ids| ids.is_sorted()));
    }
}

fn event(aggregate: &str, number: usize, bytes: usize) -> Event {
    Event::new(
        format!("{aggregate} {number:02}"),
        aggregate,
        vec![7; bytes],
    )
}

async fn relay_reads_no_more_payloads_than_its_limit(shop: impl Shop) {
    let aggregates = ["a", "b", "c", "d", "e", "f"];
    let events = aggregates.map(|aggregate| [0, 1, 2].map(|number| event(aggregate, number, 400)));
    stage(&shop, events.into_iter().flatten()).await;
    let held = Held::spawn(&shop, 1_000);
    held.assert_begun(2).await;
    // Each of the two has one event, so that another is read for each that ends.
    held.gate.add_permits(1);
    held.assert_begun(3).await;
    held.publish_all(&shop, 18).await;
}

async fn payload_beyond_the_limit_is_published_alone(shop: impl Shop) {
    let events = ["a", "b"].map(|aggregate| [0, 1].map(|number| event(aggregate, number, 400)));
    stage(&shop, events.into_iter().flatten()).await;
    let held = Held::spawn(&shop, 100);
    held.assert_begun(1).await;
    held.publish_all(&shop, 4).await;
}
