//! The file: opened again, full, damaged, of another version.

use std::time::Duration;

use bytes::Bytes;
use tower_idempotency::{
    SqliteStore, Store, StoreErrorKind,
    sqlx::{
        Connection as _,
        migrate::{Migration, MigrationType, Migrator},
        query_scalar,
    },
    store::{Completion, RecordState, Transitioned, admin::Filter},
};

use crate::{
    File,
    any_store::{HOUR, acquired, applied, done, hour, name},
    execute,
};

#[tokio::test(flavor = "multi_thread")]
async fn records_survive_closing_and_opening_again() {
    let file = File::new();
    let name = name("caller", "key");
    let claim = hour();
    let store = file.open().await;
    let grant = acquired(store.claim(&name, &claim).await);
    let _ = store.complete(&name, claim.token, &done()).await.unwrap();
    store.close().await;
    let error = store.read(&name).await.unwrap_err();
    assert_eq!(error.kind(), StoreErrorKind::Unavailable);

    let store = file.open().await;
    let record = store.read(&name).await.unwrap().unwrap();
    assert_eq!((record.fence, record.token), (grant.fence, claim.token));
    assert!(matches!(
        record.state,
        RecordState::Completed { response } if response == done().response
    ));
    assert!(record.expires_in.unwrap() > HOUR - Duration::from_secs(60));
    store.close().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn the_store_forces_wal_and_full_against_other_settings() {
    let file = File::new();
    let careless = file
        .options()
        .pragma("synchronous", "OFF")
        .pragma("journal_mode", "DELETE");
    let store = SqliteStore::open_with(careless).await.unwrap();
    let name = name("caller", "key");
    let claim = hour();
    acquired(store.claim(&name, &claim).await);
    // A trigger reads the settings of the store's own connection.
    let mut connection = file.connect().await;
    execute(
        &mut connection,
        "CREATE TABLE seen (mode, synchronous);
         CREATE TRIGGER note AFTER UPDATE ON idempotency_records BEGIN
             INSERT INTO seen SELECT journal_mode, synchronous
             FROM pragma_journal_mode, pragma_synchronous;
         END",
    )
    .await;
    let _ = store.complete(&name, claim.token, &done()).await.unwrap();
    let seen: String = query_scalar("SELECT mode || ' ' || synchronous FROM seen")
        .fetch_one(&mut connection)
        .await
        .unwrap();
    assert_eq!(seen, "wal 2");
    connection.close().await.unwrap();
    store.close().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_full_database_is_reported_and_keeps_no_partial_record() {
    let file = File::new();
    file.open().await.close().await;
    let small = file.options().pragma("max_page_count", "40");
    let store = SqliteStore::open_with(small).await.unwrap();
    let large = Completion::new(vec![7; 20_000].into(), HOUR, Duration::ZERO);
    let mut completed = 0;
    let (name, claim) = loop {
        let (name, claim) = (name("caller", &completed.to_string()), hour());
        acquired(store.claim(&name, &claim).await);
        match store.complete(&name, claim.token, &large).await {
            Ok(settlement) => assert_eq!(settlement, Transitioned::Applied),
            Err(error) => {
                assert_eq!(error.kind(), StoreErrorKind::Full, "{error:?}");
                break (name, claim);
            }
        }
        completed += 1;
        assert!(completed < 40);
    };
    // The claim is unchanged, its owner can record a shorter response, and the
    // store still serves.
    let record = store.read(&name).await.unwrap().unwrap();
    assert!(matches!(record.state, RecordState::InProgress { .. }));
    applied(store.renew(&name, claim.token, HOUR).await);
    let short = Completion::new(Bytes::new(), HOUR, Duration::ZERO);
    applied(store.complete(&name, claim.token, &short).await);
    let mut connection = file.connect().await;
    let sound: String = query_scalar("PRAGMA integrity_check")
        .fetch_one(&mut connection)
        .await
        .unwrap();
    assert_eq!(sound, "ok");
    connection.close().await.unwrap();
    store.close().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn migrations_coexist_with_those_of_the_application() {
    let file = File::new();
    let own = Migrator::with_migrations(vec![Migration::new(
        20_250_101,
        "accounts".into(),
        MigrationType::Simple,
        tower_idempotency::sqlx::SqlSafeStr::into_sql_str("CREATE TABLE accounts (id)"),
        false,
    )]);
    for _ in 0..2 {
        let store = file.open().await;
        let mut connection = file.connect().await;
        own.run(&mut connection).await.unwrap();
        connection.close().await.unwrap();
        store.close().await;
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn an_unreadable_row_is_an_error_and_never_absent() {
    let file = File::new();
    let store = file.open().await;
    let mut connection = file.connect().await;
    execute(&mut connection, "PRAGMA ignore_check_constraints = ON").await;
    for (key, damage) in [
        "state = 9",
        "state = 0",
        "state = 2",
        "response = x'00'",
        "token = x'00'",
        "operation = x''",
        "fingerprint = x'00'",
        "fence = -1",
        "attempt = -1",
        "takeovers = -1",
    ]
    .into_iter()
    .enumerate()
    {
        let name = name("caller", &key.to_string());
        acquired(store.claim(&name, &hour()).await);
        let update = format!("UPDATE idempotency_records SET {damage} WHERE key = '{key}'");
        execute(&mut connection, &update).await;
        let read = store.read(&name).await.unwrap_err();
        assert_eq!(read.kind(), StoreErrorKind::Corrupt, "{damage}");
        let claimed = store.claim(&name, &hour()).await.unwrap_err();
        assert_eq!(claimed.kind(), StoreErrorKind::Corrupt, "{damage}");
    }
    // A list finds no record by an unreadable state, and reads no response.
    let readable = name("caller", "readable");
    acquired(store.claim(&readable, &hour()).await);
    let filter = Filter::in_progress_for(Duration::ZERO);
    let page = store.list(&filter, None, 100).await.unwrap();
    assert_eq!(page.unreadable.len(), 6);
    assert!(page.records.iter().any(|(name, _)| *name == readable));
    connection.close().await.unwrap();
    store.close().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn an_unusable_file_is_refused_with_its_reason() {
    let file = File::new();
    std::fs::write(file.path(), [7; 8_192]).unwrap();
    let error = SqliteStore::open(file.path()).await.unwrap_err();
    assert_eq!(error.kind(), StoreErrorKind::Corrupt);

    let error = SqliteStore::open(file.directory.join("missing/records.db"))
        .await
        .unwrap_err();
    let text = error.to_string();
    assert!(text.contains("cannot be opened"), "{text}");

    let error = SqliteStore::open(":memory:").await.unwrap_err();
    let text = error.to_string();
    assert!(text.contains("memory"), "{text}");
}

#[tokio::test(flavor = "multi_thread")]
async fn a_store_of_a_later_version_is_refused() {
    let file = File::new();
    file.open().await.close().await;
    let mut connection = file.connect().await;
    execute(
        &mut connection,
        "INSERT INTO _idempotency_migrations (version, description, success, checksum, execution_time)
         VALUES (999, 'later', TRUE, x'00', 0)",
    )
    .await;
    connection.close().await.unwrap();
    let error = SqliteStore::open(file.path()).await.unwrap_err();
    assert_eq!(error.kind(), StoreErrorKind::Unavailable);
}

#[tokio::test(flavor = "multi_thread")]
async fn f110_errors_name_the_cause_and_the_remedy() {
    let file = File::new();
    let options = file.options().busy_timeout(Duration::from_millis(10));
    let store = SqliteStore::open_with(options).await.unwrap();
    let name = name("caller", "key");
    let mut other = file.connect().await;
    let lock = other.begin_with("BEGIN IMMEDIATE").await.unwrap();
    let locked = store.claim(&name, &hour()).await.unwrap_err();
    lock.rollback().await.unwrap();
    execute(&mut other, "DROP TABLE idempotency_records").await;
    other.close().await.unwrap();
    let missing = store.read(&name).await.unwrap_err();
    store.close().await;
    let nowhere = SqliteStore::open(file.directory.join("missing/records.db")).await;
    std::fs::write(file.path(), [7; 8_192]).unwrap();
    let damaged = SqliteStore::open(file.path()).await;
    for (error, says) in [
        (locked, "busy_timeout"),
        (missing, "open the store again"),
        (nowhere.unwrap_err(), "its directory must exist"),
        (damaged.unwrap_err(), "no SQLite database"),
    ] {
        let told = error.to_string();
        assert!(told.contains(says), "{told}");
    }
}
