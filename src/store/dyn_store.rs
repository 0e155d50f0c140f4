//! One store type for applications that choose the store when they start.

use std::{fmt, pin::Pin, sync::Arc, time::Duration};

use super::{
    Claim, Claimed, Completion, Filter, Grant, MarkedBy, Page, Purged, ReclaimAs, Record, Release,
    Resolution, Store, StoreError, Transitioned,
};
use crate::{Fence, RecordName, Token};

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

/// Declares the object-safe twin of [`Store`] and forwards both ways, so that
/// each signature but that of `list` is written once.
macro_rules! forward {
    ($(fn $method:ident(&self $(, $argument:ident: $(&$lent:ident)? $($given:ident)?)*) -> $answer:ty;)*) => {
        trait AnyStore: Send + Sync {
            $(fn $method<'a>(
                &'a self
                $(, $argument: $(&'a $lent)? $($given)?)*
            ) -> Answer<'a, $answer>;)*

            fn list<'a>(
                &'a self,
                filter: Filter,
                after: Option<&'a RecordName>,
                limit: u32,
            ) -> Answer<'a, Page>;
        }

        impl<S: Store> AnyStore for S {
            $(fn $method<'a>(
                &'a self
                $(, $argument: $(&'a $lent)? $($given)?)*
            ) -> Answer<'a, $answer> {
                Box::pin(Store::$method(self $(, $argument)*))
            })*

            fn list<'a>(
                &'a self,
                filter: Filter,
                after: Option<&'a RecordName>,
                limit: u32,
            ) -> Answer<'a, Page> {
                Box::pin(Store::list(self, filter, after, limit))
            }
        }

        impl Store for DynStore {
            $(async fn $method(
                &self
                $(, $argument: $(&$lent)? $($given)?)*
            ) -> Result<$answer, StoreError> {
                self.0.$method($($argument),*).await
            })*

            async fn list(
                &self,
                filter: Filter,
                after: Option<&RecordName>,
                limit: u32,
            ) -> Result<Page, StoreError> {
                self.0.list(filter, after, limit).await
            }
        }
    };
}

forward! {
    fn claim(&self, name: &RecordName, claim: &Claim) -> Claimed;
    fn reclaim(&self, name: &RecordName, seen: Fence, reclaim_as: ReclaimAs, claim: &Claim) -> Option<Grant>;
    fn renew(&self, name: &RecordName, token: Token, lease: Duration) -> Transitioned;
    fn complete(&self, name: &RecordName, token: Token, completion: &Completion) -> Transitioned;
    fn release(&self, name: &RecordName, token: Token, release: Release) -> Transitioned;
    fn mark_unknown(&self, name: &RecordName, marked_by: MarkedBy, retention: Duration) -> Transitioned;
    fn resolve(&self, name: &RecordName, seen: Fence, resolution: &Resolution) -> Transitioned;
    fn read(&self, name: &RecordName) -> Option<Record>;
    fn forget(&self, name: &RecordName, seen: Fence) -> Transitioned;
    fn purge_expired(&self, limit: u32, unknown_retention: Duration) -> Purged;
}
