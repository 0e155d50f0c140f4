//! Commits a handler's transaction together with its response.

use std::{mem, pin::Pin, time::Duration};

use sqlx::{Database, Transaction};
use tokio::time::{self, Instant};

use super::{
    OperationTransaction,
    error::CommitError,
    kind::CommitErrorKind,
    response::{CommitResponse, Committed, collect},
};
use crate::{
    operation::{Operation, Transacted},
    runtime::backoff::Backoff,
    store::{Completion, StoreError, Transitioned},
    telemetry::notice::Notice,
};

/// The future of a store's `commit` or `commit_value`.
///
/// It is `Send` and borrows nothing. If it is dropped before the body of the response was
/// collected, the transaction is rolled back. If it is dropped later, a task completes the
/// commit.
pub type CommitFuture<T = Committed> = Pin<Box<dyn Future<Output = Result<T, CommitError>> + Send>>;

/// The database's part in a commit.
pub(crate) trait CommitBackend: Send + Sync + 'static {
    type Database: Database;

    /// Completes the record, in the last statement before COMMIT.
    ///
    /// Superseded unless the operation's token is the last one granted and its claim
    /// is open.
    fn complete(
        &self,
        transaction: &mut Transaction<'static, Self::Database>,
        operation: &Operation,
        completion: &Completion,
    ) -> impl Future<Output = Result<Transitioned, CommitError>> + Send;

    /// Called after each commit, with the moment at which the store began the transaction.
    fn committed(&self, _begun: Option<std::time::Instant>) {}

    /// Returns whether the error proves that nothing was committed.
    fn is_abort(error: &sqlx::Error) -> bool;

    /// Returns the state of the operation's claim, once no transaction can change
    /// it.
    fn claim_status(
        &self,
        operation: &Operation,
    ) -> impl Future<Output = Result<ClaimStatus, StoreError>> + Send;
}

/// The status of a claim, as its record shows it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum ClaimStatus {
    Completed,
    /// In progress or unknown, so that it can be completed.
    Open,
    /// The record belongs to another claim, is released, or does not exist.
    Superseded,
}

/// Commits `transaction` with `response`, in a task that outlives its caller.
///
/// The response is converted before the future starts: not every `IntoResponse` is
/// `Send`.
pub(crate) fn commit<D: CommitBackend>(
    backend: D,
    operation: &Operation,
    transaction: OperationTransaction<D::Database>,
    response: impl CommitResponse,
) -> CommitFuture {
    let (operation, response) = (operation.clone(), response.into_http());
    Box::pin(async move {
        let kept = async {
            match operation.settings().holds_values() {
                true => Err(OF_A_GUARD.to_owned()),
                false if is_unverified(&operation) => Err(UNVERIFIED.to_owned()),
                false => collect(response, &operation).await,
            }
        };
        let committed = run(backend, &operation, transaction, kept).await;
        committed.map(Committed::new)
    })
}

/// Commits `transaction` with the value of a guard's work, in a task that outlives its
/// caller. The value is encoded before the future starts.
#[cfg(feature = "guard")]
pub(crate) fn commit_value<D: CommitBackend>(
    backend: D,
    operation: &Operation,
    transaction: OperationTransaction<D::Database>,
    value: &(impl serde::Serialize + ?Sized),
) -> CommitFuture<()> {
    let (operation, settings) = (operation.clone(), operation.settings());
    let kept = match settings.holds_values() {
        true => settings
            .completion_of_value(value, operation.choice().keep_for)
            .map(|completion| ((), completion)),
        false => Err(OF_A_LAYER),
    };
    let kept = std::future::ready(kept.map_err(ToOwned::to_owned));
    Box::pin(async move { run(backend, &operation, transaction, kept).await })
}

