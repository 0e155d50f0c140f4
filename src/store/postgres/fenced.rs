//! Calls that are guarded by the fence that their caller has seen.
//!
//! Each is one statement with its guard in the `WHERE` clause. None waits for a lock:
//! if it changes nothing, a second statement reads the record to find out why.

use std::sync::Arc;

use sqlx::SqlStr;

use super::{
    parameters::{self, micros},
    pool::Pool,
    reads,
    schema::{Schema, statements},
    session::{PgQuery, Session},
    transitions::not_applied,
};
use crate::{
    key::RecordName,
    store::{
        Claim, Fence, FencedTransition, Grant, ReclaimAs, StoreError, Transitioned,
        admin::Resolution,
        sql::{
            calls::Call,
            columns::{COMPLETED, RELEASED_SAME_REQUEST, fence_number, grant},
            single::{Attempt, Single},
        },
        transition::{FORGOTTEN_RETENTION, NO_OWNER, State, StoredRecord},
    },
};

pub(super) struct Fenced {
    pool: Arc<Pool>,
    sql: Statements,
    reads: reads::Statements,
}

pub(super) struct FencedCall {
    pub(super) name: RecordName,
    pub(super) seen: Fence,
    pub(super) change: FencedChange,
}

pub(super) enum FencedChange {
    Reclaim(ReclaimAs, Claim),
    Transition(FencedTransition),
    /// Marks the claim as one whose end another process waits for.
    MarkAwaited,
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
        let response = match &self.change {
            FencedChange::Transition(transition) => transition.response_len(),
            FencedChange::Reclaim(..) | FencedChange::MarkAwaited => 0,
        };
        self.name.bytes() + response
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
            reads: reads::Statements::new(schema),
        }
    }

    async fn apply(
        &self,
        session: &mut Session<'_>,
        call: &FencedCall,
    ) -> Result<Attempt<FencedAnswer>, StoreError> {
        let query = |session: &Session<'_>, statement: &SqlStr| -> PgQuery {
            let query = session.query_record(statement, &call.name);
            query.bind(fence_number(call.seen))
        };
        let is_applied = match &call.change {
            FencedChange::Reclaim(reclaim_as, claim) => {
                let reclaim = query(session, &self.sql.reclaim)
                    .bind(parameters::reclaim_as(*reclaim_as))
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
                // The answer to an earlier try of this reclaim got lost.
                let granted =
                    reads::grant_again(session, &self.reads, &call.name, claim.token).await?;
                if granted.is_some() {
                    return Ok(Attempt::Made(FencedAnswer {
                        transitioned: Transitioned::Applied,
                        grant: granted,
                    }));
                }
                false
            }
            FencedChange::MarkAwaited => {
                let mark = query(session, &self.sql.mark_awaited);
                session.changes(mark).await?
            }
            FencedChange::Transition(FencedTransition::MarkLapsed { retention }) => {
                let mark = query(session, &self.sql.mark_lapsed);
                session.changes(mark.bind(micros(*retention))).await?
            }
            FencedChange::Transition(FencedTransition::Resolve {
                resolution,
                at_least,
            }) => {
                let (state, response) = match &**resolution {
                    Resolution::Happened(response) => (COMPLETED, Some(response.encode())),
                    Resolution::DidNotHappen => (RELEASED_SAME_REQUEST, None),
                };
                let resolve = query(session, &self.sql.resolve)
                    .bind(state)
                    .bind(response.as_deref())
                    .bind(micros(*at_least))
                    .bind(NO_OWNER.as_bytes().as_slice());
                session.changes(resolve).await?
            }
            FencedChange::Transition(FencedTransition::Forget) => {
                let forget = query(session, &self.sql.forget)
                    .bind(NO_OWNER.as_bytes().as_slice())
                    .bind(micros(FORGOTTEN_RETENTION));
                session.changes(forget).await?
            }
        };
        let answer = match is_applied {
            true => Attempt::Made(Transitioned::Applied),
            false => self.not_applied(session, call).await?,
        };
        Ok(answer.map(|transitioned| FencedAnswer {
            transitioned,
            grant: None,
        }))
    }

    /// Returns the answer to a call that changed nothing. If it is allowed, another
    /// transaction had locked the record.
    async fn not_applied(
        &self,
        session: &mut Session<'_>,
        FencedCall { name, seen, change }: &FencedCall,
    ) -> Result<Attempt<Transitioned>, StoreError> {
        let superseded = Attempt::Made(Transitioned::Superseded);
        let Some((mut record, now)) = reads::load(session, &self.reads, name).await? else {
            return Ok(superseded);
        };
        let is_allowed = match change {
            FencedChange::Reclaim(reclaim_as, claim) => {
                let reclaimed = record.reclaim(*seen, *reclaim_as, claim, now);
                reclaimed.is_some()
            }
            FencedChange::MarkAwaited => {
                record.fence == *seen && matches!(record.state, State::InProgress { .. })
            }
            FencedChange::Transition(transition) => {
                let apply = |record: &mut StoredRecord| record.apply_fenced(*seen, transition, now);
                return Ok(not_applied(&record, apply));
            }
        };
        Ok(match is_allowed {
            true => Attempt::Locked,
            false => superseded,
        })
    }
}

