//! The schema of the tables.

use tower_idempotency::{
    PostgresStore, Store,
    store::{Claimed, RecordState, Release, Transitioned, admin::Filter},
};

use crate::database::{HOUR, acquired, done, hour, name, told, with_database};

#[tokio::test(flavor = "multi_thread")]
async fn two_stores_in_two_schemas_share_nothing() {
    with_database(async |database| {
        database
            .run("CREATE SCHEMA one; CREATE SCHEMA \"A\"\"n '\\o{records}\"")
            .await;
        let schemas = ["one", "A\"n '\\o{records}"];
        let mut stores = Vec::new();
        for schema in schemas {
            let store = database.builder().schema(schema).connect().await.unwrap();
            store.migrate().await.unwrap();
            stores.push(store);
        }
        for store in &stores {
            for (key, release) in [("kept", false), ("released", true)] {
                let (name, claim) = (name(key), hour());
                assert!(matches!(
                    store.claim(&name, &claim).await.unwrap(),
                    Claimed::Acquired(_)
                ));
                let settled = match release {
                    true => store.release(&name, claim.token, Release::AnyRequest).await,
                    false => store.complete(&name, claim.token, &done()).await,
                };
                assert_eq!(settled.unwrap(), Transitioned::Applied);
            }
            store.list(&Filter::unknown(), None, 1).await.unwrap();
            store.purge_expired(1, HOUR).await.unwrap();
        }
        for (store, other) in [(0, 1), (1, 0)] {
            let kept = stores[store].read(&name("kept")).await.unwrap().unwrap();
            let forgotten = stores[store].forget(&name("kept"), kept.fence).await;
            assert_eq!(forgotten.unwrap(), Transitioned::Applied);
            let left = stores[other].read(&name("kept")).await.unwrap().unwrap();
            let is_kept = matches!(left.state, RecordState::Completed { .. });
            assert_eq!(is_kept, store == 0);
        }
        let in_public: bool = database
            .ask("SELECT to_regclass('public.idempotency_records') IS NOT NULL")
            .await;
        assert!(!in_public);
        for store in stores {
            store.close().await;
        }
    })
    .await;
}

#[tokio::test(flavor = "multi_thread")]
async fn store_finds_its_schema_by_the_role_s_search_path() {
    with_database(async |database| {
        database
            .run("CREATE SCHEMA first; CREATE SCHEMA second")
            .await;
        let options = database.options.clone();
        let options = options.options([("search_path", "absent, first, second")]);
        let named = database.builder().schema("second").connect().await.unwrap();
        let fresh = PostgresStore::builder(options.clone())
            .connect()
            .await
            .unwrap();
        named.migrate().await.unwrap();
        // The schema that has the tables, and the one where they would be created.
        let found = PostgresStore::builder(options).connect().await.unwrap();
        acquired(found.claim(&name("found"), &hour()).await);
        fresh.migrate().await.unwrap();
        acquired(fresh.claim(&name("fresh"), &hour()).await);
        for (schema, key) in [("second", "found"), ("first", "fresh")] {
            let keys: Vec<String> = database
                .asks(&format!("SELECT key FROM {schema}.idempotency_records"))
                .await;
            assert_eq!(keys, [key]);
        }
        for store in [named, fresh, found] {
            store.close().await;
        }
    })
    .await;
}

#[tokio::test(flavor = "multi_thread")]
async fn store_without_a_schema_says_how_to_name_one() {
    with_database(async |database| {
        let options = database
            .options
            .clone()
            .options([("search_path", "absent")]);
        let error = PostgresStore::builder(options).connect().await.unwrap_err();
        assert!(
            told(&error).contains("PostgresStoreBuilder::schema"),
            "{}",
            told(&error)
        );
        let error = database
            .builder()
            .schema("s".repeat(64))
            .connect()
            .await
            .unwrap_err();
        assert!(told(&error).contains("got 64 bytes"), "{}", told(&error));
    })
    .await;
}

#[tokio::test(flavor = "multi_thread")]
async fn server_that_is_too_old_is_refused_with_both_versions() {
    with_database(async |database| {
        // A server that reports an old version.
        database
            .run(
                "CREATE SCHEMA old;
                 CREATE FUNCTION old.current_setting(name text, missing_ok boolean) RETURNS text
                 LANGUAGE sql AS $$ SELECT CASE name
                     WHEN 'server_version_num' THEN '110022' ELSE '11.22' END $$",
            )
            .await;
        let options = database.options.clone();
        let options = options.options([("search_path", "old,pg_catalog,public")]);
        let error = PostgresStore::builder(options).connect().await.unwrap_err();
        let told = told(&error);
        assert!(
            told.contains("11.22") && told.contains("12 or later"),
            "{told}"
        );
    })
    .await;
}
