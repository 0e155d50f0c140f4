//! Limits on waiting and running requests, and quotas of what they store.

use std::{sync::Arc, time::Duration};

use http::request;

use super::IdempotencyBuilder;
use crate::{
    key::Scope,
    policy::quota::{Quota, QuotaSetting},
    store::Store,
};

/// Limits on waiting and running requests, and quotas of what they store.
impl<S: Store> IdempotencyBuilder<S> {
    /// Sets how long a request waits for another one with the same key, before it
    /// receives 409 `request-in-progress`. Zero does not wait. Defaults to zero.
    ///
    /// A waiter holds no connection to the store and no readiness of the inner
    /// service. It is woken when the other request ends, in another process too if the
    /// store can tell. Otherwise it reads the record after pauses of 50 ms to one second.
    pub fn wait(mut self, timeout: Duration) -> Self {
        self.settings.config.wait = timeout;
        self
    }

    /// Sets how many requests may wait at a time. Further ones receive 409 at once.
    /// Defaults to 1,000.
    pub fn max_waiters(mut self, requests: usize) -> Self {
        self.settings.config.max_waiters = requests;
        self
    }

    /// Sets how many guarded requests may claim, wait or run at a time. Further ones
    /// receive 503. Defaults to 4,096.
    ///
    /// Requests whose client has left count too. As many outcomes may be recorded late
    /// beside them, and as many claims withdrawn.
    pub fn max_in_flight(mut self, requests: usize) -> Self {
        self.settings.config.max_in_flight = requests;
        self
    }

    /// Sets how many bytes of request bodies may be held at a time, over all guarded
    /// requests whose handler has not started. Further ones receive 503. Defaults to
    /// 256 MiB.
    pub fn max_buffered_bytes(mut self, bytes: usize) -> Self {
        self.settings.config.max_buffered_bytes = bytes;
        self
    }

    /// Sets how many bodies of guarded requests may be arriving at a time. Further ones
    /// receive 503. Defaults to 4,096.
    ///
    /// A body that is there at once does not count.
    pub fn max_uploads(mut self, requests: usize) -> Self {
        self.settings.config.max_uploads = requests;
        self
    }

    /// Sets how many requests of one scope may wait at a time, counted while more than half
    /// of [`max_waiters`](Self::max_waiters) wait. Further ones receive 409 at once. Defaults
    /// to a quarter of `max_waiters`.
    ///
    /// So one scope can take three quarters of the limit, and the others have the rest. As
    /// long as less than half is taken, nothing is counted for a scope. A request of
    /// [`Scope::single_tenant`] counts for no scope, and may take all.
    pub fn max_waiters_per_scope(mut self, requests: usize) -> Self {
        self.settings.config.per_scope.waiters = Some(requests);
        self
    }

    /// Sets how many guarded requests of one scope may claim, wait or run at a time, counted
    /// while more than half of [`max_in_flight`](Self::max_in_flight) do. Further ones receive
    /// 429 `scope-overloaded`. Defaults to a quarter of `max_in_flight`.
    ///
    /// Scopes are counted as for [`max_waiters_per_scope`](Self::max_waiters_per_scope).
    pub fn max_in_flight_per_scope(mut self, requests: usize) -> Self {
        self.settings.config.per_scope.in_flight = Some(requests);
        self
    }

    /// Sets how many bytes of request bodies of one scope may be held at a time, counted
    /// while more than half of [`max_buffered_bytes`](Self::max_buffered_bytes) are. Further
    /// ones receive 429 `scope-overloaded`. Defaults to a quarter of `max_buffered_bytes`, or
    /// to [`max_request_body`](Self::max_request_body) if that is more.
    ///
    /// Scopes are counted as for [`max_waiters_per_scope`](Self::max_waiters_per_scope).
    pub fn max_buffered_bytes_per_scope(mut self, bytes: usize) -> Self {
        self.settings.config.per_scope.buffered_bytes = Some(bytes);
        self
    }

