//! The transitions that are made alone: each one statement, with its guard in the
//! `WHERE` clause. None waits for a lock: where the record is locked, a second
//! statement says whether the guard holds.

use std::{sync::Arc, time::Duration};

use sqlx::{FromRow as _, Row as _, query, query_as, query_scalar};

use super::{connections::Connections, failure, session::Session};
use crate::{
    Fence, RecordName, Token,
    store::transition::NO_OWNER,
    store::{
        Claim, Grant, Purged, ReclaimAs, StoreError, Transitioned,
        admin::{Filter, FilterKind, Page},
        sql::calls::Call,
        sql::single::{Attempt, Single},
        sql::{self, GrantColumns, NamedColumns, Resolved, micros},
    },
};

/// Fenced by the fence that was seen.
pub(super) struct Fenced(pub(super) Arc<Connections>);

pub(super) struct FencedCall {
    pub(super) name: RecordName,
    pub(super) seen: Fence,
    pub(super) transition: FencedTransition,
}

pub(super) enum FencedTransition {
    Reclaimed(ReclaimAs, Claim),
    /// A claim whose lease has lapsed becomes unknown, with this retention.
    MarkedUnknown(Duration),
    Resolved(Resolved),
    Forgotten,
}

#[derive(Clone, Copy)]
pub(super) enum FencedAnswer {
    Reclaimed(Option<Grant>),
    Settled(Transitioned),
}

impl Call for FencedCall {
    fn name(&self) -> &RecordName {
        &self.name
    }

    fn bytes(&self) -> usize {
        match &self.transition {
            FencedTransition::Resolved(Resolved {
                response: Some(response),
                ..
            }) => self.name.bytes() + response.len(),
            _ => self.name.bytes(),
        }
    }
}

impl Single for Fenced {
    type Call = FencedCall;
    type Answer = FencedAnswer;

    async fn attempt(&self, call: &FencedCall) -> Result<Attempt<FencedAnswer>, StoreError> {
        self.0.run(async |on| attempt(on, call).await).await
    }
}

async fn attempt(
    on: &mut Session<'_>,
    call: &FencedCall,
) -> Result<Attempt<FencedAnswer>, StoreError> {
    let FencedCall {
        name,
        seen,
        transition,
    } = call;
    let settled = match transition {
        FencedTransition::Reclaimed(reclaim_as, claim) => {
            let granted = reclaim(on, name, *seen, *reclaim_as, claim).await?;
            return Ok(granted.map(FencedAnswer::Reclaimed));
        }
        FencedTransition::MarkedUnknown(retention) => {
            mark_lapsed(on, name, *seen, *retention).await
        }
        FencedTransition::Resolved(resolved) => resolve(on, name, *seen, resolved).await,
        FencedTransition::Forgotten => forget(on, name, *seen).await,
    };
    Ok(settled?.map(FencedAnswer::Settled))
}

async fn reclaim(
    on: &mut Session<'_>,
    name: &RecordName,
    seen: Fence,
    reclaim_as: ReclaimAs,
    claim: &Claim,
) -> Result<Attempt<Option<Grant>>, StoreError> {
    let granted: Option<GrantColumns> = query_as(on.sql.reclaim.clone())
        .persistent(on.persistent)
        .bind(name.scope().as_str())
        .bind(name.key().as_str())
        .bind(sql::fence(seen))
        .bind(sql::reclaim_as(reclaim_as))
        .bind(claim.operation.as_bytes().as_slice())
        .bind(claim.token.as_bytes().as_slice())
        .bind(claim.fingerprint.as_bytes().as_slice())
        .bind(micros(claim.lease))
        .bind(micros(claim.retention))
        .fetch_optional(&mut *on.connection)
        .await
        .map_err(failure)?;
    if let Some(granted) = granted {
        return Ok(Attempt::Made(Some(granted.decode()?)));
    }
    let is_open: bool = query_scalar(on.sql.is_reclaimable.clone())
        .persistent(on.persistent)
        .bind(name.scope().as_str())
        .bind(name.key().as_str())
        .bind(sql::fence(seen))
        .bind(sql::reclaim_as(reclaim_as))
        .fetch_one(&mut *on.connection)
        .await
        .map_err(failure)?;
    Ok(match is_open {
        true => Attempt::Locked,
        false => Attempt::Made(None),
    })
}

