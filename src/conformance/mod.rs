//! The contract of [`Store`] as tests that the author of any store can run.
//!
//! Each promise is a method of [`Trial`], named by the sentence that it tests;
//! a number in front (`i2_…`) is that of the invariant behind it. A store that
//! keeps all of them can be put below the layer. The stores of this crate run
//! the same suite.
//!
//! A [`Subject`] says how to get a fresh store and how to let time pass.
//! [`conformance_tests!`](crate::conformance_tests) then makes one test of each
//! promise:
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
//! Outside a test harness, [`promises`] lists them:
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
//! Let [`Subject::store`] make an empty database or schema, [`Subject::finish`]
//! drop it, and [`Subject::peer`] connect to it once more, as another process
//! would. The subject is an expression that each test evaluates for itself, and
//! it may be awaited. Give the tests threads, so that calls are simultaneous:
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
//! No test expects anything to happen *within* some time, so a slow machine
//! does not fail them; each lets at most a few times [`Subject::SHORT`] pass.
//!
//! # What is not tested
//!
//! That a completion survives a crash of the server, that a store which is full
//! or cannot be reached fails with the right [`StoreErrorKind`], and that a row
//! which cannot be read is [`StoreErrorKind::Corrupt`]: only the author of the
//! store can bring these about.
//!
//! [`StoreErrorKind`]: crate::StoreErrorKind
//! [`StoreErrorKind::Corrupt`]: crate::StoreErrorKind::Corrupt

mod claiming;
mod dropping;
mod listing;
mod naming;
mod reclaiming;
mod settling;
mod situation;
mod sweeping;
mod timing;
mod together;
mod unknown;

use std::{fmt, future::ready, panic::resume_unwind, pin::Pin, sync::Arc, time::Duration};

use bytes::Bytes;
use tokio::sync::Barrier;

use crate::{
    Fence, Fingerprint, Key, RecordName, Scope, Store, StoreError, Token,
    store::{Claim, Claimed, Grant, ReclaimAs, Record},
};

/// How the suite gets a store, and how time passes for it.
///
/// A store that is not `Clone` can be wrapped in a
/// [`DynStore`](crate::DynStore).
pub trait Subject: Send + Sync + 'static {
    /// The store under test.
    type Store: Store + Clone;

    /// The lease or retention that is made to pass: at least four times what
    /// the store's clock rounds off. Defaults to 100 ms.
    const SHORT: Duration = Duration::from_millis(100);

    /// The smallest step of the store's clock, **if it moves by exactly what
    /// [`pass`](Self::pass) is given and stands still otherwise**; the suite
    /// then tests the very moments at which a lease lapses and a record
    /// expires, which it leaves out otherwise. Defaults to `None`.
    const TICK: Option<Duration> = None;

    /// A fresh store without records. Called once for each trial.
    fn store(&self) -> impl Future<Output = Self::Store> + Send;

    /// Another way to the same records, best with connections of its own.
    /// Called once for each trial. Defaults to a clone.
    fn peer(&self, store: &Self::Store) -> impl Future<Output = Self::Store> + Send {
        ready(store.clone())
    }

    /// Lets at least this much time pass on the store's clock. Defaults to
    /// Tokio's `sleep`.
    fn pass(&self, time: Duration) -> impl Future<Output = ()> + Send {
        tokio::time::sleep(time)
    }

    /// Removes what `store` made; not called after a failure, so that the
    /// records can be looked at. Defaults to nothing.
    fn finish(&self, store: Self::Store) -> impl Future<Output = ()> + Send {
        drop(store);
        ready(())
    }
}

/// One fresh store, on which a promise is tested: each promise is a method.
///
/// A method panics if the store breaks its promise, and says which. A trial is
/// good for one promise.
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
/// trial.one_of_all_simultaneous_claims_is_acquired().await;
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
    /// A trial of a fresh store.
    pub async fn begin(subject: S) -> Self {
        let store = subject.store().await;
        let peer = subject.peer(&store).await;
        Self {
            subject,
            store,
            peer,
        }
    }

    /// Ends the trial of a store that kept its promise.
    pub async fn end(self) {
        drop(self.peer);
        self.subject.finish(self.store).await;
    }

    /// Lets every lease and retention of [`Subject::SHORT`] pass.
    async fn lapse(&self) {
        self.subject.pass(S::SHORT * 2).await;
    }

    /// What the store's clock may be wrong by.
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

    /// The store and its peer, by turns.
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
        match good(store.claim(name, &claim).await) {
            Claimed::Acquired(grant) => Held {
                name: name.clone(),
                token: claim.token,
                grant,
                claim,
            },
            other => panic!("claim: a name without a record is acquired, and was {other:?}"),
        }
    }

    /// Claims a name again in a state that allows it.
    async fn hold_again(&self, held: &Held, reclaim_as: ReclaimAs, claim: Claim) -> Held {
        let reclaimed = self
            .store
            .reclaim(&held.name, held.grant.fence, reclaim_as, &claim)
            .await;
        let Some(grant) = good(reclaimed) else {
            let record = self.peek(&held.name).await;
            panic!("reclaim: {reclaim_as:?} is granted in its state, and was not for {record:?}");
        };
        Held {
            name: held.name.clone(),
            token: claim.token,
            grant,
            claim,
        }
    }

    /// The record, which must be there.
    async fn record(&self, name: &RecordName) -> Record {
        self.peek(name)
            .await
            .unwrap_or_else(|| panic!("read: a record stays until it is swept or forgotten"))
    }

    /// The record, if there is one.
    async fn peek(&self, name: &RecordName) -> Option<Record> {
        good(self.store.read(name).await)
    }

    /// The answers to calls that are made all at once, in their order.
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

