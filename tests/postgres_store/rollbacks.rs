//! Calls that the server rolls back because of another transaction.

use std::time::Duration;

use futures_util::future::join_all;
use tower_idempotency::{
    PostgresStore, Store, StoreErrorKind,
    sqlx::{Connection as _, PgConnection, query_scalar},
};

use crate::{
    any_store::{acquired, applied, done, hour, name},
    databases::{options, run, run_on},
    migrated, told, with_store,
};

#[tokio::test(flavor = "multi_thread")]
async fn a_completion_in_a_deadlock_is_made_again() {
    with_store(async |store, url| {
        let (name, claim) = (name("caller", "key"), hour());
        acquired(store.claim(&name, &claim).await);
        // Only the first attempt waits: the second may have the record before `other` has.
        run(
            &url,
            "CREATE SEQUENCE attempts;
             CREATE FUNCTION waits() RETURNS trigger LANGUAGE plpgsql AS $$
             BEGIN
                 IF nextval('attempts') = 1 THEN
                     PERFORM pg_advisory_xact_lock(1);
                 END IF;
                 RETURN NEW;
             END $$;
             CREATE TRIGGER waits AFTER UPDATE ON idempotency_records
                 FOR EACH ROW EXECUTE FUNCTION waits()",
        )
        .await;
        let mut other = PgConnection::connect(&url).await.unwrap();
        // The store finds the deadlock, since it waits for less time.
        run_on(
            &mut other,
            "SET deadlock_timeout = '1h'; BEGIN; SELECT pg_advisory_xact_lock(1)",
        )
        .await;
        let completed = {
            let (store, name) = (store.clone(), name.clone());
            tokio::spawn(async move { store.complete(&name, claim.token, &done()).await })
        };
        until_one_waits(&mut other).await;
        run_on(
            &mut other,
            "SELECT FROM idempotency_records FOR UPDATE; COMMIT",
        )
        .await;
        applied(completed.await.unwrap());
        other.close().await.unwrap();
        assert_eq!(deadlocks(&url).await, 1);
    })
    .await;
}

/// Waits until a statement in the database waits for an advisory lock.
async fn until_one_waits(connection: &mut PgConnection) {
    let question = "SELECT count(*) FROM pg_stat_activity
        WHERE datname = current_database() AND wait_event = 'advisory'";
    for _ in 0..2_000 {
        let waiting = query_scalar::<_, i64>(question);
        // A transaction sees the activity of its first look.
        run_on(connection, "SELECT pg_stat_clear_snapshot()").await;
        if waiting.fetch_one(&mut *connection).await.unwrap() > 0 {
            return;
        }
        tokio::time::sleep(Duration::from_millis(5)).await;
    }
    panic!("nothing waits for the lock");
}

/// The number of deadlocks in the database since it was created.
async fn deadlocks(url: &str) -> i64 {
    let mut connection = PgConnection::connect(url).await.unwrap();
    let question = "SELECT deadlocks FROM pg_stat_database WHERE datname = current_database()";
    let mut deadlocks = 0;
    for _ in 0..100 {
        let counted = query_scalar(question);
        deadlocks = counted.fetch_one(&mut connection).await.unwrap();
        if deadlocks > 0 {
            break;
        }
        // The server counts with a delay.
        tokio::time::sleep(Duration::from_millis(50)).await;
    }
    connection.close().await.unwrap();
    deadlocks
}

#[tokio::test(flavor = "multi_thread")]
async fn claims_that_cannot_be_serialized_are_made_again() {
    with_store(async |store, url| {
        run(&url, &rolls_back("nextval('failures') <= 3")).await;
        let names = (0..40).map(|number| name("caller", &number.to_string()));
        let claims = names.map(|name| {
            let store = store.clone();
            async move { store.claim(&name, &hour()).await }
        });
        for claimed in join_all(claims).await {
            acquired(claimed);
        }
        let mut connection = PgConnection::connect(&url).await.unwrap();
        let asked = "SELECT last_value FROM failures";
        let asked = query_scalar(asked);
        let failures: i64 = asked.fetch_one(&mut connection).await.unwrap();
        connection.close().await.unwrap();
        assert!(failures > 3, "{failures}");
    })
    .await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_claim_rolled_back_for_too_long_is_unavailable() {
    with_store(async |store, url| {
        run(&url, &rolls_back("true")).await;
        store.close().await;
        let builder = PostgresStore::builder(options(&url));
        let store = migrated(builder.lock_timeout(Duration::from_millis(50))).await;
        let claimed = store.claim(&name("caller", "key"), &hour()).await;
        let error = claimed.unwrap_err();
        assert_eq!(error.kind(), StoreErrorKind::Unavailable);
        assert!(told(&error).contains("40001"), "{error}");
        store.close().await;
    })
    .await;
}

/// Rolls back new records as a server does that cannot serialize them.
fn rolls_back(condition: &str) -> String {
    format!(
        "CREATE SEQUENCE failures;
         CREATE FUNCTION rolls_back() RETURNS trigger LANGUAGE plpgsql AS $$
         BEGIN
             IF {condition} THEN
                 RAISE EXCEPTION 'could not serialize access' USING ERRCODE = '40001';
             END IF;
             RETURN NEW;
         END $$;
         CREATE TRIGGER rolls_back BEFORE INSERT ON idempotency_records
             FOR EACH ROW EXECUTE FUNCTION rolls_back()"
    )
}
