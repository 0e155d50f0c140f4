//! Decides who may receive a recorded response.

use std::{fmt, pin::Pin, sync::Arc, time::Duration};

use http::{StatusCode, request};

use crate::{
    key::OperationId,
    response::{attributes::Attributes, recorded::RecordedResponse},
    store::Record,
};

/// Decides whether a request may receive the response that another request recorded, for
/// [`authorize_replay`](crate::IdempotencyBuilder::authorize_replay).
///
/// The hook is asked before every answer that comes from a completed record: a replay, to a
/// waiter too, and 409 `response-not-replayable`. A run that lost its key and would receive
/// the winner's response asks as well. It is not asked before 422 `key-reused`, which shows
/// which parts of the request differ, nor before 409 `request-in-progress` and
/// `outcome-unknown`: these show nothing of a response. A request that runs asks nothing.
///
/// The hook sees the head of the request, with the extensions of outer layers, and the
/// facts of the record. It returns a future, which borrows neither.
///
/// | the hook | the request receives |
/// |---|---|
/// | [`Allow`](ReplayDecision::Allow) | the answer of the record |
/// | [`Refuse`](ReplayDecision::Refuse) | 403 `replay-refused` |
/// | [`Unavailable`](ReplayDecision::Unavailable), or no decision within the [`timeout`](Self::timeout) | 503 `authorization-unavailable` with `Retry-After` |
/// | panics | 500 `callback-panicked` |
///
/// None of these refusals shows anything of the record, and the record stays. If the client
/// leaves, the future is dropped. The handler runs in no case.
///
/// ```
/// # use axum::{Extension, Router, body::Body, http::{Request, StatusCode}, routing::post};
/// # use tower::ServiceExt;
/// # use tower_idempotency::{IdempotencyLayer, MemoryStore, Scope};
/// use tower_idempotency::{Attributes, ReplayAuthorizer, ReplayDecision};
///
/// #[derive(Clone)]
/// struct User {
///     // your authentication puts it into the extensions
///     id: String,
///     may_read: bool,
/// }
///
/// # #[tokio::main(flavor = "current_thread")]
/// # async fn main() -> Result<(), Box<dyn std::error::Error>> {
/// let authorizer = ReplayAuthorizer::new(|request, record| {
///     let user = request.extensions.get::<User>().cloned();
///     async move {
///         match user {
///             Some(user) if user.may_read && record.attribute("user") == Some(&*user.id) => {
///                 ReplayDecision::Allow
///             }
///             _ => ReplayDecision::Refuse,
///         }
///     }
/// })
/// .attributes(|request| {
///     let user = request.extensions.get::<User>();
///     user.map(|user| ("user", &*user.id)).into_iter().collect::<Attributes>()
/// });
/// let layer = IdempotencyLayer::required(MemoryStore::new(), |_| Some(Scope::single_tenant()))
///     .authorize_replay(authorizer)
///     .build()?;
/// # let app = Router::new().route("/", post(StatusCode::CREATED).layer(layer));
/// # for (id, may_read, status) in [
/// #     ("u_7", true, StatusCode::CREATED),
/// #     ("u_7", true, StatusCode::CREATED),
/// #     ("u_8", true, StatusCode::FORBIDDEN),
/// #     ("u_7", false, StatusCode::FORBIDDEN),
/// # ] {
/// #     let user = User { id: id.to_owned(), may_read };
/// #     let request = Request::post("/").header("idempotency-key", "k").body(Body::empty())?;
/// #     let response = app.clone().layer(Extension(user)).oneshot(request).await?;
/// #     assert_eq!(response.status(), status);
/// # }
/// # Ok(())
/// # }
/// ```
#[derive(Clone)]
#[must_use]
pub struct ReplayAuthorizer {
    hook: Hook,
    attributes: Option<AttributesFn>,
    timeout: Duration,
}

type Hook = Arc<dyn Fn(&request::Parts, ReplayedRecord) -> HookFuture + Send + Sync>;
type HookFuture = Pin<Box<dyn Future<Output = ReplayDecision> + Send>>;
type AttributesFn = Arc<dyn Fn(&request::Parts) -> Attributes + Send + Sync>;

