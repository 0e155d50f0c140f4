//! An order and its response, committed together.

use std::sync::Arc;

use axum::{
    Router,
    body::Body,
    extract::State,
    response::{IntoResponse as _, Response},
    routing::post,
};
use http::{Request, StatusCode};
use http_body_util::BodyExt as _;
use tokio::sync::Barrier;
use tower::ServiceExt as _;
use tower_idempotency::{CommitError, CommitErrorKind, Committed, Operation, Outcome};

use crate::{
    service::{Run, Service, status},
    shop::{PostgresShop, Shop, ordered, with_each_database, with_postgres},
};

/// Orders a pen, as a handler should.
pub(crate) async fn order<S: Shop>(run: &Run<S>) -> Result<Committed, CommitError> {
    let mut transaction = run.shop.begin(&run.operation).await?;
    S::order(&mut transaction, &run.operation, "pen").await?;
    let response = ordered(&format!("by run {}", run.number));
    run.commit(transaction, response).await
}

pub(crate) async fn respond<S: Shop>(run: Run<S>) -> Response {
    order(&run).await.into_response()
}

with_each_database! {
    i5_an_order_and_its_response_are_committed_and_replayed;
    a_business_rejection_is_committed_and_replayed;
    a_committed_response_is_sent_although_the_handler_swallows_it;
    a_second_commit_is_refused_and_the_first_stays;
    i6_simultaneous_requests_with_one_key_make_one_order;
    the_handler_may_begin_again_once_its_transaction_was_aborted;
}

async fn i5_an_order_and_its_response_are_committed_and_replayed<S: Shop>(shop: S) {
    let service = Service::new(&shop, respond);
    let first = service.post("key").await;
    first.assert_is(201, "ordered by run 1");
    assert_eq!(first.outcome, Outcome::Recorded);
    assert_eq!(first.headers["set-cookie"], "cart=; Max-Age=0");
    assert!(!first.is_replay());
    assert!(shop.i5_has_order("key").await);

    let retry = service.post("key").await;
    retry.assert_is(201, "ordered by run 1");
    assert!(retry.is_replay());
    for answer in [&first, &retry] {
        assert_eq!(answer.headers["location"], "/orders/1");
        let parts: Vec<_> = answer.headers.get_all("x-part").iter().collect();
        assert_eq!(parts, ["one", "two"]);
    }
    assert!(!retry.headers.contains_key("set-cookie"));
    assert_eq!(service.runs(), 1);
    assert!(shop.i5_has_order("key").await);
}

async fn a_business_rejection_is_committed_and_replayed<S: Shop>(shop: S) {
    let service = Service::new(&shop, async |run| {
        let transaction = run.shop.begin(&run.operation).await.unwrap();
        let sold_out = (StatusCode::CONFLICT, "sold out").into_response();
        run.commit(transaction, sold_out).await.into_response()
    });
    service.post("key").await.assert_is(409, "sold out");
    let retry = service.post("key").await;
    retry.assert_is(409, "sold out");
    assert!(retry.is_replay());
    assert_eq!(service.runs(), 1);
    assert!(shop.orders().await.is_empty());
}

async fn a_committed_response_is_sent_although_the_handler_swallows_it<S: Shop>(shop: S) {
    let service = Service::new(&shop, async |run| {
        let committed = order(&run).await.unwrap();
        match run.operation.key().as_str() {
            "another" => status(500),
            "panic" => panic!("after the commit"),
            "status" => (StatusCode::ACCEPTED, committed).into_response(),
            "body" => {
                let (parts, _) = committed.into_response().into_parts();
                Response::from_parts(parts, Body::from("another"))
            }
            "header" => ([("x-part", "another")], committed).into_response(),
            "endless" => {
                let (parts, _) = committed.into_response().into_parts();
                let endless = futures_util::stream::pending::<Result<&str, std::io::Error>>();
                Response::from_parts(parts, Body::from_stream(endless))
            }
            "release" => {
                run.operation
                    .set_disposition(tower_idempotency::Disposition::Release(
                        tower_idempotency::Release::AnyRequest,
                    ));
                status(503)
            }
            key => unreachable!("{key}"),
        }
    })
    .set(|layer| layer.response_body_timeout(crate::shop::SHORT));
    let keys = [
        "another", "panic", "status", "body", "header", "endless", "release",
    ];
    for (n, key) in keys.into_iter().enumerate() {
        let sent = format!("ordered by run {}", n + 1);
        let first = service.post(key).await;
        first.assert_is(201, &sent);
        assert_eq!(first.outcome, Outcome::Recorded);
        assert!(!first.is_replay());
        let retry = service.post(key).await;
        retry.assert_is(201, &sent);
        assert!(retry.is_replay());
        assert_eq!(shop.orders().await.len(), n + 1);
    }
}

