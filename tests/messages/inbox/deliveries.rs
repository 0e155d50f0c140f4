//! Marks in transactions of the application.

use std::time::Duration;

use tokio::{join, sync::oneshot, time::sleep};
use tower_idempotency::{
    messages::{Delivery, MessageErrorKind},
    sqlx::{Connection as _, query},
};

use crate::shop::{Shop, with_each_database, with_postgres, with_sqlite};

with_each_database! {
    second_delivery_is_a_repeat;
    delivery_after_a_rollback_is_first;
    second_delivery_waits_for_the_first_to_commit;
    second_delivery_is_first_if_the_first_rolls_back;
    two_consumers_are_both_first;
    connection_without_a_transaction_is_refused;
    mark_in_a_savepoint_rolls_back_with_it;
}

async fn second_delivery_is_a_repeat(shop: impl Shop) {
    let inbox = shop.inbox("billing");
    for expected in [Delivery::First, Delivery::Repeat, Delivery::Repeat] {
        let mut transaction = shop.begin().await;
        let delivery = inbox.first_time(&mut transaction, "id").await.unwrap();
        assert_eq!(delivery, expected);
        transaction.commit().await.unwrap();
    }
    let mut transaction = shop.begin().await;
    let other = inbox.first_time(&mut transaction, "Id").await.unwrap();
    assert_eq!(other, Delivery::First);
    transaction.commit().await.unwrap();
}

async fn delivery_after_a_rollback_is_first(shop: impl Shop) {
    let inbox = shop.inbox("billing");
    for _ in 0..2 {
        let mut transaction = shop.begin().await;
        let delivery = inbox.first_time(&mut transaction, "id").await.unwrap();
        assert_eq!(delivery, Delivery::First);
        transaction.rollback().await.unwrap();
    }
}

/// Delivers a message twice. The first transaction ends as `commits` says, while the
/// second one waits.
async fn deliver_twice(shop: &impl Shop, commits: bool) -> Delivery {
    let inbox = shop.inbox("billing");
    let (marked, is_marked) = oneshot::channel();
    let first = async {
        let mut transaction = shop.begin().await;
        let delivery = inbox.first_time(&mut transaction, "id").await.unwrap();
        assert_eq!(delivery, Delivery::First);
        marked.send(()).unwrap();
        // Time for the other one to wait.
        sleep(Duration::from_millis(100)).await;
        match commits {
            true => transaction.commit().await.unwrap(),
            false => transaction.rollback().await.unwrap(),
        }
    };
    let second = async {
        is_marked.await.unwrap();
        let mut transaction = shop.begin().await;
        let delivery = inbox.first_time(&mut transaction, "id").await.unwrap();
        transaction.commit().await.unwrap();
        delivery
    };
    join!(first, second).1
}

async fn second_delivery_waits_for_the_first_to_commit(shop: impl Shop) {
    assert_eq!(deliver_twice(&shop, true).await, Delivery::Repeat);
}

async fn second_delivery_is_first_if_the_first_rolls_back(shop: impl Shop) {
    assert_eq!(deliver_twice(&shop, false).await, Delivery::First);
}

async fn two_consumers_are_both_first(shop: impl Shop) {
    for consumer in ["billing", "shipping"] {
        let mut transaction = shop.begin().await;
        let inbox = shop.inbox(consumer);
        let delivery = inbox.first_time(&mut transaction, "id").await.unwrap();
        assert_eq!(delivery, Delivery::First);
        transaction.commit().await.unwrap();
    }
}

async fn connection_without_a_transaction_is_refused(shop: impl Shop) {
    let inbox = shop.inbox("billing");
    let mut connection = shop.connect().await;
    let error = inbox.first_time(&mut connection, "id").await.unwrap_err();
    assert_eq!(error.kind(), MessageErrorKind::Transaction);
    assert!(error.to_string().contains("`begin`"), "{error}");
    assert!(inbox.list(None, 10).await.unwrap().is_empty());
}

async fn mark_in_a_savepoint_rolls_back_with_it(shop: impl Shop) {
    let inbox = shop.inbox("billing");
    let mut transaction = shop.begin().await;
    let mut savepoint = transaction.begin().await.unwrap();
    let delivery = inbox.first_time(&mut savepoint, "id").await.unwrap();
    assert_eq!(delivery, Delivery::First);
    savepoint.rollback().await.unwrap();
    let delivery = inbox.first_time(&mut transaction, "id").await.unwrap();
    assert_eq!(delivery, Delivery::First);
    transaction.commit().await.unwrap();
}

#[tokio::test(flavor = "multi_thread")]
async fn transaction_with_a_snapshot_is_refused_and_still_usable() {
    with_postgres(async |shop| {
        let inbox = shop.inbox("billing");
        for level in ["REPEATABLE READ", "SERIALIZABLE"] {
            let mut transaction = shop.begin().await;
            let set = format!("SET TRANSACTION ISOLATION LEVEL {level}");
            crate::shop::PostgresShop::run(&mut transaction, &set)
                .await
                .unwrap();
            let error = inbox.first_time(&mut transaction, "id").await.unwrap_err();
            assert_eq!(error.kind(), MessageErrorKind::Transaction);
            let text = error.to_string();
            assert!(
                text.contains(level) && text.contains("READ COMMITTED"),
                "{text}"
            );
            query("SELECT 1").execute(&mut *transaction).await.unwrap();
            transaction.commit().await.unwrap();
        }
        assert!(inbox.list(None, 10).await.unwrap().is_empty());
    })
    .await;
}

#[tokio::test(flavor = "multi_thread")]
async fn stale_reader_is_told_to_begin_immediate() {
    with_sqlite(async |shop| {
        let inbox = shop.inbox("billing");
        let mut reader = shop.pool.begin().await.unwrap();
        query("SELECT * FROM effects")
            .fetch_all(&mut *reader)
            .await
            .unwrap();
        let mut writer = shop.begin().await;
        crate::shop::SqliteShop::effect(&mut writer, "other")
            .await
            .unwrap();
        writer.commit().await.unwrap();

        let error = inbox.first_time(&mut reader, "id").await.unwrap_err();
        assert_eq!(error.kind(), MessageErrorKind::Transaction);
        assert!(error.to_string().contains("BEGIN IMMEDIATE"), "{error}");
    })
    .await;
}
