//! How long marks are kept, their tables, and the calls of an operator.

use std::time::Duration;

use tokio::time::{sleep, timeout};
use tower_idempotency::{
    SqliteStore, Sweeper,
    messages::{Delivery, Inbox, MessageError, Received},
    sqlx::{self, raw_sql},
};

use crate::{
    databases::{Database, run},
    shop::{PostgresShop, Shop, with_each_database, with_sqlite},
};

with_each_database! {
    sweeper_removes_expired_marks_only;
    operator_lists_and_forgets_a_message;
}

async fn mark<S: Shop>(shop: &S, inbox: &Inbox<S::Store>, id: &str) -> Delivery {
    let mut transaction = shop.begin().await;
    let delivery = inbox.first_time(&mut transaction, id).await.unwrap();
    transaction.commit().await.unwrap();
    delivery
}

async fn sweeper_removes_expired_marks_only<S: Shop>(shop: S) {
    let kept = shop.inbox("kept");
    let expired = shop.inbox("expired").retention(Duration::ZERO);
    let _ = mark(&shop, &kept, "id").await;
    for id in ["a", "b", "c"] {
        assert_eq!(mark(&shop, &expired, id).await, Delivery::First);
    }
    // An expired mark that was not swept counts.
    assert_eq!(mark(&shop, &expired, "a").await, Delivery::Repeat);

    let sweeper = Sweeper::new(kept.clone())
        .every(Duration::from_millis(5))
        .batch(2)
        .spawn();
    let swept = async {
        while !expired.list(None, 10).await.unwrap().is_empty() {
            sleep(Duration::from_millis(5)).await;
        }
    };
    timeout(Duration::from_secs(30), swept).await.unwrap();
    assert_eq!(sweeper.stop().await.removed, 3);
    assert_eq!(mark(&shop, &expired, "a").await, Delivery::First);
    assert_eq!(mark(&shop, &kept, "id").await, Delivery::Repeat);
}

async fn operator_lists_and_forgets_a_message<S: Shop>(shop: S) {
    let inbox = shop.inbox("billing");
    let _ = mark(&shop, &shop.inbox("another"), "a").await;
    for id in ["b", "a", "c"] {
        let _ = mark(&shop, &inbox, id).await;
    }
    let ids = async |after, limit| -> Vec<String> {
        let listed = inbox.list(after, limit).await.unwrap();
        assert!(listed.iter().all(|seen| seen.age < Duration::from_secs(60)));
        listed.into_iter().map(|seen| seen.id).collect()
    };
    assert_eq!(ids(None, 2).await, ["a", "b"]);
    assert_eq!(ids(Some("b"), 2).await, ["c"]);

    assert!(inbox.forget("b").await.unwrap());
    assert!(!inbox.forget("b").await.unwrap());
    assert_eq!(ids(None, 10).await, ["a", "c"]);
    assert_eq!(mark(&shop, &inbox, "b").await, Delivery::First);
    let another = mark(&shop, &shop.inbox("another"), "a").await;
    assert_eq!(another, Delivery::Repeat);
}

#[tokio::test(flavor = "multi_thread")]
async fn table_is_made_once_beside_that_of_records() {
    Box::pin(Database::new().around(async |database| {
        let shop = PostgresShop::open(&database.url()).await;
        let inbox = shop.inbox("billing");
        let error = inbox
            .receive("id", async |_| Ok::<_, MessageError>(()))
            .await;
        let text = error.unwrap_err().to_string();
        assert!(text.contains("does not exist"), "{text}");

        let (one, other) = tokio::join!(inbox.migrate(), inbox.migrate());
        one.and(other).unwrap();
        shop.store.migrate().await.unwrap();
        shop.store.check_schema().await.unwrap();
        inbox.migrate().await.unwrap();
        let received = inbox
            .receive("id", async |_| Ok::<_, MessageError>(()))
            .await;
        assert_eq!(received.unwrap(), Received::First(()));
    }))
    .await;
}

#[tokio::test(flavor = "multi_thread")]
async fn table_of_the_application_is_adopted() {
    Box::pin(Database::new().around(async |database| {
        let url = database.url();
        let shop = PostgresShop::open(&url).await;
        let inbox = shop.inbox("billing");
        run(&url, &inbox.schema_sql()).await;
        inbox.migrate().await.unwrap();
        inbox.migrate().await.unwrap();
        let received = inbox
            .receive("id", async |_| Ok::<_, MessageError>(()))
            .await;
        assert_eq!(received.unwrap(), Received::First(()));
    }))
    .await;
}

#[tokio::test(flavor = "multi_thread")]
async fn file_with_an_inbox_opens_again() {
    with_sqlite(async |shop| {
        assert_eq!(
            mark(&shop, &shop.inbox("billing"), "id").await,
            Delivery::First
        );
        let store = SqliteStore::open(&shop.file).await.unwrap();
        let inbox = store.inbox("billing").unwrap();
        inbox.migrate().await.unwrap();
        let received = inbox
            .receive("id", async |_| Ok::<_, MessageError>(()))
            .await;
        assert_eq!(received.unwrap(), Received::Repeat);
        store.close().await;
        // The file of a new application, from its own migrations.
        raw_sql("DROP TABLE idempotency_messages")
            .execute(&shop.pool)
            .await
            .unwrap();
        let statements = sqlx::AssertSqlSafe(inbox.schema_sql());
        raw_sql(statements).execute(&shop.pool).await.unwrap();
        assert_eq!(
            mark(&shop, &shop.inbox("billing"), "id").await,
            Delivery::First
        );
    })
    .await;
}
