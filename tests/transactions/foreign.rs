//! Transactions of other databases and pools.

use axum::response::IntoResponse as _;
use tower_idempotency::{
    CommitErrorKind, SqliteStore,
    sqlx::{PgPool, SqlitePool, raw_sql, sqlite::SqliteConnectOptions},
    store::RecordState,
};

use crate::{
    commit::respond,
    databases::{run, with_database},
    service::{Service, status},
    shop::{PostgresShop, Shop, SqliteShop, options, ordered, with_postgres, with_sqlite},
};

#[tokio::test(flavor = "multi_thread")]
async fn a_read_committed_transaction_of_another_pool_is_accepted() {
    with_postgres(async |shop| {
        let service = Service::new(&shop, async |run| {
            let mut transaction = run.shop.pool.begin().await.unwrap();
            PostgresShop::order(&mut transaction, &run.operation, "pen")
                .await
                .unwrap();
            run.commit(transaction, ordered("a pen"))
                .await
                .into_response()
        });
        service.post("key").await.assert_is(201, "ordered a pen");
        assert!(shop.i5_has_order("key").await);
        assert!(service.post("key").await.is_replay());
    })
    .await;
}

#[tokio::test(flavor = "multi_thread")]
async fn f60_a_transaction_of_another_isolation_is_refused_by_its_name() {
    with_postgres(async |shop| {
        let service = Service::new(&shop, async |run| {
            if run.number % 2 == 0 {
                return respond(run).await;
            }
            let heartbeat = run.operation.key().as_str().contains("heartbeat");
            let begin = match run.operation.key().as_str().contains("serializable") {
                true => "BEGIN ISOLATION LEVEL SERIALIZABLE",
                false => "BEGIN ISOLATION LEVEL REPEATABLE READ",
            };
            let mut transaction = run.shop.pool.begin_with(begin).await.unwrap();
            PostgresShop::order(&mut transaction, &run.operation, "pen")
                .await
                .unwrap();
            if heartbeat {
                // The record is newer than the snapshot of the transaction.
                run.shop
                    .execute("UPDATE idempotency_records SET lease_until = lease_until")
                    .await;
            }
            let error = run.commit(transaction, ordered("a pen")).await.unwrap_err();
            assert_eq!(error.kind(), CommitErrorKind::Isolation);
            assert!(error.to_string().contains("READ COMMITTED"), "{error}");
            error.into_response()
        });
        let keys = [
            "repeatable-read",
            "repeatable-read-heartbeat",
            "serializable",
            "serializable-heartbeat",
        ];
        for (n, key) in keys.into_iter().enumerate() {
            service.post(key).await.assert_problem(500, "rolled-back");
            assert_eq!(shop.orders().await.len(), n);
            let retry = format!("ordered by run {}", 2 * (n + 1));
            service.post(key).await.assert_is(201, &retry);
        }
    })
    .await;
}

#[tokio::test(flavor = "multi_thread")]
async fn f35_a_transaction_on_another_postgres_database_is_refused() {
    with_postgres(async |shop| {
        with_database(async |elsewhere| {
            for tables in ["", MIGRATION] {
                run(&elsewhere, "CREATE TABLE IF NOT EXISTS notes (n int)").await;
                run(&elsewhere, tables).await;
                let key = if tables.is_empty() { "without" } else { "with" };
                let pool = PgPool::connect_lazy_with(options(&elsewhere));
                let other = pool.clone();
                let service = Service::new(&shop, move |run| {
                    let other = other.clone();
                    async move {
                        if run.number == 2 {
                            return status(204);
                        }
                        let mut transaction = other.begin().await.unwrap();
                        PostgresShop::run(&mut transaction, "INSERT INTO notes VALUES (1)")
                            .await
                            .unwrap();
                        let error = run.commit(transaction, ordered("a pen")).await.unwrap_err();
                        assert_eq!(error.kind(), CommitErrorKind::OtherDatabase);
                        assert!(error.to_string().contains("store's database"), "{error}");
                        error.into_response()
                    }
                });
                service.post(key).await.assert_problem(500, "rolled-back");
                let record = shop.record(key).await.unwrap();
                assert!(matches!(record.state, RecordState::Released(_)));
                let notes: i64 =
                    tower_idempotency::sqlx::query_scalar("SELECT count(*) FROM notes")
                        .fetch_one(&pool)
                        .await
                        .unwrap();
                assert_eq!(notes, 0);
                service.post(key).await.assert_is(204, "");
                pool.close().await;
            }
        })
        .await;
    })
    .await;
}

