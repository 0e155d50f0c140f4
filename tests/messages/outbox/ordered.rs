//! The order of events, and transactions that are open at the same time.

use std::time::Duration;

use tokio::{join, sync::oneshot, time::sleep};
use tower_idempotency::messages::Publish;

use super::relay::{Broker, event, spawn, stage, until, until_all_is_published};
use crate::shop::{Shop, with_postgres};

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
