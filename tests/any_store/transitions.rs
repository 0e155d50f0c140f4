//! A store that is the transition function and a map.

use std::{
    collections::BTreeMap,
    sync::{Mutex, MutexGuard},
    time::Duration,
};

use tokio::time::Instant;
use tower_idempotency::{
    Fence, Store, StoreError,
    store::{
        Claim, Claimed, Grant, Purged, ReclaimAs, Record, RecordName, RecordState, Transition,
        Transitioned,
        admin::{Filter, FilterKind, Page},
        transition::{StoredRecord, Swept},
    },
};

/// The reference for every store. Only its answers count: it is in memory and slow.
pub(crate) struct TransitionStore {
    records: Mutex<BTreeMap<RecordName, StoredRecord>>,
    start: Instant,
}

impl TransitionStore {
    pub(crate) fn new() -> Self {
        Self {
            records: Mutex::default(),
            start: Instant::now(),
        }
    }

    fn records(&self) -> MutexGuard<'_, BTreeMap<RecordName, StoredRecord>> {
        self.records.lock().unwrap()
    }

    fn elapsed(&self) -> Duration {
        self.start.elapsed()
    }
}

impl Store for TransitionStore {
    async fn claim(&self, name: &RecordName, claim: &Claim) -> Result<Claimed, StoreError> {
        let (now, mut records) = (self.elapsed(), self.records());
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
    ) -> Result<Option<Grant>, StoreError> {
        let (now, mut records) = (self.elapsed(), self.records());
        let record = records.get_mut(name);
        Ok(record.and_then(|record| record.reclaim(seen, reclaim_as, claim, now)))
    }

    async fn transition(
        &self,
        name: &RecordName,
        transition: Transition,
    ) -> Result<Transitioned, StoreError> {
        let (now, mut records) = (self.elapsed(), self.records());
        Ok(match records.get_mut(name) {
            Some(record) => record.apply(&transition, now),
            None => Transitioned::Superseded,
        })
    }

    async fn read(&self, name: &RecordName) -> Result<Option<Record>, StoreError> {
        let now = self.elapsed();
        Ok(self.records().get(name).map(|record| record.read(now)))
    }

    /// All records on one page.
    async fn list(
        &self,
        filter: &Filter,
        _: Option<&RecordName>,
        _: u32,
    ) -> Result<Page, StoreError> {
        let now = self.elapsed();
        let records = self.records();
        let records = records
            .iter()
            .map(|(name, record)| (name, record.read(now)));
        let chosen = records.filter(|(_, record)| match filter.kind {
            FilterKind::Unknown => matches!(record.state, RecordState::Unknown),
            FilterKind::InProgressFor(age) => {
                matches!(record.state, RecordState::InProgress { .. }) && record.age > age
            }
            _ => unreachable!("the tests use no other filter"),
        });
        Ok(Page {
            records: chosen
                .map(|(name, record)| (name.clone(), record))
                .collect(),
            ..Page::default()
        })
    }

    /// Sweeps all records, whatever the limit.
    async fn purge_expired(
        &self,
        _: u32,
        unknown_retention: Duration,
    ) -> Result<Purged, StoreError> {
        let now = self.elapsed();
        let mut purged = Purged::default();
        self.records().retain(|_, record| {
            let swept = record.sweep(unknown_retention, now);
            purged.add(swept);
            !matches!(swept, Swept::Remove { .. })
        });
        Ok(purged)
    }
}
