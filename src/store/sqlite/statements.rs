//! Each transition as one statement, keyed by the record's name, with its guard
//! in the `WHERE` clause. All of them run inside a transaction that holds the
//! write lock, or only read.

use std::time::Duration;

use sqlx::{FromRow as _, Row as _, SqliteConnection, query, query_as, query_scalar};

use super::failure;
use crate::{
    Fence, RecordName, Token,
    store::transition::NO_OWNER,
    store::{
        Claim, Claimed, Completion, Filter, Grant, MarkedBy, Page, Purged, ReclaimAs, Release,
        Resolution, StoreError, Transitioned,
        sql::calls::SMALL_RESPONSE,
        sql::reads::{ClaimAnswer, Found},
        sql::{self, GrantColumns, NamedColumns, RecordColumns, micros},
    },
};

pub(super) async fn claim(
    connection: &mut SqliteConnection,
    name: &RecordName,
    claim: &Claim,
) -> Result<ClaimAnswer, StoreError> {
    let granted: Option<GrantColumns> = query_as(CLAIM)
        .bind(name.scope().as_str())
        .bind(name.key().as_str())
        .bind(claim.operation.as_bytes().as_slice())
        .bind(claim.token.as_bytes().as_slice())
        .bind(claim.fingerprint.as_bytes().as_slice())
        .bind(micros(claim.lease))
        .bind(micros(claim.retention))
        .fetch_optional(&mut *connection)
        .await
        .map_err(failure)?;
    if let Some(granted) = granted {
        let grant = counted(connection, granted).await?;
        return Ok(ClaimAnswer::Claimed(Claimed::Acquired(grant)));
    }
    // Nobody else writes meanwhile, so a missing record is not the reason.
    read(connection, name, SMALL_RESPONSE)
        .await?
        .map(ClaimAnswer::from)
        .ok_or(StoreError::corrupt("the last fence"))
}

pub(super) async fn reclaim(
    connection: &mut SqliteConnection,
    name: &RecordName,
    seen: Fence,
    reclaim_as: ReclaimAs,
    claim: &Claim,
) -> Result<Option<Grant>, StoreError> {
    let granted: Option<GrantColumns> = query_as(RECLAIM)
        .bind(name.scope().as_str())
        .bind(name.key().as_str())
        .bind(claim.operation.as_bytes().as_slice())
        .bind(claim.token.as_bytes().as_slice())
        .bind(claim.fingerprint.as_bytes().as_slice())
        .bind(micros(claim.lease))
        .bind(micros(claim.retention))
        .bind(sql::fence(seen))
        .bind(sql::reclaim_as(reclaim_as))
        .fetch_optional(&mut *connection)
        .await
        .map_err(failure)?;
    match granted {
        Some(granted) => counted(connection, granted).await.map(Some),
        None => Ok(None),
    }
}

/// The grant, once its fence is the last one of the file.
async fn counted(
    connection: &mut SqliteConnection,
    granted: GrantColumns,
) -> Result<Grant, StoreError> {
    let grant = granted.decode()?;
    count_fence(connection, sql::fence(grant.fence)).await?;
    Ok(grant)
}

pub(super) async fn count_fence(
    connection: &mut SqliteConnection,
    fence: i64,
) -> Result<(), StoreError> {
    let done = query(COUNT_FENCE)
        .bind(fence)
        .execute(connection)
        .await
        .map_err(failure)?;
    match done.rows_affected() {
        0 => Err(StoreError::corrupt("the last fence")),
        _ => Ok(()),
    }
}

pub(super) async fn renew(
    connection: &mut SqliteConnection,
    name: &RecordName,
    token: Token,
    lease: Duration,
) -> Result<Transitioned, StoreError> {
    let done = query(RENEW)
        .bind(name.scope().as_str())
        .bind(name.key().as_str())
        .bind(token.as_bytes().as_slice())
        .bind(micros(lease))
        .execute(connection)
        .await
        .map_err(failure)?;
    Ok(match done.rows_affected() {
        0 => Transitioned::Superseded,
        _ => Transitioned::Applied,
    })
}

