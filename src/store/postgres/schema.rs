//! The schema with the store's tables, and the statements that name it.

use std::sync::Arc;

use sqlx::{AssertSqlSafe, SqlSafeStr as _, SqlStr};

use super::{
    engine::PostgresEngine,
    parameters::reclaim_as,
    units::{RECORDS, Table, Unit},
};
use crate::store::{
    ReclaimAs, StoreError,
    sql::columns::{COMPLETED, IN_PROGRESS, RELEASED_ANY_REQUEST, RELEASED_SAME_REQUEST, UNKNOWN},
};

/// The schema of the store's tables, and the role that uses them.
///
/// Each statement names the schema, so that the `search_path` of a transaction
/// changes nothing.
#[derive(Debug)]
pub(crate) struct Schema {
    name: String,
    role: String,
    pub(crate) engine: PostgresEngine,
}

impl Schema {
    pub(super) fn new(
        name: String,
        role: String,
        engine: PostgresEngine,
    ) -> Result<Self, StoreError> {
        let bytes = name.len();
        if bytes == 0 || bytes > LONGEST_NAME || name.contains('\0') {
            return Err(StoreError::unavailable(format!(
                "`schema` must be a name of 1 to {LONGEST_NAME} bytes without NUL, got {bytes} bytes"
            )));
        }
        Ok(Self { name, role, engine })
    }

    /// Returns the schema's name as an identifier.
    pub(super) fn identifier(&self) -> String {
        identifier(&self.name)
    }

    /// Returns the statement of a template.
    pub(super) fn statement(&self, template: &str) -> SqlStr {
        let text: Arc<str> = self.expand(template).into();
        AssertSqlSafe(text).into_sql_str()
    }

    /// Returns one of two statements: that of plain PostgreSQL, or that of other engines.
    pub(super) fn either(&self, plain: &str, portable: &str) -> SqlStr {
        self.statement(match self.engine {
            PostgresEngine::Postgres => plain,
            _ => portable,
        })
    }

    /// Replaces the names in braces.
    pub(super) fn expand(&self, template: &str) -> String {
        let mut text = String::with_capacity(template.len() + 256);
        // Braces stand around names only, so every second part is a name.
        for (index, part) in template.split(['{', '}']).enumerate() {
            if index % 2 == 0 {
                text.push_str(part);
            } else {
                text.push_str(&self.part(part));
            }
        }
        text
    }

    fn part(&self, name: &str) -> String {
        let schema = self.identifier();
        let object = |name: &str| format!("{schema}.{name}");
        match name {
            "name" => schema,
            "schema" => literal(&self.name),
            "records" => object("idempotency_records"),
            "usage" => object("idempotency_usage"),
            "ledger" => object(LEDGER),
            "messages" => object("idempotency_messages"),
            "streams" => object("idempotency_streams"),
            "events" => object("idempotency_events"),
            "turns" => object("idempotency_turns"),

            "record" => RECORD.into(),
            "clock" => format!("\n    (SELECT {NOW} AS now) AS clock"),
            "now" => NOW.into(),
            "unlocked" => self.of_engine(UNLOCKED),
            "absent" => self.of_engine(ABSENT),
            "notify" => match self.notifies() {
                true => self.expand(NOTIFY),
                false => "NULL".into(),
            },
            "skip_locked" => self.of_engine(SKIP_LOCKED),
            "skip_turns" => self.of_engine("\nFOR UPDATE OF turn SKIP LOCKED"),

            "in_progress" => IN_PROGRESS.to_string(),
            "completed" => COMPLETED.to_string(),
            "unknown" => UNKNOWN.to_string(),
            "released_same" => RELEASED_SAME_REQUEST.to_string(),
            "released_any" => RELEASED_ANY_REQUEST.to_string(),

            "takeover" => reclaim_as(ReclaimAs::Takeover).to_string(),
            "retry" => reclaim_as(ReclaimAs::Retry).to_string(),
            "replace" => reclaim_as(ReclaimAs::Replace).to_string(),
            "expired" => reclaim_as(ReclaimAs::Expired).to_string(),
            "rerun" => reclaim_as(ReclaimAs::Rerun).to_string(),
            "reconcile" => reclaim_as(ReclaimAs::Reconcile).to_string(),

            unknown => format!("{{{unknown}}}"),
        }
    }

    /// Whether statements notify the waiters of other processes.
    pub(super) fn notifies(&self) -> bool {
        self.engine == PostgresEngine::Postgres
    }

    /// Returns what a statement has on plain PostgreSQL only.
    fn of_engine(&self, template: &str) -> String {
        match self.engine {
            PostgresEngine::Postgres => self.expand(template),
            _ => String::new(),
        }
    }

    /// Returns the statements that make the tables, which name the schema.
    pub(crate) fn definitions(&self, unit: &Unit) -> String {
        let template = unit
            .definitions
            .replace("TABLE idempotency_", "TABLE {name}.idempotency_")
            .replace("ON idempotency_", "ON {name}.idempotency_");
        self.expand(&template)
    }

    /// Returns the GRANT statements for a role that uses the tables.
    pub(super) fn grants(&self, role: &str, units: &[&Unit]) -> Vec<String> {
        let role = identifier(role);
        let of_table = |table: &Table| {
            let name = table.name;
            format!("GRANT SELECT, INSERT, UPDATE, DELETE ON TABLE {{name}}.{name}")
        };
        let tables = units.iter().flat_map(|unit| unit.tables);
        let of_tables = tables.map(of_table);
        std::iter::once("GRANT USAGE ON SCHEMA {name}".to_owned())
            .chain(of_tables)
            .map(|grant| format!("{} TO {role};", self.expand(&grant)))
            .collect()
    }

