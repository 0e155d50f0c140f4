//! Records in this process's memory: for tests, and for single processes whose
//! records need not outlive them.

use std::{
    cmp::Reverse,
    fmt,
    hash::{BuildHasher as _, RandomState},
    time::Duration,
};

use hashbrown::HashTable;
use tokio::time::Instant;

use super::{
    Claim, Claimed, Completion, Filter, Grant, Purged, Record, RecordState, Release, Resolution,
    Settlement, Store, StoreError, Succession, Witness,
};
use crate::{
    Fence, RecordName, Token,
    protocol::{Moment, Row, Sweep},
    sync::{Arc, AtomicU64, AtomicUsize, Mutex, MutexGuard, Ordering, PoisonError},
};

/// Records in memory, lost when the process ends.
///
/// Clones share their records. The clock is Tokio's, so that a test with a
/// paused clock decides when a lease lapses or a record expires. The store is
/// bounded, and never makes room by evicting a record, since an evicted record
/// is work done twice: when it is full, new keys are refused with 503 until
/// something expires. A completed record takes about 370 bytes beside what is
/// kept of its response; `benches/RESULTS.md` says what was measured.
///
/// ```
/// use tower_idempotency::MemoryStore;
///
/// let store = MemoryStore::new();
/// let bounded = MemoryStore::bounded(10_000, 16 * 1024 * 1024);
/// assert_eq!((store.len(), bounded.len()), (0, 0));
/// ```
#[derive(Clone)]
pub struct MemoryStore {
    inner: Arc<Inner>,
}

struct Inner {
    shards: Box<[Mutex<Shard>]>,
    hasher: RandomState,
    start: Instant,
    fences: AtomicU64,
    records: AtomicUsize,
    bytes: AtomicUsize,
    most_records: usize,
    most_bytes: usize,
}

/// A shard that grows reads no name again, and moves little under its lock.
type Shard = HashTable<Slot>;

struct Slot {
    hash: u64,
    entry: Box<Entry>,
}

struct Entry {
    name: RecordName,
    row: Row,
}

impl MemoryStore {
    /// A store of up to 1,000,000 records and 1 GiB of kept responses.
    #[must_use]
    pub fn new() -> Self {
        Self::bounded(1_000_000, 1 << 30)
    }

    /// A store of up to `records` records, whose kept responses have up to
    /// `bytes` bytes together.
    #[must_use]
    pub fn bounded(records: usize, bytes: usize) -> Self {
        Self {
            inner: Arc::new(Inner {
                shards: (0..SHARDS).map(|_| Mutex::default()).collect(),
                hasher: RandomState::new(),
                start: Instant::now(),
                fences: AtomicU64::new(1),
                records: AtomicUsize::new(0),
                bytes: AtomicUsize::new(0),
                most_records: records,
                most_bytes: bytes,
            }),
        }
    }

    /// How many records there are, expired ones included until they are swept.
    #[must_use]
    pub fn len(&self) -> usize {
        self.inner.records.load(Ordering::Relaxed)
    }

    /// Whether there is no record.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }
}

impl Inner {
    fn now(&self) -> Moment {
        self.start.elapsed()
    }

    fn next_fence(&self) -> Fence {
        Fence::new(self.fences.fetch_add(1, Ordering::Relaxed))
    }

    /// The shard of a name, and the name's hash, whose other bits choose the
    /// place in it.
    fn shard(&self, name: &RecordName) -> (MutexGuard<'_, Shard>, u64) {
        let hash = self.hasher.hash_one(name);
        let shard = &self.shards[(hash >> 20) as usize % self.shards.len()];
        (lock(shard), hash)
    }

    /// One transition of a record that may exist, under its lock.
    fn transition(
        &self,
        name: &RecordName,
        apply: impl FnOnce(&mut Row) -> Settlement,
    ) -> Settlement {
        let (mut shard, hash) = self.shard(name);
        let slot = shard.find_mut(hash, |slot| slot.is(hash, name));
        slot.map_or(Settlement::Superseded, |slot| apply(&mut slot.entry.row))
    }

