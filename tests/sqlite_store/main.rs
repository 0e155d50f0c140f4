//! The SQLite store on real files.

#[path = "../any_store/mod.rs"]
mod any_store;
mod files;
mod guards;
mod processes;

use std::path::PathBuf;

use tower_idempotency::{
    SqliteStore,
    sqlx::{
        AssertSqlSafe, ConnectOptions as _, SqliteConnection, raw_sql, sqlite::SqliteConnectOptions,
    },
};

/// Runs a test on a store in a new file.
pub(crate) async fn with_store(test: impl AsyncFnOnce(SqliteStore)) {
    let file = File::new();
    let store = file.open().await;
    test(store.clone()).await;
    store.close().await;
}

/// A file in a new directory, removed with it.
pub(crate) struct File {
    pub(crate) directory: PathBuf,
}

impl File {
    pub(crate) fn new() -> Self {
        let name = format!("idempotency-{:016x}", rand::random::<u64>());
        let directory = std::env::temp_dir().join(name);
        std::fs::create_dir(&directory).unwrap();
        Self { directory }
    }

    pub(crate) fn path(&self) -> PathBuf {
        self.directory.join("records.db")
    }

    pub(crate) fn options(&self) -> SqliteConnectOptions {
        SqliteConnectOptions::new().filename(self.path())
    }

    pub(crate) async fn open(&self) -> SqliteStore {
        SqliteStore::open(self.path()).await.unwrap()
    }

    pub(crate) async fn connect(&self) -> SqliteConnection {
        self.options().connect().await.unwrap()
    }
}

impl Drop for File {
    fn drop(&mut self) {
        let _ = std::fs::remove_dir_all(&self.directory);
    }
}

pub(crate) async fn execute(connection: &mut SqliteConnection, statements: &str) {
    raw_sql(AssertSqlSafe(statements.to_owned()))
        .execute(connection)
        .await
        .unwrap();
}
