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
mod states;
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

use std::{fmt, future::ready, panic::resume_unwind, pin::Pin, sync::Arc, time::Duration};

use bytes::Bytes;
use tokio::sync::Barrier;

use self::states::{Call, Status, applied};
use crate::{
    error::StoreError,
    fingerprint::Fingerprint,
    key::{Key, RecordName, Scope},
    store::{
        Claim, Claimed, Completion, Fence, Grant, ReclaimAs, Record, Release, Store, Token,
        Transitioned, admin::Resolution,
    },
};

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

/// A fresh store on which one promise is tested. Each promise is a method.
///
/// A method panics if the store breaks the promise, and its message names the call.
///
/// ```
/// # use tower_idempotency::{MemoryStore, conformance::{Subject, Trial}};
/// # struct Memory;
/// # impl Subject for Memory {
/// #     type Store = MemoryStore;
/// #     async fn store(&self) -> MemoryStore { MemoryStore::new() }
/// # }
/// # #[tokio::main(flavor = "current_thread")] async fn main() {
/// let trial = Trial::begin(Memory).await;
/// trial.one_of_many_simultaneous_claims_is_acquired().await;
/// trial.end().await;
/// # }
/// ```
#[derive(Debug)]
pub struct Trial<S: Subject> {
    subject: S,
    store: S::Store,
    peer: S::Store,
}

impl<S: Subject> Trial<S> {
    /// Makes a fresh store.
    pub async fn begin(subject: S) -> Self {
        let store = subject.store().await;
        let peer = subject.peer(&store).await;
        Self {
            subject,
            store,
            peer,
        }
    }

    /// Removes the store, after its promise was kept.
    pub async fn end(self) {
        drop(self.peer);
        self.subject.finish(self.store).await;
    }

    /// Lets every lease and retention of [`Subject::SHORT`] pass.
    async fn lapse(&self) {
        self.subject.pass(S::SHORT * 2).await;
    }

    /// The error of the store's clock that the suite accepts.
    fn grain() -> Duration {
        if S::TICK.is_some() {
            Duration::ZERO
        } else {
            S::SHORT / 4
        }
    }

    fn close(one: Duration, other: Duration) -> bool {
        one.abs_diff(other) <= Self::grain()
    }

    /// Returns a status whose expired records are removed by a sweep.
    fn swept() -> Status {
        match S::REMOVES_BY_ITSELF {
            true => Status::Unknown,
            false => Status::Completed,
        }
    }

    /// Returns the store or its peer, by turns.
    fn either(&self, turn: usize) -> &S::Store {
        if turn.is_multiple_of(2) {
            &self.store
        } else {
            &self.peer
        }
    }

    /// Claims a free name.
    async fn hold(&self, name: &RecordName, lease: Duration, retention: Duration) -> Held {
        self.hold_through(&self.store, name, lease, retention).await
    }

    async fn hold_through(
        &self,
        store: &S::Store,
        name: &RecordName,
        lease: Duration,
        retention: Duration,
    ) -> Held {
        let claim = Claim::new(fingerprint(1), lease, retention);
        acquired(store, name, claim).await
    }

    /// Claims a name again in a state that allows it.
    async fn hold_again(&self, held: &Held, reclaim_as: ReclaimAs, claim: Claim) -> Held {
        let Some(grant) = held.reclaim(&self.store, reclaim_as, &claim).await else {
            let record = self.peek(&held.name).await;
            panic!("reclaim: {reclaim_as:?} is granted in its state, and was not for {record:?}");
        };
        Held::new(&held.name, claim, grant)
    }

    /// Completes a record as its owner.
    async fn complete(&self, held: &Held, response: Bytes, retention: Duration) {
        let at_least = Duration::ZERO;
        self.complete_for(held, response, retention, at_least).await;
    }

    async fn complete_for(
        &self,
        held: &Held,
        response: Bytes,
        retention: Duration,
        at_least: Duration,
    ) {
        let completion = Completion::new(response, retention, at_least);
        let completed = self.store.complete(&held.name, held.token, &completion);
        applied(good(completed.await), "complete by the owner");
    }

    /// Releases a record as its owner.
    async fn release(&self, held: &Held, release: Release) {
        let released = self.store.release(&held.name, held.token, release).await;
        applied(good(released), "release by the owner");
    }

    /// Marks a record unknown as its owner.
    async fn mark_unknown(&self, held: &Held, retention: Duration) {
        let marked = self.store.mark_unknown(&held.name, held.token, retention);
        applied(good(marked.await), "mark_unknown by the owner");
    }

    /// Resolves an unknown record.
    async fn resolve(&self, held: &Held, resolution: &Resolution, at_least: Duration) {
        let seen = held.grant.fence;
        let resolved = self.store.resolve(&held.name, seen, resolution, at_least);
        applied(good(resolved.await), "resolve with the fence seen");
    }

    /// Forgets a record.
    async fn forget(&self, held: &Held) {
        let forgotten = self.store.forget(&held.name, held.grant.fence).await;
        applied(good(forgotten), "forget with the fence seen");
    }

