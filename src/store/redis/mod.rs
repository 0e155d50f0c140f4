//! A store of records in Redis or Valkey.

mod address;
pub(super) mod builder;
mod calls;
mod connection;
mod error;
mod index;
mod link;
mod place;
mod scripts;
mod servers;
mod usage;
mod wake_ups;

use std::{fmt, sync::Arc, time::Duration};

use bytes::Bytes;
use redis::{Cmd, FromRedisValue as _, Value};

use self::{
    calls::Calls,
    error::unexpected,
    place::{Place, now},
    scripts::{Call, Script},
    servers::Servers,
    wake_ups::WakeUps,
};
use super::{
    Claim, Claimed, FencedTransition, Grant, OwnerTransition, Purged, ReclaimAs, Record,
    RecordState, Release, Store, StoreError, Token, Transition, Transitioned, Usage, UsageDelta,
    admin::{Filter, Page, Resolution},
    transition::{FORGOTTEN_RETENTION, StoredRecord},
};
use crate::{
    key::{OperationId, RecordName},
    store::Fence,
};

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
/// | `idempotency:{GROUP}:SCOPE`, two NULs, `usage` | a hash of what the scope keeps, if the layer has a quota |
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
/// Clones share the connections. Calls need a Tokio runtime. Clones may be used in several
/// runtimes. Keep each of them running while it has calls: a runtime that stands still keeps
/// the connections of its calls.
#[derive(Clone)]
pub struct RedisStore(Arc<Inner>);

struct Inner {
    prefix: String,
    servers: Arc<Servers>,
    claims: Calls,
    reclaims: Calls,
    by_owner: Calls,
    by_fence: Calls,
    sweeps: Calls,
    reads: Calls,
    usage: Calls,
    wake_ups: WakeUps,
}

impl Inner {
    fn new(prefix: String, servers: Servers, wake_ups: WakeUps) -> Self {
        let servers = Arc::new(servers);
        Self {
            prefix,
            claims: Calls::new(Script::claim(), &servers),
            reclaims: Calls::new(Script::reclaim(), &servers),
            by_owner: Calls::new(Script::by_owner(), &servers),
            by_fence: Calls::new(Script::by_fence(), &servers),
            sweeps: Calls::new(Script::sweep(), &servers),
            reads: Calls::new(Script::read(), &servers),
            usage: Calls::new(Script::usage(), &servers),
            servers,
            wake_ups,
        }
    }

    fn place(&self, name: &RecordName) -> Place {
        Place::of(&self.prefix, name)
    }

    async fn read(
        &self,
        name: &RecordName,
        reads_response: bool,
    ) -> Result<Option<Record>, StoreError> {
        let call = Call {
            place: self.place(name),
            arguments: vec![flag(reads_response)],
        };
        let found = Option::from_redis_value(self.reads.make(call).await?);
        found.map_err(unexpected)?.map(decode).transpose()
    }

    /// Claims. In a cluster, adds the entry of the claim to the index first. Returns when it
    /// did so, and the answer.
    async fn claim(
        &self,
        calls: &Calls,
        call: Call,
        claim: &Claim,
    ) -> Result<(Duration, Value), StoreError> {
        let added = now();
        if self.servers.is_cluster {
            let add = call.place.add(claim.token, added);
            self.servers.send(add, &call.place.key).await?;
        }
        Ok((added, calls.make(call).await?))
    }

    /// Makes a transition of the record that has this token or fence.
    async fn transition(
        &self,
        calls: &Calls,
        name: &RecordName,
        guard: Bytes,
        change: Change,
    ) -> Result<Transitioned, StoreError> {
        let call = Call {
            place: self.place(name),
            arguments: vec![
                guard,
                Bytes::from_static(change.name.as_bytes()),
                micros(change.time),
                micros(change.at_least),
                change.response,
            ],
        };
        let Value::BulkString(owner) = calls.make(call).await? else {
            return Ok(Transitioned::Superseded);
        };
        if !owner.is_empty() {
            let owner = Token::from_bytes(bytes(owner)?);
            self.unlist(name, |place| place.remove(owner));
        }
        Ok(Transitioned::Applied)
    }

    /// Removes an entry from the index of a cluster, in the background. If that fails, a
    /// sweep removes it later, and until then readers pass over it.
    fn unlist(&self, name: &RecordName, remove: impl FnOnce(&Place) -> Cmd) {
        if self.servers.is_cluster {
            let (servers, place) = (Arc::clone(&self.servers), self.place(name));
            let remove = remove(&place);
            tokio::spawn(async move {
                let _ = servers.send(remove, &place.key).await;
            });
        }
    }
}

