//! Transactions that were begun for an operation, and what became of them.

use std::{
    fmt,
    ops::{Deref, DerefMut},
    sync::{
        Mutex, MutexGuard, PoisonError,
        atomic::{AtomicBool, AtomicUsize, Ordering},
    },
};

use sqlx::{Database, Transaction};
use tokio::sync::watch;

use super::{CommitError, Transacted};
use crate::{Operation, operation::WeakOperation};

/// A transaction for the writes of one operation's handler, begun by `begin` of
/// a store and ended by its `commit`.
///
/// It dereferences to sqlx's connection: run queries on `&mut *transaction`, and
/// begin savepoints with [`Connection::begin`](sqlx::Connection::begin). It has
/// no `commit` of its own, since only the store's `commit` writes the response
/// with it. Dropped, it is rolled back, as after a crash.
///
/// End a transaction that is not to be committed with
/// [`rollback`](Self::rollback). If it is dropped instead, and the handler's
/// response is one that would be recorded as a success, then the layer answers
/// 500 `rolled-back`, the outcome is unknown, and the notice `uncommitted` is
/// logged: the response promises work that is not there, and other work of the
/// handler may have been done.
///
/// ```
/// # use http::{Request, StatusCode};
/// # use axum::{Router, body::Body, extract::State, routing::post};
/// # use tower::ServiceExt;
/// use tower_idempotency::{CommitError, Committed, Operation, SqliteStore, sqlx::query};
/// # use tower_idempotency::{IdempotencyLayer, Scope, sqlx::{self, Connection}};
///
/// async fn order(
///     State(store): State<SqliteStore>,
///     operation: Operation,
/// ) -> Result<Committed, CommitError> {
///     let mut transaction = store.begin(&operation).await?;
///     query("INSERT INTO orders (item) VALUES ('pen')")
///         .execute(&mut *transaction)
///         .await?;
///     store.commit(&operation, transaction, (StatusCode::CREATED, "ordered")).await
/// }
/// # #[tokio::main(flavor = "current_thread")]
/// # async fn main() -> Result<(), Box<dyn std::error::Error>> {
/// # let file = std::env::temp_dir().join(format!("transaction-{}.db", std::process::id()));
/// # let _ = std::fs::remove_file(&file);
/// # let store = SqliteStore::open(&file).await?;
/// # let mut shop = sqlx::SqliteConnection::connect(file.to_str().unwrap()).await?;
/// # query("CREATE TABLE orders (item TEXT)").execute(&mut shop).await?;
/// # let layer = IdempotencyLayer::required(store.clone(), |_| Some(Scope::single_tenant()));
/// # let app = Router::new()
/// #     .route("/orders", post(order).layer(layer.build()?))
/// #     .with_state(store);
/// # for _ in 0..2 {
/// #     let request = Request::post("/orders").header("idempotency-key", "k");
/// #     let response = app.clone().oneshot(request.body(Body::empty())?).await?;
/// #     assert_eq!(response.status(), StatusCode::CREATED);
/// # }
/// # let orders: i64 = sqlx::query_scalar("SELECT count(*) FROM orders").fetch_one(&mut shop).await?;
/// # assert_eq!(orders, 1);
/// # std::fs::remove_file(&file)?;
/// # Ok(())
/// # }
/// ```
///
/// A handler cannot commit it past the layer:
///
/// ```compile_fail,E0599
/// # use tower_idempotency::{CommitError, Operation, SqliteStore};
/// async fn order(store: SqliteStore, operation: Operation) -> Result<(), CommitError> {
///     let transaction = store.begin(&operation).await?;
///     transaction.commit().await?; // no method named `commit`
///     Ok(())
/// }
/// ```
#[must_use = "a transaction that is dropped is rolled back"]
pub struct OperationTransaction<DB: Database> {
    transaction: Transaction<'static, DB>,
    /// None for a transaction from elsewhere.
    begun: Option<Begun>,
}

