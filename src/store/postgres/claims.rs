//! Claims of keys, many in one statement, which waits for no transaction that
//! completes one of them. A claim may wait for another claim of the same new name,
//! for as long as that one takes to commit.

use std::{sync::Arc, time::Duration};

use sqlx::{FromRow, Row as _, SqlStr, postgres::PgRow, query, query_as};

use super::{
    connections::Connections,
    failure,
    failures::is_lock_timeout,
    looks::{self, bound},
    members::{AnswersByToken, names},
    removals::Removals,
    session::Session,
};
use crate::store::{
    Claim, Claimed, Grant, StoreError,
    sql::batcher::{Answers, Batch},
    sql::calls::{ClaimCall, SMALL_RESPONSE},
    sql::reads::{ClaimAnswer, Found, is_own},
    sql::single::{Attempt, Single},
    sql::{GrantColumns, micros},
};

pub(super) struct Claims {
    connections: Arc<Connections>,
    removals: Removals,
}

impl Claims {
    pub(super) fn new(connections: Arc<Connections>) -> Self {
        Self {
            connections,
            removals: Removals::default(),
        }
    }
}

impl Batch for Claims {
    async fn execute(&self, calls: &[ClaimCall]) -> Result<Answers<ClaimAnswer>, StoreError> {
        self.connections
            .run(async |on| claim_many(on, calls, &self.removals).await)
            .await
    }
}

impl Single for Claims {
    type Call = ClaimCall;
    type Answer = ClaimAnswer;

    async fn attempt(&self, call: &ClaimCall) -> Result<Attempt<ClaimAnswer>, StoreError> {
        self.connections
            .run(async |on| {
                let statement = on.sql.claim_alone.clone();
                claim_one(on, statement, call, &self.removals).await
            })
            .await
    }
}

async fn claim_one(
    on: &mut Session<'_>,
    statement: SqlStr,
    call: &ClaimCall,
    removals: &Removals,
) -> Result<Attempt<ClaimAnswer>, StoreError> {
    let ClaimCall { name, claim } = call;
    let heard = removals.heard();
    let granted: Result<Option<FreshColumns>, _> = query_as(statement)
        .persistent(on.persistent)
        .bind(name.scope().as_str())
        .bind(name.key().as_str())
        .bind(claim.operation.as_bytes().as_slice())
        .bind(claim.token.as_bytes().as_slice())
        .bind(claim.fingerprint.as_bytes().as_slice())
        .bind(micros(claim.lease))
        .bind(micros(claim.retention))
        .fetch_optional(&mut *on.connection)
        .await;
    let granted = match granted {
        Err(error) if is_lock_timeout(&error) => return Ok(Attempt::Locked),
        granted => granted.map_err(failure)?,
    };
    if let Some(FreshColumns {
        grant,
        removals: removed,
    }) = granted
    {
        removals.hear(removed);
        if removed == heard {
            return Ok(Attempt::Made(acquired(grant.decode()?)));
        }
        let grant = refence(on, call).await?;
        return Ok(grant.map(|grant| grant.map_or(VANISHED, acquired)));
    }
    // A statement of its own: the snapshot of the first need not contain the
    // record that it ran into.
    let Some(mut found) = looks::read(on, name, SMALL_RESPONSE).await? else {
        return Ok(Attempt::Made(VANISHED));
    };
    // The answer to an earlier try got lost, perhaps before that one knew whether
    // its fence would do.
    if let Found::Whole(record) = &mut found
        && is_own(record, claim.token.as_bytes())
    {
        match refence(on, call).await? {
            Attempt::Made(Some(grant)) => record.fence = grant.fence,
            Attempt::Made(None) => return Ok(Attempt::Made(VANISHED)),
            Attempt::Locked => return Ok(Attempt::Locked),
        }
    }
    Ok(Attempt::Made(found.into()))
}

fn acquired(grant: Grant) -> ClaimAnswer {
    ClaimAnswer::Claimed(Claimed::Acquired(grant))
}

