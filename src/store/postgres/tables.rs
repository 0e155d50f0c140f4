//! Checks of the store's tables, and the privileges that a role needs on them.

use sqlx::{
    AssertSqlSafe, Error, FromRow, PgConnection, Row as _, postgres::PgRow, query_as, query_scalar,
};

use super::{
    PostgresStore,
    error::failure,
    schema::{FENCES, RECORDS, REMOVALS, Schema, identifier},
    session::Session,
};
use crate::store::{StoreError, sql::detached};

impl PostgresStore {
    /// Checks that the tables are as this version needs them, and that the store's
    /// role may use them.
    ///
    /// # Errors
    ///
    /// If the server cannot be reached, or with the name of each table, column,
    /// index, sequence and privilege that is missing or differs, and what to do.
    pub async fn check_schema(&self) -> Result<(), StoreError> {
        let (inner, connector) = (self.inner.clone(), self.inner.connector.clone());
        detached(async move {
            let check = async |session: &mut Session<'_>| {
                let (on, schema) = (&mut *session.connection, &connector.schema);
                let found = Tables::look(on, schema).await.map_err(failure)?;
                let differences = found.refuse_differences(schema);
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
        self.inner.connector.schema.grants(role).join("\n")
    }
}

/// A row whose columns have the names of the fields.
macro_rules! row {
    ($(#[$doc:meta])* struct $name:ident {
        $($(#[$about:meta])* $field:ident: $kind:ty,)*
    }) => {
        $(#[$doc])*
        struct $name {
            $($(#[$about])* $field: $kind,)*
        }

        impl FromRow<'_, PgRow> for $name {
            fn from_row(row: &PgRow) -> Result<Self, Error> {
                Ok(Self { $($field: row.try_get(stringify!($field))?,)* })
            }
        }
    };
}
pub(super) use row;

/// The relations in the schema that have names of the store's.
pub(super) struct Tables {
    relations: Vec<Relation>,
    columns: Vec<Column>,
    indexes: Vec<Index>,
    sequences: Vec<Sequence>,
    /// Whether a number was drawn from the sequence of removals. `None` if the role may
    /// not read it.
    has_drawn: Option<bool>,
}

row! {
struct Relation {
    name: String,
    kind: String,
    persistence: String,
    may_read: bool,
    hides_rows: bool,
}
}

row! {
struct Column {
    name: String,
    kind: String,
    not_null: bool,
    collation: Option<String>,
    has_default: bool,
}
}

row! {
struct Index {
    columns: Vec<String>,
    is_unique: bool,
    is_whole: bool,
    is_of_unknown: bool,
}
}

row! {
struct Sequence {
    name: String,
    kind: String,
    increment: i64,
    cycles: bool,
}
}

impl Tables {
    pub(super) async fn look(on: &mut PgConnection, schema: &Schema) -> Result<Self, Error> {
        let relations: Vec<Relation> = all(on, schema, RELATIONS).await?;
        let removals = relations.iter().find(|found| found.name == REMOVALS);
        let has_drawn = match removals {
            Some(removals) if removals.kind == "S" && removals.may_read => {
                let drawn = query_scalar(template(schema, "SELECT is_called FROM {removals}"));
                Some(drawn.persistent(false).fetch_one(&mut *on).await?)
            }
            _ => None,
        };
        Ok(Self {
            relations,
            columns: all(on, schema, COLUMNS).await?,
            indexes: all(on, schema, INDEXES).await?,
            sequences: all(on, schema, SEQUENCES).await?,
            has_drawn,
        })
    }

    pub(super) fn is_empty(&self) -> bool {
        self.relations.is_empty()
    }

    /// Fails with all differences from what the store needs.
    pub(super) fn refuse_differences(&self, schema: &Schema) -> Result<(), StoreError> {
        let mut differences = self.differences_of_the_table(schema);
        for name in [FENCES, REMOVALS] {
            differences.extend(self.difference_of_a_sequence(schema, name));
        }
        if differences.is_empty() {
            return Ok(());
        }
        let remedy = match self.is_empty() {
            true => "call `PostgresStore::migrate`, or apply `PostgresStore::schema_sql()`",
            false => "change them to what `PostgresStore::schema_sql()` makes",
        };
        Err(StoreError::unavailable(format!(
            "{}: {remedy}",
            differences.join("; ")
        )))
    }

    fn differences_of_the_table(&self, schema: &Schema) -> Vec<String> {
        let table = schema.expand("table {records}");
        let Some(records) = self.relations.iter().find(|found| found.name == RECORDS) else {
            return vec![format!("{table} does not exist")];
        };
        if !matches!(&*records.kind, "r" | "p") {
            return vec![format!("{table} is no table")];
        }
        let mut differences = Vec::new();
        if records.persistence == "u" {
            differences.push(format!("{table} is UNLOGGED, and empty after a crash"));
        }
        if records.hides_rows {
            differences.push(format!("row-level security hides rows of {table}"));
        }
        for (name, kind, not_null) in EXPECTED {
            let what = format!("column {name} of {table}");
            let Some(column) = self.columns.iter().find(|column| column.name == name) else {
                differences.push(format!("{what} does not exist"));
                continue;
            };
            if column.kind != kind {
                differences.push(format!("{what} is {}, not {kind}", column.kind));
            } else if column.collation.as_deref().is_some_and(is_linguistic) {
                differences.push(format!("{what} is not COLLATE \"C\""));
            }
            if column.not_null != not_null {
                let wanted = if not_null {
                    "is not NOT NULL"
                } else {
                    "is NOT NULL"
                };
                differences.push(format!("{what} {wanted}"));
            }
        }
        let is_known = |column: &Column| EXPECTED.iter().any(|(name, ..)| column.name == *name);
        for column in &self.columns {
            if !is_known(column) && column.not_null && !column.has_default {
                let name = identifier(&column.name);
                differences.push(format!(
                    "column {name} of {table} is NOT NULL without a default"
                ));
            }
        }
        let is_key = |index: &Index| {
            index.is_unique && index.columns.len() == 2 && {
                let has = |name: &str| index.columns.iter().any(|column| column == name);
                has("scope") && has("key")
            }
        };
        if !self.indexes.iter().any(is_key) {
            differences.push(format!("{table} has no PRIMARY KEY (scope, key)"));
        }
        let leads = |index: &Index| {
            let first = index.columns.first();
            index.is_whole && first.is_some_and(|column| column == "expires_at")
        };
        if !self.indexes.iter().any(leads) {
            differences.push(format!("{table} has no index on (expires_at)"));
        }
        let lists = |index: &Index| index.is_of_unknown && index.columns == ["scope", "key"];
        if !self.indexes.iter().any(lists) {
            differences.push(format!(
                "{table} has no index on (scope, key) WHERE unknown_since IS NOT NULL"
            ));
        }
        differences
    }

    fn difference_of_a_sequence(&self, schema: &Schema, name: &str) -> Option<String> {
        let sequence = format!("sequence {}.{name}", schema.identifier());
        let Some(found) = self.sequences.iter().find(|found| found.name == name) else {
            return Some(format!("{sequence} does not exist"));
        };
        if found.kind != "bigint" || found.increment < 1 || found.cycles {
            return Some(format!(
                "{sequence} is not an ascending bigint without CYCLE"
            ));
        }
        let is_drawn = name != REMOVALS || self.has_drawn != Some(false);
        (!is_drawn).then(|| format!("{sequence} has drawn no number: call nextval once"))
    }
}

/// The privileges that the role of the connection lacks.
async fn missing_privileges(on: &mut PgConnection, schema: &Schema) -> Result<Vec<String>, Error> {
    query_scalar(template(schema, MISSING_PRIVILEGES))
        .persistent(false)
        .fetch_all(on)
        .await
}

async fn all<T>(on: &mut PgConnection, schema: &Schema, query: &str) -> Result<Vec<T>, Error>
where
    T: for<'r> FromRow<'r, PgRow> + Send + Unpin,
{
    query_as(template(schema, query))
        .persistent(false)
        .fetch_all(on)
        .await
}

pub(super) fn template(schema: &Schema, template: &str) -> AssertSqlSafe<String> {
    AssertSqlSafe(schema.expand(template))
}

/// Collations that compare by bytes have these names.
fn is_linguistic(collation: &str) -> bool {
    !matches!(collation, "C" | "POSIX" | "ucs_basic")
}

/// Each column with its type, and whether it is NOT NULL.
const EXPECTED: [(&str, &str, bool); 14] = [
    ("scope", "text", true),
    ("key", "text", true),
    ("state", "smallint", true),
    ("attempt", "integer", true),
    ("takeovers", "integer", true),
    ("fence", "bigint", true),
    ("claimed_at", "timestamp with time zone", true),
    ("lease_until", "timestamp with time zone", true),
    ("expires_at", "timestamp with time zone", true),
    ("operation", "bytea", true),
    ("token", "bytea", true),
    ("fingerprint", "bytea", true),
    ("response", "bytea", false),
    ("unknown_since", "timestamp with time zone", false),
];

/// A query about relations in the schema.
macro_rules! relations {
    ($select:literal, $joins:literal, $which:literal) => {
        concat!(
            "SELECT ",
            $select,
            "
FROM pg_catalog.pg_class AS class
    JOIN pg_catalog.pg_namespace AS namespace ON namespace.oid = class.relnamespace",
            $joins,
            "
WHERE namespace.nspname = {schema} AND ",
            $which
        )
    };
}

const RELATIONS: &str = relations!(
    "class.relname::text AS name, class.relkind::text AS kind,
       class.relpersistence::text AS persistence,
       has_schema_privilege(namespace.oid, 'USAGE') AND has_table_privilege(class.oid, 'SELECT')
           AS may_read,
       class.relkind IN ('r', 'p') AND row_security_active(class.oid) AS hides_rows",
    "",
    "class.relname IN ('idempotency_records', 'idempotency_fences', 'idempotency_removals')"
);

const COLUMNS: &str = relations!(
    "attribute.attname::text AS name,
       format_type(attribute.atttypid, attribute.atttypmod) AS kind,
       attribute.attnotnull AS not_null,
       collated.collname::text AS collation,
       attribute.atthasdef OR attribute.attidentity <> '' AS has_default",
    "
    JOIN pg_catalog.pg_attribute AS attribute ON attribute.attrelid = class.oid
    LEFT JOIN pg_catalog.pg_collation AS collated ON collated.oid = attribute.attcollation",
    "class.relname = 'idempotency_records'
  AND attribute.attnum > 0 AND NOT attribute.attisdropped
ORDER BY attribute.attnum"
);

const INDEXES: &str = relations!(
    "ARRAY(
           SELECT COALESCE(attribute.attname::text, '')
           FROM unnest(index.indkey::int2[]) WITH ORDINALITY AS part (number, place)
               LEFT JOIN pg_catalog.pg_attribute AS attribute
                   ON attribute.attrelid = index.indrelid AND attribute.attnum = part.number
           WHERE part.place <= index.indnkeyatts
           ORDER BY part.place) AS columns,
       index.indisvalid AND index.indpred IS NULL AS is_whole,
       COALESCE(
           index.indisvalid
               AND pg_get_expr(index.indpred, index.indrelid) = '(unknown_since IS NOT NULL)',
           false) AS is_of_unknown,
       index.indisvalid AND index.indpred IS NULL
           AND index.indisunique AND index.indimmediate AS is_unique",
    "
    JOIN pg_catalog.pg_index AS index ON index.indrelid = class.oid",
    "class.relname = 'idempotency_records'"
);

const SEQUENCES: &str = relations!(
    "class.relname::text AS name,
       format_type(sequence.seqtypid, NULL) AS kind,
       sequence.seqincrement AS increment,
       sequence.seqcycle AS cycles",
    "
    JOIN pg_catalog.pg_sequence AS sequence ON sequence.seqrelid = class.oid",
    "class.relname IN ('idempotency_fences', 'idempotency_removals')"
);

const MISSING_PRIVILEGES: &str = concat!(
    "SELECT 'schema ' || quote_ident(namespace.nspname) || ' (USAGE)'
FROM pg_catalog.pg_namespace AS namespace
WHERE namespace.nspname = {schema} AND NOT has_schema_privilege(namespace.oid, 'USAGE')
UNION ALL
",
    relations!(
        "CASE class.relkind WHEN 'S' THEN 'sequence ' ELSE 'table ' END
       || quote_ident(namespace.nspname) || '.' || class.relname
       || ' (' || wanted.privilege || ')'",
        "
    JOIN (VALUES ('idempotency_records', 'SELECT'),
                 ('idempotency_records', 'INSERT'),
                 ('idempotency_records', 'UPDATE'),
                 ('idempotency_records', 'DELETE'),
                 ('idempotency_fences', 'USAGE'),
                 ('idempotency_removals', 'USAGE'),
                 ('idempotency_removals', 'SELECT')) AS wanted (name, privilege)
        ON wanted.name = class.relname",
        // One that is of another kind is a difference, and has other privileges.
        "NOT CASE
      WHEN (class.relkind = 'S') = (wanted.name = 'idempotency_records') THEN true
      WHEN class.relkind = 'S' THEN has_sequence_privilege(class.oid, wanted.privilege)
      ELSE has_table_privilege(class.oid, wanted.privilege)
      END"
    )
);
