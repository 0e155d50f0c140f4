//! The transitions that travel alone: each one statement, with its guard
//! in the `WHERE` clause.

use std::time::Duration;

use sqlx::{query, query_as, query_scalar};

use super::{failure, session::Session};
use crate::{
    Fence, RecordName, Token,
    protocol::NOBODYS,
    store::{
        Claim, Filter, Grant, Purged, Record, Resolution, Settlement, StoreError, Succession,
        sql::{self, GrantColumns, NamedColumns, micros},
    },
};

pub(super) async fn reclaim(
    on: &mut Session<'_>,
    name: &RecordName,
    seen: Fence,
    succession: Succession,
    claim: &Claim,
) -> Result<Option<Grant>, StoreError> {
    let granted: Option<GrantColumns> = query_as(on.sql.reclaim.clone())
        .persistent(on.persistent)
        .bind(name.scope().as_str())
        .bind(name.key().as_str())
        .bind(claim.operation.as_bytes().as_slice())
        .bind(claim.token.as_bytes().as_slice())
        .bind(claim.fingerprint.as_bytes().as_slice())
        .bind(micros(claim.lease))
        .bind(micros(claim.retention))
        .bind(sql::fence(seen))
        .bind(sql::succession(succession))
        .fetch_optional(&mut *on.connection)
        .await
        .map_err(failure)?;
    granted.map(GrantColumns::decode).transpose()
}

/// Marks a claim whose lease has lapsed as unknown.
pub(super) async fn mark_lapsed(
    on: &mut Session<'_>,
    name: &RecordName,
    seen: Fence,
    retention: Duration,
) -> Result<Settlement, StoreError> {
    let done = query(on.sql.mark_lapsed.clone())
        .persistent(on.persistent)
        .bind(name.scope().as_str())
        .bind(name.key().as_str())
        .bind(sql::fence(seen))
        .bind(micros(retention))
        .execute(&mut *on.connection)
        .await
        .map_err(failure)?;
    if done.rows_affected() > 0 {
        return Ok(Settlement::Applied);
    }
    let state: Option<i64> = query_scalar(on.sql.state.clone())
        .persistent(on.persistent)
        .bind(name.scope().as_str())
        .bind(name.key().as_str())
        .bind(sql::fence(seen))
        .fetch_optional(&mut *on.connection)
        .await
        .map_err(failure)?;
    sql::repeated(state, &[sql::UNKNOWN])
}

pub(super) async fn resolve(
    on: &mut Session<'_>,
    name: &RecordName,
    seen: Fence,
    resolution: &Resolution,
) -> Result<Settlement, StoreError> {
    let (state, response, at_least) = sql::resolved(resolution);
    let done = query(on.sql.resolve.clone())
        .persistent(on.persistent)
        .bind(name.scope().as_str())
        .bind(name.key().as_str())
        .bind(sql::fence(seen))
        .bind(state)
        .bind(response)
        .bind(at_least)
        .bind(NOBODYS.as_bytes().as_slice())
        .execute(&mut *on.connection)
        .await
        .map_err(failure)?;
    Ok(match done.rows_affected() {
        0 => Settlement::Superseded,
        _ => Settlement::Applied,
    })
}

pub(super) async fn list(
    on: &mut Session<'_>,
    filter: Filter,
    limit: u32,
) -> Result<Vec<(RecordName, Record)>, StoreError> {
    let listed: Vec<NamedColumns> = match filter {
        Filter::Unknown => query_as(on.sql.list_unknown.clone())
            .persistent(on.persistent)
            .bind(i64::from(limit)),
        Filter::InProgressFor(least) => query_as(on.sql.list_in_progress.clone())
            .persistent(on.persistent)
            .bind(i64::from(limit))
            .bind(micros(least)),
    }
    .fetch_all(&mut *on.connection)
    .await
    .map_err(failure)?;
    listed.into_iter().map(NamedColumns::decode).collect()
}

