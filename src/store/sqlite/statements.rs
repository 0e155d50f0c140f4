//! The statements.
//!
//! A record is loaded, changed by its state machine, and stored. The store's clock is
//! the host's, in microseconds since 1970.

use std::time::{Duration, SystemTime};

use serde::Serialize;
use sqlx::{Error, SqliteConnection, query, query_scalar, sqlite::SqliteRow};

use super::error::failure;
use crate::{
    key::RecordName,
    store::{
        Purged, StoreError,
        admin::{Filter, FilterKind, Page},
        sql::{
            columns::{self, LoadedRecord, StoreRow as _, UNKNOWN, fence_number, state_number},
            pages::{MAX_EXAMINED, first_name, page, page_limit},
        },
        transition::{State, StoredRecord},
    },
};

/// Returns the time on the store's clock.
pub(crate) fn now() -> Duration {
    let now = SystemTime::now().duration_since(SystemTime::UNIX_EPOCH);
    // The columns have no nanoseconds.
    Duration::from_micros(column(now.unwrap_or_default()).unsigned_abs())
}

/// Loads a record. Leaves out a response that is longer than `max_response`.
pub(crate) async fn load(
    connection: &mut SqliteConnection,
    name: &RecordName,
    max_response: usize,
) -> Result<Option<SqliteRow>, Error> {
    query(LOAD)
        .bind(name.scope().as_str())
        .bind(name.key().as_str())
        .bind(length(max_response))
        .fetch_optional(connection)
        .await
}

pub(super) type Loaded = Result<Option<LoadedRecord>, StoreError>;

/// Loads records, each as [`load`] does.
pub(super) async fn load_all(
    connection: &mut SqliteConnection,
    names: &[(&RecordName, usize)],
) -> Result<Vec<Loaded>, StoreError> {
    let mut loaded: Vec<Loaded> = names.iter().map(|_| Ok(None)).collect();
    if !go_together(names.iter().map(|(name, _)| *name)) {
        for ((name, max_response), loaded) in names.iter().zip(&mut loaded) {
            let row = load(connection, name, *max_response).await;
            *loaded = decode(row.map_err(failure)?.as_ref());
        }
        return Ok(loaded);
    }
    let asked = names.iter().map(|(name, max_response)| {
        let max_response = length(*max_response);
        (name.scope().as_str(), name.key().as_str(), max_response)
    });
    let rows = query(LOAD_ALL)
        .bind(json(&asked.collect::<Vec<_>>())?)
        .fetch_all(connection)
        .await
        .map_err(failure)?;
    for row in &rows {
        let position = row.int("position")?;
        let position = position.and_then(|position| usize::try_from(position).ok());
        if let Some(loaded) = position.and_then(|position| loaded.get_mut(position)) {
            *loaded = decode(Some(row));
        }
    }
    Ok(loaded)
}

/// The moments in a row are relative to 1970.
pub(crate) fn decode(row: Option<&SqliteRow>) -> Loaded {
    row.map(|row| columns::load(row, 0)).transpose()
}

/// Inserts a record, or updates the record with its name.
pub(crate) async fn store(
    connection: &mut SqliteConnection,
    name: &RecordName,
    record: &StoredRecord,
) -> Result<(), Error> {
    let stored = query(STORE)
        .bind(name.scope().as_str())
        .bind(name.key().as_str())
        .bind(state_number(&record.state))
        .bind(i64::from(record.attempt))
        .bind(i64::from(record.takeovers))
        .bind(fence_number(record.fence))
        .bind(column(record.claimed_at))
        .bind(column(lease_until(record)))
        .bind(column(record.expires_at))
        .bind(record.operation.as_bytes().as_slice())
        .bind(record.token.as_bytes().as_slice())
        .bind(record.fingerprint.as_bytes().as_slice())
        .bind(response(record))
        .execute(connection);
    stored.await.map(|_| ())
}

/// Stores records, each as [`store`] does.
pub(super) async fn store_all(
    connection: &mut SqliteConnection,
    records: &[(&RecordName, StoredRecord)],
) -> Result<(), StoreError> {
    if !go_together(records.iter().map(|(name, _)| *name)) {
        for (name, record) in records {
            let stored = store(connection, name, record).await;
            stored.map_err(failure)?;
        }
        return Ok(());
    }
    // JSON has no bytes.
    let records = records.iter().map(|(name, record)| {
        (
            name.scope().as_str(),
            name.key().as_str(),
            state_number(&record.state),
            record.attempt,
            record.takeovers,
            fence_number(record.fence),
            column(record.claimed_at),
            column(lease_until(record)),
            column(record.expires_at),
            hex::encode(record.operation.as_bytes()),
            hex::encode(record.token.as_bytes()),
            hex::encode(record.fingerprint.as_bytes()),
            response(record).map(hex::encode),
        )
    });
    query(STORE_ALL)
        .bind(json(&records.collect::<Vec<_>>())?)
        .execute(connection)
        .await
        .map_err(failure)?;
    Ok(())
}

