//! Many requests with one key, and records that another process wrote.

use std::time::Duration;

use bytes::Bytes;
use tokio::task::JoinHandle;
use tower_idempotency::{
    DynStore, IdempotencyBuilder, Store,
    store::{Claim, Claimed, Completion, Transitioned},
};

use crate::api::{Answer, fingerprint, keyed, named, required};

/// A layer for many requests at once on a machine with little to spare.
pub(crate) fn patient(store: impl Store) -> IdempotencyBuilder<DynStore> {
    required(DynStore::new(store))
        .lease(Duration::from_secs(120))
        .store_timeout(Duration::from_secs(60))
}

/// The outputs of all these tasks.
pub(crate) async fn all<T>(asked: Vec<JoinHandle<T>>) -> Vec<T> {
    let mut answers = Vec::new();
    for each in asked {
        answers.push(each.await.unwrap());
    }
    answers
}

/// Waits until every request but one is refused because that one runs, and
/// returns it.
pub(crate) async fn the_only_runner(mut asked: Vec<JoinHandle<Answer>>) -> JoinHandle<Answer> {
    while asked.len() > 1 {
        let (ended, running): (Vec<_>, Vec<_>) =
            asked.into_iter().partition(JoinHandle::is_finished);
        for answer in all(ended).await {
            answer.assert_problem(409, "request-in-progress");
        }
        asked = running;
        tokio::time::sleep(Duration::from_millis(5)).await;
    }
    asked.remove(0)
}

/// Claims `key` for `keyed("K")`, as another process does.
pub(crate) async fn claimed_elsewhere(
    store: &impl Store,
    key: &str,
    lease: Duration,
    retention: Duration,
) -> Claim {
    let claim = Claim::new(fingerprint(keyed("K")).await, lease, retention);
    let claimed = store.claim(&named(key), &claim).await.unwrap();
    assert!(matches!(claimed, Claimed::Acquired(_)));
    // Where no clock is shared, a lease counts from when this process sees the record.
    store.read(&named(key)).await.unwrap();
    claim
}

/// Completes `key` for `keyed("K")` with these bytes, as another process does.
pub(crate) async fn completed_elsewhere(store: &impl Store, key: &str, response: Bytes) {
    let hour = Duration::from_secs(3600);
    let claim = claimed_elsewhere(store, key, hour, hour).await;
    let completion = Completion::new(response, hour, hour);
    let completed = store.complete(&named(key), claim.token, &completion).await;
    assert_eq!(completed.unwrap(), Transitioned::Applied);
}
