//! The billing: one statement for each hour, however many processes ask for it, and however
//! often.

use std::time::Duration;

use serde::{Deserialize, Serialize};
use tokio::time;
use tower_idempotency::{
    CommitError, DynStore, Guard, Operation, Ran, Recovery,
    schedule::{Job, Missed, Period, Periods},
    sqlx::{query, query_scalar},
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
        .retention(YEAR)
        .unknown_retention(YEAR)
        // The statement and its record are one transaction.
        .recovery(Recovery::Rerun)
        .build()?;
    let job = Job::builder(guard.clone(), "statements", Periods::hourly("UTC")?)
        .since("2026-01-01T00+00:00")
        .missed(Missed::Latest)?;
    tokio::select! {
        () = server::told_to_stop() => {}
        () = bill(&job, database) => {}
    }
    server::log_drained(guard.drain(server::GRACE).await);
    Ok(())
}

#[derive(Debug, Deserialize, Serialize)]
struct Statement {
    operation: String,
    payments: i64,
}

/// Bills the last hour that has ended, unless it is billed.
async fn bill(job: &Job<DynStore>, database: Database) {
    let mut ticks = time::interval(Duration::from_secs(1));
    loop {
        ticks.tick().await;
        let database = database.clone();
        let runs = job.run_due(move |operation, hour| {
            let database = database.clone();
            async move { write_statement(database, operation, hour).await }
        });
        let runs = match runs.await {
            Ok(runs) => runs,
            Err(error) => {
                warn!(%error, "the store does not tell the time");
                continue;
            }
        };
        for run in runs {
            match run.result {
                Ok(Ran::Now(Statement { operation, .. })) => info!(operation, "statement written"),
                Ok(Ran::Replayed(_) | Ran::Unrecorded(_)) => {}
                Err(error) => warn!(%error, "no statement yet"),
            }
        }
    }
}

async fn write_statement(
    database: Database,
    operation: Operation,
    hour: Period,
) -> Result<Statement, CommitError> {
    on_database!(database, |store, _pool| {
        let mut transaction = store.begin(&operation).await?;
        let statement = Statement {
            operation: operation.id().to_string(),
            payments: query_scalar(PAYMENTS).fetch_one(&mut *transaction).await?,
        };
        query(STATEMENT)
            .bind(hour.label())
            .bind(statement.payments)
            .execute(&mut *transaction)
            .await?;
        store
            .commit_value(&operation, transaction, &statement)
            .await?;
        Ok(statement)
    })
}

const YEAR: Duration = Duration::from_secs(400 * 24 * 3600);
const PAYMENTS: &str = "SELECT count(*) FROM payments";
const STATEMENT: &str = "INSERT INTO statements (period, payments) VALUES ($1, $2)";
