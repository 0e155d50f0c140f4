//! The Redis store on real servers that fail, fill up and move.

mod addresses;
#[allow(
    dead_code,
    reason = "no sweep removes what the server removes by itself"
)]
#[path = "../any_store/mod.rs"]
mod any_store;
mod calls;
mod evictions;
mod failovers;
mod guards;
mod index;
#[path = "../redis_servers/mod.rs"]
mod redis_servers;
#[path = "../ports/mod.rs"]
mod ports;
#[path = "../redis_servers/nodes.rs"]
mod redis_nodes;
mod rights;
mod slots;
mod times;
mod usage;
mod wake_ups;

use redis::Value;
use tower_idempotency::{RedisStore, store::RecordName};

use crate::redis_nodes::{Node, shard_of};

/// The key of a name's record, as the documentation of the store gives it.
pub(crate) fn key(name: &RecordName) -> String {
    let joined = format!("{}\0{}", name.scope().as_str(), name.key().as_str());
    format!("{}:{joined}", index(name))
}

/// The key of the sorted set that has the open claims of a name.
pub(crate) fn index(name: &RecordName) -> String {
    let group = group(name.scope().as_str(), name.key().as_str());
    format!("idempotency:{{{group:03x}}}")
}

pub(crate) fn group(scope: &str, key: &str) -> u32 {
    crc32fast::hash(format!("{scope}\0{key}").as_bytes()) % 1024
}

/// The slot of a name.
pub(crate) async fn slot(node: &Node, name: &RecordName) -> u16 {
    let mut command = redis::cmd("CLUSTER");
    command.arg("KEYSLOT").arg(key(name));
    node.command(&command).await.unwrap()
}

/// Returns names whose records are in this shard of three.
pub(crate) async fn names_in(node: &Node, shard: usize, count: usize) -> Vec<RecordName> {
    let mut names = Vec::new();
    for number in 0.. {
        let name = any_store::name("caller", &format!("key {number}"));
        if shard_of(slot(node, &name).await) == shard {
            names.push(name);
        }
        if names.len() == count {
            break;
        }
    }
    names
}

pub(crate) async fn connect(url: &str) -> RedisStore {
    RedisStore::connect(url).await.unwrap()
}

/// Asks a node that must answer.
pub(crate) async fn asked(node: &Node, command: &redis::Cmd) -> Value {
    node.command(command).await.unwrap()
}
