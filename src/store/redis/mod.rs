//! A store of records in Redis or Valkey.

mod address;
pub(super) mod builder;
mod connection;
mod error;
mod index;
mod link;
mod scripts;
mod wake_ups;

use std::{
    fmt, iter,
    sync::{
        Arc,
        atomic::{AtomicUsize, Ordering},
    },
    time::Duration,
};

use bytes::Bytes;
use redis::{Cmd, ErrorKind, FromRedisValue as _, ServerErrorKind, Value};

use self::{
    builder::Replicas,
    error::{failure, unexpected},
    index::Place,
    link::Link,
    scripts::Script,
    wake_ups::WakeUps,
};
use super::{
    Claim, Claimed, FencedTransition, Grant, OwnerTransition, Purged, ReclaimAs, Record,
    RecordState, Release, Store, StoreError, Token, Transition, Transitioned,
    admin::{Filter, Page, Resolution},
    transition::{FORGOTTEN_RETENTION, StoredRecord},
};
use crate::{Fence, OperationId, scope::RecordName};

/// A store of records in Redis or Valkey, which many processes can share: on one server,
/// behind Sentinel, or on a cluster.
///
/// # Guarantees
///
/// Each call is one script on one record, with the clock of the server. Calls go to
/// primaries only, and a repeated call returns the lost answer. So of all simultaneous
/// claims of a key exactly one is acquired, **as long as no primary loses a write that it
/// has acknowledged**.
///
/// No record in progress and no unknown one is removed by time. Completed and released
/// records are removed by the server an hour after they have expired. A server that evicts
/// records is refused: the store demands `maxmemory-policy noeviction` when it connects,
/// and looks again every 2 seconds. At `maxmemory`, claims fail as full, and work that was
/// done is still recorded.
///
/// # What can be lost
///
/// A primary acknowledges a write before its replicas have it, and before it is on disk.
/// After a failover the new primary may lack the last writes. A lost claim lets a second
/// request run; a lost completion leaves the claim, whose outcome is unknown.
///
/// - Set [`replicas`](crate::RedisStoreBuilder::replicas) to the number of replicas that each
///   primary has. A write then returns after all of them have it.
/// - Turn on `appendonly`. With `appendfsync always` a crash of the server loses nothing,
///   and with `everysec` a crash of the host loses up to a second.
/// - In a cluster, set `cluster-require-full-coverage no`. Otherwise one lost shard stops
///   all of them.
///
/// If money depends on it, prefer [`PostgresStore`](crate::PostgresStore): it loses nothing
/// that it has acknowledged, and commits the work together with its record.
///
/// # Limits
///
/// The store needs Redis 7.0 or later, or Valkey. If the server's clock is set back, leases
/// and retention last longer. If it is set forward, leases lapse early.
///
/// A list reads an index of the records in progress and the unknown ones, and looks at up
/// to 2,000 of them a page. [`purge_expired`](Store::purge_expired) reads all of them, and
/// marks or removes those that are due.
///
/// While a primary is replaced, calls for its keys fail. A primary that was replaced and does
/// not know it yet may show an old record, and may grant a claim unless writes wait for
/// replicas.
///
/// A call that is repeated by the client after a broken connection may find its own work
/// done: then [`resolve`](Store::resolve) returns
/// [`Superseded`](Transitioned::Superseded). Read the record.
///
/// # Keys
///
/// | key | value |
/// |---|---|
/// | `idempotency:{GROUP}:SCOPE`, a NUL, `KEY` | [`StoredRecord::to_bytes`], about 860 bytes with a response of 512 |
/// | `idempotency:{GROUP}` | a sorted set of the group's claims whose outcome is open |
///
/// The group is one of 1,024 by the CRC-32 of the name, in hexadecimal. When a record
/// leaves the state in progress, an empty message is published on the sharded channel of
/// its key.
///
/// # Example
///
/// ```
/// # #[tokio::main(flavor = "current_thread")]
/// # async fn main() -> Result<(), tower_idempotency::StoreError> {
/// # let Ok(url) = std::env::var("REDIS_URL") else { return Ok(()) };
/// use tower_idempotency::{Key, RedisStore, Scope, Store, store::RecordName};
///
/// let store = RedisStore::connect(&url).await?;
/// let name = RecordName::new(Scope::single_tenant(), Key::new("key"));
/// assert!(store.read(&name).await?.is_none());
/// # Ok(())
/// # }
/// ```
///
/// Clones share the connections. Calls need a Tokio runtime.
#[derive(Clone)]
pub struct RedisStore(Arc<Inner>);