async fn mark_lapsed(
    on: &mut Session<'_>,
    name: &RecordName,
    seen: Fence,
    retention: Duration,
) -> Result<Attempt<Transitioned>, StoreError> {
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
        return Ok(Attempt::Made(Transitioned::Applied));
    }
    Ok(match found(on, name, seen).await? {
        Some((sql::IN_PROGRESS, true)) => Attempt::Locked,
        found => {
            let state = found.map(|(state, _)| state);
            Attempt::Made(sql::repeated(state, &[sql::UNKNOWN])?)
        }
    })
}

async fn resolve(
    on: &mut Session<'_>,
    name: &RecordName,
    seen: Fence,
    resolved: &Resolved,
) -> Result<Attempt<Transitioned>, StoreError> {
    let done = query(on.sql.resolve.clone())
        .persistent(on.persistent)
        .bind(name.scope().as_str())
        .bind(name.key().as_str())
        .bind(sql::fence(seen))
        .bind(resolved.state)
        .bind(resolved.response.as_deref())
        .bind(resolved.at_least)
        .bind(NO_OWNER.as_bytes().as_slice())
        .execute(&mut *on.connection)
        .await
        .map_err(failure)?;
    if done.rows_affected() > 0 {
        return Ok(Attempt::Made(Transitioned::Applied));
    }
    Ok(match found(on, name, seen).await? {
        Some((sql::UNKNOWN, _)) => Attempt::Locked,
        _ => Attempt::Made(Transitioned::Superseded),
    })
}

async fn forget(
    on: &mut Session<'_>,
    name: &RecordName,
    seen: Fence,
) -> Result<Attempt<Transitioned>, StoreError> {
    let done = query(on.sql.forget.clone())
        .persistent(on.persistent)
        .bind(name.scope().as_str())
        .bind(name.key().as_str())
        .bind(sql::fence(seen))
        .execute(&mut *on.connection)
        .await
        .map_err(failure)?;
    if done.rows_affected() > 0 {
        return Ok(Attempt::Made(Transitioned::Applied));
    }
    Ok(match found(on, name, seen).await? {
        Some(_) => Attempt::Locked,
        None => Attempt::Made(Transitioned::Superseded),
    })
}

/// The state of the record with the fence that was seen, and whether its lease has
/// lapsed.
async fn found(
    on: &mut Session<'_>,
    name: &RecordName,
    seen: Fence,
) -> Result<Option<(i64, bool)>, StoreError> {
    query_as(on.sql.found.clone())
        .persistent(on.persistent)
        .bind(name.scope().as_str())
        .bind(name.key().as_str())
        .bind(sql::fence(seen))
        .fetch_optional(&mut *on.connection)
        .await
        .map_err(failure)
}

/// Looks up a COMMIT whose answer got lost.
pub(super) struct Commits(pub(super) Arc<Connections>);

pub(super) struct CommitCall {
    pub(super) name: RecordName,
    pub(super) token: Token,
}

impl Call for CommitCall {
    fn name(&self) -> &RecordName {
        &self.name
    }
}

impl Single for Commits {
    type Call = CommitCall;
    /// The state of the record with this token, once no transaction can change it
    /// any more.
    type Answer = Option<i64>;

    async fn attempt(&self, call: &CommitCall) -> Result<Attempt<Option<i64>>, StoreError> {
        self.0.run(async |on| settled(on, call).await).await
    }
}

async fn settled(
    on: &mut Session<'_>,
    CommitCall { name, token }: &CommitCall,
) -> Result<Attempt<Option<i64>>, StoreError> {
    for (statement, is_locked) in [
        (on.sql.settled.clone(), false),
        (on.sql.unsettled.clone(), true),
    ] {
        let state: Option<i64> = query_scalar(statement)
            .persistent(on.persistent)
            .bind(name.scope().as_str())
            .bind(name.key().as_str())
            .bind(token.as_bytes().as_slice())
            .fetch_optional(&mut *on.connection)
            .await
            .map_err(failure)?;
        match state {
            Some(_) if is_locked => return Ok(Attempt::Locked),
            Some(state) => return Ok(Attempt::Made(Some(state))),
            None => {}
        }
    }
    Ok(Attempt::Made(None))
}

