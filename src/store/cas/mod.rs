//! A store on any engine with an atomic compare-and-swap, such as etcd, NATS or DynamoDB.

mod backend;
mod observed;
mod usage;

use std::{fmt, sync::Arc, time::Duration};

use bytes::Bytes;

pub use self::backend::{CompareAndSwap, Listed, Swap, Versioned};
use self::{observed::Observed, usage::is_usage};
use super::{
    Claim, Claimed, Grant, Purged, ReclaimAs, Record, RecordName, Store, StoreError,
    StoreErrorKind, Transition, Transitioned, Usage, UsageDelta,
    admin::{Filter, Page},
    transition::{State, StoredRecord, Swept},
};
use crate::{
    key::{Key, Scope},
    store::Fence,
};

/// A store on an engine with compare-and-swap: `examples/etcd_store.rs` is one on etcd.
///
/// Each call reads a record, makes one transition of it, and swaps it in. It starts again
/// if another process was faster. A claim of a new name is one call of the backend, and so is a
/// replay. Clones share what they observed.
///
/// # Time
///
/// **A lease needs no clock that hosts share.** A record says how long its lease is, and
/// each heartbeat gives it a new version. A lease has lapsed for a process that has seen
/// one version unchanged for the lease and its hundredth part, on its own monotonic clock.
/// A takeover succeeds only if the version is still the same. So wall clocks may
/// differ by anything. Monotonic clocks may run 1 % apart.
///
/// A process begins to observe a record when a claim, a [`read`](Store::read), a
/// [`list`](Store::list) or a sweep first finds it in progress: until then the lease counts
/// as new. After a crash, a process that has not seen the record waits one lease for it.
/// Up to 100,000 observations are kept. More only make leases last longer.
///
/// **A record expires by the wall clock of the process that looks at it.** If two hosts'
/// clocks differ by a second, a retention is a second longer or shorter for one of them. A
/// record in progress with a live lease never expires.
///
/// **Fences** come from the engine, if [`FENCE`](CompareAndSwap::FENCE) says so. Otherwise
/// they come from the clock, and grow as long as clocks differ by less than the retention
/// of a record that is swept.
///
/// # Lost answers
///
/// After an error of a write, the record is read once. If it is what was to be written, the
/// call succeeds. Otherwise it fails, as any call whose effect is not known, and may be made
/// again with its token.
///
/// # Sweeping
///
/// [`purge_expired`](Store::purge_expired) reads all records, 500 at a time. Let one
/// process sweep a large store, and seldom. A page of [`list`](Store::list) looks at 500
/// records too.
pub struct CasStore<B: CompareAndSwap>(Arc<Inner<B>>);

struct Inner<B: CompareAndSwap> {
    backend: B,
    observed: Observed<B::Version>,
}

impl<B: CompareAndSwap> CasStore<B> {
    /// A store on `backend`.
    #[must_use]
    pub fn new(backend: B) -> Self {
        let observed = Observed::default();
        Self(Arc::new(Inner { backend, observed }))
    }

    /// The backend.
    #[must_use]
    pub fn get_ref(&self) -> &B {
        &self.0.backend
    }

    /// Decodes a record that was just read. Its moments are on the clock that says `now`.
    fn load(
        &self,
        key: &str,
        found: &Versioned<B::Version>,
    ) -> Result<(StoredRecord, Duration), StoreError> {
        let Inner { backend, observed } = &*self.0;
        let now = backend.now();
        let mut record = StoredRecord::from_bytes(found.value.clone())?;
        if record.fence == OF_ITS_VERSION {
            let fence = B::FENCE.ok_or_else(|| StoreError::corrupt("record: fence"))?;
            record.fence = fence(&found.version);
        }
        match &mut record.state {
            State::InProgress { lease_until } => {
                let lease = *lease_until;
                *lease_until = match observed.lease_left(key, found.version.clone(), lease) {
                    Some(left) => now.saturating_add(left),
                    None => now.saturating_sub(Duration::from_nanos(1)),
                };
            }
            _ => observed.forget(key),
        }
        Ok((record, now))
    }

