//! The schema that holds the records, and the statements that name it.

use std::sync::Arc;

use sqlx::{AssertSqlSafe, SqlSafeStr as _, SqlStr};

use super::{claims, looks, session, settlements, statements, transaction};
use crate::store::StoreError;

/// A schema, whose name is part of every statement: what a transaction does to
/// its `search_path` changes nothing.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Schema {
    name: String,
}

impl Schema {
    pub(super) fn named(name: String) -> Result<Self, StoreError> {
        let bytes = name.len();
        if bytes == 0 || bytes > LONGEST_NAME || name.contains('\0') {
            return Err(StoreError::unavailable(format!(
                "`schema` must be a name of 1 to {LONGEST_NAME} bytes without NUL, got {bytes} bytes"
            )));
        }
        Ok(Self { name })
    }

    pub(super) fn name(&self) -> &str {
        &self.name
    }

    /// The text of a statement, with the schema named.
    pub(super) fn expand(&self, template: &str) -> String {
        let schema = identifier(&self.name);
        let of = |object: &str| format!("{schema}.{object}");
        let sequence = |name: &str| format!("{}::pg_catalog.regclass", literal(&of(name)));
        let mut text = String::with_capacity(template.len() + 256);
        // Braces stand around names only, so that every second part is one.
        for (place, part) in template.split(['{', '}']).enumerate() {
            if place % 2 == 0 {
                text.push_str(part);
                continue;
            }
            text.push_str(&match part {
                "name" => schema.clone(),
                "schema" => literal(&self.name),
                "next_fence" => format!("pg_catalog.nextval({})", sequence(FENCES)),
                "next_removal" => format!("pg_catalog.nextval({})", sequence(REMOVALS)),
                "fences" => of(FENCES),
                "removals" => of(REMOVALS),
                "ledger" => of(LEDGER),
                "records" => of(RECORDS),
                unknown => format!("{{{unknown}}}"),
            });
        }
        text
    }

    /// What a role needs to serve requests.
    pub(super) fn grants(&self, role: &str) -> [String; 3] {
        let role = identifier(role);
        [
            "GRANT USAGE ON SCHEMA {name}",
            "GRANT SELECT, INSERT, UPDATE, DELETE ON TABLE {records}",
            "GRANT USAGE, SELECT ON SEQUENCE {fences}, {removals}",
        ]
        .map(|grant| format!("{} TO {role};", self.expand(grant)))
    }

    fn statement(&self, template: &str) -> SqlStr {
        let text: Arc<str> = self.expand(template).into();
        AssertSqlSafe(text).into_sql_str()
    }
}

/// The texts of all statements, expanded once. A clone of one shares its text.
pub(super) struct Statements {
    pub(super) schema: Schema,
    /// The role of a new session.
    role: String,
    pub(super) unfit: SqlStr,
    pub(super) claim: SqlStr,
    pub(super) claim_alone: SqlStr,
    pub(super) claim_many: SqlStr,
    pub(super) refence: SqlStr,
    pub(super) refence_many: SqlStr,
    pub(super) settle_many: SqlStr,
    pub(super) settle_one: SqlStr,
    pub(super) states: SqlStr,
    pub(super) read: SqlStr,
    pub(super) read_many: SqlStr,
    pub(super) reclaim: SqlStr,
    pub(super) is_reclaimable: SqlStr,
    pub(super) mark_lapsed: SqlStr,
    pub(super) resolve: SqlStr,
    pub(super) found: SqlStr,
    pub(super) settled: SqlStr,
    pub(super) unsettled: SqlStr,
    pub(super) list_unknown: SqlStr,
    pub(super) list_unknown_in_scope: SqlStr,
    pub(super) list_in_progress: SqlStr,
    pub(super) list_in_progress_in_scope: SqlStr,
    pub(super) forget: SqlStr,
    pub(super) purge_expired: SqlStr,
    pub(super) prepare: SqlStr,
    pub(super) complete: SqlStr,
}

