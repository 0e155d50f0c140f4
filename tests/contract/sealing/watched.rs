//! A store in front of another one. It remembers the bytes that it received, and can return
//! changed records, as if somebody had written to its table.

use std::{
    sync::{Arc, Mutex},
    time::Duration,
};

use tower_idempotency::{
    DynStore, Fence, Store, StoreError,
    store::{
        Claim, Claimed, Grant, OwnerTransition, Purged, ReclaimAs, Record, RecordName, Transition,
        Transitioned, Usage, UsageDelta,
        admin::{Count, Filter, Page},
    },
};

#[derive(Clone)]
pub(super) struct Watched(Arc<Inner>);

struct Inner {
    store: DynStore,
    received: Mutex<Vec<u8>>,
    counted: Mutex<Vec<u8>>,
    change: Mutex<Option<Change>>,
}

type Change = Arc<dyn Fn(&RecordName, Record) -> Record + Send + Sync>;

impl Watched {
    pub(super) fn new(store: DynStore) -> Self {
        Self(Arc::new(Inner {
            store,
            received: Mutex::default(),
            counted: Mutex::default(),
            change: Mutex::default(),
        }))
    }

    /// Every byte of names, fingerprints and responses that the store was given.
    pub(super) fn received(&self) -> Vec<u8> {
        self.0.received.lock().unwrap().clone()
    }

    /// Every scope whose usage the store was asked to add up.
    pub(super) fn counted(&self) -> Vec<u8> {
        self.0.counted.lock().unwrap().clone()
    }

    /// From now on, returns this in the place of each record.
    pub(super) fn change(
        &self,
        change: impl Fn(&RecordName, Record) -> Record + Send + Sync + 'static,
    ) {
        *self.0.change.lock().unwrap() = Some(Arc::new(change));
    }

    fn receive(&self, name: &RecordName, bytes: &[u8]) {
        let mut received = self.0.received.lock().unwrap();
        for part in [
            name.scope().as_str().as_bytes(),
            name.key().as_str().as_bytes(),
            bytes,
        ] {
            received.extend_from_slice(part);
            received.push(b'\n');
        }
    }

    fn changed(&self, name: &RecordName, record: Record) -> Record {
        match &*self.0.change.lock().unwrap() {
            Some(change) => change(name, record),
            None => record,
        }
    }
}

impl Store for Watched {
    async fn claim(&self, name: &RecordName, claim: &Claim) -> Result<Claimed, StoreError> {
        self.receive(name, claim.fingerprint.as_bytes());
        Ok(match self.0.store.claim(name, claim).await? {
            Claimed::Occupied(record) => Claimed::Occupied(self.changed(name, record)),
            other => other,
        })
    }

    async fn reclaim(
        &self,
        name: &RecordName,
        seen: Fence,
        reclaim_as: ReclaimAs,
        claim: &Claim,
    ) -> Result<Option<Grant>, StoreError> {
        self.receive(name, claim.fingerprint.as_bytes());
        self.0.store.reclaim(name, seen, reclaim_as, claim).await
    }

    async fn transition(
        &self,
        name: &RecordName,
        transition: Transition,
    ) -> Result<Transitioned, StoreError> {
        let bytes = match &transition {
            Transition::Owner(_, OwnerTransition::Complete(completion)) => &completion.response,
            _ => &bytes::Bytes::new(),
        };
        self.receive(name, bytes);
        self.0.store.transition(name, transition).await
    }

    async fn read(&self, name: &RecordName) -> Result<Option<Record>, StoreError> {
        let record = self.0.store.read(name).await?;
        Ok(record.map(|record| self.changed(name, record)))
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

    async fn purge_expired(
        &self,
        limit: u32,
        unknown_retention: Duration,
    ) -> Result<Purged, StoreError> {
        self.0.store.purge_expired(limit, unknown_retention).await
    }

    async fn wait(&self, name: &RecordName, seen: Fence) -> Result<(), StoreError> {
        self.0.store.wait(name, seen).await
    }

    async fn add_usage(&self, deltas: &[UsageDelta]) -> Result<Option<Vec<Usage>>, StoreError> {
        for delta in deltas {
            let mut counted = self.0.counted.lock().unwrap();
            counted.extend_from_slice(delta.scope.as_str().as_bytes());
            counted.push(b'\n');
        }
        self.0.store.add_usage(deltas).await
    }

    async fn now(&self) -> Result<Duration, StoreError> {
        self.0.store.now().await
    }
}
