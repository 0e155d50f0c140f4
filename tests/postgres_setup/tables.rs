//! Creating the tables, checking them, and adopting those of the application.

use futures_util::future::join_all;
use tower_idempotency::{PostgresStore, Store};

use crate::{
    database::{acquired, hour, name, with_database, with_role},
    log::Log,
};

#[tokio::test]
async fn migrate_is_silent_when_nothing_is_due() {
    with_database(async |database| {
        let log = Log::default();
        let _guard = log.keep();
        database.run("DROP TABLE IF EXISTS absent").await;
        assert!(log.take().contains("absent"), "notices are not captured");
        let store = database.builder().schema("app").connect().await.unwrap();
        for _ in 0..3 {
            store.migrate().await.unwrap();
        }
        let other = database.builder().connect().await.unwrap();
        other.migrate().await.unwrap();
        assert_eq!(log.take(), "");
        for store in [store, other] {
            store.close().await;
        }
    })
    .await;
}

#[tokio::test(flavor = "multi_thread")]
async fn migrate_makes_a_named_schema_from_many_processes_and_poolers() {
    with_database(async |database| {
        let stores = (0..8).map(|number| async move {
            let builder = match number % 2 {
                0 => database.builder(),
                _ => PostgresStore::builder(database.pooler.clone()).pooler_safe(),
            };
            let store = builder.schema("App").connect().await.unwrap();
            store.migrate().await.unwrap();
            store.check_schema().await.unwrap();
            store
        });
        for store in join_all(stores).await {
            store.close().await;
        }
        let applied: i64 = database
            .ask("SELECT count(*) FROM \"App\"._idempotency_migrations")
            .await;
        assert_eq!(applied, 2);
    })
    .await;
}

#[tokio::test(flavor = "multi_thread")]
async fn migrate_adopts_tables_of_the_application_s_migrations() {
    with_database(async |database| {
        let store = database.builder().connect().await.unwrap();
        database.run(&store.schema_sql()).await;
        acquired(store.claim(&name("before"), &hour()).await);
        store.check_schema().await.unwrap();
        for _ in 0..2 {
            store.migrate().await.unwrap();
        }
        let applied: i64 = database
            .ask("SELECT count(*) FROM _idempotency_migrations")
            .await;
        assert_eq!(applied, 2);
        acquired(store.claim(&name("after"), &hour()).await);
        store.close().await;
    })
    .await;
}

#[tokio::test(flavor = "multi_thread")]
async fn migrate_needs_no_right_to_make_tables_that_are_there() {
    with_database(async |database| {
        let owner = database.builder().connect().await.unwrap();
        with_role(database, async |role| {
            database.run(&format!("ALTER ROLE {role} LOGIN")).await;
            let options = database.options.clone().username(&role);
            let store = PostgresStore::builder(options).connect().await.unwrap();
            let error = store.migrate().await.unwrap_err().to_string();
            for part in ["42501", "schema \"public\"", "schema_sql", "grants_for"] {
                assert!(error.contains(part), "{error}");
            }
            // Created by the application, then migrated by the store, which may
            // not read the ledger.
            for made_by_store in [false, true] {
                if made_by_store {
                    owner.migrate().await.unwrap();
                } else {
                    database.run(&owner.schema_sql()).await;
                }
                store.migrate().await.unwrap();
            }
            let grant = format!("GRANT SELECT ON _idempotency_migrations TO {role}");
            database.run(&grant).await;
            store.migrate().await.unwrap();
            // The tables differ from the ledger, which is not read again.
            database
                .run("ALTER TABLE idempotency_records DROP COLUMN response")
                .await;
            store.migrate().await.unwrap();
            let error = store.check_schema().await.unwrap_err().to_string();
            assert!(error.contains("column response"), "{error}");
            store.close().await;
        })
        .await;
        owner.close().await;
    })
    .await;
}

#[tokio::test(flavor = "multi_thread")]
async fn migrate_refuses_tables_of_later_versions_and_other_origin() {
    with_database(async |database| {
        let store = database.builder().connect().await.unwrap();
        database
            .run("CREATE TABLE idempotency_records (scope text)")
            .await;
        let error = store.migrate().await.unwrap_err().to_string();
        assert!(error.contains("column key"), "{error}");
        database.run("DROP TABLE idempotency_records").await;
        store.migrate().await.unwrap();
        database
            .run(
                "INSERT INTO _idempotency_migrations
                 SELECT 7, 'later', now(), true, checksum, 0 FROM _idempotency_migrations
                 WHERE version = 1",
            )
            .await;
        let error = store.migrate().await.unwrap_err().to_string();
        assert!(error.contains("version 7"), "{error}");
        store.close().await;
    })
    .await;
}

