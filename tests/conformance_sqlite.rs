//! The SQLite store keeps every promise, with a second store on the same file.

use std::path::PathBuf;

use tower_idempotency::{SqliteStore, conformance::Subject, conformance_tests};

/// A new file in the system's temporary folder.
struct Sqlite(PathBuf);

impl Sqlite {
    fn new() -> Self {
        let name = format!("idempotency_conformance_{:016x}.db", rand::random::<u64>());
        Self(std::env::temp_dir().join(name))
    }
}

impl Subject for Sqlite {
    type Store = SqliteStore;
    const ADDS_USAGE: bool = true;

    async fn store(&self) -> SqliteStore {
        SqliteStore::open(&self.0).await.unwrap()
    }

    async fn peer(&self, _: &SqliteStore) -> SqliteStore {
        self.store().await
    }

    async fn finish(&self, store: SqliteStore) {
        store.close().await;
        for suffix in ["", "-wal", "-shm"] {
            let mut file = self.0.clone().into_os_string();
            file.push(suffix);
            let _ = std::fs::remove_file(file);
        }
    }
}

conformance_tests! {
    #[tokio::test(flavor = "multi_thread", worker_threads = 4)]
    Sqlite::new()
}
