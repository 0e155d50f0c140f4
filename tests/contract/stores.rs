//! The stores that the rules hold for, each test on a fresh one.

use tower_idempotency::{MemoryStore, SharedStore};

/// Where one test keeps its records. Each [`open`](Self::open) is another
/// process's view of the same records.
pub(crate) struct Place {
    kind: Kind,
}

enum Kind {
    Memory(MemoryStore),
}

impl Place {
    pub(crate) async fn memory() -> Self {
        Self {
            kind: Kind::Memory(MemoryStore::new()),
        }
    }

    pub(crate) async fn open(&self) -> SharedStore {
        match &self.kind {
            Kind::Memory(store) => SharedStore::new(store.clone()),
        }
    }

    /// Leaves nothing behind.
    pub(crate) async fn remove(self) {}
}

/// A fresh memory store, for rules that do not depend on where records live.
pub(crate) fn memory() -> SharedStore {
    SharedStore::new(MemoryStore::new())
}

/// Runs a rule on every store, as one test for each: `rule::memory` and so on.
macro_rules! on_each_store {
    ($($rule:ident)*) => {
        $(mod $rule {
            use crate::stores::{Place, check};

            #[tokio::test]
            async fn memory() {
                check(Place::memory().await, super::$rule).await;
            }
        })*
    };
}
pub(crate) use on_each_store;

/// Runs a rule, and removes its records even if it fails.
pub(crate) async fn check(place: Place, rule: impl AsyncFnOnce(&Place)) {
    use futures_util::FutureExt as _;

    let ended = std::panic::AssertUnwindSafe(rule(&place))
        .catch_unwind()
        .await;
    place.remove().await;
    if let Err(panic) = ended {
        std::panic::resume_unwind(panic);
    }
}
