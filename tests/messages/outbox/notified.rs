//! Relays that another process notifies.

use std::time::Duration;

use axum::http::StatusCode;
use tokio::time::timeout;
use tower_idempotency::{
    Operation, PostgresStore,
    messages::Outbox,
    sqlx::{postgres::PgListener, query_scalar},
};

use super::relay::{event, spawn_idle, until, until_all_is_published};
use crate::shop::{PostgresShop, Shop as _, with_postgres};

fn outbox(shop: &PostgresShop) -> Outbox<PostgresStore> {
    shop.outbox("orders").notifications(true)
}

/// The processes that listen.
async fn listeners(shop: &PostgresShop) -> Vec<i32> {
    let listeners = "SELECT pid FROM pg_stat_activity
        WHERE datname = current_database() AND query LIKE 'LISTEN%'";
    let listeners = query_scalar(listeners).fetch_all(&shop.pool);
    listeners.await.unwrap()
}

async fn stage(shop: &PostgresShop, outbox: &Outbox<PostgresStore>, id: &str) {
    let mut transaction = shop.begin().await;
    outbox.stage(&mut transaction, event(id, id)).await.unwrap();
    transaction.commit().await.unwrap();
    outbox.wake();
}

#[tokio::test(flavor = "multi_thread")]
async fn relay_of_another_process_is_notified() {
    Box::pin(with_postgres(async |shop| {
        let (relay, broker) = spawn_idle(outbox(&shop));
        until(async || !listeners(&shop).await.is_empty()).await;

        let other = PostgresShop::open(&shop.url).await;
        stage(&other, &outbox(&other), "woken").await;
        until(async || broker.deliveries() == ["woken"]).await;

        other.store.migrate().await.unwrap();
        let operation = Operation::for_test(&other.store, "attempt").await;
        let mut transaction = other.store.begin(&operation).await.unwrap();
        let outbox = outbox(&other);
        let staged = outbox.stage(&mut transaction, event("committed", "a"));
        staged.await.unwrap();
        let committed = other.store.commit(&operation, transaction, StatusCode::OK);
        let _ = committed.await.unwrap();
        until(async || broker.deliveries() == ["woken", "committed"]).await;
        until_all_is_published(&shop).await;
        relay.stop(Duration::from_secs(10)).await;
        until(async || listeners(&shop).await.is_empty()).await;
    }))
    .await;
}

#[tokio::test(flavor = "multi_thread")]
async fn lost_notification_is_made_up_for() {
    Box::pin(with_postgres(async |shop| {
        let (relay, broker) = spawn_idle(outbox(&shop));
        until(async || !listeners(&shop).await.is_empty()).await;
        for pid in listeners(&shop).await {
            let terminate = query_scalar("SELECT pg_terminate_backend($1)").bind(pid);
            let is_terminated: bool = terminate.fetch_one(&shop.pool).await.unwrap();
            assert!(is_terminated);
        }
        until(async || listeners(&shop).await.is_empty()).await;
        let other = PostgresShop::open(&shop.url).await;
        stage(&other, &outbox(&other), "unheard").await;
        until(async || broker.deliveries() == ["unheard"]).await;
        relay.stop(Duration::from_secs(10)).await;
    }))
    .await;
}

#[tokio::test(flavor = "multi_thread")]
async fn notifications_are_sent_only_if_they_are_set() {
    Box::pin(with_postgres(async |shop| {
        let mut listener = PgListener::connect_with(&shop.pool).await.unwrap();
        listener.listen("idempotency_events").await.unwrap();
        stage(&shop, &shop.outbox("orders"), "silent").await;
        let received = timeout(Duration::from_millis(200), listener.recv()).await;
        assert!(received.is_err());

        for id in ["a", "b", "c", "d", "e"] {
            stage(&shop, &outbox(&shop), id).await;
        }
        let received = timeout(Duration::from_secs(20), listener.recv()).await;
        assert_eq!(received.unwrap().unwrap().payload(), "");
    }))
    .await;
}