/// Gives a claim a fence that was drawn after its record was there; `None` if it
/// is in progress no more.
///
/// See [`Removals`]; with the record in place, no other claim of its name can
/// come and go.
async fn refence(
    on: &mut Session<'_>,
    ClaimCall { name, claim }: &ClaimCall,
) -> Result<Attempt<Option<Grant>>, StoreError> {
    let granted: Option<GrantColumns> = query_as(on.sql.refence.clone())
        .persistent(on.persistent)
        .bind(name.scope().as_str())
        .bind(name.key().as_str())
        .bind(claim.token.as_bytes().as_slice())
        .fetch_optional(&mut *on.connection)
        .await
        .map_err(failure)?;
    if let Some(granted) = granted {
        return Ok(Attempt::Made(Some(granted.decode()?)));
    }
    Ok(match looks::read(on, name, SMALL_RESPONSE).await? {
        Some(Found::Whole(record)) if is_own(&record, claim.token.as_bytes()) => Attempt::Locked,
        _ => Attempt::Made(None),
    })
}

async fn claim_many(
    on: &mut Session<'_>,
    calls: &[ClaimCall],
    removals: &Removals,
) -> Result<Answers<ClaimAnswer>, StoreError> {
    if let [call] = calls {
        let claimed = claim_one(on, on.sql.claim.clone(), call, removals).await?;
        return Ok(vec![match claimed {
            Attempt::Made(claimed) => Some(Ok(claimed)),
            Attempt::Locked => None,
        }]);
    }
    let heard = removals.heard();
    let [scopes, keys] = names(calls.iter().map(|call| &call.name));
    let column = |value: fn(&Claim) -> &[u8]| -> Vec<&[u8]> {
        calls.iter().map(|call| value(&call.claim)).collect()
    };
    let time = |value: fn(&Claim) -> Duration| -> Vec<i64> {
        calls
            .iter()
            .map(|call| micros(value(&call.claim)))
            .collect()
    };
    let rows = query(on.sql.claim_many.clone())
        .persistent(on.persistent)
        .bind(scopes)
        .bind(keys)
        .bind(column(|claim| claim.operation.as_bytes()))
        .bind(column(|claim| claim.token.as_bytes()))
        .bind(column(|claim| claim.fingerprint.as_bytes()))
        .bind(time(|claim| claim.lease))
        .bind(time(|claim| claim.retention))
        .bind(bound(SMALL_RESPONSE))
        .fetch_all(&mut *on.connection)
        .await
        .map_err(failure)?;
    let mut told = AnswersByToken::new(calls.iter().map(|call| *call.claim.token.as_bytes()));
    let mut doubtful = Vec::new();
    for row in &rows {
        let asked = row.try_get("asked").map_err(failure)?;
        match row.try_get("removals").map_err(failure)? {
            // An own one is asked for alone.
            None => match looks::record(row) {
                Ok(Found::Whole(record)) if is_own(&record, asked) => {}
                found => told.answer(asked, found.map(ClaimAnswer::from)),
            },
            Some(removed) if removed == heard => {
                told.answer(asked, grant(row).map(acquired));
            }
            Some(removed) => {
                removals.hear(removed);
                doubtful.push(asked);
            }
        }
    }
    if !doubtful.is_empty() {
        refence_many(on, calls, &doubtful, &mut told).await?;
    }
    Ok(told.answers)
}

/// As [`refence`], of many. Their records are there already: whoever is not told
/// a fence is in doubt.
async fn refence_many(
    on: &mut Session<'_>,
    calls: &[ClaimCall],
    doubtful: &[&[u8]],
    told: &mut AnswersByToken<ClaimAnswer>,
) -> Result<(), StoreError> {
    let doubtful: Vec<&ClaimCall> = calls
        .iter()
        .filter(|call| doubtful.contains(&call.claim.token.as_bytes().as_slice()))
        .collect();
    let [scopes, keys] = names(doubtful.iter().map(|call| &call.name));
    let tokens: Vec<&[u8]> = doubtful
        .iter()
        .map(|call| call.claim.token.as_bytes().as_slice())
        .collect();
    let rows = query(on.sql.refence_many.clone())
        .persistent(on.persistent)
        .bind(scopes)
        .bind(keys)
        .bind(&tokens)
        .fetch_all(&mut *on.connection)
        .await
        .map_err(|error| failure(error).about_all())?;
    for token in tokens {
        told.answer(token, Err(StoreError::timed_out()));
    }
    for row in &rows {
        let asked = row.try_get("asked").map_err(failure)?;
        told.answer(asked, grant(row).map(acquired));
    }
    Ok(())
}

