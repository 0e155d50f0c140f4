//! Owners that are taken over while they run.

use std::{
    pin::pin,
    sync::{Arc, Mutex},
    time::Duration,
};

use axum::response::IntoResponse as _;
use http::Response;
use tokio::sync::{Notify, oneshot};
use tower_idempotency::{
    CommitErrorKind, Key, PostgresStore, Recovery, Scope, Store as _,
    sqlx::query_scalar,
    store::{
        RecordName, Transitioned,
        admin::{RecordedResponse, Resolution},
    },
};

use crate::{
    answer::slow_commits,
    commit::{order, respond},
    log::Log,
    service::{Run, Service, status},
    shop::{Shop, options, ordered, with_each_database, with_postgres},
};

with_each_database! {
    i7_a_fenced_owner_rolls_back_and_answers_as_the_winner;
    i5_an_owner_fenced_by_a_running_owner_commits_nothing;
    a_lapsed_owner_without_a_takeover_commits;
    an_owner_marked_unknown_may_still_commit;
    i4_an_owner_resolved_by_an_operator_does_not_commit;
    an_owner_that_has_lost_its_lease_begins_nothing;
    lease_lost_never_resolves_after_its_own_commit;
}

async fn i7_a_fenced_owner_rolls_back_and_answers_as_the_winner<S: Shop>(shop: S) {
    let (at_work, go_on) = (Arc::new(Notify::new()), Arc::new(Notify::new()));
    let slow = Service::new(&shop, {
        let (at_work, go_on) = (Arc::clone(&at_work), Arc::clone(&go_on));
        move |run| {
            let (at_work, go_on) = (Arc::clone(&at_work), Arc::clone(&go_on));
            async move {
                at_work.notify_one();
                go_on.notified().await;
                let transaction = run.begin_order("pen").await;
                let error = run
                    .commit(transaction, ordered("too late"))
                    .await
                    .unwrap_err();
                assert_eq!(error.kind(), CommitErrorKind::Superseded);
                // The layer ignores the handler's response.
                status(201)
            }
        }
    });
    let loser = tokio::spawn(slow.post("key"));
    at_work.notified().await;
    shop.lapse().await;
    let fast = Service::new(&shop, respond).set(|layer| layer.recovery(Recovery::Rerun));
    fast.post("key").await.assert_is(201, "ordered by run 1");
    go_on.notify_one();
    let answer = loser.await.unwrap();
    answer.assert_is(201, "ordered by run 1");
    assert!(answer.is_replay());
    assert!(shop.i5_has_order("key").await);
    assert_eq!(shop.record("key").await.unwrap().attempt, 2);
}

async fn i5_an_owner_fenced_by_a_running_owner_commits_nothing<S: Shop>(shop: S) {
    let service = Service::new(&shop, async |run| {
        run.shop.lapse().await;
        let (at_work, go_on) = (Arc::new(Notify::new()), Arc::new(Notify::new()));
        let winner = Service::new(&run.shop, {
            let (at_work, go_on) = (Arc::clone(&at_work), Arc::clone(&go_on));
            move |run| {
                let (at_work, go_on) = (Arc::clone(&at_work), Arc::clone(&go_on));
                async move {
                    at_work.notify_one();
                    go_on.notified().await;
                    respond(run).await
                }
            }
        })
        .set(|layer| layer.recovery(Recovery::Rerun));
        let winning = tokio::spawn(winner.post("key"));
        at_work.notified().await;
        let error = order(&run).await.unwrap_err();
        assert_eq!(error.kind(), CommitErrorKind::Superseded);
        assert!(!run.shop.i5_has_order("key").await);
        go_on.notify_one();
        winning.await.unwrap().assert_is(201, "ordered by run 1");
        error.into_response()
    });
    service.post("key").await.assert_is(201, "ordered by run 1");
    assert!(shop.i5_has_order("key").await);
}

async fn a_lapsed_owner_without_a_takeover_commits<S: Shop>(shop: S) {
    let service = Service::new(&shop, async |run| {
        run.shop.lapse().await;
        respond(run).await
    });
    service.post("key").await.assert_is(201, "ordered by run 1");
    assert!(shop.i5_has_order("key").await);
}

