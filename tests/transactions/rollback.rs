//! Orders that were not committed, whatever the handler answers.

use std::task::Poll;

use axum::response::{IntoResponse as _, Response};
use http::StatusCode;
use tower_idempotency::{
    CommitErrorKind, Disposition, Outcome, Recovery,
    sqlx::{Connection as _, query, query_scalar, raw_sql},
    store::RecordState,
};

use crate::{
    commit::respond,
    service::{Run, Service, status},
    shop::{PostgresShop, Shop, ordered, with_each_database, with_postgres, with_sqlite},
};

/// Serves the first run by `first`, later ones by `respond`.
fn at_first<S: Shop, F>(shop: &S, first: impl Fn(Run<S>) -> F + Send + Sync + 'static) -> Service<S>
where
    F: Future<Output = Response> + Send + 'static,
{
    let first = std::sync::Arc::new(first);
    Service::new(shop, move |run| {
        let first = std::sync::Arc::clone(&first);
        async move {
            match run.number {
                1 => first(run).await,
                _ => respond(run).await,
            }
        }
    })
}

/// Asserts that nothing was ordered, and that a retry orders.
async fn assert_retry_orders<S: Shop>(shop: &S, service: &Service<S>) {
    assert!(!shop.i5_has_order("key").await);
    service.post("key").await.assert_is(201, "ordered by run 2");
    assert!(shop.i5_has_order("key").await);
    assert!(service.post("key").await.is_replay());
    assert_eq!(service.runs(), 2);
}

/// Orders an item that the shop does not have, so that COMMIT fails.
async fn order_a_unicorn<S: Shop>(run: &Run<S>) -> CommitErrorKind {
    let transaction = run.begin_order("unicorn").await;
    let committed = run.commit(transaction, ordered("a unicorn")).await;
    committed.unwrap_err().kind()
}

with_each_database! {
    a_dropped_transaction_is_rolled_back_and_a_retry_runs;
    a_business_error_after_a_rollback_is_recorded;
    f64_a_constraint_failing_at_commit_aborts_and_a_retry_runs;
    f63_success_after_a_failed_commit_becomes_500_and_reruns;
    i11_success_after_a_failed_commit_with_effects_is_unknown;
    a_panic_before_commit_leaves_an_unknown_outcome;
    f34_a_savepoint_that_is_rolled_back_does_no_harm;
    f34_a_transaction_that_the_handler_ended_itself_records_nothing;
}

async fn a_dropped_transaction_is_rolled_back_and_a_retry_runs<S: Shop>(shop: S) {
    let service = at_first(&shop, async |run| {
        let transaction = run.begin_order("pen").await;
        drop(transaction);
        status(503)
    });
    let first = service.post("key").await;
    first.assert_is(503, "");
    assert_eq!(first.outcome, Outcome::Released);
    assert_retry_orders(&shop, &service).await;
}

async fn a_business_error_after_a_rollback_is_recorded<S: Shop>(shop: S) {
    let service = Service::new(&shop, async |run| {
        assert_eq!(order_a_unicorn(&run).await, CommitErrorKind::Aborted);
        (StatusCode::CONFLICT, "no such item").into_response()
    });
    for replayed in [false, true] {
        let answer = service.post("key").await;
        answer.assert_is(409, "no such item");
        assert_eq!(answer.is_replay(), replayed);
    }
    assert!(shop.orders().await.is_empty());
}

async fn f64_a_constraint_failing_at_commit_aborts_and_a_retry_runs<S: Shop>(shop: S) {
    let service = at_first(&shop, async |run| {
        let kind = order_a_unicorn(&run).await;
        assert_eq!(kind, CommitErrorKind::Aborted);
        status(500)
    });
    service.post("key").await.assert_is(500, "");
    assert_retry_orders(&shop, &service).await;
}

async fn f63_success_after_a_failed_commit_becomes_500_and_reruns<S: Shop>(shop: S) {
    for code in [200, 204, 302] {
        let key = format!("key-{code}");
        let service = at_first(&shop, move |run| async move {
            order_a_unicorn(&run).await;
            status(code)
        });
        let first = service.post(&key).await;
        first.assert_problem(500, "rolled-back");
        assert_eq!(first.headers["retry-after"], "1");
        assert_eq!(first.outcome, Outcome::Released);
        let orders = shop.orders().await.len();
        service.post(&key).await.assert_is(201, "ordered by run 2");
        assert_eq!(shop.orders().await.len(), orders + 1);
    }
}

async fn i11_success_after_a_failed_commit_with_effects_is_unknown<S: Shop>(shop: S) {
    let service = Service::new(&shop, async |run| {
        match run.operation.key().as_str() {
            "effects" => run.operation.effects_started(),
            "operation" => run.operation.set_disposition(Disposition::Unknown),
            _ => {}
        }
        order_a_unicorn(&run).await;
        match run.operation.key().as_str() {
            "response" => (Disposition::Unknown, status(200)).into_response(),
            _ => status(200),
        }
    });
    for (n, key) in ["effects", "operation", "response"].into_iter().enumerate() {
        let first = service.post(key).await;
        first.assert_problem(500, "rolled-back");
        assert!(!first.headers.contains_key("retry-after"));
        assert_eq!(first.outcome, Outcome::Unknown);
        service
            .post(key)
            .await
            .assert_problem(409, "outcome-unknown");
        assert_eq!(service.runs(), n + 1);
        assert!(!shop.i5_has_order(key).await);
    }
}

async fn a_panic_before_commit_leaves_an_unknown_outcome<S: Shop>(shop: S) {
    let service = at_first(&shop, async |run| {
        let _transaction = run.begin_order("pen").await;
        panic!("before the commit");
    });
    service
        .post("key")
        .await
        .assert_problem(500, "handler-panicked");
    service
        .post("key")
        .await
        .assert_problem(409, "outcome-unknown");
    assert!(!shop.i5_has_order("key").await);
    let record = shop.record("key").await.unwrap();
    assert!(matches!(record.state, RecordState::Unknown));

    let service = service.set(|layer| layer.recovery(Recovery::Rerun));
    assert_retry_orders(&shop, &service).await;
}

async fn f34_a_savepoint_that_is_rolled_back_does_no_harm<S: Shop>(shop: S) {
    let service = Service::new(&shop, async |run| {
        let mut transaction = run.begin_order("pen").await;
        S::run(&mut transaction, "SAVEPOINT attempt").await.unwrap();
        S::order(&mut transaction, &run.operation, "pen")
            .await
            .unwrap();
        S::run(&mut transaction, "ROLLBACK TO SAVEPOINT attempt")
            .await
            .unwrap();
        run.commit(transaction, ordered("one pen"))
            .await
            .into_response()
    });
    service.post("key").await.assert_is(201, "ordered one pen");
    assert!(shop.i5_has_order("key").await);
}

async fn f34_a_transaction_that_the_handler_ended_itself_records_nothing<S: Shop>(shop: S) {
    let service = at_first(&shop, async |run| {
        let mut transaction = run.begin_order("pen").await;
        S::run(&mut transaction, "ROLLBACK").await.unwrap();
        let error = run.commit(transaction, ordered("a pen")).await.unwrap_err();
        assert_eq!(error.kind(), CommitErrorKind::Aborted);
        status(201)
    });
    service.post("key").await.assert_problem(500, "rolled-back");
    assert_retry_orders(&shop, &service).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn f33_an_error_swallowed_in_the_transaction_records_nothing() {
    with_postgres(async |shop| {
        let service = at_first(&shop, async |run| {
            let mut transaction = run.begin_order("pen").await;
            // COMMIT would now answer ROLLBACK, which the driver takes for a
            // success.
            PostgresShop::run(&mut transaction, "SELECT 1 / 0")
                .await
                .unwrap_err();
            let error = run.commit(transaction, ordered("a pen")).await.unwrap_err();
            assert_eq!(error.kind(), CommitErrorKind::Aborted);
            status(201)
        });
        service.post("key").await.assert_problem(500, "rolled-back");
        assert_retry_orders(&shop, &service).await;
    })
    .await;
}

#[tokio::test(flavor = "multi_thread")]
async fn f44_a_savepoint_dropped_while_beginning_rolls_everything_back() {
    with_postgres(async |shop| {
        let service = at_first(&shop, async |run| {
            let mut transaction = run.begin_order("pen").await;
            loop {
                // The driver then rolls back the whole transaction.
                let mut nested = std::pin::pin!(transaction.begin());
                let Poll::Ready(begun) = futures_util::poll!(&mut nested) else {
                    break;
                };
                // The server answered before the first poll: try again.
                begun.unwrap().rollback().await.unwrap();
            }
            let error = run.commit(transaction, ordered("a pen")).await.unwrap_err();
            assert_eq!(error.kind(), CommitErrorKind::Aborted);
            status(201)
        });
        service.post("key").await.assert_problem(500, "rolled-back");
        assert_retry_orders(&shop, &service).await;
    })
    .await;
}

#[tokio::test(flavor = "multi_thread")]
async fn f68_a_transaction_ended_for_idleness_records_nothing() {
    with_postgres(async |shop| {
        let service = at_first(&shop, async |run| {
            let mut transaction = run.begin_order("pen").await;
            let impatient = "SET LOCAL idle_in_transaction_session_timeout = '50ms'";
            PostgresShop::run(&mut transaction, impatient)
                .await
                .unwrap();
            let idle = "SELECT count(*) FROM pg_stat_activity
                        WHERE datname = current_database() AND state LIKE 'idle in transaction%'";
            loop {
                let idle: i64 = query_scalar(idle).fetch_one(&run.shop.pool).await.unwrap();
                if idle == 0 {
                    break;
                }
            }
            let error = run.commit(transaction, ordered("a pen")).await.unwrap_err();
            assert_eq!(error.kind(), CommitErrorKind::Aborted);
            status(201)
        });
        service.post("key").await.assert_problem(500, "rolled-back");
        assert_retry_orders(&shop, &service).await;
    })
    .await;
}

#[tokio::test(flavor = "multi_thread")]
async fn f33_a_statement_by_which_sqlite_rolls_all_back_records_nothing() {
    with_sqlite(async |shop| {
        let service = at_first(&shop, async |run| {
            let mut transaction = run.begin_order("pen").await;
            let error = raw_sql("INSERT OR ROLLBACK INTO items VALUES ('pen')")
                .execute(&mut *transaction)
                .await
                .unwrap_err();
            assert!(error.as_database_error().unwrap().is_unique_violation());
            let error = run.commit(transaction, ordered("a pen")).await.unwrap_err();
            assert_eq!(error.kind(), CommitErrorKind::Aborted);
            status(201)
        });
        service.post("key").await.assert_problem(500, "rolled-back");
        assert_retry_orders(&shop, &service).await;
    })
    .await;
}

#[tokio::test(flavor = "multi_thread")]
async fn f78_a_full_database_rolls_back_and_the_retry_orders() {
    with_sqlite(async |shop| {
        let service = at_first(&shop, async |run| {
            let mut transaction = run.begin_order("pen").await;
            let pages: i64 = query_scalar("PRAGMA page_count")
                .fetch_one(&mut *transaction)
                .await
                .unwrap();
            query(tower_idempotency::sqlx::AssertSqlSafe(format!(
                "PRAGMA max_page_count = {pages}"
            )))
            .execute(&mut *transaction)
            .await
            .unwrap();
            let large = ordered(&"pens ".repeat(50_000));
            let error = run.commit(transaction, large).await.unwrap_err();
            assert_eq!(error.kind(), CommitErrorKind::Aborted);
            error.into_response()
        });
        assert_eq!(service.post("key").await.status, 500);
        assert_retry_orders(&shop, &service).await;
    })
    .await;
}
