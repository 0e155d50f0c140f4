//! The error of transactions.

use std::{
    error::Error,
    fmt,
    sync::{
        Arc,
        atomic::{AtomicBool, Ordering},
    },
};

use bytes::Bytes;
use http::{Response, StatusCode};
use http_body_util::Full;
use sqlx::error::DatabaseError;

use super::kind::CommitErrorKind;
#[cfg(feature = "postgres")]
use crate::store::sql::error::has_class;
#[cfg(feature = "sqlite")]
use crate::store::sql::error::{SQLITE_BUSY, SQLITE_LOCKED, sqlite_code};
use crate::{
    key::OperationId,
    operation::{Operation, response_settings::ResponseSettings},
    rejection::{Renderer, RequestHead},
    store::{StoreError, sql::error::without_values},
    telemetry::log::{self, Event, Warnings},
};

/// The error of a transaction that did not begin, or that was not committed or may not
/// have been.
///
/// A store's `begin` and `commit` and a transaction's `rollback` return it, and `?`
/// converts an [`sqlx::Error`] into it. Return it from the handler, or return a
/// response of the application with its [`status`](Self::status) and
/// [`retry_after_seconds`](Self::retry_after_seconds). With the feature `axum` it
/// is `IntoResponse`; other services call [`into_http`](Self::into_http).
///
/// Its text and its event in the log name the kind and the cause. Neither quotes a
/// value that was bound to a statement. For a database's error the text is its
/// message, if errors of its class quote no values. Otherwise it is the SQLSTATE, with
/// the names of the table, column and constraint. The message of a trigger is left
/// out. [`get_ref`](Self::get_ref) returns the error itself, which may quote values.
///
/// An application with an error type of its own wraps it:
///
/// ```
/// # use axum::{Router, body::Body, extract::State, routing::post};
/// # use http::Request;
/// # use tower::ServiceExt;
/// # use tower_idempotency::{IdempotencyLayer, Scope, sqlx::Connection};
/// use axum::response::{IntoResponse, Response};
/// use http::StatusCode;
/// use tower_idempotency::{CommitError, Committed, Operation, SqliteStore, sqlx};
///
/// enum AppError {
///     OutOfStock,
///     Transaction(CommitError),
/// }
///
/// /// For `?` on `begin`, `commit` and `rollback`.
/// impl From<CommitError> for AppError {
///     fn from(error: CommitError) -> Self {
///         Self::Transaction(error)
///     }
/// }
///
/// /// For `?` on the handler's own queries.
/// impl From<sqlx::Error> for AppError {
///     fn from(error: sqlx::Error) -> Self {
///         Self::Transaction(error.into())
///     }
/// }
///
/// impl IntoResponse for AppError {
///     fn into_response(self) -> Response {
///         match self {
///             Self::OutOfStock => (StatusCode::CONFLICT, "out of stock").into_response(),
///             // Logs the cause, and does not show it to the client.
///             Self::Transaction(error) => error.into_response(),
///         }
///     }
/// }
///
/// async fn order(
///     State(store): State<SqliteStore>,
///     operation: Operation,
///     item: String,
/// ) -> Result<Committed, AppError> {
///     let mut transaction = store.begin(&operation).await?;
///     let reserved = sqlx::query("UPDATE stock SET pieces = pieces - 1 WHERE item = $1")
///         .bind(item)
///         .execute(&mut *transaction)
///         .await?;
///     if reserved.rows_affected() == 0 {
///         transaction.rollback().await?;
///         return Err(AppError::OutOfStock);
///     }
///     let response = (StatusCode::CREATED, "ordered");
///     Ok(store.commit(&operation, transaction, response).await?)
/// }
/// # #[tokio::main(flavor = "current_thread")]
/// # async fn main() -> Result<(), Box<dyn std::error::Error>> {
/// # let file = std::env::temp_dir().join(format!("app-error-{}.db", std::process::id()));
/// # let _ = std::fs::remove_file(&file);
/// # let store = SqliteStore::open(&file).await?;
/// # let mut shop = sqlx::SqliteConnection::connect(file.to_str().unwrap()).await?;
/// # sqlx::raw_sql(
/// #     "CREATE TABLE stock (item TEXT, pieces INTEGER CHECK (pieces >= 0));
/// #      INSERT INTO stock VALUES ('pen', 1)",
/// # )
/// # .execute(&mut shop)
/// # .await?;
/// # let layer = IdempotencyLayer::required(store.clone(), |_| Some(Scope::single_tenant()));
/// # let app = Router::new()
/// #     .route("/orders", post(order).layer(layer.build()?))
/// #     .with_state(store);
/// # let ask = async |key: &str, item: &'static str| {
/// #     let request = Request::post("/orders").header("idempotency-key", key);
/// #     app.clone().oneshot(request.body(Body::from(item)).unwrap()).await.unwrap()
/// # };
/// # for replayed in [false, true] {
/// #     let response = ask("first", "pen").await;
/// #     assert_eq!(response.status(), StatusCode::CREATED);
/// #     assert_eq!(response.headers().contains_key("idempotent-replayed"), replayed);
/// #     assert_eq!(ask("second", "unicorn").await.status(), StatusCode::CONFLICT);
/// # }
/// # // A constraint of the database: rolled back, and the key is free.
/// # let response = ask("third", "pen").await;
/// # assert_eq!(response.status(), StatusCode::INTERNAL_SERVER_ERROR);
/// # assert_eq!(response.headers()["content-type"], "application/problem+json");
/// # sqlx::query("UPDATE stock SET pieces = 1").execute(&mut shop).await?;
/// # assert_eq!(ask("third", "pen").await.status(), StatusCode::CREATED);
/// # std::fs::remove_file(&file)?;
/// # Ok(())
/// # }
/// ```
#[derive(Clone)]
pub struct CommitError {
    failure: Arc<Failure>,
    /// `None` if `?` converted another error.
    origin: Option<Origin>,
}

