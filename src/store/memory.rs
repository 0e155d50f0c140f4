//! Records in this process's memory: for tests, and for single processes whose
//! records need not outlive them.

use std::{
    fmt,
    hash::{BuildHasher as _, RandomState},
    mem,
    time::Duration,
};

use hashbrown::HashTable;
use tokio::{task::yield_now, time::Instant};

use super::{
    Claim, Claimed, Grant, Purged, ReclaimAs, Record, RecordName, RecordState, Store, StoreError,
    Transition, Transitioned, Usage, UsageDelta, UsageTable,
    admin::{Filter, Page},
    transition::{StoredRecord, Swept},
};
use crate::{
    store::{
        Fence,
        sync::{Arc, AtomicU64, AtomicUsize, Mutex, MutexGuard, Ordering, PoisonError},
        waiters::Waiters,
    },
    telemetry::{log::Warnings, notice::Notice},
};

/// Records in memory, lost when the process ends.
///
/// Clones share their records. The clock is Tokio's, so that a test with a
/// paused clock decides when a lease lapses or a record expires. The store is
/// bounded. When it is full, expired records give way, with or without a
/// [`Sweeper`](crate::Sweeper); if there is none, new keys are refused with 503. It
/// never evicts a record that has not expired, since an evicted record is work done
/// twice. A completed record takes about 410 bytes and the size
/// of its recorded response; see `benches/RESULTS.md`.
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
    shards: Box<[Shard]>,
    hasher: RandomState,
    start: Instant,
    records: AtomicUsize,
    bytes: AtomicUsize,
    most_records: usize,
    most_bytes: usize,
    /// The shard in which room was found last.
    emptied: AtomicUsize,
    warnings: Warnings,
    waiters: Waiters,
    usage: Mutex<UsageTable>,
}

#[derive(Default)]
struct Shard {
    table: Mutex<Table>,
    removal: Bound,
    marking: Bound,
}

/// A moment in nanoseconds before which no record of a shard is due. Written under
/// the lock of the table, and read without it.
struct Bound(AtomicU64);

/// A shard that grows reads no name again, and moves little under its lock.
type Table = HashTable<Slot>;

struct Slot {
    hash: u64,
    entry: Box<Entry>,
}

