//! Reads of records, many in one statement.

use std::sync::Arc;

use sqlx::{FromRow as _, Row as _, postgres::PgRow, query, query_as};

use super::{connections::Connections, failure, members::names, session::Session};
use crate::{
    RecordName,
    store::{
        StoreError,
        sql::RecordColumns,
        sql::batcher::{Answers, Batch},
        sql::calls::ReadCall,
        sql::reads::Found,
        sql::single::{Attempt, Single},
    },
};

pub(super) struct Looks(pub(super) Arc<Connections>);

impl Batch for Looks {
    async fn execute(&self, calls: &[ReadCall]) -> Result<Answers<Option<Found>>, StoreError> {
        self.0.run(async |on| read_many(on, calls).await).await
    }
}

impl Single for Looks {
    type Call = ReadCall;
    type Answer = Option<Found>;

    async fn attempt(&self, call: &ReadCall) -> Result<Attempt<Option<Found>>, StoreError> {
        let found = self
            .0
            .run(async |on| read(on, &call.name, call.max_response).await);
        found.await.map(Attempt::Made)
    }
}

pub(super) async fn read(
    on: &mut Session<'_>,
    name: &RecordName,
    max_response: usize,
) -> Result<Option<Found>, StoreError> {
    let columns: Option<RecordColumns> = query_as(on.sql.read.clone())
        .persistent(on.persistent)
        .bind(name.scope().as_str())
        .bind(name.key().as_str())
        .bind(bound(max_response))
        .fetch_optional(&mut *on.connection)
        .await
        .map_err(failure)?;
    columns.map(RecordColumns::decode).transpose()
}

async fn read_many(
    on: &mut Session<'_>,
    calls: &[ReadCall],
) -> Result<Answers<Option<Found>>, StoreError> {
    if let [ReadCall { name, max_response }] = calls {
        let found = read(on, name, *max_response).await?;
        return Ok(vec![Some(Ok(found))]);
    }
    let [scopes, keys] = names(calls.iter().map(|call| &call.name));
    let max_responses: Vec<i64> = calls.iter().map(|call| bound(call.max_response)).collect();
    let rows = query(on.sql.read_many.clone())
        .persistent(on.persistent)
        .bind(scopes)
        .bind(keys)
        .bind(max_responses)
        .fetch_all(&mut *on.connection)
        .await
        .map_err(failure)?;
    let mut told: Vec<_> = calls.iter().map(|_| Some(Ok(None))).collect();
    for row in &rows {
        let place: i64 = row.try_get("place").map_err(failure)?;
        let place = usize::try_from(place - 1).ok();
        if let Some(told) = place.and_then(|place| told.get_mut(place)) {
            *told = Some(record(row).map(Some));
        }
    }
    Ok(told)
}

/// A length as a column holds it.
pub(super) fn bound(bytes: usize) -> i64 {
    i64::try_from(bytes).unwrap_or(i64::MAX)
}

pub(super) fn record(row: &PgRow) -> Result<Found, StoreError> {
    RecordColumns::from_row(row).map_err(failure)?.decode()
}

/// The length of a response is known without reading it.
pub(super) const READ: &str = "
SELECT operation, fence, attempt::bigint, state::bigint, takeovers::bigint, fingerprint, token,
       (EXTRACT(EPOCH FROM clock.now - claimed_at) * 1000000)::bigint AS age,
       (EXTRACT(EPOCH FROM expires_at - clock.now) * 1000000)::bigint AS expires_in,
       (EXTRACT(EPOCH FROM lease_until - clock.now) * 1000000)::bigint AS lease_left,
       CASE WHEN octet_length(response) <= $3 THEN response END AS response,
       octet_length(response)::bigint AS bytes
FROM {records}, (SELECT clock_timestamp() AS now) AS clock
WHERE scope = $1 AND key = $2";

pub(super) const READ_MANY: &str = "
SELECT asked.place, record.*
FROM unnest($1::text[], $2::text[], $3::bigint[])
        WITH ORDINALITY AS asked (scope, key, most_bytes, place)
    CROSS JOIN LATERAL (
        SELECT operation, fence, attempt::bigint, state::bigint, takeovers::bigint,
               fingerprint, token,
               (EXTRACT(EPOCH FROM clock.now - claimed_at) * 1000000)::bigint AS age,
               (EXTRACT(EPOCH FROM expires_at - clock.now) * 1000000)::bigint AS expires_in,
               (EXTRACT(EPOCH FROM lease_until - clock.now) * 1000000)::bigint AS lease_left,
               CASE
                   WHEN octet_length(response) <= asked.most_bytes THEN response
               END AS response,
               octet_length(response)::bigint AS bytes
        FROM {records} AS record, (SELECT clock_timestamp() AS now) AS clock
        WHERE record.scope = asked.scope AND record.key = asked.key
        OFFSET 0
    ) AS record";