/// The operation of the transaction, and the settings of its layer.
#[derive(Clone)]
struct Origin {
    operation: OperationId,
    head: RequestHead,
    settings: Arc<ResponseSettings>,
}

struct Failure {
    kind: CommitErrorKind,
    source: Option<Box<dyn Error + Send + Sync>>,
    is_logged: AtomicBool,
}

impl CommitError {
    pub(crate) fn new(kind: CommitErrorKind) -> Self {
        Self::of(kind, None)
    }

    pub(crate) fn caused(
        kind: CommitErrorKind,
        source: impl Into<Box<dyn Error + Send + Sync>>,
    ) -> Self {
        Self::of(kind, Some(source.into()))
    }

    fn of(kind: CommitErrorKind, source: Option<Box<dyn Error + Send + Sync>>) -> Self {
        let is_logged = AtomicBool::new(false);
        Self {
            failure: Arc::new(Failure {
                kind,
                source,
                is_logged,
            }),
            origin: None,
        }
    }

    /// Ties the error to its operation. The layer logs it if the handler does not.
    pub(crate) fn of_operation(mut self, operation: &Operation) -> Self {
        self.origin = Some(Origin {
            operation: operation.id(),
            head: operation.head().clone(),
            settings: Arc::clone(operation.settings()),
        });
        let error = self.clone();
        operation.transactions().keep_failure(move || error.log());
        self
    }

    /// Returns the error of a COMMIT that was not answered and, as the record shows,
    /// rolled back. The cause stays.
    pub(crate) fn found_aborted(self) -> Self {
        let source = Arc::into_inner(self.failure).and_then(|failure| failure.source);
        Self::of(CommitErrorKind::Aborted, source)
    }

    /// Returns the kind.
    #[must_use]
    pub fn kind(&self) -> CommitErrorKind {
        self.failure.kind
    }

    /// Returns the status of the response: 503 for
    /// [`Unavailable`](CommitErrorKind::Unavailable),
    /// [`LeaseLost`](CommitErrorKind::LeaseLost) and
    /// [`Unknown`](CommitErrorKind::Unknown), otherwise 500.
    ///
    /// The standard dispositions release the key for the same request after a
    /// response with it. There are three exceptions:
    ///
    /// - After [`effects_started`](crate::Operation::effects_started) the outcome is
    ///   unknown.
    /// - After [`Unknown`](CommitErrorKind::Unknown) the outcome is unknown too, and
    ///   the client receives 503 `outcome-unknown`, whatever the handler returns.
    /// - After [`Superseded`](CommitErrorKind::Superseded) the client receives the
    ///   response of the other claim, and nothing is released.
    #[must_use]
    pub fn status(&self) -> StatusCode {
        self.kind().rejection().status()
    }