struct Inner {
    reads: Link,
    /// The same link, or those on which writes wait for replicas.
    writes: Vec<Link>,
    next_write: AtomicUsize,
    prefix: String,
    replicas: Option<Replicas>,
    is_cluster: bool,
    wake_ups: WakeUps,
}

impl Inner {
    fn place(&self, name: &RecordName) -> Place {
        Place::of(&self.prefix, name)
    }

    async fn read(
        &self,
        name: &RecordName,
        reads_response: bool,
    ) -> Result<Option<Record>, StoreError> {
        let place = self.place(name);
        let arguments: [&[u8]; 1] = [flag(reads_response)];
        let answers = self.eval(&self.reads, &scripts::READ, &place, &arguments, None);
        let found = Option::from_redis_value(answers.await?.pop().unwrap_or(Value::Nil));
        found.map_err(unexpected)?.map(decode).transpose()
    }

    /// Calls a script that writes. In a cluster, adds the entry of a claim to the index
    /// first.
    async fn write(
        &self,
        script: &Script,
        place: &Place,
        arguments: &[&[u8]],
        claim: Option<Token>,
    ) -> Result<Value, StoreError> {
        let next = self.next_write.fetch_add(1, Ordering::Relaxed);
        let link = &self.writes[next % self.writes.len()];
        if let Some(token) = claim.filter(|_| self.is_cluster) {
            let add = [place.add(token)];
            link.send(add, &place.key).await?.map_err(failure)?;
        }
        let wait = self.replicas.map(Replicas::wait);
        let mut answers = self.eval(link, script, place, arguments, wait).await?;
        if let Some(replicas) = self.replicas {
            let acknowledged = answers.pop().unwrap_or(Value::Nil);
            replicas.check(u32::from_redis_value(acknowledged).map_err(unexpected)?)?;
        }
        Ok(answers.pop().unwrap_or(Value::Nil))
    }

    /// Calls a script, with another command behind it.
    async fn eval(
        &self,
        link: &Link,
        script: &Script,
        place: &Place,
        arguments: &[&[u8]],
        behind: Option<Cmd>,
    ) -> Result<Vec<Value>, StoreError> {
        let call = async |is_loaded| {
            let script = script.call(is_loaded, &place.keys(self.is_cluster), arguments);
            let commands = iter::once(script).chain(behind.clone());
            link.send(commands, &place.key).await
        };
        match call(true).await? {
            // Its node was restarted or promoted, or its scripts were flushed.
            Err(error) if error.kind() == ErrorKind::Server(ServerErrorKind::NoScript) => {
                call(false).await?.map_err(failure)
            }
            answers => answers.map_err(failure),
        }
    }

    /// Makes a transition of the record that has this token or fence.
    async fn make(
        &self,
        name: &RecordName,
        guard: [&[u8]; 2],
        call: &Call,
    ) -> Result<Transitioned, StoreError> {
        let place = self.place(name);
        let (time, at_least) = (micros(call.time), micros(call.at_least));
        let arguments: [&[u8]; 6] = [
            guard[0],
            guard[1],
            call.name.as_bytes(),
            time.as_bytes(),
            at_least.as_bytes(),
            &call.response,
        ];
        let answer = self.write(&scripts::TRANSITION, &place, &arguments, None);
        let Value::BulkString(owner) = answer.await? else {
            return Ok(Transitioned::Superseded);
        };
        if !owner.is_empty() {
            self.unlist(place, Token::from_bytes(bytes(owner)?));
        }
        Ok(Transitioned::Applied)
    }

