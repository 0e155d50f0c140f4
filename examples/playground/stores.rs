//! The store that `STORE` names.

use std::path::PathBuf;

use tower_idempotency::{MemoryStore, PostgresStore, SharedStore, SqliteStore, StoreError};

/// Which store, and where.
pub(crate) enum StoreAddress {
    Memory,
    Sqlite(PathBuf),
    Postgres(String),
}

impl StoreAddress {
    pub(crate) fn parse(text: &str) -> Result<Self, String> {
        match text.split_once(':') {
            None if text == "memory" => Ok(Self::Memory),
            Some(("sqlite", path)) if !path.is_empty() => Ok(Self::Sqlite(path.into())),
            Some(("postgres" | "postgresql", _)) => Ok(Self::Postgres(text.to_owned())),
            _ => Err("it is none of memory, sqlite:PATH, postgres://…".to_owned()),
        }
    }
}

/// Opens the store and brings its tables up to date.
pub(crate) async fn open(address: &StoreAddress) -> Result<SharedStore, StoreError> {
    Ok(match address {
        StoreAddress::Memory => SharedStore::new(MemoryStore::new()),
        StoreAddress::Sqlite(path) => SharedStore::new(SqliteStore::open(path).await?),
        StoreAddress::Postgres(url) => {
            let store = PostgresStore::connect(url).await?;
            store.migrate().await?;
            SharedStore::new(store)
        }
    })
}
