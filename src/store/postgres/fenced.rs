//! Calls that are guarded by the fence that their caller has seen.
//!
//! Each is one statement with its guard in the `WHERE` clause. None waits for a lock:
//! if it changes nothing, a second statement tells a locked record from a guard that
//! does not hold.

use std::{sync::Arc, time::Duration};

use sqlx::SqlStr;

use super::{
    claims::grant,
    pool::Pool,
    schema::{Schema, statements},
    session::{PgQuery, Session, column},
};
use crate::{
    Fence, RecordName,
    store::{
        Claim, Grant, ReclaimAs, StoreError, Transitioned,
        sql::calls::Call,
        sql::single::{Attempt, Single},
        sql::{self, Resolved, micros},
        transition::NO_OWNER,
    },
};

pub(super) struct Fenced {
    pool: Arc<Pool>,
    sql: Statements,
}

pub(super) struct FencedCall {
    pub(super) name: RecordName,
    pub(super) seen: Fence,
    pub(super) transition: FencedTransition,
}

pub(super) enum FencedTransition {
    Reclaim(ReclaimAs, Claim),
    /// Marks a claim as unknown whose lease has lapsed.
    MarkLapsed {
        retention: Duration,
    },
    Resolve(Resolved),
    Forget,
}

#[derive(Clone, Copy)]
pub(super) struct FencedAnswer {
    pub(super) transitioned: Transitioned,
    /// The grant of a reclaim that was applied.
    pub(super) grant: Option<Grant>,
}

impl Call for FencedCall {
    fn name(&self) -> &RecordName {
        &self.name
    }

