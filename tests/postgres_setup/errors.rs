//! The messages of the store's errors.

use std::time::Duration;

use tower_idempotency::{
    PostgresStore, Store, StoreErrorKind,
    sqlx::{ConnectOptions as _, Connection as _, PgConnection},
    store::{PostgresEngine, admin::Filter},
};

use crate::{
    database::{Database, HOUR, acquired, hour, name, run_on, with_database, with_role},
    log::Log,
    proxy::Proxy,
};

#[tokio::test(flavor = "multi_thread")]
async fn f110_missing_tables_are_named_with_their_remedy() {
    with_database(async |database| {
        let store = database.builder().schema("app").connect().await.unwrap();
        for error in [
            store.claim(&name("key"), &hour()).await.unwrap_err(),
            store.read(&name("key")).await.unwrap_err(),
        ] {
            let told = error.to_string();
            for part in ["app.idempotency_records", "42P01", "migrate", "schema_sql"] {
                assert!(told.contains(part), "{told}");
            }
        }
        store.close().await;
    })
    .await;
}

#[tokio::test(flavor = "multi_thread")]
async fn f110_missing_privileges_are_answered_with_grants_that_suffice() {
    with_database(async |database| {
        let owner = database.builder().schema("a\"pp").connect().await.unwrap();
        owner.migrate().await.unwrap();
        with_role(database, async |role| {
            database.run(&format!("ALTER ROLE {role} LOGIN")).await;
            let options = database.options.clone().username(&role);
            let store = PostgresStore::builder(options).schema("a\"pp");
            let store = store.connect().await.unwrap();
            let error = store.claim(&name("key"), &hour()).await.unwrap_err();
            let told = error.to_string();
            assert!(told.contains("42501"), "{told}");
            let grants = &told[told.find("GRANT").unwrap()..];
            assert_eq!(
                grants.replace("; GRANT", ";\nGRANT"),
                store.grants_for(&role)
            );
            database.run(grants).await;
            acquired(store.claim(&name("key"), &hour()).await);
            store.check_schema().await.unwrap();
            store.migrate().await.unwrap();
            store.close().await;
        })
        .await;
        owner.close().await;
    })
    .await;
}

#[tokio::test(flavor = "multi_thread")]
async fn other_engines_are_refused_by_their_names() {
    with_database(async |database| {
        for (engine, version) in [
            (
                "CockroachDB",
                "CockroachDB CCL v24.1.0 (x86_64-pc-linux-gnu)",
            ),
            (
                "YugabyteDB",
                "PostgreSQL 11.2-YB-2.20.1.0-b0 on x86_64-pc-linux-gnu",
            ),
        ] {
            let sets = format!(
                "CREATE SCHEMA IF NOT EXISTS engine;
                 CREATE OR REPLACE FUNCTION engine.version() RETURNS text LANGUAGE sql
                     AS $$ SELECT '{version}' $$;
                 ALTER DATABASE {} SET search_path = engine, pg_catalog, public",
                database.options.get_database().unwrap(),
            );
            database.run(&sets).await;
            let refused = database.builder().connect().await.unwrap_err();
            let told = refused.to_string();
            assert!(told.contains(&format!("the server is {engine}")), "{told}");
            assert!(told.contains("`PostgresStoreBuilder::engine`"), "{told}");
            let engine = database.builder().engine(PostgresEngine::Citus);
            engine.connect().await.unwrap().close().await;
        }
    })
    .await;
}

#[tokio::test(flavor = "multi_thread")]
async fn f110_connection_errors_name_their_remedy() {
    with_database(async |database| {
        let no_database = database.options.clone().database("no such database");
        let no_role = database.options.clone().username("no such role");
        let nowhere = database.options.clone().host("127.0.0.1").port(1);
        for (options, says) in [
            (no_database, "create the database"),
            (no_role, "pg_hba.conf"),
            (nowhere, "127.0.0.1:1"),
        ] {
            let error = PostgresStore::builder(options).connect().await.unwrap_err();
            assert_eq!(error.kind(), StoreErrorKind::Unavailable);
            assert!(error.to_string().contains(says), "{error}");
            let below = std::error::Error::source(&error);
            assert!(below.is_none(), "{below:?} stands in the text already");
        }
    })
    .await;
}