#[tokio::test(flavor = "multi_thread")]
async fn f35_a_transaction_on_another_sqlite_file_is_refused() {
    with_sqlite(async |shop| {
        for (key, migrated) in [("without", false), ("with", true)] {
            let file = shop.file.with_file_name(format!("{key}.db"));
            if migrated {
                SqliteStore::open(&file).await.unwrap().close().await;
            }
            let create = SqliteConnectOptions::new()
                .filename(&file)
                .create_if_missing(true);
            let pool = SqlitePool::connect_lazy_with(create);
            raw_sql("CREATE TABLE notes (n INTEGER)")
                .execute(&pool)
                .await
                .unwrap();
            let other = pool.clone();
            let service = Service::new(&shop, move |run| {
                let other = other.clone();
                async move {
                    if run.number == 2 {
                        return status(204);
                    }
                    let mut transaction = other.begin_with("BEGIN IMMEDIATE").await.unwrap();
                    SqliteShop::run(&mut transaction, "INSERT INTO notes VALUES (1)")
                        .await
                        .unwrap();
                    let error = run.commit(transaction, ordered("a pen")).await.unwrap_err();
                    assert_eq!(error.kind(), CommitErrorKind::OtherDatabase);
                    error.into_response()
                }
            });
            service.post(key).await.assert_problem(500, "rolled-back");
            let notes: i64 = tower_idempotency::sqlx::query_scalar("SELECT count(*) FROM notes")
                .fetch_one(&pool)
                .await
                .unwrap();
            assert_eq!(notes, 0);
            service.post(key).await.assert_is(204, "");
            pool.close().await;
        }
    })
    .await;
}

#[tokio::test(flavor = "multi_thread")]
async fn f78_a_stale_sqlite_read_transaction_aborts_and_a_retry_runs() {
    with_sqlite(async |shop| {
        let service = Service::new(&shop, async |run| {
            if run.number == 2 {
                return respond(run).await;
            }
            let options = SqliteConnectOptions::new().filename(&run.shop.file);
            let pool = SqlitePool::connect_lazy_with(options);
            let mut transaction = pool.begin().await.unwrap();
            SqliteShop::run(&mut transaction, "SELECT count(*) FROM items")
                .await
                .unwrap();
            // After its read another connection writes.
            run.shop.lapse().await;
            let error = run.commit(transaction, ordered("a pen")).await.unwrap_err();
            assert_eq!(error.kind(), CommitErrorKind::Aborted);
            pool.close().await;
            error.into_response()
        });
        service.post("key").await.assert_problem(500, "rolled-back");
        assert!(!shop.i5_has_order("key").await);
        service.post("key").await.assert_is(201, "ordered by run 2");
        assert!(shop.i5_has_order("key").await);
    })
    .await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_transaction_of_another_pool_on_the_file_is_accepted() {
    with_sqlite(async |shop| {
        let options = SqliteConnectOptions::new().filename(&shop.file);
        let pool = SqlitePool::connect_lazy_with(options);
        let other = pool.clone();
        let service = Service::new(&shop, move |run| {
            let other = other.clone();
            async move {
                let mut transaction = other.begin_with("BEGIN IMMEDIATE").await.unwrap();
                SqliteShop::order(&mut transaction, &run.operation, "pen")
                    .await
                    .unwrap();
                run.commit(transaction, ordered("a pen"))
                    .await
                    .into_response()
            }
        });
        service.post("key").await.assert_is(201, "ordered a pen");
        assert!(shop.i5_has_order("key").await);
        pool.close().await;
    })
    .await;
}

const MIGRATION: &str = include_str!("../../migrations/postgres/0001_records.sql");
