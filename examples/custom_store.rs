//! A custom store on `store::transition`, checked by the conformance suite.
//!
//! A lock around a map makes each call atomic. A store on a server loads a record, calls
//! the same method on it, and writes it back by compare-and-swap. Run it with
//! `cargo run --example custom_store --features conformance`.

use std::{
    collections::BTreeMap,
    ops::Bound::{Excluded, Unbounded},
    sync::{Arc, Mutex, MutexGuard},
    time::Duration,
};

use tokio::time::Instant;
use tower_idempotency::{
    Fence, Store, StoreError,
    conformance::{Subject, promises},
    store::{
        Claim, Claimed, Grant, Purged, ReclaimAs, Record, RecordName, Transition, Transitioned,
        admin::{Filter, Page},
        transition::{StoredRecord, Swept},
    },
};

type Result<T> = std::result::Result<T, StoreError>;

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
        MapStore(Arc::default(), Instant::now())
    }

    async fn pass(&self, time: Duration) {
        tokio::time::advance(time).await;
    }
}

/// The records, and the origin of the store's clock.
#[derive(Clone)]
pub(crate) struct MapStore(Arc<Mutex<Records>>, Instant);

type Records = BTreeMap<RecordName, StoredRecord>;

impl MapStore {
    /// Reads the clock under the lock.
    fn lock(&self) -> (MutexGuard<'_, Records>, Duration) {
        let records = self.0.lock().expect("no call panics");
        (records, self.1.elapsed())
    }
}

impl Store for MapStore {
    async fn claim(&self, name: &RecordName, claim: &Claim) -> Result<Claimed> {
        let (mut records, now) = self.lock();
        if let Some(record) = records.get_mut(name) {
            return Ok(record.claim(claim, now));
        }
        let record = StoredRecord::claimed(claim, now);
        let grant = record.grant();
        records.insert(name.clone(), record);
        Ok(Claimed::Acquired(grant))
    }

    async fn reclaim(
        &self,
        name: &RecordName,
        seen: Fence,
        reclaim_as: ReclaimAs,
        claim: &Claim,
    ) -> Result<Option<Grant>> {
        let (mut records, now) = self.lock();
        let record = records.get_mut(name);
        Ok(record.and_then(|record| record.reclaim(seen, reclaim_as, claim, now)))
    }

    async fn transition(&self, name: &RecordName, to: Transition) -> Result<Transitioned> {
        let (mut records, now) = self.lock();
        let record = records.get_mut(name);
        Ok(record.map_or(Transitioned::Superseded, |record| record.apply(&to, now)))
    }

    async fn read(&self, name: &RecordName) -> Result<Option<Record>> {
        let (records, now) = self.lock();
        Ok(records.get(name).map(|record| record.read(now)))
    }

    async fn list(&self, filter: &Filter, after: Option<&RecordName>, limit: u32) -> Result<Page> {
        let (records, now) = self.lock();
        let rest = (after.map_or(Unbounded, Excluded), Unbounded);
        let mut page = Page::default();
        // Holds the lock briefly, however many records there are.
        for (name, record) in records.range(rest).take(10_000) {
            let record = record.read(now);
            page.next = Some(name.clone());
            if filter.matches(name, &record) {
                page.records.push((name.clone(), record));
            }
            if page.records.len() >= limit.max(1) as usize {
                break;
            }
        }
        Ok(page)
    }

    async fn purge_expired(&self, limit: u32, unknown_retention: Duration) -> Result<Purged> {
        let (mut records, now) = self.lock();
        let mut purged = Purged::default();
        records.retain(|_, record| {
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
