//! The answers and logs of failed transactions.

use std::{error::Error, io, time::Duration};

use axum::response::{IntoResponse as _, Response};
use http_body_util::BodyExt as _;
use tokio::{
    io::{AsyncReadExt as _, AsyncWriteExt as _},
    net::TcpListener,
};
use tower_idempotency::{
    CommitError, CommitErrorKind, Committed, Outcome, PostgresStore, StoreError,
    sqlx::{
        self, ConnectOptions as _,
        postgres::{PgConnectOptions, PgSslMode},
        query,
    },
};

use crate::{
    commit::{order, respond},
    log::Log,
    proxy::{Network, Proxy},
    service::{Answer, Run, Service, status},
    shop::{
        PostgresShop, SHORT, Shop, SqliteShop, options, ordered, with_each_database, with_postgres,
        with_sqlite,
    },
};

/// A handler that fails in the way of its key, by `?` alone.
async fn fail<S: Shop>(run: &Run<S>) -> Result<Committed, CommitError> {
    let mut transaction = run.shop.begin(&run.operation).await?;
    match run.operation.key().as_str() {
        key if key.starts_with("statement") => {
            S::run(&mut transaction, "SELECT * FROM nothing_like_it").await?;
        }
        key if key.starts_with("22P02") => {
            S::run(&mut transaction, "SELECT 'the-secret'::uuid").await?;
        }
        key if key.starts_with("23505") => {
            let twice = "INSERT INTO items VALUES ('the-secret'), ('the-secret')";
            S::run(&mut transaction, twice).await?;
        }
        key if key.starts_with("P0001") => {
            let raise = "DO 'BEGIN RAISE ''the-secret''; END'";
            S::run(&mut transaction, raise).await?;
        }
        key if key.starts_with("42601") => {
            let search = "SELECT to_tsquery(lower('THE-SECRET ('))";
            S::run(&mut transaction, search).await?;
        }
        key if key.starts_with("42P01") => {
            S::run(&mut transaction, "SELECT nextval(lower('THE-SECRET'))").await?;
        }
        key if key.starts_with("json") => {
            let extract = "SELECT json_extract('{}', lower('THE-SECRET'))";
            S::run(&mut transaction, extract).await?;
        }
        key if key.starts_with("search") => {
            let table = "CREATE VIRTUAL TABLE temp.texts USING fts5(text)";
            S::run(&mut transaction, table).await?;
            let search = r#"SELECT * FROM texts WHERE texts MATCH lower('"THE-SECRET":x')"#;
            S::run(&mut transaction, search).await?;
        }
        key if key.starts_with("1811") => {
            let trigger = "CREATE TEMP TRIGGER refusal BEFORE INSERT ON items
                BEGIN SELECT RAISE(ABORT, 'the-secret'); END";
            S::run(&mut transaction, trigger).await?;
            S::run(&mut transaction, "INSERT INTO items VALUES ('pencil')").await?;
        }
        key if key.starts_with("commit") => {
            S::order(&mut transaction, &run.operation, "unicorn").await?;
        }
        key => unreachable!("{key}"),
    }
    let response = ordered("nothing");
    run.commit(transaction, response).await
}

/// Sends requests with new keys until the log has the message, which is
/// rate-limited.
pub(crate) async fn until_logged<S: Shop>(
    service: &Service<S>,
    log: &Log,
    key: &str,
    parts: &[&str],
) -> Answer {
    for n in 0.. {
        let answer = service.post(&format!("{key}-{n}")).await;
        if log.has(parts) {
            return answer;
        }
        assert!(n < 1_000, "{parts:?} is not in: {}", log.warnings());
        tokio::time::sleep(Duration::from_millis(20)).await;
    }
    unreachable!()
}

with_each_database! {
    f110_a_failed_statement_or_commit_is_logged_with_its_cause;
    f110_a_failed_commit_that_the_handler_hides_is_logged;
    f110_a_failed_commit_that_the_handler_handles_is_not_logged;
    f110_failed_commit_is_rendered_as_the_layers_refusals;
}

async fn f110_a_failed_statement_or_commit_is_logged_with_its_cause<S: Shop>(shop: S) {
    let log = Log::start();
    let service = Service::new(&shop, async |run| fail(&run).await.into_response());
    for (key, cause) in [("statement", "nothing_like_it"), ("commit", "constraint")] {
        let parts = ["WARN", "transaction failed (aborted)", cause];
        let answer = until_logged(&service, &log, key, &parts).await;
        answer.assert_problem(500, "rolled-back");
        assert_eq!(answer.headers["content-type"], "application/problem+json");
        assert_eq!(answer.headers["cache-control"], "no-store");
        assert_eq!(answer.headers["retry-after"], "1");
        assert_eq!(answer.outcome, Outcome::Released);
        assert!(
            !answer.body.to_lowercase().contains(cause),
            "{}",
            answer.body
        );
    }
}

