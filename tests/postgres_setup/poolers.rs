//! Settings that other clients of a pooler leave behind, and poolers that the
//! store is not told of.

use std::time::Duration;

use futures_util::future::join_all;
use tokio::time::timeout;
use tower_idempotency::{
    PostgresStore, Store,
    sqlx::{ConnectOptions as _, PgConnection, query_scalar},
    store::Transitioned,
};

use crate::{
    database::{acquired, done, hour, name, run_on, told, with_database, with_role},
    server::{Pooler, Server},
};

#[tokio::test(flavor = "multi_thread")]
async fn f112_settings_left_behind_a_pooler_do_not_reach_the_store() {
    with_database(async |database| {
        let direct = database.builder().connect().await.unwrap();
        direct.migrate().await.unwrap();
        direct.close().await;
        database.run("CREATE SCHEMA neighbour").await;
        let twin = database
            .builder()
            .schema("neighbour")
            .connect()
            .await
            .unwrap();
        twin.migrate().await.unwrap();
        twin.close().await;
        with_role(database, async |role| {
            database
                .run(&format!(
                    "GRANT USAGE ON SCHEMA neighbour TO {role};
                     GRANT ALL ON ALL TABLES IN SCHEMA neighbour TO {role}"
                ))
                .await;
            // The neighbour holds all server connections of the pooler for a
            // while.
            let mut neighbours = Vec::new();
            for _ in 0..4 {
                let mut connection: PgConnection = database.pooler.connect().await.unwrap();
                run_on(&mut connection, "BEGIN").await;
                neighbours.push(connection);
            }
            for connection in &mut neighbours {
                let leave =
                    format!("SET search_path = neighbour, pg_catalog; SET ROLE {role}; COMMIT");
                run_on(connection, &leave).await;
            }
            let store = PostgresStore::builder(database.pooler.clone()).pooler_safe();
            let store = store.connect().await.unwrap();
            for key in ["one", "two", "three"] {
                let (name, claim) = (name(key), hour());
                acquired(store.claim(&name, &claim).await);
                let settled = store.complete(&name, claim.token, &done()).await.unwrap();
                assert_eq!(settled, Transitioned::Applied);
                assert!(store.read(&name).await.unwrap().is_some());
            }
            let count = "SELECT (SELECT count(*) FROM public.idempotency_records) * 100
                + (SELECT count(*) FROM neighbour.idempotency_records)";
            assert_eq!(database.ask::<i64>(count).await, 300);
            let mut left = Vec::new();
            for connection in &mut neighbours {
                let path: String = query_scalar("SELECT current_setting('search_path')")
                    .persistent(false)
                    .fetch_one(connection)
                    .await
                    .unwrap();
                left.push(path);
            }
            assert!(
                left.iter().all(|path| path.contains("neighbour")),
                "{left:?}"
            );
            store.close().await;
        })
        .await;
    })
    .await;
}

#[tokio::test(flavor = "multi_thread")]
async fn transaction_pooler_without_pooler_safe_is_refused() {
    with_database(async |database| {
        let refused = async || {
            let connected = PostgresStore::builder(database.pooler.clone())
                .connect()
                .await;
            let error = connected.map(drop).unwrap_err();
            assert!(told(&error).contains("pooler_safe"), "{}", told(&error));
        };
        // Alone, and beside other calls.
        refused().await;
        let neighbours = (0..8).map(|_| async {
            let mut connection: PgConnection = database.pooler.connect().await.unwrap();
            for _ in 0..50 {
                run_on(&mut connection, "SELECT pg_sleep(0.002)").await;
            }
        });
        let stores = (0..10).map(|_| refused());
        tokio::join!(join_all(neighbours), join_all(stores));
        let store = PostgresStore::builder(database.pooler.clone()).pooler_safe();
        store.connect().await.unwrap().close().await;
    })
    .await;
}

#[tokio::test(flavor = "multi_thread")]
async fn direct_connection_is_never_taken_for_a_pooler() {
    with_database(async |database| {
        let stores = (0..30).map(|_| async { database.builder().connect().await.unwrap() });
        for store in join_all(stores).await {
            store.close().await;
        }
        // With a single connection.
        with_role(database, async |role| {
            database
                .run(&format!("ALTER ROLE {role} LOGIN CONNECTION LIMIT 1"))
                .await;
            let options = database.options.clone().username(&role);
            let store = PostgresStore::builder(options).connect().await.unwrap();
            store.close().await;
        })
        .await;
    })
    .await;
}

#[tokio::test(flavor = "multi_thread")]
async fn session_pooler_is_accepted() {
    let server = Server::start().await;
    server.migrate().await;
    let pooler = Pooler::with_mode(&server, "session").await;
    let url = server.url(pooler.port());
    // More clients than the pooler has server connections.
    let stores: Vec<_> = (0..12)
        .map(|_| {
            let url = url.clone();
            tokio::spawn(async move {
                let builder = PostgresStore::builder(url.parse().unwrap());
                let store = builder.acquire_timeout(Duration::from_secs(30));
                let store = store.connect().await.unwrap();
                store.read(&name("key")).await.unwrap();
                store.close().await;
            })
        })
        .collect();
    for store in stores {
        store.await.unwrap();
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn waiter_behind_a_transaction_pooler_marks_no_record() {
    with_database(async |database| {
        let store = PostgresStore::builder(database.pooler.clone()).pooler_safe();
        let store = store.connect().await.unwrap();
        store.migrate().await.unwrap();
        let (name, claim) = (name("key"), hour());
        acquired(store.claim(&name, &claim).await);
        let seen = store.read(&name).await.unwrap().unwrap().fence;
        // No notification would arrive, so it is left to the pauses of the layer.
        let waited = timeout(Duration::from_millis(300), store.wait(&name, seen)).await;
        assert!(waited.is_err());
        let awaited = "SELECT awaited FROM idempotency_records";
        assert!(!database.ask::<bool>(awaited).await);
        store.close().await;
    })
    .await;
}
