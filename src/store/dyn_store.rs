//! One store type for applications that choose the store when they start.

use std::{fmt, pin::Pin, sync::Arc, time::Duration};

use super::{
    Claim, Claimed, Grant, Purged, ReclaimAs, Record, Store, StoreError, Transition, Transitioned,
    Usage, UsageDelta,
    admin::{Count, Filter, Page},
};
use crate::{key::RecordName, store::Fence};

/// Any store behind one type, for applications that choose it at run time.
///
/// Costs one allocation for each call. Clones share the store.
///
/// ```
/// # use axum::{Router, body::Body, http::{Request, StatusCode}, routing::post};
/// # use tower::ServiceExt;
/// # use tower_idempotency::{IdempotencyLayer, Scope};
/// use tower_idempotency::{MemoryStore, DynStore};
///
/// # #[tokio::main(flavor = "current_thread")]
/// # async fn main() -> Result<(), Box<dyn std::error::Error>> {
/// let store = DynStore::new(MemoryStore::new());
/// # let layer = IdempotencyLayer::required(store, |_| Some(Scope::single_tenant())).build()?;
/// # let app = Router::new().route("/", post(StatusCode::CREATED).layer(layer));
/// # let request = Request::post("/").header("idempotency-key", "k").body(Body::empty())?;
/// # assert_eq!(app.oneshot(request).await?.status(), StatusCode::CREATED);
/// # Ok(())
/// # }
/// ```
#[derive(Clone)]
pub struct DynStore(Arc<dyn AnyStore>);

impl DynStore {
    /// Shares `store`.
    pub fn new(store: impl Store) -> Self {
        Self(Arc::new(store))
    }
}

impl fmt::Debug for DynStore {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("DynStore").finish_non_exhaustive()
    }
}

type Answer<'a, T> = Pin<Box<dyn Future<Output = Result<T, StoreError>> + Send + 'a>>;

/// The methods of [`Store`] that a store may have of its own, their arguments with this
/// lifetime.
macro_rules! methods {
    ($then:ident, $life:lifetime) => {
        $then! {
            $life;
            fn claim(name: &$life RecordName, claim: &$life Claim) -> Claimed;
            fn reclaim(
                name: &$life RecordName,
                seen: Fence,
                reclaim_as: ReclaimAs,
                claim: &$life Claim
            ) -> Option<Grant>;
            fn transition(name: &$life RecordName, transition: Transition) -> Transitioned;
            fn read(name: &$life RecordName) -> Option<Record>;
            fn list(filter: &$life Filter, after: Option<&$life RecordName>, limit: u32) -> Page;
            fn count(filter: &$life Filter, limit: u32) -> Count;
            fn purge_expired(limit: u32, unknown_retention: Duration) -> Purged;
            fn wait(name: &$life RecordName, seen: Fence) -> ();
            fn now() -> Duration;
            fn add_usage(deltas: &$life [UsageDelta]) -> Option<Vec<Usage>>;
        }
    };
}

/// The object-safe twin of [`Store`].
macro_rules! declare {
    ($life:lifetime; $(fn $method:ident($($argument:ident: $given:ty),*) -> $answer:ty;)*) => {
        trait AnyStore: Send + Sync {
            $(fn $method<$life>(&$life self, $($argument: $given),*) -> Answer<$life, $answer>;)*
        }

        impl<S: Store> AnyStore for S {
            $(fn $method<$life>(&$life self, $($argument: $given),*) -> Answer<$life, $answer> {
                Box::pin(Store::$method(self, $($argument),*))
            })*
        }
    };
}

macro_rules! forward {
    ($life:lifetime; $(fn $method:ident($($argument:ident: $given:ty),*) -> $answer:ty;)*) => {
        impl Store for DynStore {
            $(async fn $method(&self, $($argument: $given),*) -> Result<$answer, StoreError> {
                self.0.$method($($argument),*).await
            })*
        }

        /// Shares the store.
        impl<S: Store> Store for Arc<S> {
            $(fn $method(
                &self,
                $($argument: $given),*
            ) -> impl Future<Output = Result<$answer, StoreError>> + Send {
                S::$method(self, $($argument),*)
            })*
        }
    };
}

methods!(declare, 'a);
methods!(forward, '_);
