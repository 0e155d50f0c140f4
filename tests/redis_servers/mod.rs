//! The servers of `REDIS_URL` and `REDIS_CLUSTER_URL`, shared by tests that do not
//! reconfigure them.

#![allow(dead_code, reason = "not every test binary uses all of it")]

use tower_idempotency::{RedisStore, RedisStoreBuilder};

/// A prefix of keys that no other test uses.
pub(crate) struct Keys {
    url: String,
    prefix: String,
}

impl Keys {
    /// On the single server.
    pub(crate) fn on_server() -> Self {
        Self::on(&variable("REDIS_URL"))
    }

    pub(crate) fn on_cluster() -> Self {
        Self::on(&variable("REDIS_CLUSTER_URL"))
    }

    pub(crate) fn on(url: &str) -> Self {
        Self {
            url: url.to_owned(),
            prefix: format!("test-{:016x}", rand::random::<u64>()),
        }
    }

    pub(crate) fn builder(&self) -> RedisStoreBuilder {
        RedisStore::builder(&self.url).prefix(&self.prefix)
    }

    /// For another process.
    pub(crate) fn address(&self) -> String {
        format!("{}#{}", self.url, self.prefix)
    }

    pub(crate) async fn connect(&self) -> RedisStore {
        self.builder().connect().await.unwrap()
    }
}

fn variable(name: &str) -> String {
    std::env::var(name).unwrap_or_else(|_| panic!("{name} names servers for tests, see tests/run"))
}
