//! The transaction that a handler begins for its own writes.

pub(crate) mod commit;
pub(crate) mod error;
pub(crate) mod kind;
#[cfg(feature = "postgres")]
pub(crate) mod postgres;
pub(crate) mod response;
#[cfg(feature = "sqlite")]
pub(crate) mod sqlite;

use std::{
    fmt,
    ops::{Deref, DerefMut},
    time::Instant,
};

use sqlx::{Database, Transaction};

use self::{error::CommitError, kind::CommitErrorKind};
use crate::{
    operation::{Operation, WeakOperation},
    store::sql::detached,
};

/// A transaction for the writes of an operation's handler. A store's `begin` begins
/// it, and the store's `commit` ends it.
///
/// It dereferences to sqlx's connection: run queries on `&mut *transaction`, and
/// begin savepoints with [`Connection::begin`](sqlx::Connection::begin). It has
/// no method `commit`, because only the store's `commit` writes the response with it.
/// If it is dropped, it is rolled back, as after a crash.
///
/// To end a transaction without a commit, call [`rollback`](Self::rollback). Suppose that
/// it is dropped instead, and that the handler's response is a success that would be
/// recorded. The response then promises work that was rolled back, while the handler may
/// have done other work. The layer answers 500 `rolled-back`, the outcome is unknown, and
/// the notice `uncommitted` is logged.
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
    /// When the store began it. `None` for a transaction that another pool began.
    begun: Option<Instant>,
    /// `None` for a transaction that another pool began.
    open: Option<OpenTransaction>,
}

impl<DB: Database> OperationTransaction<DB> {
    /// Begins a transaction of `operation`, unless its lease is lost. `begin` runs to
    /// its end even if the caller is dropped.
    pub(crate) async fn begin(
        operation: &Operation,
        begin: impl Future<Output = Result<Transaction<'static, DB>, CommitError>> + Send + 'static,
    ) -> Result<Self, CommitError> {
        let now = Instant::now();
        let begun = match operation.lease().is_lost() {
            true => Err(CommitError::new(CommitErrorKind::LeaseLost)),
            false => detached(begin).await,
        };
        let transaction = begun.map_err(|error| error.of_operation(operation))?;
        operation.transactions().open();
        let open = OpenTransaction {
            operation: operation.downgrade(),
            is_dropped: true,
        };
        Ok(Self {
            transaction,
            begun: Some(now),
            open: Some(open),
        })
    }

    /// Rolls the transaction back on purpose. The handler's response is recorded like
    /// any other.
    ///
    /// # Errors
    ///
    /// If the database does not answer. The transaction is not committed in this case
    /// either.
    pub async fn rollback(self) -> Result<(), CommitError> {
        let open = self.open.as_ref();
        let operation = open.and_then(|open| open.operation.upgrade());
        let rolled_back = self.into_inner().rollback().await;
        rolled_back.map_err(|error| match operation {
            Some(operation) => CommitError::from(error).of_operation(&operation),
            None => error.into(),
        })
    }

    /// Returns the transaction, which its caller commits or rolls back.
    pub(super) fn into_inner(self) -> Transaction<'static, DB> {
        if let Some(mut open) = self.open {
            open.is_dropped = false;
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
            open: None,
        }
    }
}

impl<DB: Database> fmt::Debug for OperationTransaction<DB> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("OperationTransaction")
            .field("from_store", &self.open.is_some())
            .finish_non_exhaustive()
    }
}

/// Counts among the operation's open transactions until it is dropped.
struct OpenTransaction {
    operation: WeakOperation,
    /// Whether it is dropped without `commit` or `rollback`.
    is_dropped: bool,
}

impl Drop for OpenTransaction {
    fn drop(&mut self) {
        if let Some(operation) = self.operation.upgrade() {
            operation.transactions().close(self.is_dropped);
        }
    }
}