    /// Sets how many bodies of guarded requests of one scope may be arriving at a time,
    /// counted while more than half of [`max_uploads`](Self::max_uploads) are. Further ones
    /// receive 429 `scope-overloaded`. Defaults to a quarter of `max_uploads`.
    ///
    /// Scopes are counted as for [`max_waiters_per_scope`](Self::max_waiters_per_scope).
    pub fn max_uploads_per_scope(mut self, requests: usize) -> Self {
        self.settings.config.per_scope.uploads = Some(requests);
        self
    }

    /// Sets how much each scope may keep in the store at a time, over all processes.
    /// Defaults to no limit.
    ///
    /// A request whose record would exceed it receives 429 `quota-exceeded`, with a
    /// `Retry-After` of the time until enough records have expired. A retry of a record that
    /// exists is answered as always. Other scopes are not affected.
    ///
    /// A quota is approximate. The layer counts in its process, and once a second reports the
    /// scopes that had requests to the store, which adds up the counts of all processes. So a
    /// scope may exceed its quota by what all processes accept within two seconds, and by the
    /// requests that are claimed at the same moment. A process that crashes leaves up to a
    /// second uncounted. Records are counted for up to a twentieth longer than their
    /// retention, and for two seconds at least. A record that an operator forgets or resolves
    /// is counted until it would have expired. One that a sweep marks as unknown is counted
    /// until it first expired.
    ///
    /// The first request of a scope in a process asks the store, and waits for the answer. A
    /// request that is refused reads its record instead of claiming it. While the store does
    /// not answer, each process counts alone.
    ///
    /// ```
    /// # use axum::{Router, body::Body, http::{Request, StatusCode}, routing::post};
    /// # use tower::ServiceExt;
    /// use tower_idempotency::{IdempotencyLayer, MemoryStore, Quota, Scope};
    ///
    /// # #[tokio::main(flavor = "current_thread")]
    /// # async fn main() -> Result<(), Box<dyn std::error::Error>> {
    /// let layer = IdempotencyLayer::required(MemoryStore::new(), |_| Some(Scope::single_tenant()))
    ///     .quota(Quota::unlimited().max_records(2))
    ///     .build()?;
    /// # let app = Router::new().route("/", post(StatusCode::CREATED).layer(layer));
    /// # for (key, status) in [("a", 201), ("b", 201), ("c", 429), ("a", 201)] {
    /// #     let request = Request::post("/").header("idempotency-key", key).body(Body::empty())?;
    /// #     assert_eq!(app.clone().oneshot(request).await?.status(), status);
    /// # }
    /// # Ok(())
    /// # }
    /// ```
    pub fn quota(mut self, quota: Quota) -> Self {
        self.settings.config.quota = Some(QuotaSetting::Fixed(quota));
        self
    }

    /// Sets a function that returns the [`quota`](Self::quota) of a request's scope, for
    /// plans that differ. Defaults to none.
    ///
    /// It is called for each guarded request after its body was read, so that it must be
    /// fast. If it panics, the request receives 500 `callback-panicked`. For
    /// [`Quota::unlimited`] nothing is counted.
    ///
    /// ```
    /// use tower_idempotency::{IdempotencyLayer, MemoryStore, Quota, Scope};
    ///
    /// # fn main() -> Result<(), tower_idempotency::BuildError> {
    /// #[derive(Clone, Copy)]
    /// struct Plan(u64); // your authentication puts it into the extensions
    ///
    /// let layer = IdempotencyLayer::required(MemoryStore::new(), |_| Some(Scope::single_tenant()))
    ///     .quota_by(|_scope, parts| {
    ///         let Plan(records) = *parts.extensions.get().unwrap_or(&Plan(1_000));
    ///         Quota::unlimited().max_records(records)
    ///     })
    ///     .build()?;
    /// # Ok(())
    /// # }
    /// ```
    pub fn quota_by(
        mut self,
        quota: impl Fn(&Scope, &request::Parts) -> Quota + Send + Sync + 'static,
    ) -> Self {
        self.settings.config.quota = Some(QuotaSetting::By(Arc::new(quota)));
        self
    }
}
