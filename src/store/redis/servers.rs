//! The connections of a store.

use std::{
    iter,
    sync::atomic::{AtomicUsize, Ordering},
    time::Duration,
};

use redis::{Cmd, ErrorKind, FromRedisValue as _, ServerErrorKind, Value};

use super::{
    error::{failure, unexpected},
    link::Link,
    scripts::{Call, Script},
};
use crate::store::StoreError;

pub(super) struct Servers {
    reads: Link,
    /// The same link, or those on which writes wait for replicas.
    writes: Vec<Link>,
    next_write: AtomicUsize,
    pub(super) replicas: Option<Replicas>,
    pub(super) is_cluster: bool,
}

/// How many replicas have to acknowledge a write, and in what time.
#[derive(Clone, Copy, Debug)]
pub(super) struct Replicas {
    pub(super) count: u32,
    pub(super) timeout: Duration,
}

impl Replicas {
    /// Waits for the writes of its own connection.
    pub(super) fn wait(self) -> Cmd {
        let mut command = redis::cmd("WAIT");
        command.arg(self.count).arg(self.timeout.as_millis() as u64);
        command
    }

    pub(super) fn check(self, acknowledged: u32) -> Result<(), StoreError> {
        let Self { count, timeout } = self;
        if acknowledged >= count {
            return Ok(());
        }
        Err(StoreError::unavailable(format!(
            "{acknowledged} of {count} `replicas` acknowledged the write within {timeout:?}"
        )))
    }
}

impl Servers {
    pub(super) fn new(
        reads: Link,
        writes: Vec<Link>,
        replicas: Option<Replicas>,
        is_cluster: bool,
    ) -> Self {
        Self {
            reads,
            writes,
            next_write: AtomicUsize::new(0),
            replicas,
            is_cluster,
        }
    }

    /// Sends a command about `key` that waits for no replica.
    pub(super) async fn send(&self, command: Cmd, key: &[u8]) -> Result<Value, StoreError> {
        let mut answers = self
            .reads
            .send([command], key, true)
            .await?
            .map_err(failure)?;
        Ok(answers.pop().unwrap_or(Value::Nil))
    }

    /// Makes calls of a script with one command, and returns its answer: that of the call, or
    /// those of several.
    pub(super) async fn make(&self, script: &Script, calls: &[Call]) -> Result<Value, StoreError> {
        let key = calls.first().map_or(&[][..], |call| &call.place.key);
        let replicas = self.replicas.filter(|_| script.writes);
        let link = match script.writes {
            true => self.write_link(),
            false => &self.reads,
        };
        let is_repeatable = script.is_repeatable;
        let make = async |is_loaded| {
            let script = script.command(is_loaded, calls, self.is_cluster);
            let wait = replicas.map(Replicas::wait);
            let commands = iter::once(script).chain(wait);
            link.send(commands, key, is_repeatable).await
        };
        let mut answers = match make(true).await? {
            // Its node was restarted or promoted, or its scripts were flushed.
            Err(error) if error.kind() == ErrorKind::Server(ServerErrorKind::NoScript) => {
                make(false).await?.map_err(failure)?
            }
            answers => answers.map_err(failure)?,
        };
        if let Some(replicas) = replicas {
            let acknowledged = answers.pop().unwrap_or(Value::Nil);
            replicas.check(u32::from_redis_value(acknowledged).map_err(unexpected)?)?;
        }
        Ok(answers.pop().unwrap_or(Value::Nil))
    }

    fn write_link(&self) -> &Link {
        let next = self.next_write.fetch_add(1, Ordering::Relaxed);
        &self.writes[next % self.writes.len()]
    }
}
