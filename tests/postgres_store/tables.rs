//! The tables: shared, migrated, damaged, missing.

use std::time::Duration;

use futures_util::future::join_all;
use tower_idempotency::{
    PostgresStore, Store, StoreErrorKind,
    sqlx::{
        Connection as _, PgConnection,
        migrate::{Migration, MigrationType, Migrator},
    },
    store::{Claimed, admin::Filter},
};

use crate::{
    any_store::{acquired, applied, done, hour, name},
    databases::{run, with_database},
    told, with_store,
};

#[tokio::test(flavor = "multi_thread")]
async fn migrations_coexist_with_those_of_the_application() {
    with_store(async |store, url| {
        let own = Migrator::with_migrations(vec![Migration::new(
            20_250_101,
            "accounts".into(),
            MigrationType::Simple,
            tower_idempotency::sqlx::SqlSafeStr::into_sql_str("CREATE TABLE accounts (id bigint)"),
            false,
        )]);
        let mut connection = PgConnection::connect(&url).await.unwrap();
        for _ in 0..2 {
            own.run(&mut connection).await.unwrap();
            store.migrate().await.unwrap();
        }
    })
    .await;
}

#[tokio::test(flavor = "multi_thread")]
async fn eight_processes_may_migrate_at_once() {
    with_database(async |url| {
        let stores =
            join_all((0..8).map(|_| async { PostgresStore::connect(&url).await.unwrap() })).await;
        for migrated in join_all(stores.iter().map(PostgresStore::migrate)).await {
            migrated.unwrap();
        }
        acquired(stores[0].claim(&name("caller", "key"), &hour()).await);
        for store in stores {
            store.close().await;
        }
    })
    .await;
}

#[tokio::test(flavor = "multi_thread")]
async fn two_stores_on_one_database_share_their_records() {
    with_store(async |store, url| {
        let other = PostgresStore::connect(&url).await.unwrap();
        for round in 0..50 {
            let name = name("caller", &round.to_string());
            let (one, two) = (hour(), hour());
            let (one, two) = tokio::join!(store.claim(&name, &one), other.claim(&name, &two));
            let acquired = [one.unwrap(), two.unwrap()]
                .iter()
                .filter(|answer| matches!(answer, Claimed::Acquired(_)))
                .count();
            assert_eq!(acquired, 1);
        }
        let name = name("caller", "handed over");
        let claim = hour();
        acquired(store.claim(&name, &claim).await);
        applied(other.complete(&name, claim.token, &done()).await);
        other.close().await;
    })
    .await;
}

#[tokio::test(flavor = "multi_thread")]
async fn names_that_other_collations_merge_stay_apart() {
    with_store(async |store, _| {
        for key in ["key", "KEY", "ke\u{301}y", "k\u{e9}y", "key ", ""] {
            acquired(store.claim(&name("caller", key), &hour()).await);
        }
        acquired(store.claim(&name("callerk", "ey"), &hour()).await);
        let longest = name(&"s".repeat(511), &"k".repeat(1_024));
        acquired(store.claim(&longest, &hour()).await);
    })
    .await;
}

#[tokio::test(flavor = "multi_thread")]
async fn an_unreadable_row_is_an_error_and_never_absent() {
    with_store(async |store, url| {
        let name = name("caller", "key");
        let claim = hour();
        for damage in [
            "state = 9",
            "state = 0",
            "state = 2",
            "response = 'stray'",
            "token = 'short'",
            "operation = ''",
            "fingerprint = 'short'",
            "fence = -1",
            "attempt = -1",
            "takeovers = -1",
        ] {
            run(&url, "DROP TABLE IF EXISTS idempotency_records CASCADE").await;
            run(
                &url,
                include_str!("../../migrations/postgres/0001_records.sql"),
            )
            .await;
            // The connections have prepared statements for the old table.
            let store = PostgresStore::connect(&url).await.unwrap();
            acquired(store.claim(&name, &claim).await);
            run(&url, &format!("UPDATE idempotency_records SET {damage}")).await;
            let read = store.read(&name).await.unwrap_err();
            assert_eq!(read.kind(), StoreErrorKind::Corrupt, "{damage}");
            let claimed = store.claim(&name, &claim).await.unwrap_err();
            assert_eq!(claimed.kind(), StoreErrorKind::Corrupt, "{damage}");
            store.close().await;
        }
        store.close().await;
    })
    .await;
}

#[tokio::test(flavor = "multi_thread")]
async fn list_names_an_unreadable_row_and_has_the_others() {
    with_store(async |store, url| {
        for key in ["a", "b", "c"] {
            acquired(store.claim(&name("caller", key), &hour()).await);
        }
        run(
            &url,
            "UPDATE idempotency_records SET operation = '' WHERE key = 'b'",
        )
        .await;
        let filter = Filter::in_progress_for(Duration::ZERO);
        let page = store.list(&filter, None, 2).await.unwrap();
        assert_eq!(page.unreadable, [name("caller", "b")]);
        assert_eq!(
            (page.records.len(), page.next),
            (1, Some(name("caller", "b")))
        );
        let after = Some(name("caller", "b"));
        let page = store.list(&filter, after.as_ref(), 2).await.unwrap();
        assert_eq!((page.records.len(), page.next), (1, None));
        store.close().await;
    })
    .await;
}

#[tokio::test(flavor = "multi_thread")]
async fn f61_a_table_that_a_crash_would_empty_is_refused() {
    with_store(async |store, url| {
        run(&url, "ALTER TABLE idempotency_records SET UNLOGGED").await;
        let error = PostgresStore::connect(&url).await.unwrap_err();
        assert!(told(&error).contains("UNLOGGED"), "{}", told(&error));
        run(&url, "ALTER TABLE idempotency_records SET LOGGED").await;
        PostgresStore::connect(&url).await.unwrap().close().await;
        store.close().await;
    })
    .await;
}

#[tokio::test(flavor = "multi_thread")]
async fn errors_for_missing_table_and_wrong_address_say_the_remedy() {
    with_database(async |url| {
        let store = PostgresStore::connect(&url).await.unwrap();
        let error = store.read(&name("caller", "key")).await.unwrap_err();
        assert!(told(&error).contains("migrate"), "{}", told(&error));
        store.close().await;
        let error = PostgresStore::connect("mysql://localhost")
            .await
            .unwrap_err();
        assert_eq!(error.kind(), StoreErrorKind::Unavailable);
    })
    .await;
}
