//! The stores that the tests run on.

use std::path::PathBuf;

use tower_idempotency::{PostgresStore, SqliteStore};

use crate::databases::{options, with_database};

/// Runs each test with each store: `mod memory`, `mod sqlite` and `mod postgres`.
macro_rules! on_each_store {
    ($($name:ident;)*) => {
        mod memory {
            $(#[tokio::test(flavor = "multi_thread")]
            async fn $name() {
                super::$name(tower_idempotency::MemoryStore::new()).await;
            })*
        }

        mod sqlite {
            $(#[tokio::test(flavor = "multi_thread")]
            async fn $name() {
                crate::stores::with_sqlite(async |store, _| super::$name(store).await).await;
            })*
        }

        mod postgres {
            $(#[tokio::test(flavor = "multi_thread")]
            async fn $name() {
                crate::stores::with_postgres(async |store, _| super::$name(store).await).await;
            })*
        }
    };
}

pub(crate) use on_each_store;

/// Runs a test with a store in a new file, and the path of the file.
pub(crate) async fn with_sqlite(test: impl AsyncFnOnce(SqliteStore, String)) {
    let directory = Directory::new();
    let path = directory.0.join("records.db");
    let store = SqliteStore::open(&path).await.unwrap();
    test(store.clone(), path.display().to_string()).await;
    store.close().await;
}

/// Runs a test with a store on a new database, and the URL of the database.
pub(crate) async fn with_postgres(test: impl AsyncFnOnce(PostgresStore, String)) {
    with_database(async |url| {
        let store = PostgresStore::builder(options(&url))
            .connect()
            .await
            .unwrap();
        store.migrate().await.unwrap();
        test(store.clone(), url).await;
        store.close().await;
    })
    .await;
}

/// Removed when it is dropped.
struct Directory(PathBuf);

impl Directory {
    fn new() -> Self {
        let name = format!("guard-{:016x}", rand::random::<u64>());
        let directory = std::env::temp_dir().join(name);
        std::fs::create_dir(&directory).unwrap();
        Self(directory)
    }
}

impl Drop for Directory {
    fn drop(&mut self) {
        let _ = std::fs::remove_dir_all(&self.0);
    }
}