    /// Removes the entry of a claim whose outcome is known from the index of a cluster. If
    /// that fails, a sweep removes it later, and until then readers pass over it.
    fn unlist(&self, place: Place, token: Token) {
        if !self.is_cluster {
            return;
        }
        let link = self.reads.clone();
        tokio::spawn(async move {
            let _ = link.send([place.remove(token)], &place.key).await;
        });
    }
}

impl Store for RedisStore {
    async fn claim(&self, name: &RecordName, claim: &Claim) -> Result<Claimed, StoreError> {
        let place = self.0.place(name);
        let (lease, retention) = (micros(claim.lease), micros(claim.retention));
        let arguments: [&[u8]; 4] = [
            &ids(claim),
            lease.as_bytes(),
            retention.as_bytes(),
            flag(claim.reads_response),
        ];
        let answer = self
            .0
            .write(&scripts::CLAIM, &place, &arguments, Some(claim.token));
        let answer = answer.await?;
        if let Value::Int(fence) = answer {
            return Ok(Claimed::Acquired(Grant {
                operation: claim.operation,
                fence: Fence::from(fence.unsigned_abs()),
                attempt: 1,
            }));
        }
        let record = decode(<_>::from_redis_value(answer).map_err(unexpected)?)?;
        if record.token != claim.token {
            self.0.unlist(place, claim.token);
        }
        Ok(Claimed::Occupied(record))
    }

    async fn reclaim(
        &self,
        name: &RecordName,
        seen: Fence,
        reclaim_as: ReclaimAs,
        claim: &Claim,
    ) -> Result<Option<Grant>, StoreError> {
        let place = self.0.place(name);
        let (seen, lease, retention) = (
            seen.to_string(),
            micros(claim.lease),
            micros(claim.retention),
        );
        let reclaim_as = match reclaim_as {
            ReclaimAs::Takeover => "takeover",
            ReclaimAs::Rerun => "rerun",
            ReclaimAs::Reconcile => "reconcile",
            ReclaimAs::Retry => "retry",
            ReclaimAs::Replace => "replace",
            ReclaimAs::Expired => "expired",
        };
        let arguments: [&[u8]; 5] = [
            seen.as_bytes(),
            reclaim_as.as_bytes(),
            &ids(claim),
            lease.as_bytes(),
            retention.as_bytes(),
        ];
        let answer = self
            .0
            .write(&scripts::RECLAIM, &place, &arguments, Some(claim.token));
        let answer = Option::<(Vec<u8>, u64, u32, Vec<u8>)>::from_redis_value(answer.await?);
        let Some((operation, fence, attempt, former)) = answer.map_err(unexpected)? else {
            self.0.unlist(place, claim.token);
            return Ok(None);
        };
        let former = Token::from_bytes(bytes(former)?);
        if former != claim.token {
            self.0.unlist(place, former);
        }
        Ok(Some(Grant {
            operation: OperationId::from_bytes(bytes(operation)?),
            fence: Fence::from(fence),
            attempt,
        }))
    }

    async fn transition(
        &self,
        name: &RecordName,
        transition: Transition,
    ) -> Result<Transitioned, StoreError> {
        match &transition {
            Transition::Owner(token, transition) => {
                let call = Call::of_owner(transition);
                self.0.make(name, [b"token", token.as_bytes()], &call).await
            }
            Transition::Fenced(seen, transition) => {
                let (call, seen) = (Call::of_others(transition), seen.to_string());
                self.0.make(name, [b"fence", seen.as_bytes()], &call).await
            }
        }
    }