statements! {
    reclaim = "
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
    fence = GREATEST(clock.now, record.fence + 1),
    token = $6,
    fingerprint = $7,
    state = {in_progress},
    response = NULL,
    unknown_since = NULL,
    awaited = false,
    claimed_at = clock.now,
    lease_until = clock.now + $8,
    expires_at = clock.now + $9
FROM {clock}
WHERE record.scope = $1 AND record.key = $2 AND record.fence = $3
  AND CASE
      WHEN $4 = {takeover} THEN record.state = {in_progress} AND record.lease_until < clock.now
      WHEN $4 = {retry} THEN record.state IN ({released_same}, {released_any})
          AND record.expires_at >= clock.now
      WHEN $4 = {replace} THEN record.state = {released_any} AND record.expires_at >= clock.now
      WHEN $4 = {expired} THEN record.expires_at < clock.now
          AND (record.state <> {in_progress} OR record.lease_until < clock.now)
      WHEN $4 = {rerun} THEN record.state = {unknown} AND record.expires_at >= clock.now
      WHEN $4 = {reconcile} THEN record.state = {unknown} AND record.expires_at >= clock.now
      END{unlocked}
RETURNING record.operation, record.fence, record.attempt::bigint";

    mark_awaited = "
UPDATE {records}
SET awaited = true
WHERE scope = $1 AND key = $2 AND fence = $3 AND state = {in_progress}{unlocked}";

    mark_lapsed = "
UPDATE {records}
SET state = {unknown},
    unknown_since = clock.now,
    expires_at = clock.now + $4
FROM {clock}
WHERE scope = $1 AND key = $2 AND fence = $3
  AND state = {in_progress} AND lease_until < clock.now{unlocked}
RETURNING {notify} AS notified";

    resolve = "
UPDATE {records}
SET state = $4,
    response = $5,
    unknown_since = NULL,
    token = CASE WHEN $4 = {completed} THEN $7 ELSE token END,
    takeovers = CASE WHEN $4 = {completed} THEN takeovers ELSE 0 END,
    expires_at = GREATEST(expires_at, clock.now + $6)
FROM {clock}
WHERE scope = $1 AND key = $2 AND fence = $3
  AND (state = {unknown} OR (state = {in_progress} AND lease_until < clock.now)){unlocked}
RETURNING {notify} AS notified";

    forget = "
UPDATE {records}
SET state = {released_any},
    response = NULL,
    unknown_since = NULL,
    token = $4,
    takeovers = 0,
    expires_at = clock.now + $5
FROM {clock}
WHERE scope = $1 AND key = $2 AND fence = $3
  AND NOT (state = {released_any} AND token = $4){unlocked}
RETURNING {notify} AS notified";
}
