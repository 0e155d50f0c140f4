//! The transitions of a claim's owner, many in one statement.
//!
//! No statement here waits for a lock: a locked record is skipped, and its call is
//! made singly.

use std::{sync::Arc, time::Duration};

use super::{
    answers::AnswersByToken,
    engine::PostgresEngine,
    parameters::micros,
    pool::Pool,
    reads,
    rows::{CompletionCall, CompletionRows},
    schema::{Schema, statements},
    session::{Session, column},
};
use crate::store::{
    OwnerTransition, RecordName, StoreError, Token, Transitioned,
    sql::batcher::{Answers, Batch},
    sql::calls::{Call, Identity, SMALL_RESPONSE},
    sql::columns::{COMPLETED, IN_PROGRESS, UNKNOWN, released},
    sql::single::{Attempt, Single},
    transition::StoredRecord,
};

/// A transition that a claim's owner asks for.
pub(super) struct TransitionCall {
    pub(super) name: RecordName,
    pub(super) token: Token,
    pub(super) transition: OwnerTransition,
}

impl Call for TransitionCall {
    fn name(&self) -> &RecordName {
        &self.name
    }

    fn identity(&self) -> Option<Identity> {
        Identity::of_outcome(&self.name, self.token, &self.transition)
    }

    fn bytes(&self) -> usize {
        self.name.bytes() + self.transition.response_len()
    }

    fn is_droppable(&self) -> bool {
        self.transition.is_renewal()
    }
}

impl TransitionCall {
    /// Returns whether the call would delay the others of its batch.
    pub(super) fn is_large(&self) -> bool {
        self.transition.response_len() > SMALL_RESPONSE
    }
}

pub(super) struct Transitions {
    pool: Arc<Pool>,
    sql: Statements,
    reads: reads::Statements,
    /// On Citus.
    rows: Option<CompletionRows>,
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
            reads: reads::Statements::new(schema),
            rows: (schema.engine == PostgresEngine::Citus).then(|| CompletionRows::new(schema)),
            is_large,
        }
    }

    async fn apply_many(
        &self,
        session: &mut Session<'_>,
        calls: &[TransitionCall],
    ) -> Result<Answers<Transitioned>, StoreError> {
        if let [call] = calls {
            let is_applied = self.apply(session, call).await?;
            return Ok(vec![is_applied.then_some(Ok(Transitioned::Applied))]);
        }
        if let Some(rows) = &self.rows {
            return self.apply_rows(session, rows, calls).await;
        }
        let tokens = || calls.iter().map(|call| call.token.as_bytes());
        let parameters = || calls.iter().map(|call| Parameters::of(&call.transition));
        let query = session
            .query_records(&self.sql.apply_many, calls.iter().map(|call| &call.name))
            .bind(tokens().map(<[u8; 16]>::as_slice).collect::<Vec<_>>())
            .bind(parameters().map(|of| of.state).collect::<Vec<_>>())
            .bind(parameters().map(|of| of.response).collect::<Vec<_>>())
            .bind(parameters().map(|of| of.duration).collect::<Vec<_>>())
            .bind(parameters().map(|of| of.at_least).collect::<Vec<_>>());
        let mut answers = AnswersByToken::new(tokens().copied());
        for row in &session.rows(query).await? {
            answers.set(column(row, "token")?, Ok(Transitioned::Applied));
        }
        // The others are made singly.
        Ok(answers.into_answers())
    }

    /// Makes the completions with one statement. The other transitions are made singly.
    async fn apply_rows(
        &self,
        session: &mut Session<'_>,
        rows: &CompletionRows,
        calls: &[TransitionCall],
    ) -> Result<Answers<Transitioned>, StoreError> {
        let mut answers = AnswersByToken::new(calls.iter().map(|call| *call.token.as_bytes()));
        let completions: Vec<CompletionCall<'_>> = calls
            .iter()
            .filter_map(|call| match &call.transition {
                OwnerTransition::Complete(completion) => Some((&call.name, call.token, completion)),
                _ => None,
            })
            .collect();
        if completions.is_empty() {
            return Ok(answers.into_answers());
        }
        let complete = rows.query(session, &completions);
        for row in &session.rows(complete).await? {
            let token: &[u8] = column(row, "token")?;
            if column(row, "is_applied")? {
                answers.set(token, Ok(Transitioned::Applied));
                continue;
            }
            let removed = completions.iter();
            let removed = removed.filter(|(_, own, _)| own.as_bytes() == token);
            for (name, token, _) in removed {
                let remove = rows.remove(session, name, *token);
                session.changes(remove).await?;
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
        let loaded = reads::load(session, &self.reads, &call.name).await?;
        Ok(match loaded {
            Some((record, now)) => not_applied(&record, |record| {
                record.apply_owner(call.token, &call.transition, now)
            }),
            None => Attempt::Made(Transitioned::Superseded),
        })
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
        if let (Some(rows), OwnerTransition::Complete(completion)) = (&self.rows, transition) {
            let complete = rows.alone(session, (name, *token, completion));
            return session.changes(complete).await;
        }
        let of = Parameters::of(transition);
        let query = session
            .query_record(&self.sql.apply, name)
            .bind(token.as_bytes().as_slice())
            .bind(of.state)
            .bind(of.response)
            .bind(of.duration)
            .bind(of.at_least);
        session.changes(query).await
    }
}

/// Returns the answer to a transition that changed nothing. If it is allowed, another
/// transaction had locked the record.
pub(super) fn not_applied(
    record: &StoredRecord,
    apply: impl FnOnce(&mut StoredRecord) -> Transitioned,
) -> Attempt<Transitioned> {
    let mut after = record.clone();
    match apply(&mut after) {
        answer if after == *record => Attempt::Made(answer),
        _ => Attempt::Locked,
    }
}

/// The parameters of a transition.
struct Parameters<'c> {
    /// The record's next state.
    state: i64,
    response: Option<&'c [u8]>,
    /// How long the lease lasts, or how long the record is kept.
    duration: i64,
    /// How long a completed record is kept at least from now.
    at_least: i64,
}

