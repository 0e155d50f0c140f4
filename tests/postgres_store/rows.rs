//! The statements with a row for each call, which Citus gets. PostgreSQL can run them, too.

use std::time::Duration;

use futures_util::future::join_all;
use tower_idempotency::{
    PostgresStore, Release, Store as _,
    sqlx::{Connection as _, PgConnection, query_scalar},
    store::{Claimed, PostgresEngine, RecordState, Token, Transitioned},
};

use crate::{
    any_store::{HOUR, acquired, applied, done, hour, name, superseded},
    databases::{options, run, with_database},
    migrated,
};

/// Runs a test against a store that sends the statements for Citus.
async fn with_rows(test: impl AsyncFnOnce(PostgresStore, String)) {
    with_database(async |url| {
        let builder = PostgresStore::builder(options(&url)).engine(PostgresEngine::Citus);
        let store = migrated(builder).await;
        test(store.clone(), url).await;
        store.close().await;
    })
    .await;
}

#[tokio::test(flavor = "multi_thread")]
async fn claims_of_many_rows_are_granted_once_each() {
    with_rows(async |store, _| {
        let claims: Vec<_> = (0..300)
            .map(|number| (name("caller", &format!("key {}", number % 150)), hour()))
            .collect();
        let claimed = claims.iter().map(|(name, claim)| {
            let (store, name, claim) = (store.clone(), name.clone(), *claim);
            tokio::spawn(async move { store.claim(&name, &claim).await.unwrap() })
        });
        let mut granted = 0;
        for (claimed, (_, claim)) in join_all(claimed).await.into_iter().zip(&claims) {
            match claimed.unwrap() {
                Claimed::Acquired(grant) => {
                    assert_eq!((grant.operation, grant.attempt), (claim.operation, 1));
                    granted += 1;
                }
                Claimed::Occupied(record) => assert_ne!(record.token, claim.token),
                other @ Claimed::Vanished => panic!("{other:?}"),
            }
        }
        assert_eq!(granted, 150);
    })
    .await;
}

#[expect(
    clippy::async_yields_async,
    reason = "the second calls are all made before one is awaited"
)]
#[tokio::test(flavor = "multi_thread")]
async fn outcomes_of_many_rows_are_applied_to_their_own_claims() {
    with_rows(async |store, url| {
        let claims: Vec<_> = (0..300)
            .map(|number| (number, name("caller", &format!("key {number}")), hour()))
            .collect();
        let ended = claims.iter().map(|(number, name, claim)| {
            let (store, number, name, claim) = (store.clone(), *number, name.clone(), *claim);
            async move {
                // Every fifth record does not exist.
                if number % 5 != 4 {
                    acquired(store.claim(&name, &claim).await);
                }
                tokio::spawn(async move {
                    let token = claim.token;
                    match number % 5 {
                        0 | 4 => store.complete(&name, token, &done()).await,
                        1 => store.release(&name, token, Release::SameRequest).await,
                        2 => store.mark_unknown(&name, token, HOUR).await,
                        _ => store.complete(&name, Token::random(), &done()).await,
                    }
                })
            }
        });
        for (ended, (number, ..)) in join_all(join_all(ended).await)
            .await
            .into_iter()
            .zip(&claims)
        {
            let expected = match number % 5 {
                0..=2 => Transitioned::Applied,
                _ => Transitioned::Superseded,
            };
            assert_eq!(ended.unwrap().unwrap(), expected, "{number}");
        }
        for (number, name, claim) in &claims {
            let record = store.read(name).await.unwrap();
            let state = record.map(|record| {
                assert_eq!(
                    (record.token, record.operation),
                    (claim.token, claim.operation)
                );
                assert!(record.expires_in.unwrap() > HOUR / 2);
                record.state
            });
            match (number % 5, state) {
                (0, Some(RecordState::Completed { response })) => {
                    assert_eq!(response, done().response);
                }
                (1, Some(RecordState::Released(Release::SameRequest)))
                | (2, Some(RecordState::Unknown))
                | (3, Some(RecordState::InProgress { .. }))
                | (4, None) => {}
                (_, state) => panic!("{number}: {state:?}"),
            }
        }
        let mut connection = PgConnection::connect(&url).await.unwrap();
        let rows: i64 = query_scalar("SELECT count(*) FROM idempotency_records")
            .fetch_one(&mut connection)
            .await
            .unwrap();
        assert_eq!(rows, 240);
    })
    .await;
}

#[tokio::test(flavor = "multi_thread")]
async fn completion_alone_obeys_the_guard_and_the_least_retention() {
    with_rows(async |store, _| {
        let (name, claim) = (name("caller", "key"), hour());
        superseded(store.complete(&name, claim.token, &done()).await);
        assert!(store.read(&name).await.unwrap().is_none());
        acquired(store.claim(&name, &claim).await);
        superseded(store.complete(&name, Token::random(), &done()).await);
        let mut kept = done();
        (kept.retention, kept.at_least) = (Duration::ZERO, HOUR);
        for _ in 0..2 {
            applied(store.complete(&name, claim.token, &kept).await);
        }
        let record = store.read(&name).await.unwrap().unwrap();
        assert!(record.expires_in.unwrap() > HOUR / 2);
    })
    .await;
}

#[tokio::test(flavor = "multi_thread")]
async fn row_that_a_late_completion_leaves_has_no_owner() {
    with_rows(async |store, url| {
        run(
            &url,
            "CREATE FUNCTION refuse() RETURNS trigger LANGUAGE plpgsql
                 AS 'BEGIN RAISE ''rows stay''; END';
             CREATE TRIGGER refuse BEFORE DELETE ON idempotency_records
                 EXECUTE FUNCTION refuse()",
        )
        .await;
        let late: Vec<_> = (0..200)
            .map(|number| (name("caller", &number.to_string()), Token::random()))
            .collect();
        let complete = async |name, token| store.complete(name, token, &done()).await;
        let completed = late.iter().map(|(name, token)| complete(name, *token));
        for completed in join_all(completed).await {
            superseded(completed);
        }
        run(&url, "DROP TRIGGER refuse ON idempotency_records").await;
        let mut connection = PgConnection::connect(&url).await.unwrap();
        let left: i64 = query_scalar("SELECT count(*) FROM idempotency_records")
            .fetch_one(&mut connection)
            .await
            .unwrap();
        assert!(left > 0, "no completion was one of several");
        // Asked again, singly and together.
        let (name, token) = &late[0];
        superseded(complete(name, *token).await);
        let completed = late.iter().map(|(name, token)| complete(name, *token));
        for completed in join_all(completed).await {
            superseded(completed);
        }
        for (name, _) in &late {
            if let Some(record) = store.read(name).await.unwrap() {
                assert_eq!(record.expires_in, None);
            }
        }
    })
    .await;
}
