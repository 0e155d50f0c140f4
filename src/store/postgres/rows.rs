//! Statements about several records, with a row of VALUES for each.
//!
//! Citus sends each row to its node. A query of arrays it would plan for all nodes.

use sqlx::SqlStr;

use super::{
    parameters::micros,
    schema::Schema,
    session::{PgQuery, Session},
};
use crate::{
    key::RecordName,
    store::{Completion, Token, sql::calls::ClaimCall},
};

/// Claims of names that may have no record.
pub(super) struct ClaimRows(ByRows);

impl ClaimRows {
    pub(super) fn new(schema: &Schema) -> Self {
        let row = |first: usize| {
            let [scope, key, operation, token, fingerprint, lease, retention] =
                std::array::from_fn(|index| first + index);
            format!(
                "(${scope}, ${key}, ${operation}, ${token}, ${fingerprint}, {{in_progress}}, \
                 1, 0, {{now}}, {{now}}, {{now}} + ${lease}, {{now}} + ${retention})"
            )
        };
        Self(ByRows::new(schema, CLAIM, 7, row, GRANT))
    }

    /// Returns the query for up to [`MAX_ROWS`] claims. Its rows are those that were granted.
    pub(super) fn query(&self, session: &Session<'_>, calls: &[ClaimCall]) -> PgQuery {
        let query = session.query(self.0.get(calls.len()));
        calls
            .iter()
            .fold(query, |query, ClaimCall { name, claim }| {
                query
                    .bind(name.scope().as_str())
                    .bind(name.key().as_str())
                    .bind(claim.operation.as_bytes().as_slice())
                    .bind(claim.token.as_bytes().as_slice())
                    .bind(claim.fingerprint.as_bytes().as_slice())
                    .bind(micros(claim.lease))
                    .bind(micros(claim.retention))
            })
    }
}

/// Completions of different records.
///
/// A completion of a record that was removed inserts a row, which expired long ago and has
/// no owner. `remove` removes it.
pub(super) struct CompletionRows {
    rows: ByRows,
    alone: SqlStr,
    remove: SqlStr,
}

/// A completion, by the owner with this token.
pub(super) type CompletionCall<'c> = (&'c RecordName, Token, &'c Completion);

impl CompletionRows {
    pub(super) fn new(schema: &Schema) -> Self {
        let row = |first: usize| {
            let [scope, key, token, response, retention, at_least] =
                std::array::from_fn(|index| first + index);
            format!(
                "(${scope}, ${key}, ${token}, {NO_OWNER}, {NO_FINGERPRINT}, {{completed}}, \
                 1, 0, {{now}} + ${at_least}, 0, ${retention}, 0, ${response})"
            )
        };
        Self {
            rows: ByRows::new(schema, COMPLETE, 6, row, COMPLETED),
            alone: schema.statement(COMPLETE_ALONE),
            remove: schema.statement(REMOVE),
        }
    }

    /// Returns the statement of one completion. It changes a record if it was applied.
    pub(super) fn alone(
        &self,
        session: &Session<'_>,
        (name, token, completion): CompletionCall<'_>,
    ) -> PgQuery {
        session
            .query_record(&self.alone, name)
            .bind(token.as_bytes().as_slice())
            .bind(&completion.response[..])
            .bind(micros(completion.retention))
            .bind(micros(completion.at_least))
    }

    /// Returns the query for up to [`MAX_ROWS`] completions. Its rows have the tokens of
    /// those that were applied, and of those whose record was removed.
    pub(super) fn query(&self, session: &Session<'_>, calls: &[CompletionCall<'_>]) -> PgQuery {
        let query = session.query(self.rows.get(calls.len()));
        calls
            .iter()
            .fold(query, |query, (name, token, completion)| {
                query
                    .bind(name.scope().as_str())
                    .bind(name.key().as_str())
                    .bind(token.as_bytes().as_slice())
                    .bind(&completion.response[..])
                    .bind(micros(completion.retention))
                    .bind(micros(completion.at_least))
            })
    }

    /// Returns the statement that removes a row that a completion has inserted.
    pub(super) fn remove(&self, session: &Session<'_>, name: &RecordName, token: Token) -> PgQuery {
        let query = session.query_record(&self.remove, name);
        query.bind(token.as_bytes().as_slice())
    }
}

/// The statements with 1 to [`MAX_ROWS`] rows.
struct ByRows(Vec<SqlStr>);

impl ByRows {
    /// `row` returns a row of `width` parameters, by the number of the first.
    fn new(
        schema: &Schema,
        head: &str,
        width: usize,
        row: impl Fn(usize) -> String,
        tail: &str,
    ) -> Self {
        let statement = |count| {
            let rows: Vec<_> = (0..count).map(|index| row(1 + index * width)).collect();
            schema.statement(&format!("{head}{}{tail}", rows.join(", ")))
        };
        Self((1..=MAX_ROWS).map(statement).collect())
    }

    fn get(&self, count: usize) -> &SqlStr {
        &self.0[count - 1]
    }
}

/// Each number of rows is a statement of its own, which each connection prepares once.
pub(super) const MAX_ROWS: usize = 64;

const CLAIM: &str = "
INSERT INTO {records}
    (scope, key, operation, token, fingerprint, state, attempt, takeovers, fence,
     claimed_at, lease_until, expires_at)
VALUES ";

const GRANT: &str = "
ON CONFLICT (scope, key) DO NOTHING
RETURNING token, operation, fence, attempt::bigint";

/// In a row, `operation` is the token, `lease_until` the retention, and `fence` the end of the
/// least retention.
const COMPLETE: &str = "
INSERT INTO {records} AS record
    (scope, key, operation, token, fingerprint, state, attempt, takeovers, fence,
     claimed_at, lease_until, expires_at, response)
VALUES ";

const COMPLETED: &str = "
ON CONFLICT (scope, key) DO UPDATE
SET state = {completed},
    response = EXCLUDED.response,
    unknown_since = NULL,
    expires_at = GREATEST(record.claimed_at + EXCLUDED.lease_until, EXCLUDED.fence)
WHERE record.token = EXCLUDED.operation AND record.state IN ({in_progress}, {unknown})
RETURNING CASE WHEN claimed_at > 0 THEN token ELSE operation END AS token,
    claimed_at > 0 AS is_applied";

/// A subquery, as in the statement of all transitions, would keep Citus from its fastest
/// plan.
const COMPLETE_ALONE: &str = "
UPDATE {records}
SET state = {completed},
    response = $4,
    unknown_since = NULL,
    expires_at = GREATEST(claimed_at + $5, {now} + $6)
WHERE scope = $1 AND key = $2 AND token = $3 AND state IN ({in_progress}, {unknown})";

const REMOVE: &str = "
DELETE FROM {records}
WHERE scope = $1 AND key = $2 AND operation = $3 AND claimed_at = 0";

const NO_OWNER: &str = "decode(repeat('00', 16), 'hex')";
const NO_FINGERPRINT: &str = "decode(repeat('00', 84), 'hex')";