impl ReplayAuthorizer {
    /// Asks `hook`.
    pub fn new<F>(
        hook: impl Fn(&request::Parts, ReplayedRecord) -> F + Send + Sync + 'static,
    ) -> Self
    where
        F: Future<Output = ReplayDecision> + Send + 'static,
    {
        Self {
            hook: Arc::new(move |request, record| Box::pin(hook(request, record))),
            attributes: None,
            timeout: Duration::from_secs(5),
        }
    }

    /// Sets the function that returns the attributes to keep with the response of a request.
    /// Defaults to none.
    ///
    /// It is called for every request with a key, before the key is claimed. The attributes
    /// of the request that runs are kept with its response, also by the `commit` of a SQL
    /// store. If it panics, the request receives 500 `callback-panicked`, and nothing runs.
    pub fn attributes(
        mut self,
        attributes: impl Fn(&request::Parts) -> Attributes + Send + Sync + 'static,
    ) -> Self {
        self.attributes = Some(Arc::new(attributes));
        self
    }

    /// Sets how long the hook may take. After that its future is dropped. Must be at least
    /// 1 ms and at most 10 years. Defaults to 5 s.
    pub fn timeout(mut self, timeout: Duration) -> Self {
        self.timeout = timeout;
        self
    }

    pub(crate) fn longest(&self) -> Duration {
        self.timeout
    }

    /// Returns the attributes of a request, unless they are too large.
    pub(crate) fn attributes_of(&self, request: &request::Parts) -> Option<Attributes> {
        let Some(attributes) = &self.attributes else {
            return Some(Attributes::new());
        };
        Some(attributes(request)).filter(Attributes::fit)
    }

    /// Calls the hook when it is polled first.
    pub(crate) async fn ask(
        &self,
        request: &request::Parts,
        record: ReplayedRecord,
    ) -> ReplayDecision {
        (self.hook)(request, record).await
    }
}

impl fmt::Debug for ReplayAuthorizer {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("ReplayAuthorizer")
            .field("attributes", &self.attributes.is_some())
            .field("timeout", &self.timeout)
            .finish_non_exhaustive()
    }
}

/// What a [`ReplayAuthorizer`] decides.
///
/// The variants are exhaustive on purpose: a `match` covers what can happen.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ReplayDecision {
    /// The request receives the answer of the record.
    Allow,
    /// 403 `replay-refused`.
    Refuse,
    /// It cannot be decided now, for example because the user database is down: 503
    /// `authorization-unavailable` with `Retry-After`.
    Unavailable,
}

/// The record whose answer a request would receive, without the response itself.
#[derive(Clone, Debug)]
pub struct ReplayedRecord {
    operation: OperationId,
    age: Duration,
    expires_in: Duration,
    attempt: u32,
    status: Option<StatusCode>,
    attributes: Attributes,
}

impl ReplayedRecord {
    pub(crate) fn new(record: &Record) -> Self {
        Self {
            operation: record.operation,
            age: record.age,
            expires_in: record.expires_in.unwrap_or_default(),
            attempt: record.attempt,
            status: None,
            attributes: Attributes::new(),
        }
    }

    pub(crate) fn with_response(self, response: &RecordedResponse) -> Self {
        Self {
            status: response.status(),
            attributes: response.attributes().clone(),
            ..self
        }
    }

    /// Returns the id of the operation.
    #[must_use]
    pub fn operation(&self) -> OperationId {
        self.operation
    }

    /// Returns the time since the claim of the request that ran.
    #[must_use]
    pub fn age(&self) -> Duration {
        self.age
    }

    /// Returns the time until the record expires.
    #[must_use]
    pub fn expires_in(&self) -> Duration {
        self.expires_in
    }

    /// Returns which attempt of the operation has recorded the response, from 1.
    #[must_use]
    pub fn attempt(&self) -> u32 {
        self.attempt
    }

    /// Returns the status of the recorded response, or `None` if the response was not kept.
    #[must_use]
    pub fn status(&self) -> Option<StatusCode> {
        self.status
    }

    /// Returns the attributes that were kept with the response. There are none if the layer
    /// that recorded it takes none, if they were too large, or if an operator or a
    /// [`Reconciler`](crate::Reconciler) supplied the response without any.
    pub fn attributes(&self) -> &Attributes {
        &self.attributes
    }

    /// Returns the value of an attribute; see [`attributes`](Self::attributes).
    #[must_use]
    pub fn attribute(&self, name: &str) -> Option<&str> {
        self.attributes.get(name)
    }
}
