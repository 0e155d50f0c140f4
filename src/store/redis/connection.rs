//! A connection to a server that is fit for records.

use std::{collections::HashSet, time::Duration};

use futures_util::future::join_all;
use redis::{
    AsyncConnectionConfig, Client, ConnectionAddr, ConnectionInfo, FromRedisValue as _, Pipeline,
    ProtocolVersion, RedisResult, TlsMode, Value,
    aio::{AsyncPushSender, ConnectionLike as _, MultiplexedConnection},
    cluster::ClusterClientBuilder,
    cluster_async::ClusterConnection,
    cluster_routing::{Route, RoutingInfo, SingleNodeRoutingInfo, SlotAddr},
    sentinel::{Sentinel, SentinelNodeConnectionInfo},
};

use super::{
    address::Address,
    error::{READ_ONLY, failure},
};
use crate::store::StoreError;

/// How to connect.
#[derive(Clone)]
pub(super) struct Connector {
    pub(super) address: Address,
    pub(super) connect_timeout: Duration,
    pub(super) response_timeout: Duration,
}

/// Clones share the connection, on which calls travel at the same time. A dropped call
/// leaves its answer to be thrown away.
#[derive(Clone)]
pub(super) enum Connection {
    Single(MultiplexedConnection),
    Cluster(ClusterConnection),
}

impl Connector {
    /// Connects to the primary or to the cluster, and inspects it.
    pub(super) async fn connect(&self) -> Result<Connection, StoreError> {
        let connection = self.open_in_time(None).await?;
        connection.inspect().await?;
        Ok(connection)
    }

    /// Connects for subscriptions, whose messages are given to `receive`.
    pub(super) async fn subscriber(
        &self,
        receive: impl AsyncPushSender,
    ) -> Result<Connection, StoreError> {
        self.open_in_time(Some(Box::new(receive))).await
    }

    async fn open_in_time(&self, receive: Option<Receive>) -> Result<Connection, StoreError> {
        let opened = tokio::time::timeout(self.connect_timeout * 2, self.open(receive)).await;
        opened.map_or_else(
            |_| {
                let late = format!("no connection within {:?}", self.connect_timeout * 2);
                Err(StoreError::timed_out().because(late))
            },
            |opened| opened.map_err(failure),
        )
    }

    async fn open(&self, receive: Option<Receive>) -> RedisResult<Connection> {
        let client = match &self.address {
            Address::Single(info) => Client::open(with_protocol(info, receive.is_some()))?,
            Address::Sentinels {
                sentinels,
                service,
                server,
            } => {
                let mut node = SentinelNodeConnectionInfo::default()
                    .set_redis_connection_info(
                        with_protocol(server, receive.is_some())
                            .redis_settings()
                            .clone(),
                    )
                    .set_tcp_settings(server.tcp_settings().clone());
                if let ConnectionAddr::TcpTls { .. } = server.addr() {
                    node = node.set_tls_mode(TlsMode::Secure);
                }
                let mut sentinel = Sentinel::build(sentinels.clone())?;
                sentinel.async_master_for(service, Some(&node)).await?
            }
            Address::Cluster(nodes) => {
                let tcp = nodes.first().map(|node| node.tcp_settings().clone());
                // Tries again for as long as the call may take.
                let mut client = ClusterClientBuilder::new(nodes.clone())
                    .connection_timeout(self.connect_timeout)
                    .response_timeout(self.response_timeout)
                    .retries(u32::MAX)
                    .retry_wait_formula(10, 1)
                    .min_retry_wait(5)
                    .max_retry_wait(15)
                    .tcp_settings(tcp.unwrap_or_default());
                if let Some(receive) = receive {
                    client = client
                        .use_protocol(ProtocolVersion::RESP3)
                        .push_sender(move |message| receive.send(message));
                }
                let client = client.build()?;
                return Ok(Connection::Cluster(client.get_async_connection().await?));
            }
        };
        let mut config = AsyncConnectionConfig::new()
            .set_connection_timeout(Some(self.connect_timeout))
            .set_response_timeout(Some(self.response_timeout));
        if let Some(receive) = receive {
            config = config.set_push_sender(move |message| receive.send(message));
        }
        let connection = client.get_multiplexed_async_connection_with_config(&config);
        Ok(Connection::Single(connection.await?))
    }
}

impl Connection {
    /// Sends commands about `key` together, and returns their answers.
    pub(super) async fn send(self, commands: &Pipeline, key: &[u8]) -> RedisResult<Vec<Value>> {
        let count = commands.len();
        let answers = match self {
            Self::Single(mut connection) => {
                connection.req_packed_commands(commands, 0, count).await?
            }
            Self::Cluster(mut connection) => {
                let route = Route::with_key(key, SlotAddr::Master);
                let node = SingleNodeRoutingInfo::SpecificNode(route);
                connection
                    .route_pipeline(commands.clone(), 0, count, node)
                    .await?
            }
        };
        let checked = answers.into_iter().map(|answer| match answer {
            Value::ServerError(error) => Err(error.into()),
            // The error of one call of a script is not that of the others.
            answer => Ok(answer),
        });
        checked.collect()
    }

