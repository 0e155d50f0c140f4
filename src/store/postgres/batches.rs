//! Calls of many records in one statement, which waits for no transaction that
//! completes one of them. A claim may wait for another claim of the same new name,
//! for as long as that one takes to commit.

use std::{collections::HashMap, sync::Arc, time::Duration};

use sqlx::{FromRow as _, Row as _, postgres::PgRow, query};

use super::{connections::Connections, failure, removals::Removals, session::Session, statements};
use crate::{
    RecordName,
    store::{
        Claim, Claimed, Grant, Record, Settlement, StoreError, Witness,
        batch::{Batch, Told},
        call::{ClaimCall, Goal, SettleCall},
        sql::{self, GrantColumns, RecordColumns, micros},
    },
};

/// Claims of keys.
pub(super) struct Claims {
    connections: Arc<Connections>,
    removals: Arc<Removals>,
}

/// What ends or prolongs a claim, by its token.
pub(super) struct Settlements(pub(super) Arc<Connections>);

/// Looks at records.
pub(super) struct Looks(pub(super) Arc<Connections>);

impl Claims {
    pub(super) fn new(connections: Arc<Connections>) -> Self {
        let removals = Arc::default();
        Self {
            connections,
            removals,
        }
    }
}

impl Batch for Claims {
    type Call = ClaimCall;
    type Answer = Claimed;

    async fn together(&self, calls: Arc<Vec<ClaimCall>>) -> Result<Vec<Told<Claimed>>, StoreError> {
        let removals = Arc::clone(&self.removals);
        self.connections
            .run(move |mut on| Box::pin(async move { claim(&mut on, &calls, &removals).await }))
            .await
    }

    async fn alone(&self, ClaimCall { name, claim }: ClaimCall) -> Result<Claimed, StoreError> {
        let removals = Arc::clone(&self.removals);
        self.connections
            .run(move |mut on| {
                Box::pin(async move { statements::claim(&mut on, &name, &claim, &removals).await })
            })
            .await
    }
}

impl Batch for Settlements {
    type Call = SettleCall;
    type Answer = Settlement;

    async fn together(
        &self,
        calls: Arc<Vec<SettleCall>>,
    ) -> Result<Vec<Told<Settlement>>, StoreError> {
        self.0
            .run(move |mut on| Box::pin(async move { settle(&mut on, &calls).await }))
            .await
    }

    async fn alone(&self, call: SettleCall) -> Result<Settlement, StoreError> {
        let SettleCall { name, token, goal } = call;
        self.0
            .run(move |mut on| {
                Box::pin(async move {
                    let on = &mut on;
                    match goal {
                        Goal::Renewed { lease } => statements::renew(on, &name, token, lease).await,
                        Goal::Completed(completion) => {
                            statements::complete(on, &name, token, &completion).await
                        }
                        Goal::Released(release) => {
                            statements::release(on, &name, token, release).await
                        }
                        Goal::Unknown { retention } => {
                            let owner = Witness::Owner(token);
                            statements::mark_unknown(on, &name, owner, retention).await
                        }
                    }
                })
            })
            .await
    }
}

impl Batch for Looks {
    type Call = RecordName;
    type Answer = Option<Record>;

    async fn together(
        &self,
        calls: Arc<Vec<RecordName>>,
    ) -> Result<Vec<Told<Option<Record>>>, StoreError> {
        self.0
            .run(move |mut on| Box::pin(async move { read(&mut on, &calls).await }))
            .await
    }

    async fn alone(&self, name: RecordName) -> Result<Option<Record>, StoreError> {
        self.0
            .run(move |mut on| Box::pin(async move { statements::read(&mut on, &name).await }))
            .await
    }
}