async fn an_owner_marked_unknown_may_still_commit<S: Shop>(shop: S) {
    let service = Service::new(&shop, async |run| {
        run.shop.lapse().await;
        let other = Service::new(&run.shop, respond);
        other
            .post("key")
            .await
            .assert_problem(409, "outcome-unknown");
        respond(run).await
    });
    service.post("key").await.assert_is(201, "ordered by run 1");
    assert!(shop.i5_has_order("key").await);
}

async fn i4_an_owner_resolved_by_an_operator_does_not_commit<S: Shop>(shop: S) {
    let service = Service::new(&shop, async |run| {
        run.shop.lapse().await;
        let other = Service::new(&run.shop, respond);
        let key = run.operation.key().as_str();
        other.post(key).await.assert_problem(409, "outcome-unknown");
        let resolution = match key {
            "happened" => {
                let response = RecordedResponse::new(Response::new("it had happened"));
                Resolution::Happened(response.unwrap())
            }
            _ => Resolution::DidNotHappen,
        };
        let record = run.shop.record(key).await.unwrap();
        let name = RecordName::new(Scope::single_tenant(), Key::new(key));
        let resolved = run
            .shop
            .store()
            .resolve(&name, record.fence, &resolution, Duration::from_secs(3600))
            .await;
        assert_eq!(resolved.unwrap(), Transitioned::Applied);
        let error = order(&run).await.unwrap_err();
        assert_eq!(error.kind(), CommitErrorKind::Superseded);
        error.into_response()
    });
    service
        .post("happened")
        .await
        .assert_is(200, "it had happened");
    assert!(shop.orders().await.is_empty());
    service
        .post("not")
        .await
        .assert_problem(409, "outcome-unknown");
    assert!(!shop.i5_has_order("not").await);
    let retry = Service::new(&shop, respond);
    retry.post("not").await.assert_is(201, "ordered by run 1");
}

async fn an_owner_that_has_lost_its_lease_begins_nothing<S: Shop>(shop: S) {
    let service = Service::new(&shop, async |run| {
        let record = run.shop.record("key").await.unwrap();
        let name = RecordName::new(Scope::single_tenant(), Key::new("key"));
        let forgotten = run.shop.store().forget(&name, record.fence).await.unwrap();
        assert_eq!(forgotten, Transitioned::Applied);
        run.operation.lease_lost().await;
        let Err(error) = run.shop.begin(&run.operation).await else {
            panic!("begun without a lease");
        };
        assert_eq!(error.kind(), CommitErrorKind::LeaseLost);
        assert_eq!(error.status(), 503);
        error.into_response()
    })
    .set(|layer| layer.lease(std::time::Duration::from_millis(300)));
    service
        .post("key")
        .await
        .assert_problem(409, "outcome-unknown");
    assert!(!shop.i5_has_order("key").await);
}

/// Returns whether `lease_lost` resolves within more than a lease and many
/// heartbeats.
async fn is_lost<S: Shop>(run: &Run<S>) -> bool {
    tokio::time::timeout(2 * LEASE, run.operation.lease_lost())
        .await
        .is_ok()
}

/// The first run sends whether `lease_lost` resolved. A panic after its commit
/// would not reach the client.
fn watched<S: Shop>(shop: &S) -> (Service<S>, oneshot::Receiver<bool>) {
    let (sender, receiver) = oneshot::channel();
    let sender = Arc::new(Mutex::new(Some(sender)));
    let service = Service::new(shop, move |run| {
        let sender = sender.lock().unwrap().take();
        async move {
            let mut lost = pin!(run.operation.lease_lost());
            let mut committing = pin!(order(&run));
            let (committed, was_lost) = tokio::select! {
                biased;
                () = &mut lost => (committing.await, true),
                committed = &mut committing => (committed, is_lost(&run).await),
            };
            sender.unwrap().send(was_lost).unwrap();
            committed.into_response()
        }
    });
    let service = service.set(|layer| {
        let layer = layer.lease(LEASE).store_timeout(LEASE / 2);
        layer.heartbeat(LEASE / 10)
    });
    (service, receiver)
}

async fn lease_lost_never_resolves_after_its_own_commit<S: Shop>(shop: S) {
    let (service, was_lost) = watched(&shop);
    service.post("key").await.assert_is(201, "ordered by run 1");
    assert!(!was_lost.await.unwrap());
    assert!(shop.i5_has_order("key").await);
}

