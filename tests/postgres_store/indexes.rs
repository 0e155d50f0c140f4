//! The rows and index entries that calls touch, as the server counts them.

use std::time::Duration;

use futures_util::future::join_all;
use tower_idempotency::{
    PostgresStore, Store,
    sqlx::{Connection as _, PgConnection, Row as _, query},
    store::Transitioned,
};

use crate::{
    any_store::{HOUR, acquired, applied, done, hour, name},
    databases::run,
    with_store,
};

#[tokio::test(flavor = "multi_thread")]
async fn a_completion_touches_no_index() {
    with_store(async |store, url| {
        for burst in 0..20 {
            let claims: Vec<_> = (0..5)
                .map(|n| (name("s", &format!("{burst} {n}")), hour()))
                .collect();
            for (name, claim) in &claims {
                acquired(store.claim(name, claim).await);
            }
            for (name, claim) in &claims {
                applied(store.renew(name, claim.token, HOUR).await);
                applied(store.complete(name, claim.token, &done()).await);
            }
        }
        let changes = changes_after(store, &url, 200).await;
        assert_eq!((changes.updated, changes.hot), (200, 200));
    })
    .await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_batch_of_completions_touches_no_index() {
    with_store(async |store, url| {
        for number in 0..10 {
            burst(&store, number).await;
        }
        let changes = changes_after(store, &url, 400).await;
        assert_eq!(changes.inserted, 400);
        assert_eq!((changes.updated, changes.hot), (400, 400));
    })
    .await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_batch_uses_the_index_after_its_table_has_grown() {
    with_store(async |store, url| {
        run(
            &url,
            "ALTER TABLE idempotency_records SET (autovacuum_enabled = off)",
        )
        .await;
        burst(&store, 0).await;
        // Few records, and none of them in progress.
        run(&url, "ANALYZE idempotency_records").await;
        // Until the server has chosen a generic plan.
        for number in 1..10 {
            burst(&store, number).await;
        }
        run(
            &url,
            "INSERT INTO idempotency_records
             SELECT scope, 'more ' || number, state, attempt, takeovers, fence, claimed_at,
                    lease_until, expires_at, operation, token, fingerprint, response
             FROM idempotency_records, generate_series(1, 20000) AS number
             WHERE key = 'burst 0 0'",
        )
        .await;
        for number in 10..20 {
            burst(&store, number).await;
        }
        let changes = changes_after(store, &url, 800).await;
        assert!(changes.seen < 20_000, "{} entries read", changes.seen);
    })
    .await;
}

/// Claims and completes 40 records at once.
async fn burst(store: &PostgresStore, number: usize) {
    let one = |n: usize| {
        let store = store.clone();
        tokio::spawn(async move {
            let (name, claim) = (name("caller", &format!("burst {number} {n}")), hour());
            acquired(store.claim(&name, &claim).await);
            let completed = store.complete(&name, claim.token, &done()).await;
            assert_eq!(completed.unwrap(), Transitioned::Applied);
        })
    };
    for done in join_all((0..40).map(one)).await {
        done.unwrap();
    }
}

/// Counts of the server.
struct Changes {
    inserted: i64,
    updated: i64,
    hot: i64,
    /// Entries of the primary key.
    seen: i64,
}

/// The counts of the table, once they include at least `updates`.
async fn changes_after(store: PostgresStore, url: &str, updates: i64) -> Changes {
    // A backend reports its last counts when it ends.
    store.close().await;
    let mut connection = PgConnection::connect(url).await.unwrap();
    let mut updated = 0;
    for _ in 0..100 {
        let row = query(
            "SELECT n_tup_upd, n_tup_ins, n_tup_hot_upd, idx_tup_read
             FROM pg_stat_user_tables JOIN pg_stat_user_indexes USING (relid)
             WHERE indexrelname = 'idempotency_records_pkey'",
        )
        .fetch_one(&mut connection)
        .await
        .unwrap();
        updated = row.get(0);
        if updated >= updates {
            return Changes {
                updated,
                inserted: row.get(1),
                hot: row.get(2),
                seen: row.get(3),
            };
        }
        tokio::time::sleep(Duration::from_millis(50)).await;
    }
    panic!("{updated} updates instead of {updates}");
}
