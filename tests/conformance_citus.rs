//! The PostgreSQL store keeps every promise on a table that Citus distributes by key.

#[allow(dead_code, reason = "only the comparison is used")]
mod any_store;
mod databases;

use any_store::reference::Compared;
use databases::CitusSchema;
use tower_idempotency::{PostgresStore, conformance::Subject, conformance_tests};

struct Citus(CitusSchema);

impl Citus {
    async fn connect(&self) -> PostgresStore {
        PostgresStore::connect(&self.0.url()).await.unwrap()
    }
}

impl Subject for Citus {
    type Store = PostgresStore;
    const ADDS_USAGE: bool = true;

    async fn store(&self) -> PostgresStore {
        self.0.create().await;
        let store = self.connect().await;
        store.check_schema().await.unwrap();
        store
    }

    async fn peer(&self, _: &PostgresStore) -> PostgresStore {
        self.connect().await
    }

    async fn finish(&self, store: PostgresStore) {
        store.close().await;
        self.0.remove().await;
    }
}

#[tokio::test(flavor = "multi_thread")]
#[ignore = "needs the Citus of CITUS_URL"]
async fn every_call_answers_as_the_transition_function() {
    let citus = Citus(CitusSchema::new());
    let store = citus.store().await;
    Compared::new(&store).every_transition().await;
    Compared::new(&store).random_walk(7, 300).await;
    citus.finish(store).await;
}

#[tokio::test(flavor = "multi_thread")]
#[ignore = "needs the Citus of CITUS_URL"]
async fn table_distributed_by_another_column_is_refused() {
    let schema = CitusSchema::new();
    schema.create().await;
    schema
        .run(
            "SELECT undistribute_table('idempotency_records');
             SELECT create_distributed_table('idempotency_records', 'scope')",
        )
        .await;
    let refused = PostgresStore::connect(&schema.url()).await;
    schema.remove().await;
    let error = refused.unwrap_err().to_string();
    assert!(error.contains("create_distributed_table"), "{error}");
}

conformance_tests! {
    #[cfg_attr(
        test,
        tokio::test(flavor = "multi_thread", worker_threads = 4),
        ignore = "needs the Citus of CITUS_URL"
    )]
    Citus(CitusSchema::new())
}
