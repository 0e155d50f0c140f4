//! Where a record is, and the entries that the index has of it.

use std::time::{Duration, UNIX_EPOCH};

use redis::Cmd;

use crate::{key::RecordName, store::Token};

/// Where a record and its entries are.
pub(super) struct Place {
    pub(super) key: Vec<u8>,
    pub(super) index: Vec<u8>,
    name: Vec<u8>,
}

impl Place {
    pub(super) fn of(prefix: &str, name: &RecordName) -> Self {
        let name = joined(name);
        let index = index(prefix, group(name.as_bytes()));
        Self {
            key: [&index, ":", &name].concat().into_bytes(),
            index: index.into_bytes(),
            name: name.into_bytes(),
        }
    }

    /// Adds the entry of a claim, as of this time.
    pub(super) fn add(&self, token: Token, added: Duration) -> Cmd {
        let mut command = redis::cmd("ZADD");
        command
            .arg(&self.index)
            .arg(added.as_micros() as u64)
            .arg(self.entry(token));
        command
    }

    /// Removes the entry of a claim, unless it was added again since this time: the token
    /// that one call did not get may get the next one.
    pub(super) fn remove_added(&self, token: Token, added: Duration) -> Cmd {
        let mut command = redis::cmd("EVAL");
        command
            .arg(REMOVE_ADDED)
            .arg(1)
            .arg(&self.index)
            .arg(self.entry(token))
            .arg(added.as_micros() as u64);
        command
    }

    /// Removes the entry of a claim whose outcome is known.
    pub(super) fn remove(&self, token: Token) -> Cmd {
        let mut command = redis::cmd("ZREM");
        command.arg(&self.index).arg(self.entry(token));
        command
    }

    fn entry(&self, token: Token) -> Vec<u8> {
        [token.as_bytes(), &*self.name].concat()
    }
}

/// No name has a NUL.
pub(super) fn joined(name: &RecordName) -> String {
    [name.scope().as_str(), name.key().as_str()].join("\0")
}

pub(super) fn group(name: &[u8]) -> u16 {
    (crc32fast::hash(name) % u32::from(GROUPS)) as u16
}

/// The braces choose the slot, so that those of a name do not.
pub(super) fn index(prefix: &str, group: u16) -> String {
    format!("{prefix}:{{{group:03x}}}")
}

pub(super) fn now() -> Duration {
    UNIX_EPOCH.elapsed().unwrap_or_default()
}

pub(super) const GROUPS: u16 = 1024;

const REMOVE_ADDED: &str = "\
#!lua flags=allow-oom
if tonumber(redis.call('ZSCORE', KEYS[1], ARGV[1]) or -1) == tonumber(ARGV[2]) then
    redis.call('ZREM', KEYS[1], ARGV[1])
end";