pub(super) async fn forget(
    on: &mut Session<'_>,
    name: &RecordName,
    seen: Fence,
) -> Result<Settlement, StoreError> {
    let done = query(on.sql.forget.clone())
        .persistent(on.persistent)
        .bind(name.scope().as_str())
        .bind(name.key().as_str())
        .bind(sql::fence(seen))
        .execute(&mut *on.connection)
        .await
        .map_err(failure)?;
    Ok(match done.rows_affected() {
        0 => Settlement::Superseded,
        _ => Settlement::Applied,
    })
}

pub(super) async fn purge_expired(
    on: &mut Session<'_>,
    limit: u32,
    unknown_retention: Duration,
) -> Result<Purged, StoreError> {
    // Planned each time: a plan that was made for a small table reads all of a large
    // one.
    let (removed, removed_unknown, marked_unknown): (i64, i64, i64) =
        query_as(on.sql.purge_expired.clone())
            .persistent(false)
            .bind(i64::from(limit))
            .bind(micros(unknown_retention))
            .fetch_one(&mut *on.connection)
            .await
            .map_err(failure)?;
    let count = i64::unsigned_abs;
    Ok(Purged::new(
        count(removed),
        count(removed_unknown),
        count(marked_unknown),
    ))
}

/// The state of the record with this token, once no transaction can change it
/// any more.
pub(super) async fn settled(
    on: &mut Session<'_>,
    name: &RecordName,
    token: Token,
) -> Result<Option<i64>, StoreError> {
    query_scalar(on.sql.settled.clone())
        .persistent(on.persistent)
        .bind(name.scope().as_str())
        .bind(name.key().as_str())
        .bind(token.as_bytes().as_slice())
        .fetch_optional(&mut *on.connection)
        .await
        .map_err(failure)
}

/// 1: take over; 2: retry; 3: replace; 4: expired; 5: rerun; 6: reconcile.
pub(super) const RECLAIM: &str = "
UPDATE {records} AS record
SET operation = CASE WHEN $9 IN (1, 2, 5, 6) THEN record.operation ELSE $3 END,
    attempt = CASE
        WHEN $9 IN (1, 2, 5) THEN record.attempt + 1
        WHEN $9 = 6 THEN record.attempt
        ELSE 1 END,
    takeovers = CASE
        WHEN $9 IN (1, 5) THEN record.takeovers + 1
        WHEN $9 = 2 THEN LEAST(record.takeovers, 1)
        WHEN $9 = 6 THEN record.takeovers
        ELSE 0 END,
    fence = GREATEST({next_fence}, record.fence + 1),
    token = $4,
    fingerprint = $5,
    state = 1,
    response = NULL,
    claimed_at = clock.now,
    lease_until = clock.now + $6 * interval '1 microsecond',
    expires_at = clock.now + $7 * interval '1 microsecond'
FROM (SELECT clock_timestamp() AS now) AS clock
WHERE record.scope = $1 AND record.key = $2 AND record.fence = $8
  AND CASE $9
      WHEN 1 THEN record.state = 1 AND record.lease_until < clock.now
      WHEN 2 THEN record.state IN (4, 5) AND record.expires_at >= clock.now
      WHEN 3 THEN record.state = 5 AND record.expires_at >= clock.now
      WHEN 4 THEN record.expires_at < clock.now
          AND (record.state <> 1 OR record.lease_until < clock.now)
      WHEN 5 THEN record.state = 3 AND record.expires_at >= clock.now
      WHEN 6 THEN record.state = 3 AND record.expires_at >= clock.now
      END
RETURNING record.operation, record.fence, record.attempt::bigint";

pub(super) const MARK_LAPSED: &str = "
UPDATE {records}
SET state = 3,
    expires_at = clock_timestamp() + $4 * interval '1 microsecond'
WHERE scope = $1 AND key = $2 AND fence = $3
  AND state = 1 AND lease_until < clock_timestamp()";

pub(super) const RESOLVE: &str = "
UPDATE {records}
SET state = $4,
    response = $5,
    token = CASE $4 WHEN 2 THEN $7 ELSE token END,
    takeovers = CASE $4 WHEN 2 THEN takeovers ELSE 0 END,
    expires_at = CASE $4
        WHEN 2 THEN GREATEST(expires_at, clock_timestamp() + $6 * interval '1 microsecond')
        ELSE expires_at
        END