async fn a_second_commit_is_refused_and_the_first_stays<S: Shop>(shop: S) {
    let service = Service::new(&shop, async |run| {
        let first = order(&run).await;
        let second = order(&run).await.unwrap_err();
        assert_eq!(second.kind(), CommitErrorKind::Aborted);
        first.into_response()
    });
    let first = service.post("key").await;
    first.assert_is(201, "ordered by run 1");
    // This is the answer of the run, not one that a fenced owner replays.
    assert_eq!(first.outcome, Outcome::Recorded);
    assert!(shop.i5_has_order("key").await);
    assert!(service.post("key").await.is_replay());
}

async fn i6_simultaneous_requests_with_one_key_make_one_order<S: Shop>(shop: S) {
    let service = Service::new(&shop, respond);
    let start = Arc::new(Barrier::new(16));
    let clients = (0..16).map(|_| {
        let (service, start) = (service.clone(), Arc::clone(&start));
        tokio::spawn(async move {
            start.wait().await;
            service.post("key").await
        })
    });
    for answer in futures_util::future::join_all(clients).await {
        let answer = answer.unwrap();
        match answer.status.as_u16() {
            201 => answer.assert_is(201, "ordered by run 1"),
            _ => answer.assert_problem(409, "request-in-progress"),
        }
    }
    assert_eq!(service.runs(), 1);
    assert!(shop.i5_has_order("key").await);
}

async fn the_handler_may_begin_again_once_its_transaction_was_aborted<S: Shop>(shop: S) {
    let service = Service::new(&shop, async |run| {
        let transaction = run.begin_order("unicorn").await;
        let error = run
            .commit(transaction, ordered("a unicorn"))
            .await
            .unwrap_err();
        assert_eq!(error.kind(), CommitErrorKind::Aborted);
        assert!(!run.shop.i5_has_order("key").await);
        respond(run).await
    });
    service.post("key").await.assert_is(201, "ordered by run 1");
    assert!(shop.i5_has_order("key").await);
    assert!(service.post("key").await.is_replay());
}

#[tokio::test(flavor = "multi_thread")]
async fn a_handler_of_axum_commits_through_its_extractor() {
    async fn create(
        State(shop): State<PostgresShop>,
        operation: Operation,
    ) -> Result<Committed, CommitError> {
        order(&Run {
            shop,
            operation,
            number: 1,
        })
        .await
    }
    with_postgres(async |shop| {
        let layer = Service::new(&shop, respond).layer;
        let app = Router::new()
            .route("/orders", post(create).layer(layer))
            .with_state(shop.clone());
        for replayed in [false, true] {
            let request = Request::post("/orders")
                .header("idempotency-key", "key")
                .body(Body::empty())
                .unwrap();
            let response = app.clone().oneshot(request).await.unwrap();
            assert_eq!(response.status(), 201);
            assert_eq!(response.headers()["content-length"], "16");
            assert_eq!(response.headers().contains_key("set-cookie"), !replayed);
            assert_eq!(
                response.headers().contains_key("idempotent-replayed"),
                replayed
            );
            let body = response.into_body().collect().await.unwrap().to_bytes();
            assert_eq!(body, "ordered by run 1");
        }
        assert!(shop.i5_has_order("key").await);
    })
    .await;
}

#[tokio::test(flavor = "multi_thread")]
async fn f61_a_commit_is_durable_under_any_pool_default() {
    with_postgres(async |shop| {
        // A deferred trigger reads the setting during COMMIT.
        shop.execute(
            "CREATE TABLE found (setting text);
             CREATE FUNCTION tell() RETURNS trigger LANGUAGE plpgsql AS $$ BEGIN
                 INSERT INTO found VALUES (current_setting('synchronous_commit'));
                 RETURN NULL;
             END $$;
             CREATE CONSTRAINT TRIGGER tell AFTER INSERT ON orders
                 DEFERRABLE INITIALLY DEFERRED FOR EACH ROW EXECUTE FUNCTION tell();
             DO $$ BEGIN EXECUTE format(
                 'ALTER DATABASE %I SET synchronous_commit = off', current_database()); END $$",
        )
        .await;
        let service = Service::new(&shop, async |run| {
            let mut transaction = run.shop.pool.begin().await.unwrap();
            PostgresShop::order(&mut transaction, &run.operation, "pen")
                .await
                .unwrap();
            run.commit(transaction, ordered("a pen"))
                .await
                .into_response()
        });
        service.post("key").await.assert_is(201, "ordered a pen");
        let found: String = tower_idempotency::sqlx::query_scalar("SELECT setting FROM found")
            .fetch_one(&shop.pool)
            .await
            .unwrap();
        assert_eq!(found, "on");
    })
    .await;
}
