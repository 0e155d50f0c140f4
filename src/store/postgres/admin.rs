//! An operator's lists, and sweeps.

use std::{sync::Arc, time::Duration};

use super::{
    error::failure,
    parameters::micros,
    pool::Pool,
    schema::{Schema, statements},
    session::{PgQuery, Session, column},
};
use crate::{
    key::RecordName,
    store::{
        Purged, StoreError,
        admin::{Filter, FilterKind, Page},
        sql::{
            columns::UNKNOWN,
            pages::{MAX_EXAMINED, first_name, page, page_limit},
        },
    },
};

/// Calls that no request waits for.
pub(crate) struct Admin {
    pub(super) pool: Arc<Pool>,
    sql: Statements,
}

impl Admin {
    pub(super) fn new(pool: Arc<Pool>, schema: &Schema) -> Self {
        Self {
            pool,
            sql: Statements::new(schema),
        }
    }

    /// Must be awaited in a task that is not dropped.
    pub(crate) async fn run<T>(
        &self,
        call: impl AsyncFnOnce(&mut Session<'_>) -> Result<T, StoreError>,
    ) -> Result<T, StoreError> {
        self.pool.check()?;
        self.pool.run(call).await
    }

    pub(super) async fn now(&self, session: &mut Session<'_>) -> Result<Duration, StoreError> {
        let row = session.row(session.query(&self.sql.now)).await?;
        let row = row.ok_or_else(|| StoreError::unavailable("the server returned no time"))?;
        let now: i64 = column(&row, "now")?;
        Ok(Duration::from_micros(now.unsigned_abs()))
    }

    pub(super) async fn list(
        &self,
        session: &mut Session<'_>,
        filter: &Filter,
        after: Option<&RecordName>,
        limit: u32,
    ) -> Result<Page, StoreError> {
        // Text has no NUL.
        let (scope, key) = first_name(filter, after, '\u{1}');
        let limit = page_limit(limit);
        let (statement, age) = match (filter.kind, &filter.scope) {
            (FilterKind::Unknown, None) => (&self.sql.list_unknown, None),
            (FilterKind::Unknown, Some(_)) => (&self.sql.list_unknown_in_scope, None),
            (FilterKind::InProgressFor(age), None) => (&self.sql.list_in_progress, Some(age)),
            (FilterKind::InProgressFor(age), Some(_)) => {
                (&self.sql.list_in_progress_in_scope, Some(age))
            }
        };
        let mut query = session.query(statement).bind(scope).bind(key).bind(limit);
        if let Some(age) = age {
            query = query.bind(micros(age)).bind(MAX_EXAMINED);
        }
        page(&session.rows(query).await?, limit)
    }

    pub(super) async fn purge_expired(
        &self,
        session: &mut Session<'_>,
        limit: u32,
        unknown_retention: Duration,
    ) -> Result<Purged, StoreError> {
        // Planned each time: a plan for a small table reads all of a large one.
        let due = session.query(&self.sql.due).persistent(false);
        let due = session.rows(due.bind(i64::from(limit))).await?;
        let (mut scopes, mut keys, mut fences) = (Vec::new(), Vec::new(), Vec::new());
        for row in &due {
            scopes.push(column::<&str>(row, "scope")?);
            keys.push(column::<&str>(row, "key")?);
            fences.push(column::<i64>(row, "fence")?);
        }
        let changing = |session: &Session<'_>, statement| -> PgQuery {
            let query = session.query(statement);
            query
                .bind(scopes.clone())
                .bind(keys.clone())
                .bind(fences.clone())
        };
        let mut purged = Purged::default();
        if due.is_empty() {
            return Ok(purged);
        }
        // Before the marks, so that no record is marked and removed in one sweep.
        let remove = changing(session, &self.sql.remove);
        for row in session.rows(remove).await? {
            purged.removed += 1;
            let is_unknown = column::<i64>(&row, "state")? == UNKNOWN;
            purged.removed_unknown += u64::from(is_unknown);
        }
        if purged.removed < due.len() as u64 {
            let mark = changing(session, &self.sql.mark).bind(micros(unknown_retention));
            let marked = mark.execute(&mut *session.connection).await;
            purged.marked_unknown = marked.map_err(failure)?.rows_affected();
        }
        Ok(purged)
    }
}

macro_rules! list_unknown {
    ($names:literal) => {
        concat!(
            "
SELECT scope, key, {record},
       NULL::bytea AS response, NULL::bigint AS bytes, false AS is_last
FROM {records}, {clock}
WHERE unknown_since IS NOT NULL AND ",
            $names,
            "
ORDER BY scope, key
LIMIT $3"
        )
    };
}

macro_rules! list_in_progress {
    ($names:literal) => {
        concat!(
            "
WITH examined AS MATERIALIZED (
    SELECT scope, key, operation, fence, attempt, state, takeovers, fingerprint, token,
           claimed_at, expires_at, lease_until
    FROM {records}
    WHERE ",
            $names,
            "
    ORDER BY scope, key
    LIMIT $5
), found AS (
    SELECT scope, key, {record},
           NULL::bytea AS response, NULL::bigint AS bytes, false AS is_last
    FROM examined, {clock}
    WHERE state = {in_progress} AND claimed_at < clock.now - $4
    ORDER BY scope, key
    LIMIT $3
), last AS (
    SELECT scope, key
    FROM examined
    ORDER BY scope, key
    OFFSET $5 - 1
)
SELECT * FROM found
UNION ALL
SELECT scope, key, NULL, NULL, NULL, NULL, NULL, NULL, NULL, NULL, NULL, NULL, NULL, NULL, true
FROM last"
        )
    };
}

statements! {
    now = "SELECT clock.now FROM {clock}";

    /// Uses the partial index.
    list_unknown = list_unknown!("(scope, key) >= ($1, $2)");
    list_unknown_in_scope = list_unknown!("scope = $1 AND key >= $2");

    /// Reads up to `$5` records by the primary key. If it reaches that limit, it names
    /// the last one.
    list_in_progress = list_in_progress!("(scope, key) >= ($1, $2)");
    list_in_progress_in_scope = list_in_progress!("scope = $1 AND key >= $2");

    /// `lease_until` keeps a planner that knows of few leases from reading the whole table.
    due = "
SELECT scope, key, fence
FROM {records}, {clock}
WHERE expires_at < clock.now AND fence < clock.now
  AND (state <> {in_progress} OR lease_until < clock.now)
ORDER BY expires_at
LIMIT $1{skip_locked}";

    /// The conditions stand here again: a record may have been claimed since it was found.
    remove = "
DELETE FROM {records} AS record
USING unnest($1::text[], $2::text[], $3::bigint[]) AS due (scope, key, fence), {clock}
WHERE record.scope = due.scope AND record.key = due.key AND record.fence = due.fence
  AND record.expires_at < clock.now AND record.state <> {in_progress}
RETURNING record.state::bigint";

    mark = "
UPDATE {records} AS record
SET state = {unknown},
    unknown_since = clock.now,
    expires_at = clock.now + $4
FROM unnest($1::text[], $2::text[], $3::bigint[]) AS due (scope, key, fence), {clock}
WHERE record.scope = due.scope AND record.key = due.key AND record.fence = due.fence
  AND record.expires_at < clock.now
  AND record.state = {in_progress} AND record.lease_until < clock.now";
}
