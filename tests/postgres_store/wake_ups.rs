//! Waiters of another process: of another store on the same database.

use std::{pin::pin, time::Duration};

use tokio::time::timeout;
use tower_idempotency::{
    Fence, PostgresStore, Release, Store,
    sqlx::{Connection as _, PgConnection, postgres::PgListener, query, query_scalar},
    store::{ReclaimAs, RecordName},
};

use crate::{
    any_store::{HOUR, acquired, applied, done, hour, name},
    databases::options,
    with_store,
};

/// Long enough for a busy machine.
const PATIENCE: Duration = Duration::from_secs(20);
/// Long enough for a wake-up that should not come.
const SOON: Duration = Duration::from_millis(200);

async fn another(url: &str) -> PostgresStore {
    PostgresStore::builder(options(url))
        .connect()
        .await
        .unwrap()
}

/// Waits for the claim in another process, and ends it meanwhile.
async fn is_woken_by(
    store: &PostgresStore,
    other: &PostgresStore,
    name: &RecordName,
    seen: Fence,
    end: impl Future<Output = ()>,
) {
    let mut waiter = pin!(other.wait(name, seen));
    assert!(timeout(SOON, &mut waiter).await.is_err());
    let record = store.read(name).await.unwrap().unwrap();
    assert_eq!(record.fence, seen);
    end.await;
    timeout(PATIENCE, waiter).await.unwrap().unwrap();
}

#[tokio::test(flavor = "multi_thread")]
async fn a_waiter_is_woken_when_its_claim_ends_elsewhere() {
    with_store(async |store, url| {
        let other = another(&url).await;
        for end in ["complete", "release", "unknown"] {
            let (name, claim) = (name("caller", end), hour());
            let seen = acquired(store.claim(&name, &claim).await).fence;
            let end = async {
                let token = claim.token;
                applied(match end {
                    "complete" => store.complete(&name, token, &done()).await,
                    "release" => store.release(&name, token, Release::AnyRequest).await,
                    _ => store.mark_unknown(&name, token, HOUR).await,
                });
            };
            is_woken_by(&store, &other, &name, seen, end).await;
        }
        other.close().await;
    })
    .await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_heartbeat_wakes_no_waiter() {
    with_store(async |store, url| {
        let other = another(&url).await;
        let (name, claim) = (name("caller", "key"), hour());
        let seen = acquired(store.claim(&name, &claim).await).fence;
        let mut waiter = Box::pin(other.wait(&name, seen));
        assert!(timeout(SOON, &mut waiter).await.is_err());
        applied(store.renew(&name, claim.token, HOUR).await);
        assert!(timeout(SOON, &mut waiter).await.is_err());
        applied(store.complete(&name, claim.token, &done()).await);
        timeout(PATIENCE, waiter).await.unwrap().unwrap();
        other.close().await;
    })
    .await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_claim_that_has_ended_is_not_waited_for() {
    with_store(async |store, _| {
        let (name, claim) = (name("caller", "key"), hour());
        let seen = acquired(store.claim(&name, &claim).await).fence;
        applied(store.complete(&name, claim.token, &done()).await);
        for seen in [seen, Fence::from(1)] {
            timeout(PATIENCE, store.wait(&name, seen))
                .await
                .unwrap()
                .unwrap();
        }
    })
    .await;
}

#[tokio::test(flavor = "multi_thread")]
async fn claims_that_nobody_awaits_notify_nobody() {
    with_store(async |store, url| {
        let mut listener = PgListener::connect(&url).await.unwrap();
        listener.listen("idempotency_claims").await.unwrap();
        let claims: Vec<_> = (0..100)
            .map(|n| (name("caller", &n.to_string()), hour()))
            .collect();
        for (name, claim) in &claims {
            acquired(store.claim(name, claim).await);
        }
        let ends = claims.iter().map(|(name, claim)| async {
            applied(store.complete(name, claim.token, &done()).await);
        });
        futures_util::future::join_all(ends).await;
        let mut connection = PgConnection::connect(&url).await.unwrap();
        let last = query("SELECT pg_notify('idempotency_claims', 'last')");
        last.execute(&mut connection).await.unwrap();
        let first = timeout(PATIENCE, listener.recv()).await.unwrap().unwrap();
        assert_eq!(first.payload(), "last");
    })
    .await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_reclaim_awaits_nothing_of_the_claim_before() {
    with_store(async |store, url| {
        let other = another(&url).await;
        let (name, claim) = (name("caller", "key"), hour());
        let seen = acquired(store.claim(&name, &claim).await).fence;
        let end = async { applied(store.mark_unknown(&name, claim.token, HOUR).await) };
        is_woken_by(&store, &other, &name, seen, end).await;

        let again = store.reclaim(&name, seen, ReclaimAs::Rerun, &hour()).await;
        assert!(again.unwrap().unwrap().fence > seen);
        let mut connection = PgConnection::connect(&url).await.unwrap();
        let awaited = query_scalar("SELECT awaited FROM idempotency_records");
        let awaited: bool = awaited.fetch_one(&mut connection).await.unwrap();
        assert!(!awaited);
        other.close().await;
    })
    .await;
}

#[tokio::test(flavor = "multi_thread")]
async fn waiters_listen_again_after_a_lost_connection() {
    with_store(async |store, url| {
        let other = another(&url).await;
        let mut connection = PgConnection::connect(&url).await.unwrap();
        for round in 0..2 {
            let (name, claim) = (name("caller", &round.to_string()), hour());
            let seen = acquired(store.claim(&name, &claim).await).fence;
            let end = async { applied(store.complete(&name, claim.token, &done()).await) };
            is_woken_by(&store, &other, &name, seen, end).await;
            let ended = query(
                "SELECT pg_terminate_backend(pid) FROM pg_stat_activity
                 WHERE datname = current_database() AND query LIKE 'LISTEN%'",
            );
            let ended = ended.fetch_all(&mut connection).await.unwrap();
            assert_eq!(ended.len(), 1);
            // Until the process has noticed.
            tokio::time::sleep(Duration::from_millis(1500)).await;
        }
        other.close().await;
    })
    .await;
}
