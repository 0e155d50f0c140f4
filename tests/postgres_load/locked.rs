//! Records that another transaction has locked.

use std::time::Duration;

use tokio::{task::JoinHandle, time::timeout};
use tower_idempotency::{
    PostgresStore, Store, StoreError, StoreErrorKind,
    sqlx::{Connection as _, PgConnection, raw_sql},
    store::{
        Claimed, Grant, ReclaimAs, RecordName, Release, Transitioned,
        admin::{Filter, Resolution},
    },
};

use crate::{
    HOUR, claimed,
    databases::{options, with_database},
    hour, name, response, store, until,
};

/// All calls that an owner, a retry or an operator may make for a locked record.
fn ask_everything(
    store: &PostgresStore,
    (name, claim, grant): &(RecordName, tower_idempotency::store::Claim, Grant),
) -> Vec<JoinHandle<Result<(), StoreError>>> {
    let (claim, fence) = (*claim, grant.fence);
    let with = || (store.clone(), name.clone());
    let mut asked = Vec::new();
    for reclaim_as in [ReclaimAs::Takeover, ReclaimAs::Retry, ReclaimAs::Rerun] {
        let (store, name) = with();
        asked.push(tokio::spawn(async move {
            let claim = hour();
            let reclaimed = store.reclaim(&name, fence, reclaim_as, &claim);
            reclaimed.await.map(drop)
        }));
    }
    let (store, name) = with();
    asked.push(tokio::spawn(async move {
        let done = response(10);
        let completed = store.complete(&name, claim.token, &done);
        completed.await.map(drop)
    }));
    let (store, name) = with();
    asked.push(tokio::spawn(async move {
        store.renew(&name, claim.token, HOUR).await.map(drop)
    }));
    let (store, name) = with();
    asked.push(tokio::spawn(async move {
        let resolution = Resolution::DidNotHappen;
        store
            .resolve(&name, fence, &resolution, HOUR)
            .await
            .map(drop)
    }));
    let (store, name) = with();
    asked.push(tokio::spawn(async move {
        store.forget(&name, fence).await.map(drop)
    }));
    asked
}

#[tokio::test(flavor = "multi_thread")]
async fn f106_locked_records_of_strangers_delay_no_other_scope() {
    with_database(async |url| {
        let store = store(options(&url)).await;
        let mut held = Vec::new();
        for number in 0..20 {
            let name = name("locked", &format!("key {number}"));
            let (claim, grant) = claimed(&store, &name).await;
            held.push((name, claim, grant));
        }
        let released = name("other", "released");
        let (claim, retried) = claimed(&store, &released).await;
        let done = store
            .release(&released, claim.token, Release::SameRequest)
            .await;
        assert_eq!(done.unwrap(), Transitioned::Applied);
        let unknown = name("other", "unknown");
        let (claim, grant) = claimed(&store, &unknown).await;
        let marked = store.mark_unknown(&unknown, claim.token, HOUR).await;
        assert_eq!(marked.unwrap(), Transitioned::Applied);

        let mut stranger = PgConnection::connect(&url).await.unwrap();
        let mut locks = stranger.begin().await.unwrap();
        raw_sql("SELECT FROM idempotency_records WHERE scope = 'locked' FOR UPDATE")
            .execute(&mut *locks)
            .await
            .unwrap();
        // Twice, since foreign locks may last longer than any call.
        let asked: Vec<_> = [&held, &held]
            .into_iter()
            .flatten()
            .flat_map(|held| ask_everything(&store, held))
            .collect();
        tokio::time::sleep(Duration::from_millis(100)).await;

        let others = async {
            let again = hour();
            let again = store.reclaim(&released, retried.fence, ReclaimAs::Retry, &again);
            assert!(again.await.unwrap().is_some());
            let resolution = Resolution::DidNotHappen;
            let resolved = store
                .resolve(&unknown, grant.fence, &resolution, HOUR)
                .await;
            assert_eq!(resolved.unwrap(), Transitioned::Applied);
            let forgotten = store.forget(&unknown, grant.fence).await;
            assert_eq!(forgotten.unwrap(), Transitioned::Applied);
            store.list(&Filter::unknown(), None, 10).await.unwrap();
            store.purge_expired(10, HOUR).await.unwrap();
            // A claim of a locked record reads it.
            let seen = store.claim(&held[0].0, &hour()).await.unwrap();
            assert!(matches!(seen, Claimed::Occupied(_)));
            let (fresh, done) = (name("other", "fresh"), response(10));
            let (claim, _) = claimed(&store, &fresh).await;
            let completed = store.complete(&fresh, claim.token, &done).await;
            assert_eq!(completed.unwrap(), Transitioned::Applied);
        };
        // Before any call to a locked record times out.
        timeout(Duration::from_millis(1500), others).await.unwrap();

        // A transition whose guard does not hold is refused at once.
        for asked in asked {
            if let Err(error) = asked.await.unwrap() {
                assert_eq!(error.kind(), StoreErrorKind::TimedOut);
            }
        }
        for (name, claim, _) in &held {
            let record = store.read(name).await.unwrap().unwrap();
            assert_eq!(record.token, claim.token);
        }
        locks.rollback().await.unwrap();
        store.close().await;
    })
    .await;
}

#[tokio::test(flavor = "multi_thread")]
async fn f106_a_call_resumes_once_the_lock_is_released() {
    with_database(async |url| {
        let store = store(options(&url)).await;
        let mut stranger = PgConnection::connect(&url).await.unwrap();
        for round in 0..3 {
            let name = name("caller", &format!("key {round}"));
            let (claim, grant) = claimed(&store, &name).await;
            let mut lock = stranger.begin().await.unwrap();
            raw_sql("SELECT FROM idempotency_records FOR UPDATE")
                .execute(&mut *lock)
                .await
                .unwrap();
            let held = (name.clone(), claim, grant);
            let asked = ask_everything(&store, &held);
            tokio::time::sleep(Duration::from_millis(100)).await;
            lock.rollback().await.unwrap();
            for asked in asked {
                asked.await.unwrap().unwrap();
            }
            // The later of complete and forget decides.
            until(async || store.read(&name).await.unwrap().unwrap().token != claim.token).await;
        }
        store.close().await;
    })
    .await;
}
