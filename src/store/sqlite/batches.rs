//! Calls of many records in one transaction, which costs one flush of the file.

use std::collections::HashMap;

use serde::Serialize;
use sqlx::{
    FromRow as _, Row as _, SqliteConnection, SqlitePool, query, query_scalar, sqlite::SqliteRow,
};

use super::{failure, statements, write};
use crate::{
    RecordName,
    store::{
        Claimed, Grant, MarkedBy, StoreError, Transitioned,
        sql::batcher::{Answers, Batch},
        sql::calls::{Call, ClaimCall, Identity, OwnerTransition, ReadCall, TransitionCall},
        sql::reads::{ClaimAnswer, Found},
        sql::single::{Attempt, Single},
        sql::{GrantColumns, RecordColumns, micros},
    },
};

/// Calls that write.
pub(super) struct Writes(pub(super) SqlitePool);

/// Looks at records.
pub(super) struct Looks(pub(super) SqlitePool);

pub(super) enum WriteCall {
    Claim(ClaimCall),
    Transition(TransitionCall),
}

#[derive(Clone)]
#[expect(
    clippy::large_enum_variant,
    reason = "a box for each claim costs more than the room of a few settlements"
)]
pub(super) enum Written {
    Claimed(ClaimAnswer),
    Transitioned(Transitioned),
}

impl Call for WriteCall {
    fn name(&self) -> &RecordName {
        match self {
            Self::Claim(call) => call.name(),
            Self::Transition(call) => call.name(),
        }
    }

    fn identity(&self) -> Option<Identity> {
        match self {
            Self::Claim(_) => None,
            Self::Transition(call) => call.identity(),
        }
    }

    fn bytes(&self) -> usize {
        match self {
            Self::Claim(call) => call.bytes(),
            Self::Transition(call) => call.bytes(),
        }
    }

    fn is_droppable(&self) -> bool {
        match self {
            Self::Claim(call) => call.is_droppable(),
            Self::Transition(call) => call.is_droppable(),
        }
    }
}

impl Batch for Writes {
    async fn execute(&self, calls: &[WriteCall]) -> Result<Answers<Written>, StoreError> {
        write(&self.0, async |on| write_all(on, calls).await).await
    }
}

impl Single for Writes {
    type Call = WriteCall;
    type Answer = Written;

    /// Waits for the file's only lock as every other write does.
    async fn attempt(&self, call: &WriteCall) -> Result<Attempt<Written>, StoreError> {
        let written = write(&self.0, async |on| write_one(on, call).await);
        written.await.map(Attempt::Made)
    }
}

impl Batch for Looks {
    async fn execute(&self, calls: &[ReadCall]) -> Result<Answers<Option<Found>>, StoreError> {
        let mut connection = self.0.acquire().await.map_err(failure)?;
        read(&mut connection, calls).await
    }
}

impl Single for Looks {
    type Call = ReadCall;
    type Answer = Option<Found>;

    async fn attempt(&self, call: &ReadCall) -> Result<Attempt<Option<Found>>, StoreError> {
        let mut connection = self.0.acquire().await.map_err(failure)?;
        let found = statements::read(&mut connection, &call.name, call.max_response).await?;
        Ok(Attempt::Made(found))
    }
}

async fn write_one(on: &mut SqliteConnection, call: &WriteCall) -> Result<Written, StoreError> {
    match call {
        WriteCall::Claim(ClaimCall { name, claim }) => statements::claim(on, name, claim)
            .await
            .map(Written::Claimed),
        WriteCall::Transition(TransitionCall {
            name,
            token,
            transition,
        }) => match transition {
            OwnerTransition::Renew { lease } => statements::renew(on, name, *token, *lease).await,
            OwnerTransition::Complete(completion) => {
                statements::complete(on, name, *token, completion).await
            }
            OwnerTransition::Release(release) => {
                statements::release(on, name, *token, *release).await
            }
            OwnerTransition::MarkUnknown { retention } => {
                let owner = MarkedBy::Owner(*token);
                statements::mark_unknown(on, name, owner, *retention).await
            }
        }
        .map(Written::Transitioned),
    }
}

async fn write_all(
    on: &mut SqliteConnection,
    calls: &[WriteCall],
) -> Result<Answers<Written>, StoreError> {
    if let [call] = calls {
        return Ok(vec![Some(Ok(write_one(on, call).await?))]);
    }
    let (mut claims, mut settlements) = (Vec::new(), Vec::new());
    let mut places = HashMap::new();
    for (place, call) in calls.iter().enumerate() {
        if !can_be_spelled(call.name()) {
            continue;
        }
        match call {
            WriteCall::Claim(call) => {
                places.insert(*call.claim.token.as_bytes(), place);
                claims.push(claiming(call));
            }
            WriteCall::Transition(call) => {
                places.insert(*call.token.as_bytes(), place);
                settlements.push(settling(call));
            }
        }
    }
    let mut answers: Answers<Written> = calls.iter().map(|_| None).collect();
    let mut answer = |token: &[u8], answer| {
        if let Some(place) = places.get(token) {
            answers[*place] = Some(answer);
        }
    };
    if !claims.is_empty() {
        for row in claim(on, &claims).await? {
            let grant = grant(&row).map(Claimed::Acquired);
            let grant = grant.map(|claimed| Written::Claimed(ClaimAnswer::Claimed(claimed)));
            answer(row.try_get("token").map_err(failure)?, grant);
        }
    }
    if !settlements.is_empty() {
        let asked = spelled(&settlements)?;
        let applied: Vec<Vec<u8>> = query_scalar(SETTLE)
            .bind(asked)
            .fetch_all(on)
            .await
            .map_err(failure)?;
        for token in applied {
            answer(&token, Ok(Written::Transitioned(Transitioned::Applied)));
        }
    }
    Ok(answers)
}

