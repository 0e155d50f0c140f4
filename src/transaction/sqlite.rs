//! Transactions of handlers in an SQLite file.

use sqlx::{Connection as _, Sqlite, SqliteConnection, Transaction, query};

#[cfg(feature = "guard")]
use super::commit::commit_value;
use super::{
    OperationTransaction,
    commit::{ClaimStatus, CommitBackend, CommitFuture, ENDED, commit},
    error::CommitError,
    kind::CommitErrorKind,
    response::CommitResponse,
};
use crate::{
    operation::Operation,
    store::{
        Completion, OwnerTransition, SqliteStore, StoreError, Token, Transitioned,
        sql::{detached, error::sqlite_code},
        sqlite::{
            error::{CONSTRAINT, failure},
            statements::{decode, load, now, store},
            writer::BEGIN,
        },
        transition::{State, StoredRecord},
    },
};

impl SqliteStore {
    /// Begins a transaction for the handler's own writes in the store's file, to
    /// be ended by [`commit`](Self::commit) or
    /// [`rollback`](OperationTransaction::rollback). It can write from its start.
    ///
    /// **While it is open, nothing else can write to the file**, and claims wait: do
    /// nothing slow in it. If it is dropped, it is rolled back, as after a crash. A
    /// dropped call leaves no transaction behind.
    ///
    /// # Errors
    ///
    /// [`Unavailable`](CommitErrorKind::Unavailable) if other writers keep the
    /// file locked for 5 s, and [`LeaseLost`](CommitErrorKind::LeaseLost). Both
    /// are 503 with `Retry-After`.
    pub async fn begin(&self, operation: &Operation) -> Result<SqliteTransaction, CommitError> {
        OperationTransaction::begin(operation, self.begin_transaction()).await
    }

    /// Begins a transaction on one of the connections for handlers.
    pub(crate) fn begin_transaction(
        &self,
    ) -> impl Future<Output = Result<Transaction<'static, Sqlite>, CommitError>> + Send + 'static
    {
        let pool = self.transactions.clone();
        async move {
            let begun = pool.begin_with(BEGIN).await;
            begun.map_err(|error| CommitError::caused(CommitErrorKind::Unavailable, error))
        }
    }

    /// Commits `transaction` together with `response`: after a crash at any
    /// moment, either both are there or neither is.
    ///
    /// The last statements write the response. A task executes COMMIT, and completes it
    /// if the caller is dropped. A transaction from another pool is accepted if it is
    /// on the store's file and could write from its start. A transaction that has ended
    /// before, by a statement of the handler or by SQLite (`OR ROLLBACK`, a full disk),
    /// records nothing. An example is at [`OperationTransaction`].
    ///
    /// # Errors
    ///
    /// A [`CommitError`], whose kind tells whether the transaction was committed. Return
    /// it, or a response of the application to it. If the handler returns a success
    /// instead, the client receives 500 `rolled-back`.
    pub fn commit(
        &self,
        operation: &Operation,
        transaction: impl Into<SqliteTransaction>,
        response: impl CommitResponse,
    ) -> CommitFuture {
        commit(self.clone(), operation, transaction.into(), response)
    }

    /// Commits `transaction` together with the value of a [`Guard`](crate::Guard)'s work:
    /// after a crash at any moment, either both are stored or neither is.
    ///
    /// It is [`commit`](Self::commit) with a value in place of a response. Return the value
    /// from the work. Whatever the work returns, its caller and later calls receive the
    /// committed value.
    ///
    /// # Errors
    ///
    /// Those of [`commit`](Self::commit), and
    /// [`ResponseNotKept`](CommitErrorKind::ResponseNotKept) if the value cannot be written
    /// as JSON, exceeds [`max_value`](crate::GuardBuilder::max_value), or the operation is
    /// not that of a guard. Return the error from the work: if the work returns a value
    /// instead, its caller receives [`RolledBack`](crate::RunError::RolledBack).
    #[cfg(feature = "guard")]
    pub fn commit_value(
        &self,
        operation: &Operation,
        transaction: impl Into<SqliteTransaction>,
        value: &(impl serde::Serialize + ?Sized),
    ) -> CommitFuture<()> {
        commit_value(self.clone(), operation, transaction.into(), value)
    }
}