async fn claim(
    on: &mut Session<'_>,
    calls: &[ClaimCall],
    removals: &Removals,
) -> Result<Vec<Told<Claimed>>, StoreError> {
    if let [ClaimCall { name, claim }] = calls {
        let claimed = statements::claim(on, name, claim, removals).await?;
        return Ok(vec![Told::Answer(Ok(claimed))]);
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
    let rows = query(CLAIM)
        .persistent(on.persistent)
        .bind(scopes)
        .bind(keys)
        .bind(column(|claim| claim.operation.as_bytes()))
        .bind(column(|claim| claim.token.as_bytes()))
        .bind(column(|claim| claim.fingerprint.as_bytes()))
        .bind(time(|claim| claim.lease))
        .bind(time(|claim| claim.retention))
        .fetch_all(&mut *on.connection)
        .await
        .map_err(failure)?;
    let mut told = Answers::to(calls.iter().map(|call| *call.claim.token.as_bytes()));
    let mut doubtful = Vec::new();
    for row in &rows {
        let asked = row.try_get("asked").map_err(failure)?;
        match row.try_get("removals").map_err(failure)? {
            None => told.answer(asked, record(row).map(Claimed::Occupied)),
            Some(removed) if removed == heard => {
                told.answer(asked, grant(row).map(Claimed::Acquired));
            }
            Some(removed) => {
                removals.hear(removed);
                doubtful.push(asked);
            }
        }
    }
    if !doubtful.is_empty() {
        refence(on, calls, &doubtful, &mut told).await?;
    }
    Ok(told.told)
}

/// Gives new claims fences that were drawn after their records were there: see
/// [`statements::claim`].
async fn refence(
    on: &mut Session<'_>,
    calls: &[ClaimCall],
    doubtful: &[&[u8]],
    told: &mut Answers<Claimed>,
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
    let rows = query(REFENCE)
        .persistent(on.persistent)
        .bind(scopes)
        .bind(keys)
        .bind(tokens)
        .fetch_all(&mut *on.connection)
        .await
        .map_err(failure)?;
    for row in &rows {
        let asked = row.try_get("asked").map_err(failure)?;
        told.answer(asked, grant(row).map(Claimed::Acquired));
    }
    Ok(())
}

fn grant(row: &PgRow) -> Result<Grant, StoreError> {
    GrantColumns::from_row(row).map_err(failure)?.decode()
}

fn record(row: &PgRow) -> Result<Record, StoreError> {
    RecordColumns::from_row(row).map_err(failure)?.decode()
}

async fn settle(
    on: &mut Session<'_>,
    calls: &[SettleCall],
) -> Result<Vec<Told<Settlement>>, StoreError> {
    let mut told = Answers::to(calls.iter().map(|call| *call.token.as_bytes()));
    if let [call] = calls {
        if settle_one(on, call).await? {
            told.answer(call.token.as_bytes(), Ok(Settlement::Applied));
        }
    } else {
        for row in settle_many(on, calls).await? {
            let asked = row.try_get("asked").map_err(failure)?;
            told.answer(asked, Ok(Settlement::Applied));
        }
    }
    let left: Vec<&SettleCall> = calls
        .iter()
        .zip(&told.told)
        .filter(|(_, told)| matches!(told, Told::AskAlone))
        .map(|(call, _)| call)
        .collect();
    if !left.is_empty() {
        look_after(on, &left, &mut told).await?;
    }
    Ok(told.told)
}

async fn settle_many(on: &mut Session<'_>, calls: &[SettleCall]) -> Result<Vec<PgRow>, StoreError> {
    let [scopes, keys] = names(calls.iter().map(|call| &call.name));
    let goals: Vec<i64> = calls.iter().map(|call| call.goal.state()).collect();
    let responses: Vec<Option<&[u8]>> = calls.iter().map(|call| call.goal.response()).collect();
    let (times, at_least): (Vec<i64>, Vec<i64>) =
        calls.iter().map(|call| call.goal.times()).unzip();
    query(SETTLE)
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

/// Whether the record was there, as it has to be and not locked.
async fn settle_one(
    on: &mut Session<'_>,
    SettleCall { name, token, goal }: &SettleCall,
) -> Result<bool, StoreError> {
    let (time, at_least) = goal.times();
    let done = query(SETTLE_ONE)
        .persistent(on.persistent)
        .bind(name.scope().as_str())
        .bind(name.key().as_str())
        .bind(token.as_bytes().as_slice())
        .bind(goal.state())
        .bind(goal.response())
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
    left: &[&SettleCall],
    told: &mut Answers<Settlement>,
) -> Result<(), StoreError> {
    let [scopes, keys] = names(left.iter().map(|call| &call.name));
    let rows = query(STATES)
        .persistent(on.persistent)
        .bind(scopes)
        .bind(keys)
        .bind(tokens(left.iter().copied()))
        .fetch_all(&mut *on.connection)
        .await
        .map_err(failure)?;
    let mut states: HashMap<&[u8], i64> = HashMap::new();
    for row in &rows {
        let asked = row.try_get("asked").map_err(failure)?;
        states.insert(asked, row.try_get("state").map_err(failure)?);
    }
    for call in left {
        let token = call.token.as_bytes();
        let state = states.get(token.as_slice()).copied();
        if !state.is_some_and(|state| call.goal.is_open_in(state)) {
            told.answer(token, sql::repeated(state, call.goal.reached()));
        }
    }
    Ok(())
}

fn tokens<'c>(calls: impl Iterator<Item = &'c SettleCall>) -> Vec<&'c [u8]> {
    calls.map(|call| call.token.as_bytes().as_slice()).collect()
}