    /// Returns the record, which must exist.
    async fn record(&self, name: &RecordName) -> Record {
        self.peek(name)
            .await
            .unwrap_or_else(|| panic!("read: a record stays until it is swept"))
    }

    /// Returns the record, or `None` if there is none.
    async fn peek(&self, name: &RecordName) -> Option<Record> {
        good(self.store.read(name).await)
    }

    /// Makes all calls at the same time, and returns their answers in order.
    async fn at_once<C>(&self, calls: impl IntoIterator<Item = C>) -> Vec<C::Output>
    where
        C: Future<Output: Send + 'static> + Send + 'static,
    {
        let calls: Vec<_> = calls.into_iter().collect();
        let start = Arc::new(Barrier::new(calls.len()));
        let tasks: Vec<_> = calls
            .into_iter()
            .map(|call| {
                let start = start.clone();
                tokio::spawn(async move {
                    start.wait().await;
                    call.await
                })
            })
            .collect();
        let mut answers = Vec::with_capacity(tasks.len());
        for task in tasks {
            answers.push(
                task.await
                    .unwrap_or_else(|error| resume_unwind(error.into_panic())),
            );
        }
        answers
    }
}

/// A claim that was granted.
#[derive(Clone, Debug)]
struct Held {
    name: RecordName,
    token: Token,
    grant: Grant,
    claim: Claim,
}

impl Held {
    fn new(name: &RecordName, claim: Claim, grant: Grant) -> Self {
        Self {
            name: name.clone(),
            token: claim.token,
            grant,
            claim,
        }
    }

    /// Makes a call with the token and fence of this claim.
    async fn make(&self, call: Call, store: &impl Store) -> Transitioned {
        call.make(store, &self.name, self.token, self.grant.fence)
            .await
    }

    /// Claims the name again, after this claim.
    async fn reclaim(
        &self,
        store: &impl Store,
        reclaim_as: ReclaimAs,
        claim: &Claim,
    ) -> Option<Grant> {
        let seen = self.grant.fence;
        good(store.reclaim(&self.name, seen, reclaim_as, claim).await)
    }
}

/// One promise of a store, which can be checked on any subject.
pub struct Promise<S: Subject> {
    name: &'static str,
    check: for<'a> fn(&'a Trial<S>) -> Checking<'a>,
}

type Checking<'a> = Pin<Box<dyn Future<Output = ()> + Send + 'a>>;

impl<S: Subject> Promise<S> {
    /// Returns the name of its method of [`Trial`].
    #[must_use]
    pub fn name(&self) -> &'static str {
        self.name
    }

    /// Checks the promise on a fresh store.
    ///
    /// # Panics
    ///
    /// If the store breaks the promise.
    pub async fn check(&self, subject: S) {
        let trial = Trial::begin(subject).await;
        (self.check)(&trial).await;
        trial.end().await;
    }
}

impl<S: Subject> fmt::Debug for Promise<S> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_tuple("Promise").field(&self.name).finish()
    }
}

/// Returns every promise of a store.
#[must_use]
pub fn promises<S: Subject>() -> Vec<Promise<S>> {
    macro_rules! list {
        ($($promise:ident)*) => {
            vec![$(Promise {
                name: stringify!($promise),
                check: |trial| Box::pin(trial.$promise()),
            }),*]
        };
    }
    for_each_promise!([list] [])
}

/// Claims a free name.
async fn acquired(store: &impl Store, name: &RecordName, claim: Claim) -> Held {
    match good(store.claim(name, &claim).await) {
        Claimed::Acquired(grant) => Held::new(name, claim, grant),
        other => panic!("claim: a name without a record is acquired, and was {other:?}"),
    }
}

/// Claims a name that has a record, and returns the record.
async fn occupied(store: &impl Store, name: &RecordName, what: &str) -> Record {
    match good(store.claim(name, &long_claim(3)).await) {
        Claimed::Occupied(record) => record,
        other => panic!("{what}: returns the record of the name, and not {other:?}"),
    }
}

/// Returns a claim with a lease and a retention of an hour.
fn long_claim(seed: u8) -> Claim {
    Claim::new(fingerprint(seed), HOUR, HOUR)
}

fn fingerprint(seed: u8) -> Fingerprint {
    Fingerprint::from_bytes(std::array::from_fn(|index| index as u8 ^ seed))
}

fn name(key: impl fmt::Display) -> RecordName {
    RecordName::new(Scope::from_stored("conformance"), Key::new(key.to_string()))
}

/// Returns a larger fence, which was not granted.
fn beyond(fence: Fence) -> Fence {
    Fence::from(fence.get() + 1)
}

#[track_caller]
fn good<T>(answer: Result<T, StoreError>) -> T {
    answer.unwrap_or_else(|error| panic!("a store that can be reached answers: {error:?}"))
}

fn response() -> Bytes {
    Bytes::from_static(b"the response")
}

/// Longer than any trial.
const HOUR: Duration = Duration::from_secs(3600);
/// How many callers make the same call at the same time.
const CROWD: usize = 32;

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
