//! Completed records kept in this process's memory, in front of any store.

use std::{
    fmt,
    hash::{BuildHasher as _, RandomState},
    sync::{Arc, Mutex, MutexGuard, PoisonError},
    time::Duration,
};

use quick_cache::{Weighter, sync::Cache};
use tokio::time::Instant;

use super::{
    Claim, Claimed, Grant, Purged, ReclaimAs, Record, RecordName, RecordState, Store, StoreError,
    Transition, Transitioned, Usage, UsageDelta,
    admin::{Count, Filter, Page},
};
use crate::store::Fence;

/// A store in front of another one, which replays responses from this process's memory.
///
/// Only a replay comes from memory: a claim whose record is completed, has not expired,
/// and has the fingerprint of the claim. All other answers come from the store behind.
/// So no handler runs because of a record in the cache. A record in progress or unknown
/// is never kept.
///
/// **A record that was [forgotten](Store::forget) through another `CachedStore`, or past
/// this one, is still replayed for up to `max_staleness`.** Through this one it is not,
/// once the call has returned: a call that is dropped may reach the store later. An expired
/// record is not replayed either: the time that was left when the record was read must not
/// have passed on the clock of this process.
///
/// A record is kept when it is replayed for the first time. Those that are replayed
/// seldom give way when `max_bytes` are reached. Clones share the cache.
///
/// ```
/// use std::time::Duration;
/// use tower_idempotency::{MemoryStore, store::CachedStore};
///
/// // 64 MiB, and an operator's `forget` counts everywhere after 2 seconds.
/// let store = CachedStore::new(MemoryStore::new(), 64 << 20, Duration::from_secs(2));
/// assert!(store.get_ref().is_empty());
/// ```
pub struct CachedStore<S>(Arc<Inner<S>>);

struct Inner<S> {
    store: S,
    kept: Cache<RecordName, Kept, Bytes>,
    max_staleness: Duration,
    changes: Box<[Mutex<u64>]>,
    hasher: RandomState,
}

#[derive(Clone)]
struct Kept {
    record: Record,
    /// Before the store was asked.
    asked_at: Instant,
}

impl<S> CachedStore<S> {
    /// Keeps up to `max_bytes` of records from `store`, and replays each for up to
    /// `max_staleness` before the store is asked again.
    #[must_use]
    pub fn new(store: S, max_bytes: u64, max_staleness: Duration) -> Self {
        let records = (max_bytes / TYPICAL_BYTES).try_into().unwrap_or(usize::MAX);
        Self(Arc::new(Inner {
            store,
            kept: Cache::with_weighter(records, max_bytes, Bytes),
            max_staleness,
            changes: (0..STRIPES).map(|_| Mutex::default()).collect(),
            hasher: RandomState::new(),
        }))
    }

    /// The store behind.
    #[must_use]
    pub fn get_ref(&self) -> &S {
        &self.0.store
    }

    /// How many bytes are kept: responses, names and about 300 bytes for each record.
    #[must_use]
    pub fn kept_bytes(&self) -> u64 {
        self.0.kept.weight()
    }
}

impl<S> Inner<S> {
    fn replay(&self, name: &RecordName, claim: &Claim) -> Option<Record> {
        let Kept { record, asked_at } = self.kept.get(name)?;
        let elapsed = asked_at.elapsed();
        if elapsed > self.max_staleness || record.fingerprint != claim.fingerprint {
            return None;
        }
        Some(Record {
            age: record.age.saturating_add(elapsed),
            expires_in: Some(record.expires_in?.checked_sub(elapsed)?),
            ..record
        })
    }

    /// How often records with names like this one were changed, locked.
    fn changes(&self, name: &RecordName) -> MutexGuard<'_, u64> {
        let stripe = self.hasher.hash_one(name) as usize % self.changes.len();
        let changes = &self.changes[stripe];
        changes.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Forgets the record once the call has ended, also by being dropped.
    fn changing<'a>(&'a self, name: &'a RecordName) -> Changing<'a, S> {
        Changing(self, name)
    }
}

