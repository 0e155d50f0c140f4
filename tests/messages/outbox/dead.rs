//! Events that cannot be published, and the calls of an operator.

use std::{
    sync::{
        Arc,
        atomic::{AtomicBool, Ordering},
    },
    time::Duration,
};

use tokio::sync::Semaphore;
use tower_idempotency::messages::{Attempts, Event, Publish, Relay, RelayHandle};

use super::relay::{Broker, event, rows, spawn, stage, until, until_all_is_published};
use crate::shop::{Connection, Shop, with_each_database};

with_each_database! {
    rejected_event_stops_its_aggregate_until_it_is_requeued;
    rejected_event_stops_its_aggregate_until_it_is_discarded;
    last_event_that_is_discarded_leaves_nothing;
    event_is_given_up_after_attempts_and_age;
    event_after_an_unsettled_turn_is_settled_alone;
    event_that_ends_its_relays_is_given_up_untried;
}

/// Publishes all but `three`, which is rejected until the flag is set.
fn rejecting<S: Shop>(shop: &S) -> (RelayHandle, Broker, Arc<AtomicBool>) {
    let (broker, accepts) = (Broker::default(), Arc::new(AtomicBool::new(false)));
    let (publish, accepted) = (broker.clone(), Arc::clone(&accepts));
    let relay = spawn(shop.outbox("orders"), move |event: Event| {
        let is_rejected = event.id() == "three" && !accepted.load(Ordering::Relaxed);
        let published = match is_rejected {
            true => Publish::Reject,
            false => publish.publish(event),
        };
        async move { published }
    });
    (relay, broker, accepts)
}

/// Five events of which the third is rejected, and one of another aggregate.
async fn reject(shop: &impl Shop) -> (RelayHandle, Broker, Arc<AtomicBool>) {
    let ids = ["one", "two", "three", "four", "five"];
    stage(shop, ids.map(|id| event(id, "a"))).await;
    let outbox = shop.outbox("orders");
    let (relay, broker, accepts) = rejecting(shop);
    until(async || outbox.lag().await.unwrap().dead == 1).await;
    // The others wait, and are visible.
    stage(shop, [event("other", "b"), event("six", "a")]).await;
    until(async || broker.deliveries().contains(&"other".to_owned())).await;
    let dead = outbox.dead(10).await.unwrap();
    assert_eq!(dead.len(), 1);
    assert_eq!(dead[0].event, event("three", "a"));
    assert_eq!(dead[0].attempts, 1);
    assert!(dead[0].failing_for < Duration::from_secs(60));
    assert_eq!(broker.streams()["a"], ["one", "two"]);
    until(async || outbox.lag().await.unwrap().events == 4).await;

    for id in ["four", "one", "unknown"] {
        assert!(!outbox.requeue(id).await.unwrap());
        assert!(!outbox.discard(id).await.unwrap());
    }
    assert_eq!(outbox.lag().await.unwrap().events, 4);
    (relay, broker, accepts)
}

async fn rejected_event_stops_its_aggregate_until_it_is_requeued(shop: impl Shop) {
    let (relay, broker, accepts) = reject(&shop).await;
    let outbox = shop.outbox("orders");
    // Rejected again.
    assert!(outbox.requeue("three").await.unwrap());
    until(async || outbox.lag().await.unwrap().dead == 1).await;
    accepts.store(true, Ordering::Relaxed);
    assert!(outbox.requeue("three").await.unwrap());
    until_all_is_published(&shop).await;
    let report = relay.stop(Duration::from_secs(10)).await;
    assert_eq!((report.published, report.dead), (7, 2));
    let all = ["one", "two", "three", "four", "five", "six"];
    assert_eq!(broker.streams()["a"], all);
}