pub(super) async fn complete(
    connection: &mut SqliteConnection,
    name: &RecordName,
    token: Token,
    completion: &Completion,
) -> Result<Transitioned, StoreError> {
    let done = query(COMPLETE)
        .bind(name.scope().as_str())
        .bind(name.key().as_str())
        .bind(token.as_bytes().as_slice())
        .bind(&completion.response[..])
        .bind(micros(completion.retention))
        .bind(micros(completion.at_least))
        .execute(&mut *connection)
        .await
        .map_err(failure)?;
    if done.rows_affected() > 0 {
        return Ok(Transitioned::Applied);
    }
    let state = state(connection, name, MarkedBy::Owner(token)).await?;
    sql::repeated(state, &[sql::COMPLETED])
}

pub(super) async fn release(
    connection: &mut SqliteConnection,
    name: &RecordName,
    token: Token,
    release: Release,
) -> Result<Transitioned, StoreError> {
    let done = query(RELEASE)
        .bind(name.scope().as_str())
        .bind(name.key().as_str())
        .bind(token.as_bytes().as_slice())
        .bind(sql::released(release))
        .execute(&mut *connection)
        .await
        .map_err(failure)?;
    if done.rows_affected() > 0 {
        return Ok(Transitioned::Applied);
    }
    let state = state(connection, name, MarkedBy::Owner(token)).await?;
    sql::repeated(state, &[sql::RELEASED_BOUND, sql::RELEASED_FREED])
}

pub(super) async fn mark_unknown(
    connection: &mut SqliteConnection,
    name: &RecordName,
    marked_by: MarkedBy,
    retention: Duration,
) -> Result<Transitioned, StoreError> {
    let (token, fence) = witnessed(marked_by);
    let done = query(MARK_UNKNOWN)
        .bind(name.scope().as_str())
        .bind(name.key().as_str())
        .bind(token)
        .bind(fence)
        .bind(micros(retention))
        .execute(&mut *connection)
        .await
        .map_err(failure)?;
    if done.rows_affected() > 0 {
        return Ok(Transitioned::Applied);
    }
    let state = state(connection, name, marked_by).await?;
    sql::repeated(state, &[sql::UNKNOWN])
}

pub(super) async fn resolve(
    connection: &mut SqliteConnection,
    name: &RecordName,
    seen: Fence,
    resolution: &Resolution,
) -> Result<Transitioned, StoreError> {
    let (state, response, at_least) = sql::resolved(resolution);
    let done = query(RESOLVE)
        .bind(name.scope().as_str())
        .bind(name.key().as_str())
        .bind(sql::fence(seen))
        .bind(state)
        .bind(response)
        .bind(at_least)
        .bind(NO_OWNER.as_bytes().as_slice())
        .execute(connection)
        .await
        .map_err(failure)?;
    Ok(match done.rows_affected() {
        0 => Transitioned::Superseded,
        _ => Transitioned::Applied,
    })
}

pub(super) async fn read(
    connection: &mut SqliteConnection,
    name: &RecordName,
    most_bytes: usize,
) -> Result<Option<Found>, StoreError> {
    let columns: Option<RecordColumns> = query_as(READ)
        .bind(name.scope().as_str())
        .bind(name.key().as_str())
        .bind(i64::try_from(most_bytes).unwrap_or(i64::MAX))
        .fetch_optional(connection)
        .await
        .map_err(failure)?;
    columns.map(RecordColumns::decode).transpose()
}

