//! The payloads that a relay has in memory.

use std::{
    sync::{
        Arc,
        atomic::{AtomicUsize, Ordering},
    },
    time::Duration,
};

use tokio::{sync::Semaphore, time::sleep};
use tower_idempotency::{
    PostgresStore,
    messages::{Event, Relay, RelayHandle},
};

use super::relay::{Broker, spawn, stage, until, until_all_is_published};
use crate::{
    databases::run,
    shop::{Shop, options, with_each_database, with_postgres},
};

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

/// Each turn that a relay takes costs the server 50 ms, and a statement may take 250 ms.
#[tokio::test(flavor = "multi_thread")]
async fn batch_that_takes_too_long_is_halved_until_it_succeeds() {
    Box::pin(with_postgres(async |shop| {
        run(
            &shop.url,
            "CREATE FUNCTION delay() RETURNS trigger LANGUAGE plpgsql AS $$ BEGIN
                 PERFORM pg_sleep(0.05); RETURN NEW; END $$;
             CREATE TRIGGER delay BEFORE UPDATE ON idempotency_turns FOR EACH ROW
             WHEN (NEW.token IS NOT NULL) EXECUTE FUNCTION delay()",
        )
        .await;
        stage(
            &shop,
            (0..16).map(|number| event(&format!("{number}"), 0, 1)),
        )
        .await;
        let hasty = PostgresStore::builder(options(&shop.url));
        let hasty = hasty.statement_timeout(Duration::from_millis(250));
        let hasty = hasty.connect().await.unwrap();
        let broker = Broker::default();
        let publish = broker.clone();
        let relay = spawn(hasty.outbox("orders").unwrap(), move |event| {
            let published = publish.publish(event);
            async move { published }
        });
        until_all_is_published(&shop).await;
        let report = relay.stop(Duration::from_secs(10)).await;
        assert_eq!((report.published, broker.deliveries().len()), (16, 16));
        hasty.close().await;
    }))
    .await;
}
