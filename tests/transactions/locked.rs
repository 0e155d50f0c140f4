//! Records that other transactions have locked.

use std::{
    sync::{Arc, Mutex},
    time::Duration,
};

use axum::response::IntoResponse as _;
use tower_idempotency::{
    Key, PostgresStore, Scope, Store as _,
    sqlx::{Connection as _, PgConnection, raw_sql},
    store::{Claim, Claimed, Fingerprint, ReclaimAs, RecordName, Release, Transitioned},
};

use crate::{
    commit::order,
    proxy::{Network, Proxy},
    service::Service,
    shop::{SHORT, with_postgres},
};

#[tokio::test(flavor = "multi_thread")]
async fn f106_a_lost_commit_is_found_while_strangers_lock_other_records() {
    with_postgres(async |shop| {
        let proxy = Proxy::to(&shop.url).await;
        let store = PostgresStore::builder(proxy.options(&shop.url))
            .lock_timeout(Duration::from_secs(4))
            .acquire_timeout(Duration::from_secs(60))
            .connect()
            .await
            .unwrap();
        let mut calls = Vec::new();
        for number in 0..40 {
            let name =
                RecordName::new(Scope::single_tenant(), Key::new(format!("locked {number}")));
            let claim = claim();
            let Claimed::Acquired(grant) = store.claim(&name, &claim).await.unwrap() else {
                panic!("claimed before");
            };
            let released = store
                .release(&name, claim.token, Release::SameRequest)
                .await;
            assert_eq!(released.unwrap(), Transitioned::Applied);
            calls.extend([(name.clone(), grant.fence), (name, grant.fence)]);
        }
        let mut stranger = PgConnection::connect(&shop.url).await.unwrap();
        let mut locks = stranger.begin().await.unwrap();
        raw_sql("SELECT FROM idempotency_records FOR UPDATE")
            .execute(&mut *locks)
            .await
            .unwrap();
        let reclaims: Vec<_> = calls
            .into_iter()
            .map(|(name, fence)| {
                let store = store.clone();
                tokio::spawn(async move {
                    loop {
                        let claim = claim();
                        let _ = store.reclaim(&name, fence, ReclaimAs::Retry, &claim).await;
                    }
                })
            })
            .collect();
        tokio::time::sleep(SHORT).await;

        let shop = shop.with_store(store.clone());
        let told = Arc::new(Mutex::new(Vec::new()));
        let noted = Arc::clone(&told);
        let service = Service::new(&shop, move |run| {
            let noted = Arc::clone(&noted);
            async move {
                let committed = order(&run).await;
                noted.lock().unwrap().push(committed.is_ok());
                committed.into_response()
            }
        });
        let service = service.set(|layer| layer.store_timeout(6 * SHORT));
        proxy.set(Network::CutAfter);
        service.post("key").await.assert_is(201, "ordered by run 1");
        assert_eq!(*told.lock().unwrap(), [true]);
        assert!(service.post("key").await.is_replay());
        for reclaim in reclaims {
            assert!(!reclaim.is_finished());
            reclaim.abort();
        }
        locks.rollback().await.unwrap();
        store.close().await;
    })
    .await;
}

fn claim() -> Claim {
    let hour = Duration::from_secs(3600);
    Claim::new(
        Fingerprint::from_bytes([1; Fingerprint::LENGTH]),
        hour,
        hour,
    )
}