pub(super) async fn list(
    on: &mut Session<'_>,
    filter: &Filter,
    after: Option<&RecordName>,
    limit: u32,
) -> Result<Page, StoreError> {
    // Text has no NUL.
    let (scope, key) = sql::first_name(filter, after, '\u{1}');
    let limit = sql::page_limit(limit);
    let is_of_one_scope = filter.scope.is_some();
    let (statement, older) = match (filter.kind, is_of_one_scope) {
        (FilterKind::Unknown, false) => (&on.sql.list_unknown, None),
        (FilterKind::Unknown, true) => (&on.sql.list_unknown_in_scope, None),
        (FilterKind::InProgressFor(age), false) => (&on.sql.list_in_progress, Some(age)),
        (FilterKind::InProgressFor(age), true) => (&on.sql.list_in_progress_in_scope, Some(age)),
    };
    let mut asked = query(statement.clone())
        .persistent(on.persistent)
        .bind(scope)
        .bind(key)
        .bind(limit);
    if let Some(age) = older {
        asked = asked.bind(micros(age)).bind(sql::MAX_EXAMINED);
    }
    let rows = asked
        .fetch_all(&mut *on.connection)
        .await
        .map_err(failure)?;
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
    Ok(Purged {
        removed: count(removed),
        removed_unknown: count(removed_unknown),
        marked_unknown: count(marked_unknown),
    })
}

/// The guard of [`RECLAIM`]. 1: take over; 2: retry; 3: replace; 4: expired;
/// 5: rerun; 6: reconcile.
macro_rules! reclaimable {
    () => {
        "record.scope = $1 AND record.key = $2 AND record.fence = $3
  AND CASE $4::bigint
      WHEN 1 THEN record.state = 1 AND record.lease_until < clock.now
      WHEN 2 THEN record.state IN (4, 5) AND record.expires_at >= clock.now
      WHEN 3 THEN record.state = 5 AND record.expires_at >= clock.now
      WHEN 4 THEN record.expires_at < clock.now
          AND (record.state <> 1 OR record.lease_until < clock.now)
      WHEN 5 THEN record.state = 3 AND record.expires_at >= clock.now
      WHEN 6 THEN record.state = 3 AND record.expires_at >= clock.now
      END"
    };
}

macro_rules! unsettled {
    () => {
        "
SELECT state::bigint
FROM {records}
WHERE scope = $1 AND key = $2 AND token = $3"
    };
}

/// Holds where the record is not locked, and locks it.
macro_rules! unlocked {
    () => {
        "
  AND EXISTS (
      SELECT FROM {records}
      WHERE scope = $1 AND key = $2
      FOR NO KEY UPDATE SKIP LOCKED)"
    };
}

pub(super) const RECLAIM: &str = concat!(
    "
UPDATE {records} AS record
SET operation = CASE WHEN $4 IN (1, 2, 5, 6) THEN record.operation ELSE $5 END,
    attempt = CASE
        WHEN $4 IN (1, 2, 5) THEN record.attempt + 1
        WHEN $4 = 6 THEN record.attempt
        ELSE 1 END,
    takeovers = CASE
        WHEN $4 IN (1, 5) THEN record.takeovers + 1
        WHEN $4 = 2 THEN LEAST(record.takeovers, 1)
        WHEN $4 = 6 THEN record.takeovers
        ELSE 0 END,
    fence = GREATEST({next_fence}, record.fence + 1),
    token = $6,
    fingerprint = $7,
    state = 1,
    response = NULL,
    unknown_since = NULL,
    claimed_at = clock.now,
    lease_until = clock.now + $8 * interval '1 microsecond',
    expires_at = clock.now + $9 * interval '1 microsecond'
FROM (SELECT clock_timestamp() AS now) AS clock
WHERE ",
    reclaimable!(),
    unlocked!(),
    "
RETURNING record.operation, record.fence, record.attempt::bigint"
);