async fn claim(
    on: &mut SqliteConnection,
    claims: &[Claiming<'_>],
) -> Result<Vec<SqliteRow>, StoreError> {
    let rows = query(CLAIM)
        .bind(spelled(claims)?)
        .fetch_all(&mut *on)
        .await
        .map_err(failure)?;
    let last = rows.iter().map(|row| row.try_get::<i64, _>("fence"));
    let last = last
        .collect::<Result<Vec<_>, _>>()
        .map_err(failure)?
        .into_iter()
        .max();
    if let Some(last) = last {
        statements::count_fence(on, last).await?;
    }
    Ok(rows)
}

async fn read(
    on: &mut SqliteConnection,
    calls: &[ReadCall],
) -> Result<Answers<Option<Found>>, StoreError> {
    if let [ReadCall { name, max_response }] = calls {
        let found = statements::read(on, name, *max_response).await;
        return Ok(vec![Some(found)]);
    }
    if !calls.iter().all(|call| can_be_spelled(&call.name)) {
        return Ok(calls.iter().map(|_| None).collect());
    }
    let asked: Vec<_> = calls
        .iter()
        .map(|ReadCall { name, max_response }| {
            (name.scope().as_str(), name.key().as_str(), max_response)
        })
        .collect();
    let rows = query(READ)
        .bind(spelled(&asked)?)
        .fetch_all(on)
        .await
        .map_err(failure)?;
    let mut answers: Vec<_> = calls.iter().map(|_| Some(Ok(None))).collect();
    for row in &rows {
        let place: i64 = row.try_get("place").map_err(failure)?;
        let place = usize::try_from(place).ok();
        if let Some(answer) = place.and_then(|place| answers.get_mut(place)) {
            *answer = Some(record(row).map(Some));
        }
    }
    Ok(answers)
}

fn grant(row: &SqliteRow) -> Result<Grant, StoreError> {
    GrantColumns::from_row(row).map_err(failure)?.decode()
}

fn record(row: &SqliteRow) -> Result<Found, StoreError> {
    RecordColumns::from_row(row).map_err(failure)?.decode()
}

/// A claim as SQLite reads it out of JSON, which has no bytes: scope, key,
/// operation, token, fingerprint, lease, retention.
type Claiming<'c> = (&'c str, &'c str, String, String, String, i64, i64);

/// Scope, key, token, goal, response, time, time at least.
type Settling<'c> = (&'c str, &'c str, String, i64, Option<String>, i64, i64);

fn claiming(ClaimCall { name, claim }: &ClaimCall) -> Claiming<'_> {
    (
        name.scope().as_str(),
        name.key().as_str(),
        hex::encode(claim.operation.as_bytes()),
        hex::encode(claim.token.as_bytes()),
        hex::encode(claim.fingerprint.as_bytes()),
        micros(claim.lease),
        micros(claim.retention),
    )
}

fn settling(
    TransitionCall {
        name,
        token,
        transition,
    }: &TransitionCall,
) -> Settling<'_> {
    let (time, at_least) = transition.durations();
    (
        name.scope().as_str(),
        name.key().as_str(),
        hex::encode(token.as_bytes()),
        transition.state(),
        transition.response().map(hex::encode),
        time,
        at_least,
    )
}

/// SQLite ends a text that comes out of JSON at its first NUL: it would be
/// another name's.
fn can_be_spelled(name: &RecordName) -> bool {
    !name.scope().as_str().contains('\0') && !name.key().as_str().contains('\0')
}

fn spelled(members: &(impl Serialize + ?Sized)) -> Result<String, StoreError> {
    serde_json::to_string(members).map_err(StoreError::unavailable)
}

/// As the claim of one record. `CROSS JOIN` leads from what is asked for to the
/// records.
const CLAIM: &str = "
INSERT INTO idempotency_records
    (scope, key, operation, token, fingerprint, state, attempt, takeovers, fence,
     claimed_at, lease_until, expires_at)
SELECT asked.value ->> 0, asked.value ->> 1,
       unhex(asked.value ->> 2), unhex(asked.value ->> 3),
       unhex(asked.value ->> 4), 1, 1, 0, fences.last + asked.key + 1,
       clock.now, clock.now + (asked.value ->> 5),
       clock.now + (asked.value ->> 6)
