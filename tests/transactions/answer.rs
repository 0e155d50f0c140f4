//! Lost answers to COMMIT.

use std::{
    sync::{Arc, Mutex},
    time::Duration,
};

use axum::response::IntoResponse as _;
use tower_idempotency::{
    CommitError, CommitErrorKind, Outcome, PostgresStore, Recovery,
    sqlx::{Connection as _, PgConnection, query_scalar},
};

use crate::{
    commit::{order, respond},
    log::Log,
    proxy::{Network, Proxy},
    service::{Run, Service, past, status},
    shop::{PostgresShop, SHORT, Shop, options, with_postgres},
};

/// A shop whose store is behind a network that can fail.
async fn with_network(test: impl AsyncFnOnce(PostgresShop, Proxy)) {
    with_postgres(async |shop| {
        let proxy = Proxy::to(&shop.url).await;
        let store = PostgresStore::builder(proxy.options(&shop.url))
            .lock_timeout(SHORT)
            .acquire_timeout(Duration::from_secs(1))
            .statement_timeout(Duration::from_secs(1))
            .connect()
            .await
            .unwrap();
        test(shop.with_store(store.clone()), proxy).await;
        store.close().await;
    })
    .await;
}

type Told = Arc<Mutex<Vec<Option<CommitErrorKind>>>>;

/// A service that orders, and the kinds of the errors that `commit` returned. Its
/// store timeout is `5 * SHORT`.
fn noting(shop: &PostgresShop) -> (Service<PostgresShop>, Told) {
    let told = Told::default();
    let noted = Arc::clone(&told);
    let service = Service::new(shop, move |run: Run<PostgresShop>| {
        let told = Arc::clone(&noted);
        async move {
            let committed = order(&run).await;
            let kind = committed.as_ref().err().map(CommitError::kind);
            told.lock().unwrap().push(kind);
            committed.into_response()
        }
    });
    (service.set(|layer| layer.store_timeout(5 * SHORT)), told)
}

#[tokio::test(flavor = "multi_thread")]
async fn f62_a_connection_cut_before_commit_aborts_and_a_retry_orders() {
    with_network(async |shop, proxy| {
        let (service, told) = noting(&shop);
        let log = Log::start();
        proxy.set(Network::CutBefore);
        let first = service.post("key").await;
        first.assert_problem(500, "rolled-back");
        assert_eq!(first.outcome, Outcome::Released);
        assert_eq!(*told.lock().unwrap(), [Some(CommitErrorKind::Aborted)]);
        assert!(!shop.i5_has_order("key").await);
        let found = ["abort-found", "COMMIT was not answered", "operation="];
        assert!(log.has(&found), "{}", log.warnings());

        proxy.set(Network::Sound);
        service.post("key").await.assert_is(201, "ordered by run 2");
        assert!(shop.i5_has_order("key").await);
    })
    .await;
}

#[tokio::test(flavor = "multi_thread")]
async fn f62_a_connection_cut_after_commit_counts_as_committed() {
    with_network(async |shop, proxy| {
        let (service, told) = noting(&shop);
        proxy.set(Network::CutAfter);
        service.post("key").await.assert_is(201, "ordered by run 1");
        assert_eq!(*told.lock().unwrap(), [None]);
        assert!(shop.i5_has_order("key").await);
        assert!(service.post("key").await.is_replay());
        assert_eq!(service.runs(), 1);
    })
    .await;
}

#[tokio::test(flavor = "multi_thread")]
async fn f62_a_late_commit_answer_is_resolved_from_the_record() {
    with_network(async |shop, proxy| {
        let (service, told) = noting(&shop);
        proxy.set(Network::HoldAfter);
        service.post("key").await.assert_is(201, "ordered by run 1");
        assert_eq!(*told.lock().unwrap(), [None]);
        assert!(shop.i5_has_order("key").await);
        proxy.set(Network::Sound);
        // The same connection serves again.
        service
            .post("another")
            .await
            .assert_is(201, "ordered by run 2");
        assert!(service.post("key").await.is_replay());
    })
    .await;
}

#[tokio::test(flavor = "multi_thread")]
async fn i10_a_transaction_that_cannot_begin_times_out() {
    with_network(async |shop, proxy| {
        let (service, told) = noting(&shop);
        proxy.set(Network::HoldBegin);
        let first = service.post("key").await;
        first.assert_problem(503, "store-unavailable");
        assert_eq!(first.headers["retry-after"], "1");
        assert_eq!(first.outcome, Outcome::Released);
        assert_eq!(*told.lock().unwrap(), [Some(CommitErrorKind::Unavailable)]);
        assert!(!shop.i5_has_order("key").await);
        proxy.set(Network::Sound);
        service.post("key").await.assert_is(201, "ordered by run 2");
        assert!(shop.i5_has_order("key").await);
    })
    .await;
}

