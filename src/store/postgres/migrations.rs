//! Migrations of the store's tables.

use std::{sync::Arc, time::Duration};

use sqlx::{
    AssertSqlSafe, ConnectOptions as _, Connection as _, Error, PgConnection, migrate::Migration,
    query, query_as, raw_sql,
};

use super::{
    PostgresStore,
    error::{connect_failure, failure},
    schema::Schema,
    session::Timeouts,
    tables::{Tables, template},
    units::{STORE, Unit, VERSIONS},
};
use crate::store::{StoreError, sql::detached};

impl PostgresStore {
    /// Makes the store's tables, or brings them up to date; and their schema, if it
    /// was [named](crate::store::PostgresStoreBuilder::schema) and does not exist.
    ///
    /// Tables that the application's own migrations have made are checked, as by
    /// [`check_schema`](Self::check_schema), and adopted. If nothing is to be done,
    /// nothing is written, and a role that may not create tables is enough.
    ///
    /// Safe from several processes at once: one migrates, the others wait for
    /// up to a minute. All is one transaction; a crash leaves it done or not done.
    ///
    /// # Errors
    ///
    /// - The server cannot be reached, or does not let the role create what is
    ///   missing.
    /// - Tables are there that differ from what this version needs. The error names
    ///   each difference.
    /// - The database was migrated by a later version of this crate.
    pub async fn migrate(&self) -> Result<(), StoreError> {
        self.migrate_units(&STORE).await
    }

    pub(crate) async fn migrate_units(
        &self,
        units: &'static [&'static Unit],
    ) -> Result<(), StoreError> {
        let connector = Arc::clone(&self.inner.connector);
        detached(async move {
            // sqlx would log the wait for another process as a slow statement.
            let options = connector.options.clone().disable_statement_logging();
            let connected = options.connect().await;
            let mut connection = connected.map_err(|error| connect_failure(error, &options))?;
            let begin = AssertSqlSafe(format!("{}; {QUIETLY}", TIMEOUTS.begin()));
            let mut transaction = connection.begin_with(begin).await.map_err(failure)?;
            for unit in units {
                migrate(&mut transaction, &connector.schema, unit).await?;
            }
            transaction.commit().await.map_err(failure)?;
            connection.close().await.map_err(failure)
        })
        .await
    }

    /// Returns the statements that make the store's tables, for the application's
    /// own migrations. Each names the [schema](crate::store::PostgresStoreBuilder::schema),
    /// which has to exist.
    ///
    /// [`migrate`](Self::migrate) adopts the tables afterwards; it need not be
    /// called at all.
    #[must_use]
    pub fn schema_sql(&self) -> String {
        let schema = &self.inner.connector.schema;
        STORE.map(|unit| schema.definitions(unit)).join("\n")
    }
}

/// Must run in a transaction.
async fn migrate(on: &mut PgConnection, schema: &Schema, unit: &Unit) -> Result<(), StoreError> {
    let migration = unit.migration();
    if !is_due(on, schema, unit, &migration).await? {
        return Ok(());
    }
    // Another process may be migrating.
    query("SELECT pg_catalog.pg_advisory_xact_lock($1)")
        .persistent(false)
        .bind(LOCK)
        .execute(&mut *on)
        .await
        .map_err(failure)?;
    if !is_due(on, schema, unit, &migration).await? {
        return Ok(());
    }
    make(on, schema, unit, &migration)
        .await
        .map_err(|error| creating(failure(error), schema, unit))
}

/// Returns whether the migration has to be done or noted.
async fn is_due(
    on: &mut PgConnection,
    schema: &Schema,
    unit: &Unit,
    migration: &Migration,
) -> Result<bool, StoreError> {
    let ledger = Ledger::look(on, schema).await.map_err(failure)?;
    if ledger.may_read {
        let applied: Vec<(i64, bool, Vec<u8>)> = query_as(template(schema, APPLIED))
            .persistent(false)
            .fetch_all(&mut *on)
            .await
            .map_err(failure)?;
        if let Some((later, ..)) = applied.iter().find(|(version, ..)| *version > VERSIONS) {
            return Err(StoreError::unavailable(format!(
                "the tables were migrated to version {later} by a later version of this crate, \
                 which knows {VERSIONS} versions",
            )));
        }
        let mut applied = applied.iter();
        if let Some((_, success, checksum)) = applied.find(|(version, ..)| *version == unit.version)
        {
            if *success && checksum[..] == migration.checksum[..] {
                return Ok(false);
            }
            return Err(StoreError::unavailable(format!(
                "the ledger of the store's migrations has another migration of version {}: \
                 `{}::check_schema` says how the tables differ from what is needed",
                unit.version, unit.owner
            )));
        }
    }
    let found = Tables::look(on, schema, unit).await.map_err(failure)?;
    if found.is_empty() {
        return Ok(true);
    }
    found.refuse_differences()?;
    // The application's migrations made the tables. Without the right to make a ledger,
    // or to read it, nothing can be noted.
    Ok(ledger.may_note && (ledger.may_read || !ledger.exists))
}

