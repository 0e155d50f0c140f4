//! Claims of names that may have no record, many in one statement.
//!
//! No statement here waits for a transaction that completes a record. A claim may
//! wait for another claim of the same new name until that one is committed.

use std::{
    sync::{
        Arc,
        atomic::{AtomicI64, Ordering},
    },
    time::Duration,
};

use sqlx::SqlStr;

use super::{
    answers::AnswersByToken,
    error::{failure, is_lock_timeout},
    parameters::micros,
    pool::Pool,
    reads,
    schema::{Schema, statements},
    session::{Session, column},
};
use crate::store::{
    Claim, Claimed, Grant, StoreError,
    sql::batcher::{Answers, Batch},
    sql::calls::{ClaimCall, SMALL_RESPONSE},
    sql::columns::{found, grant},
    sql::reads::{ClaimAnswer, is_own},
    sql::single::{Attempt, Single},
};

pub(super) struct Claims {
    pool: Arc<Pool>,
    sql: Statements,
    reads: reads::Statements,
    removals: Removals,
}

/// The number of the last removal that this process has seen.
///
/// Between the drawing of a fence and the insertion of its record, another claim of
/// the same name can be granted with a later fence and removed. Each removal draws
/// a number first. So the fence of a claim is the largest if no number was drawn
/// since the claim was sent. Otherwise the claim gets a new fence.
#[derive(Default)]
struct Removals(AtomicI64);

impl Removals {
    fn last(&self) -> i64 {
        self.0.load(Ordering::Relaxed)
    }

    fn set_last(&self, removal: i64) {
        self.0.store(removal, Ordering::Relaxed);
    }
}

impl Batch for Claims {
    async fn execute(&self, calls: &[ClaimCall]) -> Result<Answers<ClaimAnswer>, StoreError> {
        self.pool
            .run(async |session| self.claim_many(session, calls).await)
            .await
    }
}

impl Single for Claims {
    type Call = ClaimCall;
    type Answer = ClaimAnswer;

    async fn attempt(&self, call: &ClaimCall) -> Result<Attempt<ClaimAnswer>, StoreError> {
        let statement = &self.sql.claim_singly;
        self.pool
            .run(async |session| self.claim(session, statement, call).await)
            .await
    }
}

impl Claims {
    pub(super) fn new(pool: Arc<Pool>, schema: &Schema) -> Self {
        Self {
            pool,
            sql: Statements::new(schema),
            reads: reads::Statements::new(schema),
            removals: Removals::default(),
        }
    }

    async fn claim(
        &self,
        session: &mut Session<'_>,
        statement: &SqlStr,
        call: &ClaimCall,
    ) -> Result<Attempt<ClaimAnswer>, StoreError> {
        let ClaimCall { name, claim } = call;
        let last_removal = self.removals.last();
        let granted = session
            .query_record(statement, name)
            .bind(claim.operation.as_bytes().as_slice())
            .bind(claim.token.as_bytes().as_slice())
            .bind(claim.fingerprint.as_bytes().as_slice())
            .bind(micros(claim.lease))
            .bind(micros(claim.retention))
            .fetch_optional(&mut *session.connection)
            .await;
        let granted = match granted {
            Err(error) if is_lock_timeout(&error) => return Ok(Attempt::Locked),
            granted => granted.map_err(failure)?,
        };
        if let Some(row) = granted {
            let removal = column(&row, "removals")?;
            if removal == last_removal {
                return Ok(Attempt::Made(acquired(grant(&row)?)));
            }
            self.removals.set_last(removal);
            if let Some((_, grant)) = self.refence(session, &[call]).await?.first() {
                return Ok(Attempt::Made(acquired(*grant)));
            }
        }
        // In a statement of its own: the snapshot of the first may lack the record.
        let found = reads::read(session, &self.reads, name, SMALL_RESPONSE).await?;
        Ok(match found {
            // The answer to an earlier try got lost, and its fence may be too small.
            Some(mut found) if is_own(&found.record, claim.token.as_bytes()) => {
                let Some((_, grant)) = self.refence(session, &[call]).await?.pop() else {
                    return Ok(Attempt::Locked);
                };
                found.record.fence = grant.fence;
                Attempt::Made(found.into())
            }
            Some(found) => Attempt::Made(found.into()),
            None => Attempt::Made(Claimed::Vanished.into()),
        })
    }