async fn read(
    on: &mut Session<'_>,
    calls: &[RecordName],
) -> Result<Vec<Told<Option<Record>>>, StoreError> {
    if let [name] = calls {
        let record = statements::read(on, name).await?;
        return Ok(vec![Told::Answer(Ok(record))]);
    }
    let [scopes, keys] = names(calls.iter());
    let rows = query(READ)
        .persistent(on.persistent)
        .bind(scopes)
        .bind(keys)
        .fetch_all(&mut *on.connection)
        .await
        .map_err(failure)?;
    let mut told: Vec<_> = calls.iter().map(|_| Told::Answer(Ok(None))).collect();
    for row in &rows {
        let place: i64 = row.try_get("place").map_err(failure)?;
        let place = usize::try_from(place - 1).ok();
        if let Some(told) = place.and_then(|place| told.get_mut(place)) {
            *told = Told::Answer(record(row).map(Some));
        }
    }
    Ok(told)
}

/// What the rows of a batch say to each of its members, by their tokens. Who is
/// in none of them has to ask alone.
struct Answers<A> {
    places: HashMap<[u8; 16], usize>,
    told: Vec<Told<A>>,
}

impl<A> Answers<A> {
    fn to(tokens: impl Iterator<Item = [u8; 16]>) -> Self {
        let places: Vec<_> = tokens.zip(0..).collect();
        let told = places.iter().map(|_| Told::AskAlone).collect();
        let places = places.into_iter().collect();
        Self { places, told }
    }

    fn answer(&mut self, token: &[u8], answer: Result<A, StoreError>) {
        if let Some(place) = self.places.get(token) {
            self.told[*place] = Told::Answer(answer);
        }
    }
}

fn names<'n>(names: impl Iterator<Item = &'n RecordName>) -> [Vec<&'n str>; 2] {
    let (scopes, keys) = names
        .map(|name| (name.scope().as_str(), name.key().as_str()))
        .unzip();
    [scopes, keys]
}

/// As the claim of one record, of which two statements are one here: records
/// that can be seen are answered with, and only the other names are inserted. A
/// name whose record is neither seen nor inserted has one that came meanwhile.
///
/// `LATERAL` and `OFFSET` lead to the records by their names, whatever the
/// planner thinks of the size of the table. `removals` is read after each row is
/// in place.
const CLAIM: &str = "
WITH asked AS MATERIALIZED (
    SELECT *
    FROM unnest($1::text[], $2::text[], $3::bytea[], $4::bytea[], $5::bytea[],
                $6::bigint[], $7::bigint[])
        AS asked (scope, key, operation, token, fingerprint, lease, retention)
), found AS MATERIALIZED (
    SELECT asked.token AS asked, record.*
    FROM asked CROSS JOIN LATERAL (
        SELECT operation, fence, attempt, state, takeovers, fingerprint, token,
               claimed_at, expires_at, lease_until, response
        FROM idempotency_records AS record
        WHERE record.scope = asked.scope AND record.key = asked.key
        OFFSET 0
    ) AS record
), claimed AS (
    INSERT INTO idempotency_records
        (scope, key, operation, token, fingerprint, state, attempt, takeovers, fence,
         claimed_at, lease_until, expires_at)
    SELECT asked.scope, asked.key, asked.operation, asked.token, asked.fingerprint, 1, 1, 0,
           nextval('idempotency_fences'),
           statement_timestamp(),
           statement_timestamp() + asked.lease * interval '1 microsecond',
           statement_timestamp() + asked.retention * interval '1 microsecond'
    FROM asked
    WHERE NOT EXISTS (SELECT FROM found WHERE found.asked = asked.token)
    ORDER BY asked.scope COLLATE \"C\", asked.key COLLATE \"C\"
    ON CONFLICT (scope, key) DO NOTHING
    RETURNING token, operation, fence, attempt,
        (SELECT last_value FROM idempotency_removals
         WHERE idempotency_records.fence > 0) AS removals
)
SELECT asked, NULL AS removals,
       operation, fence, attempt::bigint, state::bigint, takeovers::bigint, fingerprint, token,
       (EXTRACT(EPOCH FROM clock.now - claimed_at) * 1000000)::bigint AS age,
       (EXTRACT(EPOCH FROM expires_at - clock.now) * 1000000)::bigint AS expires_in,
       (EXTRACT(EPOCH FROM lease_until - clock.now) * 1000000)::bigint AS lease_left,
       response
