//! Checks of the store's tables, and the privileges that a role needs on them.

use sqlx::{AssertSqlSafe, Error, PgConnection, query_scalar};

use super::{
    PostgresStore,
    error::failure,
    migrations::{RECORDS, Unit},
    schema::Schema,
    session::Session,
};
use crate::store::{StoreError, sql::detached};

impl PostgresStore {
    /// Checks that the tables are as this version needs them, and that the store's
    /// role may use them.
    ///
    /// # Errors
    ///
    /// If the server cannot be reached. If a table, column, index or
    /// privilege is missing or differs; the error names each, with a remedy.
    pub async fn check_schema(&self) -> Result<(), StoreError> {
        let (inner, connector) = (self.inner.clone(), self.inner.connector.clone());
        detached(async move {
            let check = async |session: &mut Session<'_>| {
                let (on, schema) = (&mut *session.connection, &connector.schema);
                let found = Tables::look(on, schema, &RECORDS).await.map_err(failure)?;
                let differences = found.refuse_differences();
                let missing = missing_privileges(on, schema).await.map_err(failure)?;
                if missing.is_empty() {
                    return differences;
                }
                let mut error = format!("the store's role may not use {}", missing.join(", "));
                if let Err(differences) = differences {
                    error = format!("{}; {error}", differences.cause());
                }
                Err(StoreError::unavailable(error).of_privileges())
            };
            inner.admin.run(check).await
        })
        .await
    }

    /// Returns the GRANT statements for a role that serves requests and makes no
    /// tables, one in each line. `role` is quoted as an identifier.
    #[must_use]
    pub fn grants_for(&self, role: &str) -> String {
        self.grants(role, &[RECORDS.table])
    }

    pub(super) fn grants(&self, role: &str, tables: &[&str]) -> String {
        self.inner.connector.schema.grants(role, tables).join("\n")
    }
}

/// The relations in the schema that have names of the store's.
pub(super) struct Tables {
    exist: bool,
    /// The differences from the tables that the store needs.
    differences: Vec<String>,
}

impl Tables {
    /// Compares the table of records with what is needed. Other tables are only looked
    /// for.
    pub(super) async fn look(
        on: &mut PgConnection,
        schema: &Schema,
        unit: &Unit,
    ) -> Result<Self, Error> {
        let exist = query_scalar(template(schema, EXIST))
            .persistent(false)
            .bind(unit.table)
            .fetch_one(&mut *on)
            .await?;
        if unit.version != RECORDS.version {
            let differences = Vec::new();
            return Ok(Self { exist, differences });
        }
        let differences = query_scalar(template(schema, DIFFERENCES))
            .persistent(false)
            .bind(schema.expand("table {records}"))
            .fetch_all(on)
            .await?;
        Ok(Self { exist, differences })
    }

    pub(super) fn is_empty(&self) -> bool {
        !self.exist
    }

    /// Fails with all differences, if there are any.
    pub(super) fn refuse_differences(&self) -> Result<(), StoreError> {
        if self.differences.is_empty() {
            return Ok(());
        }
        let remedy = match self.exist {
            false => "call `PostgresStore::migrate`, or apply `PostgresStore::schema_sql()`",
            true => "change them to what `PostgresStore::schema_sql()` makes",
        };
        let differences = self.differences.join("; ");
        Err(StoreError::unavailable(format!("{differences}: {remedy}")))
    }
}

/// The privileges that the role of the connection lacks.
async fn missing_privileges(on: &mut PgConnection, schema: &Schema) -> Result<Vec<String>, Error> {
    query_scalar(template(schema, MISSING_PRIVILEGES))
        .persistent(false)
        .fetch_all(on)
        .await
}

pub(super) fn template(schema: &Schema, template: &str) -> AssertSqlSafe<String> {
    AssertSqlSafe(schema.expand(template))
}

const EXIST: &str = "
SELECT EXISTS (
    SELECT
    FROM pg_catalog.pg_class AS class
        JOIN pg_catalog.pg_namespace AS namespace ON namespace.oid = class.relnamespace
    WHERE namespace.nspname = {schema}
      AND class.relname = $1)";