struct Entry {
    name: RecordName,
    record: StoredRecord,
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
        Self::with_shards(SHARDS, records, bytes)
    }

    pub(crate) fn with_shards(shards: usize, records: usize, bytes: usize) -> Self {
        Self {
            inner: Arc::new(Inner {
                shards: (0..shards).map(|_| Shard::default()).collect(),
                hasher: RandomState::new(),
                start: Instant::now(),
                records: AtomicUsize::new(0),
                bytes: AtomicUsize::new(0),
                most_records: records,
                most_bytes: bytes,
                emptied: AtomicUsize::new(0),
                warnings: Warnings::default(),
                waiters: Waiters::new(usize::MAX),
                usage: Mutex::default(),
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
    fn now(&self) -> Duration {
        self.start.elapsed()
    }

    /// Returns the shard of a name, and the hash of the name. Other bits of the
    /// hash choose the place in the shard.
    fn shard(&self, name: &RecordName) -> (&Shard, u64) {
        let hash = self.hasher.hash_one(name);
        (&self.shards[self.place(hash)], hash)
    }

    fn place(&self, hash: u64) -> usize {
        (hash >> 20) as usize % self.shards.len()
    }

    /// Removes the expired records of one shard. Returns whether there were any.
    ///
    /// Takes one lock, and none if nothing has expired: to refuse a key costs a
    /// look at each shard's bound.
    fn make_room(&self) -> bool {
        let first = self.emptied.load(Ordering::Relaxed);
        for index in (first..first + self.shards.len()).map(|index| index % self.shards.len()) {
            let now = self.now();
            let shard = &self.shards[index];
            if !shard.removal.is_past(now) {
                continue;
            }
            let removed = self.sweep(shard, |record| {
                if record.is_in_progress() {
                    return Swept::Kept;
                }
                let swept = record.sweep(Duration::ZERO, now);
                if let Swept::Remove { unknown: true } = swept {
                    let operation = Some(record.grant().operation);
                    Notice::UnknownExpired.tell(&self.warnings, operation);
                }
                swept
            });
            if removed > 0 {
                self.emptied.store(index, Ordering::Relaxed);
                return true;
            }
        }
        false
    }

    /// Does with each record of a shard what `sweep` says. Returns how many records
    /// were removed.
    fn sweep(&self, shard: &Shard, mut sweep: impl FnMut(&mut StoredRecord) -> Swept) -> usize {
        let mut table = shard.lock();
        let (mut removal, mut marking) = (Duration::MAX, Duration::MAX);
        let (mut records, mut bytes) = (0, 0);
        table.retain(|Slot { entry, .. }| {
            let record = &mut entry.record;
            if let Swept::Remove { .. } = sweep(record) {
                records += 1;
                bytes += record.response_len();
                return false;
            }
            let bound = match record.is_in_progress() {
                true => &mut marking,
                false => &mut removal,
            };
            *bound = record.sweep_after().min(*bound);
            true
        });
        shard.removal.set(removal);
        shard.marking.set(marking);
        self.give_back(records, bytes);
        records
    }

    fn give_back(&self, records: usize, bytes: usize) {
        self.records.fetch_sub(records, Ordering::Relaxed);
        self.bytes.fetch_sub(bytes, Ordering::Relaxed);
    }
}

impl Inner {
    fn usage(&self) -> MutexGuard<'_, UsageTable> {
        self.usage.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Shard {
    /// No table is left in a state that a panic could have torn: transitions are
    /// assignments.
    fn lock(&self) -> MutexGuard<'_, Table> {
        self.table.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Under the lock of the table.
    fn lower(&self, record: &StoredRecord) {
        let bound = match record.is_in_progress() {
            true => &self.marking,
            false => &self.removal,
        };
        bound.lower(record.sweep_after());
    }

    fn is_due(&self, now: Duration) -> bool {
        self.removal.is_past(now) || self.marking.is_past(now)
    }
}

impl Bound {
    fn set(&self, at: Duration) {
        self.0.store(nanos(at), Ordering::Relaxed);
    }

    fn lower(&self, at: Duration) {
        let at = nanos(at);
        if at < self.0.load(Ordering::Relaxed) {
            self.0.store(at, Ordering::Relaxed);
        }
    }

    fn is_past(&self, now: Duration) -> bool {
        self.0.load(Ordering::Relaxed) < nanos(now)
    }
}

impl Default for Bound {
    fn default() -> Self {
        Self(AtomicU64::new(u64::MAX))
    }
}

fn nanos(at: Duration) -> u64 {
    at.as_nanos().try_into().unwrap_or(u64::MAX)
}

/// Takes `more` of a bound. Returns false if that is not left.
fn take(taken: &AtomicUsize, more: usize, most: usize) -> bool {
    taken
        .fetch_update(Ordering::Relaxed, Ordering::Relaxed, |taken| {
            taken.checked_add(more).filter(|sum| *sum <= most)
        })
        .is_ok()
}

impl Slot {
    /// The hash first: another record's name is far away.
    fn is(&self, hash: u64, name: &RecordName) -> bool {
        self.hash == hash && self.entry.name == *name
    }
}

impl Store for MemoryStore {
    async fn claim(&self, name: &RecordName, claim: &Claim) -> Result<Claimed, StoreError> {
        let inner = &*self.inner;
        let (shard, hash) = inner.shard(name);
        loop {
            let mut table = shard.lock();
            let now = inner.now();
            if let Some(slot) = table.find_mut(hash, |slot| slot.is(hash, name)) {
                return Ok(slot.entry.record.claim(claim, now));
            }
            if take(&inner.records, 1, inner.most_records) {
                let record = StoredRecord::claimed(claim, now);
                let grant = record.grant();
                shard.lower(&record);
                let name = name.clone();
                let entry = Box::new(Entry { name, record });
                table.insert_unique(hash, Slot { hash, entry }, |slot| slot.hash);
                return Ok(Claimed::Acquired(grant));
            }
            drop(table);
            if !inner.make_room() {
                let full = StoreError::full("the bound on records of the memory store");
                return Err(full.unsent());
            }
        }
    }

    async fn reclaim(
        &self,
        name: &RecordName,
        seen: Fence,
        reclaim_as: ReclaimAs,
        claim: &Claim,
    ) -> Result<Option<Grant>, StoreError> {
        let inner = &*self.inner;
        let (shard, hash) = inner.shard(name);
        let mut table = shard.lock();
        let Some(slot) = table.find_mut(hash, |slot| slot.is(hash, name)) else {
            return Ok(None);
        };
        let record = &mut slot.entry.record;
        let bytes = record.response_len();
        let grant = record.reclaim(seen, reclaim_as, claim, inner.now());
        shard.lower(record);
        inner.give_back(0, bytes - record.response_len());
        Ok(grant)
    }

    async fn transition(
        &self,
        name: &RecordName,
        transition: Transition,
    ) -> Result<Transitioned, StoreError> {
        let inner = &*self.inner;
        let (shard, hash) = inner.shard(name);
        loop {
            let mut table = shard.lock();
            let Some(slot) = table.find_mut(hash, |slot| slot.is(hash, name)) else {
                return Ok(Transitioned::Superseded);
            };
            let record = &mut slot.entry.record;
            let mut next = record.clone();
            let transitioned = next.apply(&transition, inner.now());
            // A repeated or superseded call needs no room, and is answered by a full
            // store too.
            let (before, after) = (record.response_len(), next.response_len());
            if take(&inner.bytes, after.saturating_sub(before), inner.most_bytes) {
                inner.give_back(0, before.saturating_sub(after));
                *record = next;
                shard.lower(record);
                drop(table);
                inner.waiters.wake(name);
                return Ok(transitioned);
            }
            drop(table);
            if !inner.make_room() {
                return Err(StoreError::full("the bound on bytes of the memory store"));
            }
        }
    }

    async fn wait(&self, name: &RecordName, seen: Fence) -> Result<(), StoreError> {
        // There is no limit: the layer has one.
        let Some(waiter) = self.inner.waiters.enter(name) else {
            return Ok(());
        };
        loop {
            let woken = waiter.listen();
            let is_at_work = self.read(name).await?.is_some_and(|record| {
                record.fence == seen && matches!(record.state, RecordState::InProgress { .. })
            });
            if !is_at_work {
                return Ok(());
            }
            woken.await;
        }
    }

    async fn add_usage(&self, deltas: &[UsageDelta]) -> Result<Option<Vec<Usage>>, StoreError> {
        let now = self.inner.now();
        Ok(Some(self.inner.usage().add(deltas, now)))
    }

    async fn read(&self, name: &RecordName) -> Result<Option<Record>, StoreError> {
        let inner = &*self.inner;
        let (shard, hash) = inner.shard(name);
        let table = shard.lock();
        let slot = table.find(hash, |slot| slot.is(hash, name));
        Ok(slot.map(|slot| slot.entry.record.read(inner.now())))
    }

    /// In the order of the shards, and of the names in each.
    async fn list(
        &self,
        filter: &Filter,
        after: Option<&RecordName>,
        limit: u32,
    ) -> Result<Page, StoreError> {
        let inner = &*self.inner;
        let limit = limit.max(1) as usize;
        let first = after.map_or(0, |name| inner.place(inner.hasher.hash_one(name)));
        let (mut page, mut examined) = (Page::default(), 0);
        for (place, shard) in inner.shards.iter().enumerate().skip(first) {
            let after = after.filter(|_| place == first);
            let table = shard.lock();
            let now = inner.now();
            let is_left = |name: &RecordName| after.is_none_or(|after| name > after);
            let left = table.iter().map(|slot| &*slot.entry);
            let mut chosen: Vec<_> = left
                .filter(|entry| is_left(&entry.name))
                .map(|entry| (&entry.name, entry.record.read(now)))
                .filter(|(name, record)| filter.matches(name, record))
                .collect();
            chosen.sort_unstable_by_key(|(name, _)| *name);
            for (name, record) in chosen {
                page.records.push((name.clone(), record));
                if page.records.len() == limit {
                    page.next = Some(name.clone());
                    return Ok(page);
                }
            }
            examined += table.len();
            if examined >= MOST_EXAMINED
                && let Some(last) = table.iter().map(|slot| &slot.entry.name).max()
            {
                page.next = Some(last.clone());
                return Ok(page);
            }
        }
        Ok(page)
    }

    async fn purge_expired(
        &self,
        limit: u32,
        unknown_retention: Duration,
    ) -> Result<Purged, StoreError> {
        let inner = &*self.inner;
        inner.usage().sweep(inner.now());
        let mut purged = Purged::default();
        let mut has_swept = false;
        for shard in &inner.shards {
            let now = inner.now();
            if purged.touched() >= u64::from(limit) {
                break;
            }
            if !shard.is_due(now) {
                continue;
            }
            // Requests go on between the shards.
            if mem::replace(&mut has_swept, true) {
                yield_now().await;
            }
            inner.sweep(shard, |record| {
                if purged.touched() >= u64::from(limit) {
                    return Swept::Kept;
                }
                let swept = record.sweep(unknown_retention, now);
                purged.add(swept);
                swept
            });
        }
        Ok(purged)
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

/// Enough that a shard which grows delays few calls, and only briefly.
const SHARDS: usize = 1024;

/// The number of records that one page of a list examines, and up to a shard more.
const MOST_EXAMINED: usize = 10_000;
