//! Keys that tests make on the etcd of `ETCD_URL`, and delete again.

#![allow(dead_code, reason = "not every test binary uses all of it")]

use std::env;

use tower_idempotency::store::cas::{CasStore, CompareAndSwap as _};

#[path = "../../examples/etcd_store.rs"]
mod etcd_store;

pub(crate) use etcd_store::Etcd;

/// The keys of one test.
pub(crate) struct Keys {
    url: String,
    prefix: String,
}

impl Keys {
    pub(crate) fn new() -> Self {
        Self {
            url: env::var("ETCD_URL").expect("ETCD_URL: an etcd to test on, as http://HOST:PORT"),
            prefix: format!("{:016x}/", rand::random::<u64>()),
        }
    }

    /// The store of another process.
    pub(crate) fn open(&self) -> CasStore<Etcd> {
        CasStore::new(Etcd::new(&self.url, &self.prefix))
    }

    /// Their address for the playground.
    pub(crate) fn address(&self) -> String {
        let address = self.url.trim_start_matches("http");
        format!("etcd{address}/{}", self.prefix)
    }

    pub(crate) async fn remove(&self) {
        let etcd = Etcd::new(&self.url, &self.prefix);
        loop {
            let listed = etcd.list("", None, 100).await.unwrap();
            if listed.is_empty() {
                return;
            }
            for (key, found) in listed {
                etcd.delete(&key, &found.version).await.unwrap();
            }
        }
    }
}