    /// Returns the value of `Retry-After` in seconds, or `None` if a retry cannot
    /// change the answer.
    #[must_use]
    pub fn retry_after_seconds(&self) -> Option<u64> {
        self.kind().rejection().retry_after_seconds()
    }

    /// Logs the error at WARN, at most once in five seconds for each kind, and
    /// returns a response for services that are not axum's.
    ///
    /// Messages of the database that may quote a value are not logged, as that of
    /// SQLSTATE 22P02. The log names the SQLSTATE instead.
    ///
    /// The response is `application/problem+json` with the error's
    /// [`status`](Self::status) and `Retry-After`, without the cause.
    ///
    /// An error of a store's `begin` or `commit` or of a transaction's `rollback` is
    /// rendered as a refusal of the operation's layer, with its
    /// [`render`](crate::IdempotencyBuilder::render),
    /// [`problem_types`](crate::IdempotencyBuilder::problem_types) and
    /// [`documentation`](crate::IdempotencyBuilder::documentation). An error that `?`
    /// converted from an [`sqlx::Error`] or a [`StoreError`] is rendered with the
    /// defaults of these settings.
    ///
    /// ```
    /// # use tower::{Layer, ServiceExt, service_fn};
    /// # use tower_idempotency::{IdempotencyLayer, Scope, sqlx::{self, Connection}};
    /// use bytes::Bytes;
    /// use http::{Request, Response};
    /// use http_body_util::Full;
    /// use tower_idempotency::{
    ///     CommitError, Committed, Operation, RequestBody, SqliteStore, sqlx::query,
    /// };
    ///
    /// async fn handle(
    ///     store: SqliteStore,
    ///     request: Request<RequestBody<Full<Bytes>>>,
    /// ) -> Response<Full<Bytes>> {
    ///     let Some(operation) = request.extensions().get::<Operation>() else {
    ///         return Response::new(Full::from("an order needs a key"));
    ///     };
    ///     match order(&store, operation).await {
    ///         Ok(committed) => committed.into_http(),
    ///         Err(error) => error.into_http(),
    ///     }
    /// }
    ///
    /// async fn order(store: &SqliteStore, operation: &Operation) -> Result<Committed, CommitError> {
    ///     let mut transaction = store.begin(operation).await?;
    ///     query("INSERT INTO orders (item) VALUES ('pen')")
    ///         .execute(&mut *transaction)
    ///         .await?;
    ///     let response = Response::new(Full::from("ordered"));
    ///     store.commit(operation, transaction, response).await
    /// }
    /// # #[tokio::main(flavor = "current_thread")]
    /// # async fn main() -> Result<(), Box<dyn std::error::Error>> {
    /// # let file = std::env::temp_dir().join(format!("into-http-{}.db", std::process::id()));
    /// # let _ = std::fs::remove_file(&file);
    /// # let store = SqliteStore::open(&file).await?;
    /// # let mut shop = sqlx::SqliteConnection::connect(file.to_str().unwrap()).await?;
    /// # let layer = IdempotencyLayer::required(store.clone(), |_| Some(Scope::single_tenant()));
    /// # let service = layer.build()?.layer(service_fn(move |request| {
    /// #     let store = store.clone();
    /// #     async { Ok::<_, std::convert::Infallible>(handle(store, request).await) }
    /// # }));
    /// # for status in [500, 200, 200] {
    /// #     let request = Request::post("/").header("idempotency-key", "k").body(Full::default())?;
    /// #     let response = service.clone().oneshot(request).await?;
    /// #     assert_eq!(response.status(), status);
    /// #     if status == 500 {
    /// #         assert_eq!(response.headers()["content-type"], "application/problem+json");
    /// #         // The table was missing.
    /// #         query("CREATE TABLE orders (item TEXT)").execute(&mut shop).await?;
    /// #     }
    /// # }
    /// # let orders: i64 = sqlx::query_scalar("SELECT count(*) FROM orders").fetch_one(&mut shop).await?;
    /// # assert_eq!(orders, 1);
    /// # std::fs::remove_file(&file)?;
    /// # Ok(())
    /// # }
    /// ```
    #[must_use]
    pub fn into_http(self) -> Response<Full<Bytes>> {
        self.log();
        let rejection = self.kind().rejection();
        let response = match &self.origin {
            Some(Origin {
                operation,
                head,
                settings,
            }) => {
                let rejection = rejection.about(*operation);
                settings
                    .renderer
                    .render(&rejection, head, &settings.warnings)
            }
            None => {
                let head = RequestHead::default();
                Renderer::standard().render(&rejection, &head, &Warnings::default())
            }
        };
        response.map(Full::new)
    }

