//! What ends or prolongs a claim, by its token; of many records in one
//! statement, which waits for no transaction that completes one of them.

use std::{collections::HashMap, sync::Arc};

use sqlx::{Row as _, postgres::PgRow, query, query_as};

use super::{
    connections::Connections,
    failure,
    members::{AnswersByToken, names},
    session::Session,
};
use crate::store::{
    StoreError, Transitioned, sql,
    sql::batcher::{Answers, Batch},
    sql::calls::TransitionCall,
    sql::single::{Attempt, Single},
};

pub(super) struct Settlements(pub(super) Arc<Connections>);

impl Batch for Settlements {
    async fn execute(&self, calls: &[TransitionCall]) -> Result<Answers<Transitioned>, StoreError> {
        self.0.run(async |on| settle(on, calls).await).await
    }
}

impl Single for Settlements {
    type Call = TransitionCall;
    type Answer = Transitioned;

    async fn attempt(&self, call: &TransitionCall) -> Result<Attempt<Transitioned>, StoreError> {
        self.0.run(async |on| settle_alone(on, call).await).await
    }
}

async fn settle(
    on: &mut Session<'_>,
    calls: &[TransitionCall],
) -> Result<Answers<Transitioned>, StoreError> {
    let mut told = AnswersByToken::new(calls.iter().map(|call| *call.token.as_bytes()));
    if let [call] = calls {
        if settle_one(on, call).await? {
            told.answer(call.token.as_bytes(), Ok(Transitioned::Applied));
        }
    } else {
        for row in settle_many(on, calls).await? {
            let asked = row.try_get("asked").map_err(failure)?;
            told.answer(asked, Ok(Transitioned::Applied));
        }
    }
    let left: Vec<&TransitionCall> = calls
        .iter()
        .zip(&told.answers)
        .filter(|(_, answer)| answer.is_none())
        .map(|(call, _)| call)
        .collect();
    if !left.is_empty() {
        look_after(on, &left, &mut told).await?;
    }
    Ok(told.answers)
}

async fn settle_alone(
    on: &mut Session<'_>,
    call: &TransitionCall,
) -> Result<Attempt<Transitioned>, StoreError> {
    if settle_one(on, call).await? {
        return Ok(Attempt::Made(Transitioned::Applied));
    }
    let states = states(on, &[call]).await?;
    match states.get(call.token.as_bytes()).copied() {
        Some(state) if call.transition.is_allowed_in(state) => Ok(Attempt::Locked),
        state => sql::repeated(state, call.transition.applied_states()).map(Attempt::Made),
    }
}

async fn settle_many(
    on: &mut Session<'_>,
    calls: &[TransitionCall],
) -> Result<Vec<PgRow>, StoreError> {
    let [scopes, keys] = names(calls.iter().map(|call| &call.name));
    let goals: Vec<i64> = calls.iter().map(|call| call.transition.state()).collect();
    let responses: Vec<Option<&[u8]>> = calls
        .iter()
        .map(|call| call.transition.response())
        .collect();
    let (times, at_least): (Vec<i64>, Vec<i64>) =
        calls.iter().map(|call| call.transition.durations()).unzip();
    query(on.sql.settle_many.clone())
        .persistent(on.persistent)
        .bind(scopes)
        .bind(keys)
        .bind(tokens(calls.iter()))
        .bind(goals)
        .bind(responses)
        .bind(times)
        .bind(at_least)
        .fetch_all(&mut *on.connection)
        .await
        .map_err(failure)
}

/// Whether the record was there, as it has to be, and not locked.
async fn settle_one(
    on: &mut Session<'_>,
    TransitionCall {
        name,
        token,
        transition,
    }: &TransitionCall,
) -> Result<bool, StoreError> {
    let (time, at_least) = transition.durations();
    let done = query(on.sql.settle_one.clone())
        .persistent(on.persistent)
        .bind(name.scope().as_str())
        .bind(name.key().as_str())
        .bind(token.as_bytes().as_slice())
        .bind(transition.state())
        .bind(transition.response())
        .bind(time)
        .bind(at_least)
        .execute(&mut *on.connection)
        .await
        .map_err(failure)?;
    Ok(done.rows_affected() > 0)
}

/// Tells those whose record was not changed why: it is where an earlier call has
/// put it, or another's, or beyond change. What could have been changed is locked,
/// and left to be asked for alone.
async fn look_after(
    on: &mut Session<'_>,
    left: &[&TransitionCall],
    told: &mut AnswersByToken<Transitioned>,
) -> Result<(), StoreError> {
    let states = states(on, left).await?;
    for call in left {
        let token = call.token.as_bytes();
        let state = states.get(token).copied();
        if !state.is_some_and(|state| call.transition.is_allowed_in(state)) {
            told.answer(
                token,
                sql::repeated(state, call.transition.applied_states()),
            );
        }
    }
    Ok(())
}