impl Statements {
    pub(super) fn of(schema: Schema, role: String) -> Self {
        let text = |template| schema.statement(template);
        Self {
            unfit: text(session::UNFIT),
            claim: text(claims::CLAIM),
            claim_alone: text(claims::CLAIM_ALONE),
            claim_many: text(claims::CLAIM_MANY),
            refence: text(claims::REFENCE),
            refence_many: text(claims::REFENCE_MANY),
            settle_many: text(settlements::SETTLE_MANY),
            settle_one: text(settlements::SETTLE_ONE),
            states: text(settlements::STATES),
            read: text(looks::READ),
            read_many: text(looks::READ_MANY),
            reclaim: text(statements::RECLAIM),
            is_reclaimable: text(statements::IS_RECLAIMABLE),
            mark_lapsed: text(statements::MARK_LAPSED),
            resolve: text(statements::RESOLVE),
            found: text(statements::FOUND),
            settled: text(statements::SETTLED),
            unsettled: text(statements::UNSETTLED),
            list_unknown: text(statements::LIST_UNKNOWN),
            list_unknown_in_scope: text(statements::LIST_UNKNOWN_IN_SCOPE),
            list_in_progress: text(statements::LIST_IN_PROGRESS),
            list_in_progress_in_scope: text(statements::LIST_IN_PROGRESS_IN_SCOPE),
            forget: text(statements::FORGET),
            purge_expired: text(statements::PURGE_EXPIRED),
            prepare: text(transaction::PREPARE),
            complete: text(transaction::COMPLETE),
            schema,
            role,
        }
    }

    /// Adds the GRANTs to an error of a role that lacks privileges.
    pub(super) fn explain(&self, error: StoreError) -> StoreError {
        if !error.lacks_privileges() {
            return error;
        }
        let grants = self.schema.grants(&self.role);
        StoreError::unavailable(format!(
            "{}: the role needs {}",
            error.cause(),
            grants.join(" ")
        ))
    }
}

/// A name as SQL spells it, whatever is in it.
pub(super) fn identifier(name: &str) -> String {
    format!("\"{}\"", name.replace('"', "\"\""))
}

/// A text as SQL spells it, whatever `standard_conforming_strings` says.
fn literal(text: &str) -> String {
    let text = text.replace('\'', "''");
    if text.contains('\\') {
        format!("E'{}'", text.replace('\\', "\\\\"))
    } else {
        format!("'{text}'")
    }
}

pub(super) const RECORDS: &str = "idempotency_records";
pub(super) const FENCES: &str = "idempotency_fences";
pub(super) const REMOVALS: &str = "idempotency_removals";
const LEDGER: &str = "_idempotency_migrations";

/// The server cuts longer names off.
const LONGEST_NAME: usize = 63;

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn statement_quotes_any_schema_name() {
        let expand = |name: &str| {
            let schema = Schema::named(name.into()).unwrap();
            schema.expand("{next_fence} FROM {records} WHERE {schema}")
        };
        assert_eq!(
            expand("app"),
            "pg_catalog.nextval('\"app\".idempotency_fences'::pg_catalog.regclass) \
             FROM \"app\".idempotency_records WHERE 'app'"
        );
        assert_eq!(
            expand("a\"b'c\\{records}"),
            "pg_catalog.nextval(E'\"a\"\"b''c\\\\{records}\".idempotency_fences'::pg_catalog.regclass) \
             FROM \"a\"\"b'c\\{records}\".idempotency_records WHERE E'a\"b''c\\\\{records}'"
        );
    }

    #[test]
    fn schema_name_that_the_server_would_change_is_refused() {
        for name in ["", "nul\0", &"é".repeat(32)] {
            let error = Schema::named(name.to_owned()).unwrap_err();
            assert!(error.to_string().contains("`schema`"), "{error}");
        }
        assert!(Schema::named("s".repeat(63)).is_ok());
    }
}