    fn bytes(&self) -> usize {
        match &self.transition {
            FencedTransition::Resolve(Resolved {
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
        self.pool
            .run(async |session| self.apply(session, call).await)
            .await
    }
}

impl Fenced {
    pub(super) fn new(pool: Arc<Pool>, schema: &Schema) -> Self {
        Self {
            pool,
            sql: Statements::new(schema),
        }
    }

    async fn apply(
        &self,
        session: &mut Session<'_>,
        call: &FencedCall,
    ) -> Result<Attempt<FencedAnswer>, StoreError> {
        let query = |session: &Session<'_>, statement: &SqlStr| -> PgQuery {
            let query = session.query_record(statement, &call.name);
            query.bind(sql::fence(call.seen))
        };
        let applied = match &call.transition {
            FencedTransition::Reclaim(reclaim_as, claim) => {
                return self.reclaim(session, query, *reclaim_as, claim).await;
            }
            FencedTransition::MarkLapsed { retention } => {
                let marking = query(session, &self.sql.mark_lapsed);
                session.changes(marking.bind(micros(*retention))).await?
            }
            FencedTransition::Resolve(resolved) => {
                let resolution = query(session, &self.sql.resolve)
                    .bind(resolved.state)
                    .bind(resolved.response.as_deref())
                    .bind(resolved.at_least)
                    .bind(NO_OWNER.as_bytes().as_slice());
                session.changes(resolution).await?
            }
            FencedTransition::Forget => session.changes(query(session, &self.sql.forget)).await?,
        };
        let mut transitioned = Transitioned::Applied;
        if !applied {
            let found = session.row(query(session, &self.sql.find)).await?;
            let found = found.as_ref().map(|row| {
                let state: i64 = column(row, "state")?;
                Ok((state, column(row, "has_lapsed")?))
            });
            transitioned = match (&call.transition, found.transpose()?) {
                (FencedTransition::MarkLapsed { .. }, Some((sql::IN_PROGRESS, true)))
                | (FencedTransition::Resolve(_), Some((sql::UNKNOWN, _)))
                | (FencedTransition::Forget, Some(_)) => return Ok(Attempt::Locked),
                (FencedTransition::MarkLapsed { .. }, Some((state, _))) => {
                    sql::repeated(Some(state), &[sql::UNKNOWN])?
                }
                _ => Transitioned::Superseded,
            };
        }
        Ok(Attempt::Made(FencedAnswer {
            transitioned,
            grant: None,
        }))
    }

    async fn reclaim(
        &self,
        session: &mut Session<'_>,
        query: impl Fn(&Session<'_>, &SqlStr) -> PgQuery,
        reclaim_as: ReclaimAs,
        claim: &Claim,
    ) -> Result<Attempt<FencedAnswer>, StoreError> {
        let reclaim_as = sql::reclaim_as(reclaim_as);
        let reclaim = query(session, &self.sql.reclaim)
            .bind(reclaim_as)
            .bind(claim.operation.as_bytes().as_slice())
            .bind(claim.token.as_bytes().as_slice())
            .bind(claim.fingerprint.as_bytes().as_slice())
            .bind(micros(claim.lease))
            .bind(micros(claim.retention));
        if let Some(row) = session.row(reclaim).await? {
            return Ok(Attempt::Made(FencedAnswer {
                transitioned: Transitioned::Applied,
                grant: Some(grant(&row)?),
            }));
        }
        let is_allowed = query(session, &self.sql.may_reclaim).bind(reclaim_as);
        Ok(match session.row(is_allowed).await? {
            Some(_) => Attempt::Locked,
            None => Attempt::Made(FencedAnswer {
                transitioned: Transitioned::Superseded,
                grant: None,
            }),
        })
    }
}

/// The guard of a reclaim.
macro_rules! may_reclaim {
    () => {
        "record.scope = $1 AND record.key = $2 AND record.fence = $3
  AND CASE $4::bigint
      WHEN {takeover} THEN record.state = {in_progress} AND record.lease_until < clock.now
      WHEN {retry} THEN record.state IN ({released_same}, {released_any})
          AND record.expires_at >= clock.now
      WHEN {replace} THEN record.state = {released_any} AND record.expires_at >= clock.now
      WHEN {expired} THEN record.expires_at < clock.now
          AND (record.state <> {in_progress} OR record.lease_until < clock.now)
      WHEN {rerun} THEN record.state = {unknown} AND record.expires_at >= clock.now
      WHEN {reconcile} THEN record.state = {unknown} AND record.expires_at >= clock.now
      END"
    };
}

statements! {
    reclaim = concat!("
UPDATE {records} AS record
SET operation = CASE
        WHEN $4 IN ({takeover}, {retry}, {rerun}, {reconcile}) THEN record.operation
        ELSE $5 END,
    attempt = CASE
        WHEN $4 IN ({takeover}, {retry}, {rerun}) THEN record.attempt + 1
        WHEN $4 = {reconcile} THEN record.attempt
        ELSE 1 END,
    takeovers = CASE
        WHEN $4 IN ({takeover}, {rerun}) THEN record.takeovers + 1
        WHEN $4 = {retry} THEN LEAST(record.takeovers, 1)
        WHEN $4 = {reconcile} THEN record.takeovers
        ELSE 0 END,
    fence = GREATEST({next_fence}, record.fence + 1),
    token = $6,
    fingerprint = $7,
    state = {in_progress},
    response = NULL,
    unknown_since = NULL,
    claimed_at = clock.now,
    lease_until = clock.now + $8 * interval '1 microsecond',
    expires_at = clock.now + $9 * interval '1 microsecond'
FROM (SELECT clock_timestamp() AS now) AS clock
WHERE ", may_reclaim!(), "{unlocked}
RETURNING record.operation, record.fence, record.attempt::bigint");

    may_reclaim = concat!("
SELECT 1
FROM {records} AS record, (SELECT clock_timestamp() AS now) AS clock
WHERE ", may_reclaim!());

    mark_lapsed = "
UPDATE {records}
SET state = {unknown},
    unknown_since = clock_timestamp(),
    expires_at = clock_timestamp() + $4 * interval '1 microsecond'
WHERE scope = $1 AND key = $2 AND fence = $3
  AND state = {in_progress} AND lease_until < clock_timestamp(){unlocked}";

    resolve = "
UPDATE {records}
SET state = $4,
    response = $5,
    unknown_since = NULL,
    token = CASE $4 WHEN {completed} THEN $7 ELSE token END,
    takeovers = CASE $4 WHEN {completed} THEN takeovers ELSE 0 END,
    expires_at = GREATEST(expires_at, clock_timestamp() + $6 * interval '1 microsecond')
WHERE scope = $1 AND key = $2 AND fence = $3 AND state = {unknown}{unlocked}";

    /// Draws a number before the removal is visible, for claims that are under way.
    forget = "
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

    find = "
SELECT state::bigint, lease_until < clock_timestamp() AS has_lapsed
FROM {records}
WHERE scope = $1 AND key = $2 AND fence = $3";
}
