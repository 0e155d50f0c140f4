//! Calls that share a statement: each fails alone, and none waits for a locked
//! record.

use std::time::{Duration, Instant};

use futures_util::future::join_all;
use tower_idempotency::{
    PostgresStore, Store, StoreErrorKind,
    sqlx::{Connection as _, PgConnection, raw_sql},
    store::{Claimed, RecordName, RecordState, Token, Transitioned},
};

use crate::{
    any_store::{HOUR, acquired, applied, done, hour, name},
    databases::{options, run, with_database},
    hex, migrated, with_store,
};

#[tokio::test(flavor = "multi_thread")]
async fn i9_an_unreadable_row_fails_only_its_own_claim() {
    with_store(async |store, url| {
        let damaged = name("caller", "damaged");
        acquired(store.claim(&damaged, &hour()).await);
        run(&url, "UPDATE idempotency_records SET fingerprint = 'short'").await;
        for round in 0..10 {
            let fresh = (0..40).map(|n| {
                let (store, name) = (store.clone(), name("caller", &format!("{round} {n}")));
                async move { store.claim(&name, &hour()).await }
            });
            let again = hour();
            let (fresh, failed) = tokio::join!(join_all(fresh), store.claim(&damaged, &again));
            for claimed in fresh {
                acquired(claimed);
            }
            assert_eq!(failed.unwrap_err().kind(), StoreErrorKind::Corrupt);
        }
    })
    .await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_name_that_cannot_be_kept_fails_alone_among_many() {
    with_store(async |store, _| {
        let calls = (0..60).map(|number| {
            // PostgreSQL's text has no NUL.
            let odd = if number % 20 == 7 { "\0" } else { "" };
            let name = name("caller", &format!("key {number}{odd}"));
            let store = store.clone();
            tokio::spawn(async move { store.claim(&name, &hour()).await })
        });
        for (number, claimed) in join_all(calls).await.into_iter().enumerate() {
            match claimed.unwrap() {
                Ok(Claimed::Acquired(_)) => assert_ne!(number % 20, 7),
                Err(error) => {
                    assert_eq!(number % 20, 7, "{error:?}");
                    assert_eq!(error.kind(), StoreErrorKind::Unavailable);
                }
                other => panic!("{other:?}"),
            }
        }
    })
    .await;
}

#[tokio::test(flavor = "multi_thread")]
async fn no_batch_waits_for_a_transaction_on_one_record() {
    with_database(async |url| {
        let store = migrated(
            PostgresStore::builder(options(&url))
                .lock_timeout(Duration::from_secs(60))
                .statement_timeout(Duration::from_secs(60)),
        )
        .await;
        let mut held = Vec::new();
        for number in 0..40 {
            let (name, claim) = (name("caller", &format!("key {number}")), hour());
            acquired(store.claim(&name, &claim).await);
            held.push((name, claim.token));
        }
        // As a handler that has completed its record but not committed yet.
        let mut other = PgConnection::connect(&url).await.unwrap();
        let mut open = other.begin().await.unwrap();
        raw_sql("SELECT FROM idempotency_records WHERE key = 'key 0' FOR NO KEY UPDATE")
            .execute(&mut *open)
            .await
            .unwrap();
        let (locked, free) = held.split_first().unwrap();
        let complete = |(name, token): &(RecordName, Token)| {
            let (store, name, token) = (store.clone(), name.clone(), *token);
            tokio::spawn(async move { store.complete(&name, token, &done()).await.unwrap() })
        };
        let claim = |name: RecordName| {
            let store = store.clone();
            tokio::spawn(async move { store.claim(&name, &hour()).await.unwrap() })
        };
        for _ in 0..5 {
            // Before and among the others, in a batch and alone.
            let waits = complete(locked);
            let done: Vec<_> = free.iter().map(complete).collect();
            let again = claim(locked.0.clone());
            let claimed: Vec<_> = (0..40)
                .map(|_| claim(name("caller", &hex(Token::random()))))
                .collect();
            for done in done {
                assert_eq!(done.await.unwrap(), Transitioned::Applied);
            }
            assert!(matches!(again.await.unwrap(), Claimed::Occupied(_)));
            for claimed in claimed {
                assert!(matches!(claimed.await.unwrap(), Claimed::Acquired(_)));
            }
            assert!(!waits.is_finished());
        }
        open.rollback().await.unwrap();
        assert_eq!(complete(locked).await.unwrap(), Transitioned::Applied);
        store.close().await;
    })
    .await;
}

#[tokio::test(flavor = "multi_thread")]
async fn more_calls_than_may_wait_are_refused_at_once() {
    with_database(async |url| {
        let store = migrated(
            PostgresStore::builder(options(&url))
                .max_waiting_calls(3)
                .lock_timeout(Duration::from_secs(60))
                .statement_timeout(Duration::from_secs(60)),
        )
        .await;
        let mut other = PgConnection::connect(&url).await.unwrap();
        let mut open = other.begin().await.unwrap();
        raw_sql("LOCK TABLE idempotency_records IN ACCESS EXCLUSIVE MODE")
            .execute(&mut *open)
            .await
            .unwrap();
        let claims: Vec<_> = (0..20)
            .map(|number| {
                let (store, name) = (store.clone(), name("caller", &format!("key {number}")));
                tokio::spawn(async move { store.claim(&name, &hour()).await })
            })
            .collect();
        let begun = Instant::now();
        // Up to six run alone, three in a batch, and three wait; if all came at once,
        // fewer run.
        while claims.iter().filter(|claim| claim.is_finished()).count() < 8 {
            assert!(begun.elapsed() < Duration::from_secs(30));
            tokio::time::sleep(Duration::from_millis(5)).await;
        }
        open.rollback().await.unwrap();
        let mut refused = 0;
        for claim in claims {
            match claim.await.unwrap() {
                Ok(claimed) => assert!(matches!(claimed, Claimed::Acquired(_))),
                Err(error) => {
                    assert_eq!(error.kind(), StoreErrorKind::Overloaded);
                    refused += 1;
                }
            }
        }
        assert!((8..=17).contains(&refused), "{refused} were refused");
        store.close().await;
    })
    .await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_duplicate_does_not_wait_for_a_completion_under_way() {
    with_store(async |store, url| {
        let name = name("caller", "key");
        acquired(store.claim(&name, &hour()).await);
        let mut other = PgConnection::connect(&url).await.unwrap();
        let mut completing = other.begin().await.unwrap();
        raw_sql("UPDATE idempotency_records SET state = 2, response = ''")
            .execute(&mut *completing)
            .await
            .unwrap();
        let begun = Instant::now();
        let Claimed::Occupied(record) = store.claim(&name, &hour()).await.unwrap() else {
            panic!("claimed twice");
        };
        assert!(matches!(record.state, RecordState::InProgress { .. }));
        assert!(begun.elapsed() < Duration::from_secs(1));
        completing.rollback().await.unwrap();
    })
    .await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_locked_record_times_out_and_the_store_stays_usable() {
    with_database(async |url| {
        let store = migrated(
            PostgresStore::builder(options(&url))
                .max_connections(1)
                .acquire_timeout(Duration::from_secs(1))
                .lock_timeout(Duration::from_secs(3)),
        )
        .await;
        let name = name("caller", "key");
        let claim = hour();
        acquired(store.claim(&name, &claim).await);
        let mut other = PgConnection::connect(&url).await.unwrap();
        let mut lock = other.begin().await.unwrap();
        raw_sql("SELECT FROM idempotency_records FOR UPDATE")
            .execute(&mut *lock)
            .await
            .unwrap();
        let waiting = tokio::spawn({
            let (store, name) = (store.clone(), name.clone());
            async move { store.renew(&name, claim.token, HOUR).await }
        });
        tokio::time::sleep(Duration::from_millis(100)).await;
        // The only connection is free.
        assert!(store.read(&name).await.unwrap().is_some());
        let error = waiting.await.unwrap().unwrap_err();
        assert_eq!(error.kind(), StoreErrorKind::TimedOut);
        lock.rollback().await.unwrap();
        applied(store.renew(&name, claim.token, HOUR).await);
        store.close().await;
        let error = store.read(&name).await.unwrap_err();
        assert_eq!(error.kind(), StoreErrorKind::Unavailable);
    })
    .await;
}