    async fn wait(&self, name: &RecordName, seen: Fence) -> Result<(), StoreError> {
        let is_at_work = async {
            let record = self.0.read(name, false).await?;
            Ok(record.is_some_and(|record| {
                record.fence == seen && matches!(record.state, RecordState::InProgress { .. })
            }))
        };
        self.0.wake_ups.wait(&self.0.place(name), is_at_work).await
    }

    async fn read(&self, name: &RecordName) -> Result<Option<Record>, StoreError> {
        self.0.read(name, true).await
    }

    async fn list(
        &self,
        filter: &Filter,
        after: Option<&RecordName>,
        limit: u32,
    ) -> Result<Page, StoreError> {
        self.0.list(filter, after, limit).await
    }

    async fn purge_expired(
        &self,
        limit: u32,
        unknown_retention: Duration,
    ) -> Result<Purged, StoreError> {
        self.0.purge_expired(limit, unknown_retention).await
    }
}

impl fmt::Debug for RedisStore {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("RedisStore")
            .field("prefix", &self.0.prefix)
            .field("replicas", &self.0.replicas)
            .finish_non_exhaustive()
    }
}

/// A transition as its script takes it.
struct Call {
    name: &'static str,
    time: Duration,
    at_least: Duration,
    response: Bytes,
}

impl Call {
    fn of_owner(transition: &OwnerTransition) -> Self {
        let named = |name| Self::new(name, Duration::ZERO);
        match transition {
            OwnerTransition::Renew { lease } => Self::new("renew", *lease),
            OwnerTransition::MarkUnknown { retention } => Self::new("mark-unknown", *retention),
            OwnerTransition::Release(Release::SameRequest) => named("release-same"),
            OwnerTransition::Release(Release::AnyRequest) => named("release-any"),
            OwnerTransition::Complete(completion) => Self {
                at_least: completion.at_least,
                response: completion.response.clone(),
                ..Self::new("complete", completion.retention)
            },
        }
    }

    fn of_others(transition: &FencedTransition) -> Self {
        match transition {
            FencedTransition::MarkLapsed { retention } => Self::new("mark-lapsed", *retention),
            FencedTransition::Forget => Self::new("forget", FORGOTTEN_RETENTION),
            FencedTransition::Resolve {
                resolution,
                at_least,
            } => {
                let (name, response) = match &**resolution {
                    Resolution::Happened(response) => ("happened", response.encode()),
                    Resolution::DidNotHappen => ("did-not-happen", Bytes::new()),
                };
                Self {
                    at_least: *at_least,
                    response,
                    ..Self::new(name, Duration::ZERO)
                }
            }
        }
    }

    fn new(name: &'static str, time: Duration) -> Self {
        Self {
            name,
            time,
            at_least: Duration::ZERO,
            response: Bytes::new(),
        }
    }
}

/// Decodes a record, read at this time of the server.
fn decode((now, record): (u64, Vec<u8>)) -> Result<Record, StoreError> {
    let record = StoredRecord::from_bytes(record.into())?;
    Ok(record.read(Duration::from_micros(now)))
}

/// What a claim brings, in the order of an encoded record.
fn ids(claim: &Claim) -> Vec<u8> {
    let parts: [&[u8]; 3] = [
        claim.operation.as_bytes(),
        claim.token.as_bytes(),
        claim.fingerprint.as_bytes(),
    ];
    parts.concat()
}

fn bytes(answer: Vec<u8>) -> Result<[u8; 16], StoreError> {
    let corrupt = |_| StoreError::corrupt("record: token or operation");
    answer.try_into().map_err(corrupt)
}

fn flag(is_set: bool) -> &'static [u8] {
    if is_set { b"1" } else { b"0" }
}

/// A number of Lua is exact up to 2^53, which is the year 2255 in microseconds.
fn micros(time: Duration) -> String {
    let micros = u64::try_from(time.as_micros()).unwrap_or(u64::MAX);
    micros.min(LONGEST_MICROS).to_string()
}

/// 142 years.
const LONGEST_MICROS: u64 = 1 << 52;
