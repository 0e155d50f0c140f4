//! The builder of a layer: its settings and their defaults.

mod limits;
mod records;
mod refusals;
mod requests;
mod runs;
#[cfg(feature = "sealing")]
mod sealing;

use std::{fmt, sync::Arc};

use http::{HeaderValue, request};

use super::IdempotencyLayer;
use crate::{
    flow::config::{ScopeFn, error::BuildError, settings::Settings},
    key::Scope,
    policy::Requirement,
    store::Store,
};

/// Builds an [`IdempotencyLayer`].
///
/// Made by [`IdempotencyLayer::required`] and [`IdempotencyLayer::optional`], which
/// ask for the two settings that have no default. Every other setting has the default
/// that its method names.
///
/// ```
/// # use axum::{Router, body::Body, http::{Request, StatusCode}, routing::post};
/// # use tower::ServiceExt;
/// use std::time::Duration;
/// use tower_idempotency::{IdempotencyLayer, KeySyntax, MemoryStore, Scope};
///
/// # #[tokio::main(flavor = "current_thread")]
/// # async fn main() -> Result<(), Box<dyn std::error::Error>> {
/// let layer = IdempotencyLayer::required(MemoryStore::new(), |_| Some(Scope::single_tenant()))
///     .key_syntax(KeySyntax::compat().uuid())
///     .wait(Duration::from_secs(2))
///     .retention(Duration::from_secs(48 * 3600))
///     .build()?;
/// # let app = Router::new().route("/", post(StatusCode::CREATED).layer(layer));
/// # for (key, status) in [
/// #     ("8e03978e-40d5-43dd-bc93-6894a57f9324", StatusCode::CREATED),
/// #     ("no-uuid", StatusCode::BAD_REQUEST),
/// # ] {
/// #     let request = Request::post("/").header("idempotency-key", key).body(Body::empty())?;
/// #     assert_eq!(app.clone().oneshot(request).await?.status(), status);
/// # }
/// # Ok(())
/// # }
/// ```
#[must_use = "a builder does nothing until it is built"]
pub struct IdempotencyBuilder<S> {
    store: S,
    settings: Settings,
    documentation: Option<String>,
}

/// The constructors of a layer, which return its builder.
impl<S: Store> IdempotencyLayer<S> {
    /// Guards requests that have a key. Requests without one receive 400
    /// `key-missing`.
    ///
    /// `scope` returns whose key it is, from what an outer layer found out about the
    /// caller. `None` refuses the request with 403 `caller-unknown`. Take the caller's
    /// identity, never its credential: a token that is refreshed between two attempts
    /// would run the operation twice.
    ///
    /// Nested routers shorten the path. With the feature `axum`, the original one is
    /// read from the `OriginalUri` of axum 0.8. Without the feature, and with another
    /// version of axum, the layer must stand outside of nested routers; see
    /// [`Fingerprinting`](crate::Fingerprinting#path).
    pub fn required(
        store: S,
        scope: impl Fn(&request::Parts) -> Option<Scope> + Send + Sync + 'static,
    ) -> IdempotencyBuilder<S> {
        IdempotencyBuilder::new(store, Arc::new(scope), Requirement::Required)
    }

    /// Guards requests that have a key. Requests without one run unguarded.
    ///
    /// `scope` is that of [`required`](Self::required).
    pub fn optional(
        store: S,
        scope: impl Fn(&request::Parts) -> Option<Scope> + Send + Sync + 'static,
    ) -> IdempotencyBuilder<S> {
        IdempotencyBuilder::new(store, Arc::new(scope), Requirement::Optional)
    }
}

impl<S: Store> IdempotencyBuilder<S> {
    fn new(store: S, scope: ScopeFn, requirement: Requirement) -> Self {
        Self {
            store,
            settings: Settings::new(scope, requirement),
            documentation: None,
        }
    }

    /// Returns the layer.
    ///
    /// With the feature `metrics`, it describes the crate's metrics to the recorder. One
    /// that is installed later counts them without a description.
    ///
    /// # Errors
    ///
    /// A [`BuildError`] names the first setting that is refused, its limit and its value:
    ///
    /// - a duration that is zero, overflows or contradicts another;
    /// - a limit of zero;
    /// - a safe method;
    /// - bodies that stream, where a function needs them;
    /// - a required key, and bodies that run unguarded;
    /// - a lease shorter than three heartbeats;
    /// - a window of UUIDv7 keys longer than a retention;
    /// - a `Sealing` without the name of a table, or with two keys of one id.
    pub fn build(mut self) -> Result<IdempotencyLayer<S>, BuildError> {
        let documentation = self.documentation.as_deref().map(link).transpose()?;
        self.settings.responses().renderer.documentation = documentation;
        Ok(IdempotencyLayer::new(self.store, self.settings.build()?))
    }
}

impl<S> fmt::Debug for IdempotencyBuilder<S> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("IdempotencyBuilder").finish_non_exhaustive()
    }
}

fn link(url: &str) -> Result<HeaderValue, BuildError> {
    let is_sound = !url.is_empty() && !url.contains(['<', '>', ' ']);
    Some(format!("<{url}>; rel=\"describedby\""))
        .filter(|_| is_sound)
        .and_then(|link| HeaderValue::try_from(link).ok())
        .ok_or_else(|| BuildError::new("documentation", format!("must be a URL, got {url:?}")))
}
