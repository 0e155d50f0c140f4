//! What a handler commits, and what it learns of it.

use std::{error::Error, fmt, pin::pin, time::Duration};

use bytes::Bytes;
use http::{Response, StatusCode};
use http_body::Body;
use http_body_util::Full;
use tokio::time::{self, Instant};

use crate::{
    Operation, StoreError, Word,
    body::{Gathered, gather},
    jitter::jittered,
    keeping::correct_length,
    outcome::Notice,
    store::{Completion, Settlement},
    transaction::{AsCommitted, Transacted},
};

/// A response that was committed together with the handler's writes.
///
/// Return it from the handler. If the handler returns something else, the
/// client gets this response all the same: it is what retries will get.
#[derive(Debug)]
#[must_use = "the response is what the handler should return"]
pub struct Committed {
    response: Response<Full<Bytes>>,
}

impl Committed {
    pub(crate) fn new(mut response: Response<Full<Bytes>>) -> Self {
        response.extensions_mut().insert(AsCommitted);
        Self { response }
    }

    /// The response, for services that are not axum's.
    #[must_use]
    pub fn into_http(self) -> Response<Full<Bytes>> {
        self.response
    }
}

/// Why a transaction was not, or not surely, committed.
///
/// Return it from the handler; the layer knows what to make of it.
#[derive(Debug)]
pub struct CommitError {
    kind: CommitErrorKind,
    source: Option<Box<dyn Error + Send + Sync>>,
}

/// The kinds of [`CommitError`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum CommitErrorKind {
    /// It was surely rolled back: an earlier statement had failed, a constraint
    /// was violated, a deadlock or a serialization failure was resolved. The
    /// handler may begin again; otherwise a retry runs.
    Aborted,
    /// It was rolled back, because another claim has superseded this one. The
    /// client gets that one's answer.
    Superseded,
    /// The answer to COMMIT got lost and could not be found out in time. The
    /// client gets 503, and the outcome is unknown.
    Unknown,
    /// It was rolled back, because the response is too large or too slow to be
    /// kept.
    ResponseNotKept,
    /// It was rolled back, because it is not a transaction on the store's
    /// database.
    OtherDatabase,
    /// It was rolled back, because it is not READ COMMITTED: a heartbeat in its
    /// time would make its completion fail.
    Isolation,
}

impl CommitError {
    pub(crate) fn new(kind: CommitErrorKind) -> Self {
        Self { kind, source: None }
    }

    pub(crate) fn caused(
        kind: CommitErrorKind,
        source: impl Into<Box<dyn Error + Send + Sync>>,
    ) -> Self {
        Self {
            kind,
            source: Some(source.into()),
        }
    }

    /// Which kind it is.
    #[must_use]
    pub fn kind(&self) -> CommitErrorKind {
        self.kind
    }

    /// The status of the handler's response to it: 500, or 503 where the outcome
    /// is unknown.
    #[must_use]
    pub fn status(&self) -> StatusCode {
        match self.kind {
            CommitErrorKind::Unknown => StatusCode::SERVICE_UNAVAILABLE,
            _ => StatusCode::INTERNAL_SERVER_ERROR,
        }
    }

    pub(crate) fn transacted(&self) -> Transacted {
        match self.kind {
            CommitErrorKind::Superseded => Transacted::Superseded,
            CommitErrorKind::Unknown => Transacted::Unknown,
            _ => Transacted::Aborted,
        }
    }
}

/// A transaction that could not begin.
impl From<StoreError> for CommitError {
    fn from(error: StoreError) -> Self {
        Self::caused(CommitErrorKind::Aborted, error)
    }
}

/// A statement of the handler's own that failed: its transaction is rolled back
/// when it is dropped.
impl From<sqlx::Error> for CommitError {
    fn from(error: sqlx::Error) -> Self {
        Self::caused(CommitErrorKind::Aborted, error)
    }
}

impl fmt::Display for CommitError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self.kind {
            CommitErrorKind::Aborted => "the transaction was rolled back",
            CommitErrorKind::Superseded => {
                "the transaction was rolled back, because another claim has superseded this one"
            }
            CommitErrorKind::Unknown => "it is not known whether the transaction was committed",
            CommitErrorKind::ResponseNotKept => {
                "the transaction was rolled back, because its response is too large or too slow to be kept"
            }
            CommitErrorKind::OtherDatabase => {
                "the transaction was rolled back, because it is not one on the store's database"
            }
            CommitErrorKind::Isolation => {
                "the transaction was rolled back, because it is not READ COMMITTED: begin it with `store.begin`"
            }
        })
    }
}

