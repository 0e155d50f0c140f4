//! Each transition as one statement, keyed by the record's name, with its guard
//! in the `WHERE` clause.

use std::time::Duration;

use sqlx::{FromRow, Row as _, postgres::PgRow, query, query_as, query_scalar};

use super::{failure, removals::Removals, session::Session};
use crate::{
    Fence, RecordName, Token,
    protocol::NOBODYS,
    store::{
        Claim, Claimed, Completion, Filter, Grant, Purged, Record, Release, Resolution, Settlement,
        StoreError, Succession, Witness,
        sql::{self, GrantColumns, NamedColumns, RecordColumns, micros},
    },
};

pub(super) async fn claim(
    on: &mut Session<'_>,
    name: &RecordName,
    claim: &Claim,
    removals: &Removals,
) -> Result<Claimed, StoreError> {
    let heard = removals.heard();
    let granted: Option<FreshColumns> = query_as(CLAIM)
        .persistent(on.persistent)
        .bind(name.scope().as_str())
        .bind(name.key().as_str())
        .bind(claim.operation.as_bytes().as_slice())
        .bind(claim.token.as_bytes().as_slice())
        .bind(claim.fingerprint.as_bytes().as_slice())
        .bind(micros(claim.lease))
        .bind(micros(claim.retention))
        .fetch_optional(&mut *on.connection)
        .await
        .map_err(failure)?;
    if let Some(FreshColumns {
        grant,
        removals: removed,
    }) = granted
    {
        removals.hear(removed);
        return if removed == heard {
            grant.decode().map(Claimed::Acquired)
        } else {
            refence(on, name, claim).await
        };
    }
    // A statement of its own: the snapshot of the first need not contain the
    // record that it ran into.
    Ok(read(on, name)
        .await?
        .map_or(Claimed::Vanished, Claimed::Occupied))
}

/// Gives a new claim a fence that was drawn after its record was there.
///
/// See [`Removals`]; with the record in place, no other claim of its name can
/// come and go.
async fn refence(
    on: &mut Session<'_>,
    name: &RecordName,
    claim: &Claim,
) -> Result<Claimed, StoreError> {
    let granted: Option<GrantColumns> = query_as(REFENCE)
        .persistent(on.persistent)
        .bind(name.scope().as_str())
        .bind(name.key().as_str())
        .bind(claim.token.as_bytes().as_slice())
        .fetch_optional(&mut *on.connection)
        .await
        .map_err(failure)?;
    match granted {
        Some(granted) => granted.decode().map(Claimed::Acquired),
        None => Ok(read(on, name)
            .await?
            .map_or(Claimed::Vanished, Claimed::Occupied)),
    }
}

/// A new claim, and the number of the last removal before it was in place.
struct FreshColumns {
    grant: GrantColumns,
    removals: i64,
}

impl<'r> FromRow<'r, PgRow> for FreshColumns {
    fn from_row(row: &'r PgRow) -> Result<Self, sqlx::Error> {
        Ok(Self {
            grant: GrantColumns::from_row(row)?,
            removals: row.try_get("removals")?,
        })
    }
}