    async fn claim_many(
        &self,
        session: &mut Session<'_>,
        calls: &[ClaimCall],
    ) -> Result<Answers<ClaimAnswer>, StoreError> {
        if let [call] = calls {
            let claimed = self.claim(session, &self.sql.claim, call).await?;
            return Ok(vec![match claimed {
                Attempt::Made(claimed) => Some(Ok(claimed)),
                Attempt::Locked => None,
            }]);
        }
        let last_removal = self.removals.last();
        let bytes = |value: fn(&Claim) -> &[u8]| -> Vec<&[u8]> {
            calls.iter().map(|call| value(&call.claim)).collect()
        };
        let durations = |value: fn(&Claim) -> Duration| -> Vec<i64> {
            let durations = calls.iter().map(|call| value(&call.claim));
            durations.map(micros).collect()
        };
        let query = session
            .query_records(&self.sql.claim_many, calls.iter().map(|call| &call.name))
            .bind(bytes(|claim| claim.operation.as_bytes()))
            .bind(bytes(|claim| claim.token.as_bytes()))
            .bind(bytes(|claim| claim.fingerprint.as_bytes()))
            .bind(durations(|claim| claim.lease))
            .bind(durations(|claim| claim.retention))
            .bind(SMALL_RESPONSE as i64);
        let rows = session.rows(query).await?;
        let mut answers =
            AnswersByToken::new(calls.iter().map(|call| *call.claim.token.as_bytes()));
        let mut refenced = Vec::new();
        for row in &rows {
            let token = column(row, "asked")?;
            match column(row, "removals")? {
                // The answer to an earlier try of this claim got lost: made singly.
                None => match found(row) {
                    Ok(found) if is_own(&found.record, token) => {}
                    found => answers.set(token, found.map(ClaimAnswer::from)),
                },
                Some(removal) if removal == last_removal => {
                    answers.set(token, grant(row).map(acquired));
                }
                Some(removal) => {
                    self.removals.set_last(removal);
                    refenced.push(token);
                }
            }
        }
        let refenced: Vec<&ClaimCall> = calls
            .iter()
            .filter(|call| refenced.contains(&call.claim.token.as_bytes().as_slice()))
            .collect();
        if !refenced.is_empty() {
            // The claims are written, so none of them may be made again.
            let grants = self.refence(session, &refenced).await;
            for (token, grant) in grants.map_err(StoreError::about_all)? {
                answers.set(&token, Ok(acquired(grant)));
            }
        }
        Ok(answers.into_answers())
    }

    /// Draws new fences for claims whose records exist. Returns the grants of those that
    /// are in progress and not locked, with their tokens.
    ///
    /// While the record exists, no other claim of its name can be granted and removed.
    async fn refence(
        &self,
        session: &mut Session<'_>,
        calls: &[&ClaimCall],
    ) -> Result<Vec<(Vec<u8>, Grant)>, StoreError> {
        let tokens = calls
            .iter()
            .map(|call| call.claim.token.as_bytes().as_slice());
        let query = session
            .query_records(&self.sql.refence, calls.iter().map(|call| &call.name))
            .bind(tokens.collect::<Vec<_>>());
        let rows = session.rows(query).await?;
        let grants = rows
            .iter()
            .map(|row| Ok((column(row, "asked")?, grant(row)?)));
        grants.collect()
    }
}

fn acquired(grant: Grant) -> ClaimAnswer {
    Claimed::Acquired(grant).into()
}

/// `removals` is read once the record exists: see [`Removals`].
///
/// The filter keeps a name with a visible record away from the sequence, and from
/// `ON CONFLICT`, which would wait for a transaction that completes the record.
/// `statement_timestamp()` is the same everywhere in the statement, so a completion
/// with an unchanged retention computes the same `expires_at`.
macro_rules! claim {
    ($from:literal) => {
        concat!(
            "
INSERT INTO {records}
    (scope, key, operation, token, fingerprint, state, attempt, takeovers, fence,
     claimed_at, lease_until, expires_at)
SELECT $1, $2, $3, $4, $5, {in_progress}, 1, 0, {next_fence},
       statement_timestamp(),
       statement_timestamp() + $6 * interval '1 microsecond',
       statement_timestamp() + $7 * interval '1 microsecond'",
            $from,
            "
WHERE NOT EXISTS (SELECT FROM {records} WHERE scope = $1 AND key = $2)
ON CONFLICT (scope, key) DO NOTHING
RETURNING operation, fence, attempt::bigint,
    (SELECT last_value FROM {removals}) AS removals"
        )
    };
}