impl Error for CommitError {
    fn source(&self) -> Option<&(dyn Error + 'static)> {
        self.source.as_ref().map(|source| &**source as _)
    }
}

/// What can be committed as a response: with the feature `axum` whatever is
/// `IntoResponse`, otherwise an `http::Response` with a body of `Bytes`.
pub trait CommitResponse: sealed::Gather {}

impl<T: sealed::Gather> CommitResponse for T {}

pub(crate) mod sealed {
    use super::{Operation, WithCompletion, gathered};

    pub trait Gather: Send {
        /// `None` if it cannot be kept.
        fn gather(
            self,
            operation: &Operation,
        ) -> impl Future<Output = Option<WithCompletion>> + Send;
    }

    #[cfg(feature = "axum")]
    impl<T: ::axum::response::IntoResponse + Send> Gather for T {
        async fn gather(self, operation: &Operation) -> Option<WithCompletion> {
            gathered(self.into_response(), operation).await
        }
    }

    #[cfg(not(feature = "axum"))]
    impl<B> Gather for http::Response<B>
    where
        B: http_body::Body<Data = bytes::Bytes> + Send,
        B::Error: Send,
    {
        async fn gather(self, operation: &Operation) -> Option<WithCompletion> {
            gathered(self, operation).await
        }
    }
}

/// The response to send, and what the store keeps of it.
pub(crate) type WithCompletion = (Response<Full<Bytes>>, Completion);

/// What a database does for a commit. The order of the steps is the same for
/// all.
pub(crate) trait Desk: Send + Sync + 'static {
    type Transaction: Send + 'static;

    /// The last statement before COMMIT: completes the record, if this token is
    /// the last one granted and its claim is open.
    fn complete(
        &self,
        transaction: &mut Self::Transaction,
        operation: &Operation,
        completion: &Completion,
    ) -> impl Future<Output = Result<Settlement, CommitError>> + Send;

    /// Sends COMMIT.
    fn commit(
        &self,
        transaction: Self::Transaction,
    ) -> impl Future<Output = Result<(), sqlx::Error>> + Send;

    /// Sends ROLLBACK. Whatever becomes of it, COMMIT was not sent.
    fn roll_back(&self, transaction: Self::Transaction) -> impl Future<Output = ()> + Send;

    /// Whether the database has said that it did not commit.
    fn is_abort(error: &sqlx::Error) -> bool;

    /// What the record says, once no transaction can change it any more.
    fn find_out(
        &self,
        operation: &Operation,
    ) -> impl Future<Output = Result<Verdict, StoreError>> + Send;
}

/// What a record says of a claim.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Verdict {
    /// Completed with its token.
    Completed,
    /// Open, with its token.
    Open,
    /// Another claim's, released, or gone.
    Superseded,
}

/// Commits `transaction` with `response`, in a task that nobody can drop.
pub(crate) async fn commit<D: Desk>(
    desk: D,
    operation: &Operation,
    transaction: D::Transaction,
    response: impl CommitResponse,
) -> Result<Committed, CommitError> {
    if !operation.begin_commit() {
        roll_back(&desk, operation, transaction).await;
        return Err(CommitError::caused(
            CommitErrorKind::Aborted,
            "the operation has another transaction, which was committed or may be",
        ));
    }
    let mut pending = Pending {
        operation: operation.clone(),
        otherwise: Transacted::Aborted,
    };
    let Some((response, completion)) = response.gather(operation).await else {
        roll_back(&desk, operation, transaction).await;
        return Err(CommitError::new(CommitErrorKind::ResponseNotKept));
    };
    let settling = async move {
        pending.otherwise = Transacted::Unknown;
        let operation = &pending.operation;
        let ended = settle(&desk, operation, transaction, &completion).await;
        operation.end_commit(match &ended {
            Ok(()) => Transacted::Committed {
                response: completion.response,
            },
            Err(error) => error.transacted(),
        });
        ended
    };
    #[cfg(feature = "tracing")]
    let settling = tracing::Instrument::in_current_span(settling);
    match tokio::spawn(settling).await {
        Ok(Ok(())) => Ok(Committed::new(response)),
        Ok(Err(error)) => Err(error),
        Err(_) => Err(CommitError::new(CommitErrorKind::Unknown)),
    }
}

