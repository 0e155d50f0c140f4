//! The usage of scopes, for quotas.

use sqlx::postgres::PgRow;

use super::{
    parameters::micros,
    schema::statements,
    session::{Session, column},
};
use crate::{
    key::Scope,
    store::{StoreError, Usage, UsageDelta, sql::columns::duration},
};

impl Statements {
    /// Adds the deltas, and returns the live usage of their scopes.
    pub(super) async fn add(
        &self,
        session: &mut Session<'_>,
        deltas: &[UsageDelta],
    ) -> Result<Vec<Usage>, StoreError> {
        let added: Vec<_> = deltas.iter().filter(|delta| !delta.is_none()).collect();
        if !added.is_empty() {
            let scopes: Vec<_> = added.iter().map(|delta| delta.scope.as_str()).collect();
            let numbers = |number: fn(&UsageDelta) -> i64| -> Vec<i64> {
                added.iter().map(|delta| number(delta)).collect()
            };
            let add = session
                .query(&self.add)
                .bind(scopes)
                .bind(numbers(|delta| micros(delta.expires_in)))
                .bind(numbers(|delta| micros(delta.period).max(1)))
                .bind(numbers(|delta| delta.records))
                .bind(numbers(|delta| delta.bytes));
            session.changes(add).await?;
        }
        let mut scopes: Vec<_> = deltas.iter().map(|delta| delta.scope.as_str()).collect();
        scopes.sort_unstable();
        scopes.dedup();
        let read = session.query(&self.read).bind(scopes);
        session.rows(read).await?.iter().map(usage).collect()
    }

    /// Removes up to `limit` periods that have ended.
    pub(super) async fn sweep(
        &self,
        session: &mut Session<'_>,
        limit: u32,
    ) -> Result<(), StoreError> {
        let due = session.query(&self.due).persistent(false);
        let due = session.rows(due.bind(i64::from(limit))).await?;
        if due.is_empty() {
            return Ok(());
        }
        let (mut scopes, mut ends) = (Vec::new(), Vec::new());
        for row in &due {
            scopes.push(column::<&str>(row, "scope")?);
            ends.push(column::<i64>(row, "expires_at")?);
        }
        let remove = session.query(&self.remove).bind(scopes).bind(ends);
        session.changes(remove).await.map(drop)
    }
}

fn usage(row: &PgRow) -> Result<Usage, StoreError> {
    let expires_in: i64 = column(row, "expires_in")?;
    Ok(Usage {
        scope: Scope::from_stored(column::<&str>(row, "scope")?),
        expires_in: duration(expires_in),
        records: column(row, "records")?,
        bytes: column(row, "bytes")?,
    })
}

statements! {
    /// In the order of the key, so that simultaneous calls do not wait for each other in a
    /// circle.
    add = "
INSERT INTO {usage} AS usage (scope, expires_at, records, bytes)
SELECT scope,
       (clock.now + expires_in + period - 1) / period * period AS expires_at,
       sum(records)::bigint,
       sum(bytes)::bigint
FROM unnest($1::text[], $2::bigint[], $3::bigint[], $4::bigint[], $5::bigint[])
         AS delta (scope, expires_in, period, records, bytes), {clock}
GROUP BY 1, 2
ORDER BY 1, 2
ON CONFLICT (scope, expires_at) DO UPDATE
SET records = usage.records + excluded.records, bytes = usage.bytes + excluded.bytes";

    read = "
SELECT scope, expires_at - clock.now AS expires_in, records, bytes
FROM {usage}, {clock}
WHERE scope = ANY ($1::text[]) AND expires_at > clock.now
ORDER BY scope, expires_at";

    due = "
SELECT scope, expires_at
FROM {usage}, {clock}
WHERE expires_at < clock.now
ORDER BY expires_at
LIMIT $1";

    remove = "
DELETE FROM {usage} AS usage
USING unnest($1::text[], $2::bigint[]) AS due (scope, expires_at)
WHERE usage.scope = due.scope AND usage.expires_at = due.expires_at";
}
