//! The store that `STORE` names.

use tower_idempotency::{MemoryStore, SharedStore, StoreError};

/// Which store, and where.
#[derive(Clone, Debug)]
pub(crate) enum StoreAddress {
    Memory,
}

impl StoreAddress {
    pub(crate) fn parse(text: &str) -> Result<Self, String> {
        match text {
            "memory" => Ok(Self::Memory),
            _ => Err(format!("{text:?} is not memory")),
        }
    }
}

pub(crate) async fn open(address: &StoreAddress) -> Result<SharedStore, StoreError> {
    Ok(match address {
        StoreAddress::Memory => SharedStore::new(MemoryStore::new()),
    })
}
