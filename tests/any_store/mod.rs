//! What the tests of a store share, whichever store it is.

pub(crate) mod guards;
pub(crate) mod reference;
mod transitions;

use std::time::Duration;

use bytes::Bytes;
use tower_idempotency::{
    Key, Scope, Store, StoreError,
    store::{Claim, Claimed, Completion, Fingerprint, Grant, ReclaimAs, RecordName, Transitioned},
};

pub(crate) fn name(scope: &str, key: &str) -> RecordName {
    RecordName::new(Scope::from_stored(scope), Key::new(key))
}

/// A claim with a lease and a retention of an hour.
pub(crate) fn hour() -> Claim {
    Claim::new(fingerprint(1), HOUR, HOUR)
}

/// A claim whose record expires on its completion.
pub(crate) fn expiring() -> Claim {
    Claim::new(fingerprint(1), HOUR, Duration::ZERO)
}

pub(crate) fn fingerprint(body: u8) -> Fingerprint {
    Fingerprint::from_bytes([body; Fingerprint::LENGTH])
}

/// A response that is kept for an hour.
pub(crate) fn done() -> Completion {
    Completion::new(Bytes::from_static(&[7; 300]), HOUR, Duration::ZERO)
}

/// The grant of a claim that must be acquired.
#[track_caller]
pub(crate) fn acquired(answer: Result<Claimed, StoreError>) -> Grant {
    match answer.unwrap() {
        Claimed::Acquired(grant) => grant,
        other => panic!("{other:?}"),
    }
}

#[track_caller]
pub(crate) fn applied(answer: Result<Transitioned, StoreError>) {
    assert_eq!(answer.unwrap(), Transitioned::Applied);
}

#[track_caller]
pub(crate) fn superseded(answer: Result<Transitioned, StoreError>) {
    assert_eq!(answer.unwrap(), Transitioned::Superseded);
}

/// Reclaims for an hour the record that `seen` was granted.
pub(crate) async fn reclaimed(
    store: &impl Store,
    name: &RecordName,
    seen: Grant,
    reclaim_as: ReclaimAs,
) -> Option<Grant> {
    let reclaimed = store.reclaim(name, seen.fence, reclaim_as, &hour()).await;
    reclaimed.unwrap()
}

/// Completes a record of [`expiring`] and lets it expire.
pub(crate) async fn expire(store: &impl Store, name: &RecordName, claim: &Claim) {
    let gone = Completion::new(Bytes::new(), Duration::ZERO, Duration::ZERO);
    applied(store.complete(name, claim.token, &gone).await);
    past().await;
}

/// Claims `name`, completes it and lets it expire.
pub(crate) async fn expired(store: &impl Store, name: &RecordName) -> Claim {
    let claim = expiring();
    acquired(store.claim(name, &claim).await);
    expire(store, name, &claim).await;
    claim
}

/// Waits for more than one tick of the coarsest clock, so that durations of zero
/// are over.
pub(crate) async fn past() {
    tokio::time::sleep(Duration::from_millis(3)).await;
}

pub(crate) const HOUR: Duration = Duration::from_secs(3600);