    /// Writes a record if the key still has the version `expected`, or none. Returns the
    /// written record, or the one that is there.
    async fn write(
        &self,
        key: &str,
        mut record: StoredRecord,
        now: Duration,
        expected: Option<&B::Version>,
    ) -> Result<Result<StoredRecord, Option<Versioned<B::Version>>>, StoreError> {
        let backend = &self.0.backend;
        let value = encode(&record, now);
        let written = match backend.put(key, value.clone(), expected).await {
            Ok(Swap::Written(version)) => version,
            Ok(Swap::Lost(found)) => return Ok(Err(found)),
            Err(error) if error.sent_nothing() => return Err(error),
            // The value has the token, so that it tells whose write it was.
            Err(error) => match backend.get(key).await {
                Ok(Some(found)) if found.value == value && expected != Some(&found.version) => {
                    found.version
                }
                _ => return Err(error),
            },
        };
        if let Some(fence) = B::FENCE.filter(|_| record.fence == OF_ITS_VERSION) {
            record.fence = fence(&written);
        }
        Ok(Ok(record))
    }

    /// Makes one change of a record, and returns the changed record. Returns `None`
    /// if there is no record, or if `change` does, because its guard does not hold.
    async fn change(
        &self,
        name: &RecordName,
        change: impl Fn(StoredRecord, Duration) -> Option<StoredRecord> + Send,
    ) -> Result<Option<StoredRecord>, StoreError> {
        let key = key_of(name);
        let mut found = self.0.backend.get(&key).await?;
        while let Some(before) = found {
            let (record, now) = self.load(&key, &before)?;
            let Some(after) = change(record.clone(), now) else {
                return Ok(None);
            };
            // Only a renewal or a grant leaves a record in progress. It needs a new version,
            // even if nothing else of the record is new.
            if after == record && !after.is_in_progress() {
                return Ok(Some(after));
            }
            let written = self.write(&key, after, now, Some(&before.version));
            match written.await? {
                Ok(written) => return Ok(Some(written)),
                Err(lost) => found = lost,
            }
        }
        Ok(None)
    }

    /// Sweeps one record. Leaves a record that another process has changed.
    async fn sweep(
        &self,
        key: &str,
        found: &Versioned<B::Version>,
        unknown_retention: Duration,
    ) -> Result<Swept, StoreError> {
        let (mut record, now) = self.load(key, found)?;
        let swept = record.sweep(unknown_retention, now);
        let is_done = match swept {
            Swept::Kept => true,
            Swept::MarkedUnknown => {
                let marked = self.write(key, record, now, Some(&found.version));
                marked.await?.is_ok()
            }
            Swept::Remove { .. } => self.0.backend.delete(key, &found.version).await?,
        };
        Ok(if is_done { swept } else { Swept::Kept })
    }
}

impl<B: CompareAndSwap> Store for CasStore<B> {
    async fn now(&self) -> Result<Duration, StoreError> {
        Ok(self.0.backend.now())
    }

    async fn claim(&self, name: &RecordName, claim: &Claim) -> Result<Claimed, StoreError> {
        let key = key_of(name);
        let now = self.0.backend.now();
        let record = of_its_write::<B>(StoredRecord::claimed(claim, now));
        let mut lost = match self.write(&key, record, now, None).await? {
            Ok(written) => return Ok(Claimed::Acquired(written.grant())),
            Err(lost) => lost,
        };
        while let Some(found) = lost {
            let (record, now) = self.load(&key, &found)?;
            let mut again = record.clone();
            let claimed = again.claim(claim, now);
            if again == record {
                return Ok(claimed);
            }
            // It is the claim's own, and has a new fence.
            let written = self.write(&key, of_its_write::<B>(again), now, Some(&found.version));
            lost = match written.await? {
                Ok(written) => return Ok(Claimed::Occupied(written.read(now))),
                Err(lost) => lost,
            };
        }
        Ok(Claimed::Vanished)
    }

    async fn reclaim(
        &self,
        name: &RecordName,
        seen: Fence,
        reclaim_as: ReclaimAs,
        claim: &Claim,
    ) -> Result<Option<Grant>, StoreError> {
        let reclaimed = self.change(name, |mut record, now| {
            let granted = record.reclaim(seen, reclaim_as, claim, now);
            granted.map(|_| of_its_write::<B>(record))
        });
        Ok(reclaimed.await?.map(|record| record.grant()))
    }

    async fn transition(
        &self,
        name: &RecordName,
        transition: Transition,
    ) -> Result<Transitioned, StoreError> {
        let changed = self.change(name, |mut record, now| {
            let transitioned = record.apply(&transition, now);
            (transitioned == Transitioned::Applied).then_some(record)
        });
        Ok(match changed.await? {
            Some(_) => Transitioned::Applied,
            None => Transitioned::Superseded,
        })
    }

    /// One value for each scope, which is read and swapped in. A call for several scopes is
    /// not atomic.
    async fn add_usage(&self, deltas: &[UsageDelta]) -> Result<Option<Vec<Usage>>, StoreError> {
        self.add_usage_of_scopes(deltas).await.map(Some)
    }