/// The states of the records that still have their tokens.
async fn states(
    on: &mut Session<'_>,
    calls: &[&TransitionCall],
) -> Result<HashMap<[u8; 16], i64>, StoreError> {
    let [scopes, keys] = names(calls.iter().map(|call| &call.name));
    let rows: Vec<(Vec<u8>, i64)> = query_as(on.sql.states.clone())
        .persistent(on.persistent)
        .bind(scopes)
        .bind(keys)
        .bind(tokens(calls.iter().copied()))
        .fetch_all(&mut *on.connection)
        .await
        .map_err(failure)?;
    let states = rows
        .into_iter()
        .filter_map(|(token, state)| Some((token.try_into().ok()?, state)));
    Ok(states.collect())
}

fn tokens<'c>(calls: impl Iterator<Item = &'c TransitionCall>) -> Vec<&'c [u8]> {
    calls.map(|call| call.token.as_bytes().as_slice()).collect()
}

/// The goal is the state that the record is to have. A record that is locked is
/// skipped; one that is held here stays as it was read.
///
/// `LATERAL` with its lock, and `ON CONFLICT`, lead to the records by their names,
/// whatever the planner thinks of the size of the table: nothing is ever inserted.
/// A trigger before each INSERT would see it nevertheless.
pub(super) const SETTLE_MANY: &str = "
WITH asked AS MATERIALIZED (
    SELECT *
    FROM unnest($1::text[], $2::text[], $3::bytea[], $4::bigint[], $5::bytea[],
                $6::bigint[], $7::bigint[])
        AS asked (scope, key, token, goal, response, time, at_least)
), held AS MATERIALIZED (
    SELECT asked.goal, asked.response AS given, asked.time, asked.at_least, record.*
    FROM asked CROSS JOIN LATERAL (
        SELECT *
        FROM {records} AS record
        WHERE record.scope = asked.scope AND record.key = asked.key
          AND record.token = asked.token
          AND (record.state = 1 OR (record.state = 3 AND asked.goal = 2))
        FOR NO KEY UPDATE SKIP LOCKED
    ) AS record
)
INSERT INTO {records} AS record
    (scope, key, operation, token, fingerprint, attempt, takeovers, fence, claimed_at,
     state, response, unknown_since, lease_until, expires_at)
SELECT scope, key, operation, token, fingerprint, attempt, takeovers, fence, claimed_at,
    CASE WHEN goal = 5 AND takeovers > 0 THEN 4 ELSE goal END,
    given,
    CASE goal WHEN 3 THEN statement_timestamp() END,
    CASE goal
        WHEN 1 THEN statement_timestamp() + time * interval '1 microsecond'
        ELSE lease_until
        END,
    CASE goal
        WHEN 2 THEN GREATEST(
            claimed_at + time * interval '1 microsecond',
            statement_timestamp() + at_least * interval '1 microsecond')
        WHEN 3 THEN statement_timestamp() + time * interval '1 microsecond'
        ELSE expires_at
        END
FROM held
ON CONFLICT (scope, key) DO UPDATE
SET state = EXCLUDED.state,
    response = EXCLUDED.response,
    unknown_since = EXCLUDED.unknown_since,
    lease_until = EXCLUDED.lease_until,
    expires_at = EXCLUDED.expires_at
RETURNING token AS asked";

/// As [`SETTLE_MANY`], of one record. Does nothing if it is locked.
pub(super) const SETTLE_ONE: &str = "
UPDATE {records}
SET state = CASE WHEN $4 = 5 AND takeovers > 0 THEN 4 ELSE $4 END,
    response = $5,
    unknown_since = CASE $4 WHEN 3 THEN clock_timestamp() END,
    lease_until = CASE $4
        WHEN 1 THEN clock_timestamp() + $6 * interval '1 microsecond'
        ELSE lease_until
        END,
    expires_at = CASE $4
        WHEN 2 THEN GREATEST(
            claimed_at + $6 * interval '1 microsecond',
            clock_timestamp() + $7 * interval '1 microsecond')
        WHEN 3 THEN clock_timestamp() + $6 * interval '1 microsecond'
        ELSE expires_at
        END
WHERE scope = $1 AND key = $2 AND token = $3
  AND (state = 1 OR (state = 3 AND $4 = 2))
  AND EXISTS (
      SELECT FROM {records}
      WHERE scope = $1 AND key = $2
      FOR NO KEY UPDATE SKIP LOCKED)";

pub(super) const STATES: &str = "
SELECT asked.token AS asked, record.state
FROM unnest($1::text[], $2::text[], $3::bytea[]) AS asked (scope, key, token)
    CROSS JOIN LATERAL (
        SELECT state::bigint
        FROM {records} AS record
        WHERE record.scope = asked.scope AND record.key = asked.key
          AND record.token = asked.token
        OFFSET 0
    ) AS record";
