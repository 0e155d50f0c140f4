//! The order of events, and transactions that are open at the same time.

use std::{
    collections::HashSet,
    sync::Arc,
    time::{Duration, Instant},
};

use tokio::{
    join,
    sync::{Notify, mpsc, oneshot},
    time::sleep,
};
use tower_idempotency::messages::{Event, Publish, Relay};

use super::relay::{Broker, event, rows, spawn, stage, until, until_all_is_published};
use crate::shop::{PostgresShop, Shop, with_postgres};

/// An event of an open transaction neither hides later ones nor is skipped itself.
#[tokio::test(flavor = "multi_thread")]
async fn event_of_a_slow_transaction_is_not_skipped() {
    Box::pin(with_postgres(async |shop| {
        let outbox = shop.outbox("orders");
        let mut slow = shop.begin().await;
        outbox.stage(&mut slow, event("slow", "a")).await.unwrap();
        let broker = Broker::default();
        let publish = broker.clone();
        let relay = spawn(outbox.clone(), move |event| {
            let published = publish.publish(event);
            async move { published }
        });
        for id in ["one", "two"] {
            stage(&shop, [event(id, id)]).await;
            until(async || broker.deliveries().contains(&id.to_owned())).await;
        }
        slow.commit().await.unwrap();
        until_all_is_published(&shop).await;
        relay.stop(Duration::from_secs(10)).await;
        assert_eq!(broker.deliveries(), ["one", "two", "slow"]);
    }))
    .await;
}

#[tokio::test(flavor = "multi_thread")]
async fn events_of_one_aggregate_are_in_the_order_of_commits() {
    Box::pin(with_postgres(async |shop| {
        let outbox = shop.outbox("orders");
        let (staged, is_staged) = oneshot::channel();
        let first = async {
            let mut transaction = shop.begin().await;
            let stage = outbox.stage(&mut transaction, event("first", "a"));
            stage.await.unwrap();
            staged.send(()).unwrap();
            // Time for the other one to wait.
            sleep(Duration::from_millis(100)).await;
            transaction.commit().await.unwrap();
        };
        let second = async {
            // Begun before the first commits.
            let mut transaction = shop.begin().await;
            is_staged.await.unwrap();
            let stage = outbox.stage(&mut transaction, event("second", "a"));
            stage.await.unwrap();
            transaction.commit().await.unwrap();
        };
        join!(first, second);
        let ids = "SELECT id FROM idempotency_events ORDER BY position";
        assert_eq!(shop.all(ids).await, ["first", "second"]);
    }))
    .await;
}

/// The writers of an aggregate hold its stream; relays do not wait for them.
#[tokio::test(flavor = "multi_thread")]
async fn relay_publishes_while_a_transaction_stages() {
    Box::pin(with_postgres(async |shop| {
        let outbox = shop.outbox("orders");
        stage(&shop, [event("one", "a")]).await;
        let mut slow = shop.begin().await;
        outbox.stage(&mut slow, event("two", "a")).await.unwrap();
        let broker = Broker::default();
        let publish = broker.clone();
        let relay = spawn(outbox.clone(), move |event| {
            let published = publish.publish(event);
            async move { published }
        });
        let is_settled = async || outbox.lag().await.unwrap().events == 0;
        until(is_settled).await;
        // It asks for the next event now and then, not all the time.
        let (begun, mut changes) = (Instant::now(), HashSet::new());
        while begun.elapsed() < Duration::from_millis(500) {
            let row = "SELECT xmin::text FROM idempotency_turns";
            changes.extend(shop.all(row).await);
            sleep(Duration::from_millis(2)).await;
        }
        // Each time it takes the turn and settles it.
        let allowed = 2 * begun.elapsed().as_millis() / 50 + 4;
        assert!(
            changes.len() as u128 <= allowed,
            "{} changes",
            changes.len()
        );
        slow.commit().await.unwrap();
        until_all_is_published(&shop).await;
        relay.stop(Duration::from_secs(10)).await;
        assert_eq!(broker.deliveries(), ["one", "two"]);
    }))
    .await;
}

#[tokio::test(flavor = "multi_thread")]
async fn relay_waits_for_no_turn_of_another() {
    Box::pin(with_postgres(async |shop| {
        let outbox = shop.outbox("orders");
        stage(
            &shop,
            (0..20).map(|id| event(&id.to_string(), &id.to_string())),
        )
        .await;
        let relays = [(); 4].map(|()| spawn(outbox.clone(), async |_| Publish::Done));
        until_all_is_published(&shop).await;
        let mut published = 0;
        for relay in relays {
            published += relay.stop(Duration::from_secs(10)).await.published;
        }
        assert_eq!(published, 20);
    }))
    .await;
}

/// Positions begin again after all events of an aggregate were published.
#[tokio::test]
async fn late_settlement_removes_no_event_of_a_later_turn() {
    Box::pin(with_postgres(async |shop| {
        let released = Arc::new(Notify::new());
        let (sender, mut begun) = mpsc::unbounded_channel();
        let publish = Arc::clone(&released);
        // All tasks of this test share a thread, so that both turns end before the relay
        // settles one.
        let slow = Relay::new(shop.outbox("orders"), move |event: Event| {
            let (released, sender) = (Arc::clone(&publish), sender.clone());
            async move {
                if event.id() == "first" {
                    return Publish::Done;
                }
                sender.send(event.id().to_owned()).unwrap();
                released.notified().await;
                Publish::Retry
            }
        });
        stage(&shop, [event("first", "a"), event("second", "a")]).await;
        // After its first look it looks for events only when it is woken.
        let slow = slow.poll(Duration::from_secs(3600)).spawn();
        assert_eq!(begun.recv().await.unwrap(), "second");

        // As if the database saw the lease end.
        let mut connection = shop.connect().await;
        let lapse = "UPDATE idempotency_turns SET due_at = 0";
        PostgresShop::run(&mut connection, lapse).await.unwrap();
        let other = PostgresShop::open(&shop.url).await;
        let relay = spawn(other.outbox("orders"), async |_| Publish::Done);
        until(async || rows(&shop).await.is_empty()).await;
        relay.stop(Duration::from_secs(10)).await;

        stage(&shop, ["third", "fourth", "fifth"].map(|id| event(id, "a"))).await;
        shop.outbox("orders").wake();
        assert_eq!(begun.recv().await.unwrap(), "third");
        released.notify_waiters();
        until(async || {
            let settled = "SELECT attempts::text FROM idempotency_turns WHERE token IS NULL";
            shop.all(settled).await == ["1"]
        })
        .await;
        assert_eq!(shop.outbox("orders").lag().await.unwrap().events, 3);
        slow.stop(Duration::from_secs(10)).await;
    }))
    .await;
}
