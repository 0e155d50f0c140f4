//! The tables of the outbox.

use std::time::Duration;

use tower_idempotency::{
    PostgresStore, SqliteStore,
    messages::Delivery,
    sqlx::{Connection as _, postgres::PgPoolOptions},
};

use super::relay::{Broker, event, rows, spawn, stage, until_all_is_published};
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

#[tokio::test(flavor = "multi_thread")]
async fn grants_suffice_for_inbox_and_outbox() {
    Box::pin(Database::new().around(async |database| {
        let url = database.url();
        let owner = PostgresShop::open(&url).await;
        let (inbox, outbox) = (owner.inbox("billing"), owner.outbox("orders"));
        inbox.migrate().await.unwrap();
        outbox.migrate().await.unwrap();
        let role = format!("messages_{:016x}", rand::random::<u64>());
        run(&url, &format!("CREATE ROLE {role} LOGIN")).await;
        let options = database.options().username(&role);
        let store = PostgresStore::builder(options.clone()).connect().await;
        let shop = PostgresShop {
            url: url.clone(),
            pool: PgPoolOptions::new().connect_lazy_with(options),
            store: store.unwrap(),
        };
        let mut transaction = shop.begin().await;
        let refused = shop
            .inbox("billing")
            .first_time(&mut transaction, "id")
            .await;
        assert!(
            refused
                .unwrap_err()
                .to_string()
                .contains("permission denied")
        );
        drop(transaction);

        run(&url, &inbox.grants_for(&role)).await;
        run(&url, &outbox.grants_for(&role)).await;
        let mut transaction = shop.begin().await;
        let first = shop
            .inbox("billing")
            .first_time(&mut transaction, "id")
            .await;
        assert_eq!(first.unwrap(), Delivery::First);
        transaction.commit().await.unwrap();
        stage(&shop, [event("id", "a")]).await;
        let broker = Broker::default();
        let publish = broker.clone();
        let relay = spawn(shop.outbox("orders"), move |event| {
            let published = publish.publish(event);
            async move { published }
        });
        until_all_is_published(&shop).await;
        assert_eq!(relay.stop(Duration::from_secs(10)).await.published, 1);
        assert_eq!(broker.deliveries(), ["id"]);
        shop.store.close().await;
        shop.pool.close().await;
        run(&url, &format!("DROP OWNED BY {role}; DROP ROLE {role}")).await;
    }))
    .await;
}