statements! {
    claim = claim!("");

    /// Waits for another claim of the same name only while that one commits. The
    /// setting ends with the statement.
    claim_singly = claim!("
FROM (SELECT pg_catalog.set_config('lock_timeout', '20ms', true) OFFSET 0) AS patience");

    /// Returns the records that are visible, and inserts the other names. A name
    /// without a row has a record that was inserted meanwhile.
    ///
    /// `LATERAL` and `OFFSET` make the planner find records by their names. `removals`
    /// is read after each row is inserted.
    claim_many = "
WITH asked AS MATERIALIZED (
    SELECT *
    FROM unnest($1::text[], $2::text[], $3::bytea[], $4::bytea[], $5::bytea[],
                $6::bigint[], $7::bigint[])
        AS asked (scope, key, operation, token, fingerprint, lease, retention)
), found AS MATERIALIZED (
    SELECT asked.token AS asked, record.*
    FROM asked CROSS JOIN LATERAL (
        SELECT operation, fence, attempt, state, takeovers, fingerprint, token,
               claimed_at, expires_at, lease_until,
               CASE WHEN octet_length(response) <= $8 THEN response END AS response,
               octet_length(response)::bigint AS bytes
        FROM {records} AS record
        WHERE record.scope = asked.scope AND record.key = asked.key
        OFFSET 0
    ) AS record
), claimed AS (
    INSERT INTO {records} AS record
        (scope, key, operation, token, fingerprint, state, attempt, takeovers, fence,
         claimed_at, lease_until, expires_at)
    SELECT asked.scope, asked.key, asked.operation, asked.token, asked.fingerprint,
           {in_progress}, 1, 0, {next_fence},
           statement_timestamp(),
           statement_timestamp() + asked.lease * interval '1 microsecond',
           statement_timestamp() + asked.retention * interval '1 microsecond'
    FROM asked
    WHERE NOT EXISTS (SELECT FROM found WHERE found.asked = asked.token)
    ORDER BY asked.scope COLLATE \"C\", asked.key COLLATE \"C\"
    ON CONFLICT (scope, key) DO NOTHING
    RETURNING token, operation, fence, attempt,
        (SELECT last_value FROM {removals}
         WHERE record.fence > 0) AS removals
)
SELECT asked, NULL AS removals, {record}, response, bytes
FROM found, (SELECT clock_timestamp() AS now) AS clock
UNION ALL
SELECT token, removals,
       operation, fence, attempt, NULL, NULL, NULL, NULL, NULL, NULL, NULL, NULL, NULL
FROM claimed";

    /// `LATERAL` with its lock, and `ON CONFLICT`, make the planner find records by
    /// their names. No row is ever inserted.
    refence = "
WITH held AS MATERIALIZED (
    SELECT record.*
    FROM unnest($1::text[], $2::text[], $3::bytea[]) AS asked (scope, key, token)
        CROSS JOIN LATERAL (
            SELECT *
            FROM {records} AS record
            WHERE record.scope = asked.scope AND record.key = asked.key
              AND record.token = asked.token AND record.state = {in_progress}
            FOR NO KEY UPDATE SKIP LOCKED
        ) AS record
)
INSERT INTO {records} AS record
    (scope, key, operation, token, fingerprint, state, attempt, takeovers, fence,
     claimed_at, lease_until, expires_at)
SELECT scope, key, operation, token, fingerprint, state, attempt, takeovers,
    GREATEST({next_fence}, fence + 1),
    claimed_at, lease_until, expires_at
FROM held
ON CONFLICT (scope, key) DO UPDATE SET fence = EXCLUDED.fence
RETURNING token AS asked, operation, fence, attempt::bigint";
}