#[tokio::test]
async fn lost_never_resolves_while_the_commit_is_pending() {
    with_postgres(async |shop| {
        // Longer than the lease. The record is locked meanwhile.
        slow_commits(&shop, "PERFORM pg_sleep(2.5)").await;
        let log = Log::start();
        let (service, was_lost) = watched(&shop);
        service.post("key").await.assert_is(201, "ordered by run 1");
        assert!(!was_lost.await.unwrap());
        assert!(shop.i5_has_order("key").await);
        // A locked record is no failed renewal.
        assert!(!log.has(&["lease"]), "{}", log.warnings());
    })
    .await;
}

#[tokio::test(flavor = "multi_thread")]
async fn i5_an_order_written_before_fencing_is_rolled_back() {
    with_postgres(async |shop| {
        let service = Service::new(&shop, async |run| {
            let transaction = run.begin_order("pen").await;
            run.shop.lapse().await;
            let winner = Service::new(&run.shop, async |_| {
                ordered("by the winner").into_response()
            })
            .set(|layer| layer.recovery(Recovery::Rerun));
            winner
                .post("key")
                .await
                .assert_is(201, "ordered by the winner");
            let error = run
                .commit(transaction, ordered("too late"))
                .await
                .unwrap_err();
            assert_eq!(error.kind(), CommitErrorKind::Superseded);
            error.into_response()
        });
        let answer = service.post("key").await;
        answer.assert_is(201, "ordered by the winner");
        assert!(answer.is_replay());
        assert!(shop.orders().await.is_empty());
    })
    .await;
}

#[tokio::test(flavor = "multi_thread")]
async fn f71_a_heartbeat_during_the_transaction_does_no_harm() {
    with_postgres(async |shop| {
        let service = Service::new(&shop, async |run| {
            let transaction = run.begin_order("pen").await;
            let lease = "SELECT lease_until::text FROM idempotency_records";
            let first: String = query_scalar(lease).fetch_one(&run.shop.pool).await.unwrap();
            loop {
                let now: String = query_scalar(lease).fetch_one(&run.shop.pool).await.unwrap();
                if now != first {
                    break;
                }
            }
            run.commit(transaction, ordered("a pen"))
                .await
                .into_response()
        })
        .set(|layer| layer.heartbeat(std::time::Duration::from_millis(10)));
        service.post("key").await.assert_is(201, "ordered a pen");
        assert!(shop.i5_has_order("key").await);
    })
    .await;
}

#[tokio::test(flavor = "multi_thread")]
async fn f36_duplicates_take_no_connection_from_the_handler() {
    with_postgres(async |shop| {
        let store = PostgresStore::builder(options(&shop.url))
            .max_connections(1)
            .transaction_connections(1)
            .connect()
            .await
            .unwrap();
        let shop = shop.with_store(store.clone());
        let (begun, go_on) = (Arc::new(Notify::new()), Arc::new(Notify::new()));
        let service = Service::new(&shop, {
            let (begun, go_on) = (Arc::clone(&begun), Arc::clone(&go_on));
            move |run| {
                let (begun, go_on) = (Arc::clone(&begun), Arc::clone(&go_on));
                async move {
                    let transaction = run.begin_order("pen").await;
                    begun.notify_one();
                    go_on.notified().await;
                    run.commit(transaction, ordered("a pen"))
                        .await
                        .into_response()
                }
            }
        })
        .set(|layer| layer.wait(std::time::Duration::from_secs(60)));
        let first = tokio::spawn(service.post("key"));
        begun.notified().await;
        let duplicates: Vec<_> = (0..50).map(|_| tokio::spawn(service.post("key"))).collect();
        go_on.notify_one();
        first.await.unwrap().assert_is(201, "ordered a pen");
        for duplicate in duplicates {
            let answer = duplicate.await.unwrap();
            answer.assert_is(201, "ordered a pen");
            assert!(answer.is_replay());
        }
        assert_eq!(service.runs(), 1);
        assert!(shop.i5_has_order("key").await);
        store.close().await;
    })
    .await;
}

const LEASE: Duration = Duration::from_secs(2);
