//! The PostgreSQL store keeps every promise, with a second pool to the same
//! database.

mod databases;

use databases::Database;
use tower_idempotency::{PostgresStore, conformance::Subject, conformance_tests};

/// A new database.
struct Postgres(Database);

impl Postgres {
    async fn connect(&self) -> PostgresStore {
        let store = PostgresStore::builder(self.0.options());
        store.connect().await.unwrap()
    }
}

impl Subject for Postgres {
    type Store = PostgresStore;
    const ADDS_USAGE: bool = true;

    async fn store(&self) -> PostgresStore {
        self.0.create().await;
        let store = self.connect().await;
        store.migrate().await.unwrap();
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

conformance_tests! {
    #[tokio::test(flavor = "multi_thread", worker_threads = 4)]
    Postgres(Database::new())
}