    /// Returns the cause: an [`sqlx::Error`], a [`StoreError`] or a text. `None` if
    /// the kind is the whole cause.
    ///
    /// An [`sqlx::Error`] has the database's message, which may quote values of the
    /// request. Do not log it.
    ///
    /// ```
    /// use tower_idempotency::{CommitError, sqlx};
    ///
    /// /// Whether a statement broke a unique constraint.
    /// fn is_duplicate(error: &CommitError) -> bool {
    ///     error
    ///         .get_ref()
    ///         .and_then(|cause| cause.downcast_ref::<sqlx::Error>()?.as_database_error())
    ///         .is_some_and(|error| error.is_unique_violation())
    /// }
    /// # assert!(!is_duplicate(&sqlx::Error::PoolTimedOut.into()));
    /// ```
    #[must_use]
    pub fn get_ref(&self) -> Option<&(dyn Error + Send + Sync + 'static)> {
        self.failure.source.as_deref()
    }

    fn sqlx_error(&self) -> Option<&sqlx::Error> {
        self.get_ref()?.downcast_ref()
    }

    /// Returns the text of the cause, without bound values.
    fn cause(&self) -> Option<String> {
        let cause = self.get_ref()?;
        Some(match self.sqlx_error() {
            Some(error) => without_values(error).into_owned(),
            None => cause.to_string(),
        })
    }

    /// Logs the error, unless it was logged before.
    pub(crate) fn log(&self) {
        if self.failure.is_logged.swap(true, Ordering::Relaxed) {
            return;
        }
        let operation = self.origin.as_ref().map(|origin| origin.operation);
        let kind = self.kind();
        let Some(suppressed) = kind.limit().permit() else {
            return;
        };
        let event = Event {
            message: &format!("transaction failed ({}), answered with 5xx", kind.name()),
            notice: None,
            kind: Some(kind.name()),
            error: Some(log::chain(self)),
            hint: None,
            operation,
            suppressed,
        };
        event.log();
    }
}

/// An unavailable store: no transaction began.
impl From<StoreError> for CommitError {
    fn from(error: StoreError) -> Self {
        Self::caused(CommitErrorKind::Unavailable, error)
    }
}

/// A failed statement of the handler. Its transaction is rolled back when it is
/// dropped.
impl From<sqlx::Error> for CommitError {
    fn from(error: sqlx::Error) -> Self {
        let kind = match &error {
            sqlx::Error::PoolTimedOut
            | sqlx::Error::PoolClosed
            | sqlx::Error::WorkerCrashed
            | sqlx::Error::Io(_)
            | sqlx::Error::Tls(_) => CommitErrorKind::Unavailable,
            sqlx::Error::Database(error) if is_unavailable(&**error) => {
                CommitErrorKind::Unavailable
            }
            _ => CommitErrorKind::Aborted,
        };
        Self::caused(kind, error)
    }
}

/// Returns whether the error says that the database does not accept statements now.
fn is_unavailable(error: &dyn DatabaseError) -> bool {
    #[cfg(feature = "postgres")]
    if let Some(error) = error.try_downcast_ref::<sqlx::postgres::PgDatabaseError>() {
        // Connections, resources, and a server that stops or starts.
        return has_class(error.code(), &["08", "53", "57P01", "57P02", "57P03"]);
    }
    #[cfg(feature = "sqlite")]
    if let Some(code) = sqlite_code(error) {
        return matches!(code, SQLITE_BUSY | SQLITE_LOCKED);
    }
    let _ = error;
    false
}

impl fmt::Debug for CommitError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("CommitError")
            .field("kind", &self.kind())
            .field("cause", &self.cause())
            .finish()
    }
}

impl fmt::Display for CommitError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.kind().reason())?;
        match self.cause() {
            Some(cause) => write!(f, ": {cause}"),
            None => Ok(()),
        }
    }
}

impl Error for CommitError {
    fn source(&self) -> Option<&(dyn Error + 'static)> {
        match self.sqlx_error() {
            // Its source is the database's error, whose text may quote values.
            Some(_) => None,
            None => self.get_ref()?.source(),
        }
    }
}