/// Returns whether one statement makes several calls. SQLite cuts a text in JSON off
/// at a NUL, which would make it another name.
fn go_together<'n>(names: impl ExactSizeIterator<Item = &'n RecordName>) -> bool {
    let has_nul = |name: &RecordName| {
        name.scope().as_str().contains('\0') || name.key().as_str().contains('\0')
    };
    names.len() > 1 && !names.into_iter().any(has_nul)
}

pub(crate) fn json(values: &impl Serialize) -> Result<String, StoreError> {
    serde_json::to_string(values).map_err(StoreError::unavailable)
}

/// The lease of a record that has none is not read.
fn lease_until(record: &StoredRecord) -> Duration {
    match record.state {
        State::InProgress { lease_until } => lease_until,
        _ => record.claimed_at,
    }
}

fn response(record: &StoredRecord) -> Option<&[u8]> {
    match &record.state {
        State::Completed { response } => Some(response),
        _ => None,
    }
}

pub(super) async fn list(
    connection: &mut SqliteConnection,
    filter: &Filter,
    after: Option<&RecordName>,
    limit: u32,
) -> Result<Page, StoreError> {
    let (scope, key) = first_name(filter, after, '\0');
    let now = now();
    let is_of_one_scope = filter.scope.is_some();
    let (statement, older) = match (filter.kind, is_of_one_scope) {
        (FilterKind::Unknown, false) => (LIST_UNKNOWN, None),
        (FilterKind::Unknown, true) => (LIST_UNKNOWN_IN_SCOPE, None),
        (FilterKind::InProgressFor(age), false) => (LIST_IN_PROGRESS, Some(age)),
        (FilterKind::InProgressFor(age), true) => (LIST_IN_PROGRESS_IN_SCOPE, Some(age)),
    };
    let limit = page_limit(limit);
    let mut found = query(statement)
        .bind(column(now))
        .bind(scope)
        .bind(key)
        .bind(limit);
    if let Some(age) = older {
        found = found
            .bind(column(now.saturating_sub(age)))
            .bind(MAX_EXAMINED);
    }
    let rows = found.fetch_all(connection).await.map_err(failure)?;
    page(&rows, limit)
}

pub(super) async fn purge_expired(
    connection: &mut SqliteConnection,
    limit: u32,
    unknown_retention: Duration,
) -> Result<Purged, StoreError> {
    let now = now();
    let removed: Vec<i64> = query_scalar(REMOVE_EXPIRED)
        .bind(column(now))
        .bind(i64::from(limit))
        .fetch_all(&mut *connection)
        .await
        .map_err(failure)?;
    let removed_unknown = removed.iter().filter(|state| **state == UNKNOWN).count() as u64;
    let removed = removed.len() as u64;
    // After the removal, so that no record is marked and removed in one sweep.
    let left = u64::from(limit).saturating_sub(removed);
    let marked = query(MARK_EXPIRED)
        .bind(column(now))
        .bind(left.cast_signed())
        .bind(column(now.saturating_add(unknown_retention)))
        .execute(connection)
        .await
        .map_err(failure)?;
    Ok(Purged {
        removed,
        removed_unknown,
        marked_unknown: marked.rows_affected(),
    })
}

/// Returns the microseconds of a moment or an age.
pub(crate) fn column(moment: Duration) -> i64 {
    moment.as_micros().try_into().unwrap_or(i64::MAX)
}

fn length(bytes: usize) -> i64 {
    bytes.try_into().unwrap_or(i64::MAX)
}