/// `$1` names the table. Collations that compare by bytes have three names.
const DIFFERENCES: &str = "
WITH relation AS (
    SELECT class.oid, class.relname::text AS name, class.relkind AS kind,
           class.relpersistence AS persistence
    FROM pg_catalog.pg_class AS class
        JOIN pg_catalog.pg_namespace AS namespace ON namespace.oid = class.relnamespace
    WHERE namespace.nspname = {schema}
), records AS (
    SELECT oid
    FROM relation
    WHERE name = 'idempotency_records' AND kind IN ('r', 'p')
), expected (place, name, kind, not_null) AS (
    VALUES (1, 'scope', 'text', true),
           (2, 'key', 'text', true),
           (3, 'state', 'smallint', true),
           (4, 'attempt', 'integer', true),
           (5, 'takeovers', 'integer', true),
           (6, 'fence', 'bigint', true),
           (7, 'claimed_at', 'bigint', true),
           (8, 'lease_until', 'bigint', true),
           (9, 'expires_at', 'bigint', true),
           (10, 'operation', 'bytea', true),
           (11, 'token', 'bytea', true),
           (12, 'fingerprint', 'bytea', true),
           (13, 'response', 'bytea', false),
           (14, 'unknown_since', 'bigint', false),
           (15, 'awaited', 'boolean', true)
), found AS (
    SELECT attribute.attnum AS place, attribute.attname::text AS name,
           format_type(attribute.atttypid, attribute.atttypmod) AS kind,
           attribute.attnotnull AS not_null,
           attribute.atthasdef OR attribute.attidentity <> '' AS has_default,
           collated.collname AS collation
    FROM records
        JOIN pg_catalog.pg_attribute AS attribute ON attribute.attrelid = records.oid
        LEFT JOIN pg_catalog.pg_collation AS collated ON collated.oid = attribute.attcollation
    WHERE attribute.attnum > 0 AND NOT attribute.attisdropped
), indexed AS (
    SELECT index.indpred IS NULL AS is_whole,
           index.indisunique AND index.indimmediate AS is_unique,
           pg_get_expr(index.indpred, index.indrelid) AS predicate,
           ARRAY(
               SELECT COALESCE(attribute.attname::text, '')
               FROM unnest(index.indkey::int2[]) WITH ORDINALITY AS part (number, place)
                   LEFT JOIN pg_catalog.pg_attribute AS attribute
                       ON attribute.attrelid = index.indrelid AND attribute.attnum = part.number
               WHERE part.place <= index.indnkeyatts
               ORDER BY part.place) AS columns
    FROM records JOIN pg_catalog.pg_index AS index ON index.indrelid = records.oid
    WHERE index.indisvalid
), difference (part, place, text) AS (
    SELECT 1, 0, CASE
        WHEN relation.oid IS NULL THEN $1 || ' does not exist'
        WHEN relation.kind NOT IN ('r', 'p') THEN $1 || ' is no table'
        WHEN relation.persistence = 'u' THEN $1 || ' is UNLOGGED, and empty after a crash'
        END
    FROM (VALUES ('idempotency_records')) AS wanted (name) LEFT JOIN relation USING (name)
    UNION ALL
    SELECT 2, 0, 'row-level security hides rows of ' || $1
    FROM records WHERE row_security_active(oid)
    UNION ALL
    SELECT 3, 2 * expected.place, 'column ' || name || ' of ' || $1 || CASE
        WHEN found.kind IS NULL THEN ' does not exist'
        WHEN found.kind <> expected.kind THEN format(' is %s, not %s', found.kind, expected.kind)
        WHEN found.collation NOT IN ('C', 'POSIX', 'ucs_basic') THEN ' is not COLLATE \"C\"'
        END
    FROM records CROSS JOIN expected LEFT JOIN found USING (name)
    UNION ALL
    SELECT 3, 2 * expected.place + 1, 'column ' || name || ' of ' || $1
        || CASE WHEN found.not_null THEN ' is NOT NULL' ELSE ' is not NOT NULL' END
    FROM expected JOIN found USING (name)
    WHERE found.not_null <> expected.not_null
    UNION ALL
    SELECT 4, place, format('column \"%s\" of %s is NOT NULL without a default',
        replace(name, '\"', '\"\"'), $1)
    FROM found
    WHERE not_null AND NOT has_default AND name NOT IN (SELECT name FROM expected)
    UNION ALL
    SELECT 5, 0, $1 || ' has no PRIMARY KEY (scope, key)'
    FROM records
    WHERE NOT EXISTS (
        SELECT FROM indexed
        WHERE is_whole AND is_unique
          AND columns @> ARRAY['scope', 'key'] AND cardinality(columns) = 2)
    UNION ALL
    SELECT 6, 0, $1 || ' has no index on (expires_at)'
    FROM records
    WHERE NOT EXISTS (SELECT FROM indexed WHERE is_whole AND columns[1] = 'expires_at')
    UNION ALL
    SELECT 7, 0, $1 || ' has no index on (scope, key) WHERE unknown_since IS NOT NULL'
    FROM records
    WHERE NOT EXISTS (
        SELECT FROM indexed
        WHERE predicate = '(unknown_since IS NOT NULL)' AND columns = ARRAY['scope', 'key'])
)
SELECT text
FROM difference
WHERE text IS NOT NULL
ORDER BY part, place";

const MISSING_PRIVILEGES: &str = "
SELECT 'schema ' || quote_ident(namespace.nspname) || ' (USAGE)'
FROM pg_catalog.pg_namespace AS namespace
WHERE namespace.nspname = {schema} AND NOT has_schema_privilege(namespace.oid, 'USAGE')
UNION ALL
SELECT 'table ' || quote_ident(namespace.nspname) || '.' || class.relname
       || ' (' || wanted.privilege || ')'
FROM pg_catalog.pg_class AS class
    JOIN pg_catalog.pg_namespace AS namespace ON namespace.oid = class.relnamespace
    CROSS JOIN (VALUES ('SELECT'), ('INSERT'), ('UPDATE'), ('DELETE')) AS wanted (privilege)
WHERE namespace.nspname = {schema} AND class.relname = 'idempotency_records'
  -- One that is of another kind is a difference, and has other privileges.
  AND class.relkind <> 'S' AND NOT has_table_privilege(class.oid, wanted.privilege)";