/// As in a service without axum, the error is dropped and only a status is left.
async fn f110_a_failed_commit_that_the_handler_hides_is_logged<S: Shop>(shop: S) {
    let service = Service::new(&shop, async |run| {
        fail(&run).await.unwrap_err();
        match run.operation.key().as_str() {
            // The layer replaces this response.
            key if key.contains("success") => status(200),
            _ => status(503),
        }
    });
    for key in ["commit", "commit-success"] {
        let log = Log::start();
        let parts = [
            "WARN",
            "transaction failed (aborted)",
            "constraint",
            "operation=",
        ];
        until_logged(&service, &log, key, &parts).await;
    }
}

async fn f110_a_failed_commit_that_the_handler_handles_is_not_logged<S: Shop>(shop: S) {
    let log = Log::start();
    let service = Service::new(&shop, async |run| {
        let error = fail(&run).await.unwrap_err();
        assert_eq!(error.kind(), CommitErrorKind::Aborted);
        status(409)
    });
    service.post("commit").await.assert_is(409, "");
    assert_eq!(log.warnings(), "");
}

#[tokio::test(flavor = "multi_thread")]
async fn f110_a_response_not_kept_is_logged_with_its_reason() {
    with_sqlite(async |shop| {
        let service = Service::new(&shop, async |run| {
            let transaction = run.shop.begin(&run.operation).await.unwrap();
            let mut response = ordered("too much for 10 bytes");
            if run.operation.key().as_str().starts_with("stream") {
                let stream = "text/event-stream".parse().unwrap();
                response.headers_mut().insert("content-type", stream);
            }
            let committed = run.commit(transaction, response).await;
            committed.into_response()
        })
        .set(|layer| layer.max_response_body(10));
        for (key, reason) in [
            ("large", "its body exceeds `max_response_body` (10 bytes)"),
            ("stream", "its media type is one of `streamed_types`"),
        ] {
            let log = Log::start();
            let parts = ["transaction failed (response-not-kept)", reason];
            let answer = until_logged(&service, &log, key, &parts).await;
            answer.assert_problem(500, "rolled-back");
        }
    })
    .await;
}

async fn f110_failed_commit_is_rendered_as_the_layers_refusals<S: Shop>(shop: S) {
    let service = Service::new(&shop, async |run| {
        let error = fail(&run).await.unwrap_err();
        match run.operation.key().as_str() {
            "commit" => error.into_response(),
            _ => error.into_http().map(axum::body::Body::new),
        }
    });
    let service = service.set(|layer| {
        let layer = layer.documentation("https://docs.example/keys");
        layer.problem_types("https://docs.example/problems:")
    });
    for key in ["commit", "commit-http"] {
        let answer = service.post(key).await;
        answer.assert_problem(500, "rolled-back");
        let expected = r#""type":"https://docs.example/problems:rolled-back""#;
        assert!(answer.body.contains(expected), "{}", answer.body);
        let link = "<https://docs.example/keys>; rel=\"describedby\"";
        assert_eq!(answer.headers["link"], link);
    }
}

/// Provokes failures whose database errors quote a value. The store's errors show
/// the other text only.
async fn assert_no_value_is_told<S: Shop>(shop: S, told: &'static [(&str, &str)]) {
    let log = Log::start();
    let service = Service::new(&shop, move |run| async move {
        let code = run.operation.key().as_str();
        let (_, says) = told.iter().find(|(key, _)| code.starts_with(key)).unwrap();
        let error = fail(&run).await.unwrap_err();
        let cause = error.get_ref().unwrap();
        assert!(format!("{cause:?}").contains("the-secret"), "{cause:?}");
        for text in [report(&error), format!("{error:?}")] {
            assert!(text.contains(says), "{text}");
            assert!(!text.contains("the-secret"), "{text}");
        }
        error.into_response()
    });
    for (code, says) in told {
        service.post(code).await.assert_problem(500, "rolled-back");
        if *code == told[0].0 {
            until_logged(&service, &log, code, &["WARN", says]).await;
        }
    }
    assert!(!log.warnings().contains("the-secret"), "{}", log.warnings());
}

