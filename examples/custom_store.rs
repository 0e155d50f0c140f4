//! A store of one's own on `store::transition`, checked by the conformance suite.
//!
//! A lock around a map makes each call atomic. A store on a server loads one record,
//! calls the same method on it, and writes it back by a compare-and-swap.
//!
//! ```sh
//! cargo run --example custom_store --features conformance
//! ```

use std::{
    collections::BTreeMap,
    ops::Bound::{Excluded, Unbounded},
    sync::{Arc, Mutex, MutexGuard},
    time::Duration,
};

use tokio::time::Instant;
use tower_idempotency::{
    Fence, RecordName, Store, StoreError,
    conformance::{Subject, promises},
    store::{
        Claim, Claimed, Grant, Purged, ReclaimAs, Record, Transition, Transitioned,
        admin::{Filter, Page},
        transition::{StoredRecord, Swept},
    },
};

/// Panics at the first promise that the store breaks.
#[tokio::main(flavor = "current_thread", start_paused = true)]
pub(crate) async fn main() {
    for promise in promises() {
        promise.check(NewMap).await;
    }
}

/// Tells the suite how to make a store, and how time passes for it.
pub(crate) struct NewMap;

impl Subject for NewMap {
    type Store = MapStore;
    const TICK: Option<Duration> = Some(Duration::from_nanos(1));

    async fn store(&self) -> MapStore {
        MapStore {
            table: Arc::default(),
            start: Instant::now(),
        }
    }

    async fn pass(&self, time: Duration) {
        tokio::time::advance(time).await;
    }
}

#[derive(Clone)]
pub(crate) struct MapStore {
    table: Arc<Mutex<Table>>,
    start: Instant,
}

#[derive(Default)]
struct Table {
    records: BTreeMap<RecordName, StoredRecord>,
    /// Outlives every record: fences grow over removals too.
    last_fence: u64,
}

impl Table {
    fn next_fence(&mut self) -> Fence {
        self.last_fence += 1;
        Fence::from(self.last_fence)
    }
}

impl MapStore {
    /// The table, and the time now that it is locked.
    fn lock(&self) -> (MutexGuard<'_, Table>, Duration) {
        let table = self.table.lock().expect("no call panics");
        (table, self.start.elapsed())
    }
}

impl Store for MapStore {
    async fn claim(&self, name: &RecordName, claim: &Claim) -> Result<Claimed, StoreError> {
        let (mut table, now) = self.lock();
        if let Some(record) = table.records.get(name) {
            return Ok(Claimed::Occupied(record.read(now)));
        }
        let record = StoredRecord::claimed(claim, table.next_fence(), now);
        let grant = record.grant();
        table.records.insert(name.clone(), record);
        Ok(Claimed::Acquired(grant))
    }

    async fn reclaim(
        &self,
        name: &RecordName,
        seen: Fence,
        reclaim_as: ReclaimAs,
        claim: &Claim,
    ) -> Result<Option<Grant>, StoreError> {
        let (mut table, now) = self.lock();
        let next = table.next_fence();
        let record = table.records.get_mut(name);
        Ok(record.and_then(|record| record.reclaim(seen, reclaim_as, claim, next, now)))
    }

    async fn transition(
        &self,
        name: &RecordName,
        transition: Transition<'_>,
    ) -> Result<Transitioned, StoreError> {
        let (mut table, now) = self.lock();
        let record = table.records.get_mut(name);
        Ok(record.map_or(Transitioned::Superseded, |record| {
            record.apply(transition, now)
        }))
    }

    async fn read(&self, name: &RecordName) -> Result<Option<Record>, StoreError> {
        let (table, now) = self.lock();
        Ok(table.records.get(name).map(|record| record.read(now)))
    }

    async fn list(
        &self,
        filter: &Filter,
        after: Option<&RecordName>,
        limit: u32,
    ) -> Result<Page, StoreError> {
        let (table, now) = self.lock();
        let rest = (after.map_or(Unbounded, Excluded), Unbounded);
        let mut page = Page::default();
        for (name, record) in table.records.range(rest) {
            if page.records.len() >= limit.max(1) as usize {
                page.next = page.records.last().map(|(name, _)| name.clone());
                break;
            }
            let record = record.read(now);
            if filter.matches(name, &record) {
                page.records.push((name.clone(), record));
            }
        }
        Ok(page)
    }

    async fn forget(&self, name: &RecordName, seen: Fence) -> Result<Transitioned, StoreError> {
        let (mut table, _) = self.lock();
        match table.records.get(name) {
            Some(record) if record.grant().fence == seen => {
                table.records.remove(name);
                Ok(Transitioned::Applied)
            }
            _ => Ok(Transitioned::Superseded),
        }
    }

    async fn purge_expired(
        &self,
        limit: u32,
        unknown_retention: Duration,
    ) -> Result<Purged, StoreError> {
        let (mut table, now) = self.lock();
        let mut purged = Purged::default();
        table.records.retain(|_, record| {
            if purged.touched() >= u64::from(limit) {
                return true;
            }
            let swept = record.sweep(unknown_retention, now);
            purged.add(swept);
            !matches!(swept, Swept::Remove { .. })
        });
        Ok(purged)
    }
}
