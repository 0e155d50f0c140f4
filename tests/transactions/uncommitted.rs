//! Transactions that never reached `commit`.

use axum::response::IntoResponse as _;
use http::StatusCode;
use metrics_util::debugging::{DebugValue, DebuggingRecorder};
use tower_idempotency::{
    Disposition, Dispositions, Outcome, Recovery, Release, sqlx::Connection as _,
    store::RecordState,
};

use crate::{
    commit::{order, respond},
    log::Log,
    service::{Service, status},
    shop::{
        PostgresShop, Shop, SqliteShop, ordered, with_each_database, with_postgres, with_sqlite,
    },
};

with_each_database! {
    f109_success_after_a_dropped_transaction_is_denied_and_unknown;
    f109_success_beside_an_open_transaction_is_never_recorded;
    f109_other_responses_after_a_dropped_transaction_stay;
    f109_success_after_an_explicit_rollback_is_recorded;
    f109_a_transaction_begun_again_makes_up_for_a_dropped_one;
    f109_rerun_after_a_panic_does_the_work_once;
    f109_rerun_after_a_dropped_transaction_does_the_work_once;
}

async fn f109_success_after_a_dropped_transaction_is_denied_and_unknown<S: Shop>(shop: S) {
    let log = Log::start();
    let service = Service::new(&shop, async |run| {
        drop(run.begin_order("pen").await);
        match run.operation.key().as_str() {
            "redirect" => (StatusCode::SEE_OTHER, [("location", "/orders/1")]).into_response(),
            "word" => (Disposition::Record, status(200)).into_response(),
            _ => ordered("a pen"),
        }
    });
    for (n, key) in ["created", "redirect", "word"].into_iter().enumerate() {
        let first = service.post(key).await;
        first.assert_problem(500, "rolled-back");
        assert_eq!(first.outcome, Outcome::Unknown);
        assert_eq!(log.notices("uncommitted"), n + 1);
        assert!(log.has(&["WARN", "uncommitted", "pass it to the store's `commit`"]));
        // The handler may have had other effects, so that it does not run again.
        service
            .post(key)
            .await
            .assert_problem(409, "outcome-unknown");
        assert_eq!(service.runs(), n + 1);
        assert!(!shop.i5_has_order(key).await);
    }
}

async fn f109_success_beside_an_open_transaction_is_never_recorded<S: Shop>(shop: S) {
    let service = Service::new(&shop, async |run| {
        let answered = run.shop.begin(&run.operation).await.unwrap();
        tokio::spawn(async move {
            tokio::time::sleep(crate::shop::SHORT).await;
            let mut transaction = answered;
            S::order(&mut transaction, &run.operation, "pen")
                .await
                .unwrap();
            let committed = run.commit(transaction, ordered("late")).await;
            let _committed = committed.unwrap();
        });
        status(202)
    });
    let first = service.post("key").await;
    // SQLite has one writer: the outcome is written after the order's transaction
    // ends.
    match first.status.as_u16() {
        201 => first.assert_is(201, "ordered late"),
        _ => first.assert_problem(500, "rolled-back"),
    }
    let late = crate::service::past(&service, "key", "outcome-unknown").await;
    late.assert_is(201, "ordered late");
    assert!(late.is_replay());
    assert!(shop.i5_has_order("key").await);
    assert_eq!(service.runs(), 1);
}

async fn f109_other_responses_after_a_dropped_transaction_stay<S: Shop>(shop: S) {
    let log = Log::start();
    let service = Service::new(&shop, async |run| {
        drop(run.begin_order("pen").await);
        match run.operation.key().as_str() {
            "rejected" => status(409),
            "failed" => status(500),
            "released" => (Disposition::Release(Release::AnyRequest), status(200)).into_response(),
            "table" => status(202),
            "grpc" => ([("grpc-status", "3")], status(200)).into_response(),
            key => unreachable!("{key}"),
        }
    })
    .set(|layer| {
        let accepted = Dispositions::standard().status(
            StatusCode::ACCEPTED,
            Disposition::Release(Release::SameRequest),
        );
        layer.dispositions(accepted)
    });
    for (key, code, outcome) in [
        ("rejected", 409, Outcome::Recorded),
        ("failed", 500, Outcome::Released),
        ("released", 200, Outcome::Released),
        ("table", 202, Outcome::Released),
        ("grpc", 200, Outcome::Recorded),
    ] {
        let answer = service.post(key).await;
        answer.assert_is(code, "");
        assert_eq!(answer.outcome, outcome, "{key}");
    }
    assert_eq!(log.notices("uncommitted"), 0);
    assert!(shop.orders().await.is_empty());
}

async fn f109_success_after_an_explicit_rollback_is_recorded<S: Shop>(shop: S) {
    let log = Log::start();
    let service = Service::new(&shop, async |run| {
        S::roll_back(run.begin_order("pen").await).await.unwrap();
        (StatusCode::OK, "there was one already").into_response()
    });
    for replayed in [false, true] {
        let answer = service.post("key").await;
        answer.assert_is(200, "there was one already");
        assert_eq!(answer.is_replay(), replayed);
    }
    assert_eq!(log.notices("uncommitted"), 0);
    assert!(shop.orders().await.is_empty());
}