#[tokio::test(flavor = "multi_thread")]
async fn f110_a_server_out_of_connections_is_retried_and_named() {
    with_database(async |database| {
        with_role(database, async |role| {
            database
                .run(&format!("ALTER ROLE {role} LOGIN CONNECTION LIMIT 2"))
                .await;
            let options = database.options.clone().username(&role);
            let builder = PostgresStore::builder(options.clone());
            let builder = builder.acquire_timeout(Duration::from_secs(2));
            let store = builder.connect().await.unwrap();
            let mut others = Vec::new();
            while let Ok(other) = options.connect().await {
                others.push(other);
                assert!(others.len() < 10);
            }
            let name = name("key");
            let error = store.read(&name).await.unwrap_err();
            assert!(error.to_string().contains("max_connections"), "{error}");
            let reading = store.read(&name);
            let making_room = async {
                tokio::time::sleep(Duration::from_millis(200)).await;
                for other in others {
                    other.close().await.unwrap();
                }
            };
            let (read, ()) = tokio::join!(reading, making_room);
            let error = read.unwrap_err();
            assert!(error.to_string().contains("42P01"), "{error}");
            store.close().await;
        })
        .await;
    })
    .await;
}

#[tokio::test]
async fn f110_failed_attempt_to_connect_is_logged() {
    with_database(async |database| {
        let proxy = Proxy::to(database.options.get_port()).await;
        let options = database.options.clone().port(proxy.port());
        let store = PostgresStore::builder(options).connect().await.unwrap();
        store.migrate().await.unwrap();
        let address = format!("127.0.0.1:{}", proxy.port());
        drop(proxy);
        let log = Log::default();
        let _guard = log.keep();
        for _ in 0..20 {
            store.read(&name("key")).await.unwrap_err();
        }
        let logged = log.take();
        assert_eq!(
            logged.matches("cannot open a connection").count(),
            1,
            "{logged}"
        );
        assert!(logged.contains(&address), "{logged}");
        store.close().await;
    })
    .await;
}

#[tokio::test(flavor = "multi_thread")]
async fn f110_timeouts_name_the_setting() {
    with_database(async |database| {
        let builder = database.builder().lock_timeout(Duration::from_millis(100));
        let store = builder.connect().await.unwrap();
        store.migrate().await.unwrap();
        let (name, claim) = (name("key"), hour());
        acquired(store.claim(&name, &claim).await);
        let mut other: PgConnection = database.options.connect().await.unwrap();
        let row = "BEGIN; SELECT FROM idempotency_records FOR UPDATE";
        let table = "LOCK TABLE idempotency_records";
        for (lock, is_of_a_row) in [(row, true), (table, false)] {
            run_on(&mut other, lock).await;
            let error = match is_of_a_row {
                true => store.renew(&name, claim.token, HOUR).await.unwrap_err(),
                false => store.read(&name).await.unwrap_err(),
            };
            assert_eq!(error.kind(), StoreErrorKind::TimedOut);
            assert!(error.to_string().contains("lock_timeout"), "{error}");
        }
        other.close().await.unwrap();
        store.close().await;
    })
    .await;
}

#[tokio::test(flavor = "multi_thread")]
async fn sweep_has_a_connection_while_a_list_takes_long() {
    with_database(async |database| {
        let store = database
            .builder()
            .acquire_timeout(Duration::from_millis(800))
            .lock_timeout(Duration::from_secs(120))
            .statement_timeout(Duration::from_secs(120))
            .connect()
            .await
            .unwrap();
        store.migrate().await.unwrap();
        let mut other: PgConnection = database.options.connect().await.unwrap();
        run_on(&mut other, "BEGIN; LOCK TABLE idempotency_records").await;
        let (lists, sweeps) = (store.clone(), store.clone());
        let listing = tokio::spawn(async move { lists.list(&Filter::unknown(), None, 1).await });
        wait_for_locks(database, 1, || false).await;
        let sweeping = tokio::spawn(async move { sweeps.purge_expired(1, HOUR).await });
        wait_for_locks(database, 2, || sweeping.is_finished()).await;
        let error = store.check_schema().await.unwrap_err();
        for part in [
            "`acquire_timeout` (800ms)",
            "2 for lists, sweeps and checks",
        ] {
            assert!(error.to_string().contains(part), "{error}");
        }
        other.close().await.unwrap();
        listing.await.unwrap().unwrap();
        sweeping.await.unwrap().unwrap();
        store.check_schema().await.unwrap();
        store.close().await;
    })
    .await;
}

/// Waits until `waiting` statements wait for a lock, or `is_over` holds.
async fn wait_for_locks(database: &Database, waiting: i64, is_over: impl Fn() -> bool) {
    let question = "SELECT count(*) FROM pg_stat_activity
        WHERE datname = current_database() AND wait_event_type = 'Lock'";
    while !is_over() && database.ask::<i64>(question).await < waiting {
        tokio::time::sleep(Duration::from_millis(20)).await;
    }
}
