//! Handlers of an application, mounted in a router and served.

use axum::{
    Json, Router,
    body::Body,
    extract::State,
    response::{Html, IntoResponse as _, Response},
    routing::post,
};
use http::{HeaderName, Request, StatusCode, header::LOCATION};
use http_body_util::BodyExt as _;
use serde_json::json;
use tower::ServiceExt as _;
use tower_idempotency::{
    CommitError, Committed, IdempotencyLayer, Operation, PostgresStore, Scope, SqliteStore, sqlx,
};

use crate::{
    log::Log,
    shop::{Shop as _, with_postgres, with_sqlite},
};

/// A router with a handler for each kind of response. A handler whose future is
/// not `Send` does not compile here.
macro_rules! router {
    ($store:ident: $Store:ty, { $($path:literal => $response:expr,)* }) => {{
        let layer = IdempotencyLayer::required($store.clone(), |_| Some(Scope::single_tenant()))
            .build()
            .unwrap();
        let router = Router::new();
        $(let router = router.route($path, {
            async fn handler(
                State(store): State<$Store>,
                operation: Operation,
            ) -> Result<Committed, CommitError> {
                let mut transaction = store.begin(&operation).await?;
                sqlx::query("INSERT INTO orders (fence, item) VALUES ($1, 'pen')")
                    .bind(i64::try_from(operation.fence().get()).unwrap())
                    .execute(&mut *transaction)
                    .await?;
                store.commit(&operation, transaction, $response).await
            }
            post(handler)
        });)*
        router.layer(layer).with_state($store)
    }};
}

fn x_part() -> HeaderName {
    HeaderName::from_static("x-part")
}

macro_rules! routes {
    ($store:ident: $Store:ty) => {
        router!($store: $Store, {
            "/str" => "ordered",
            "/status-and-str" => (StatusCode::CREATED, "ordered"),
            "/headers-and-str" => (StatusCode::CREATED, [(LOCATION, "/orders/1")], "ordered"),
            "/array" => ([(x_part(), "one")], String::from("ordered")),
            "/string" => format!("{}ed", "order"),
            "/json" => (StatusCode::CREATED, Json(json!("ordered"))),
            "/html" => Html("ordered"),
            "/bytes" => bytes::Bytes::from_static(b"ordered"),
            "/slice" => b"ordered".as_slice(),
            "/result" => Ok::<_, StatusCode>((StatusCode::CREATED, "ordered")),
            "/status" => StatusCode::NO_CONTENT,
            "/unit" => (),
            "/response" => Response::new(Body::from("ordered")),
            "/into-response" => "ordered".into_response(),
        })
    };
}

const PATHS: [&str; 14] = [
    "/str",
    "/status-and-str",
    "/headers-and-str",
    "/array",
    "/string",
    "/json",
    "/html",
    "/bytes",
    "/slice",
    "/result",
    "/status",
    "/unit",
    "/response",
    "/into-response",
];