const VANISHED: ClaimAnswer = ClaimAnswer::Claimed(Claimed::Vanished);

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

fn grant(row: &PgRow) -> Result<Grant, StoreError> {
    GrantColumns::from_row(row).map_err(failure)?.decode()
}

/// `removals` is read once the record is in place: see [`Removals`]. The filter
/// keeps a name with a visible record away from `ON CONFLICT`, which would wait
/// for a transaction that is about to complete it, and from the sequence.
/// The statement's time is one, so that a completion with the same retention
/// computes the very same `expires_at`.
macro_rules! claim {
    ($from:literal) => {
        concat!(
            "
INSERT INTO {records}
    (scope, key, operation, token, fingerprint, state, attempt, takeovers, fence,
     claimed_at, lease_until, expires_at)
SELECT $1, $2, $3, $4, $5, 1, 1, 0, {next_fence},
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

pub(super) const CLAIM: &str = claim!("");

/// As [`CLAIM`], but waits hardly longer for another claim of the same name than
/// that one takes to commit. The setting ends with the statement.
pub(super) const CLAIM_ALONE: &str = claim!(
    "
FROM (SELECT pg_catalog.set_config('lock_timeout', '20ms', true) OFFSET 0) AS patience"
);

pub(super) const REFENCE: &str = "
UPDATE {records}
SET fence = GREATEST({next_fence}, fence + 1)
WHERE scope = $1 AND key = $2 AND token = $3 AND state = 1
  AND EXISTS (
      SELECT FROM {records}
      WHERE scope = $1 AND key = $2
      FOR NO KEY UPDATE SKIP LOCKED)
RETURNING operation, fence, attempt::bigint";

/// As [`CLAIM`], of many, and with what it runs into: records that can be seen are
/// answered with, and only the other names are inserted. A name whose record is
/// neither seen nor inserted has one that came meanwhile.
///
/// `LATERAL` and `OFFSET` lead to the records by their names, whatever the
/// planner thinks of the size of the table. `removals` is read after each row is
/// in place.
pub(super) const CLAIM_MANY: &str = "
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
    SELECT asked.scope, asked.key, asked.operation, asked.token, asked.fingerprint, 1, 1, 0,
           {next_fence},
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
SELECT asked, NULL AS removals,
       operation, fence, attempt::bigint, state::bigint, takeovers::bigint, fingerprint, token,
       (EXTRACT(EPOCH FROM clock.now - claimed_at) * 1000000)::bigint AS age,
       (EXTRACT(EPOCH FROM expires_at - clock.now) * 1000000)::bigint AS expires_in,
       (EXTRACT(EPOCH FROM lease_until - clock.now) * 1000000)::bigint AS lease_left,
       response, bytes
FROM found, (SELECT clock_timestamp() AS now) AS clock
UNION ALL
SELECT token, removals,
       operation, fence, attempt, NULL, NULL, NULL, NULL, NULL, NULL, NULL, NULL, NULL
FROM claimed";

/// `LATERAL` with its lock, and `ON CONFLICT`, lead to the records by their names,
/// whatever the planner thinks of the size of the table: nothing is ever inserted.
pub(super) const REFENCE_MANY: &str = "
WITH held AS MATERIALIZED (
    SELECT record.*
    FROM unnest($1::text[], $2::text[], $3::bytea[]) AS asked (scope, key, token)
        CROSS JOIN LATERAL (
            SELECT *
            FROM {records} AS record
            WHERE record.scope = asked.scope AND record.key = asked.key
              AND record.token = asked.token AND record.state = 1
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