#[tokio::test(flavor = "multi_thread")]
async fn check_schema_names_each_difference() {
    with_database(async |database| {
        let store = database.builder().schema("app").connect().await.unwrap();
        let error = store.check_schema().await.unwrap_err().to_string();
        for part in [
            "table \"app\".idempotency_records does not exist",
            "call `PostgresStore::migrate`",
        ] {
            assert!(error.contains(part), "{error}");
        }
        for (damage, says) in DAMAGES {
            database
                .run("DROP SCHEMA IF EXISTS app CASCADE; CREATE SCHEMA app")
                .await;
            database.run(&store.schema_sql()).await;
            store.check_schema().await.unwrap();
            database.run(damage).await;
            let error = store.check_schema().await.unwrap_err().to_string();
            assert!(error.contains(says), "{error}");
        }
        store.close().await;
    })
    .await;
}

#[tokio::test(flavor = "multi_thread")]
async fn check_schema_names_each_missing_privilege() {
    with_database(async |database| {
        let owner = database.builder().schema("app").connect().await.unwrap();
        owner.migrate().await.unwrap();
        with_role(database, async |role| {
            database.run(&format!("ALTER ROLE {role} LOGIN")).await;
            let options = database.options.clone().username(&role);
            let store = PostgresStore::builder(options).schema("app");
            let store = store.connect().await.unwrap();
            for (revoked, says) in [
                ("USAGE ON SCHEMA app", "schema app (USAGE)"),
                (
                    "DELETE ON app.idempotency_records",
                    "table app.idempotency_records (DELETE)",
                ),
            ] {
                database.run(&owner.grants_for(&role)).await;
                store.check_schema().await.unwrap();
                database.run(&format!("REVOKE {revoked} FROM {role}")).await;
                let error = store.check_schema().await.unwrap_err().to_string();
                assert!(error.contains(says) && error.contains("GRANT"), "{error}");
            }
            database
                .run("ALTER TABLE app.idempotency_records DROP COLUMN attempt")
                .await;
            let error = store.check_schema().await.unwrap_err().to_string();
            let privilege = "table app.idempotency_records (DELETE)";
            for part in ["column attempt", privilege, "schema_sql", "GRANT"] {
                assert!(error.contains(part), "{error}");
            }
            database.run(&owner.grants_for(&role)).await;
            database
                .run("ALTER TABLE app.idempotency_records ENABLE ROW LEVEL SECURITY")
                .await;
            let error = store.check_schema().await.unwrap_err().to_string();
            assert!(error.contains("row-level security"), "{error}");
            store.close().await;
        })
        .await;
        owner.close().await;
    })
    .await;
}

/// Changes of the tables, and the message of the check for each.
const DAMAGES: [(&str, &str); 14] = [
    (
        "ALTER TABLE app.idempotency_records DROP COLUMN takeovers",
        "column takeovers of table \"app\".idempotency_records does not exist",
    ),
    (
        "ALTER TABLE app.idempotency_records ALTER fence TYPE integer",
        "column fence of table \"app\".idempotency_records is integer, not bigint",
    ),
    (
        "ALTER TABLE app.idempotency_records ALTER key TYPE text COLLATE \"default\"",
        "column key of table \"app\".idempotency_records is not COLLATE",
    ),
    (
        "ALTER TABLE app.idempotency_records ALTER token DROP NOT NULL",
        "column token of table \"app\".idempotency_records is not NOT NULL",
    ),
    (
        "ALTER TABLE app.idempotency_records ADD extra text NOT NULL",
        "column \"extra\" of table \"app\".idempotency_records is NOT NULL without a default",
    ),
    (
        "ALTER TABLE app.idempotency_records DROP CONSTRAINT idempotency_records_pkey",
        "no PRIMARY KEY (scope, key)",
    ),
    (
        "DROP TABLE app.idempotency_usage",
        "table \"app\".idempotency_usage does not exist",
    ),
    (
        "ALTER TABLE app.idempotency_usage DROP COLUMN bytes",
        "column bytes of table \"app\".idempotency_usage does not exist",
    ),
    (
        "ALTER TABLE app.idempotency_usage ALTER records TYPE integer",
        "column records of table \"app\".idempotency_usage is integer, not bigint",
    ),
    (
        "ALTER TABLE app.idempotency_usage DROP CONSTRAINT idempotency_usage_pkey",
        "has no PRIMARY KEY (scope, expires_at)",
    ),
    (
        "DROP INDEX app.idempotency_records_expires_at",
        "no index on (expires_at)",
    ),
    (
        "DROP INDEX app.idempotency_records_unknown",
        "no index on (scope, key) WHERE unknown_since IS NOT NULL",
    ),
    (
        "ALTER TABLE app.idempotency_records SET UNLOGGED",
        "UNLOGGED",
    ),
    (
        "ALTER TABLE app.idempotency_records RENAME TO old;
         CREATE VIEW app.idempotency_records AS SELECT * FROM app.old",
        "is no table",
    ),
];
