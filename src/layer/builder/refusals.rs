//! Settings of refusals: their form and their links.

use http::{Response, request};

use super::IdempotencyBuilder;
use crate::{
    body::whole::WholeBody,
    rejection::{Rejection, custom},
    store::Store,
};

/// Settings of refusals: their form and their links.
impl<S: Store> IdempotencyBuilder<S> {
    /// Sets a function that renders refusals. `None` leaves one to the default,
    /// `application/problem+json`. The function is not asked for a request of
    /// [gRPC](crate#grpc), whose client reads no body of HTTP.
    ///
    /// A function that returns `None` alone names a body: `None::<Response<()>>`.
    ///
    /// `Cache-Control: no-store` and `Retry-After` are set in any case. The body is any
    /// [`WholeBody`]. A response with an interim status or 425 is not used, and one with 429
    /// only for a refusal that has this status. Neither is one with trailers or whose body is
    /// not ready as a whole.
    ///
    /// ```
    /// # use axum::{Router, body::Body, http::{Request, StatusCode}, routing::post};
    /// # use tower::ServiceExt;
    /// use axum::{Json, response::IntoResponse};
    /// use serde_json::json;
    /// use tower_idempotency::{IdempotencyLayer, MemoryStore, Scope};
    ///
    /// # #[tokio::main(flavor = "current_thread")]
    /// # async fn main() -> Result<(), Box<dyn std::error::Error>> {
    /// let layer = IdempotencyLayer::required(MemoryStore::new(), |_| Some(Scope::single_tenant()))
    ///     .render(|rejection, _| {
    ///         let error = json!({ "code": rejection.kind().slug(), "message": rejection.detail() });
    ///         Some((rejection.status(), Json(error)).into_response())
    ///     })
    ///     .build()?;
    /// # let app = Router::new().route("/", post(StatusCode::CREATED).layer(layer));
    /// # let response = app.oneshot(Request::post("/").body(Body::empty())?).await?;
    /// # assert_eq!(response.status(), StatusCode::BAD_REQUEST);
    /// # let body = axum::body::to_bytes(response.into_body(), 1000).await?;
    /// # assert!(body.starts_with(b"{\"code\":\"key-missing\""));
    /// # Ok(())
    /// # }
    /// ```
    pub fn render<B: WholeBody>(
        mut self,
        render: impl Fn(&Rejection, &request::Parts) -> Option<Response<B>> + Send + Sync + 'static,
    ) -> Self {
        self.settings.responses().renderer.custom = Some(custom(render));
        self
    }

    /// Sets the beginning of the `type` of a refusal. Defaults to
    /// `urn:tower-idempotency:problem:`.
    pub fn problem_types(mut self, base: impl Into<String>) -> Self {
        self.settings.responses().renderer.types = base.into().into();
        self
    }

    /// Sets the URL of your documentation. Refusals link to it with
    /// `rel="describedby"`. Defaults to none.
    pub fn documentation(mut self, url: impl Into<String>) -> Self {
        self.documentation = Some(url.into());
        self
    }
}