impl Store for RedisStore {
    async fn claim(&self, name: &RecordName, claim: &Claim) -> Result<Claimed, StoreError> {
        let mut arguments = of_claim(claim);
        arguments.push(flag(claim.reads_response));
        let call = Call {
            place: self.0.place(name),
            arguments,
        };
        let (added, answer) = self.0.claim(&self.0.claims, call, claim).await?;
        if let Value::Int(fence) = answer {
            return Ok(Claimed::Acquired(Grant {
                operation: claim.operation,
                fence: Fence::from(fence.unsigned_abs()),
                attempt: 1,
            }));
        }
        let record = decode(<_>::from_redis_value(answer).map_err(unexpected)?)?;
        if record.token != claim.token {
            self.0
                .unlist(name, |place| place.remove_added(claim.token, added));
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
        let reclaim_as = match reclaim_as {
            ReclaimAs::Takeover => "takeover",
            ReclaimAs::Rerun => "rerun",
            ReclaimAs::Reconcile => "reconcile",
            ReclaimAs::Retry => "retry",
            ReclaimAs::Replace => "replace",
            ReclaimAs::Expired => "expired",
        };
        let mut arguments = of_claim(claim);
        arguments.extend([seen.to_string().into(), reclaim_as.into()]);
        let call = Call {
            place: self.0.place(name),
            arguments,
        };
        let (added, answer) = self.0.claim(&self.0.reclaims, call, claim).await?;
        let answer = Option::<(Vec<u8>, u64, u32, Vec<u8>)>::from_redis_value(answer);
        let Some((operation, fence, attempt, former)) = answer.map_err(unexpected)? else {
            self.0
                .unlist(name, |place| place.remove_added(claim.token, added));
            return Ok(None);
        };
        let former = Token::from_bytes(bytes(former)?);
        if former != claim.token {
            self.0.unlist(name, |place| place.remove(former));
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
        let (calls, guard, change) = match &transition {
            Transition::Owner(token, transition) => {
                let token = Bytes::copy_from_slice(token.as_bytes());
                (&self.0.by_owner, token, Change::by_owner(transition))
            }
            Transition::Fenced(seen, transition) => {
                let seen = seen.to_string().into();
                (&self.0.by_fence, seen, Change::by_fence(transition))
            }
        };
        self.0.transition(calls, name, guard, change).await
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

    /// The clock of one primary.
    async fn now(&self) -> Result<Duration, StoreError> {
        let inner = &self.0;
        let time = redis::cmd("TIME");
        let now = inner.servers.send(time, inner.prefix.as_bytes()).await?;
        let (secs, micros) = <(u64, u64)>::from_redis_value(now).map_err(unexpected)?;
        Ok(Duration::from_secs(secs) + Duration::from_micros(micros))
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

    async fn add_usage(&self, deltas: &[UsageDelta]) -> Result<Option<Vec<Usage>>, StoreError> {
        self.0.add_usage(deltas).await.map(Some)
    }
}

impl fmt::Debug for RedisStore {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("RedisStore")
            .field("prefix", &self.0.prefix)
            .field("replicas", &self.0.servers.replicas)
            .finish_non_exhaustive()
    }
}

/// A transition as its script takes it.
struct Change {
    name: &'static str,
    time: Duration,
    at_least: Duration,
    response: Bytes,
}

impl Change {
    fn by_owner(transition: &OwnerTransition) -> Self {
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

    fn by_fence(transition: &FencedTransition) -> Self {
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

/// The arguments of a script that claims.
fn of_claim(claim: &Claim) -> Vec<Bytes> {
    vec![
        Bytes::copy_from_slice(claim.operation.as_bytes()),
        Bytes::copy_from_slice(claim.token.as_bytes()),
        Bytes::copy_from_slice(claim.fingerprint.as_bytes()),
        micros(claim.lease),
        micros(claim.retention),
    ]
}

fn bytes(answer: Vec<u8>) -> Result<[u8; 16], StoreError> {
    let corrupt = |_| StoreError::corrupt("record: token or operation");
    answer.try_into().map_err(corrupt)
}

fn flag(is_set: bool) -> Bytes {
    Bytes::from_static(if is_set { b"1" } else { b"0" })
}

/// A number of Lua is exact up to 2^53, which is the year 2255 in microseconds.
fn micros(time: Duration) -> Bytes {
    let micros = u64::try_from(time.as_micros()).unwrap_or(u64::MAX);
    micros.min(LONGEST_MICROS).to_string().into()
}

/// 142 years.
const LONGEST_MICROS: u64 = 1 << 52;
