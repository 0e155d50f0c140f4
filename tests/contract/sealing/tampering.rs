//! Rules 89 and 90: responses that were changed, copied or planted.

use bytes::Bytes;
use tower_idempotency::{
    DynStore, Key, OperationId, Scope, Store as _,
    sealing::Sealing,
    sqlx::{AssertSqlSafe, Connection as _, Executor as _, SqliteConnection},
    store::{Record, RecordName, RecordState},
};

use super::{key, sealed, sealing, watched::Watched};
use crate::{
    api::{Answer, Api, fingerprint, keyed, record, required},
    databases::run,
    probe::Probe,
    stores::{Place, memory, on_each_store},
    told::Told,
};

on_each_store! {
    rule_89_a_sealed_response_opens_in_its_own_record_alone
    rule_90_an_unsealed_response_is_replayed_only_if_accepted
}

async fn response(store: &DynStore, key: &str) -> Bytes {
    match record(store, key).await.unwrap().state {
        RecordState::Completed { response } => response,
        state => panic!("{state:?}"),
    }
}

fn with(response: Bytes, mut record: Record) -> Record {
    record.state = RecordState::Completed { response };
    record
}

/// Asserts that nothing ran or was replayed, and that the record counts as corrupt.
#[track_caller]
fn assert_refused(answer: &Answer) {
    answer.assert_problem(503, "store-unavailable");
    assert!(answer.retry_after().is_some());
}

async fn rule_89_a_sealed_response_opens_in_its_own_record_alone(place: &Place) {
    let (store, probe) = (place.open().await, Probe::counting());
    let api = Api::new(sealed(store.clone()), &probe);
    let first = api.send(keyed("K")).await;
    api.send(keyed("L")).await.assert_run(2);
    api.send(keyed("K").from("other")).await.assert_run(3);
    let own = response(&store, "K").await;
    let of_key = response(&store, "L").await;
    let other = RecordName::new(Scope::new("other").unwrap(), Key::new("K"));
    let of_caller = match store.read(&other).await.unwrap().unwrap().state {
        RecordState::Completed { response } => response,
        state => panic!("{state:?}"),
    };
    // The response of another table, under the same key.
    let elsewhere = memory();
    let orders = Sealing::new("orders", key("2026-11", 11));
    let orders = Api::new(required(elsewhere.clone()).sealing(orders), &probe);
    orders.send(keyed("K")).await.assert_run(4);
    let of_table = response(&elsewhere, "K").await;

    let mut flipped = own.to_vec();
    *flipped.last_mut().unwrap() ^= 1;
    let cut = own.slice(..own.len() - 1);
    let empty = Bytes::new();
    let stolen = [of_key, of_caller, of_table, flipped.into(), cut, empty];
    let watched = Watched::new(store.clone());
    let api = Api::new(sealed(DynStore::new(watched.clone())), &probe);
    for response in stolen {
        watched.change(move |_, record| with(response.clone(), record));
        assert_refused(&api.send(keyed("K")).await);
    }
    // The response of an earlier operation of the same key, and one whose record was made
    // to fit another request.
    watched.change(|_, record| Record {
        operation: OperationId::random(),
        ..record
    });
    assert_refused(&api.send(keyed("K")).await);
    let fingerprint = fingerprint(keyed("K").body("{}")).await;
    watched.change(move |_, record| Record {
        fingerprint,
        ..record
    });
    assert_refused(&api.send(keyed("K").body("{}")).await);
    watched.change(|_, record| record);
    api.send(keyed("K")).await.assert_replay_of(&first);
    assert_eq!(probe.runs(), 4);
}

async fn rule_90_an_unsealed_response_is_replayed_only_if_accepted(place: &Place) {
    let (store, probe) = (place.open().await, Probe::counting());
    let before = Api::new(required(store.clone()), &probe);
    let first = before.send(keyed("K")).await;
    first.assert_run(1);
    let strict = Api::new(sealed(store.clone()), &probe);
    assert_refused(&strict.send(keyed("K")).await);
    let rotating = Api::new(
        required(store.clone()).sealing(sealing().accept_unsealed()),
        &probe,
    );
    rotating.send(keyed("K")).await.assert_replay_of(&first);
    let second = rotating.send(keyed("L")).await;
    second.assert_run(2);
    strict.send(keyed("L")).await.assert_replay_of(&second);
    // A process that does not seal yet opens what others have sealed, if it has the key.
    let learning = Api::new(
        required(store.clone()).sealing(sealing().open_only()),
        &probe,
    );
    learning.send(keyed("L")).await.assert_replay_of(&second);
    let third = learning.send(keyed("M")).await;
    third.assert_run(3);
    before.send(keyed("M")).await.assert_replay_of(&third);
    rotating.send(keyed("M")).await.assert_replay_of(&third);
    // One without it refuses the sealed response.
    assert_refused(&before.send(keyed("L")).await);
    assert_eq!(probe.runs(), 3);
}

