//! The SQLite store beside one commit for each statement.

use std::{env, fs};

use tower_idempotency::{
    SqliteStore,
    sqlx::{
        SqlitePool, query, raw_sql,
        sqlite::{SqliteConnectOptions, SqliteJournalMode, SqlitePoolOptions, SqliteSynchronous},
    },
};

use crate::{
    Plan, calls,
    load::{Load, Pairs},
    report::Report,
    target::{Bound, Target},
};

pub(crate) async fn measure(plan: Plan, report: &mut Report) {
    let directory = env::temp_dir().join(format!("driver-{}", std::process::id()));
    fs::create_dir(&directory).unwrap();
    let store = SqliteStore::open(directory.join("store.db")).await.unwrap();
    let options = SqliteConnectOptions::new()
        .filename(directory.join("plain.db"))
        .create_if_missing(true)
        .journal_mode(SqliteJournalMode::Wal)
        .synchronous(SqliteSynchronous::Full);
    let pool = SqlitePoolOptions::new().max_connections(1);
    let pool = pool.connect_with(options).await.unwrap();
    raw_sql(TABLE).execute(&pool).await.unwrap();
    let kept = store.clone();
    let pairs = Pairs::measure(
        plan,
        64,
        move || plain(pool.clone()),
        move || {
            let store = kept.clone();
            async move { calls::claim_and_complete(&store).await }
        },
    )
    .await;
    report.add(Target::new(
        "SQLite claim + complete, 64 in flight, against one commit for each statement: operations/s",
        Bound::AtLeast(4.0),
        "×",
        pairs.ratios(|load: &Load| load.per_second),
    ));
    store.close().await;
    fs::remove_dir_all(&directory).unwrap();
}

async fn plain(pool: SqlitePool) {
    let key = calls::key();
    let inserted = query(INSERT)
        .bind(&key)
        .bind(&[0_u8; 32][..])
        .execute(&pool)
        .await
        .unwrap();
    assert_eq!(inserted.rows_affected(), 1);
    query(UPDATE)
        .bind(&key)
        .bind(&calls::response()[..])
        .execute(&pool)
        .await
        .unwrap();
}

const TABLE: &str = "
CREATE TABLE plain (
    key         TEXT PRIMARY KEY,
    fingerprint BLOB    NOT NULL,
    state       INTEGER NOT NULL,
    response    BLOB,
    expires_at  INTEGER NOT NULL)";

const INSERT: &str = "
INSERT INTO plain (key, fingerprint, state, expires_at) VALUES (?1, ?2, 1, unixepoch() + 86400)
ON CONFLICT DO NOTHING";

const UPDATE: &str = "UPDATE plain SET state = 2, response = ?2 WHERE key = ?1 AND state = 1";
