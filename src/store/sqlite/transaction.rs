//! The handler's own transaction, which completes its record and commits both.

use sqlx::{Connection as _, Sqlite, Transaction, error::DatabaseError, query};

use super::{SqliteStore, statements};
use crate::{
    Operation, StoreError,
    store::{
        Completion, Transitioned, sql,
        sql::commit::{ClaimStatus, CommitBackend, CommitFuture, CommitResponse, ENDED, commit},
        sql::commit_error::{CommitError, CommitErrorKind},
        sql::transaction::OperationTransaction,
    },
};

impl SqliteStore {
    /// Begins a transaction for the handler's own writes in the store's file, to
    /// be ended by [`commit`](Self::commit) or
    /// [`rollback`](OperationTransaction::rollback). It can write from its start.
    ///
    /// **While it is open nobody else writes to the file**, and claims wait: do
    /// nothing slow in it. Dropped, it is rolled back, as after a crash. A
    /// dropped call leaves no transaction behind.
    ///
    /// # Errors
    ///
    /// [`Unavailable`](CommitErrorKind::Unavailable) if other writers keep the
    /// file locked for 5 s, and [`LeaseLost`](CommitErrorKind::LeaseLost). Both
    /// are 503 with `Retry-After`.
    pub async fn begin(&self, operation: &Operation) -> Result<SqliteTransaction, CommitError> {
        let pool = self.transactions.clone();
        OperationTransaction::begin(operation, async move {
            let begun = pool.begin_with(BEGIN).await;
            begun.map_err(|error| CommitError::caused(CommitErrorKind::Unavailable, error))
        })
        .await
    }

    /// Commits `transaction` together with `response`: after a crash at any
    /// moment, either both are there or neither is.
    ///
    /// The response is written as the last statement, and COMMIT is run by a
    /// task that goes on when the caller is dropped. A transaction from another
    /// pool is accepted if it is on the store's file and could write from its
    /// start. One that has ended before, by a statement of the handler's own or
    /// by SQLite itself (`OR ROLLBACK`, a full disk), records nothing. An example
    /// is at [`OperationTransaction`].
    ///
    /// # Errors
    ///
    /// A [`CommitError`], whose kind says what is known. Return it, or the
    /// handler's own response to it; if the handler answers as if it had been
    /// committed, the client gets 500 `rolled-back`.
    pub fn commit(
        &self,
        operation: &Operation,
        transaction: impl Into<SqliteTransaction>,
        response: impl CommitResponse,
    ) -> CommitFuture {
        commit(self.clone(), operation, transaction.into(), response)
    }
}

/// A transaction that [`SqliteStore::begin`] began, on a connection of sqlx for
/// SQLite.
pub type SqliteTransaction = OperationTransaction<Sqlite>;

impl CommitBackend for SqliteStore {
    type Database = Sqlite;

    async fn complete(
        &self,
        transaction: &mut Transaction<'static, Sqlite>,
        operation: &Operation,
        completion: &Completion,
    ) -> Result<Transitioned, CommitError> {
        if !transaction.is_in_transaction() || has_ended(transaction).await? {
            return Err(CommitError::caused(CommitErrorKind::Aborted, ENDED));
        }
        let done = query(statements::COMPLETE)
            .bind(operation.name().scope().as_str())
            .bind(operation.name().key().as_str())
            .bind(operation.token().as_bytes().as_slice())
            .bind(&completion.response[..])
            .bind(sql::micros(completion.retention))
            .bind(sql::micros(completion.at_least))
            .execute(&mut **transaction)
            .await
            .map_err(refused)?;
        Ok(match done.rows_affected() {
            0 => Transitioned::Superseded,
            _ => Transitioned::Applied,
        })
    }

    fn is_abort(error: &sqlx::Error) -> bool {
        // SQLITE_CONSTRAINT and what extends it: a deferred constraint.
        let code = error.as_database_error().and_then(DatabaseError::code);
        code.and_then(|code| code.parse::<u32>().ok())
            .is_some_and(|code| code & 0xff == 19)
    }

    async fn claim_status(&self, operation: &Operation) -> Result<ClaimStatus, StoreError> {
        let (name, token) = (operation.name().clone(), operation.token());
        // A writer has waited for the end of every other.
        let settled = self
            .write(move |on| Box::pin(async move { statements::settled(on, &name, token).await }))
            .await?;
        sql::claim_status(settled)
    }
}

/// Whether SQLite has rolled the transaction back on its own, as it does for
/// `OR ROLLBACK`, a full disk and others. Each statement would commit on its
/// own then, while sqlx goes on counting the transaction as open.
async fn has_ended(transaction: &mut Transaction<'static, Sqlite>) -> Result<bool, CommitError> {
    // Refused, and without any effect, inside of a transaction only.
    match query("BEGIN").execute(&mut **transaction).await {
        Ok(_) => Ok(true),
        Err(error) if is_nested(&error) => Ok(false),
        Err(error) => Err(refused(error)),
    }
}

fn is_nested(error: &sqlx::Error) -> bool {
    error
        .as_database_error()
        .is_some_and(|error| error.message().contains("within a transaction"))
}

/// A statement that failed before COMMIT was run.
fn refused(error: sqlx::Error) -> CommitError {
    let absent = error
        .as_database_error()
        .is_some_and(|error| error.message().starts_with("no such table"));
    let kind = match absent {
        true => CommitErrorKind::OtherDatabase,
        false => CommitErrorKind::Aborted,
    };
    CommitError::caused(kind, error)
}

const BEGIN: &str = "BEGIN IMMEDIATE";
