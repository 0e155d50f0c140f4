//! The contract of [`Store`] as tests, for the authors of stores.
//!
//! Each promise is a method of [`Trial`] with a number in front (`i2_…`) if an invariant
//! of `docs/invariants.md` depends on it. The stores of this crate pass the same suite.
//! The guide `writing_a_store` shows how to write a store.
//!
//! A [`Subject`] makes a fresh store and lets time pass.
//! [`conformance_tests!`](crate::conformance_tests) makes one test of each promise:
//!
//! ```
//! use tower_idempotency::{MemoryStore, conformance::Subject, conformance_tests};
//!
//! struct Memory;
//!
//! impl Subject for Memory {
//!     type Store = MemoryStore;
//!
//!     async fn store(&self) -> MemoryStore {
//!         MemoryStore::new()
//!     }
//! }
//!
//! conformance_tests!(Memory);
//! ```
//!
//! Outside of a test harness, [`promises`] returns the promises:
//!
//! ```
//! use std::time::Duration;
//! use tower_idempotency::{MemoryStore, conformance::{Subject, promises}};
//!
//! struct Memory;
//!
//! impl Subject for Memory {
//!     type Store = MemoryStore;
//!     // The store reads Tokio's clock, which is paused and moved by hand here.
//!     const TICK: Option<Duration> = Some(Duration::from_nanos(1));
//!     // It adds up what scopes keep, for quotas.
//!     const ADDS_USAGE: bool = true;
//!
//!     async fn store(&self) -> MemoryStore {
//!         MemoryStore::new()
//!     }
//!
//!     async fn pass(&self, time: Duration) {
//!         tokio::time::advance(time).await;
//!     }
//! }
//!
//! # #[tokio::main(flavor = "current_thread", start_paused = true)] async fn main() {
//! for promise in promises() {
//!     promise.check(Memory).await;
//! }
//! # }
//! ```
//!
//! # Real servers
//!
//! Let [`Subject::store`] make an empty database, [`Subject::peer`] connect to it once
//! more, as another process would, and [`Subject::finish`] drop it. Each test evaluates
//! the expression of the subject, which may await. Give the tests threads, so that calls
//! are simultaneous:
//!
//! ```
//! use tower_idempotency::{conformance::Subject, conformance_tests};
//! # use tower_idempotency::MemoryStore as ServerStore;
//! # struct Admin;
//! # impl Admin {
//! #     async fn connect() -> Self { Self }
//! #     async fn create_database(&self) -> ServerStore { ServerStore::new() }
//! #     async fn drop_database(&self, _: &ServerStore) {}
//! # }
//! # async fn connect_again(store: &ServerStore) -> ServerStore { store.clone() }
//!
//! struct Server(Admin);
//!
//! impl Subject for Server {
//!     type Store = ServerStore;
//!
//!     async fn store(&self) -> ServerStore {
//!         self.0.create_database().await
//!     }
//!
//!     async fn peer(&self, store: &ServerStore) -> ServerStore {
//!         connect_again(store).await
//!     }
//!
//!     async fn finish(&self, store: ServerStore) {
//!         self.0.drop_database(&store).await;
//!     }
//! }
//!
//! conformance_tests! {
//!     #[tokio::test(flavor = "multi_thread", worker_threads = 4)]
//!     Server(Admin::connect().await)
//! }
//! ```
//!
//! No test depends on the speed of the machine. Each lets a few times
//! [`Subject::SHORT`] pass.
//!
//! # What is not tested
//!
//! Only the author of a store can test that a completion survives a crash of the server.
//! The same is true of the [`StoreErrorKind`] of a store that is full or cannot be reached,
//! and of [`StoreErrorKind::Corrupt`] for a record that cannot be read.
//!
//! [`StoreErrorKind`]: crate::StoreErrorKind
//! [`StoreErrorKind::Corrupt`]: crate::StoreErrorKind::Corrupt

