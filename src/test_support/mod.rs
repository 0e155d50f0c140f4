//! For tests of handlers and of services: stores that fail on demand, gates, and
//! operations without a layer.
//!
//! The guide `testing_your_handler` shows how to use them. Enable the feature
//! `test-support` for tests alone:
//!
//! ```toml
//! [dev-dependencies]
//! tower-idempotency = { path = "…/tower-idempotency", features = ["test-support"] }
//! ```

mod faulty_store;
mod gate;

use std::sync::Arc;

use tokio::time::Instant;

pub use self::{
    faulty_store::{Fault, FaultyStore, StoreCall},
    gate::Gate,
};
use crate::{
    fingerprint::Fingerprint,
    key::{Key, RecordName, Scope},
    operation::{Operation, request_name::RequestName, response_settings::ResponseSettings},
    rejection::RequestHead,
    store::{Claim, Claimed, Store},
};

impl Operation {
    /// Claims `key` in `store` and returns its operation, for tests that call a handler
    /// without a layer.
    ///
    /// The scope is [`Scope::single_tenant`], and the settings are the defaults of a layer.
    /// The lease is 30 s and is not renewed. A handler that uses `begin` and `commit` needs
    /// the store that it commits to; any other handler may have a
    /// [`MemoryStore`](crate::MemoryStore).
    ///
    /// ```
    /// use tower_idempotency::{MemoryStore, Operation};
    ///
    /// async fn pay(operation: Operation, cents: u64) -> String {
    ///     operation.effects_started();
    ///     format!("{cents} charged as {}", operation.derive("payments"))
    /// }
    ///
    /// # #[tokio::main(flavor = "current_thread")]
    /// # async fn main() {
    /// let operation = Operation::for_test(&MemoryStore::new(), "order-1").await;
    /// let charge = operation.derive("payments");
    /// assert_eq!(pay(operation, 500).await, format!("500 charged as {charge}"));
    /// # }
    /// ```
    ///
    /// # Panics
    ///
    /// If the key has a record, or the store fails.
    pub async fn for_test(store: &impl Store, key: &str) -> Self {
        let settings = Arc::<ResponseSettings>::default();
        let name = RecordName::new(Scope::single_tenant(), Key::new(key));
        let fingerprint = Fingerprint::from_bytes([0; Fingerprint::LENGTH]);
        let claim = Claim::new(fingerprint, settings.lease, settings.retention);
        let since = Instant::now();
        match store.claim(&name, &claim).await {
            Ok(Claimed::Acquired(grant)) => Self::new(
                settings,
                RequestHead::default(),
                RequestName::readable(name),
                &claim,
                grant,
                since,
            ),
            Ok(Claimed::Occupied(_) | Claimed::Vanished) => {
                panic!("the key of `Operation::for_test` has a record already")
            }
            Err(error) => panic!("the claim of `Operation::for_test` failed: {error}"),
        }
    }
}
