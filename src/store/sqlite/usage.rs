//! The usage of scopes, for quotas.

use sqlx::{SqliteConnection, query, query_as};

use super::{
    error::failure,
    statements::{column, json, now},
};
use crate::{
    key::Scope,
    store::{StoreError, Usage, UsageDelta, sql::columns::duration},
};

/// Adds the deltas that are not none.
pub(super) async fn add(
    on: &mut SqliteConnection,
    deltas: &[UsageDelta],
) -> Result<(), StoreError> {
    let now = now();
    let added = deltas.iter().filter(|delta| !delta.is_none());
    let added = added.map(|delta| {
        let end = delta.period_end(now);
        (delta.scope.as_str(), end, delta.records, delta.bytes)
    });
    let add = query(ADD).bind(json(&added.collect::<Vec<_>>())?);
    add.execute(on).await.map(drop).map_err(failure)
}

/// Returns the live usage of the scopes of `deltas`.
pub(super) async fn read(
    on: &mut SqliteConnection,
    deltas: &[UsageDelta],
) -> Result<Vec<Usage>, StoreError> {
    let now = column(now());
    let scopes = deltas.iter().map(|delta| delta.scope.as_str());
    let rows: Vec<(String, i64, i64, i64)> = query_as(READ)
        .bind(json(&scopes.collect::<Vec<_>>())?)
        .bind(now)
        .fetch_all(on)
        .await
        .map_err(failure)?;
    let usage = rows
        .into_iter()
        .map(|(scope, expires_at, records, bytes)| Usage {
            scope: Scope::from_stored(scope),
            expires_in: duration(expires_at.saturating_sub(now)),
            records,
            bytes,
        });
    Ok(usage.collect())
}

/// Removes up to `limit` periods that have ended.
pub(super) async fn sweep(on: &mut SqliteConnection, limit: u32) -> Result<(), StoreError> {
    let sweep = query(SWEEP).bind(column(now())).bind(i64::from(limit));
    sweep.execute(on).await.map(drop).map_err(failure)
}

pub(super) const USAGE: &str = include_str!("../../../migrations/sqlite/0004_usage.sql");

const ADD: &str = "
INSERT INTO idempotency_usage (scope, expires_at, records, bytes)
SELECT value ->> 0, value ->> 1, value ->> 2, value ->> 3
FROM json_each(?1)
WHERE true
ON CONFLICT (scope, expires_at) DO UPDATE
SET records = records + excluded.records, bytes = bytes + excluded.bytes";

const READ: &str = "
SELECT scope, expires_at, records, bytes
FROM idempotency_usage
WHERE scope IN (SELECT value FROM json_each(?1)) AND expires_at > ?2
ORDER BY scope, expires_at";

const SWEEP: &str = "
DELETE FROM idempotency_usage
WHERE (scope, expires_at) IN (
    SELECT scope, expires_at
    FROM idempotency_usage
    WHERE expires_at < ?1
    ORDER BY expires_at
    LIMIT ?2)";
