//! The guards of the transitions, as the memory store has them.

use tower_idempotency::{
    PostgresStore,
    sqlx::{Connection as _, PgConnection, query_scalar},
};

use crate::{
    any_store::{guards, reference::Compared},
    databases::{options, run, with_database},
    migrated, with_store,
};

#[tokio::test(flavor = "multi_thread")]
async fn of_64_simultaneous_claims_exactly_one_is_acquired() {
    with_store(async |store, _| guards::one_of_64_claims_is_acquired(&store).await).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn each_transition_checks_its_own_guard() {
    with_store(async |store, _| guards::each_transition_checks_its_own_guard(&store).await).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_call_repeated_with_its_token_returns_the_lost_answer() {
    with_store(async |store, _| guards::a_repeated_call_returns_the_lost_answer(&store).await)
        .await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_dropped_outcome_is_still_written() {
    with_store(async |store, _| guards::a_dropped_outcome_is_still_written(&store).await).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_call_may_be_dropped_at_any_time() {
    with_database(async |url| {
        let store = migrated(PostgresStore::builder(options(&url)).max_connections(2)).await;
        guards::a_call_may_be_dropped_at_any_time(&store, 150).await;
        let mut connection = PgConnection::connect(&url).await.unwrap();
        let completed: i64 =
            query_scalar("SELECT count(*) FROM idempotency_records WHERE state = 2")
                .fetch_one(&mut connection)
                .await
                .unwrap();
        assert_eq!(completed, 150);
        let open: i64 = query_scalar(
            "SELECT count(*) FROM pg_stat_activity
             WHERE application_name = 'tower-idempotency' AND state LIKE 'idle in transaction%'
               AND datname = current_database()",
        )
        .fetch_one(&mut connection)
        .await
        .unwrap();
        assert_eq!(open, 0);
        store.close().await;
    })
    .await;
}

#[tokio::test(flavor = "multi_thread")]
async fn every_transition_does_as_the_transition_function() {
    with_store(async |store, url| {
        Compared::new(&store).every_transition().await;
        marks_exactly_the_unknown(&url).await;
    })
    .await;
}

#[tokio::test(flavor = "multi_thread")]
async fn random_calls_answer_as_the_transition_function() {
    with_store(async |store, url| {
        Compared::new(&store).random_walk(1, 300).await;
        marks_exactly_the_unknown(&url).await;
    })
    .await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_partitioned_table_answers_as_the_transition_function() {
    with_database(async |url| {
        let whole = include_str!("../../migrations/postgres/0001_records.sql");
        let parted = whole.replace(
            ") WITH (fillfactor = 20);",
            ") PARTITION BY HASH (scope, key);
             CREATE TABLE one PARTITION OF idempotency_records
                 FOR VALUES WITH (MODULUS 2, REMAINDER 0) WITH (fillfactor = 20);
             CREATE TABLE other PARTITION OF idempotency_records
                 FOR VALUES WITH (MODULUS 2, REMAINDER 1) WITH (fillfactor = 20);",
        );
        assert_ne!(parted, whole);
        run(&url, &parted).await;
        let usage = include_str!("../../migrations/postgres/0004_usage.sql");
        run(&url, usage).await;
        let store = PostgresStore::connect(&url).await.unwrap();
        Compared::new(&store).every_transition().await;
        Compared::new(&store).random_walk(2, 200).await;
        store.close().await;
    })
    .await;
}

/// The column that the index of unknown records is over.
async fn marks_exactly_the_unknown(url: &str) {
    let mut connection = PgConnection::connect(url).await.unwrap();
    let wrong: i64 = query_scalar(
        "SELECT count(*) FROM idempotency_records
         WHERE (state = 3) <> (unknown_since IS NOT NULL)",
    )
    .fetch_one(&mut connection)
    .await
    .unwrap();
    assert_eq!(wrong, 0);
}