#[tokio::test]
async fn rule_89_a_response_that_does_not_open_is_counted_as_corrupt() {
    let told = Told::listen();
    let (store, probe) = (memory(), Probe::counting());
    let api = Api::new(sealed(store.clone()), &probe);
    api.send(keyed("K")).await.assert_run(1);
    let planted = Bytes::from_static(b"ti\x02\x01k");
    let watched = Watched::new(store);
    watched.change(move |_, record| with(planted.clone(), record));
    let api = Api::new(sealed(DynStore::new(watched)), &probe);
    assert_refused(&api.send(keyed("K")).await);
    let (events, counts, _) = told.so_far();
    assert_eq!((events["corrupt"], counts["corrupt"]), (1, 1));
    let warnings = told.warnings();
    assert_eq!(warnings.len(), 1);
    assert_eq!(warnings[0].message(), "record not readable, nothing ran");
    assert!(
        warnings[0]
            .field("error")
            .contains("its seal is cut off or damaged")
    );
    assert!(!warnings[0].field("hint").is_empty());
    assert_eq!(probe.runs(), 1);
}

#[tokio::test]
async fn rule_89_wrong_secret_is_logged_with_the_id_of_its_key() {
    let told = Told::listen();
    let (store, probe) = (memory(), Probe::counting());
    let api = Api::new(sealed(store.clone()), &probe);
    api.send(keyed("K")).await.assert_run(1);
    let wrong = Sealing::new("payments", key("2026-11", 12));
    let api = Api::new(required(store).sealing(wrong), &probe);
    assert_refused(&api.send(keyed("K")).await);
    let warnings = told.warnings();
    let error = warnings[0].field("error");
    assert!(error.contains("`2026-11`") && error.contains("another secret"));
    // The next request of a forgotten record runs again.
    let hint = warnings[0].field("hint");
    assert!(hint.contains("only if the next request may run"), "{hint}");
    assert_eq!(probe.runs(), 1);
}

#[tokio::test]
async fn rule_89_rows_that_were_swapped_in_sqlite_are_refused() {
    crate::stores::check(Place::sqlite().await, async |place: &Place| {
        let path = place.address();
        swap_rows(place.open().await, async |sql| {
            let mut connection = SqliteConnection::connect(&path).await.unwrap();
            connection.execute(AssertSqlSafe(sql)).await.unwrap();
            connection.close().await.unwrap();
        })
        .await;
    })
    .await;
}

#[tokio::test]
async fn rule_89_rows_that_were_swapped_in_postgres_are_refused() {
    crate::stores::check(Place::postgres().await, async |place: &Place| {
        let url = place.address();
        swap_rows(place.open().await, async |sql| run(&url, &sql).await).await;
    })
    .await;
}

/// Copies the response of L to K, as a writer of the table could.
async fn swap_rows(store: DynStore, execute: impl AsyncFn(String)) {
    let probe = Probe::counting();
    let api = Api::new(sealed(store), &probe);
    let first = api.send(keyed("K")).await;
    api.send(keyed("L")).await.assert_run(2);
    // Everything but its key is that of L.
    let copy = "UPDATE idempotency_records SET (response, operation, fingerprint) = \
                (SELECT response, operation, fingerprint FROM idempotency_records AS other \
                 WHERE other.key = 'L') WHERE key = 'K'";
    execute(copy.to_owned()).await;
    assert_refused(&api.send(keyed("K")).await);
    let cut = "UPDATE idempotency_records SET response = substr(response, 1, length(response) - 1) \
               WHERE key = 'L'";
    execute(cut.to_owned()).await;
    assert_refused(&api.send(keyed("L")).await);
    assert_eq!((first.status.as_u16(), probe.runs()), (201, 2));
}