/// Promises that one check keeps for a call or a state.
macro_rules! checks {
    ($($(#[$doc:meta])* pub async fn $promise:ident(&$trial:ident) => $check:expr;)*) => {
        $(
            $(#[$doc])*
            pub async fn $promise(&$trial) {
                $check.await;
            }
        )*
    };
}

#[macro_use]
mod harness;
mod promise;
mod trial;
mod states;
mod calls;
mod cases;
mod claims;
mod reclaims;
mod concurrency;
mod transitions;
mod unknown;
mod times;
mod sweeps;
mod lists;
mod names;
mod usage;
mod cancellation;

use std::{future::ready, time::Duration};

use self::trial::{
    CROWD, HOUR, Held, acquired, beyond, fingerprint, good, long_claim, name, occupied, response,
};
pub use self::{
    promise::{Promise, promises},
    trial::Trial,
};
use crate::store::Store;

/// A store under test, and its time.
///
/// Wrap a store that is not `Clone` in an `Arc`.
pub trait Subject: Send + Sync + 'static {
    /// The store under test.
    type Store: Store + Clone;

    /// A lease or retention that the suite lets pass. Must be at least four times the
    /// resolution of the store's clock. Defaults to 100 ms.
    const SHORT: Duration = Duration::from_millis(100);

    /// The smallest step of the store's clock, if the clock is **paused** and moves
    /// exactly by the time that [`pass`](Self::pass) is given.
    ///
    /// The suite then tests the exact moments at which a lease lapses and a record
    /// expires. Defaults to `None`: these tests do nothing.
    const TICK: Option<Duration> = None;

    /// Whether the store itself removes completed and released records some time after they
    /// have expired. A sweep then leaves them, and does not count them.
    ///
    /// Records in progress and unknown ones are the sweep's in every store. Defaults to
    /// `false`.
    const REMOVES_BY_ITSELF: bool = false;

    /// Whether the store adds up what scopes keep, for quotas. Otherwise
    /// [`Store::add_usage`] must return `None`. Defaults to `false`.
    const ADDS_USAGE: bool = false;

    /// Returns a fresh store without records. Called once for each trial.
    fn store(&self) -> impl Future<Output = Self::Store> + Send;

    /// Returns another handle of the same store, with its own connections if it has
    /// any. Called once for each trial. Defaults to a clone.
    fn peer(&self, store: &Self::Store) -> impl Future<Output = Self::Store> + Send {
        ready(store.clone())
    }

    /// Lets at least this time pass on the store's clock. Defaults to Tokio's `sleep`.
    ///
    /// If the store learns that a lease has lapsed by observing the record, as
    /// [`CasStore`](crate::store::cas::CasStore) does, list its records through each handle
    /// first.
    fn pass(&self, time: Duration) -> impl Future<Output = ()> + Send {
        tokio::time::sleep(time)
    }

    /// Removes what [`store`](Self::store) made. Not called after a failure, so that the
    /// records can be inspected. Defaults to dropping the store.
    fn finish(&self, store: Self::Store) -> impl Future<Output = ()> + Send {
        drop(store);
        ready(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[derive(Debug)]
    struct Memory;

    impl Subject for Memory {
        type Store = crate::store::MemoryStore;

        async fn store(&self) -> crate::store::MemoryStore {
            crate::store::MemoryStore::new()
        }
    }

    #[test]
    fn every_promise_is_in_the_list() {
        let written: Vec<_> = [
            include_str!("claims.rs"),
            include_str!("reclaims.rs"),
            include_str!("concurrency.rs"),
            include_str!("transitions.rs"),
            include_str!("unknown.rs"),
            include_str!("times.rs"),
            include_str!("sweeps.rs"),
            include_str!("lists.rs"),
            include_str!("names.rs"),
            include_str!("usage.rs"),
            include_str!("cancellation.rs"),
        ]
        .iter()
        .flat_map(|file| file.split("pub async fn ").skip(1))
        .filter_map(|item| item.split('(').next())
        .collect();
        let listed: Vec<_> = promises::<Memory>().iter().map(Promise::name).collect();
        assert_eq!(listed, written);
    }
}