    async fn read(&self, name: &RecordName) -> Result<Option<Record>, StoreError> {
        let key = key_of(name);
        let Some(found) = self.0.backend.get(&key).await? else {
            return Ok(None);
        };
        let (record, now) = self.load(&key, &found)?;
        Ok(Some(record.read(now)))
    }

    /// In the order of the scopes, and of the keys in each.
    async fn list(
        &self,
        filter: &Filter,
        after: Option<&RecordName>,
        limit: u32,
    ) -> Result<Page, StoreError> {
        let scope = filter.scope.as_ref();
        let prefix = scope.map_or_else(String::new, |scope| format!("{}\0", scope.as_str()));
        let (mut page, mut after) = (Page::default(), after.map(key_of));
        // A page that ends at no name has only keys that name no record.
        while page.next.is_none() {
            let listed = self.0.backend.list(&prefix, after.as_deref(), PAGE).await?;
            let Some((last, _)) = listed.last() else {
                break;
            };
            after = Some(last.clone());
            for (key, found) in listed {
                // A sweep returns the error of a key that names no record.
                let Ok(name) = name_of(&key) else {
                    continue;
                };
                page.next = Some(name.clone());
                if is_usage(&key) {
                    continue;
                }
                let read = self.load(&key, &found);
                let read = read.map(|(record, now)| record.read(now));
                let is_chosen = |record: &Record| filter.matches(&name, record);
                if read.as_ref().map_or(true, is_chosen) {
                    page.add(name, read)?;
                    if page.records.len() >= limit.max(1) as usize {
                        return Ok(page);
                    }
                }
            }
        }
        Ok(page)
    }

    /// An unreadable record is left. It is the error if nothing else was due.
    async fn purge_expired(
        &self,
        limit: u32,
        unknown_retention: Duration,
    ) -> Result<Purged, StoreError> {
        let (mut purged, mut after, mut unreadable) = (Purged::default(), None, None);
        loop {
            let listed = self.0.backend.list("", after.as_deref(), PAGE).await?;
            let is_over = listed.is_empty();
            for (key, found) in listed {
                if purged.touched() >= u64::from(limit) {
                    return Ok(purged);
                }
                let swept = match is_usage(&key) {
                    true => self.sweep_usage(&key, &found).await.map(|()| Swept::Kept),
                    false => self.sweep(&key, &found, unknown_retention).await,
                };
                match swept {
                    Ok(swept) => purged.add(swept),
                    Err(error) if error.kind() == StoreErrorKind::Corrupt => {
                        unreadable = Some(error);
                    }
                    Err(error) => return Err(error),
                }
                after = Some(key);
            }
            if is_over {
                return purged.or_unreadable(unreadable);
            }
        }
    }
}

/// Shares the observations.
impl<B: CompareAndSwap> Clone for CasStore<B> {
    fn clone(&self) -> Self {
        Self(self.0.clone())
    }
}

impl<B: CompareAndSwap> fmt::Debug for CasStore<B> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("CasStore").finish_non_exhaustive()
    }
}

/// A record whose claim is granted by the write that follows. Its fence is the version of
/// that write, if the backend says so.
fn of_its_write<B: CompareAndSwap>(record: StoredRecord) -> StoredRecord {
    let fence = B::FENCE.map_or(record.fence, |_| OF_ITS_VERSION);
    StoredRecord { fence, ..record }
}

/// Encodes a record with the length of its lease in place of the moment at which the
/// lease lapses, which no other host could compare with its clock.
fn encode(record: &StoredRecord, now: Duration) -> Bytes {
    let State::InProgress { lease_until } = record.state else {
        return record.to_bytes();
    };
    let lease_until = lease_until.saturating_sub(now);
    let state = State::InProgress { lease_until };
    StoredRecord {
        state,
        ..record.clone()
    }
    .to_bytes()
}

/// Neither a scope nor a key has a NUL, so that no two names have the same key.
fn key_of(name: &RecordName) -> String {
    format!("{}\0{}", name.scope().as_str(), name.key().as_str())
}

fn name_of(key: &str) -> Result<RecordName, StoreError> {
    let parts = key.split_once('\0');
    let (scope, key) = parts.ok_or_else(|| StoreError::corrupt("key without a NUL"))?;
    Ok(RecordName::new(Scope::from_stored(scope), Key::new(key)))
}

/// In place of the fence of a claim, where that is the version of this very write. No
/// clock gives it.
const OF_ITS_VERSION: Fence = Fence::ZERO;

/// How many records are listed by one call of the backend.
const PAGE: u32 = 500;
