//! The transitions of a claim's owner, many in one statement.
//!
//! No statement here waits for a lock: a locked record is skipped, and its call is
//! made singly.

use std::{collections::HashMap, sync::Arc, time::Duration};

use super::{
    pool::Pool,
    schema::{Schema, statements},
    session::{Session, column},
};
use crate::store::{
    StoreError, Transitioned, sql,
    sql::batcher::{Answers, AnswersByToken, Batch},
    sql::calls::TransitionCall,
    sql::single::{Attempt, Single},
};

pub(super) struct Transitions {
    pool: Arc<Pool>,
    sql: Statements,
    /// Whether the batches carry large responses.
    is_large: bool,
}

impl Batch for Transitions {
    async fn execute(&self, calls: &[TransitionCall]) -> Result<Answers<Transitioned>, StoreError> {
        self.pool
            .run(async |session| self.apply_many(session, calls).await)
            .await
    }

    fn pause_after(&self, elapsed: Duration) -> Duration {
        match self.is_large {
            true => self.pool.pause_after_large(elapsed),
            false => Duration::ZERO,
        }
    }
}

impl Single for Transitions {
    type Call = TransitionCall;
    type Answer = Transitioned;

    async fn attempt(&self, call: &TransitionCall) -> Result<Attempt<Transitioned>, StoreError> {
        self.pool
            .run(async |session| self.apply_singly(session, call).await)
            .await
    }
}

impl Transitions {
    pub(super) fn new(pool: Arc<Pool>, schema: &Schema, is_large: bool) -> Self {
        Self {
            pool,
            sql: Statements::new(schema),
            is_large,
        }
    }

    async fn apply_many(
        &self,
        session: &mut Session<'_>,
        calls: &[TransitionCall],
    ) -> Result<Answers<Transitioned>, StoreError> {
        let mut answers = AnswersByToken::new(calls.iter().map(|call| *call.token.as_bytes()));
        if let [call] = calls {
            if self.apply(session, call).await? {
                answers.set(call.token.as_bytes(), Ok(Transitioned::Applied));
            }
        } else {
            let states: Vec<i64> = calls.iter().map(|call| call.transition.state()).collect();
            let responses: Vec<Option<&[u8]>> = calls
                .iter()
                .map(|call| call.transition.response())
                .collect();
            let (durations, at_least): (Vec<i64>, Vec<i64>) =
                calls.iter().map(|call| call.transition.durations()).unzip();
            let query = session
                .query_records(&self.sql.apply_many, calls.iter().map(|call| &call.name))
                .bind(tokens(calls.iter()))
                .bind(states)
                .bind(responses)
                .bind(durations)
                .bind(at_least);
            for row in session.rows(query).await? {
                answers.set(column(&row, "token")?, Ok(Transitioned::Applied));
            }
        }
        let left = answers.without_answer(calls);
        if !left.is_empty() {
            let states = self.states(session, &left).await?;
            for call in left {
                let token = call.token.as_bytes();
                let state = states.get(token).copied();
                // A transition that is allowed failed because its record is locked.
                if !state.is_some_and(|state| call.transition.is_allowed_in(state)) {
                    let repeated = sql::repeated(state, call.transition.applied_states());
                    answers.set(token, repeated);
                }
            }
        }
        Ok(answers.into_answers())
    }

    async fn apply_singly(
        &self,
        session: &mut Session<'_>,
        call: &TransitionCall,
    ) -> Result<Attempt<Transitioned>, StoreError> {
        if self.apply(session, call).await? {
            return Ok(Attempt::Made(Transitioned::Applied));
        }
        let states = self.states(session, &[call]).await?;
        match states.get(call.token.as_bytes()).copied() {
            Some(state) if call.transition.is_allowed_in(state) => Ok(Attempt::Locked),
            state => {
                let repeated = sql::repeated(state, call.transition.applied_states());
                repeated.map(Attempt::Made)
            }
        }
    }

