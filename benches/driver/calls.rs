//! The calls of a store that a request makes.

use std::{
    sync::atomic::{AtomicU64, Ordering},
    time::Duration,
};

use bytes::Bytes;
use tower_idempotency::{
    Key, Scope, Store,
    store::{Claim, Claimed, Completion, Fingerprint, RecordName, Transitioned},
};

/// Keys that look random and come in no order.
pub(crate) fn key() -> String {
    let number = NEXT.fetch_add(1, Ordering::Relaxed);
    let scattered = number.wrapping_mul(0x9e37_79b9_7f4a_7c15);
    format!("{scattered:016x}-{:08x}", std::process::id())
}

pub(crate) fn name(key: String) -> RecordName {
    RecordName::new(Scope::single_tenant(), Key::new(key))
}

/// The bytes of a recorded response.
pub(crate) fn response() -> Bytes {
    Bytes::from(vec![7; 512])
}

pub(crate) fn claim() -> Claim {
    Claim::new(
        Fingerprint::from_bytes([1; Fingerprint::LENGTH]),
        LEASE,
        RETENTION,
    )
}

/// The calls of a fresh request.
pub(crate) async fn claim_and_complete(store: &impl Store) {
    complete(store, &name(key())).await;
}

pub(crate) async fn complete(store: &impl Store, name: &RecordName) {
    let claim = claim();
    let claimed = store.claim(name, &claim).await.unwrap();
    assert!(matches!(claimed, Claimed::Acquired(_)), "{claimed:?}");
    let settled = store.complete(name, claim.token, &completion()).await;
    assert_eq!(settled.unwrap(), Transitioned::Applied);
}

pub(crate) fn completion() -> Completion {
    Completion::new(response(), RETENTION, Duration::ZERO)
}

/// The call of a fresh request before its run.
pub(crate) async fn claim_only(store: &impl Store) {
    let claimed = store.claim(&name(key()), &claim()).await.unwrap();
    assert!(matches!(claimed, Claimed::Acquired(_)), "{claimed:?}");
}

/// The call of a retry.
pub(crate) async fn find(store: &impl Store, name: &RecordName) {
    let claimed = store.claim(name, &claim()).await.unwrap();
    assert!(matches!(claimed, Claimed::Occupied(_)), "{claimed:?}");
}

static NEXT: AtomicU64 = AtomicU64::new(0);
const LEASE: Duration = Duration::from_secs(30);
const RETENTION: Duration = Duration::from_secs(24 * 3600);