    /// Subscribes to the sharded channel of `key`, over a connection that receives.
    pub(super) async fn subscribe(self, key: &[u8]) -> RedisResult<()> {
        match self {
            Self::Single(mut connection) => {
                let mut subscribe = redis::cmd("SSUBSCRIBE");
                let subscribe = subscribe.arg(key).query_async::<Value>(&mut connection);
                subscribe.await.map(drop)
            }
            Self::Cluster(mut connection) => connection.ssubscribe(key).await,
        }
    }

    pub(super) async fn unsubscribe(self, key: &[u8]) -> RedisResult<()> {
        match self {
            Self::Single(mut connection) => {
                let mut unsubscribe = redis::cmd("SUNSUBSCRIBE");
                let unsubscribe = unsubscribe.arg(key).query_async::<Value>(&mut connection);
                unsubscribe.await.map(drop)
            }
            Self::Cluster(mut connection) => connection.sunsubscribe(key).await,
        }
    }

    /// Refuses servers that would lose records, or do not know what the store asks.
    ///
    /// A primary of a cluster that does not answer is passed over: the others serve.
    pub(super) async fn inspect(&self) -> Result<(), StoreError> {
        let info = redis::cmd("INFO");
        match self.clone() {
            Self::Single(mut connection) => {
                let info = connection.send_packed_command(&info).await;
                let text = info.and_then(text).map_err(failure)?;
                if field(&text, "cluster_enabled") == "1" {
                    return Err(StoreError::unavailable(IS_CLUSTER));
                }
                check(&text)
            }
            Self::Cluster(mut connection) => {
                let mut slots = redis::cmd("CLUSTER");
                slots.arg("SLOTS");
                let any = RoutingInfo::SingleNode(SingleNodeRoutingInfo::RandomPrimary);
                let slots = connection.route_command(slots, any).await;
                let primaries = slots.and_then(primaries).map_err(failure)?;
                let asked = primaries.into_iter().map(|(host, port)| {
                    let (mut connection, info) = (connection.clone(), info.clone());
                    async move {
                        let node = SingleNodeRoutingInfo::ByAddress { host, port };
                        let info = connection.route_command(info, RoutingInfo::SingleNode(node));
                        info.await.and_then(text)
                    }
                });
                let answers = join_all(asked).await;
                answers.iter().flatten().try_for_each(|text| check(text))?;
                match answers.into_iter().reduce(Result::or) {
                    Some(Err(error)) => Err(failure(error)),
                    _ => Ok(()),
                }
            }
        }
    }
}

/// Receives messages.
type Receive = Box<dyn AsyncPushSender>;

/// Messages arrive on connections of RESP3 only.
fn with_protocol(info: &ConnectionInfo, receives: bool) -> ConnectionInfo {
    if !receives {
        return info.clone();
    }
    let settings = info.redis_settings().clone();
    info.clone()
        .set_redis_settings(settings.set_protocol(ProtocolVersion::RESP3))
}

/// The primary of each range of slots.
fn primaries(slots: Value) -> RedisResult<HashSet<(String, u16)>> {
    // First and last slot, the primary, its replicas; each node is address, port and more.
    let ranges = Vec::<Vec<Value>>::from_redis_value(slots.extract_error()?)?;
    let primaries = ranges
        .into_iter()
        .filter_map(|range| range.into_iter().nth(2));
    primaries
        .map(|node| {
            let mut node = Vec::<Value>::from_redis_value(node)?.into_iter();
            let mut part = || node.next().unwrap_or(Value::Nil);
            Ok((
                String::from_redis_value(part())?,
                u16::from_redis_value(part())?,
            ))
        })
        .collect()
}

fn text(answer: Value) -> RedisResult<String> {
    Ok(String::from_redis_value(answer.extract_error()?)?)
}

fn field<'a>(info: &'a str, name: &str) -> &'a str {
    let mut lines = info.lines().filter_map(|line| line.split_once(':'));
    let found = lines.find(|(field, _)| *field == name);
    found.map_or("", |(_, value)| value.trim())
}

fn check(info: &str) -> Result<(), StoreError> {
    let version = field(info, "redis_version");
    let major = version
        .split('.')
        .next()
        .and_then(|major| major.parse().ok());
    if major.is_none_or(|major: u32| major < 7) {
        return Err(StoreError::unavailable(format!(
            "the server is Redis {version}, and the store needs Redis 7.0 or Valkey"
        )));
    }
    if field(info, "role") == "slave" {
        return Err(StoreError::unavailable(READ_ONLY));
    }
    match field(info, "maxmemory_policy") {
        "noeviction" => Ok(()),
        policy => Err(StoreError::unavailable(format!(
            "`maxmemory-policy` of the Redis server is {policy:?}, which evicts records, so that \
             their work would be done again: set it to noeviction"
        ))),
    }
}

const IS_CLUSTER: &str =
    "the server is a node of a cluster: connect with redis+cluster://HOST:PORT";