FROM idempotency_fences AS fences
    CROSS JOIN (SELECT CAST(round(unixepoch('subsec') * 1000) AS INTEGER) * 1000 AS now) AS clock
    CROSS JOIN json_each(?1) AS asked
WHERE NOT EXISTS (
    SELECT 1 FROM idempotency_records
    WHERE scope = asked.value ->> 0 AND key = asked.value ->> 1)
RETURNING token, operation, fence, attempt";

/// The goal is the state that the record is to have.
const SETTLE: &str = "
WITH asked AS MATERIALIZED (
    SELECT record.rowid AS id,
           each.value ->> 3 AS goal,
           unhex(each.value ->> 4) AS response,
           each.value ->> 5 AS time,
           each.value ->> 6 AS at_least,
           CAST(round(unixepoch('subsec') * 1000) AS INTEGER) * 1000 AS now
    FROM json_each(?1) AS each
        CROSS JOIN idempotency_records AS record
    WHERE record.scope = each.value ->> 0 AND record.key = each.value ->> 1
      AND record.token = unhex(each.value ->> 2)
      AND (record.state = 1 OR (record.state = 3 AND each.value ->> 3 = 2))
)
UPDATE idempotency_records AS record
SET state = iif(asked.goal = 5 AND record.takeovers > 0, 4, asked.goal),
    response = asked.response,
    lease_until = iif(asked.goal = 1, asked.now + asked.time, record.lease_until),
    expires_at = CASE asked.goal
        WHEN 2 THEN max(record.claimed_at + asked.time, asked.now + asked.at_least)
        WHEN 3 THEN asked.now + asked.time
        ELSE record.expires_at
        END
FROM asked
WHERE record.rowid = asked.id
RETURNING token";

const READ: &str = "
SELECT asked.key AS place,
       operation, fence, attempt, state, takeovers, fingerprint, token,
       clock.now - claimed_at AS age,
       expires_at - clock.now AS expires_in,
       lease_until - clock.now AS lease_left,
       iif(length(response) <= asked.value ->> 2, response, NULL) AS response,
       length(response) AS bytes
FROM (SELECT CAST(round(unixepoch('subsec') * 1000) AS INTEGER) * 1000 AS now) AS clock
    CROSS JOIN json_each(?1) AS asked
    CROSS JOIN idempotency_records AS record
WHERE record.scope = asked.value ->> 0 AND record.key = asked.value ->> 1";

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::*;
    use crate::{
        Fingerprint, Key, Scope, SqliteStore,
        store::{Claim, Completion, Store as _, sql::calls::SMALL_RESPONSE},
    };

    #[tokio::test]
    async fn f104_a_batch_leaves_large_responses_out() {
        let file = std::env::temp_dir().join(format!("large-{}.db", std::process::id()));
        let store = SqliteStore::open(&file).await.unwrap();
        let hour = Duration::from_secs(3600);
        let claim = Claim::new(
            Fingerprint::from_bytes([1; Fingerprint::LENGTH]),
            hour,
            hour,
        );
        let mut calls = Vec::new();
        for bytes in [SMALL_RESPONSE, SMALL_RESPONSE + 1] {
            let claim = Claim::new(claim.fingerprint, hour, hour);
            let name = RecordName::new(Scope::single_tenant(), Key::new(bytes.to_string()));
            store.claim(&name, &claim).await.unwrap();
            let completion = Completion::new(vec![0; bytes].into(), hour, hour);
            let _ = store.complete(&name, claim.token, &completion).await;
            calls.push(ReadCall {
                name,
                max_response: SMALL_RESPONSE,
            });
        }
        let mut connection = store.readers.acquire().await.unwrap();
        let large = async |on: &mut SqliteConnection, calls: &[ReadCall]| {
            let answers = read(on, calls).await.unwrap();
            let lengths = answers.into_iter().map(|answer| match answer {
                Some(Ok(Some(Found::Large { bytes, .. }))) => Some(bytes),
                Some(Ok(Some(Found::Whole(_)))) => None,
                _ => panic!("a record is there"),
            });
            lengths.collect::<Vec<_>>()
        };
        assert_eq!(
            large(&mut connection, &calls).await,
            [None, Some(SMALL_RESPONSE + 1)]
        );
        assert_eq!(
            large(&mut connection, &calls[1..]).await,
            [Some(SMALL_RESPONSE + 1)]
        );
        // What a claim runs into while it writes counts as much.
        for call in calls {
            let mut connection = store.writer.acquire().await.unwrap();
            let name = call.name;
            let call = WriteCall::Claim(ClaimCall { name, claim });
            let written = write_one(&mut connection, &call).await.unwrap();
            let is_large = matches!(written, Written::Claimed(ClaimAnswer::Large { .. }));
            assert_eq!(
                is_large,
                call.name().key().as_str() != SMALL_RESPONSE.to_string()
            );
        }
        drop(connection);
        store.close().await;
        std::fs::remove_file(&file).unwrap();
    }
}
