//! The billing: one statement for each minute, however many processes ask for it, and however
//! often.

use std::time::{Duration, SystemTime, UNIX_EPOCH};

use serde::{Deserialize, Serialize};
use tokio::time;
use tower_idempotency::{
    CommitError, DynStore, Guard, Key, Operation, Ran, Recovery, RunError, Scope,
    sqlx::{query, query_scalar},
    store::RecordName,
};
use tracing::{info, warn};

use crate::{
    Error,
    database::{Database, on_database},
    server,
};

pub(crate) async fn run() -> Result<(), Error> {
    let database = Database::open(&server::directory()?).await?;
    let guard = Guard::builder(database.store())
        .schema("statement/1")
        .lease(Duration::from_secs(2))
        .store_timeout(Duration::from_secs(1))
        // The statement and its record are one transaction.
        .recovery(Recovery::Rerun)
        .build()?;
    let billing = async {
        let mut ticks = time::interval(Duration::from_secs(1));
        loop {
            ticks.tick().await;
            match bill(&database, &guard).await {
                Ok(Ran::Now(Statement { operation, .. })) => info!(operation, "statement written"),
                Ok(_) => {}
                Err(error) => warn!(%error, "no statement yet"),
            }
        }
    };
    tokio::select! {
        () = server::told_to_stop() => {}
        () = billing => {}
    }
    server::log_drained(guard.drain(server::GRACE).await);
    Ok(())
}

#[derive(Debug, Deserialize, Serialize)]
struct Statement {
    operation: String,
    payments: i64,
}

/// Bills the last whole minute, unless it is billed.
async fn bill(
    database: &Database,
    guard: &Guard<DynStore>,
) -> Result<Ran<Statement>, RunError<CommitError>> {
    let now = SystemTime::now().duration_since(UNIX_EPOCH);
    let minute = now.unwrap_or_default().as_secs() / 60 - 1;
    let scope = Scope::single_tenant().with_endpoint("billing");
    let name = RecordName::new(scope, Key::new(minute.to_string()));
    let database = database.clone();
    let work = async move |operation| write_statement(database, operation, minute).await;
    guard.run(&name, &minute, work).await
}

async fn write_statement(
    database: Database,
    operation: Operation,
    minute: u64,
) -> Result<Statement, CommitError> {
    on_database!(database, |store, _pool| {
        let mut transaction = store.begin(&operation).await?;
        let statement = Statement {
            operation: operation.id().to_string(),
            payments: query_scalar(PAYMENTS).fetch_one(&mut *transaction).await?,
        };
        query(STATEMENT)
            .bind(minute.to_string())
            .bind(statement.payments)
            .execute(&mut *transaction)
            .await?;
        store
            .commit_value(&operation, transaction, &statement)
            .await?;
        Ok(statement)
    })
}

const PAYMENTS: &str = "SELECT count(*) FROM payments";
const STATEMENT: &str = "INSERT INTO statements (period, payments) VALUES ($1, $2)";