WHERE scope = $1 AND key = $2 AND fence = $3 AND state = 3";

/// Waits for a transaction that has written the record, where a plain read would
/// see what was before it.
pub(super) const SETTLED: &str = "
SELECT state::bigint
FROM {records}
WHERE scope = $1 AND key = $2 AND token = $3
FOR SHARE";

pub(super) const STATE: &str = "
SELECT state::bigint
FROM {records}
WHERE scope = $1 AND key = $2 AND fence = $3";

/// Reads the whole table: an index over the state would be written to by every
/// completion.
pub(super) const LIST_UNKNOWN: &str = "
SELECT scope, key,
       operation, fence, attempt::bigint, state::bigint, takeovers::bigint, fingerprint, token,
       (EXTRACT(EPOCH FROM clock.now - claimed_at) * 1000000)::bigint AS age,
       (EXTRACT(EPOCH FROM expires_at - clock.now) * 1000000)::bigint AS expires_in,
       (EXTRACT(EPOCH FROM lease_until - clock.now) * 1000000)::bigint AS lease_left,
       response
FROM {records}, (SELECT clock_timestamp() AS now) AS clock
WHERE state = 3
ORDER BY claimed_at
LIMIT $1";

/// As [`LIST_UNKNOWN`].
pub(super) const LIST_IN_PROGRESS: &str = "
SELECT scope, key,
       operation, fence, attempt::bigint, state::bigint, takeovers::bigint, fingerprint, token,
       (EXTRACT(EPOCH FROM clock.now - claimed_at) * 1000000)::bigint AS age,
       (EXTRACT(EPOCH FROM expires_at - clock.now) * 1000000)::bigint AS expires_in,
       (EXTRACT(EPOCH FROM lease_until - clock.now) * 1000000)::bigint AS lease_left,
       response
FROM {records}, (SELECT clock_timestamp() AS now) AS clock
WHERE state = 1 AND claimed_at < clock.now - $2 * interval '1 microsecond'
ORDER BY claimed_at
LIMIT $1";

pub(super) const FORGET: &str = "
WITH drawn AS MATERIALIZED (
    SELECT {next_removal} AS removal
)
DELETE FROM {records}
USING drawn
WHERE scope = $1 AND key = $2 AND fence = $3 AND removal > 0";

/// The conditions stand twice: a row may be claimed again between the moment
/// it is seen and the moment it is locked. The index serves comparisons with
/// `statement_timestamp()` only, which is what the first needs; `clock_timestamp()`
/// leads the second to the locked rows by their names, however large the backlog.
/// The state that was locked says which of them each part is for: without it, a
/// planner that knows of hardly any lease looks for them in the whole table.
/// A removal draws its number before it can be seen: see [`Removals`](super::removals::Removals).
pub(super) const PURGE_EXPIRED: &str = "
WITH due AS MATERIALIZED (
    SELECT scope, key, state, (SELECT {next_removal}) AS removal
    FROM {records}
    WHERE expires_at < statement_timestamp()
      AND (state <> 1 OR lease_until < statement_timestamp())
    ORDER BY expires_at
    LIMIT $1
    FOR UPDATE SKIP LOCKED
), marked AS (
    UPDATE {records} AS record
    SET state = 3,
        expires_at = statement_timestamp() + $2 * interval '1 microsecond'
    FROM due
    WHERE due.state = 1
      AND record.scope = due.scope AND record.key = due.key
      AND record.expires_at < clock_timestamp()
      AND record.state = 1 AND record.lease_until < clock_timestamp()
    RETURNING 1
), removed AS (
    DELETE FROM {records} AS record
    USING due
    WHERE due.state <> 1 AND due.removal > 0
      AND record.scope = due.scope AND record.key = due.key
      AND record.expires_at < clock_timestamp()
      AND record.state <> 1
    RETURNING record.state
)
SELECT (SELECT count(*) FROM removed),
       (SELECT count(*) FROM removed WHERE state = 3),
       (SELECT count(*) FROM marked)";