impl<DB: Database> OperationTransaction<DB> {
    /// What `begin` returns for `operation`.
    pub(crate) fn begun(
        transaction: Result<Transaction<'static, DB>, CommitError>,
        operation: &Operation,
    ) -> Result<Self, CommitError> {
        let transaction = transaction.map_err(|error| operation.failed(error))?;
        operation.transactions().begun();
        let begun = Begun {
            operation: operation.downgrade(),
            is_ended: false,
        };
        Ok(Self {
            transaction,
            begun: Some(begun),
        })
    }

    /// Rolls the transaction back, and says that this is meant: the handler's
    /// response is then recorded as any other.
    ///
    /// # Errors
    ///
    /// If the database could not be told. The transaction is not committed in
    /// this case either.
    pub async fn rollback(self) -> Result<(), CommitError> {
        let operation = self
            .begun
            .as_ref()
            .and_then(|begun| begun.operation.upgrade());
        let rolled_back = self.into_ended().rollback().await;
        rolled_back.map_err(|error| match operation {
            Some(operation) => operation.failed(error.into()),
            None => error.into(),
        })
    }

    /// The transaction, once what becomes of it is known otherwise.
    pub(super) fn into_ended(self) -> Transaction<'static, DB> {
        if let Some(mut begun) = self.begun {
            begun.is_ended = true;
        }
        self.transaction
    }
}

impl<DB: Database> Deref for OperationTransaction<DB> {
    type Target = DB::Connection;

    fn deref(&self) -> &Self::Target {
        &self.transaction
    }
}

impl<DB: Database> DerefMut for OperationTransaction<DB> {
    fn deref_mut(&mut self) -> &mut Self::Target {
        &mut self.transaction
    }
}

/// A transaction from another pool, for the store's `commit`.
impl<DB: Database> From<Transaction<'static, DB>> for OperationTransaction<DB> {
    fn from(transaction: Transaction<'static, DB>) -> Self {
        Self {
            transaction,
            begun: None,
        }
    }
}

impl<DB: Database> fmt::Debug for OperationTransaction<DB> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("OperationTransaction")
            .field("from_store", &self.begun.is_some())
            .finish_non_exhaustive()
    }
}

/// Tells the operation when its transaction has ended or was dropped.
struct Begun {
    operation: WeakOperation,
    is_ended: bool,
}

impl Drop for Begun {
    fn drop(&mut self) {
        if let Some(operation) = self.operation.upgrade() {
            operation.transactions().left(self.is_ended);
        }
    }
}

/// The transactions of one operation.
#[derive(Default)]
pub(crate) struct Transactions {
    pub(crate) transacted: watch::Sender<Transacted>,
    open: AtomicUsize,
    /// Whether the last one was dropped without `commit` or `rollback`.
    is_dropped: AtomicBool,
    failure: Mutex<Option<CommitError>>,
}

impl Transactions {
    /// How the one that reached `commit` ended, once it has.
    pub(crate) async fn ended(&self) -> Transacted {
        let mut ended = self.transacted.subscribe();
        let ended = ended.wait_for(|transacted| !matches!(transacted, Transacted::Pending));
        // The sender is here.
        ended.await.map_or(Transacted::Not, |ended| ended.clone())
    }

    fn begun(&self) {
        self.open.fetch_add(1, Ordering::AcqRel);
        // A handler that begins again makes up for what it dropped.
        self.is_dropped.store(false, Ordering::Release);
    }

    fn left(&self, is_ended: bool) {
        if !is_ended {
            self.is_dropped.store(true, Ordering::Release);
        }
        self.open.fetch_sub(1, Ordering::AcqRel);
    }

    /// Whether there is one that was neither committed nor rolled back on
    /// purpose.
    pub(crate) fn is_uncommitted(&self) -> bool {
        self.open.load(Ordering::Acquire) > 0 || self.is_dropped.load(Ordering::Acquire)
    }

    /// Keeps why `begin` or `commit` failed, for a handler that does not log it.
    pub(crate) fn keep_failure(&self, error: &CommitError) {
        *self.failure() = Some(error.clone());
    }

    pub(crate) fn take_failure(&self) -> Option<CommitError> {
        self.failure().take()
    }

    fn failure(&self) -> MutexGuard<'_, Option<CommitError>> {
        self.failure.lock().unwrap_or_else(PoisonError::into_inner)
    }
}