/// A commit that has not ended. Where it is dropped on the way, the layer does
/// not go on waiting for it.
struct Pending {
    operation: Operation,
    otherwise: Transacted,
}

impl Drop for Pending {
    fn drop(&mut self) {
        self.operation.give_up_commit(&self.otherwise);
    }
}

async fn settle<D: Desk>(
    desk: &D,
    operation: &Operation,
    mut transaction: D::Transaction,
    completion: &Completion,
) -> Result<(), CommitError> {
    let patience = operation.config().store_timeout;
    // Without an answer it is dropped, and COMMIT is not sent.
    let completed = time::timeout(
        patience,
        desk.complete(&mut transaction, operation, completion),
    )
    .await
    .unwrap_or_else(|_| Err(CommitError::caused(CommitErrorKind::Aborted, NO_ANSWER)));
    match completed {
        Ok(Settlement::Applied) => {}
        Ok(Settlement::Superseded) => {
            roll_back(desk, operation, transaction).await;
            return Err(match desk.find_out(operation).await {
                Ok(Verdict::Open) => CommitError::new(CommitErrorKind::OtherDatabase),
                Ok(Verdict::Completed | Verdict::Superseded) => {
                    CommitError::new(CommitErrorKind::Superseded)
                }
                Err(error) => CommitError::caused(CommitErrorKind::Aborted, error),
            });
        }
        Err(error) => {
            roll_back(desk, operation, transaction).await;
            return Err(error);
        }
    }
    let error = match time::timeout(patience, desk.commit(transaction)).await {
        Ok(Ok(())) => return Ok(()),
        Ok(Err(error)) if D::is_abort(&error) => {
            return Err(CommitError::caused(CommitErrorKind::Aborted, error));
        }
        Ok(Err(error)) => Some(error),
        Err(_) => None,
    };
    // Anything else is no answer: a connection that broke before COMMIT arrived
    // and one that broke after it look the same.
    let end = Instant::now() + 2 * patience;
    let mut pause = FIRST_PAUSE;
    while Instant::now() < end {
        match time::timeout(patience, desk.find_out(operation)).await {
            Ok(Ok(Verdict::Completed)) => {
                Notice::CommitFound.tell(Some(operation.id()));
                return Ok(());
            }
            Ok(Ok(Verdict::Open)) => {
                Notice::AbortFound.tell(Some(operation.id()));
                return Err(CommitError::new(CommitErrorKind::Aborted));
            }
            Ok(Ok(Verdict::Superseded)) => {
                return Err(CommitError::new(CommitErrorKind::Superseded));
            }
            Ok(Err(_)) | Err(_) => time::sleep(jittered(pause)).await,
        }
        pause = (pause * 2).min(LONGEST_PAUSE);
    }
    Err(match error {
        Some(error) => CommitError::caused(CommitErrorKind::Unknown, error),
        None => CommitError::new(CommitErrorKind::Unknown),
    })
}

/// Waits for the end of the rollback, so that the locks of the transaction are
/// free for the next one, but not for ever.
async fn roll_back<D: Desk>(desk: &D, operation: &Operation, transaction: D::Transaction) {
    let patience = operation.config().store_timeout;
    let _ = time::timeout(patience, desk.roll_back(transaction)).await;
}

async fn gathered<B>(response: Response<B>, operation: &Operation) -> Option<WithCompletion>
where
    B: Body<Data = Bytes> + Send,
    B::Error: Send,
{
    let config = operation.config();
    let (mut parts, body) = config.cleaned(response).into_parts();
    let said = parts.extensions.remove::<Word>().unwrap_or_default();
    let word = said.or(operation.word());
    let (limit, within) = (config.response_limit, config.response_time);
    if config.goes_out_live(&parts) {
        return None;
    }
    match gather(pin!(body), limit, within).await {
        // A trailer cannot follow a body of known length; none is lost unsaid.
        Gathered::Whole {
            data,
            trailers: None,
        } => {
            correct_length(&mut parts, Some(data.len() as u64));
            let completion = config.completion(&parts, &data, None, word);
            // A tombstone would be committed work without its answer.
            (!completion.is_tombstone())
                .then(|| (Response::from_parts(parts, Full::new(data)), completion))
        }
        _ => None,
    }
}

pub(crate) const ENDED: &str = "the transaction had been ended before";
const NO_ANSWER: &str = "the database did not answer in time";
const FIRST_PAUSE: Duration = Duration::from_millis(50);
const LONGEST_PAUSE: Duration = Duration::from_secs(1);
