//! Looks at records, many in one statement.

use std::sync::Arc;

use sqlx::{FromRow as _, Row as _, postgres::PgRow, query, query_as};

use super::{connections::Connections, failure, members::names, session::Session};
use crate::{
    RecordName,
    store::{
        Record, StoreError,
        alone::{Attempt, Single},
        batch::{Batch, Told},
        sql::RecordColumns,
    },
};

pub(super) struct Looks(pub(super) Arc<Connections>);

impl Batch for Looks {
    async fn together(
        &self,
        calls: Arc<Vec<RecordName>>,
    ) -> Result<Vec<Told<Option<Record>>>, StoreError> {
        self.0
            .run(move |mut on| Box::pin(async move { read_many(&mut on, &calls).await }))
            .await
    }
}

impl Single for Looks {
    type Call = RecordName;
    type Answer = Option<Record>;

    async fn attempt(&self, name: Arc<RecordName>) -> Result<Attempt<Option<Record>>, StoreError> {
        let record = self
            .0
            .run(move |mut on| Box::pin(async move { read(&mut on, &name).await }));
        record.await.map(Attempt::Made)
    }
}

pub(super) async fn read(
    on: &mut Session<'_>,
    name: &RecordName,
) -> Result<Option<Record>, StoreError> {
    let columns: Option<RecordColumns> = query_as(on.sql.read.clone())
        .persistent(on.persistent)
        .bind(name.scope().as_str())
        .bind(name.key().as_str())
        .fetch_optional(&mut *on.connection)
        .await
        .map_err(failure)?;
    columns.map(RecordColumns::decode).transpose()
}

async fn read_many(
    on: &mut Session<'_>,
    calls: &[RecordName],
) -> Result<Vec<Told<Option<Record>>>, StoreError> {
    if let [name] = calls {
        let record = read(on, name).await?;
        return Ok(vec![Told::Answer(Ok(record))]);
    }
    let [scopes, keys] = names(calls.iter());
    let rows = query(on.sql.read_many.clone())
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

pub(super) fn record(row: &PgRow) -> Result<Record, StoreError> {
    RecordColumns::from_row(row).map_err(failure)?.decode()
}

pub(super) const READ: &str = "
SELECT operation, fence, attempt::bigint, state::bigint, takeovers::bigint, fingerprint, token,
       (EXTRACT(EPOCH FROM clock.now - claimed_at) * 1000000)::bigint AS age,
       (EXTRACT(EPOCH FROM expires_at - clock.now) * 1000000)::bigint AS expires_in,
       (EXTRACT(EPOCH FROM lease_until - clock.now) * 1000000)::bigint AS lease_left,
       response
FROM {records}, (SELECT clock_timestamp() AS now) AS clock
WHERE scope = $1 AND key = $2";

pub(super) const READ_MANY: &str = "
SELECT asked.place, record.*
FROM unnest($1::text[], $2::text[]) WITH ORDINALITY AS asked (scope, key, place)
    CROSS JOIN LATERAL (
        SELECT operation, fence, attempt::bigint, state::bigint, takeovers::bigint,
               fingerprint, token,
               (EXTRACT(EPOCH FROM clock.now - claimed_at) * 1000000)::bigint AS age,
               (EXTRACT(EPOCH FROM expires_at - clock.now) * 1000000)::bigint AS expires_in,
               (EXTRACT(EPOCH FROM lease_until - clock.now) * 1000000)::bigint AS lease_left,
               response
        FROM {records} AS record, (SELECT clock_timestamp() AS now) AS clock
        WHERE record.scope = asked.scope AND record.key = asked.key
        OFFSET 0
    ) AS record";