    /// Returns whether the transition was allowed and the record not locked.
    async fn apply(
        &self,
        session: &mut Session<'_>,
        TransitionCall {
            name,
            token,
            transition,
        }: &TransitionCall,
    ) -> Result<bool, StoreError> {
        let (duration, at_least) = transition.durations();
        let query = session
            .query_record(&self.sql.apply, name)
            .bind(token.as_bytes().as_slice())
            .bind(transition.state())
            .bind(transition.response())
            .bind(duration)
            .bind(at_least);
        session.changes(query).await
    }

    /// Returns the states of the records with the tokens of the calls.
    async fn states(
        &self,
        session: &mut Session<'_>,
        calls: &[&TransitionCall],
    ) -> Result<HashMap<[u8; 16], i64>, StoreError> {
        let query = session
            .query_records(&self.sql.states, calls.iter().map(|call| &call.name))
            .bind(tokens(calls.iter().copied()));
        let rows = session.rows(query).await?;
        let states = rows.iter().map(|row| {
            let token: Vec<u8> = column(row, "token")?;
            let token = token.try_into().map_err(|_| StoreError::corrupt("token"))?;
            Ok((token, column(row, "state")?))
        });
        states.collect()
    }
}

fn tokens<'c>(calls: impl Iterator<Item = &'c TransitionCall>) -> Vec<&'c [u8]> {
    calls.map(|call| call.token.as_bytes().as_slice()).collect()
}

statements! {
    /// `goal` is the record's next state.
    ///
    /// `LATERAL` with its lock, and `ON CONFLICT`, make the planner find records by
    /// their names. No row is ever inserted, but a trigger before INSERT runs.
    apply_many = "
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
          AND (record.state = {in_progress}
              OR (record.state = {unknown} AND asked.goal = {completed}))
        FOR NO KEY UPDATE SKIP LOCKED
    ) AS record
)
INSERT INTO {records} AS record
    (scope, key, operation, token, fingerprint, attempt, takeovers, fence, claimed_at,
     state, response, unknown_since, lease_until, expires_at)
SELECT scope, key, operation, token, fingerprint, attempt, takeovers, fence, claimed_at,
    CASE WHEN goal = {released_any} AND takeovers > 0 THEN {released_same} ELSE goal END,
    given,
    CASE goal WHEN {unknown} THEN statement_timestamp() END,
    CASE goal
        WHEN {in_progress} THEN statement_timestamp() + time * interval '1 microsecond'
        ELSE lease_until
        END,
    CASE goal
        WHEN {completed} THEN GREATEST(
            claimed_at + time * interval '1 microsecond',
            statement_timestamp() + at_least * interval '1 microsecond')
        WHEN {unknown} THEN statement_timestamp() + time * interval '1 microsecond'
        ELSE expires_at
        END
FROM held
ON CONFLICT (scope, key) DO UPDATE
SET state = EXCLUDED.state,
    response = EXCLUDED.response,
    unknown_since = EXCLUDED.unknown_since,
    lease_until = EXCLUDED.lease_until,
    expires_at = EXCLUDED.expires_at
RETURNING token";

    apply = "
UPDATE {records}
SET state = CASE
        WHEN $4 = {released_any} AND takeovers > 0 THEN {released_same}
        ELSE $4
        END,
    response = $5,
    unknown_since = CASE $4 WHEN {unknown} THEN clock_timestamp() END,
    lease_until = CASE $4
        WHEN {in_progress} THEN clock_timestamp() + $6 * interval '1 microsecond'
        ELSE lease_until
        END,
    expires_at = CASE $4
        WHEN {completed} THEN GREATEST(
            claimed_at + $6 * interval '1 microsecond',
            clock_timestamp() + $7 * interval '1 microsecond')
        WHEN {unknown} THEN clock_timestamp() + $6 * interval '1 microsecond'
        ELSE expires_at
        END
WHERE scope = $1 AND key = $2 AND token = $3
  AND (state = {in_progress} OR (state = {unknown} AND $4 = {completed})){unlocked}";

    states = "
SELECT asked.token, record.state
FROM unnest($1::text[], $2::text[], $3::bytea[]) AS asked (scope, key, token)
    CROSS JOIN LATERAL (
        SELECT state::bigint
        FROM {records} AS record
        WHERE record.scope = asked.scope AND record.key = asked.key
          AND record.token = asked.token
        OFFSET 0
    ) AS record";
}