/// Makes the missing tables, and notes the migration as done.
async fn make(
    on: &mut PgConnection,
    schema: &Schema,
    unit: &Unit,
    migration: &Migration,
) -> Result<(), Error> {
    if !Ledger::look(on, schema).await?.has_schema {
        raw_sql(template(schema, "CREATE SCHEMA IF NOT EXISTS {name}"))
            .execute(&mut *on)
            .await?;
    }
    if Tables::look(on, schema, unit).await?.is_empty() {
        raw_sql(AssertSqlSafe(schema.definitions(unit)))
            .execute(&mut *on)
            .await?;
    }
    raw_sql(template(schema, LEDGER)).execute(&mut *on).await?;
    query(template(schema, NOTE))
        .persistent(false)
        .bind(migration.version)
        .bind(&*migration.description)
        .bind(&*migration.checksum)
        .execute(on)
        .await
        .map(drop)
}

/// Adds a remedy to the error of a role that may not create the tables.
fn creating(error: StoreError, schema: &Schema, Unit { owner, .. }: &Unit) -> StoreError {
    if !error.lacks_privileges() {
        return error;
    }
    StoreError::unavailable(format!(
        "{}: call `{owner}::migrate` as a role that may create tables in schema {}, \
         or apply `{owner}::schema_sql()` as one, and then the statements of \
         `{owner}::grants_for`",
        error.cause(),
        schema.identifier(),
    ))
}

/// The ledger, before it is read.
struct Ledger {
    has_schema: bool,
    exists: bool,
    may_read: bool,
    /// Whether the migration may be noted, in a new ledger if there is none.
    may_note: bool,
}

impl Ledger {
    async fn look(on: &mut PgConnection, schema: &Schema) -> Result<Self, Error> {
        let look = query_as(template(schema, LOOK_FOR_LEDGER)).persistent(false);
        let (has_schema, exists, may_read, may_note) = look.fetch_one(on).await?;
        Ok(Self {
            has_schema,
            exists,
            may_read,
            may_note,
        })
    }
}

/// A migration may have to wait for another one.
const TIMEOUTS: Timeouts = Timeouts {
    statement: Duration::ZERO,
    lock: Duration::from_secs(60),
    idle_in_transaction: Duration::ZERO,
};

/// Suppresses notices about objects that exist.
const QUIETLY: &str = "SET LOCAL client_min_messages TO warning";

/// The number of an advisory lock, chosen at random.
const LOCK: i64 = 0x6964_656d_706f_7465;

/// Has the columns of sqlx's own ledgers.
const LEDGER: &str = "
CREATE TABLE IF NOT EXISTS {ledger} (
    version bigint PRIMARY KEY,
    description text NOT NULL,
    installed_on timestamptz NOT NULL DEFAULT now(),
    success boolean NOT NULL,
    checksum bytea NOT NULL,
    execution_time bigint NOT NULL
)";

const APPLIED: &str = "SELECT version, success, checksum FROM {ledger} ORDER BY version";

const NOTE: &str = "
INSERT INTO {ledger} (version, description, success, checksum, execution_time)
VALUES ($1, $2, TRUE, $3, 0)";

const LOOK_FOR_LEDGER: &str = "
SELECT namespace.oid IS NOT NULL AS has_schema,
       ledger.oid IS NOT NULL AS exists,
       COALESCE(
           has_schema_privilege(namespace.oid, 'USAGE')
               AND has_table_privilege(ledger.oid, 'SELECT'),
           false) AS may_read,
       COALESCE(
           CASE
               WHEN ledger.oid IS NULL THEN has_schema_privilege(namespace.oid, 'CREATE')
               ELSE has_table_privilege(ledger.oid, 'INSERT')
           END,
           false) AS may_note
FROM (SELECT 1) AS one
    LEFT JOIN pg_catalog.pg_namespace AS namespace ON namespace.nspname = {schema}
    LEFT JOIN pg_catalog.pg_class AS ledger
        ON ledger.relnamespace = namespace.oid AND ledger.relname = '_idempotency_migrations'";