async fn rejected_event_stops_its_aggregate_until_it_is_discarded(shop: impl Shop) {
    let (relay, broker, _) = reject(&shop).await;
    assert!(shop.outbox("orders").discard("three").await.unwrap());
    assert!(!shop.outbox("orders").discard("three").await.unwrap());
    until_all_is_published(&shop).await;
    relay.stop(Duration::from_secs(10)).await;
    assert_eq!(broker.streams()["a"], ["one", "two", "four", "five", "six"]);
}

async fn last_event_that_is_discarded_leaves_nothing(shop: impl Shop) {
    stage(&shop, [event("three", "a")]).await;
    let (relay, broker, _) = rejecting(&shop);
    let outbox = shop.outbox("orders");
    until(async || outbox.lag().await.unwrap().dead == 1).await;
    assert!(outbox.discard("three").await.unwrap());
    until_all_is_published(&shop).await;
    relay.stop(Duration::from_secs(10)).await;
    assert!(broker.deliveries().is_empty());
}

async fn set<S: Shop>(shop: &S, turns: &str) {
    let mut transaction = shop.begin().await;
    let on: &mut Connection<S> = &mut transaction;
    let statement = format!("UPDATE idempotency_turns SET {turns}");
    S::run(on, &statement).await.unwrap();
    transaction.commit().await.unwrap();
}

async fn event_is_given_up_after_attempts_and_age(shop: impl Shop) {
    stage(&shop, [event("id", "a"), event("next", "a")]).await;
    let broker = Broker::default();
    let publish = broker.clone();
    let relay = Relay::new(shop.outbox("orders"), move |event| {
        let _ = publish.publish(event);
        async { Publish::Retry }
    })
    .poll(Duration::from_millis(5))
    .give_up(Attempts(2).and_older_than(Duration::from_millis(1)))
    .spawn();
    let outbox = shop.outbox("orders");
    until(async || outbox.lag().await.unwrap().dead == 1).await;
    let report = relay.stop(Duration::from_secs(10)).await;
    assert_eq!((report.published, report.retried, report.dead), (0, 1, 1));
    assert_eq!(broker.deliveries(), ["id", "id"]);
    let dead = outbox.dead(10).await.unwrap();
    assert_eq!((dead[0].event.id(), dead[0].attempts), ("id", 2));
    assert!(dead[0].failing_for > Duration::ZERO);
}

async fn event_after_an_unsettled_turn_is_settled_alone(shop: impl Shop) {
    stage(&shop, ["one", "two", "three"].map(|id| event(id, "a"))).await;
    // As after a process that died while it published the second event.
    set(&shop, "attempts = 1, failing_since = 1").await;
    let gate = Arc::new(Semaphore::new(0));
    let held = Arc::clone(&gate);
    let relay = spawn(shop.outbox("orders"), move |event: Event| {
        let held = Arc::clone(&held);
        async move {
            if event.id() == "two" {
                held.acquire().await.unwrap().forget();
            }
            Publish::Done
        }
    });
    let outbox = shop.outbox("orders");
    until(async || outbox.lag().await.unwrap().events == 2).await;
    gate.add_permits(1);
    until_all_is_published(&shop).await;
    let report = relay.stop(Duration::from_secs(10)).await;
    assert_eq!((report.published, report.dead), (3, 0));
}

async fn event_that_ends_its_relays_is_given_up_untried(shop: impl Shop) {
    stage(&shop, [event("id", "a")]).await;
    set(&shop, "attempts = 3, failing_since = 1").await;
    let relay = Relay::new(shop.outbox("orders"), |_| -> std::future::Ready<Publish> {
        panic!("it is not tried")
    })
    .poll(Duration::from_millis(5))
    .give_up(Attempts(3).and_older_than(Duration::from_secs(24 * 3600)))
    .spawn();
    let outbox = shop.outbox("orders");
    until(async || outbox.lag().await.unwrap().dead == 1).await;
    let report = relay.stop(Duration::from_secs(10)).await;
    assert_eq!((report.retried, report.dead), (0, 1));
    assert_eq!(rows(&shop).await.len(), 3);
}