pub(super) async fn reclaim(
    on: &mut Session<'_>,
    name: &RecordName,
    seen: Fence,
    succession: Succession,
    claim: &Claim,
) -> Result<Option<Grant>, StoreError> {
    let granted: Option<GrantColumns> = query_as(RECLAIM)
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

pub(super) async fn renew(
    on: &mut Session<'_>,
    name: &RecordName,
    token: Token,
    lease: Duration,
) -> Result<Settlement, StoreError> {
    let done = query(RENEW)
        .persistent(on.persistent)
        .bind(name.scope().as_str())
        .bind(name.key().as_str())
        .bind(token.as_bytes().as_slice())
        .bind(micros(lease))
        .execute(&mut *on.connection)
        .await
        .map_err(failure)?;
    Ok(match done.rows_affected() {
        0 => Settlement::Superseded,
        _ => Settlement::Applied,
    })
}

pub(super) async fn complete(
    on: &mut Session<'_>,
    name: &RecordName,
    token: Token,
    completion: &Completion,
) -> Result<Settlement, StoreError> {
    let done = query(COMPLETE)
        .persistent(on.persistent)
        .bind(name.scope().as_str())
        .bind(name.key().as_str())
        .bind(token.as_bytes().as_slice())
        .bind(&completion.response[..])
        .bind(micros(completion.retention))
        .bind(micros(completion.at_least))
        .execute(&mut *on.connection)
        .await
        .map_err(failure)?;
    if done.rows_affected() > 0 {
        return Ok(Settlement::Applied);
    }
    let state = state(on, name, Witness::Owner(token)).await?;
    sql::repeated(state, &[sql::COMPLETED])
}

pub(super) async fn release(
    on: &mut Session<'_>,
    name: &RecordName,
    token: Token,
    release: Release,
) -> Result<Settlement, StoreError> {
    let done = query(RELEASE)
        .persistent(on.persistent)
        .bind(name.scope().as_str())
        .bind(name.key().as_str())
        .bind(token.as_bytes().as_slice())
        .bind(sql::released(release))
        .execute(&mut *on.connection)
        .await
        .map_err(failure)?;
    if done.rows_affected() > 0 {
        return Ok(Settlement::Applied);
    }
    let state = state(on, name, Witness::Owner(token)).await?;
    sql::repeated(state, &[sql::RELEASED_BOUND, sql::RELEASED_FREED])
}

pub(super) async fn mark_unknown(
    on: &mut Session<'_>,
    name: &RecordName,
    witness: Witness,
    retention: Duration,
) -> Result<Settlement, StoreError> {
    let (token, fence) = sql::witnessed(witness);
    let done = query(MARK_UNKNOWN)
        .persistent(on.persistent)
        .bind(name.scope().as_str())
        .bind(name.key().as_str())
        .bind(token)
        .bind(fence)
        .bind(micros(retention))
        .execute(&mut *on.connection)
        .await
        .map_err(failure)?;
    if done.rows_affected() > 0 {
        return Ok(Settlement::Applied);
    }
    let state = state(on, name, witness).await?;
    sql::repeated(state, &[sql::UNKNOWN])
}

pub(super) async fn resolve(
    on: &mut Session<'_>,
    name: &RecordName,
    seen: Fence,
    resolution: &Resolution,
) -> Result<Settlement, StoreError> {
    let (state, response, at_least) = sql::resolved(resolution);
    let done = query(RESOLVE)
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

pub(super) async fn read(
    on: &mut Session<'_>,
    name: &RecordName,
) -> Result<Option<Record>, StoreError> {
    let columns: Option<RecordColumns> = query_as(READ)
        .persistent(on.persistent)
        .bind(name.scope().as_str())
        .bind(name.key().as_str())
        .fetch_optional(&mut *on.connection)
        .await
        .map_err(failure)?;
    columns.map(RecordColumns::decode).transpose()
}

pub(super) async fn list(
    on: &mut Session<'_>,
    filter: Filter,
    limit: u32,
) -> Result<Vec<(RecordName, Record)>, StoreError> {
    let listed: Vec<NamedColumns> = match filter {
        Filter::Unknown => query_as(LIST_UNKNOWN)
            .persistent(on.persistent)
            .bind(i64::from(limit)),
        Filter::InProgressFor(least) => query_as(LIST_IN_PROGRESS)
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
    let done = query(FORGET)
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
    let (removed, removed_unknown, marked_unknown): (i64, i64, i64) = query_as(PURGE_EXPIRED)
        .persistent(on.persistent)
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
    query_scalar(SETTLED)
        .persistent(on.persistent)
        .bind(name.scope().as_str())
        .bind(name.key().as_str())
        .bind(token.as_bytes().as_slice())
        .fetch_optional(&mut *on.connection)
        .await
        .map_err(failure)
}

async fn state(
    on: &mut Session<'_>,
    name: &RecordName,
    witness: Witness,
) -> Result<Option<i64>, StoreError> {
    let (token, fence) = sql::witnessed(witness);
    query_scalar(STATE)
        .persistent(on.persistent)
        .bind(name.scope().as_str())
        .bind(name.key().as_str())
        .bind(token)
        .bind(fence)
        .fetch_optional(&mut *on.connection)
        .await
        .map_err(failure)
}

/// `removals` is read once the record is in place: see [`Removals`]. The filter
/// keeps a name with a visible record away from `ON CONFLICT`, which would wait
/// for a transaction that is about to complete it, and from the sequence.
/// The statement's time is one, so that a completion with the same retention
/// computes the very same `expires_at`.
const CLAIM: &str = "
INSERT INTO idempotency_records
    (scope, key, operation, token, fingerprint, state, attempt, takeovers, fence,
     claimed_at, lease_until, expires_at)
SELECT $1, $2, $3, $4, $5, 1, 1, 0, nextval('idempotency_fences'),
       statement_timestamp(),
       statement_timestamp() + $6 * interval '1 microsecond',
       statement_timestamp() + $7 * interval '1 microsecond'
WHERE NOT EXISTS (SELECT FROM idempotency_records WHERE scope = $1 AND key = $2)
ON CONFLICT (scope, key) DO NOTHING
RETURNING operation, fence, attempt::bigint,
    (SELECT last_value FROM idempotency_removals) AS removals";

const REFENCE: &str = "
UPDATE idempotency_records
SET fence = GREATEST(nextval('idempotency_fences'), fence + 1)
WHERE scope = $1 AND key = $2 AND token = $3 AND state = 1
RETURNING operation, fence, attempt::bigint";

/// 1: take over; 2: retry; 3: replace; 4: expired; 5: rerun; 6: reconcile.
const RECLAIM: &str = "
UPDATE idempotency_records AS record
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
    fence = GREATEST(nextval('idempotency_fences'), record.fence + 1),
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
      WHEN 4 THEN record.state IN (2, 3, 4, 5) AND record.expires_at < clock.now
      WHEN 5 THEN record.state = 3 AND record.expires_at >= clock.now
      WHEN 6 THEN record.state = 3 AND record.expires_at >= clock.now
      END
RETURNING record.operation, record.fence, record.attempt::bigint";

const RENEW: &str = "
UPDATE idempotency_records
SET lease_until = clock_timestamp() + $4 * interval '1 microsecond'
WHERE scope = $1 AND key = $2 AND token = $3 AND state = 1";

const COMPLETE: &str = "
UPDATE idempotency_records
SET state = 2,
    response = $4,
    expires_at = GREATEST(
        claimed_at + $5 * interval '1 microsecond',
        clock_timestamp() + $6 * interval '1 microsecond')
WHERE scope = $1 AND key = $2 AND token = $3 AND state IN (1, 3)";

/// 4: for the same request only, as ever after a run whose outcome is unknown.
const RELEASE: &str = "
UPDATE idempotency_records
SET state = CASE takeovers WHEN 0 THEN $4 ELSE 4 END
WHERE scope = $1 AND key = $2 AND token = $3 AND state = 1";

/// Of the token and the fence one is NULL, and equal to nothing.
const MARK_UNKNOWN: &str = "
UPDATE idempotency_records
SET state = 3,
    expires_at = clock_timestamp() + $5 * interval '1 microsecond'
WHERE scope = $1 AND key = $2 AND state = 1
  AND (token = $3 OR (fence = $4 AND lease_until < clock_timestamp()))";

const RESOLVE: &str = "
UPDATE idempotency_records
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
const SETTLED: &str = "
SELECT state::bigint
FROM idempotency_records
WHERE scope = $1 AND key = $2 AND token = $3
FOR SHARE";

const STATE: &str = "
SELECT state::bigint
FROM idempotency_records
WHERE scope = $1 AND key = $2 AND (token = $3 OR fence = $4)";

const READ: &str = "
SELECT operation, fence, attempt::bigint, state::bigint, takeovers::bigint, fingerprint, token,
       (EXTRACT(EPOCH FROM clock.now - claimed_at) * 1000000)::bigint AS age,
       (EXTRACT(EPOCH FROM expires_at - clock.now) * 1000000)::bigint AS expires_in,
       (EXTRACT(EPOCH FROM lease_until - clock.now) * 1000000)::bigint AS lease_left,
       response
FROM idempotency_records, (SELECT clock_timestamp() AS now) AS clock
WHERE scope = $1 AND key = $2";

/// Reads the whole table: an index over the state would be written to by every
/// completion.
const LIST_UNKNOWN: &str = "
SELECT scope, key,
       operation, fence, attempt::bigint, state::bigint, takeovers::bigint, fingerprint, token,
       (EXTRACT(EPOCH FROM clock.now - claimed_at) * 1000000)::bigint AS age,
       (EXTRACT(EPOCH FROM expires_at - clock.now) * 1000000)::bigint AS expires_in,
       (EXTRACT(EPOCH FROM lease_until - clock.now) * 1000000)::bigint AS lease_left,
       response
FROM idempotency_records, (SELECT clock_timestamp() AS now) AS clock
WHERE state = 3
ORDER BY claimed_at
LIMIT $1";

/// As [`LIST_UNKNOWN`].
const LIST_IN_PROGRESS: &str = "
SELECT scope, key,
       operation, fence, attempt::bigint, state::bigint, takeovers::bigint, fingerprint, token,
       (EXTRACT(EPOCH FROM clock.now - claimed_at) * 1000000)::bigint AS age,
       (EXTRACT(EPOCH FROM expires_at - clock.now) * 1000000)::bigint AS expires_in,
       (EXTRACT(EPOCH FROM lease_until - clock.now) * 1000000)::bigint AS lease_left,
       response
FROM idempotency_records, (SELECT clock_timestamp() AS now) AS clock
WHERE state = 1 AND claimed_at < clock.now - $2 * interval '1 microsecond'
ORDER BY claimed_at
LIMIT $1";

const FORGET: &str = "
WITH drawn AS MATERIALIZED (
    SELECT nextval('idempotency_removals') AS removal
)
DELETE FROM idempotency_records
USING drawn
WHERE scope = $1 AND key = $2 AND fence = $3 AND removal > 0";

/// The conditions stand twice: a row may be claimed again between the moment
/// it is seen and the moment it is locked. The index serves comparisons with
/// `statement_timestamp()` only, which is what the first needs; `clock_timestamp()`
/// leads the second to the locked rows by their names, however large the backlog.
/// The state that was locked says which of them each part is for: without it, a
/// planner that knows of hardly any lease looks for them in the whole table.
/// A removal draws its number before it can be seen: see [`Removals`].
const PURGE_EXPIRED: &str = "
WITH due AS MATERIALIZED (
    SELECT scope, key, state, (SELECT nextval('idempotency_removals')) AS removal
    FROM idempotency_records
    WHERE expires_at < statement_timestamp()
      AND (state <> 1 OR lease_until < statement_timestamp())
    ORDER BY expires_at
    LIMIT $1
    FOR UPDATE SKIP LOCKED
), marked AS (
    UPDATE idempotency_records AS record
    SET state = 3,
        expires_at = statement_timestamp() + $2 * interval '1 microsecond'
    FROM due
    WHERE due.state = 1
      AND record.scope = due.scope AND record.key = due.key
      AND record.expires_at < clock_timestamp()
      AND record.state = 1 AND record.lease_until < clock_timestamp()
    RETURNING 1
), removed AS (
    DELETE FROM idempotency_records AS record
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