/// A transaction of [`SqliteStore::begin`], on a connection of sqlx for SQLite.
pub type SqliteTransaction = OperationTransaction<Sqlite>;

impl CommitBackend for SqliteStore {
    type Database = Sqlite;

    async fn complete(
        &self,
        transaction: &mut Transaction<'static, Sqlite>,
        operation: &Operation,
        completion: &Completion,
    ) -> Result<Transitioned, CommitError> {
        if has_ended(transaction).await? {
            return Err(CommitError::caused(CommitErrorKind::Aborted, ENDED));
        }
        let (name, token) = (operation.name(), operation.token());
        let row = load(transaction, name, 0).await.map_err(refused)?;
        let loaded = decode(row.as_ref())
            .map_err(|error| CommitError::caused(CommitErrorKind::Aborted, error))?;
        let Some(mut record) = loaded.map(|loaded| loaded.record) else {
            return Ok(Transitioned::Superseded);
        };
        // The claim must be open: a record that this token completed before must not
        // commit other writes.
        if status(Some(&record), token) != ClaimStatus::Open {
            return Ok(Transitioned::Superseded);
        }
        let complete = OwnerTransition::Complete(completion.clone());
        let transitioned = record.apply_owner(token, &complete, now());
        let stored = store(transaction, name, &record).await;
        stored.map_err(refused)?;
        Ok(transitioned)
    }

    #[cfg(feature = "outbox")]
    fn committed(&self, begun: Option<std::time::Instant>) {
        // Other processes cannot be notified.
        let _ = self.wake.committed(begun);
    }

    fn is_abort(error: &sqlx::Error) -> bool {
        // A deferred constraint.
        error.as_database_error().and_then(sqlite_code) == Some(CONSTRAINT)
    }

    async fn claim_status(&self, operation: &Operation) -> Result<ClaimStatus, StoreError> {
        let (name, token) = (operation.name().clone(), operation.token());
        let writer = self.writer.clone();
        // Once this has the write lock, every other transaction has ended.
        detached(async move {
            let read = writer.write(async |on| {
                let row = load(on, &name, 0).await.map_err(failure)?;
                decode(row.as_ref())
            });
            let loaded = read.await?;
            let record = loaded.as_ref().map(|loaded| &loaded.record);
            Ok(status(record, token))
        })
        .await
    }
}

fn status(record: Option<&StoredRecord>, token: Token) -> ClaimStatus {
    match record {
        Some(record) if record.token == token => match record.state {
            State::InProgress { .. } | State::Unknown => ClaimStatus::Open,
            State::Completed { .. } => ClaimStatus::Completed,
            State::Released(_) => ClaimStatus::Superseded,
        },
        _ => ClaimStatus::Superseded,
    }
}

/// Returns whether the transaction has ended.
///
/// SQLite rolls one back by itself for `OR ROLLBACK` or a full disk, and sqlx does not notice
/// it. Each later statement would then be committed alone.
pub(crate) async fn has_ended(
    transaction: &mut Transaction<'static, Sqlite>,
) -> Result<bool, CommitError> {
    let is_open = is_open(transaction).await;
    is_open.map(|is_open| !is_open).map_err(refused)
}

/// Returns whether the connection is in a transaction that has not ended.
pub(crate) async fn is_open(on: &mut SqliteConnection) -> Result<bool, sqlx::Error> {
    if !on.is_in_transaction() {
        return Ok(false);
    }
    // Fails in a transaction, without an effect.
    match query("BEGIN").execute(&mut *on).await {
        Err(error) if is_nested(&error) => Ok(true),
        Err(error) => Err(error),
        Ok(_) => {
            query("ROLLBACK").execute(&mut *on).await?;
            Ok(false)
        }
    }
}

fn is_nested(error: &sqlx::Error) -> bool {
    error
        .as_database_error()
        .is_some_and(|error| error.message().contains("within a transaction"))
}

/// The error of a statement that failed before COMMIT.
fn refused(error: sqlx::Error) -> CommitError {
    let is_missing = error
        .as_database_error()
        .is_some_and(|error| error.message().starts_with("no such table"));
    let kind = match is_missing {
        true => CommitErrorKind::OtherDatabase,
        false => CommitErrorKind::Aborted,
    };
    CommitError::caused(kind, error)
}
