//! Checks of the store's tables, and the privileges that a role needs on them.

use sqlx::{AssertSqlSafe, Error, PgConnection, query_scalar};

use super::{
    Inner, PostgresStore,
    error::failure,
    schema::Schema,
    session::Session,
    units::{STORE, Table, Unit},
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
        self.check_units(&STORE).await
    }

    pub(crate) async fn check_units(
        &self,
        units: &'static [&'static Unit],
    ) -> Result<(), StoreError> {
        let check = async move |inner: &Inner, session: &mut Session<'_>| {
            let (on, schema) = (&mut *session.connection, &inner.connector.schema);
            let mut faults = Vec::new();
            for unit in units {
                let found = Tables::look(on, schema, unit).await.map_err(failure)?;
                if let Err(differences) = found.refuse_differences() {
                    faults.push(differences.cause());
                }
                let missing = missing_privileges(on, schema, unit).await;
                let missing = missing.map_err(failure)?.join(", ");
                if !missing.is_empty() {
                    let needed = schema.needed(unit);
                    faults.push(format!("the store's role may not use {missing}: {needed}"));
                }
            }
            match faults.is_empty() {
                true => Ok(()),
                false => Err(StoreError::unavailable(faults.join("; "))),
            }
        };
        detached(self.clone().operate(check)).await
    }

    /// Returns the GRANT statements for a role that serves requests and makes no
    /// tables, one in each line. `role` is quoted as an identifier.
    #[must_use]
    pub fn grants_for(&self, role: &str) -> String {
        self.grants(role, &STORE)
    }

    pub(crate) fn grants(&self, role: &str, units: &[&Unit]) -> String {
        self.inner.connector.schema.grants(role, units).join("\n")
    }
}

/// What the schema has of a unit.
pub(super) struct Tables {
    exist: bool,
    /// The type that makes them.
    owner: &'static str,
    /// The differences from the tables that are needed.
    differences: Vec<String>,
}

impl Tables {
    /// Compares the tables with what is needed.
    pub(super) async fn look(
        on: &mut PgConnection,
        schema: &Schema,
        unit: &Unit,
    ) -> Result<Self, Error> {
        let exist = query_scalar(template(schema, EXIST))
            .persistent(false)
            .bind(unit.tables[0].name)
            .fetch_one(&mut *on)
            .await?;
        let mut differences = Vec::new();
        for table in unit.tables {
            differences.extend(table.differences(on, schema).await?);
        }
        Ok(Self {
            exist,
            owner: unit.owner,
            differences,
        })
    }

    pub(super) fn is_empty(&self) -> bool {
        !self.exist
    }

    /// Fails with all differences, if there are any.
    pub(super) fn refuse_differences(&self) -> Result<(), StoreError> {
        if self.differences.is_empty() {
            return Ok(());
        }
        let owner = self.owner;
        let remedy = match self.exist {
            false => format!("call `{owner}::migrate`, or apply `{owner}::schema_sql()`"),
            true => format!("change them to what `{owner}::schema_sql()` makes"),
        };
        let differences = self.differences.join("; ");
        Err(StoreError::unavailable(format!("{differences}: {remedy}")))
    }
}

impl Table {
    async fn differences(
        &self,
        on: &mut PgConnection,
        schema: &Schema,
    ) -> Result<Vec<String>, Error> {
        let columns = || self.columns.iter();
        let names: Vec<&str> = columns().map(|(name, ..)| *name).collect();
        let types: Vec<&str> = columns().map(|(_, kind, _)| *kind).collect();
        let not_null: Vec<bool> = columns().map(|(.., not_null)| *not_null).collect();
        let indexes = || self.indexes.iter();
        let indexed: Vec<String> = indexes().map(|(columns, _)| columns.join(", ")).collect();
        let predicates: Vec<Option<&str>> = indexes().map(|(_, predicate)| *predicate).collect();
        query_scalar(template(schema, DIFFERENCES))
            .persistent(false)
            .bind(format!("table {}.{}", schema.identifier(), self.name))
            .bind(self.name)
            .bind(names)
            .bind(types)
            .bind(not_null)
            .bind(self.primary_key)
            .bind(indexed)
            .bind(predicates)
            .fetch_all(on)
            .await
    }
}

