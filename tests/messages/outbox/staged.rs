//! Events in transactions of the application.

use std::time::Duration;

use tokio::{join, sync::Barrier, time::timeout};
use tower_idempotency::{
    messages::{Event, MessageErrorKind},
    sqlx::Connection as _,
};

use super::relay::{event, stage, until};
use crate::{
    databases::run,
    shop::{PostgresShop, Shop, SqliteShop, with_each_database, with_postgres, with_sqlite},
};

with_each_database! {
    event_is_there_if_and_only_if_its_transaction_commits;
    same_event_staged_again_is_left_alone;
    same_id_with_another_payload_is_a_conflict;
    unfit_event_is_refused_and_the_transaction_usable;
    connection_without_a_transaction_is_refused;
    events_of_one_aggregate_keep_their_order;
    overlapping_batches_in_opposite_order_both_commit;
}

async fn ids(shop: &impl Shop) -> Vec<String> {
    shop.all("SELECT id FROM idempotency_events ORDER BY aggregate, position")
        .await
}

async fn event_is_there_if_and_only_if_its_transaction_commits(shop: impl Shop) {
    let outbox = shop.outbox("orders");
    let mut transaction = shop.begin().await;
    let staged = outbox.stage(&mut transaction, event("lost", "a"));
    staged.await.unwrap();
    transaction.rollback().await.unwrap();
    assert_eq!(outbox.lag().await.unwrap().events, 0);
    assert!(super::relay::rows(&shop).await.is_empty());

    stage(&shop, [event("kept", "a")]).await;
    assert_eq!(ids(&shop).await, ["kept"]);
    let lag = outbox.lag().await.unwrap();
    assert_eq!((lag.events, lag.dead), (1, 0));
    assert!(lag.oldest < Duration::from_secs(60));
    assert_eq!(shop.outbox("another").lag().await.unwrap().events, 0);
}

async fn same_event_staged_again_is_left_alone(shop: impl Shop) {
    stage(&shop, [event("one", "a"), event("two", "a")]).await;
    stage(&shop, [event("two", "a"), event("three", "a")]).await;
    stage(&shop, [event("four", "a"), event("four", "a")]).await;
    assert_eq!(ids(&shop).await, ["one", "two", "three", "four"]);
}

async fn same_id_with_another_payload_is_a_conflict<S: Shop>(shop: S) {
    stage(&shop, [event("id", "a")]).await;
    let mut transaction = shop.begin().await;
    let outbox = shop.outbox("orders");
    let other = Event::new("id", "a", "secret");
    let error = outbox.stage(&mut transaction, other).await.unwrap_err();
    assert_eq!(error.kind(), MessageErrorKind::Conflict);
    assert!(!error.to_string().contains("secret"), "{error}");
    let next = outbox.stage(&mut transaction, event("next", "a"));
    next.await.unwrap();
    transaction.commit().await.unwrap();
    assert_eq!(ids(&shop).await, ["id", "next"]);
}

/// The trigger removes the first event as a relay does, between two statements of `stage`.
#[tokio::test(flavor = "multi_thread")]
async fn event_published_while_its_id_is_staged_is_staged_anew() {
    Box::pin(with_postgres(async |shop| {
        for events in [
            vec![Event::new("id", "a", "other")],
            vec![event("new", "a"), Event::new("id", "a", "other")],
        ] {
            run(
                &shop.url,
                "DROP TRIGGER IF EXISTS publish ON idempotency_events;
                 DELETE FROM idempotency_events",
            )
            .await;
            stage(&shop, [event("id", "a")]).await;
            run(&shop.url, PUBLISHED_MEANWHILE).await;
            let mut expected: Vec<_> = events.iter().map(|event| event.id().to_owned()).collect();
            expected.sort();
            stage(&shop, events).await;
            let mut staged = ids(&shop).await;
            staged.sort();
            assert_eq!(staged, expected);
            let payloads = shop.all(
                "SELECT convert_from(payload, 'UTF8') FROM idempotency_events WHERE id = 'id'",
            );
            assert_eq!(payloads.await, ["other"]);
        }
    }))
    .await;
}

