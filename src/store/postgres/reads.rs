//! Reads of records, many in one statement.

use std::{sync::Arc, time::Duration};

use super::{
    pool::Pool,
    schema::{Schema, statements},
    session::{Session, column},
};
use crate::{
    key::RecordName,
    store::{
        Grant, StoreError, Token,
        sql::{
            batcher::{Answers, Batch},
            calls::ReadCall,
            columns::{self, Found, found},
            single::{Attempt, Single},
        },
        transition::StoredRecord,
    },
};

pub(super) struct RecordReads {
    pool: Arc<Pool>,
    sql: Statements,
    /// Whether the batches carry large responses.
    is_large: bool,
}

impl RecordReads {
    pub(super) fn new(pool: Arc<Pool>, schema: &Schema, is_large: bool) -> Self {
        Self {
            pool,
            sql: Statements::new(schema),
            is_large,
        }
    }
}

impl Batch for RecordReads {
    async fn execute(&self, calls: &[ReadCall]) -> Result<Answers<Option<Found>>, StoreError> {
        self.pool
            .run(async |session| read_many(session, &self.sql, calls).await)
            .await
    }

    fn pause_after(&self, elapsed: Duration) -> Duration {
        match self.is_large {
            true => self.pool.pause_after_large(elapsed),
            false => Duration::ZERO,
        }
    }
}

impl Single for RecordReads {
    type Call = ReadCall;
    type Answer = Option<Found>;

    async fn attempt(&self, call: &ReadCall) -> Result<Attempt<Option<Found>>, StoreError> {
        let ReadCall { name, max_response } = call;
        let found = self
            .pool
            .run(async |session| read(session, &self.sql, name, *max_response).await);
        found.await.map(Attempt::Made)
    }
}

pub(super) async fn read(
    session: &mut Session<'_>,
    sql: &Statements,
    name: &RecordName,
    max_response: usize,
) -> Result<Option<Found>, StoreError> {
    let query = session.query_record(&sql.read, name);
    let row = session.row(query.bind(length(max_response))).await?;
    row.as_ref().map(found).transpose()
}

async fn read_many(
    session: &mut Session<'_>,
    sql: &Statements,
    calls: &[ReadCall],
) -> Result<Answers<Option<Found>>, StoreError> {
    if let [ReadCall { name, max_response }] = calls {
        let found = read(session, sql, name, *max_response).await?;
        return Ok(vec![Some(Ok(found))]);
    }
    let lengths = calls.iter().map(|call| length(call.max_response));
    let query = session
        .query_records(&sql.read_many, calls.iter().map(|call| &call.name))
        .bind(lengths.collect::<Vec<_>>());
    let mut answers: Answers<_> = calls.iter().map(|_| Some(Ok(None))).collect();
    for row in &session.rows(query).await? {
        let place: i64 = column(row, "place")?;
        let index = usize::try_from(place - 1).ok();
        if let Some(answer) = index.and_then(|index| answers.get_mut(index)) {
            *answer = Some(found(row).map(Some));
        }
    }
    Ok(answers)
}

/// Reads a record without its response. Returns it with the moment of the read.
pub(super) async fn load(
    session: &mut Session<'_>,
    sql: &Statements,
    name: &RecordName,
) -> Result<Option<(StoredRecord, Duration)>, StoreError> {
    let query = session.query_record(&sql.read, name).bind(0_i64);
    let Some(row) = session.row(query).await? else {
        return Ok(None);
    };
    let loaded = columns::load(&row, NOW)?;
    Ok(Some((
        loaded.record,
        Duration::from_micros(NOW.unsigned_abs()),
    )))
}

/// Gives the claim in progress with this token a new fence, since the answer to an earlier
/// call got lost. Returns `None` if there is no such claim, or if its record is locked.
pub(super) async fn grant_again(
    session: &mut Session<'_>,
    sql: &Statements,
    name: &RecordName,
    token: Token,
) -> Result<Option<Grant>, StoreError> {
    let query = session.query_record(&sql.grant_again, name);
    let row = session.row(query.bind(token.as_bytes().as_slice())).await?;
    row.as_ref().map(columns::grant).transpose()
}

/// Returns a length as the type of a column.
fn length(bytes: usize) -> i64 {
    i64::try_from(bytes).unwrap_or(i64::MAX)
}

/// The moment of a read. Any moment serves that has others before it.
const NOW: i64 = i64::MAX / 2;

statements! {
    /// `octet_length` does not read the response.
    read = "
SELECT {record},
       CASE WHEN octet_length(response) <= $3 THEN response END AS response,
       octet_length(response)::bigint AS bytes
FROM {records}, {clock}
WHERE scope = $1 AND key = $2";

    grant_again = "
UPDATE {records} AS record
SET fence = GREATEST(clock.now, record.fence + 1)
FROM {clock}
WHERE record.scope = $1 AND record.key = $2 AND record.token = $3
  AND record.state = {in_progress}{unlocked}
RETURNING record.operation, record.fence, record.attempt::bigint";

    read_many = "
SELECT asked.place, {record},
       CASE WHEN octet_length(response) <= asked.max_response THEN response END AS response,
       octet_length(response)::bigint AS bytes
FROM unnest($1::text[], $2::text[], $3::bigint[])
        WITH ORDINALITY AS asked (asked_scope, asked_key, max_response, place)
    JOIN {records} ON scope = asked_scope AND key = asked_key,
    {clock}";
}
