//! The same through PgBouncer, which gives each transaction another server connection.

use std::time::Duration;

use tower_idempotency::{
    PostgresStore,
    messages::{MessageError, Received},
    sqlx::query,
};

use crate::{
    databases::Database,
    outbox::relay::{Broker, event, spawn, stage, until_all_is_published},
    shop::{PostgresShop, Shop},
};

#[tokio::test(flavor = "multi_thread")]
async fn messages_pass_through_a_pooler() {
    Box::pin(Database::new().around(async |database| {
        let direct = PostgresShop::open(&database.url()).await;
        let store = PostgresStore::builder(database.pooler_options()).pooler_safe();
        let store = store.connect().await.unwrap();
        let shop = PostgresShop { store, ..direct };
        shop.inbox("any").migrate().await.unwrap();
        shop.outbox("any").migrate().await.unwrap();
        query("CREATE TABLE effects (effect text)")
            .execute(&shop.pool)
            .await
            .unwrap();

        for expected in [Received::First(()), Received::Repeat] {
            let inbox = shop.inbox("billing");
            let received = inbox.receive("id", async |on| {
                let effect = query("INSERT INTO effects VALUES ('effect')").persistent(false);
                effect.execute(&mut *on).await?;
                Ok::<_, MessageError>(())
            });
            assert_eq!(received.await.unwrap(), expected);
        }
        assert_eq!(shop.effects().await, ["effect"]);

        stage(
            &shop,
            (0..50).map(|id| event(&id.to_string(), &(id % 5).to_string())),
        )
        .await;
        let broker = Broker::default();
        let publish = broker.clone();
        let relay = spawn(shop.outbox("orders"), move |event| {
            let published = publish.publish(event);
            async move { published }
        });
        until_all_is_published(&shop).await;
        assert_eq!(relay.stop(Duration::from_secs(10)).await.published, 50);
        shop.store.close().await;
    }))
    .await;
}