pub(super) async fn list(
    connection: &mut SqliteConnection,
    filter: Filter,
    after: Option<&RecordName>,
    limit: u32,
) -> Result<Page, StoreError> {
    let (scope, key) = sql::first_name(after, '\0');
    let limit = sql::page_limit(limit);
    let asked = match filter {
        Filter::Unknown => query(LIST_UNKNOWN).bind(scope).bind(key).bind(limit),
        Filter::InProgressFor(least) => query(LIST_IN_PROGRESS)
            .bind(scope)
            .bind(key)
            .bind(limit)
            .bind(micros(least))
            .bind(sql::MOST_EXAMINED),
    };
    let rows = asked.fetch_all(connection).await.map_err(failure)?;
    let (mut found, mut last) = (Vec::new(), None);
    for row in &rows {
        if row.try_get("is_last").map_err(failure)? {
            last = Some(sql::name(row).map_err(failure)?);
        } else {
            found.push(NamedColumns::from_row(row).map_err(failure)?);
        }
    }
    sql::page(found, limit, last)
}

pub(super) async fn forget(
    connection: &mut SqliteConnection,
    name: &RecordName,
    seen: Fence,
) -> Result<Transitioned, StoreError> {
    let done = query(FORGET)
        .bind(name.scope().as_str())
        .bind(name.key().as_str())
        .bind(sql::fence(seen))
        .execute(connection)
        .await
        .map_err(failure)?;
    Ok(match done.rows_affected() {
        0 => Transitioned::Superseded,
        _ => Transitioned::Applied,
    })
}

pub(super) async fn purge_expired(
    connection: &mut SqliteConnection,
    limit: u32,
    unknown_retention: Duration,
) -> Result<Purged, StoreError> {
    let removed: Vec<i64> = query_scalar(REMOVE_EXPIRED)
        .bind(i64::from(limit))
        .fetch_all(&mut *connection)
        .await
        .map_err(failure)?;
    let removed_unknown = removed.iter().filter(|state| **state == sql::UNKNOWN);
    let (removed, removed_unknown) = (removed.len() as u64, removed_unknown.count() as u64);
    // After the removal, so that nothing is marked and removed in one sweep.
    let left = u64::from(limit).saturating_sub(removed);
    let marked = query(MARK_EXPIRED)
        .bind(left.cast_signed())
        .bind(micros(unknown_retention))
        .execute(connection)
        .await
        .map_err(failure)?;
    Ok(Purged {
        removed,
        removed_unknown,
        marked_unknown: marked.rows_affected(),
    })
}

/// The state of the record with this token, once no transaction can change it
/// any more.
pub(super) async fn settled(
    connection: &mut SqliteConnection,
    name: &RecordName,
    token: Token,
) -> Result<Option<i64>, StoreError> {
    query_scalar(SETTLED)
        .bind(name.scope().as_str())
        .bind(name.key().as_str())
        .bind(token.as_bytes().as_slice())
        .fetch_optional(connection)
        .await
        .map_err(failure)
}

async fn state(
    connection: &mut SqliteConnection,
    name: &RecordName,
    marked_by: MarkedBy,
) -> Result<Option<i64>, StoreError> {
    let (token, fence) = witnessed(marked_by);
    query_scalar(STATE)
        .bind(name.scope().as_str())
        .bind(name.key().as_str())
        .bind(token)
        .bind(fence)
        .fetch_optional(connection)
        .await
        .map_err(failure)
}

/// How a statement finds the record of a marked_by: by its token, or by its fence.
fn witnessed(marked_by: MarkedBy) -> (Option<Vec<u8>>, Option<i64>) {
    match marked_by {
        MarkedBy::Owner(token) => (Some(token.as_bytes().to_vec()), None),
        MarkedBy::Lapsed(seen) => (None, Some(sql::fence(seen))),
    }
}

/// `clock` is the host's, in microseconds, and the same all over a statement.
/// SQLite's own steps are milliseconds; rounding undoes what a floating-point
/// second makes of them.
const CLAIM: &str = "
INSERT INTO idempotency_records
    (scope, key, operation, token, fingerprint, state, attempt, takeovers, fence,
     claimed_at, lease_until, expires_at)
SELECT ?1, ?2, ?3, ?4, ?5, 1, 1, 0, fences.last + 1,
       clock.now, clock.now + ?6, clock.now + ?7
FROM idempotency_fences AS fences,
     (SELECT CAST(round(unixepoch('subsec') * 1000) AS INTEGER) * 1000 AS now) AS clock