#[tokio::test(flavor = "multi_thread")]
async fn i11_an_undecided_commit_is_unknown_until_it_arrives() {
    with_network(async |shop, proxy| {
        let (service, told) = noting(&shop);
        let service = service.set(|layer| {
            // Even under `Rerun` no retry runs while the transaction lives.
            layer.store_timeout(5 * SHORT).recovery(Recovery::Rerun)
        });
        proxy.set(Network::HoldBefore);
        let first = service.post("key").await;
        first.assert_problem(503, "outcome-unknown");
        assert_eq!(first.headers["retry-after"], "1");
        assert_eq!(first.outcome, Outcome::Unknown);
        assert_eq!(*told.lock().unwrap(), [Some(CommitErrorKind::Unknown)]);
        service
            .post("key")
            .await
            .assert_problem(409, "request-in-progress");

        proxy.set(Network::Sound);
        let retry = past(&service, "key", "request-in-progress").await;
        retry.assert_is(201, "ordered by run 1");
        assert!(retry.is_replay());
        assert!(shop.i5_has_order("key").await);
        assert_eq!(service.runs(), 1);
    })
    .await;
}

#[tokio::test(flavor = "multi_thread")]
async fn i11_a_server_lost_after_commit_replays_once_it_returns() {
    with_network(async |shop, proxy| {
        let (service, told) = noting(&shop);
        proxy.set(Network::GoneAfter);
        let first = service.post("key").await;
        first.assert_problem(503, "outcome-unknown");
        assert_eq!(*told.lock().unwrap(), [Some(CommitErrorKind::Unknown)]);
        service
            .post("key")
            .await
            .assert_problem(503, "store-unavailable");

        proxy.set(Network::Sound);
        let retry = past(&service, "key", "store-unavailable").await;
        retry.assert_is(201, "ordered by run 1");
        assert!(retry.is_replay());
        assert!(shop.i5_has_order("key").await);
        assert_eq!(service.runs(), 1);
    })
    .await;
}

#[tokio::test(flavor = "multi_thread")]
async fn i11_a_server_lost_before_commit_leaves_an_unknown_outcome() {
    with_network(async |shop, proxy| {
        let (service, told) = noting(&shop);
        proxy.set(Network::GoneBefore);
        let first = service.post("key").await;
        first.assert_problem(503, "outcome-unknown");
        assert_eq!(*told.lock().unwrap(), [Some(CommitErrorKind::Unknown)]);

        proxy.set(Network::Sound);
        let _ = past(&service, "key", "store-unavailable").await;
        let retry = past(&service, "key", "request-in-progress").await;
        retry.assert_problem(409, "outcome-unknown");
        assert!(!shop.i5_has_order("key").await);
        assert_eq!(service.runs(), 1);
    })
    .await;
}

#[tokio::test(flavor = "multi_thread")]
async fn f68_a_commit_past_its_timeout_is_unknown_until_it_ends() {
    with_postgres(async |shop| {
        let holder = hold_commits(&shop).await;
        let (service, told) = noting(&shop);
        let service = service.set(|layer| layer.store_timeout(2 * SHORT));
        let log = Log::start();
        service
            .post("key")
            .await
            .assert_problem(503, "outcome-unknown");
        let asked = "COMMIT was not answered, and its record is not readable";
        assert!(
            log.has(&[asked, "kind=", "operation="]),
            "{}",
            log.warnings()
        );
        let unknown = "COMMIT was not answered, request answered with 503";
        assert!(log.has(&[unknown, "operation="]), "{}", log.warnings());
        assert_eq!(*told.lock().unwrap(), [Some(CommitErrorKind::Unknown)]);
        assert!(!shop.i5_has_order("key").await);
        service
            .post("key")
            .await
            .assert_problem(409, "request-in-progress");

        holder.close().await.unwrap();
        let retry = past(&service, "key", "request-in-progress").await;
        retry.assert_is(201, "ordered by run 1");
        assert!(shop.i5_has_order("key").await);
        assert_eq!(service.runs(), 1);
    })
    .await;
}

#[tokio::test(flavor = "multi_thread")]
async fn f62_a_commit_that_outlasts_its_deadline_is_waited_for() {
    with_postgres(async |shop| {
        let holder = hold_commits(&shop).await;
        let (service, _) = noting(&shop);
        let service = service.set(|layer| layer.store_timeout(10 * SHORT));
        let first = tokio::spawn(service.post("key"));
        // The layer reads the record, which the transaction has locked.
        until(&shop, "query LIKE '%SELECT state::bigint%token = $3'").await;
        holder.close().await.unwrap();
        first.await.unwrap().assert_is(201, "ordered by run 1");
        assert!(shop.i5_has_order("key").await);
    })
    .await;
}