impl<'c> Parameters<'c> {
    fn of(transition: &'c OwnerTransition) -> Self {
        let (state, response, duration, at_least) = match transition {
            OwnerTransition::Renew { lease } => (IN_PROGRESS, None, *lease, Duration::ZERO),
            OwnerTransition::Complete(completion) => (
                COMPLETED,
                Some(&*completion.response),
                completion.retention,
                completion.at_least,
            ),
            OwnerTransition::Release(release) => {
                (released(*release), None, Duration::ZERO, Duration::ZERO)
            }
            OwnerTransition::MarkUnknown { retention } => {
                (UNKNOWN, None, *retention, Duration::ZERO)
            }
        };
        Self {
            state,
            response,
            duration: micros(duration),
            at_least: micros(at_least),
        }
    }
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
    CASE WHEN goal = {unknown} THEN clock.now END,
    CASE WHEN goal = {in_progress} THEN clock.now + time ELSE lease_until END,
    CASE
        WHEN goal = {completed} THEN GREATEST(claimed_at + time, clock.now + at_least)
        WHEN goal = {unknown} THEN clock.now + time
        ELSE expires_at
        END
FROM held, {clock}
ON CONFLICT (scope, key) DO UPDATE
SET state = EXCLUDED.state,
    response = EXCLUDED.response,
    unknown_since = EXCLUDED.unknown_since,
    lease_until = EXCLUDED.lease_until,
    expires_at = EXCLUDED.expires_at
RETURNING token, {notify} AS notified";

    apply = "
UPDATE {records}
SET state = CASE
        WHEN $4 = {released_any} AND takeovers > 0 THEN {released_same}
        ELSE $4
        END,
    response = $5,
    unknown_since = CASE WHEN $4 = {unknown} THEN clock.now END,
    lease_until = CASE WHEN $4 = {in_progress} THEN clock.now + $6 ELSE lease_until END,
    expires_at = CASE
        WHEN $4 = {completed} THEN GREATEST(claimed_at + $6, clock.now + $7)
        WHEN $4 = {unknown} THEN clock.now + $6
        ELSE expires_at
        END
FROM {clock}
WHERE scope = $1 AND key = $2 AND token = $3
  AND (state = {in_progress} OR (state = {unknown} AND $4 = {completed})){unlocked}
RETURNING {notify} AS notified";
}