WHERE NOT EXISTS (SELECT 1 FROM idempotency_records WHERE scope = ?1 AND key = ?2)
RETURNING operation, fence, attempt";

const COUNT_FENCE: &str = "
UPDATE idempotency_fences SET last = ?1 WHERE last < ?1";

/// 1: take over; 2: retry; 3: replace; 4: expired; 5: rerun; 6: reconcile.
const RECLAIM: &str = "
UPDATE idempotency_records AS record
SET operation = CASE WHEN ?9 IN (1, 2, 5, 6) THEN record.operation ELSE ?3 END,
    attempt = CASE
        WHEN ?9 IN (1, 2, 5) THEN record.attempt + 1
        WHEN ?9 = 6 THEN record.attempt
        ELSE 1 END,
    takeovers = CASE
        WHEN ?9 IN (1, 5) THEN record.takeovers + 1
        WHEN ?9 = 2 THEN min(record.takeovers, 1)
        WHEN ?9 = 6 THEN record.takeovers
        ELSE 0 END,
    fence = max(fences.last, record.fence) + 1,
    token = ?4,
    fingerprint = ?5,
    state = 1,
    response = NULL,
    claimed_at = clock.now,
    lease_until = clock.now + ?6,
    expires_at = clock.now + ?7
FROM idempotency_fences AS fences,
     (SELECT CAST(round(unixepoch('subsec') * 1000) AS INTEGER) * 1000 AS now) AS clock
WHERE record.scope = ?1 AND record.key = ?2 AND record.fence = ?8
  AND CASE ?9
      WHEN 1 THEN record.state = 1 AND record.lease_until < clock.now
      WHEN 2 THEN record.state IN (4, 5) AND record.expires_at >= clock.now
      WHEN 3 THEN record.state = 5 AND record.expires_at >= clock.now
      WHEN 4 THEN record.expires_at < clock.now
          AND (record.state <> 1 OR record.lease_until < clock.now)
      WHEN 5 THEN record.state = 3 AND record.expires_at >= clock.now
      WHEN 6 THEN record.state = 3 AND record.expires_at >= clock.now
      END
RETURNING operation, fence, attempt";

const RENEW: &str = "
UPDATE idempotency_records
SET lease_until = clock.now + ?4
FROM (SELECT CAST(round(unixepoch('subsec') * 1000) AS INTEGER) * 1000 AS now) AS clock
WHERE scope = ?1 AND key = ?2 AND token = ?3 AND state = 1";

/// Only an open claim: one that was completed already, even by this token, must
/// not take further writes with it.
pub(super) const COMPLETE: &str = "
UPDATE idempotency_records
SET state = 2,
    response = ?4,
    expires_at = max(claimed_at + ?5, clock.now + ?6)
FROM (SELECT CAST(round(unixepoch('subsec') * 1000) AS INTEGER) * 1000 AS now) AS clock
WHERE scope = ?1 AND key = ?2 AND token = ?3 AND state IN (1, 3)";

/// 4: for the same request only, as ever after a run whose outcome is unknown.
const RELEASE: &str = "
UPDATE idempotency_records
SET state = iif(takeovers = 0, ?4, 4)
WHERE scope = ?1 AND key = ?2 AND token = ?3 AND state = 1";

/// Of the token and the fence one is NULL, and equal to nothing.
const MARK_UNKNOWN: &str = "
UPDATE idempotency_records
SET state = 3,
    expires_at = clock.now + ?5
FROM (SELECT CAST(round(unixepoch('subsec') * 1000) AS INTEGER) * 1000 AS now) AS clock
WHERE scope = ?1 AND key = ?2 AND state = 1
  AND (token = ?3 OR (fence = ?4 AND lease_until < clock.now))";

const RESOLVE: &str = "
UPDATE idempotency_records
SET state = ?4,
    response = ?5,
    token = iif(?4 = 2, ?7, token),
    takeovers = iif(?4 = 2, takeovers, 0),
    expires_at = iif(?4 = 2, max(expires_at, clock.now + ?6), expires_at)