    /// Returns the privileges that the store's role needs on the tables of the unit's owner.
    pub(crate) fn needed(&self, unit: &Unit) -> String {
        let grants = self.grants(&self.role, &unit.of_its_owner());
        format!("the role needs {}", grants.join(" "))
    }

    /// Adds the GRANT statements to an error about missing privileges. They are those of
    /// the tables that the error names, or of the records.
    pub(crate) fn explain(&self, error: StoreError) -> StoreError {
        if !error.lacks_privileges() {
            return error;
        }
        let named = Unit::named_in(&error.cause());
        let unit = named.unwrap_or(&RECORDS);
        StoreError::unavailable(format!("{}: {}", error.cause(), self.needed(unit)))
    }
}

/// Defines the statements of a module, each by its template. A second template is that of
/// engines other than plain PostgreSQL.
macro_rules! statements {
    ($($(#[$doc:meta])* $name:ident = $template:expr $(, $portable:expr)?;)*) => {
        pub(crate) struct Statements {
            $($(#[$doc])* pub(crate) $name: sqlx::SqlStr,)*
        }

        impl Statements {
            pub(crate) fn new(schema: &$crate::store::postgres::schema::Schema) -> Self {
                Self {
                    $($name: $crate::store::postgres::schema::statements!(
                        @new schema, $template $(, $portable)?
                    ),)*
                }
            }
        }
    };
    (@new $schema:ident, $template:expr) => {
        $schema.statement($template)
    };
    (@new $schema:ident, $plain:expr, $portable:expr) => {
        $schema.either($plain, $portable)
    };
}
pub(super) use statements;

/// Quotes a name as an identifier.
fn identifier(name: &str) -> String {
    format!("\"{}\"", name.replace('"', "\"\""))
}

/// Quotes a text, for both settings of `standard_conforming_strings`.
fn literal(text: &str) -> String {
    let text = text.replace('\'', "''");
    if text.contains('\\') {
        format!("E'{}'", text.replace('\\', "\\\\"))
    } else {
        format!("'{text}'")
    }
}

/// The columns of a record, without its response, at the time `clock.now`.
const RECORD: &str = "
       operation, fence, attempt::bigint, state::bigint, takeovers::bigint, fingerprint, token,
       clock.now - claimed_at AS age,
       expires_at - clock.now AS expires_in,
       lease_until - clock.now AS lease_left";

/// The time of the statement. Distributed tables refuse functions that are VOLATILE, as
/// `clock_timestamp` is. No statement of plain PostgreSQL waits for a lock after this.
const NOW: &str = "(EXTRACT(EPOCH FROM statement_timestamp()) * 1000000)::bigint";

/// Keeps a name with a visible record away from `ON CONFLICT`, which would wait for a
/// transaction that completes the record.
const ABSENT: &str = "
WHERE NOT EXISTS (SELECT FROM {records} WHERE scope = $1 AND key = $2)";

/// Notifies the waiters of an awaited claim that has ended. The payload tells nothing of
/// the key: every role of the database may listen.
const NOTIFY: &str = "CASE
    WHEN awaited AND state <> {in_progress}
    THEN pg_catalog.pg_notify('idempotency_claims', fence::text)
    END";

/// The channel of these notifications.
pub(super) const CHANNEL: &str = "idempotency_claims";

const SKIP_LOCKED: &str = "
FOR UPDATE OF idempotency_records SKIP LOCKED";

/// Holds for a record that is not locked, and locks it.
const UNLOCKED: &str = "
  AND EXISTS (
      SELECT FROM {records}
      WHERE scope = $1 AND key = $2
      FOR NO KEY UPDATE SKIP LOCKED)";

const LEDGER: &str = "_idempotency_migrations";

/// The server truncates longer names.
const LONGEST_NAME: usize = 63;

#[cfg(test)]
mod tests {
    use super::*;
    use crate::store::postgres::units::STORE;

    fn schema(name: &str) -> Result<Schema, StoreError> {
        Schema::new(name.to_owned(), "role".to_owned(), PostgresEngine::Postgres)
    }

    #[test]
    fn statement_quotes_any_schema_name() {
        let expand = |name: &str| {
            let schema = schema(name).unwrap();
            schema.expand("FROM {records} WHERE {schema}")
        };
        assert_eq!(
            expand("app"),
            "FROM \"app\".idempotency_records WHERE 'app'"
        );
        assert_eq!(
            expand("a\"b'c\\{records}"),
            "FROM \"a\"\"b'c\\{records}\".idempotency_records WHERE E'a\"b''c\\\\{records}'"
        );
    }

    #[test]
    fn schema_name_that_the_server_would_change_is_refused() {
        for name in ["", "nul\0", &"é".repeat(32)] {
            let error = schema(name).unwrap_err();
            assert!(error.to_string().contains("`schema`"), "{error}");
        }
        assert!(schema(&"s".repeat(63)).is_ok());
    }

    #[test]
    fn definitions_name_the_schema_of_every_object() {
        let schema = schema("a\"b").unwrap();
        let named = STORE.map(|unit| schema.definitions(unit)).concat();
        let statements: Vec<&str> = named
            .lines()
            .filter(|line| !line.starts_with("--") && line.contains("idempotency_"))
            .collect();
        assert_eq!(statements.len(), 5, "{statements:?}");
        for statement in statements {
            assert!(statement.contains("\"a\"\"b\".idempotency_"), "{statement}");
        }
    }
}