#[tokio::test(flavor = "multi_thread")]
async fn f62_a_backend_terminated_during_commit_counts_as_an_abort() {
    with_postgres(async |shop| {
        let holder = hold_commits(&shop).await;
        let (service, told) = noting(&shop);
        let service = service.set(|layer| layer);
        let first = tokio::spawn(service.post("key"));
        until(&shop, "wait_event = 'advisory' AND query = 'COMMIT'").await;
        shop.execute(
            "SELECT pg_terminate_backend(pid) FROM pg_stat_activity
             WHERE query = 'COMMIT' AND datname = current_database()",
        )
        .await;
        first.await.unwrap().assert_problem(500, "rolled-back");
        assert_eq!(*told.lock().unwrap(), [Some(CommitErrorKind::Aborted)]);
        assert!(!shop.i5_has_order("key").await);
        holder.close().await.unwrap();
        service.post("key").await.assert_is(201, "ordered by run 2");
        assert!(shop.i5_has_order("key").await);
    })
    .await;
}

#[tokio::test(flavor = "multi_thread")]
async fn f68_an_inconclusive_commit_error_is_resolved_from_the_record() {
    with_postgres(async |shop| {
        // SQLSTATE P0001 is neither a constraint nor a conflict.
        slow_commits(&shop, "RAISE EXCEPTION 'not today'").await;
        let (service, told) = noting(&shop);
        let first = service.post("key").await;
        first.assert_problem(500, "rolled-back");
        assert!(!first.body.contains("not today"));
        assert_eq!(*told.lock().unwrap(), [Some(CommitErrorKind::Aborted)]);
        assert!(!shop.i5_has_order("key").await);
        shop.execute("DROP TRIGGER slow ON orders").await;
        service.post("key").await.assert_is(201, "ordered by run 2");
        assert!(shop.i5_has_order("key").await);
    })
    .await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_locked_record_aborts_the_commit_in_time() {
    with_postgres(async |shop| {
        let mut blocker = PgConnection::connect_with(&options(&shop.url))
            .await
            .unwrap();
        let mut lock = blocker.begin().await.unwrap();
        let (service, told) = noting(&shop);
        let service = service.set(|layer| layer.store_timeout(2 * SHORT));
        service
            .post("earlier")
            .await
            .assert_is(201, "ordered by run 1");
        shop.execute("DELETE FROM orders; DELETE FROM idempotency_records")
            .await;
        let locked = Arc::new(tokio::sync::Notify::new());
        let begun = Arc::new(tokio::sync::Notify::new());
        let service = Service::new(&shop, {
            let (locked, begun, told) =
                (Arc::clone(&locked), Arc::clone(&begun), Arc::clone(&told));
            move |run| {
                let (locked, begun, told) =
                    (Arc::clone(&locked), Arc::clone(&begun), Arc::clone(&told));
                async move {
                    begun.notify_one();
                    locked.notified().await;
                    let error = order(&run).await.unwrap_err();
                    told.lock().unwrap().push(Some(error.kind()));
                    status(500)
                }
            }
        })
        .set(|layer| layer.store_timeout(2 * SHORT));
        let client = tokio::spawn(service.post("key"));
        begun.notified().await;
        let _: Vec<i32> = query_scalar("SELECT 1 FROM idempotency_records FOR UPDATE")
            .fetch_all(&mut *lock)
            .await
            .unwrap();
        locked.notify_one();
        client.await.unwrap().assert_is(500, "");
        assert_eq!(
            told.lock().unwrap().last(),
            Some(&Some(CommitErrorKind::Aborted))
        );
        lock.rollback().await.unwrap();
        // Released as soon as the record can be written.
        let retry = Service::new(&shop, respond);
        past(&retry, "key", "request-in-progress")
            .await
            .assert_is(201, "ordered by run 1");
        assert!(shop.i5_has_order("key").await);
    })
    .await;
}

/// Lets every COMMIT of an order run `statement` first.
pub(crate) async fn slow_commits(shop: &PostgresShop, statement: &str) {
    shop.execute(&format!(
        "CREATE FUNCTION slow() RETURNS trigger LANGUAGE plpgsql AS $$ BEGIN
             {statement};
             RETURN NULL;
         END $$;
         CREATE CONSTRAINT TRIGGER slow AFTER INSERT ON orders
             DEFERRABLE INITIALLY DEFERRED FOR EACH ROW EXECUTE FUNCTION slow()"
    ))
    .await;
}

/// Lets every COMMIT of an order wait until the returned connection is closed.
async fn hold_commits(shop: &PostgresShop) -> PgConnection {
    slow_commits(shop, "PERFORM pg_advisory_xact_lock(1)").await;
    let connected = PgConnection::connect_with(&options(&shop.url)).await;
    let mut holder = connected.unwrap();
    tower_idempotency::sqlx::query("SELECT pg_advisory_lock(1)")
        .execute(&mut holder)
        .await
        .unwrap();
    holder
}

/// Waits until a session on the shop's database meets `condition`.
async fn until(shop: &PostgresShop, condition: &str) {
    let sessions = format!(
        "SELECT count(*) FROM pg_stat_activity
         WHERE datname = current_database() AND {condition}"
    );
    loop {
        let sessions: i64 = query_scalar(tower_idempotency::sqlx::AssertSqlSafe(sessions.clone()))
            .fetch_one(&shop.pool)
            .await
            .unwrap();
        if sessions > 0 {
            return;
        }
        tokio::time::sleep(Duration::from_millis(5)).await;
    }
}
