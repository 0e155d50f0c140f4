//! Events that a relay publishes.

use std::{
    sync::{
        Arc, Mutex,
        atomic::{AtomicUsize, Ordering},
    },
    time::Duration,
};

use tokio::{
    sync::{Semaphore, oneshot},
    time::{sleep, timeout},
};
use tower_idempotency::messages::{Event, Publish, Relay};

use super::relay::{Broker, event, rows, spawn, stage, until, until_all_is_published};
use crate::shop::{Shop, with_each_database};

with_each_database! {
    staged_events_are_published_and_removed;
    relay_is_woken_after_a_commit;
    retried_event_is_published_before_its_followers;
    publisher_that_panics_is_retried;
    publisher_that_hangs_is_retried;
    outage_kills_no_event;
    event_staged_while_the_last_is_published_is_not_stranded;
    stop_lets_publications_end_and_takes_no_more;
    stop_breaks_off_after_its_timeout;
    dropped_handle_stops_the_relay;
    poisoned_stream_delays_no_other;
}

async fn staged_events_are_published_and_removed(shop: impl Shop) {
    let broker = Broker::default();
    let staged: Vec<Event> = (0..250)
        .map(|number| event(&format!("{number:03}"), &format!("{}", number % 7)))
        .collect();
    stage(&shop, staged.clone()).await;
    let publish = broker.clone();
    let relay = spawn(shop.outbox("orders"), move |event| {
        let published = publish.publish(event);
        async move { published }
    });
    until_all_is_published(&shop).await;
    let report = relay.stop(Duration::from_secs(10)).await;
    assert_eq!((report.published, report.retried, report.dead), (250, 0, 0));
    let mut published = broker.deliveries();
    published.sort_unstable();
    let staged: Vec<&str> = staged.iter().map(Event::id).collect();
    assert_eq!(published, staged);
    assert!(broker.streams().values().all(|ids| ids.is_sorted()));
}

async fn relay_is_woken_after_a_commit(shop: impl Shop) {
    let (sent, published) = oneshot::channel();
    let sent = Arc::new(Mutex::new(Some(sent)));
    let relay = Relay::new(shop.outbox("orders"), move |event: Event| {
        let sent = sent.lock().unwrap().take().unwrap().send(event);
        async move { sent.map_or(Publish::Retry, |()| Publish::Done) }
    })
    .poll(Duration::from_secs(3600))
    .spawn();
    // Its first look finds nothing.
    sleep(Duration::from_millis(100)).await;
    stage(&shop, [event("id", "a")]).await;
    shop.outbox("orders").wake();
    let event = timeout(Duration::from_secs(30), published).await;
    assert_eq!(event.unwrap().unwrap().payload(), "payload of id");
    relay.stop(Duration::from_secs(10)).await;
    assert!(rows(&shop).await.is_empty());
}

