//! Claims of names that may have no record, many in one statement.
//!
//! No statement here waits for a transaction that completes a record. A claim may
//! wait for another claim of the same new name until that one is committed.

use std::{sync::Arc, time::Duration};

use sqlx::SqlStr;

use super::{
    answers::AnswersByToken,
    engine::PostgresEngine,
    error::{failure, is_lock_timeout},
    parameters::micros,
    pool::Pool,
    reads,
    rows::ClaimRows,
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
    /// On Citus.
    rows: Option<ClaimRows>,
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
            rows: (schema.engine == PostgresEngine::Citus).then(|| ClaimRows::new(schema)),
        }
    }

    async fn claim(
        &self,
        session: &mut Session<'_>,
        statement: &SqlStr,
        call: &ClaimCall,
    ) -> Result<Attempt<ClaimAnswer>, StoreError> {
        let ClaimCall { name, claim } = call;
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
            return Ok(Attempt::Made(acquired(grant(&row)?)));
        }
        // In a statement of its own: the snapshot of the first may lack the record.
        let found = reads::read(session, &self.reads, name, SMALL_RESPONSE).await?;
        Ok(match found {
            // The answer to an earlier try got lost.
            Some(mut found) if is_own(&found.record, claim.token.as_bytes()) => {
                let granted = reads::grant_again(session, &self.reads, name, claim.token);
                let Some(grant) = granted.await? else {
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
        let mut answers =
            AnswersByToken::new(calls.iter().map(|call| *call.claim.token.as_bytes()));
        if let Some(rows) = &self.rows {
            let granted = rows.query(session, calls);
            for row in &session.rows(granted).await? {
                answers.set(column(row, "token")?, grant(row).map(acquired));
            }
            // The others have a record. They are made singly.
            return Ok(answers.into_answers());
        }
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
        for row in &rows {
            let token = column(row, "asked")?;
            match column::<Option<i64>>(row, "state")? {
                // The answer to an earlier try of this claim got lost: made singly.
                Some(_) => match found(row) {
                    Ok(found) if is_own(&found.record, token) => {}
                    found => answers.set(token, found.map(ClaimAnswer::from)),
                },
                None => answers.set(token, grant(row).map(acquired)),
            }
        }
        Ok(answers.into_answers())
    }
}

fn acquired(grant: Grant) -> ClaimAnswer {
    Claimed::Acquired(grant).into()
}

macro_rules! claim {
    ($patience:literal) => {
        concat!(
            "
INSERT INTO {records}
    (scope, key, operation, token, fingerprint, state, attempt, takeovers, fence,
     claimed_at, lease_until, expires_at)
SELECT $1, $2, $3, $4, $5, {in_progress}, 1, 0, clock.now, clock.now, clock.now + $6,
       clock.now + $7
FROM {clock}",
            $patience,
            "{absent}
ON CONFLICT (scope, key) DO NOTHING
RETURNING operation, fence, attempt::bigint"
        )
    };
}

/// Citus sends one row of VALUES to its node at once, and plans a SELECT first.
const CLAIM_VALUES: &str = "
INSERT INTO {records}
    (scope, key, operation, token, fingerprint, state, attempt, takeovers, fence,
     claimed_at, lease_until, expires_at)
VALUES ($1, $2, $3, $4, $5, {in_progress}, 1, 0, {now}, {now}, {now} + $6, {now} + $7)
ON CONFLICT (scope, key) DO NOTHING
RETURNING operation, fence, attempt::bigint";

statements! {
    claim = claim!(""), CLAIM_VALUES;

    /// Waits for another claim of the same name only while that one commits. The
    /// setting ends with the statement.
    claim_singly = claim!(",
    (SELECT pg_catalog.set_config('lock_timeout', '20ms', true) OFFSET 0) AS patience");

    /// Returns the records that are visible, and inserts the other names. A name
    /// without a row has a record that was inserted meanwhile.
    ///
    /// `LATERAL` and `OFFSET` make the planner find records by their names.
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
           {in_progress}, 1, 0, clock.now, clock.now, clock.now + asked.lease,
           clock.now + asked.retention
    FROM asked, {clock}
    WHERE NOT EXISTS (SELECT FROM found WHERE found.asked = asked.token)
    ORDER BY asked.scope COLLATE \"C\", asked.key COLLATE \"C\"
    ON CONFLICT (scope, key) DO NOTHING
    RETURNING token, operation, fence, attempt
)
SELECT asked, {record}, response, bytes
FROM found, {clock}
UNION ALL
SELECT token, operation, fence, attempt, NULL, NULL, NULL, NULL, NULL, NULL, NULL, NULL, NULL
FROM claimed";
}