/// Commits `transaction` with what is `kept`, and returns what goes with it; or rolls back
/// if nothing can be kept.
async fn run<D: CommitBackend, K>(
    backend: D,
    operation: &Operation,
    transaction: OperationTransaction<D::Database>,
    kept: impl Future<Output = Result<(K, Completion), String>>,
) -> Result<K, CommitError> {
    let begun = transaction.begun;
    let transaction = transaction.into_inner();
    let Some(mut pending) = PendingCommit::begin(operation) else {
        roll_back(operation, transaction).await;
        let error = CommitError::caused(CommitErrorKind::Aborted, SECOND_COMMIT);
        return Err(error.of_operation(operation));
    };
    let (kept, completion) = match kept.await {
        Ok(kept) => kept,
        Err(reason) => {
            roll_back(operation, transaction).await;
            let error = CommitError::caused(CommitErrorKind::ResponseNotKept, reason);
            return Err(error.of_operation(operation));
        }
    };
    let commit = async move {
        pending.fallback = Transacted::Unknown;
        let operation = &pending.operation;
        let response = completion.response.clone();
        let completion = operation.kept(completion);
        let committed = complete_and_commit(&backend, operation, transaction, &completion).await;
        let committed = committed.map_err(|error| error.of_operation(operation));
        if committed.is_ok() {
            backend.committed(begun);
        }
        pending.end(match &committed {
            Ok(()) => Transacted::Committed {
                response,
                completion,
            },
            Err(error) => error.kind().transacted(),
        });
        committed
    };
    #[cfg(feature = "tracing")]
    let commit = tracing::Instrument::in_current_span(commit);
    #[cfg(feature = "tracing")]
    let commit = tracing::instrument::WithSubscriber::with_current_subscriber(commit);
    match tokio::spawn(commit).await {
        Ok(Ok(())) => Ok(kept),
        Ok(Err(error)) => Err(error),
        Err(_) => {
            let error = CommitError::caused(CommitErrorKind::Unknown, TASK_ENDED);
            Err(error.of_operation(operation))
        }
    }
}

/// A commit that has not ended. If it is dropped before [`end`](Self::end), it ends as
/// `fallback`, so that the layer does not wait for it.
struct PendingCommit {
    operation: Operation,
    fallback: Transacted,
}

impl PendingCommit {
    /// Returns `None` if the operation has a commit that is pending, or that did
    /// not end as aborted.
    fn begin(operation: &Operation) -> Option<Self> {
        let begun = operation.transactions().begin_commit();
        begun.then(|| Self {
            operation: operation.clone(),
            fallback: Transacted::Aborted,
        })
    }

    fn end(mut self, transacted: Transacted) {
        self.fallback = transacted;
    }
}

impl Drop for PendingCommit {
    fn drop(&mut self) {
        let transacted = mem::take(&mut self.fallback);
        self.operation.transactions().end_commit(transacted);
    }
}

async fn complete_and_commit<D: CommitBackend>(
    backend: &D,
    operation: &Operation,
    mut transaction: Transaction<'static, D::Database>,
    completion: &Completion,
) -> Result<(), CommitError> {
    let timeout = operation.settings().store_timeout;
    let completing = backend.complete(&mut transaction, operation, completion);
    let completed = match time::timeout(timeout, completing).await {
        Ok(completed) => completed,
        Err(_) => Err(CommitError::caused(CommitErrorKind::Aborted, NO_ANSWER)),
    };
    match completed {
        Ok(Transitioned::Applied) => {}
        Ok(Transitioned::Superseded) => {
            roll_back(operation, transaction).await;
            return Err(match backend.claim_status(operation).await {
                Ok(ClaimStatus::Open) => CommitError::new(CommitErrorKind::OtherDatabase),
                Ok(ClaimStatus::Completed | ClaimStatus::Superseded) => {
                    CommitError::new(CommitErrorKind::Superseded)
                }
                Err(error) => CommitError::caused(CommitErrorKind::Aborted, error),
            });
        }
        Err(error) => {
            roll_back(operation, transaction).await;
            return Err(error);
        }
    }
    match send_commit::<D>(transaction, timeout).await {
        Err(error) if error.kind() == CommitErrorKind::Unknown => {
            find_outcome(backend, operation, error).await
        }
        committed => committed,
    }
}

