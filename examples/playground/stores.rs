//! The store that `STORE` names.

use std::{error::Error, path::PathBuf};

use tower_idempotency::{
    DynStore, MemoryStore, PostgresStore, RedisStore, SqliteStore,
    sqlx::sqlite::SqliteConnectOptions, store::cas::CasStore,
};

use crate::{etcd_store::Etcd, orders::Orders};

/// A store and its address.
pub(crate) enum StoreAddress {
    Memory {
        /// The largest number of its records.
        records: Option<usize>,
    },
    Sqlite(PathBuf),
    Postgres(String),
    Etcd {
        url: String,
        /// Of its keys.
        prefix: String,
    },
    Redis {
        url: String,
        prefix: Option<String>,
    },
}

impl StoreAddress {
    pub(crate) fn parse(text: &str) -> Result<Self, String> {
        match text.split_once(':') {
            None if text == "memory" => Ok(Self::Memory { records: None }),
            Some(("memory", records)) => match records.parse() {
                Ok(records) => Ok(Self::Memory {
                    records: Some(records),
                }),
                Err(error) => Err(format!("{records:?} is no number of records: {error}")),
            },
            Some(("sqlite", path)) if !path.is_empty() => Ok(Self::Sqlite(path.into())),
            Some(("postgres" | "postgresql", _)) => Ok(Self::Postgres(text.to_owned())),
            Some(("etcd", rest)) => {
                let address = rest.trim_start_matches('/');
                let (address, prefix) = address.split_once('/').unwrap_or((address, ""));
                Ok(Self::Etcd {
                    url: format!("http://{address}"),
                    prefix: prefix.to_owned(),
                })
            }
            Some((scheme, _)) if scheme.starts_with("redis") => {
                let (url, prefix) = match text.split_once('#') {
                    Some((url, prefix)) => (url, Some(prefix.to_owned())),
                    None => (text, None),
                };
                let url = url.to_owned();
                Ok(Self::Redis { url, prefix })
            }
            _ => Err(
                "it is none of memory, memory:RECORDS, sqlite:PATH, postgres://…, redis…://…, \
                 etcd://…"
                    .to_owned(),
            ),
        }
    }
}

/// Opens the store and brings its tables up to date, with the orders beside it.
///
/// Behind a pooler the store cannot migrate; its tables must exist.
pub(crate) async fn open(
    address: &StoreAddress,
    is_pooled: bool,
    pages: Option<u32>,
) -> Result<(DynStore, Orders), Box<dyn Error>> {
    Ok(match address {
        StoreAddress::Memory { records } => {
            let store = records.map_or_else(MemoryStore::new, |records| {
                MemoryStore::bounded(records, 1 << 30)
            });
            (DynStore::new(store), Orders::Nowhere)
        }
        StoreAddress::Sqlite(path) => {
            let mut options = SqliteConnectOptions::new().filename(path);
            if let Some(pages) = pages {
                options = options.pragma("max_page_count", pages.to_string());
            }
            let store = SqliteStore::open_with(options).await?;
            let orders = Orders::in_file(store.clone(), path).await?;
            (DynStore::new(store), orders)
        }
        StoreAddress::Etcd { url, prefix } => {
            let store = CasStore::new(Etcd::new(url, prefix));
            (DynStore::new(store), Orders::Nowhere)
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
            (DynStore::new(store), orders)
        }
        StoreAddress::Redis { url, prefix } => {
            let mut builder = RedisStore::builder(url);
            if let Some(prefix) = prefix {
                builder = builder.prefix(prefix);
            }
            (DynStore::new(builder.connect().await?), Orders::Nowhere)
        }
    })
}