pub(super) const IS_RECLAIMABLE: &str = concat!(
    "
SELECT EXISTS (
    SELECT FROM {records} AS record, (SELECT clock_timestamp() AS now) AS clock
    WHERE ",
    reclaimable!(),
    ")"
);

pub(super) const MARK_LAPSED: &str = concat!(
    "
UPDATE {records}
SET state = 3,
    unknown_since = clock_timestamp(),
    expires_at = clock_timestamp() + $4 * interval '1 microsecond'
WHERE scope = $1 AND key = $2 AND fence = $3
  AND state = 1 AND lease_until < clock_timestamp()",
    unlocked!()
);

pub(super) const RESOLVE: &str = concat!(
    "
UPDATE {records}
SET state = $4,
    response = $5,
    unknown_since = NULL,
    token = CASE $4 WHEN 2 THEN $7 ELSE token END,
    takeovers = CASE $4 WHEN 2 THEN takeovers ELSE 0 END,
    expires_at = GREATEST(expires_at, clock_timestamp() + $6 * interval '1 microsecond')
WHERE scope = $1 AND key = $2 AND fence = $3 AND state = 3",
    unlocked!()
);

pub(super) const FOUND: &str = "
SELECT state::bigint, lease_until < clock_timestamp()
FROM {records}
WHERE scope = $1 AND key = $2 AND fence = $3";

/// Skips a record that an open transaction has written. A plain read would see the
/// version before it.
pub(super) const SETTLED: &str = concat!(unsettled!(), "\nFOR SHARE SKIP LOCKED");

/// A record that [`SETTLED`] does not find is locked, if this one does.
pub(super) const UNSETTLED: &str = unsettled!();

macro_rules! listed {
    () => {
        "scope, key,
       operation, fence, attempt::bigint, state::bigint, takeovers::bigint, fingerprint, token,
       (EXTRACT(EPOCH FROM clock.now - claimed_at) * 1000000)::bigint AS age,
       (EXTRACT(EPOCH FROM expires_at - clock.now) * 1000000)::bigint AS expires_in,
       (EXTRACT(EPOCH FROM lease_until - clock.now) * 1000000)::bigint AS lease_left,
       NULL::bytea AS response, NULL::bigint AS bytes"
    };
}

macro_rules! list_unknown {
    ($names:literal) => {
        concat!(
            "
SELECT ",
            listed!(),
            ", false AS is_last
FROM {records}, (SELECT clock_timestamp() AS now) AS clock
WHERE unknown_since IS NOT NULL AND ",
            $names,
            "
ORDER BY scope, key
LIMIT $3"
        )
    };
}

macro_rules! list_in_progress {
    ($names:literal) => {
        concat!(
            "
WITH examined AS MATERIALIZED (
    SELECT scope, key, operation, fence, attempt, state, takeovers, fingerprint, token,
           claimed_at, expires_at, lease_until
    FROM {records}
    WHERE ",
            $names,
            "
    ORDER BY scope, key
    LIMIT $5
), found AS (
    SELECT ",
            listed!(),
            ", false AS is_last
    FROM examined, (SELECT clock_timestamp() AS now) AS clock
    WHERE state = 1 AND claimed_at < clock.now - $4 * interval '1 microsecond'
    ORDER BY scope, key
    LIMIT $3
), last AS (
    SELECT scope, key
    FROM examined
    ORDER BY scope, key
    OFFSET $5 - 1
)
SELECT * FROM found
UNION ALL
SELECT scope, key, NULL, NULL, NULL, NULL, NULL, NULL, NULL, NULL, NULL, NULL, NULL, NULL, true
FROM last"
        )
    };
}

/// By the partial index.
pub(super) const LIST_UNKNOWN: &str = list_unknown!("(scope, key) >= ($1, $2)");
pub(super) const LIST_UNKNOWN_IN_SCOPE: &str = list_unknown!("scope = $1 AND key >= $2");

/// Looks at no more than `$5` records, by the primary key. If it reaches that limit,
/// it names the last one.
pub(super) const LIST_IN_PROGRESS: &str = list_in_progress!("(scope, key) >= ($1, $2)");
pub(super) const LIST_IN_PROGRESS_IN_SCOPE: &str = list_in_progress!("scope = $1 AND key >= $2");

/// Draws a number before the removal can be seen: see
/// [`Removals`](super::removals::Removals).
pub(super) const FORGET: &str = "
WITH held AS MATERIALIZED (
    SELECT
    FROM {records}
    WHERE scope = $1 AND key = $2 AND fence = $3
    FOR UPDATE SKIP LOCKED
), drawn AS MATERIALIZED (
    SELECT {next_removal} AS removal
    FROM held
)
DELETE FROM {records} AS record
USING drawn
WHERE record.scope = $1 AND record.key = $2 AND record.fence = $3 AND removal > 0";

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
        unknown_since = statement_timestamp(),
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