async fn assert_each_is_served_once(app: Router) {
    for path in PATHS {
        for replayed in [false, true] {
            let request = Request::post(path)
                .header("idempotency-key", path)
                .body(Body::empty())
                .unwrap();
            let response = app.clone().oneshot(request).await.unwrap();
            let status = response.status();
            assert!(status.is_success(), "{path}: {status}");
            let marked = response.headers().contains_key("idempotent-replayed");
            assert_eq!(marked, replayed, "{path}");
            let body = response.into_body().collect().await.unwrap().to_bytes();
            let said = String::from_utf8(body.to_vec()).unwrap();
            match path {
                "/status" | "/unit" => assert_eq!(said, ""),
                _ => assert_eq!(said.trim_matches('"'), "ordered", "{path}"),
            }
        }
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_mounted_postgres_handler_commits_every_kind_of_response() {
    with_postgres(async |shop| {
        let store = shop.store.clone();
        assert_each_is_served_once(routes!(store: PostgresStore)).await;
        assert_eq!(shop.orders().await.len(), PATHS.len());
    })
    .await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_mounted_sqlite_handler_commits_every_kind_of_response() {
    with_sqlite(async |shop| {
        let store = shop.store.clone();
        assert_each_is_served_once(routes!(store: SqliteStore)).await;
        assert_eq!(shop.orders().await.len(), PATHS.len());
    })
    .await;
}

#[tokio::test(flavor = "multi_thread")]
async fn f110_a_sql_error_in_a_mounted_handler_is_logged() {
    async fn order(
        State(store): State<PostgresStore>,
        operation: Operation,
    ) -> Result<Committed, CommitError> {
        let mut transaction = store.begin(&operation).await?;
        sqlx::query("INSERT INTO ordrs (item) VALUES ('pen')")
            .execute(&mut *transaction)
            .await?;
        store.commit(&operation, transaction, "ordered").await
    }
    with_postgres(async |shop| {
        let log = Log::start();
        let layer =
            IdempotencyLayer::required(shop.store.clone(), |_| Some(Scope::single_tenant()));
        let app = Router::new()
            .route("/orders", post(order).layer(layer.build().unwrap()))
            .with_state(shop.store.clone());
        // Another test of this process may have logged such an error just now.
        for attempt in 0..1_000 {
            let request = Request::post("/orders")
                .header("idempotency-key", "k")
                .body(Body::empty())
                .unwrap();
            let response = app.clone().oneshot(request).await.unwrap();
            assert_eq!(response.status(), StatusCode::INTERNAL_SERVER_ERROR);
            assert_eq!(
                response.headers()["content-type"],
                "application/problem+json"
            );
            let body = response.into_body().collect().await.unwrap().to_bytes();
            let said = String::from_utf8(body.to_vec()).unwrap();
            assert!(
                said.contains("rolled-back") && !said.contains("ordrs"),
                "{said}"
            );
            if log.has(&["transaction failed (aborted)", "ordrs", "does not exist"]) {
                return;
            }
            assert!(attempt < 999, "{}", log.warnings());
            tokio::time::sleep(std::time::Duration::from_millis(20)).await;
        }
    })
    .await;
}

/// The handler of the example at [`PostgresStore::commit`], word for word.
mod documented {
    use axum::extract::State;
    use http::StatusCode;
    use tower_idempotency::{CommitError, Committed, Operation, PostgresStore, sqlx};

    pub(super) async fn order(
        State(store): State<PostgresStore>,
        operation: Operation,
    ) -> Result<Committed, CommitError> {
        let mut transaction = store.begin(&operation).await?;
        sqlx::query("INSERT INTO orders (operation) VALUES ($1)")
            .bind(operation.id().to_string())
            .execute(&mut *transaction)
            .await?;
        let response = (StatusCode::CREATED, "ordered"); // any `IntoResponse`
        store.commit(&operation, transaction, response).await
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn the_documented_postgres_handler_orders_once() {
    with_postgres(async |shop| {
        shop.execute("DROP TABLE orders; CREATE TABLE orders (operation text)")
            .await;
        let layer =
            IdempotencyLayer::required(shop.store.clone(), |_| Some(Scope::single_tenant()));
        let app = Router::new()
            .route(
                "/orders",
                post(documented::order).layer(layer.build().unwrap()),
            )
            .with_state(shop.store.clone());
        for replayed in [false, true] {
            let request = Request::post("/orders")
                .header("idempotency-key", "k")
                .body(Body::empty())
                .unwrap();
            let response = app.clone().oneshot(request).await.unwrap();
            assert_eq!(response.status(), StatusCode::CREATED);
            let marked = response.headers().contains_key("idempotent-replayed");
            assert_eq!(marked, replayed);
        }
        let orders: i64 = sqlx::query_scalar("SELECT count(*) FROM orders")
            .fetch_one(&shop.pool)
            .await
            .unwrap();
        assert_eq!(orders, 1);
    })
    .await;
}

/// The future of `commit` borrows nothing, so that it can be spawned.
#[tokio::test(flavor = "multi_thread")]
async fn the_future_of_commit_can_be_spawned() {
    fn require_send<T: Send + 'static>(future: T) -> T {
        future
    }
    with_sqlite(async |shop| {
        let service = crate::service::Service::new(&shop, async |run| {
            let transaction = run.shop.store().begin(&run.operation).await.unwrap();
            let store = run.shop.store().clone();
            let committing = require_send(store.commit(&run.operation, transaction, "ordered"));
            tokio::spawn(committing).await.unwrap().into_response()
        });
        service.post("key").await.assert_is(200, "ordered");
        assert!(service.post("key").await.is_replay());
    })
    .await;
}