struct Changing<'a, S>(&'a Inner<S>, &'a RecordName);

impl<S> Drop for Changing<'_, S> {
    fn drop(&mut self) {
        let Self(inner, name) = self;
        let mut changes = inner.changes(name);
        *changes += 1;
        inner.kept.remove(*name);
    }
}

impl<S: Store> Store for CachedStore<S> {
    async fn claim(&self, name: &RecordName, claim: &Claim) -> Result<Claimed, StoreError> {
        let inner = &*self.0;
        if let Some(record) = inner.replay(name, claim) {
            return Ok(Claimed::Occupied(record));
        }
        let changes = *inner.changes(name);
        let asked_at = Instant::now();
        let claimed = inner.store.claim(name, claim).await?;
        if let Claimed::Occupied(record) = &claimed
            && matches!(record.state, RecordState::Completed { .. })
            && claim.reads_response
        {
            let kept = Kept {
                record: record.clone(),
                asked_at,
            };
            // A record that was changed meanwhile would come back here.
            let now = inner.changes(name);
            if *now == changes {
                inner.kept.insert(name.clone(), kept);
            }
        }
        Ok(claimed)
    }

    async fn now(&self) -> Result<Duration, StoreError> {
        self.0.store.now().await
    }

    async fn reclaim(
        &self,
        name: &RecordName,
        seen: Fence,
        reclaim_as: ReclaimAs,
        claim: &Claim,
    ) -> Result<Option<Grant>, StoreError> {
        let _changing = self.0.changing(name);
        self.0.store.reclaim(name, seen, reclaim_as, claim).await
    }

    async fn transition(
        &self,
        name: &RecordName,
        transition: Transition,
    ) -> Result<Transitioned, StoreError> {
        let _changing = self.0.changing(name);
        self.0.store.transition(name, transition).await
    }

    async fn read(&self, name: &RecordName) -> Result<Option<Record>, StoreError> {
        self.0.store.read(name).await
    }

    async fn list(
        &self,
        filter: &Filter,
        after: Option<&RecordName>,
        limit: u32,
    ) -> Result<Page, StoreError> {
        self.0.store.list(filter, after, limit).await
    }

    async fn count(&self, filter: &Filter, limit: u32) -> Result<Count, StoreError> {
        self.0.store.count(filter, limit).await
    }

    async fn wait(&self, name: &RecordName, seen: Fence) -> Result<(), StoreError> {
        self.0.store.wait(name, seen).await
    }

    async fn add_usage(&self, deltas: &[UsageDelta]) -> Result<Option<Vec<Usage>>, StoreError> {
        self.0.store.add_usage(deltas).await
    }

    async fn purge_expired(
        &self,
        limit: u32,
        unknown_retention: Duration,
    ) -> Result<Purged, StoreError> {
        self.0.store.purge_expired(limit, unknown_retention).await
    }
}

/// Shares the cache.
impl<S> Clone for CachedStore<S> {
    fn clone(&self) -> Self {
        Self(self.0.clone())
    }
}

impl<S: fmt::Debug> fmt::Debug for CachedStore<S> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("CachedStore")
            .field("store", &self.0.store)
            .field("max_staleness", &self.0.max_staleness)
            .finish_non_exhaustive()
    }
}

#[derive(Clone)]
struct Bytes;

impl Weighter<RecordName, Kept> for Bytes {
    fn weight(&self, name: &RecordName, kept: &Kept) -> u64 {
        let response = match &kept.record.state {
            RecordState::Completed { response } => response.len(),
            _ => 0,
        };
        let name = name.scope().as_str().len() + name.key().as_str().len();
        (response + name + ENTRY_BYTES) as u64
    }
}

/// What an entry takes besides its response and its name.
const ENTRY_BYTES: usize = size_of::<(RecordName, Kept)>() + 64;
/// A response of half a kibibyte, and the rest of its entry.
const TYPICAL_BYTES: u64 = 1024;
/// Of the counters of changes. Two names that share one only miss a replay.
const STRIPES: usize = 64;