/// Sends COMMIT. [`Unknown`](CommitErrorKind::Unknown) without an answer within
/// `timeout`.
///
/// The database answers the COMMIT of a transaction that has ended or failed with
/// success too, so a statement of the transaction must have succeeded right before.
pub(crate) async fn send_commit<D: CommitBackend>(
    transaction: Transaction<'static, D::Database>,
    timeout: Duration,
) -> Result<(), CommitError> {
    match time::timeout(timeout, transaction.commit()).await {
        Ok(Ok(())) => Ok(()),
        Ok(Err(error)) if D::is_abort(&error) => {
            Err(CommitError::caused(CommitErrorKind::Aborted, error))
        }
        Ok(Err(error)) => Err(CommitError::caused(CommitErrorKind::Unknown, error)),
        Err(_) => Err(CommitError::caused(
            CommitErrorKind::Unknown,
            format!("COMMIT was not answered within {timeout:?}"),
        )),
    }
}

/// Reads the record until it shows whether a COMMIT without an answer was executed.
///
/// A connection that breaks before COMMIT arrives and one that breaks after it fail
/// in the same way.
async fn find_outcome<D: CommitBackend>(
    backend: &D,
    operation: &Operation,
    unknown: CommitError,
) -> Result<(), CommitError> {
    let timeout = operation.settings().store_timeout;
    let warnings = &operation.settings().warnings;
    let end = Instant::now() + 2 * timeout;
    let mut backoff = Backoff::new(FIRST_PAUSE, LONGEST_PAUSE);
    while Instant::now() < end {
        let status = time::timeout(timeout, backend.claim_status(operation)).await;
        match status.unwrap_or_else(|_| Err(StoreError::timed_out())) {
            Ok(ClaimStatus::Completed) => {
                Notice::CommitFound.tell(warnings, Some(operation.id()));
                return Ok(());
            }
            Ok(ClaimStatus::Open) => {
                Notice::AbortFound.tell(warnings, Some(operation.id()));
                return Err(unknown.found_aborted());
            }
            Ok(ClaimStatus::Superseded) => {
                return Err(CommitError::new(CommitErrorKind::Superseded));
            }
            Err(error) => {
                warnings.warn(UNREADABLE, Some(&error), Some(operation.id()));
                time::sleep(backoff.pause()).await;
            }
        }
    }
    Err(unknown)
}

/// Rolls back, and waits up to the store timeout for it, so that the locks of the
/// transaction are free for the next one.
async fn roll_back<DB: Database>(operation: &Operation, transaction: Transaction<'static, DB>) {
    let timeout = operation.settings().store_timeout;
    let rolled_back = time::timeout(timeout, transaction.rollback()).await;
    if !matches!(rolled_back, Ok(Ok(()))) {
        let warnings = &operation.settings().warnings;
        warnings.warn(NOT_ROLLED_BACK, None, Some(operation.id()));
    }
}

/// Whether the operation has an upload that is not verified yet, or is not the declared one.
fn is_unverified(operation: &Operation) -> bool {
    let upload = operation.upload();
    upload.is_some_and(|upload| upload.ended() != Some(Ok(())))
}

pub(crate) const ENDED: &str = "the transaction had ended before `commit` was called";
const UNVERIFIED: &str = "the upload of the request is not verified: read its body to the end before \
    `commit`";
const OF_A_GUARD: &str = "the operation is that of a `Guard`: use `commit_value`";
#[cfg(feature = "guard")]
const OF_A_LAYER: &str = "the operation is not that of a `Guard`: use `commit`";
const SECOND_COMMIT: &str = "`commit` was called twice for one operation: the first transaction is \
    committed or pending";
pub(crate) const TASK_ENDED: &str =
    "the task that commits panicked, or the runtime is shutting down";
const NO_ANSWER: &str = "the database did not answer within `store_timeout`";
const UNREADABLE: &str =
    "COMMIT was not answered, and its record is not readable: it is read again";
pub(crate) const NOT_ROLLED_BACK: &str = "ROLLBACK was not answered, and the connection is dropped: \
    its locks are held until the database notices";
const FIRST_PAUSE: Duration = Duration::from_millis(50);
const LONGEST_PAUSE: Duration = Duration::from_secs(1);
