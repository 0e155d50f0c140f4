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
async fn differing_tables_are_refused_with_each_difference() {
    Box::pin(Database::new().around(async |database| {
        let url = database.url();
        let shop = PostgresShop::open(&url).await;
        let (inbox, outbox) = (shop.inbox("billing"), shop.outbox("orders"));
        let missing = outbox.check_schema().await.unwrap_err().to_string();
        for part in [
            "idempotency_events does not exist",
            "idempotency_streams does not exist",
            "idempotency_turns does not exist",
            "call `Outbox::migrate`",
        ] {
            assert!(missing.contains(part), "{missing}");
        }
        run(&url, &inbox.schema_sql()).await;
        run(&url, &outbox.schema_sql()).await;
        inbox.check_schema().await.unwrap();
        outbox.check_schema().await.unwrap();

        for (damage, says) in [
            (
                "ALTER TABLE idempotency_messages ALTER seen_at TYPE integer",
                "column seen_at of table \"public\".idempotency_messages is integer, not bigint",
            ),
            (
                "DROP INDEX idempotency_messages_expires_at",
                "idempotency_messages has no index on (expires_at)",
            ),
            (
                "ALTER TABLE idempotency_messages DROP CONSTRAINT idempotency_messages_pkey",
                "idempotency_messages has no PRIMARY KEY (message, consumer)",
            ),
        ] {
            run(&url, damage).await;
            for refused in [inbox.check_schema().await, inbox.migrate().await] {
                let refused = refused.unwrap_err().to_string();
                for part in [says, "`Inbox::schema_sql()`"] {
                    assert!(refused.contains(part), "{refused}");
                }
            }
        }
        outbox.check_schema().await.unwrap();
        for (damage, says) in [
            (
                "ALTER TABLE idempotency_streams SET UNLOGGED",
                "idempotency_streams is UNLOGGED",
            ),
            (
                "ALTER TABLE idempotency_events DROP COLUMN payload",
                "column payload of table \"public\".idempotency_events does not exist",
            ),
            (
                "ALTER TABLE idempotency_turns ALTER aggregate TYPE text COLLATE \"default\"",
                "column aggregate of table \"public\".idempotency_turns is not COLLATE \"C\"",
            ),
            (
                "DROP INDEX idempotency_turns_due_at",
                "idempotency_turns has no index on (topic, due_at)",
            ),
        ] {
            run(&url, damage).await;
            let refused = outbox.check_schema().await.unwrap_err().to_string();
            assert!(refused.contains(says), "{refused}");
        }
        shop.store.close().await;
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
        let refused = refused.unwrap_err().to_string();
        let needed = format!("idempotency_messages TO \"{role}\"");
        for part in ["permission denied", &needed] {
            assert!(refused.contains(part), "{refused}");
        }
        drop(transaction);
        // Outside of a transaction of the application.
        let refused = shop.inbox("billing").list(None, 1).await.unwrap_err();
        assert!(refused.to_string().contains(&needed), "{refused}");
        let refused = shop.outbox("orders").lag().await.unwrap_err().to_string();
        for table in ["streams", "events", "turns"] {
            let needed = format!("idempotency_{table} TO \"{role}\"");
            assert!(refused.contains(&needed), "{refused}");
        }
        let refused = shop.inbox("billing").check_schema().await.unwrap_err();
        for part in ["idempotency_messages (DELETE)", &needed] {
            assert!(refused.to_string().contains(part), "{refused}");
        }

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