async fn unfit_event_is_refused_and_the_transaction_usable<S: Shop>(shop: S) {
    let outbox = shop.outbox("orders").max_payload(10);
    let mut transaction = shop.begin().await;
    let long = "secret".repeat(100);
    for (unfit, says) in [
        (
            Event::new("id", "a", "secret".repeat(2)),
            "`max_payload` (10 bytes), got 12 bytes",
        ),
        (Event::new("", "a", ""), "id of an event"),
        (Event::new("secret\0", "a", ""), "id of an event"),
        (Event::new(long.clone(), "a", ""), "1 to 512 bytes"),
        (Event::new("id", "", ""), "aggregate of an event"),
        (Event::new("id", long, ""), "1 to 512 bytes"),
    ] {
        let staged = outbox.stage_all(&mut transaction, vec![Event::new("fit", "a", ""), unfit]);
        let error = staged.await.unwrap_err();
        assert_eq!(error.kind(), MessageErrorKind::Invalid);
        let text = error.to_string();
        assert!(text.contains(says) && !text.contains("secret"), "{text}");
    }
    let fit = outbox.stage(&mut transaction, Event::new("fit", "a", "ten bytes!"));
    fit.await.unwrap();
    transaction.ping().await.unwrap();
    transaction.commit().await.unwrap();
    assert_eq!(ids(&shop).await, ["fit"]);
    for topic in ["", "secret\0", &"secret".repeat(50)] {
        let error = shop.try_outbox(topic).unwrap_err();
        assert_eq!(error.kind(), MessageErrorKind::Invalid);
    }
}

async fn connection_without_a_transaction_is_refused(shop: impl Shop) {
    let mut connection = shop.connect().await;
    let staged = shop.outbox("orders");
    let staged = staged.stage(&mut connection, event("id", "a")).await;
    assert_eq!(staged.unwrap_err().kind(), MessageErrorKind::Transaction);
    assert!(ids(&shop).await.is_empty());
}

async fn events_of_one_aggregate_keep_their_order(shop: impl Shop) {
    let staged = [("b", "2"), ("a", "1"), ("b", "1"), ("a", "2"), ("b", "3")];
    let staged = staged.map(|(aggregate, id)| event(&format!("{aggregate}{id}"), aggregate));
    stage(&shop, staged).await;
    assert_eq!(ids(&shop).await, ["a1", "a2", "b2", "b1", "b3"]);
}

async fn overlapping_batches_in_opposite_order_both_commit(shop: impl Shop) {
    for round in 0..5 {
        let barrier = Barrier::new(2);
        let batch = async |name: &str, aggregates: Vec<u32>| {
            let events: Vec<Event> = aggregates
                .iter()
                .map(|aggregate| {
                    event(
                        &format!("{name}{round}-{aggregate}"),
                        &aggregate.to_string(),
                    )
                })
                .collect();
            barrier.wait().await;
            stage(&shop, events).await;
        };
        let both = async {
            join!(
                batch("up", (0..50).collect()),
                batch("down", (0..50).rev().collect())
            )
        };
        timeout(Duration::from_secs(30), both).await.unwrap();
    }
    assert_eq!(ids(&shop).await.len(), 500);
}

#[tokio::test(flavor = "multi_thread")]
async fn lag_tells_the_oldest_snapshot_on_postgres() {
    Box::pin(with_postgres(async |shop| {
        let outbox = shop.outbox("orders");
        let oldest = async || outbox.lag().await.unwrap().oldest_snapshot;
        until(async || oldest().await.is_none()).await;
        let begin = "BEGIN ISOLATION LEVEL REPEATABLE READ";
        let mut reader = shop.pool.begin_with(begin).await.unwrap();
        PostgresShop::run(&mut reader, "SELECT 1").await.unwrap();
        let first = oldest().await.unwrap();
        assert!(first < Duration::from_secs(60));
        let mut writer = shop.begin().await;
        outbox.stage(&mut writer, event("id", "a")).await.unwrap();
        assert!(oldest().await.unwrap() > first);
        reader.rollback().await.unwrap();
        // A transaction that has written counts without a snapshot.
        assert!(oldest().await.is_some());
        writer.rollback().await.unwrap();
        until(async || oldest().await.is_none()).await;
    }))
    .await;
}

#[tokio::test(flavor = "multi_thread")]
async fn lag_tells_no_snapshot_on_sqlite() {
    Box::pin(with_sqlite(async |shop| {
        let mut reader = shop.pool.begin().await.unwrap();
        SqliteShop::run(&mut reader, "SELECT * FROM effects")
            .await
            .unwrap();
        assert_eq!(
            shop.outbox("orders").lag().await.unwrap().oldest_snapshot,
            None
        );
        drop(reader);
    }))
    .await;
}

const PUBLISHED_MEANWHILE: &str = "
CREATE OR REPLACE FUNCTION publish() RETURNS trigger LANGUAGE plpgsql AS $$ BEGIN
    DELETE FROM idempotency_events WHERE id = 'id' AND payload = 'payload of id';
    RETURN NULL; END $$;
CREATE OR REPLACE TRIGGER publish AFTER INSERT ON idempotency_events
FOR EACH STATEMENT EXECUTE FUNCTION publish()";
