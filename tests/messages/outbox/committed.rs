//! Events that are committed with the response of a guarded handler.

use std::time::Duration;

use axum::http::StatusCode;
use tokio::sync::mpsc;
use tower_idempotency::{
    Operation,
    messages::{Event, Publish, Received, Relay},
};

use super::relay::{event, spawn_idle, stage, until, until_all_is_published};
use crate::shop::{Shop, with_each_database, with_postgres, with_sqlite};

with_each_database! {
    received_message_wakes_the_relay;
}

macro_rules! commit_wakes_the_relay {
    ($shop:expr) => {{
        let (shop, outbox) = ($shop, $shop.outbox("orders"));
        let (sent, mut published) = mpsc::unbounded_channel();
        let relay = Relay::new(outbox.clone(), move |event: Event| {
            let published = sent.send(event).map_or(Publish::Retry, |()| Publish::Done);
            async move { published }
        })
        .poll(Duration::from_secs(3600))
        .spawn();
        for attempt in ["one", "two"] {
            let operation = Operation::for_test(&shop.store, attempt).await;
            let mut transaction = shop.store.begin(&operation).await.unwrap();
            let id = operation.derive("order-created");
            let staged = outbox.stage(&mut transaction, event(&id, "a")).await;
            staged.unwrap();
            let created = StatusCode::CREATED;
            let committed = shop.store.commit(&operation, transaction, created).await;
            assert_eq!(committed.unwrap().into_http().status(), created);
            let event = tokio::time::timeout(Duration::from_secs(30), published.recv()).await;
            assert_eq!(event.unwrap().unwrap().id(), id);
        }
        until_all_is_published(shop).await;
        let _ = relay.stop(Duration::from_secs(10)).await;
    }};
}

#[tokio::test(flavor = "multi_thread")]
async fn commit_wakes_the_relay_on_postgres() {
    Box::pin(with_postgres(async |shop| {
        shop.store.migrate().await.unwrap();
        commit_wakes_the_relay!(&shop);
    }))
    .await;
}

#[tokio::test(flavor = "multi_thread")]
async fn commit_wakes_the_relay_on_sqlite() {
    Box::pin(with_sqlite(async |shop| commit_wakes_the_relay!(&shop))).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn commit_wakes_a_relay_that_looked_after_the_staging() {
    Box::pin(with_postgres(async |shop| {
        shop.store.migrate().await.unwrap();
        let outbox = shop.outbox("orders");
        let (relay, broker) = spawn_idle(outbox.clone());
        let operation = Operation::for_test(&shop.store, "attempt").await;
        let mut transaction = shop.store.begin(&operation).await.unwrap();
        let staged = outbox.stage(&mut transaction, event("committed", "a"));
        staged.await.unwrap();
        // Another transaction makes the relay look before this one is committed.
        stage(&shop, [event("other", "b")]).await;
        outbox.wake();
        until(async || broker.deliveries() == ["other"]).await;
        let committed = shop.store.commit(&operation, transaction, StatusCode::OK);
        let _ = committed.await.unwrap();
        until(async || broker.deliveries() == ["other", "committed"]).await;
        relay.stop(Duration::from_secs(10)).await;
    }))
    .await;
}

async fn received_message_wakes_the_relay<S: Shop>(shop: S) {
    let outbox = shop.outbox("orders");
    let (relay, broker) = spawn_idle(outbox.clone());
    let inbox = shop.inbox("billing");
    let received = inbox.receive("message", async |on| {
        outbox.stage(on, event("billed", "a")).await
    });
    assert_eq!(received.await.unwrap(), Received::First(()));
    until(async || broker.deliveries() == ["billed"]).await;
    relay.stop(Duration::from_secs(10)).await;
}