/// One promise of a store, to be checked on any subject.
pub struct Promise<S: Subject> {
    name: &'static str,
    check: for<'a> fn(&'a Trial<S>) -> Checking<'a>,
}

type Checking<'a> = Pin<Box<dyn Future<Output = ()> + Send + 'a>>;

impl<S: Subject> Promise<S> {
    /// The sentence, spelled as the method of [`Trial`].
    #[must_use]
    pub fn name(&self) -> &'static str {
        self.name
    }

    /// Checks it on a fresh store.
    ///
    /// # Panics
    ///
    /// If the store breaks it.
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

/// Every promise of a store.
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
    crate::for_each_promise!([list] [])
}

/// Makes one test of each promise of a store, named by its sentence.
///
/// Takes the [`Subject`](crate::conformance::Subject), an expression that each
/// test evaluates and that may be awaited; before it, if one likes, the
/// attributes of the tests, which default to `#[tokio::test]`. A second subject
/// in the same file goes into a module of its own.
///
/// ```
/// # use tower_idempotency::{MemoryStore, conformance::Subject, conformance_tests};
/// # struct Memory;
/// # impl Subject for Memory {
/// #     type Store = MemoryStore;
/// #     async fn store(&self) -> MemoryStore { MemoryStore::new() }
/// # }
/// conformance_tests! {
///     #[tokio::test(flavor = "multi_thread", worker_threads = 4)]
///     Memory
/// }
/// ```
#[macro_export]
macro_rules! conformance_tests {
    (@each $attributes:tt $subject:tt $($promise:ident)*) => {
        $($crate::conformance_tests! { @test $attributes $subject $promise })*
    };
    (@test [$($attribute:tt)*] [$subject:expr] $promise:ident) => {
        $($attribute)*
        async fn $promise() {
            let trial = $crate::conformance::Trial::begin($subject).await;
            trial.$promise().await;
            trial.end().await;
        }
    };
    ($(#[$attribute:meta])+ $subject:expr) => {
        $crate::for_each_promise! {
            [$crate::conformance_tests] [@each [$(#[$attribute])+] [$subject]]
        }
    };
    ($subject:expr) => {
        $crate::conformance_tests! { #[tokio::test] $subject }
    };
}

/// Hands the name of every promise to a macro.
#[doc(hidden)]
#[macro_export]
macro_rules! for_each_promise {
    ([$($callback:tt)*] [$($before:tt)*]) => {
        $($callback)* ! {
            $($before)*
            a_name_without_a_record_is_acquired
            a_claim_of_an_occupied_name_gets_the_record_that_is_there
            a_record_reads_as_what_was_done_to_it_expired_or_not
            without_a_record_every_call_is_superseded
            one_of_all_simultaneous_claims_is_acquired
            i1_claiming_again_with_the_same_token_grants_nothing_and_shows_the_token
            i1_reclaiming_again_with_the_same_token_grants_nothing_and_shows_the_token
            i2_fences_strictly_increase_over_release_expiry_sweep_and_forget
            i2_fences_strictly_increase_while_claims_and_removals_race
            a_claim_that_nobody_continues_lapses_and_stays_in_progress
            forget_removes_a_record_in_any_state_with_its_fence_and_frees_the_name
            ids_and_tokens_come_back_whole
            i3_take_over_is_granted_for_a_lapsed_lease_only
            rerun_is_granted_for_a_live_unknown_record_only
            reconcile_is_granted_for_a_live_unknown_record_only
            retry_is_granted_for_a_live_released_record_only
            replace_is_granted_for_a_live_freed_record_only
            expired_is_granted_for_an_expired_record_without_a_live_lease_only
            one_of_all_simultaneous_take_overs_is_granted
            one_of_all_simultaneous_reruns_is_granted
            one_of_all_simultaneous_reconciliations_is_granted
            one_of_all_simultaneous_retries_is_granted
            one_of_all_simultaneous_replacements_is_granted
            one_of_all_simultaneous_claims_of_an_expired_record_is_granted
            take_overs_in_a_row_are_counted_and_a_retry_remembers_one
            i6_a_release_after_a_take_over_is_for_the_same_request_only
            a_record_claimed_again_lives_by_its_new_claim
            a_superseded_owner_changes_nothing
            of_a_late_completion_and_take_overs_one_wins
            of_a_late_heartbeat_and_take_overs_one_wins
            each_of_many_simultaneous_calls_gets_its_own_answer
            each_of_many_simultaneous_claims_gets_its_own_grant_or_record
            renew_is_for_the_claim_in_progress_with_this_token_only
            complete_is_for_the_last_claim_in_progress_or_unknown_only
            release_for_the_same_request_is_for_the_claim_in_progress_with_this_token_only
            release_for_any_request_is_for_the_claim_in_progress_with_this_token_only
            completing_again_is_applied_and_changes_nothing
            releasing_again_is_applied_and_changes_nothing
            marking_again_is_applied_and_changes_nothing
            i4_a_completed_record_never_changes_before_it_expires
            a_response_comes_back_byte_for_byte
            simultaneous_callers_get_their_own_responses_whatever_their_sizes
            i11_a_late_completion_is_kept_whoever_marks_the_record_unknown
            simultaneous_completions_keep_one_response
            a_released_record_keeps_its_claim_and_its_retention
            an_owner_may_mark_its_claim_in_progress_unknown_at_any_time
            i3_anybody_may_mark_a_claim_unknown_once_its_lease_has_lapsed
            an_operators_word_that_it_happened_ends_an_unknown_record_only
            an_operators_word_that_it_did_not_happen_ends_an_unknown_record_only
            what_an_operator_resolved_is_live
            a_resolved_record_is_kept_at_least_so_long_from_now
            resolve_does_not_shorten_the_retention
            i11_an_unknown_record_is_kept_for_its_retention_from_the_marking
            an_owner_that_completes_an_unknown_record_gives_it_the_retention_of_a_completion
            renew_extends_the_lease_from_now_even_if_it_has_lapsed
            the_retention_of_a_completion_counts_from_the_claim
            at_least_counts_from_the_completion
            at_least_does_not_shorten_the_retention
            a_retention_of_a_century_is_kept
            nothing_is_kept_for_no_time
            i3_a_lease_is_live_at_its_very_end_and_lapsed_right_after
            i4_a_record_is_live_at_its_very_end_and_expired_right_after
            a_released_record_may_be_retried_at_its_very_end
            a_claim_as_old_as_the_filter_says_is_not_older
            a_sweep_removes_what_has_expired_and_touches_nothing_else
            i3_a_live_lease_is_never_swept
            i11_a_lapsed_record_is_swept_as_unknown_and_counted_when_it_goes
            a_sweep_keeps_to_its_limit_and_less_means_that_no_more_is_due
            simultaneous_sweeps_count_each_record_once
            i1_a_sweep_never_removes_a_record_that_was_claimed_again
            a_list_has_the_records_that_its_filter_chooses_and_no_others
            the_pages_of_a_list_have_each_record_once_in_one_order
            a_filter_with_a_scope_lists_its_records_only
            a_count_is_exact_below_its_limit
            a_page_begins_after_a_record_that_is_gone
            a_page_has_no_more_records_than_its_limit
            i9_nothing_in_one_scope_touches_another
            i9_names_that_look_alike_name_different_records
            odd_names_are_kept_as_they_are
            i15_a_dropped_claim_happens_or_does_not
            i15_a_dropped_reclaim_happens_or_does_not
            i15_a_dropped_renew_happens_or_does_not
            i15_a_dropped_complete_happens_or_does_not
            i15_a_dropped_release_happens_or_does_not
            i15_a_dropped_mark_unknown_happens_or_does_not
            i15_a_dropped_resolve_happens_or_does_not
            i15_a_dropped_forget_happens_or_does_not
            i15_a_dropped_sweep_happens_or_does_not
            i15_a_dropped_read_or_list_changes_nothing
        }
    };
}

fn fingerprint(seed: u8) -> Fingerprint {
    Fingerprint::from_bytes(std::array::from_fn(|index| index as u8 ^ seed))
}

fn name(key: impl fmt::Display) -> RecordName {
    RecordName::new(Scope::from_stored("conformance"), Key::new(key.to_string()))
}

/// The fence after, which nobody was granted.
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
/// How many callers do the same thing at the same time.
const CROWD: usize = 32;

#[cfg(test)]
mod tests {
    use super::*;

    #[derive(Debug)]
    struct Memory;

    impl Subject for Memory {
        type Store = crate::MemoryStore;

        async fn store(&self) -> crate::MemoryStore {
            crate::MemoryStore::new()
        }
    }

    #[test]
    fn every_promise_is_in_the_list() {
        let written: Vec<_> = [
            include_str!("claiming.rs"),
            include_str!("reclaiming.rs"),
            include_str!("together.rs"),
            include_str!("settling.rs"),
            include_str!("unknown.rs"),
            include_str!("timing.rs"),
            include_str!("sweeping.rs"),
            include_str!("listing.rs"),
            include_str!("naming.rs"),
            include_str!("dropping.rs"),
        ]
        .iter()
        .flat_map(|file| file.split("pub async fn ").skip(1))
        .filter_map(|item| item.split('(').next())
        .collect();
        let listed: Vec<_> = promises::<Memory>().iter().map(Promise::name).collect();
        assert_eq!(listed, written);
    }
}
