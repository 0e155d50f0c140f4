//! The PostgreSQL store keeps every promise behind a pooler that gives each
//! transaction another server connection.

mod databases;

use databases::Database;
use tower_idempotency::{PostgresStore, conformance::Subject, conformance_tests};

/// A new database, used through the pooler.
struct Pooled(Database);

impl Pooled {
    async fn connect(&self) -> PostgresStore {
        let store = PostgresStore::builder(self.0.pooler_options()).pooler_safe();
        store.connect().await.unwrap()
    }
}

impl Subject for Pooled {
    type Store = PostgresStore;
    const ADDS_USAGE: bool = true;

    async fn store(&self) -> PostgresStore {
        self.0.create().await;
        let direct = PostgresStore::builder(self.0.options());
        let direct = direct.connect().await.unwrap();
        direct.migrate().await.unwrap();
        direct.close().await;
        self.connect().await
    }

    async fn peer(&self, _: &PostgresStore) -> PostgresStore {
        self.connect().await
    }

    async fn finish(&self, store: PostgresStore) {
        store.close().await;
        self.0.remove().await;
    }
}

conformance_tests! {
    #[tokio::test(flavor = "multi_thread", worker_threads = 4)]
    Pooled(Database::new())
}
