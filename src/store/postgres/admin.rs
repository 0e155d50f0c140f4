//! An operator's lists, and sweeps.

use std::{sync::Arc, time::Duration};

use super::{
    error::failure,
    parameters::micros,
    pool::Pool,
    schema::{Schema, statements},
    session::{Session, column},
};
use crate::{
    scope::RecordName,
    store::{
        Purged, StoreError,
        admin::{Filter, FilterKind, Page},
        sql::pages::{MAX_EXAMINED, first_name, page, page_limit},
    },
};

/// Calls that no request waits for.
pub(super) struct Admin {
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
    pub(super) async fn run<T>(
        &self,
        call: impl AsyncFnOnce(&mut Session<'_>) -> Result<T, StoreError>,
    ) -> Result<T, StoreError> {
        self.pool.check()?;
        self.pool.run(call).await
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
        let counts = session
            .query(&self.sql.purge_expired)
            .persistent(false)
            .bind(i64::from(limit))
            .bind(micros(unknown_retention))
            .fetch_one(&mut *session.connection)
            .await
            .map_err(failure)?;
        let count = |name| column(&counts, name).map(i64::unsigned_abs);
        Ok(Purged {
            removed: count("removed")?,
            removed_unknown: count("removed_unknown")?,
            marked_unknown: count("marked_unknown")?,
        })
    }
}

macro_rules! list_unknown {
    ($names:literal) => {
        concat!(
            "
SELECT scope, key, {record},
       NULL::bytea AS response, NULL::bigint AS bytes, false AS is_last
FROM {records}, (SELECT clock_timestamp() AS now) AS clock
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
    FROM examined, (SELECT clock_timestamp() AS now) AS clock
    WHERE state = {in_progress} AND claimed_at < clock.now - $4 * interval '1 microsecond'
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
    /// Uses the partial index.
    list_unknown = list_unknown!("(scope, key) >= ($1, $2)");
    list_unknown_in_scope = list_unknown!("scope = $1 AND key >= $2");

    /// Reads up to `$5` records by the primary key. If it reaches that limit, it names
    /// the last one.
    list_in_progress = list_in_progress!("(scope, key) >= ($1, $2)");
    list_in_progress_in_scope = list_in_progress!("scope = $1 AND key >= $2");

    /// The conditions stand twice: a record may be claimed again after it is found and
    /// before it is locked.
    ///
    /// The index serves comparisons with `statement_timestamp()` only, which finds the
    /// records. `clock_timestamp()` makes the planner find locked records by their
    /// names, however many have expired. `due.state` keeps a planner that knows of few
    /// leases from reading the whole table. A removal draws a number before it is
    /// visible, for claims that are under way.
    purge_expired = "
WITH due AS MATERIALIZED (
    SELECT scope, key, state, (SELECT {next_removal}) AS removal
    FROM {records}
    WHERE expires_at < statement_timestamp()
      AND (state <> {in_progress} OR lease_until < statement_timestamp())
    ORDER BY expires_at
    LIMIT $1
    FOR UPDATE SKIP LOCKED
), marked AS (
    UPDATE {records} AS record
    SET state = {unknown},
        unknown_since = statement_timestamp(),
        expires_at = statement_timestamp() + $2 * interval '1 microsecond'
    FROM due
    WHERE due.state = {in_progress}
      AND record.scope = due.scope AND record.key = due.key
      AND record.expires_at < clock_timestamp()
      AND record.state = {in_progress} AND record.lease_until < clock_timestamp()
    RETURNING 1
), removed AS (
    DELETE FROM {records} AS record
    USING due
    WHERE due.state <> {in_progress} AND due.removal > 0
      AND record.scope = due.scope AND record.key = due.key
      AND record.expires_at < clock_timestamp()
      AND record.state <> {in_progress}
    RETURNING record.state
)
SELECT (SELECT count(*) FROM removed) AS removed,
       (SELECT count(*) FROM removed WHERE state = {unknown}) AS removed_unknown,
       (SELECT count(*) FROM marked) AS marked_unknown";
}
