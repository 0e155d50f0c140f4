//! How the PostgreSQL store finds its place on a server: schemas, roles and
//! poolers.

use std::{panic::resume_unwind, time::Duration};

use tower_idempotency::{
    Fingerprint, Key, PostgresStore, RecordName, Scope, Store, StoreError,
    sqlx::{
        AssertSqlSafe, ConnectOptions as _, Connection as _, PgConnection,
        postgres::PgConnectOptions, query_scalar, raw_sql,
    },
    store::{Claim, Claimed, Completion, Filter, Release, Settlement},
};

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
                    true => store.release(&name, claim.token, Release::Freed).await,
                    false => store.complete(&name, claim.token, &done()).await,
                };
                assert_eq!(settled.unwrap(), Settlement::Applied);
            }
            store.list(Filter::Unknown, 1).await.unwrap();
            store.purge_expired(1, HOUR).await.unwrap();
        }
        for (store, other) in [(0, 1), (1, 0)] {
            let kept = stores[store].read(&name("kept")).await.unwrap().unwrap();
            let forgotten = stores[store].forget(&name("kept"), kept.fence).await;
            assert_eq!(forgotten.unwrap(), Settlement::Applied);
            let left = stores[other].read(&name("kept")).await.unwrap();
            assert_eq!(left.is_some(), store == 0);
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
        // Where the tables are, and where they would be made.
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
async fn f112_settings_left_behind_a_pooler_do_not_reach_the_store() {
    with_database(async |database| {
        let direct = database.builder().connect().await.unwrap();
        direct.migrate().await.unwrap();
        direct.close().await;
        let role = format!("neighbour_{:016x}", rand::random::<u64>());
        database
            .run(&format!(
                "CREATE SCHEMA neighbour; CREATE ROLE {role}; GRANT USAGE ON SCHEMA neighbour TO {role}"
            ))
            .await;
        let twin = database.builder().schema("neighbour").connect().await.unwrap();
        twin.migrate().await.unwrap();
        twin.close().await;
        database
            .run(&format!("GRANT ALL ON ALL TABLES IN SCHEMA neighbour TO {role}"))
            .await;
        let outcome = std::panic::AssertUnwindSafe(async {
            // All server connections that the pooler has are the neighbour's for a while.
            let mut neighbours = Vec::new();
            for _ in 0..4 {
                let mut connection: PgConnection = database.pooler.connect().await.unwrap();
                run_on(&mut connection, "BEGIN").await;
                neighbours.push(connection);
            }
            for connection in &mut neighbours {
                run_on(
                    connection,
                    &format!("SET search_path = neighbour, pg_catalog; SET ROLE {role}; COMMIT"),
                )
                .await;
            }
            let store = PostgresStore::builder(database.pooler.clone()).pooler_safe();
            let store = store.connect().await.unwrap();
            for key in ["one", "two", "three"] {
                let (name, claim) = (name(key), hour());
                acquired(store.claim(&name, &claim).await);
                let settled = store.complete(&name, claim.token, &done()).await.unwrap();
                assert_eq!(settled, Settlement::Applied);
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
            assert!(left.iter().all(|path| path.contains("neighbour")), "{left:?}");
            store.close().await;
        });
        let outcome = futures_util::FutureExt::catch_unwind(outcome).await;
        database
            .run(&format!("DROP OWNED BY {role}; DROP ROLE {role}"))
            .await;
        if let Err(panic) = outcome {
            resume_unwind(panic);
        }
    })
    .await;
}

/// A new database, directly and through the pooler.
struct Database {
    options: PgConnectOptions,
    pooler: PgConnectOptions,
}

impl Database {
    fn builder(&self) -> tower_idempotency::store::PostgresStoreBuilder {
        PostgresStore::builder(self.options.clone())
    }

    async fn run(&self, statements: &str) {
        let mut connection: PgConnection = self.options.connect().await.unwrap();
        run_on(&mut connection, statements).await;
        connection.close().await.unwrap();
    }

    async fn ask<T>(&self, question: &str) -> T
    where
        T: Send + Unpin,
        for<'r> T: tower_idempotency::sqlx::Decode<'r, tower_idempotency::sqlx::Postgres>
            + tower_idempotency::sqlx::Type<tower_idempotency::sqlx::Postgres>,
    {
        self.asks(question).await.pop().unwrap()
    }

    async fn asks<T>(&self, question: &str) -> Vec<T>
    where
        T: Send + Unpin,
        for<'r> T: tower_idempotency::sqlx::Decode<'r, tower_idempotency::sqlx::Postgres>
            + tower_idempotency::sqlx::Type<tower_idempotency::sqlx::Postgres>,
    {
        let mut connection: PgConnection = self.options.connect().await.unwrap();
        query_scalar(AssertSqlSafe(question.to_owned()))
            .fetch_all(&mut connection)
            .await
            .unwrap()
    }
}

/// Runs a test against a new database, which is dropped whatever comes of it.
async fn with_database(test: impl AsyncFnOnce(&Database)) {
    let options = |variable| -> PgConnectOptions {
        std::env::var(variable)
            .unwrap_or_else(|_| panic!("{variable} is not set; ./tests/run starts what it names"))
            .parse()
            .unwrap()
    };
    let (server, pooler) = (options("DATABASE_URL"), options("PGBOUNCER_URL"));
    let name = format!("idempotency_{:016x}", rand::random::<u64>());
    let database = Database {
        options: server.clone().database(&name),
        pooler: pooler.database(&name),
    };
    let mut connection: PgConnection = server.connect().await.unwrap();
    run_on(&mut connection, &format!("CREATE DATABASE {name}")).await;
    let outcome = std::panic::AssertUnwindSafe(test(&database));
    let outcome = futures_util::FutureExt::catch_unwind(outcome).await;
    run_on(
        &mut connection,
        &format!("DROP DATABASE {name} WITH (FORCE)"),
    )
    .await;
    if let Err(panic) = outcome {
        resume_unwind(panic);
    }
}

async fn run_on(connection: &mut PgConnection, statements: &str) {
    raw_sql(AssertSqlSafe(statements.to_owned()))
        .execute(connection)
        .await
        .unwrap();
}

fn told(error: &StoreError) -> String {
    let source = std::error::Error::source(error).map(ToString::to_string);
    format!("{error}: {}", source.unwrap_or_default())
}

fn acquired(answer: Result<Claimed, StoreError>) {
    let answer = answer.unwrap();
    assert!(matches!(answer, Claimed::Acquired(_)), "{answer:?}");
}

fn name(key: &str) -> RecordName {
    RecordName::new(Scope::single_tenant(), Key::new(key))
}

fn hour() -> Claim {
    Claim::new(Fingerprint::from_bytes([1; 40]), HOUR, HOUR)
}

fn done() -> Completion {
    Completion::new("done".into(), HOUR, Duration::ZERO)
}

const HOUR: Duration = Duration::from_secs(3600);