    /// One transition after which the record may keep a response: refused if
    /// there is no room for it. A repeated or superseded call needs none, and
    /// gets its answer from a full store too.
    fn transition_that_keeps(
        &self,
        name: &RecordName,
        apply: impl FnOnce(&mut Row) -> Settlement,
    ) -> Result<Settlement, StoreError> {
        let (mut shard, hash) = self.shard(name);
        let Some(slot) = shard.find_mut(hash, |slot| slot.is(hash, name)) else {
            return Ok(Settlement::Superseded);
        };
        let row = &mut slot.entry.row;
        let mut next = row.clone();
        let settlement = apply(&mut next);
        self.admit_bytes(next.kept_bytes() - row.kept_bytes())?;
        *row = next;
        Ok(settlement)
    }

    /// Takes one of the places for records; dropped from the count by `forget`.
    fn admit(&self) -> Result<(), StoreError> {
        self.records
            .fetch_update(Ordering::Relaxed, Ordering::Relaxed, |records| {
                (records < self.most_records).then_some(records + 1)
            })
            .map(drop)
            .map_err(|_| StoreError::full("the bound on records of the memory store"))
    }

    fn admit_bytes(&self, bytes: usize) -> Result<(), StoreError> {
        self.bytes
            .fetch_update(Ordering::Relaxed, Ordering::Relaxed, |kept| {
                kept.checked_add(bytes)
                    .filter(|sum| *sum <= self.most_bytes)
            })
            .map(drop)
            .map_err(|_| StoreError::full("the bound on bytes of the memory store"))
    }

    fn give_back(&self, records: usize, bytes: usize) {
        self.records.fetch_sub(records, Ordering::Relaxed);
        self.bytes.fetch_sub(bytes, Ordering::Relaxed);
    }
}

impl Slot {
    /// The hash first: another record's name is far away.
    fn is(&self, hash: u64, name: &RecordName) -> bool {
        self.hash == hash && self.entry.name == *name
    }
}

/// No shard is left in a state that a panic could have torn: transitions are
/// assignments.
fn lock(shard: &Mutex<Shard>) -> MutexGuard<'_, Shard> {
    shard.lock().unwrap_or_else(PoisonError::into_inner)
}

impl Store for MemoryStore {
    async fn claim(&self, name: &RecordName, claim: &Claim) -> Result<Claimed, StoreError> {
        let inner = &*self.inner;
        let (mut shard, hash) = inner.shard(name);
        let now = inner.now();
        if let Some(slot) = shard.find(hash, |slot| slot.is(hash, name)) {
            return Ok(Claimed::Occupied(slot.entry.row.snapshot(now)));
        }
        inner.admit()?;
        let row = Row::claimed(claim, inner.next_fence(), now);
        let grant = row.grant();
        let name = name.clone();
        let entry = Box::new(Entry { name, row });
        shard.insert_unique(hash, Slot { hash, entry }, |slot| slot.hash);
        Ok(Claimed::Acquired(grant))
    }

    async fn reclaim(
        &self,
        name: &RecordName,
        seen: Fence,
        succession: Succession,
        claim: &Claim,
    ) -> Result<Option<Grant>, StoreError> {
        let inner = &*self.inner;
        let (mut shard, hash) = inner.shard(name);
        let Some(slot) = shard.find_mut(hash, |slot| slot.is(hash, name)) else {
            return Ok(None);
        };
        let row = &mut slot.entry.row;
        let bytes = row.kept_bytes();
        let grant = row.reclaim(seen, succession, claim, inner.next_fence(), inner.now());
        inner.give_back(0, bytes - row.kept_bytes());
        Ok(grant)
    }

    async fn renew(
        &self,
        name: &RecordName,
        token: Token,
        lease: Duration,
    ) -> Result<Settlement, StoreError> {
        let inner = &*self.inner;
        Ok(inner.transition(name, |row| row.renew(token, lease, inner.now())))
    }

    async fn complete(
        &self,
        name: &RecordName,
        token: Token,
        completion: &Completion,
    ) -> Result<Settlement, StoreError> {
        let inner = &*self.inner;
        inner.transition_that_keeps(name, |row| row.complete(token, completion, inner.now()))
    }

