//! A store in which every name has the same record.

use std::time::Duration;

use tower_idempotency::{
    Fence, OperationId, Store, StoreError,
    store::{
        Claim, Claimed, Fingerprint, Grant, Purged, ReclaimAs, Record, RecordName, RecordState,
        Token, Transition, Transitioned,
        admin::{Filter, Page},
    },
};

pub(crate) struct RecordStore {
    pub(crate) state: RecordState,
    /// That of each request if there is none.
    pub(crate) fingerprint: Option<Fingerprint>,
}

impl RecordStore {
    /// The record of the request that asks.
    pub(crate) fn of_same_request(state: RecordState) -> Self {
        Self {
            state,
            fingerprint: None,
        }
    }
}

/// The record is never claimed again, and never changed.
impl Store for RecordStore {
    async fn claim(&self, _: &RecordName, claim: &Claim) -> Result<Claimed, StoreError> {
        Ok(Claimed::Occupied(Record {
            operation: OperationId::from_bytes([1; 16]),
            fence: Fence::from(1),
            attempt: 1,
            takeovers: 0,
            fingerprint: self.fingerprint.unwrap_or(claim.fingerprint),
            token: Token::from_bytes([1; 16]),
            age: Duration::from_secs(2),
            expires_in: Some(Duration::from_secs(3)),
            state: self.state.clone(),
        }))
    }

    async fn reclaim(
        &self,
        _: &RecordName,
        _: Fence,
        _: ReclaimAs,
        _: &Claim,
    ) -> Result<Option<Grant>, StoreError> {
        panic!("the record was claimed again")
    }

    async fn transition(&self, _: &RecordName, _: Transition) -> Result<Transitioned, StoreError> {
        panic!("the record was changed")
    }

    async fn read(&self, _: &RecordName) -> Result<Option<Record>, StoreError> {
        Ok(None)
    }

    async fn list(&self, _: &Filter, _: Option<&RecordName>, _: u32) -> Result<Page, StoreError> {
        panic!("records were listed")
    }

    async fn purge_expired(&self, _: u32, _: Duration) -> Result<Purged, StoreError> {
        panic!("records were swept")
    }
}