FROM (SELECT CAST(round(unixepoch('subsec') * 1000) AS INTEGER) * 1000 AS now) AS clock
WHERE scope = ?1 AND key = ?2 AND fence = ?3 AND state = 3";

const SETTLED: &str = "
SELECT state
FROM idempotency_records
WHERE scope = ?1 AND key = ?2 AND token = ?3";

const STATE: &str = "
SELECT state
FROM idempotency_records
WHERE scope = ?1 AND key = ?2 AND (token = ?3 OR fence = ?4)";

/// The length of a response is known without reading it.
const READ: &str = "
SELECT operation, fence, attempt, state, takeovers, fingerprint, token,
       clock.now - claimed_at AS age,
       expires_at - clock.now AS expires_in,
       lease_until - clock.now AS lease_left,
       iif(length(response) <= ?3, response, NULL) AS response,
       length(response) AS bytes
FROM idempotency_records, (SELECT CAST(round(unixepoch('subsec') * 1000) AS INTEGER) * 1000 AS now) AS clock
WHERE scope = ?1 AND key = ?2";

macro_rules! listed {
    () => {
        "scope, key, operation, fence, attempt, state, takeovers, fingerprint, token,
       clock.now - claimed_at AS age,
       expires_at - clock.now AS expires_in,
       lease_until - clock.now AS lease_left,
       NULL AS response, NULL AS bytes"
    };
}

macro_rules! clock {
    () => {
        "(SELECT CAST(round(unixepoch('subsec') * 1000) AS INTEGER) * 1000 AS now) AS clock"
    };
}

/// By the partial index.
const LIST_UNKNOWN: &str = concat!(
    "
SELECT ",
    listed!(),
    ", false AS is_last
FROM idempotency_records, ",
    clock!(),
    "
WHERE state = 3 AND (scope, key) >= (?1, ?2)
ORDER BY scope, key
LIMIT ?3"
);

/// Looks at no more than `?5` records, by the primary key. If it reaches that limit,
/// it names the last one.
const LIST_IN_PROGRESS: &str = concat!(
    "
WITH examined AS MATERIALIZED (
    SELECT scope, key, operation, fence, attempt, state, takeovers, fingerprint, token,
           claimed_at, expires_at, lease_until
    FROM idempotency_records
    WHERE (scope, key) >= (?1, ?2)
    ORDER BY scope, key
    LIMIT ?5
), found AS (
    SELECT ",
    listed!(),
    ", false AS is_last
    FROM examined, ",
    clock!(),
    "
    WHERE state = 1 AND claimed_at < clock.now - ?4
    ORDER BY scope, key
    LIMIT ?3
), last AS (
    SELECT scope, key
    FROM examined
    ORDER BY scope, key
    LIMIT 1 OFFSET ?5 - 1
)
SELECT * FROM found
UNION ALL
SELECT scope, key, NULL, NULL, NULL, NULL, NULL, NULL, NULL, NULL, NULL, NULL, NULL, NULL, true
FROM last"
);

const FORGET: &str = "
DELETE FROM idempotency_records
WHERE scope = ?1 AND key = ?2 AND fence = ?3";

const REMOVE_EXPIRED: &str = "
DELETE FROM idempotency_records
WHERE rowid IN (
    SELECT rowid
    FROM idempotency_records
    WHERE expires_at < CAST(round(unixepoch('subsec') * 1000) AS INTEGER) * 1000
      AND state <> 1
    ORDER BY expires_at
    LIMIT ?1)
RETURNING state";

const MARK_EXPIRED: &str = "
UPDATE idempotency_records
SET state = 3,
    expires_at = clock.now + ?2
FROM (SELECT CAST(round(unixepoch('subsec') * 1000) AS INTEGER) * 1000 AS now) AS clock
WHERE rowid IN (
    SELECT rowid
    FROM idempotency_records
    WHERE expires_at < clock.now AND state = 1 AND lease_until < clock.now
    ORDER BY expires_at
    LIMIT ?1)";