macro_rules! loaded {
    ($max_response:literal) => {
        concat!(
            "operation, fence, attempt, state, takeovers, fingerprint, token,
       -claimed_at AS age, expires_at AS expires_in, lease_until AS lease_left,
       iif(length(response) <= ",
            $max_response,
            ", response, NULL) AS response, length(response) AS bytes"
        )
    };
}

const LOAD: &str = concat!(
    "
SELECT ",
    loaded!("?3"),
    "
FROM idempotency_records
WHERE scope = ?1 AND key = ?2"
);

/// `CROSS JOIN` leads from the names to the records.
const LOAD_ALL: &str = concat!(
    "
SELECT asked.key AS position, ",
    loaded!("asked.value ->> 2"),
    "
FROM json_each(?1) AS asked CROSS JOIN idempotency_records AS record
WHERE record.scope = asked.value ->> 0 AND record.key = asked.value ->> 1"
);

macro_rules! stored {
    ($values:literal) => {
        concat!(
            "
INSERT INTO idempotency_records
    (scope, key, state, attempt, takeovers, fence, claimed_at, lease_until, expires_at,
     operation, token, fingerprint, response)
",
            $values,
            "
ON CONFLICT (scope, key) DO UPDATE
SET state = excluded.state,
    attempt = excluded.attempt,
    takeovers = excluded.takeovers,
    fence = excluded.fence,
    claimed_at = excluded.claimed_at,
    lease_until = excluded.lease_until,
    expires_at = excluded.expires_at,
    operation = excluded.operation,
    token = excluded.token,
    fingerprint = excluded.fingerprint,
    response = excluded.response"
        )
    };
}

const STORE: &str = stored!("VALUES (?1, ?2, ?3, ?4, ?5, ?6, ?7, ?8, ?9, ?10, ?11, ?12, ?13)");

const STORE_ALL: &str = stored!(
    "SELECT value ->> 0, value ->> 1, value ->> 2, value ->> 3, value ->> 4, value ->> 5,
       value ->> 6, value ->> 7, value ->> 8, unhex(value ->> 9), unhex(value ->> 10),
       unhex(value ->> 11), unhex(value ->> 12)
FROM json_each(?1)
WHERE true"
);

macro_rules! listed {
    () => {
        "scope, key, operation, fence, attempt, state, takeovers, fingerprint, token,
       ?1 - claimed_at AS age,
       expires_at - ?1 AS expires_in,
       lease_until - ?1 AS lease_left,
       NULL AS response, NULL AS bytes"
    };
}

macro_rules! list_unknown {
    ($names:literal) => {
        concat!(
            "
SELECT ",
            listed!(),
            ", false AS is_last
FROM idempotency_records
WHERE state = 3 /* unknown */ AND ",
            $names,
            "
ORDER BY scope, key
LIMIT ?4"
        )
    };
}

/// By the partial index.
const LIST_UNKNOWN: &str = list_unknown!("(scope, key) >= (?2, ?3)");
const LIST_UNKNOWN_IN_SCOPE: &str = list_unknown!("scope = ?2 AND key >= ?3");

macro_rules! list_in_progress {
    ($names:literal) => {
        concat!(
            "
WITH examined AS MATERIALIZED (
    SELECT scope, key, operation, fence, attempt, state, takeovers, fingerprint, token,
           claimed_at, expires_at, lease_until
    FROM idempotency_records
    WHERE ",
            $names,
            "
    ORDER BY scope, key
    LIMIT ?6
), found AS (
    SELECT ",
            listed!(),
            ", false AS is_last
    FROM examined
    WHERE state = 1 /* in progress */ AND claimed_at < ?5
    ORDER BY scope, key
    LIMIT ?4
), last AS (
    SELECT scope, key
    FROM examined
    ORDER BY scope, key
    LIMIT 1 OFFSET ?6 - 1
)
SELECT * FROM found
UNION ALL
SELECT scope, key, NULL, NULL, NULL, NULL, NULL, NULL, NULL, NULL, NULL, NULL, NULL, NULL, true
FROM last"
        )
    };
}

/// Examines up to `?6` records, by the primary key. If it reaches that limit, it
/// returns the name of the last one.
const LIST_IN_PROGRESS: &str = list_in_progress!("(scope, key) >= (?2, ?3)");
const LIST_IN_PROGRESS_IN_SCOPE: &str = list_in_progress!("scope = ?2 AND key >= ?3");

const REMOVE_EXPIRED: &str = "
DELETE FROM idempotency_records
WHERE rowid IN (
    SELECT rowid
    FROM idempotency_records
    WHERE expires_at < ?1 AND state <> 1 /* in progress */ AND fence < ?1
    ORDER BY expires_at
    LIMIT ?2)
RETURNING state";

const MARK_EXPIRED: &str = "
UPDATE idempotency_records
SET state = 3 /* unknown */, expires_at = ?3
WHERE rowid IN (
    SELECT rowid
    FROM idempotency_records
    WHERE expires_at < ?1 AND state = 1 /* in progress */ AND lease_until < ?1
    ORDER BY expires_at
    LIMIT ?2)";
