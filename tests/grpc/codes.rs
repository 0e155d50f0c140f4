//! What the layer does with a handler's gRPC error.

use std::{path::PathBuf, time::Duration};

use axum::body::Body;
use http::{Response, StatusCode};
use tokio::time;
use tower_idempotency::{
    Disposition, Dispositions, Operation, Outcome, Release, SqliteStore,
    sqlx::{self, Connection as _, Executor as _},
};

use super::service::{Guarded, PLACES, Place, answer, call, layer, memory};

#[tokio::test]
async fn rule_82_codes_that_may_be_another_services_leave_an_unknown_outcome() {
    for code in ["1", "2", "4", "8", "10", "13", "14", "15", "17", "x"] {
        for place in PLACES {
            let guarded = Guarded::answering(memory(), move || answer(code, place));
            let first = guarded.call("k").await;
            assert_eq!(first.code(), code, "{place:?}");
            assert_eq!(first.outcome(), Outcome::Unknown, "{code} {place:?}");
            let retry = guarded.call("k").await;
            retry.assert_refused("outcome-unknown", "9", "-1");
            assert_eq!(guarded.runs(), 1);
        }
    }
}

#[tokio::test]
async fn rule_83_unimplemented_and_unauthenticated_release_the_key() {
    for place in PLACES {
        let guarded = Guarded::answering(memory(), move || answer("12", place));
        assert_eq!(guarded.call("k").await.outcome(), Outcome::Released);
        let other = guarded.send(call("k", "another")).await;
        other.assert_refused("key-reused", "3", "-1");
        let retry = guarded.call("k").await;
        assert_eq!((retry.code(), guarded.runs()), ("12", 2), "{place:?}");

        let guarded = Guarded::answering(memory(), move || answer("16", place));
        assert_eq!(guarded.call("k").await.outcome(), Outcome::Released);
        let other = guarded.send(call("k", "another")).await;
        assert_eq!((other.code(), guarded.runs()), ("16", 2), "{place:?}");
    }
}

#[tokio::test]
async fn rule_84_codes_that_blame_the_call_are_recorded() {
    for code in ["0", "3", "5", "6", "7", "9", "11"] {
        for place in PLACES {
            let guarded = Guarded::answering(memory(), move || answer(code, place));
            let first = guarded.call("k").await;
            assert_eq!(first.outcome(), Outcome::Recorded, "{code} {place:?}");
            let retry = guarded.call("k").await;
            assert!(retry.is_replay(), "{code} {place:?}");
            assert_eq!((retry.code(), &retry.body), (code, &first.body));
            assert_eq!(guarded.runs(), 1);
        }
    }
}

#[tokio::test]
async fn rule_85_an_error_behind_a_streamed_message_is_an_unknown_outcome() {
    for (code, slug, refusal) in [
        ("14", "outcome-unknown", "9"),
        ("3", "outcome-unknown", "9"),
        ("0", "response-not-replayable", "6"),
    ] {
        let place = Place::Behind("too large to keep");
        let small = memory().max_response_body(1);
        let guarded = Guarded::answering(small, move || answer(code, place));
        let first = guarded.call("k").await;
        assert_eq!(
            (first.code(), &first.body[..]),
            (code, &b"too large to keep"[..])
        );
        assert_eq!(first.outcome(), Outcome::Streamed);
        time::timeout(Duration::from_secs(60), async {
            while guarded.call("k").await.code() == "14" {
                time::sleep(Duration::from_millis(1)).await;
            }
        })
        .await
        .unwrap();
        guarded.call("k").await.assert_refused(slug, refusal, "-1");
        assert_eq!(guarded.runs(), 1);
    }
}

#[tokio::test]
async fn rule_85_settings_for_a_status_see_an_error_in_the_trailers() {
    for place in PLACES {
        let release = Disposition::Release(Release::AnyRequest);
        let dispositions = Dispositions::standard().status(StatusCode::NOT_FOUND, release);
        let layer = memory().dispositions(dispositions);
        let guarded = Guarded::answering(layer, move || answer("5", place));
        assert_eq!(guarded.call("k").await.outcome(), Outcome::Released);
    }
}