/// Publishes `first`, then `second`, of one aggregate. The first attempts at `first` end as
/// `fail` says.
async fn retry<F>(shop: &impl Shop, fail: impl Fn() -> F + Send + Sync + 'static) -> Broker
where
    F: Future<Output = Publish> + Send + 'static,
{
    stage(shop, [event("first", "a"), event("second", "a")]).await;
    let broker = Broker::default();
    let (publish, tries) = (broker.clone(), AtomicUsize::new(0));
    let relay = Relay::new(shop.outbox("orders"), move |event: Event| {
        let failing = (tries.fetch_add(1, Ordering::Relaxed) == 0).then(&fail);
        let publish = publish.clone();
        async move {
            match failing {
                Some(failing) => failing.await,
                None => publish.publish(event),
            }
        }
    })
    .lease(Duration::from_millis(600))
    .poll(Duration::from_millis(5))
    .spawn();
    until_all_is_published(shop).await;
    let report = relay.stop(Duration::from_secs(10)).await;
    assert_eq!((report.published, report.retried, report.dead), (2, 1, 0));
    assert_eq!(broker.deliveries(), ["first", "second"]);
    broker
}

async fn retried_event_is_published_before_its_followers(shop: impl Shop) {
    retry(&shop, async || Publish::Retry).await;
}

async fn publisher_that_panics_is_retried(shop: impl Shop) {
    retry(&shop, async || panic!("a publisher panics")).await;
}

async fn publisher_that_hangs_is_retried(shop: impl Shop) {
    retry(&shop, std::future::pending::<Publish>).await;
}

async fn outage_kills_no_event(shop: impl Shop) {
    stage(
        &shop,
        (0..20).map(|id| event(&id.to_string(), &id.to_string())),
    )
    .await;
    // Long ago, and often, but not both.
    for (attempts, failing_for) in [(1_000, 0), (1, 10_i64 * 24 * 3_600_000_000)] {
        let mut transaction = shop.begin().await;
        let age = format!(
            "UPDATE idempotency_turns
             SET attempts = {attempts}, due_at = 0, token = NULL,
                 failing_since = (SELECT max(staged_at) FROM idempotency_events) - {failing_for}"
        );
        run(&shop, &mut transaction, &age).await;
        transaction.commit().await.unwrap();
        let relay = Relay::new(shop.outbox("orders"), async |_| Publish::Retry)
            .poll(Duration::from_millis(5))
            .spawn();
        let retried = async || {
            let query =
                "SELECT aggregate FROM idempotency_turns WHERE token IS NULL AND due_at > 0";
            shop.all(query).await.len() == 20
        };
        until(retried).await;
        let report = relay.stop(Duration::from_secs(10)).await;
        assert_eq!(report.dead, 0);
        assert!(shop.outbox("orders").dead(10).await.unwrap().is_empty());
    }
    let lag = shop.outbox("orders").lag().await.unwrap();
    assert_eq!((lag.events, lag.dead), (20, 0));
}

async fn run<S: Shop>(_: &S, on: &mut crate::shop::Connection<S>, statement: &str) {
    S::run(on, statement).await.unwrap();
}

async fn event_staged_while_the_last_is_published_is_not_stranded(shop: impl Shop) {
    let broker = Broker::default();
    let publish = broker.clone();
    let relay = spawn(shop.outbox("orders"), move |event| {
        let published = publish.publish(event);
        async move { published }
    });
    // Each is staged about when the relay removes the turn of the one before.
    for number in 0..200 {
        stage(&shop, [event(&format!("{number:03}"), "a")]).await;
    }
    until_all_is_published(&shop).await;
    relay.stop(Duration::from_secs(10)).await;
    let published = &broker.streams()["a"];
    assert_eq!(published.len(), 200);
    assert!(published.is_sorted(), "{published:?}");
}

async fn stop_lets_publications_end_and_takes_no_more(shop: impl Shop) {
    stage(&shop, [event("first", "a"), event("second", "a")]).await;
    let gate = Arc::new(Semaphore::new(0));
    let broker = Broker::default();
    let (publish, held) = (broker.clone(), Arc::clone(&gate));
    let relay = spawn(shop.outbox("orders"), move |event| {
        let (publish, held) = (publish.clone(), Arc::clone(&held));
        async move {
            let published = publish.publish(event);
            held.acquire().await.unwrap().forget();
            published
        }
    });
    until(async || broker.deliveries() == ["first"]).await;
    let opened = async {
        sleep(Duration::from_millis(50)).await;
        gate.add_permits(1);
    };
    let (report, ()) = tokio::join!(relay.stop(Duration::from_secs(30)), opened);
    assert_eq!((report.published, report.is_broken_off), (1, false));
    let left = shop.all("SELECT id FROM idempotency_events").await;
    assert_eq!(left, ["second"]);
    // It is due at once, without an attempt.
    let turns = "SELECT 'free' FROM idempotency_turns WHERE token IS NULL AND attempts = 0";
    assert_eq!(shop.all(turns).await, ["free"]);
}

async fn stop_breaks_off_after_its_timeout(shop: impl Shop) {
    stage(&shop, [event("id", "a")]).await;
    let (begun, is_begun) = oneshot::channel();
    let begun = Mutex::new(Some(begun));
    let relay = spawn(shop.outbox("orders"), move |_| {
        begun.lock().unwrap().take().unwrap().send(()).unwrap();
        std::future::pending()
    });
    is_begun.await.unwrap();
    let report = relay.stop(Duration::from_millis(50)).await;
    assert_eq!((report.published, report.is_broken_off), (0, true));
    assert_eq!(shop.outbox("orders").lag().await.unwrap().events, 1);
}

async fn dropped_handle_stops_the_relay(shop: impl Shop) {
    let relays = Arc::new(());
    let held = Arc::clone(&relays);
    let relay = spawn(shop.outbox("orders"), move |_| {
        let _held = &held;
        async { Publish::Done }
    });
    drop(relay);
    until(async || Arc::strong_count(&relays) == 1).await;
}

async fn poisoned_stream_delays_no_other(shop: impl Shop) {
    // A poisoned first event, with many followers.
    let followers = (0..5_000).map(|id| event(&format!("follower {id}"), "poisoned"));
    stage(&shop, followers).await;
    let broker = Broker::default();
    let publish = broker.clone();
    let relay = Relay::new(shop.outbox("orders"), move |event: Event| {
        let publish = publish.clone();
        async move {
            match event.aggregate() {
                "poisoned" => std::future::pending().await,
                _ => publish.publish(event),
            }
        }
    })
    // Longer than the test may take.
    .lease(Duration::from_secs(3600))
    .poll(Duration::from_millis(5))
    .spawn();
    for number in 0..20 {
        let id = format!("healthy {number}");
        stage(&shop, [event(&id, &id)]).await;
        until(async || broker.deliveries().contains(&id)).await;
    }
    let report = relay.stop(Duration::from_millis(10)).await;
    assert_eq!((report.published, report.retried), (20, 0));
}