/// The privileges that the role of the connection lacks.
async fn missing_privileges(
    on: &mut PgConnection,
    schema: &Schema,
    unit: &Unit,
) -> Result<Vec<String>, Error> {
    let tables: Vec<&str> = unit.tables.iter().map(|table| table.name).collect();
    query_scalar(template(schema, MISSING_PRIVILEGES))
        .persistent(false)
        .bind(tables)
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

/// `$1` names the table `$2`. Its columns are `$3`, with their types `$4` and whether they
/// are NOT NULL `$5`. `$6` is its primary key. Its indexes begin with the columns `$7` and
/// have the predicates `$8`. Collations that compare by bytes have three names.
const DIFFERENCES: &str = "
WITH relation AS (
    SELECT class.oid, class.relname::text AS name, class.relkind AS kind,
           class.relpersistence AS persistence
    FROM pg_catalog.pg_class AS class
        JOIN pg_catalog.pg_namespace AS namespace ON namespace.oid = class.relnamespace
    WHERE namespace.nspname = {schema}
), found_table AS (
    SELECT oid
    FROM relation
    WHERE name = $2 AND kind IN ('r', 'p')
), expected AS (
    SELECT place, name, kind, not_null
    FROM unnest($3::text[], $4::text[], $5::bool[]) WITH ORDINALITY
        AS expected (name, kind, not_null, place)
), wanted AS (
    SELECT place, columns, predicate
    FROM unnest($7::text[], $8::text[]) WITH ORDINALITY AS wanted (columns, predicate, place)
), found AS (
    SELECT attribute.attnum AS place, attribute.attname::text AS name,
           format_type(attribute.atttypid, attribute.atttypmod) AS kind,
           attribute.attnotnull AS not_null,
           attribute.atthasdef OR attribute.attidentity <> '' AS has_default,
           collated.collname AS collation
    FROM found_table
        JOIN pg_catalog.pg_attribute AS attribute ON attribute.attrelid = found_table.oid
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
    FROM found_table JOIN pg_catalog.pg_index AS index ON index.indrelid = found_table.oid
    WHERE index.indisvalid
), difference (part, place, text) AS (
    SELECT 1, 0, CASE
        WHEN relation.oid IS NULL THEN $1 || ' does not exist'
        WHEN relation.kind NOT IN ('r', 'p') THEN $1 || ' is no table'
        WHEN relation.persistence = 'u' THEN $1 || ' is UNLOGGED, and empty after a crash'
        END
    FROM (SELECT $2) AS needed (name) LEFT JOIN relation USING (name)
    UNION ALL
    SELECT 2, 0, 'row-level security hides rows of ' || $1
    FROM found_table WHERE row_security_active(oid)
    UNION ALL
    SELECT 3, 2 * expected.place, 'column ' || name || ' of ' || $1 || CASE
        WHEN found.kind IS NULL THEN ' does not exist'
        WHEN found.kind <> expected.kind THEN format(' is %s, not %s', found.kind, expected.kind)
        WHEN found.collation NOT IN ('C', 'POSIX', 'ucs_basic') THEN ' is not COLLATE \"C\"'
        END
    FROM found_table CROSS JOIN expected LEFT JOIN found USING (name)
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
    SELECT 5, 0, format('%s has no PRIMARY KEY (%s)', $1, array_to_string($6::text[], ', '))
    FROM found_table
    WHERE NOT EXISTS (
        SELECT FROM indexed
        WHERE is_whole AND is_unique
          AND columns @> $6 AND cardinality(columns) = cardinality($6))
    UNION ALL
    SELECT 6, place, format('%s has no index on (%s)%s', $1, wanted.columns,
        ' WHERE ' || wanted.predicate)
    FROM found_table CROSS JOIN wanted
    WHERE NOT EXISTS (
        SELECT FROM indexed
        WHERE indexed.predicate IS NOT DISTINCT FROM '(' || wanted.predicate || ')'
          AND indexed.columns[:cardinality(string_to_array(wanted.columns, ', '))]
              = string_to_array(wanted.columns, ', '))
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
WHERE namespace.nspname = {schema} AND class.relname = ANY ($1)
  -- One that is of another kind is a difference, and has other privileges.
  AND class.relkind <> 'S' AND NOT has_table_privilege(class.oid, wanted.privilege)";