#[tokio::test(start_paused = true)]
async fn rule_85_a_retention_for_a_status_counts_for_a_grpc_error() {
    let minute = Duration::from_secs(60);
    for place in PLACES {
        for (code, runs_again) in [("3", true), ("5", false), ("0", false)] {
            let layer = memory().retention_for(StatusCode::BAD_REQUEST, minute);
            let guarded = Guarded::answering(layer, move || answer(code, place));
            guarded.call("k").await;
            time::advance(minute / 2).await;
            assert!(guarded.call("k").await.is_replay());
            time::advance(minute).await;
            let later = guarded.call("k").await;
            assert_eq!(later.is_replay(), !runs_again, "{code} {place:?}");
        }
    }
}

#[tokio::test]
async fn rule_53_a_grpc_handlers_word_beats_its_code() {
    for place in PLACES {
        let guarded = Guarded::new(memory(), move |operation: Operation| async move {
            operation.set_disposition(Disposition::Release(Release::SameRequest));
            answer("14", place)
        });
        for runs in 1..=2 {
            let first = guarded.call("k").await;
            assert_eq!((first.code(), guarded.runs()), ("14", runs), "{place:?}");
            assert_eq!(first.outcome(), Outcome::Released);
        }
    }
}

/// How a handler's transaction does not commit.
#[derive(Clone, Copy, Debug)]
enum Undone {
    Dropped,
    Aborted,
}

async fn undone(
    store: SqliteStore,
    operation: Operation,
    how: Undone,
    answer: Response<Body>,
) -> Response<Body> {
    let mut transaction = store.begin(&operation).await.unwrap();
    transaction.execute(ORPHAN).await.unwrap();
    match how {
        Undone::Dropped => drop(transaction),
        Undone::Aborted => {
            let committed = store.commit(&operation, transaction, "paid").await;
            committed.unwrap_err();
        }
    }
    answer
}

/// Fails when it is committed.
const ORPHAN: &str = "CREATE TABLE items (name TEXT PRIMARY KEY); \
    CREATE TABLE orders (item TEXT REFERENCES items (name) DEFERRABLE INITIALLY DEFERRED); \
    INSERT INTO orders VALUES ('none')";

#[tokio::test]
async fn rule_86_an_error_in_the_trailers_beats_an_uncommitted_transaction() {
    let name = format!("grpc-codes-{}.sqlite", std::process::id());
    let file = PathBuf::from(env!("CARGO_TARGET_TMPDIR")).join(name);
    let store = SqliteStore::open(&file).await.unwrap();
    let mut key = 0;
    for how in [Undone::Dropped, Undone::Aborted] {
        for place in PLACES {
            for (code, outcome) in [
                ("3", Outcome::Recorded),
                ("12", Outcome::Released),
                ("14", Outcome::Unknown),
            ] {
                let layer = layer(store.clone());
                let own = store.clone();
                let guarded = Guarded::new(layer, move |operation| {
                    undone(own.clone(), operation, how, answer(code, place))
                });
                key += 1;
                let first = guarded.call(&key.to_string()).await;
                assert_eq!(first.code(), code, "{how:?} {place:?}");
                assert_eq!(first.outcome(), outcome, "{how:?} {place:?}");
            }
        }
        for place in PLACES {
            for max_body in [1, 1000] {
                let layer = layer(store.clone()).max_response_body(max_body);
                let own = store.clone();
                let guarded = Guarded::new(layer, move |operation| {
                    undone(own.clone(), operation, how, answer("0", place))
                });
                key += 1;
                let refused = guarded.call(&key.to_string()).await;
                let (code, pushback, outcome) = match how {
                    Undone::Dropped => ("13", "-1", Outcome::Unknown),
                    Undone::Aborted => ("14", "1000", Outcome::Released),
                };
                refused.assert_refused("rolled-back", code, pushback);
                assert_eq!(refused.outcome(), outcome, "{how:?} {place:?}");
            }
        }
    }
    let tables = "SELECT count(*) FROM sqlite_schema WHERE name = 'orders'";
    let mut connection = sqlx::SqliteConnection::connect(&format!("sqlite://{}", file.display()))
        .await
        .unwrap();
    let tables: i64 = sqlx::query_scalar(tables)
        .fetch_one(&mut connection)
        .await
        .unwrap();
    assert_eq!(tables, 0);
    store.close().await;
    std::fs::remove_file(file).unwrap();
}
