//! The same on tables that Citus distributes.

use std::{collections::HashSet, panic::AssertUnwindSafe, time::Duration};

use futures_util::FutureExt as _;
use tower_idempotency::{
    PostgresStore, Sweeper,
    messages::{Delivery, Event, Publish, Received},
    sqlx::{AssertSqlSafe, postgres::PgPoolOptions, query, raw_sql},
};

use crate::{
    databases::address,
    outbox::relay::{Broker, event, spawn, stage, until, until_all_is_published},
    shop::{PostgresShop, Shop},
};

/// Opens a shop in a new schema, with distributed tables.
async fn with_citus(test: impl AsyncFnOnce(&PostgresShop)) {
    let schema = format!("messages_{:016x}", rand::random::<u64>());
    let options = address("CITUS_URL");
    let path = options.options([("search_path", format!("{schema},public"))]);
    let pool = PgPoolOptions::new().connect_lazy_with(path.clone());
    let store = PostgresStore::builder(path).schema(&schema);
    let store = store.connect().await.unwrap();
    let url = String::new();
    let shop = PostgresShop { url, pool, store };
    shop.inbox("any").migrate().await.unwrap();
    shop.outbox("any").migrate().await.unwrap();
    raw_sql(
        "SET citus.shard_count = 4;
         CREATE TABLE effects (effect text NOT NULL);
         SELECT create_distributed_table('idempotency_messages', 'message');
         SELECT create_distributed_table('idempotency_streams', 'aggregate');
         SELECT create_distributed_table(
             'idempotency_events', 'aggregate', colocate_with => 'idempotency_streams');
         SELECT create_distributed_table(
             'idempotency_turns', 'aggregate', colocate_with => 'idempotency_streams')",
    )
    .execute(&shop.pool)
    .await
    .unwrap();
    let outcome = AssertUnwindSafe(test(&shop)).catch_unwind().await;
    shop.store.close().await;
    let drop = AssertSqlSafe(format!("DROP SCHEMA {schema} CASCADE"));
    raw_sql(drop).execute(&shop.pool).await.unwrap();
    outcome.unwrap_or_else(|panic| std::panic::resume_unwind(panic));
}

#[tokio::test(flavor = "multi_thread")]
#[ignore = "needs the Citus of CITUS_URL"]
async fn messages_are_processed_once() {
    Box::pin(with_citus(async |shop| {
        let inbox = shop.inbox("billing");
        let ids: Vec<String> = (0..100).map(|id| id.to_string()).collect();
        for expected in [Delivery::First, Delivery::Repeat] {
            let mut transaction = shop.begin().await;
            let deliveries = inbox.first_times(&mut transaction, &ids).await;
            assert_eq!(deliveries.unwrap(), vec![expected; 100]);
            transaction.commit().await.unwrap();
        }
        for expected in [Received::First(()), Received::Repeat] {
            let received = inbox.receive("id", async |on| {
                let effect = query("INSERT INTO effects VALUES ('effect')");
                effect.execute(&mut *on).await.map(drop)?;
                Ok::<_, tower_idempotency::messages::MessageError>(())
            });
            assert_eq!(received.await.unwrap(), expected);
        }
        assert_eq!(inbox.list(Some("98"), 10).await.unwrap().len(), 2);
        assert!(inbox.forget("id").await.unwrap());

        let swept = shop.inbox("swept").retention(Duration::ZERO);
        let mut transaction = shop.begin().await;
        let _ = swept.first_times(&mut transaction, &ids).await.unwrap();
        transaction.commit().await.unwrap();
        let sweeper = Sweeper::new(swept.clone())
            .every(Duration::from_millis(5))
            .spawn();
        until(async || swept.list(None, 1).await.unwrap().is_empty()).await;
        assert_eq!(sweeper.stop().await.removed, 100);
    }))
    .await;
}

#[tokio::test(flavor = "multi_thread")]
#[ignore = "needs the Citus of CITUS_URL"]
async fn events_are_published_in_order() {
    Box::pin(with_citus(async |shop| {
        let staged: Vec<Event> = (0..200)
            .map(|number| event(&format!("{number:03}"), &(number % 20).to_string()))
            .collect();
        stage(shop, staged).await;
        let broker = Broker::default();
        let publish = broker.clone();
        let relays = [(); 2].map(|()| {
            let publish = publish.clone();
            spawn(shop.outbox("orders"), move |event: Event| {
                let published = match event.id() {
                    "050" => Publish::Reject,
                    _ => publish.publish(event),
                };
                async move { published }
            })
        });
        let outbox = shop.outbox("orders");
        // The rejected event, and the seven behind it.
        until(async || outbox.lag().await.unwrap().events == 8).await;
        let dead = outbox.dead(10).await.unwrap();
        assert_eq!(dead[0].event.id(), "050");
        assert!(outbox.discard("050").await.unwrap());
        until_all_is_published(shop).await;
        for relay in relays {
            relay.stop(Duration::from_secs(10)).await;
        }
        let published: HashSet<_> = broker.deliveries().into_iter().collect();
        assert_eq!(published.len(), 199);
        assert!(broker.streams().values().all(|ids| ids.is_sorted()));
    }))
    .await;
}
