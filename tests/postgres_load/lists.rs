//! Lists and sweeps of a large table.

use std::time::Duration;

use tokio::time::timeout;
use tower_idempotency::{
    PostgresStore, Store,
    sqlx::{Connection as _, PgConnection, Row as _, query, query_scalar},
    store::{
        RecordName, Transitioned,
        admin::{Filter, Page},
    },
};

use crate::{
    HOUR, claimed,
    databases::{options, run, with_database},
    migrated, name,
    proxy::Proxy,
    response, store, until,
};

#[tokio::test(flavor = "multi_thread")]
async fn unknown_records_are_found_without_reading_the_table() {
    with_large_table(async |url| {
        let fresh = store(options(&url)).await;
        for number in 0..5 {
            unknown(&fresh, &name("unknown", &number.to_string())).await;
        }
        fresh.close().await;
        let read = read_by(&url, async |store| {
            let (mut names, mut after) = (Vec::new(), None);
            loop {
                let page = store
                    .list(&Filter::unknown(), after.as_ref(), 2)
                    .await
                    .unwrap();
                names.extend(page.records.into_iter().map(|(name, _)| name));
                after = page.next;
                if after.is_none() {
                    break;
                }
            }
            let expected = (0..5).map(|number| name("unknown", &number.to_string()));
            assert!(names.iter().eq(&expected.collect::<Vec<_>>()));
        })
        .await;
        assert!(read < 100, "{read} rows were read");
    })
    .await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_page_of_running_records_reads_part_of_the_table() {
    with_large_table(async |url| {
        let fresh = store(options(&url)).await;
        let last = name("z", "in progress");
        claimed(&fresh, &last).await;
        let old = Filter::in_progress_for(Duration::ZERO);
        let read = read_by(&url, async |store| {
            let page = store.list(&old, None, 10).await.unwrap();
            assert!(page.records.is_empty() && page.next.is_some());
        })
        .await;
        assert!(read <= 3_000, "{read} rows were read");
        let (mut pages, mut after) = (0, None);
        let found = loop {
            let Page { records, next, .. } = fresh.list(&old, after.as_ref(), 10).await.unwrap();
            pages += 1;
            after = next;
            if after.is_none() {
                break records;
            }
            assert!(records.is_empty());
        };
        assert_eq!(found[0].0, last);
        assert!(pages >= ROWS / 2_000, "{pages} pages");
        fresh.close().await;
    })
    .await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_sweep_reads_only_records_that_have_expired() {
    with_large_table(async |url| {
        run(
            &url,
            "UPDATE idempotency_records SET expires_at = claimed_at - 3600000000
             WHERE key IN ('10', '20000', '50000')",
        )
        .await;
        let read = read_by(&url, async |store| {
            let purged = store.purge_expired(500, HOUR).await.unwrap();
            assert_eq!(purged.removed, 3);
        })
        .await;
        assert!(read < 100, "{read} rows were read");
    })
    .await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_slow_list_delays_no_request() {
    with_database(async |url| {
        let proxy = Proxy::to(&url).await;
        let store = migrated(
            PostgresStore::builder(proxy.options(&url))
                .max_connections(1)
                .statement_timeout(Duration::from_secs(60)),
        )
        .await;
        for number in 0..100 {
            let key = format!("{number} {}", "k".repeat(500));
            unknown(&store, &name("unknown", &key)).await;
        }
        proxy.stick_after(20_000);
        let listing = tokio::spawn({
            let store = store.clone();
            async move { store.list(&Filter::unknown(), None, 1_000).await.unwrap() }
        });
        until(async || proxy.stuck() > 0).await;
        let requests = async {
            for number in 0..20 {
                let (name, done) = (name("caller", &number.to_string()), response(100));
                let (claim, _) = claimed(&store, &name).await;
                let completed = store.complete(&name, claim.token, &done).await;
                assert_eq!(completed.unwrap(), Transitioned::Applied);
            }
        };
        timeout(Duration::from_secs(30), requests).await.unwrap();
        assert!(!listing.is_finished());
        proxy.stick_after(usize::MAX);
        assert_eq!(listing.await.unwrap().records.len(), 100);
        store.close().await;
    })
    .await;
}

/// A table of completed records, which the server never analyzed.
async fn with_large_table(test: impl AsyncFnOnce(String)) {
    with_database(async |url| {
        let fresh = store(options(&url)).await;
        let first = name("large", "0");
        let (claim, _) = claimed(&fresh, &first).await;
        let completed = fresh.complete(&first, claim.token, &response(100)).await;
        assert_eq!(completed.unwrap(), Transitioned::Applied);
        fresh.close().await;
        run(
            &url,
            "ALTER TABLE idempotency_records SET (autovacuum_enabled = off)",
        )
        .await;
        run(
            &url,
            &format!(
                "INSERT INTO idempotency_records
                     (scope, key, state, attempt, takeovers, fence, claimed_at, lease_until,
                      expires_at, operation, token, fingerprint, response)
                 SELECT scope, number::text, state, attempt, takeovers, fence, claimed_at,
                        lease_until, expires_at + number::bigint * 1000000, operation,
                        token, fingerprint, response
                 FROM idempotency_records, generate_series(1, {ROWS}) AS number"
            ),
        )
        .await;
        test(url).await;
    })
    .await;
}

/// The number of rows that a store read, as the server counts.
async fn read_by(url: &str, calls: impl AsyncFnOnce(PostgresStore)) -> i64 {
    let mut connection = PgConnection::connect(url).await.unwrap();
    // A backend reports its last counts when it ends.
    until(async || {
        let others: i64 = query_scalar(
            "SELECT count(*) FROM pg_stat_activity
             WHERE datname = current_database() AND backend_type = 'client backend'
               AND application_name <> 'tower-idempotency' AND pid <> pg_backend_pid()",
        )
        .fetch_one(&mut connection)
        .await
        .unwrap();
        others == 0
    })
    .await;
    run(url, "SELECT pg_stat_reset()").await;
    let store = store(options(url)).await;
    calls(store.clone()).await;
    store.close().await;
    let mut read = 0;
    until(async || {
        let row = query(
            "SELECT COALESCE(seq_scan, 0) + COALESCE(idx_scan, 0),
                    COALESCE(seq_tup_read, 0) + COALESCE(idx_tup_fetch, 0)
             FROM pg_stat_user_tables WHERE relname = 'idempotency_records'",
        )
        .fetch_one(&mut connection)
        .await
        .unwrap();
        read = row.get(1);
        row.get::<i64, _>(0) > 0
    })
    .await;
    read
}

async fn unknown(store: &PostgresStore, name: &RecordName) {
    let (claim, _) = claimed(store, name).await;
    let marked = store.mark_unknown(name, claim.token, HOUR).await;
    assert_eq!(marked.unwrap(), Transitioned::Applied);
}

const ROWS: usize = 50_000;
