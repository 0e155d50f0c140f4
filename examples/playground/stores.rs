//! The store that `STORE` names.

use std::{error::Error, path::PathBuf};

use tower_idempotency::{MemoryStore, PostgresStore, SharedStore, SqliteStore};

use crate::orders::Orders;

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

/// Opens the store and brings its tables up to date, with the orders beside it.
///
/// Behind a pooler the store's tables are there already: it cannot migrate.
pub(crate) async fn open(
    address: &StoreAddress,
    is_pooled: bool,
) -> Result<(SharedStore, Orders), Box<dyn Error>> {
    Ok(match address {
        StoreAddress::Memory => (SharedStore::new(MemoryStore::new()), Orders::Nowhere),
        StoreAddress::Sqlite(path) => {
            let store = SqliteStore::open(path).await?;
            let orders = Orders::in_file(store.clone(), path).await?;
            (SharedStore::new(store), orders)
        }
        StoreAddress::Postgres(url) => {
            let mut builder = PostgresStore::builder(url.parse()?);
            if is_pooled {
                builder = builder.pooler_safe();
            }
            let store = builder.connect().await?;
            if !is_pooled {
                store.migrate().await?;
            }
            let orders = Orders::on_server(store.clone(), url).await?;
            (SharedStore::new(store), orders)
        }
    })
}