async fn f109_a_transaction_begun_again_makes_up_for_a_dropped_one<S: Shop>(shop: S) {
    let log = Log::start();
    let service = Service::new(&shop, async |run| {
        drop(run.begin_order("pen").await);
        match run.operation.key().as_str() {
            "commit" => respond(run).await,
            _ => {
                S::roll_back(run.begin_order("pen").await).await.unwrap();
                status(204)
            }
        }
    });
    service.post("rollback").await.assert_is(204, "");
    service
        .post("commit")
        .await
        .assert_is(201, "ordered by run 2");
    assert_eq!(log.notices("uncommitted"), 0);
    assert!(shop.i5_has_order("commit").await);
}

async fn f109_rerun_after_a_panic_does_the_work_once<S: Shop>(shop: S) {
    let service = Service::new(&shop, async |run| {
        match (run.operation.key().as_str(), run.number) {
            ("before", 1 | 2) => {
                let _transaction = run.begin_order("pen").await;
                panic!("before the commit");
            }
            ("after", _) => {
                let _committed = order(&run).await.unwrap();
                panic!("after the commit");
            }
            _ => respond(run).await,
        }
    })
    .set(|layer| layer.recovery(Recovery::Rerun));
    for _ in 0..2 {
        let first = service.post("before").await;
        first.assert_problem(500, "handler-panicked");
        assert!(!shop.i5_has_order("before").await);
    }
    service
        .post("before")
        .await
        .assert_is(201, "ordered by run 3");
    service
        .post("before")
        .await
        .assert_is(201, "ordered by run 3");
    assert!(shop.i5_has_order("before").await);
    for replayed in [false, true] {
        let answer = service.post("after").await;
        answer.assert_is(201, "ordered by run 4");
        assert_eq!(answer.is_replay(), replayed);
    }
    assert_eq!(shop.orders().await.len(), 2);
    assert_eq!(service.runs(), 4);
}

async fn f109_rerun_after_a_dropped_transaction_does_the_work_once<S: Shop>(shop: S) {
    let service = Service::new(&shop, async |run| match run.number {
        1 => {
            drop(run.begin_order("pen").await);
            status(201)
        }
        _ => respond(run).await,
    })
    .set(|layer| layer.recovery(Recovery::Rerun));
    service.post("key").await.assert_problem(500, "rolled-back");
    let record = shop.record("key").await.unwrap();
    assert!(matches!(record.state, RecordState::Unknown));
    service.post("key").await.assert_is(201, "ordered by run 2");
    assert!(service.post("key").await.is_replay());
    assert!(shop.i5_has_order("key").await);
}

#[tokio::test(flavor = "multi_thread")]
async fn f34_driver_savepoints_commit_and_roll_back_with_postgres() {
    with_postgres(async |shop| {
        let service = Service::new(&shop, async |run| {
            let mut transaction = run.shop.begin(&run.operation).await.unwrap();
            for (item, kept) in [("unicorn", false), ("pen", true)] {
                let mut savepoint = transaction.begin().await.unwrap();
                PostgresShop::order(&mut savepoint, &run.operation, item)
                    .await
                    .unwrap();
                match kept {
                    true => savepoint.commit().await.unwrap(),
                    false => savepoint.rollback().await.unwrap(),
                }
            }
            run.commit(transaction, ordered("one pen"))
                .await
                .into_response()
        });
        service.post("key").await.assert_is(201, "ordered one pen");
        assert!(shop.i5_has_order("key").await);
    })
    .await;
}

#[tokio::test(flavor = "multi_thread")]
async fn f34_driver_savepoints_commit_and_roll_back_with_sqlite() {
    with_sqlite(async |shop| {
        let service = Service::new(&shop, async |run| {
            let mut transaction = run.shop.begin(&run.operation).await.unwrap();
            for (item, kept) in [("unicorn", false), ("pen", true)] {
                let mut savepoint = transaction.begin().await.unwrap();
                SqliteShop::order(&mut savepoint, &run.operation, item)
                    .await
                    .unwrap();
                match kept {
                    true => savepoint.commit().await.unwrap(),
                    false => savepoint.rollback().await.unwrap(),
                }
            }
            run.commit(transaction, ordered("one pen"))
                .await
                .into_response()
        });
        service.post("key").await.assert_is(201, "ordered one pen");
        assert!(shop.i5_has_order("key").await);
    })
    .await;
}

#[tokio::test]
async fn f109_an_uncommitted_transaction_counts_as_one_notice() {
    with_sqlite(async |shop| {
        let recorder = Box::leak(Box::new(DebuggingRecorder::new()));
        let counted = recorder.snapshotter();
        let _recorder = metrics::set_default_local_recorder(recorder);
        let service = Service::new(&shop, async |run| {
            drop(run.begin_order("pen").await);
            status(201)
        });
        service.post("key").await.assert_problem(500, "rolled-back");
        let notices: Vec<_> = counted
            .snapshot()
            .into_vec()
            .into_iter()
            .filter(|(key, ..)| key.key().name() == "idempotency_notices_total")
            .map(|(key, _, _, value)| {
                (key.key().labels().next().unwrap().value().to_owned(), value)
            })
            .collect();
        assert_eq!(
            notices,
            [("uncommitted".to_owned(), DebugValue::Counter(1))]
        );
    })
    .await;
}