    async fn release(
        &self,
        name: &RecordName,
        token: Token,
        release: Release,
    ) -> Result<Settlement, StoreError> {
        Ok(self
            .inner
            .transition(name, |row| row.release(token, release)))
    }

    async fn mark_unknown(
        &self,
        name: &RecordName,
        witness: Witness,
        retention: Duration,
    ) -> Result<Settlement, StoreError> {
        let inner = &*self.inner;
        Ok(inner.transition(name, |row| {
            row.mark_unknown(witness, retention, inner.now())
        }))
    }

    async fn resolve(
        &self,
        name: &RecordName,
        seen: Fence,
        resolution: &Resolution,
    ) -> Result<Settlement, StoreError> {
        let inner = &*self.inner;
        inner.transition_that_keeps(name, |row| row.resolve(seen, resolution, inner.now()))
    }

    async fn read(&self, name: &RecordName) -> Result<Option<Record>, StoreError> {
        let inner = &*self.inner;
        let (shard, hash) = inner.shard(name);
        let slot = shard.find(hash, |slot| slot.is(hash, name));
        Ok(slot.map(|slot| slot.entry.row.snapshot(inner.now())))
    }

    async fn list(
        &self,
        filter: Filter,
        limit: u32,
    ) -> Result<Vec<(RecordName, Record)>, StoreError> {
        let inner = &*self.inner;
        // One moment for all shards: ages that were taken at different times
        // would not be in the order of the claims.
        let now = inner.now();
        let mut chosen = Vec::new();
        for shard in &inner.shards {
            let shard = lock(shard);
            chosen.extend(
                shard
                    .iter()
                    .map(|Slot { entry, .. }| (&entry.name, entry.row.snapshot(now)))
                    .filter(|(_, record)| is_chosen(filter, record))
                    .map(|(name, record)| (name.clone(), record)),
            );
        }
        chosen.sort_by_key(|(_, record)| Reverse(record.age));
        chosen.truncate(limit as usize);
        Ok(chosen)
    }

    async fn forget(&self, name: &RecordName, seen: Fence) -> Result<Settlement, StoreError> {
        let inner = &*self.inner;
        let (mut shard, hash) = inner.shard(name);
        match shard.find_entry(hash, |slot| slot.is(hash, name)) {
            Ok(found) if found.get().entry.row.fence() == seen => {
                let (slot, _) = found.remove();
                inner.give_back(1, slot.entry.row.kept_bytes());
                Ok(Settlement::Applied)
            }
            _ => Ok(Settlement::Superseded),
        }
    }

    async fn purge_expired(
        &self,
        limit: u32,
        unknown_retention: Duration,
    ) -> Result<Purged, StoreError> {
        let inner = &*self.inner;
        let mut purged = Purged::default();
        for shard in &inner.shards {
            let now = inner.now();
            lock(shard).retain(|Slot { entry, .. }| {
                let row = &mut entry.row;
                if purged.touched() >= u64::from(limit) {
                    return true;
                }
                match row.sweep(unknown_retention, now) {
                    Sweep::Kept => true,
                    Sweep::MarkedUnknown => {
                        purged.marked_unknown += 1;
                        true
                    }
                    Sweep::Due { unknown } => {
                        purged.removed += 1;
                        purged.removed_unknown += u64::from(unknown);
                        inner.give_back(1, row.kept_bytes());
                        false
                    }
                }
            });
        }
        Ok(purged)
    }
}

fn is_chosen(filter: Filter, record: &Record) -> bool {
    match (filter, &record.state) {
        (Filter::Unknown, RecordState::Unknown) => true,
        (Filter::InProgressFor(least), RecordState::InProgress { .. }) => record.age > least,
        _ => false,
    }
}

impl Default for MemoryStore {
    fn default() -> Self {
        Self::new()
    }
}

impl fmt::Debug for MemoryStore {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("MemoryStore")
            .field("records", &self.len())
            .finish_non_exhaustive()
    }
}

/// So many that one which grows holds up few others, and not for long.
const SHARDS: usize = 1024;
