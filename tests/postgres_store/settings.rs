//! The settings of sessions, against the defaults of roles and databases.

use std::time::Duration;

use tower_idempotency::{
    PostgresStore, Store,
    sqlx::{Connection as _, PgConnection, query_scalar},
};

use crate::{
    any_store::{acquired, done, hour, name},
    databases::{options, run, with_database},
    migrated,
};

#[tokio::test(flavor = "multi_thread")]
async fn a_role_s_careless_defaults_do_not_reach_the_store() {
    with_database(async |url| {
        // The defaults belong to the database, so that other tests keep theirs.
        for setting in [
            "default_transaction_isolation = 'serializable'",
            "synchronous_commit = off",
            "lock_timeout = 1",
            "statement_timeout = 1000",
            "default_transaction_read_only = on",
        ] {
            let alter = format!(
                "DO $$ BEGIN EXECUTE format('ALTER DATABASE %I SET {}', current_database()); END $$",
                setting.replace('\'', "''")
            );
            run(&url, &alter).await;
        }
        let store = migrated(PostgresStore::builder(options(&url).application_name("careless"))
            .max_connections(1)).await;
        let name = name("caller", "key");
        let claim = hour();
        acquired(store.claim(&name, &claim).await);
        // A trigger reads the settings of the store's own session.
        run(
            &url,
            "SET transaction_read_only = off;
             CREATE TABLE seen (setting text, value text);
             CREATE FUNCTION note() RETURNS trigger LANGUAGE plpgsql AS $$ BEGIN
                 INSERT INTO seen SELECT each, current_setting(each) FROM unnest(ARRAY[
                     'transaction_isolation', 'transaction_read_only', 'synchronous_commit',
                     'statement_timeout', 'lock_timeout', 'application_name']) AS each;
                 RETURN NEW; END $$;
             CREATE TRIGGER note BEFORE UPDATE ON idempotency_records
             FOR EACH ROW EXECUTE FUNCTION note()",
        )
        .await;
        let _ = store.complete(&name, claim.token, &done()).await.unwrap();
        let mut connection = PgConnection::connect(&url).await.unwrap();
        let seen: Vec<String> =
            query_scalar("SELECT setting || ' ' || value FROM seen ORDER BY setting")
                .fetch_all(&mut connection)
                .await
                .unwrap();
        assert_eq!(
            seen,
            [
                "application_name careless",
                "lock_timeout 2s",
                "statement_timeout 5s",
                "synchronous_commit on",
                "transaction_isolation read committed",
                "transaction_read_only off",
            ]
        );
        store.close().await;
    })
    .await;
}

#[tokio::test(flavor = "multi_thread")]
async fn more_durability_than_asked_for_is_kept() {
    with_database(async |url| {
        run(
            &url,
            "DO $$ BEGIN EXECUTE format('ALTER DATABASE %I SET synchronous_commit = remote_apply',
             current_database()); END $$",
        )
        .await;
        let store = PostgresStore::connect(&url).await.unwrap();
        store.migrate().await.unwrap();
        run(
            &url,
            "CREATE TABLE seen (value text);
             CREATE FUNCTION note() RETURNS trigger LANGUAGE plpgsql AS $$ BEGIN
                 INSERT INTO seen VALUES (current_setting('synchronous_commit'));
                 RETURN NEW; END $$;
             CREATE TRIGGER note BEFORE INSERT ON idempotency_records
             FOR EACH ROW EXECUTE FUNCTION note()",
        )
        .await;
        acquired(store.claim(&name("caller", "key"), &hour()).await);
        let mut connection = PgConnection::connect(&url).await.unwrap();
        let seen: String = query_scalar("SELECT value FROM seen")
            .fetch_one(&mut connection)
            .await
            .unwrap();
        assert_eq!(seen, "remote_apply");
        store.close().await;
    })
    .await;
}

#[tokio::test(flavor = "multi_thread")]
async fn longest_timeouts_are_accepted() {
    with_database(async |url| {
        let builder = PostgresStore::builder(options(&url))
            .acquire_timeout(Duration::MAX)
            .statement_timeout(Duration::MAX)
            .lock_timeout(Duration::MAX)
            .idle_in_transaction_timeout(Duration::MAX);
        let store = migrated(builder).await;
        acquired(store.claim(&name("caller", "key"), &hour()).await);
        store.close().await;
    })
    .await;
}
