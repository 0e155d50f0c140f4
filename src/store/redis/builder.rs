//! The settings of a store's connections.

use std::{fmt, sync::Arc, time::Duration};

use futures_util::future::try_join_all;

use super::{
    Inner, RedisStore,
    address::Address,
    connection::Connector,
    link::Link,
    servers::{Replicas, Servers},
    wake_ups::WakeUps,
};
use crate::store::StoreError;

impl RedisStore {
    /// Connects to the servers at `url`, with all settings at their defaults.
    ///
    /// | servers | `url` |
    /// |---|---|
    /// | one | `redis://USER:PASSWORD@HOST:PORT/DATABASE` |
    /// | a cluster | `redis+cluster://USER:PASSWORD@HOST:PORT,HOST:PORT` |
    /// | behind Sentinel | `redis+sentinel://USER:PASSWORD@HOST:PORT,HOST:PORT/SERVICE/DATABASE` |
    ///
    /// User, password and database may be left out. They are those of the servers;
    /// Sentinels are asked without a password. `rediss` in place of `redis` asks for TLS,
    /// from Sentinels too. Turn on `tokio-rustls-comp` or `tokio-native-tls-comp` of the crate
    /// `redis` for it.
    ///
    /// # Errors
    ///
    /// If `url` is none of these, or for one of the reasons of
    /// [`RedisStoreBuilder::connect`].
    pub async fn connect(url: &str) -> Result<Self, StoreError> {
        Self::builder(url).connect().await
    }

    /// Returns a builder for a store with other settings, on the servers at `url`, as
    /// [`connect`](Self::connect) takes it.
    pub fn builder(url: impl Into<String>) -> RedisStoreBuilder {
        RedisStoreBuilder {
            url: url.into(),
            prefix: "idempotency".to_owned(),
            replicas: None,
            connect_timeout: Duration::from_secs(1),
            response_timeout: Duration::from_secs(2),
        }
    }
}

/// The settings of a [`RedisStore`].
///
/// ```
/// use std::time::Duration;
/// use tower_idempotency::RedisStore;
///
/// # #[tokio::main(flavor = "current_thread")]
/// # async fn main() -> Result<(), tower_idempotency::StoreError> {
/// # let Ok(url) = std::env::var("REDIS_URL") else { return Ok(()) };
/// let store = RedisStore::builder(url)
///     .prefix("payments")
///     .response_timeout(Duration::from_millis(500))
///     .connect()
///     .await?;
/// # Ok(())
/// # }
/// ```
#[must_use = "a builder does nothing until it connects"]
pub struct RedisStoreBuilder {
    url: String,
    prefix: String,
    replicas: Option<Replicas>,
    connect_timeout: Duration,
    response_timeout: Duration,
}

impl RedisStoreBuilder {
    /// Sets what the keys of the store begin with, so that stores can share servers.
    /// Defaults to `idempotency`.
    pub fn prefix(mut self, prefix: impl Into<String>) -> Self {
        self.prefix = prefix.into();
        self
    }

    /// Makes each write wait until `count` replicas of its primary have acknowledged it,
    /// for up to `timeout`, from 1 ms to a day. Defaults to no replica.
    ///
    /// With fewer acknowledgements a call fails as unavailable. Its claim may stay, and a
    /// handler never runs for it. Give the number of all replicas of a primary: any of
    /// them may be promoted. The store then opens 8 more connections for its writes.
    pub fn replicas(mut self, count: u32, timeout: Duration) -> Self {
        let timeout = timeout.clamp(SHORTEST, LONGEST);
        self.replicas = (count > 0).then_some(Replicas { count, timeout });
        self
    }

    /// Sets how long an attempt to connect to a server may take, from 1 ms to a day.
    /// Defaults to 1 s.
    pub fn connect_timeout(mut self, timeout: Duration) -> Self {
        self.connect_timeout = timeout.clamp(SHORTEST, LONGEST);
        self
    }

    /// Sets how long a call waits for its answer before it fails as timed out, from
    /// 1 ms to a day. The time for [`replicas`](Self::replicas) comes on top. Defaults to 2 s.
    ///
    /// After two timeouts the store connects anew. In a cluster, a call is sent again
    /// within this time while a primary is replaced or a slot moves.
    pub fn response_timeout(mut self, timeout: Duration) -> Self {
        self.response_timeout = timeout.clamp(SHORTEST, LONGEST);
        self
    }

    /// Connects, and inspects each primary.
    ///
    /// # Errors
    ///
    /// - No server can be reached, or a server refuses the user.
    /// - A server is older than Redis 7.0, or the only one is a replica.
    /// - `maxmemory-policy` of a primary is not `noeviction`.
    /// - The prefix has a brace.
    pub async fn connect(self) -> Result<RedisStore, StoreError> {
        if self.prefix.contains(['{', '}']) {
            return Err(StoreError::unavailable(
                "`prefix` must have no brace, which would choose the slots of the keys",
            ));
        }
        let address = Address::parse(&self.url, self.response_timeout * 2)?;
        let is_cluster = matches!(address, Address::Cluster(_));
        let connector = |waiting| Connector {
            address: address.clone(),
            connect_timeout: self.connect_timeout,
            response_timeout: self.response_timeout + waiting,
        };
        let reads = Link::connect(connector(Duration::ZERO)).await?;
        let writes = match self.replicas {
            None => vec![reads.clone()],
            Some(Replicas { timeout, .. }) => {
                let links = (0..WAITING_CONNECTIONS).map(|_| Link::connect(connector(timeout)));
                try_join_all(links).await?
            }
        };
        let servers = Servers::new(reads, writes, self.replicas, is_cluster);
        let wake_ups = WakeUps::new(connector(Duration::ZERO));
        Ok(RedisStore(Arc::new(Inner::new(
            self.prefix,
            servers,
            wake_ups,
        ))))
    }
}

impl fmt::Debug for RedisStoreBuilder {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        // The URL may contain a password.
        f.debug_struct("RedisStoreBuilder")
            .field("prefix", &self.prefix)
            .field("replicas", &self.replicas)
            .field("connect_timeout", &self.connect_timeout)
            .field("response_timeout", &self.response_timeout)
            .finish_non_exhaustive()
    }
}

/// A call that waits on a connection delays the calls behind it.
const WAITING_CONNECTIONS: usize = 8;

const SHORTEST: Duration = Duration::from_millis(1);
/// The sum of a few of these fits each clock.
const LONGEST: Duration = Duration::from_secs(24 * 3600);