FROM found, (SELECT clock_timestamp() AS now) AS clock
UNION ALL
SELECT token, removals,
       operation, fence, attempt, NULL, NULL, NULL, NULL, NULL, NULL, NULL, NULL
FROM claimed";

const REFENCE: &str = "
UPDATE idempotency_records AS record
SET fence = GREATEST(nextval('idempotency_fences'), record.fence + 1)
FROM unnest($1::text[], $2::text[], $3::bytea[]) AS asked (scope, key, token)
WHERE record.scope = asked.scope AND record.key = asked.key
  AND record.token = asked.token AND record.state = 1
RETURNING asked.token AS asked, record.operation, record.fence, record.attempt::bigint";

/// The goal is the state that the record is to have. A record that is locked is
/// skipped, and the guards stand twice, since it may change until it is locked.
const SETTLE: &str = "
WITH held AS MATERIALIZED (
    SELECT asked.*
    FROM unnest($1::text[], $2::text[], $3::bytea[], $4::bigint[], $5::bytea[],
                $6::bigint[], $7::bigint[])
            AS asked (scope, key, token, goal, response, time, at_least),
        idempotency_records AS record
    WHERE record.scope = asked.scope AND record.key = asked.key
      AND record.token = asked.token
      AND (record.state = 1 OR (record.state = 3 AND asked.goal = 2))
    FOR NO KEY UPDATE OF record SKIP LOCKED
)
UPDATE idempotency_records AS record
SET state = CASE WHEN held.goal = 5 AND record.takeovers > 0 THEN 4 ELSE held.goal END,
    response = held.response,
    lease_until = CASE held.goal
        WHEN 1 THEN statement_timestamp() + held.time * interval '1 microsecond'
        ELSE record.lease_until
        END,
    expires_at = CASE held.goal
        WHEN 2 THEN GREATEST(
            record.claimed_at + held.time * interval '1 microsecond',
            statement_timestamp() + held.at_least * interval '1 microsecond')
        WHEN 3 THEN statement_timestamp() + held.time * interval '1 microsecond'
        ELSE record.expires_at
        END
FROM held
WHERE record.scope = held.scope AND record.key = held.key
  AND record.token = held.token
  AND (record.state = 1 OR (record.state = 3 AND held.goal = 2))
RETURNING held.token AS asked";

/// As [`SETTLE`], of one record.
const SETTLE_ONE: &str = "
UPDATE idempotency_records
SET state = CASE WHEN $4 = 5 AND takeovers > 0 THEN 4 ELSE $4 END,
    response = $5,
    lease_until = CASE $4
        WHEN 1 THEN statement_timestamp() + $6 * interval '1 microsecond'
        ELSE lease_until
        END,
    expires_at = CASE $4
        WHEN 2 THEN GREATEST(
            claimed_at + $6 * interval '1 microsecond',
            statement_timestamp() + $7 * interval '1 microsecond')
        WHEN 3 THEN statement_timestamp() + $6 * interval '1 microsecond'
        ELSE expires_at
        END
WHERE scope = $1 AND key = $2 AND token = $3
  AND (state = 1 OR (state = 3 AND $4 = 2))
  AND EXISTS (
      SELECT FROM idempotency_records
      WHERE scope = $1 AND key = $2
      FOR NO KEY UPDATE SKIP LOCKED)";

const STATES: &str = "
SELECT asked.token AS asked, record.state
FROM unnest($1::text[], $2::text[], $3::bytea[]) AS asked (scope, key, token)
    CROSS JOIN LATERAL (
        SELECT state::bigint
        FROM idempotency_records AS record
        WHERE record.scope = asked.scope AND record.key = asked.key
          AND record.token = asked.token
        OFFSET 0
    ) AS record";

const READ: &str = "
SELECT asked.place, record.*
FROM unnest($1::text[], $2::text[]) WITH ORDINALITY AS asked (scope, key, place)
    CROSS JOIN LATERAL (
        SELECT operation, fence, attempt::bigint, state::bigint, takeovers::bigint,
               fingerprint, token,
               (EXTRACT(EPOCH FROM clock.now - claimed_at) * 1000000)::bigint AS age,
               (EXTRACT(EPOCH FROM expires_at - clock.now) * 1000000)::bigint AS expires_in,
               (EXTRACT(EPOCH FROM lease_until - clock.now) * 1000000)::bigint AS lease_left,
               response
        FROM idempotency_records AS record, (SELECT clock_timestamp() AS now) AS clock
        WHERE record.scope = asked.scope AND record.key = asked.key
        OFFSET 0
    ) AS record";
