//! The tables of the outbox.

use tower_idempotency::{SqliteStore, sqlx::Connection as _};

use super::relay::{event, rows, stage};
use crate::{
    databases::{Database, run},
    shop::{PostgresShop, Shop, with_sqlite},
};

#[tokio::test(flavor = "multi_thread")]
async fn tables_are_made_once_beside_the_others() {
    Box::pin(Database::new().around(async |database| {
        let shop = PostgresShop::open(&database.url()).await;
        let outbox = shop.outbox("orders");
        let mut transaction = shop.begin().await;
        let staged = outbox.stage(&mut transaction, event("id", "a")).await;
        let text = staged.unwrap_err().to_string();
        assert!(text.contains("call `Outbox::migrate`"), "{text}");
        drop(transaction);

        let (one, other) = tokio::join!(outbox.migrate(), outbox.migrate());
        one.and(other).unwrap();
        shop.inbox("billing").migrate().await.unwrap();
        shop.store.migrate().await.unwrap();
        outbox.migrate().await.unwrap();
        stage(&shop, [event("id", "a")]).await;
    }))
    .await;
}

#[tokio::test(flavor = "multi_thread")]
async fn tables_of_the_application_are_adopted() {
    Box::pin(Database::new().around(async |database| {
        let url = database.url();
        let shop = PostgresShop::open(&url).await;
        let outbox = shop.outbox("orders");
        run(&url, &outbox.schema_sql()).await;
        outbox.migrate().await.unwrap();
        outbox.migrate().await.unwrap();
        stage(&shop, [event("id", "a")]).await;
    }))
    .await;
}

#[tokio::test(flavor = "multi_thread")]
async fn file_with_an_outbox_opens_again() {
    with_sqlite(async |shop| {
        stage(&shop, [event("id", "a")]).await;
        let store = SqliteStore::open(&shop.file).await.unwrap();
        store.outbox("orders").unwrap().migrate().await.unwrap();
        shop.connect().await.ping().await.unwrap();
        assert_eq!(rows(&shop).await.len(), 3);
        store.close().await;
    })
    .await;
}
