//! All that a store keeps.

use tower_idempotency::sqlx::{
    AssertSqlSafe, Connection as _, PgConnection, SqliteConnection, query_scalar,
};
use tower_idempotency::store::cas::CompareAndSwap as _;

use crate::{etcd::Etcd, stores::Place};

/// The bytes of one column, of a file, or of the keys of a server.
pub(crate) struct Kept {
    pub(crate) place: String,
    pub(crate) bytes: Vec<u8>,
}

impl Kept {
    fn new(place: impl Into<String>, bytes: Vec<u8>) -> Self {
        let place = place.into();
        Self { place, bytes }
    }
}

/// Empty for the memory of a process.
pub(crate) async fn all(place: &Place) -> Vec<Kept> {
    let address = place.address();
    if let Some(path) = address.strip_prefix("sqlite:") {
        return of_sqlite(path).await;
    }
    if let Some(etcd) = address.strip_prefix("etcd://") {
        return of_etcd(etcd).await;
    }
    if let Some((url, prefix)) = address.split_once('#') {
        return of_redis(url, prefix).await;
    }
    match &*address {
        "memory" => Vec::new(),
        url => of_postgres(url).await,
    }
}

async fn of_postgres(url: &str) -> Vec<Kept> {
    let mut on = PgConnection::connect(url).await.unwrap();
    let columns = "SELECT table_name || '.' || column_name FROM information_schema.columns \
                   WHERE table_schema = 'public' ORDER BY 1";
    let columns: Vec<String> = query_scalar(columns).fetch_all(&mut on).await.unwrap();
    let mut kept = Vec::new();
    for place in columns {
        let (table, column) = place.split_once('.').unwrap();
        let text = format!("SELECT coalesce(string_agg({column}::text, ' '), '') FROM {table}");
        let text: String = query_scalar(AssertSqlSafe(text))
            .fetch_one(&mut on)
            .await
            .unwrap();
        kept.push(Kept::new(place, text.into_bytes()));
    }
    kept
}

async fn of_sqlite(path: &str) -> Vec<Kept> {
    let mut file = std::fs::read(path).unwrap();
    file.extend(std::fs::read(format!("{path}-wal")).unwrap_or_default());
    let mut kept = vec![Kept::new("file", file)];
    let mut on = SqliteConnection::connect(&format!("sqlite:{path}"))
        .await
        .unwrap();
    let columns = "SELECT m.name || '.' || c.name FROM sqlite_master m, pragma_table_info(m.name) c \
                   WHERE m.type = 'table' AND m.name NOT LIKE 'sqlite_%'";
    let columns: Vec<String> = query_scalar(columns).fetch_all(&mut on).await.unwrap();
    for place in columns {
        let (table, column) = place.split_once('.').unwrap();
        let text = format!("SELECT coalesce(group_concat(hex({column}), ' '), '') FROM {table}");
        let text: String = query_scalar(AssertSqlSafe(text))
            .fetch_one(&mut on)
            .await
            .unwrap();
        kept.push(Kept::new(place, text.into_bytes()));
    }
    kept
}

async fn of_etcd(address: &str) -> Vec<Kept> {
    let (host, prefix) = address.split_once('/').unwrap();
    let etcd = Etcd::new(&format!("http://{host}"), prefix);
    let mut bytes = Vec::new();
    for (key, found) in etcd.list("", None, 1_000).await.unwrap() {
        bytes.extend_from_slice(key.as_bytes());
        bytes.extend_from_slice(&found.value);
    }
    vec![Kept::new("keys", bytes)]
}

/// Of each node, since a cluster has its keys on several.
async fn of_redis(url: &str, prefix: &str) -> Vec<Kept> {
    let (_, nodes) = url.split_once("://").unwrap();
    let mut bytes = Vec::new();
    for node in nodes.split(',') {
        let client = redis::Client::open(format!("redis://{node}")).unwrap();
        // A server with many keys takes long to find some.
        let config = redis::AsyncConnectionConfig::new().set_response_timeout(None);
        let on = client
            .get_multiplexed_async_connection_with_config(&config)
            .await;
        let mut on = on.unwrap();
        // A replica is read too. A single server does not know the command.
        let _ = redis::cmd("READONLY").exec_async(&mut on).await;
        let pattern = format!("*{prefix}*");
        let keys = redis::cmd("KEYS").arg(pattern).query_async(&mut on).await;
        let keys: Vec<Vec<u8>> = keys.unwrap();
        for key in keys {
            let kind = redis::cmd("TYPE").arg(&key).query_async(&mut on).await;
            let kind: String = kind.unwrap();
            let mut read = match &*kind {
                "string" => redis::cmd("GET"),
                "hash" => redis::cmd("HGETALL"),
                "set" => redis::cmd("SMEMBERS"),
                "zset" => redis::cmd("ZRANGE"),
                other => panic!("a key of the type {other}"),
            };
            read.arg(&key);
            if kind == "zset" {
                read.arg(0).arg(-1);
            }
            let value = read.query_async::<redis::Value>(&mut on).await;
            bytes.extend_from_slice(&key);
            flatten(value.unwrap(), &mut bytes);
        }
    }
    vec![Kept::new("keys", bytes)]
}

fn flatten(value: redis::Value, bytes: &mut Vec<u8>) {
    match value {
        redis::Value::BulkString(string) => bytes.extend(string),
        redis::Value::Array(values) | redis::Value::Set(values) => {
            values.into_iter().for_each(|value| flatten(value, bytes));
        }
        redis::Value::Map(pairs) => {
            for (key, value) in pairs {
                flatten(key, bytes);
                flatten(value, bytes);
            }
        }
        other => bytes.extend(format!("{other:?}").into_bytes()),
    }
}