#[tokio::test(flavor = "multi_thread")]
async fn f110_values_in_postgres_errors_are_never_shown() {
    with_postgres(async |shop| {
        let told = &[
            ("22P02", "SQLSTATE 22P02"),
            (
                "23505",
                "SQLSTATE 23505, table items, constraint items_pkey",
            ),
            ("P0001", "SQLSTATE P0001"),
            ("42601", "SQLSTATE 42601"),
            ("42P01", "SQLSTATE 42P01"),
        ];
        assert_no_value_is_told(shop, told).await;
    })
    .await;
}

#[tokio::test(flavor = "multi_thread")]
async fn f110_values_in_sqlite_errors_are_never_shown() {
    with_sqlite(async |shop| {
        let told = &[
            ("1811", "SQLite code 1811"),
            ("json", "SQLite code 1"),
            ("search", "SQLite code 1"),
        ];
        assert_no_value_is_told(shop, told).await;
    })
    .await;
}

#[tokio::test(flavor = "multi_thread")]
async fn no_free_connection_answers_503_and_a_retry_runs() {
    with_postgres(async |shop| {
        let store = PostgresStore::builder(options(&shop.url))
            .transaction_connections(1)
            .acquire_timeout(Duration::from_millis(200))
            .connect()
            .await
            .unwrap();
        let shop = shop.with_store(store.clone());
        let service = Service::new(&shop, respond);
        let holder = Service::new(&shop, async |run| {
            let held = run.shop.begin(&run.operation).await.unwrap();
            let answer = Service::new(&run.shop, respond).post("key").await;
            assert_unavailable(&answer);
            let error = order(&run).await.unwrap_err();
            assert_eq!(error.kind(), CommitErrorKind::Unavailable);
            assert!(
                error.to_string().contains("`transaction_connections` is 1"),
                "{error}"
            );
            PostgresShop::roll_back(held).await.unwrap();
            status(204)
        });
        holder.post("holder").await.assert_is(204, "");
        service.post("key").await.assert_is(201, "ordered by run 1");
        assert!(shop.i5_has_order("key").await);
        store.close().await;
    })
    .await;
}

