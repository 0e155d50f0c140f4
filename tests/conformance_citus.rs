//! The PostgreSQL store keeps every promise on a table that Citus distributes by key.

mod databases;

use databases::{address, run_on};
use tower_idempotency::{
    PostgresStore,
    conformance::Subject,
    conformance_tests,
    sqlx::{ConnectOptions as _, Connection as _},
};

/// A new schema in the database of `CITUS_URL`.
struct Citus(String);

impl Citus {
    fn new() -> Self {
        Self(format!("idempotency_{:016x}", rand::random::<u64>()))
    }

    async fn connect(&self) -> PostgresStore {
        let store = PostgresStore::builder(address("CITUS_URL")).schema(&self.0);
        store.connect().await.unwrap()
    }

    async fn run(&self, statements: &str) {
        let mut connection = address("CITUS_URL").connect().await.unwrap();
        run_on(&mut connection, &statements.replace("{schema}", &self.0)).await;
        connection.close().await.unwrap();
    }
}

impl Subject for Citus {
    type Store = PostgresStore;

    async fn store(&self) -> PostgresStore {
        let store = self.connect().await;
        store.migrate().await.unwrap();
        self.run(
            "SET citus.shard_count = 4;
             SELECT create_distributed_table('{schema}.idempotency_records', 'key')",
        )
        .await;
        store.check_schema().await.unwrap();
        store
    }

    async fn peer(&self, _: &PostgresStore) -> PostgresStore {
        self.connect().await
    }

    async fn finish(&self, store: PostgresStore) {
        store.close().await;
        self.run("DROP SCHEMA {schema} CASCADE").await;
    }
}

#[tokio::test(flavor = "multi_thread")]
#[ignore = "needs the Citus of CITUS_URL"]
async fn table_distributed_by_another_column_is_refused() {
    let citus = Citus::new();
    let store = citus.connect().await;
    store.migrate().await.unwrap();
    store.close().await;
    citus
        .run("SELECT create_distributed_table('{schema}.idempotency_records', 'scope')")
        .await;
    let store = PostgresStore::builder(address("CITUS_URL")).schema(&citus.0);
    let error = store.connect().await.unwrap_err().to_string();
    assert!(error.contains("create_distributed_table"), "{error}");
    citus.run("DROP SCHEMA {schema} CASCADE").await;
}

conformance_tests! {
    #[cfg_attr(
        test,
        tokio::test(flavor = "multi_thread", worker_threads = 4),
        ignore = "needs the Citus of CITUS_URL"
    )]
    Citus::new()
}