#[tokio::test(flavor = "multi_thread")]
async fn an_unreachable_database_answers_503_and_a_retry_runs() {
    with_postgres(async |shop| {
        let proxy = Proxy::to(&shop.url).await;
        let store = PostgresStore::builder(proxy.options(&shop.url))
            .acquire_timeout(Duration::from_millis(200))
            .connect()
            .await
            .unwrap();
        let shop = shop.with_store(store.clone());
        let proxy = std::sync::Arc::new(proxy);
        let service = Service::new(&shop, {
            let proxy = std::sync::Arc::clone(&proxy);
            move |run: Run<PostgresShop>| {
                let proxy = std::sync::Arc::clone(&proxy);
                async move {
                    match (run.number, run.operation.key().as_str()) {
                        (1, _) => proxy.set(Network::Gone),
                        // The driver notices the cut before the first statement.
                        (3, _) => {
                            let begun = run.shop.begin(&run.operation).await;
                            proxy.set(Network::Gone);
                            let mut transaction = begun.unwrap();
                            let failed = PostgresShop::run(&mut transaction, "SELECT 1").await;
                            return CommitError::from(failed.unwrap_err()).into_response();
                        }
                        _ => {}
                    }
                    respond(run).await
                }
            }
        });
        for (key, run) in [("begin", 2), ("statement", 4)] {
            assert_unavailable(&service.post(key).await);
            proxy.set(Network::Sound);
            // Released as soon as the record can be written.
            let retry = crate::service::past(&service, key, "request-in-progress").await;
            retry.assert_is(201, &format!("ordered by run {run}"));
        }
        store.close().await;
    })
    .await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_locked_file_answers_503_and_a_retry_runs() {
    with_sqlite(async |shop| {
        let options = tower_idempotency::sqlx::sqlite::SqliteConnectOptions::new()
            .filename(&shop.file)
            .busy_timeout(SHORT);
        let store = tower_idempotency::SqliteStore::open_with(options)
            .await
            .unwrap();
        let shop = SqliteShop {
            store,
            ..shop.clone()
        };
        let service = Service::new(&shop, async |run: Run<SqliteShop>| {
            if run.number > 1 {
                return respond(run).await;
            }
            let mut other = run.shop.connect().await;
            query("BEGIN IMMEDIATE").execute(&mut other).await.unwrap();
            let error = order(&run).await.unwrap_err();
            assert_eq!(error.kind(), CommitErrorKind::Unavailable);
            assert!(error.to_string().contains("database is locked"), "{error}");
            query("ROLLBACK").execute(&mut other).await.unwrap();
            error.into_response()
        });
        assert_unavailable(&service.post("key").await);
        service.post("key").await.assert_is(201, "ordered by run 2");
        assert!(shop.i5_has_order("key").await);
        shop.store.close().await;
    })
    .await;
}

#[track_caller]
fn assert_unavailable(answer: &Answer) {
    answer.assert_problem(503, "store-unavailable");
    assert_eq!(answer.headers["retry-after"], "1");
    assert_eq!(answer.outcome, Outcome::Released);
}

#[test]
fn errors_of_sqlx_become_kinds_with_status_and_cause() {
    let refused = std::io::Error::from(std::io::ErrorKind::ConnectionRefused);
    for (error, kind, status, retry_after) in [
        (
            sqlx::Error::PoolTimedOut,
            CommitErrorKind::Unavailable,
            503,
            Some(1),
        ),
        (
            sqlx::Error::PoolClosed,
            CommitErrorKind::Unavailable,
            503,
            Some(1),
        ),
        (
            sqlx::Error::Io(refused),
            CommitErrorKind::Unavailable,
            503,
            Some(1),
        ),
        (
            sqlx::Error::RowNotFound,
            CommitErrorKind::Aborted,
            500,
            Some(1),
        ),
    ] {
        let cause = error.to_string();
        let error = CommitError::from(error);
        assert_eq!(error.kind(), kind, "{cause}");
        assert_eq!(error.status(), status);
        assert_eq!(error.retry_after_seconds(), retry_after);
        assert!(error.to_string().contains(&cause), "{error}");
        assert_eq!(report(&error).matches(&cause).count(), 1);
        assert!(error.get_ref().unwrap().is::<sqlx::Error>());
    }
}

#[tokio::test]
async fn error_of_no_operation_is_rendered_with_defaults() {
    let response: Response = CommitError::from(sqlx::Error::PoolTimedOut).into_response();
    let content_type = &response.headers()["content-type"];
    assert_eq!(content_type, "application/problem+json");
    let body = response.into_body().collect().await.unwrap().to_bytes();
    let body = String::from_utf8(body.to_vec()).unwrap();
    let expected = "urn:tower-idempotency:problem:store-unavailable";
    assert!(body.contains(expected), "{body}");
}

#[test]
fn report_of_a_store_failure_names_each_cause_once() {
    #[derive(Debug, thiserror::Error)]
    #[error("cannot read the settings")]
    struct Settings(#[source] io::Error);

    let settings = Settings(io::Error::other("no such file"));
    let error = CommitError::from(StoreError::unavailable(settings));
    assert_eq!(
        report(&error),
        "the database is unavailable: the idempotency store is unavailable: \
         cannot read the settings: no such file"
    );
    let store = error.get_ref().unwrap().downcast_ref::<StoreError>();
    assert!(store.unwrap().get_ref().unwrap().is::<Settings>());
}

/// A server or a pooler that breaks the protocol.
#[tokio::test]
async fn short_sqlstate_is_a_kind_and_no_panic() {
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let options = PgConnectOptions::new()
        .host("127.0.0.1")
        .port(listener.local_addr().unwrap().port())
        .ssl_mode(PgSslMode::Disable)
        .username("app");
    let refusing = async {
        let (mut client, _) = listener.accept().await.unwrap();
        client.read_u8().await.unwrap();
        let fields = b"SFATAL\0VFATAL\0C5\0Mgone\0\0";
        client.write_u8(b'E').await.unwrap();
        client.write_i32(4 + fields.len() as i32).await.unwrap();
        client.write_all(fields).await.unwrap();
        client.flush().await.unwrap();
        // Until the client has read it.
        let _ = client.read_to_end(&mut Vec::new()).await;
    };
    let (error, ()) = tokio::join!(options.connect(), refusing);
    let error = error.unwrap_err();
    assert_eq!(error.as_database_error().unwrap().message(), "gone");
    let error = CommitError::from(error);
    assert_eq!(error.kind(), CommitErrorKind::Aborted);
    assert!(error.to_string().contains("SQLSTATE 5"), "{error}");
}

/// An error with all of its sources, as applications report it.
fn report(error: &dyn Error) -> String {
    let mut text = error.to_string();
    let mut below = error.source();
    while let Some(error) = below {
        text = format!("{text}: {error}");
        below = error.source();
    }
    text
}
