//! The contract of a store: where records live, and what each call promises.
//!
//! Applications give a store to the layer. Operators call it as [`admin`] shows. The
//! authors of stores implement [`Store`], and use [`transition`].

mod types;
mod dyn_store;
mod sweep;
mod usage;
pub(crate) mod waiters;
mod sync;
pub mod transition;
pub mod admin;
mod memory;
pub mod cas;
#[cfg(feature = "cache")]
mod cached;
#[cfg(any(feature = "postgres", feature = "sqlite"))]
pub(crate) mod sql;
#[cfg(feature = "postgres")]
pub(crate) mod postgres;
#[cfg(feature = "redis")]
mod redis;
#[cfg(feature = "sqlite")]
pub(crate) mod sqlite;

use std::{
    future::{pending, ready},
    time::{Duration, SystemTime},
};

use self::admin::{Count, Filter, Page, Resolution};
#[cfg(feature = "cache")]
pub use self::cached::CachedStore;
#[cfg(feature = "postgres")]
pub use self::postgres::{PostgresStore, builder::PostgresStoreBuilder, engine::PostgresEngine};
#[cfg(feature = "redis")]
pub use self::redis::{RedisStore, builder::RedisStoreBuilder};
#[cfg(feature = "sqlite")]
pub use self::sqlite::SqliteStore;
pub(crate) use self::usage::SHORTEST_PERIOD;
pub use self::{
    dyn_store::DynStore,
    memory::MemoryStore,
    sweep::{Sweep, SweepReport, Sweeper, SweeperHandle},
    types::{
        Claim, Claimed, Completion, Fence, FencedTransition, Grant, OwnerTransition, Purged,
        ReclaimAs, Record, RecordState, Release, Token, Transition, Transitioned,
    },
    usage::{Usage, UsageDelta, UsageTable},
};
pub use crate::{
    error::{StoreError, StoreErrorKind},
    fingerprint::Fingerprint,
    key::RecordName,
};

/// Where records live.
///
/// A store stores; the layer decides. Each method is **one atomic transition** of one
/// record, whose guard is checked under the record's lock. A store does nothing else: it
/// never compares fingerprints, waits for an owner, or repeats a handler. All times are
/// measured on the store's own clock, and only durations cross this interface.
///
/// A record's lease has *lapsed*, and a record has *expired*, once the moment lies in the
/// past. At the moment itself it has not. If a duration is longer than the store can add
/// to its clock, the longest possible one counts.
///
/// A name is kept unchanged, byte for byte: a key of up to 1,024 bytes and a scope of up
/// to 512, neither with a NUL.
///
/// # Errors
///
/// Every method fails with a [`StoreError`] if the store cannot be reached, answers too
/// late, is full, or holds a record that it cannot read. After an error it is not known
/// whether the transition happened. Calling again with the same token is always safe, and
/// returns the lost answer.
///
/// # Cancellation
///
/// The layer drops a call's future when it takes longer than the store timeout. The
/// transition may or may not happen then. Nothing else may happen: no connection is left
/// in an odd state, and no record is half written.
///
/// # Testing an implementation
///
/// The feature `conformance` brings each promise here as a test.
pub trait Store: Send + Sync + 'static {
    /// Claims a name that has no record.
    ///
    /// Exactly one of all simultaneous calls returns [`Claimed::Acquired`]. The others
    /// return the existing record, which may show a smaller fence while its claim is
    /// being granted. A crash right after the call leaves a record in progress whose
    /// lease lapses.
    ///
    /// The fence comes from the store's clock, see [`next_fence`](transition::next_fence).
    /// It could be smaller than one of a record that was swept in two cases only: the
    /// clock was set back by more than that record's retention, or this call was delayed
    /// in the store for longer than that.
    ///
    /// A claim whose answer was lost is made again with its token, at once or later. Then
    /// it returns its own record, with a new fence that is larger than every earlier fence
    /// of this name. While the first call is still being written, the second waits for it or
    /// fails. Once the second is answered, the first is never granted. If the claim was
    /// released or has ended, the call returns the existing record.
    fn claim(
        &self,
        name: &RecordName,
        claim: &Claim,
    ) -> impl Future<Output = Result<Claimed, StoreError>> + Send;

    /// Claims a name whose record still has the fence `seen` and is in the state that
    /// `reclaim_as` names. Returns `None` otherwise.
    ///
    /// A reclaim whose answer was lost may be made again with its token. While its claim
    /// is in progress, it is granted again. The new fence is larger than every earlier fence of this name. Exactly one of all
    /// simultaneous calls returns a [`Grant`]. A crash right after the call leaves a
    /// record in progress whose lease lapses.
    fn reclaim(
        &self,
        name: &RecordName,
        seen: Fence,
        reclaim_as: ReclaimAs,
        claim: &Claim,
    ) -> impl Future<Output = Result<Option<Grant>, StoreError>> + Send;

    /// Makes one transition of the last claim of a record.
    ///
    /// The methods that are named like the variants of [`Transition`] make one each, and
    /// state its promise. [`StoredRecord::apply`](transition::StoredRecord::apply) is all
    /// of them as a pure function.
    fn transition(
        &self,
        name: &RecordName,
        transition: Transition,
    ) -> impl Future<Output = Result<Transitioned, StoreError>> + Send;

    /// Returns the current record, expired or not, or `None` if there is none.
    fn read(
        &self,
        name: &RecordName,
    ) -> impl Future<Output = Result<Option<Record>, StoreError>> + Send;

    /// Returns a page of the records that `filter` chooses.
    ///
    /// The order is the store's own, and always the same. A page begins after the record
    /// `after`, which need not exist any more, or at the start. It has at most `limit`
    /// records, where zero counts as one. Expired records are listed until they are swept.
    ///
    /// Each call looks at a bounded number of records, so that it ends soon in a store of
    /// any size. **A page may therefore be short, or empty, before the last one**:
    /// continue after [`Page::next`] until there is none. A record that the filter chooses
    /// throughout is listed once.
    ///
    /// The SQL stores find unknown records through an index. Records in progress have
    /// none: listing them reads the whole table, 2,000 records a page.
    fn list(
        &self,
        filter: &Filter,
        after: Option<&RecordName>,
        limit: u32,
    ) -> impl Future<Output = Result<Page, StoreError>> + Send;

    /// Sweeps up to `limit` expired records.
    ///
    /// Removes those that are completed, released or unknown. Marks those in progress
    /// whose lease has lapsed as unknown, for `unknown_retention` from now. A record with
    /// a live lease is never changed, and does not count. Several processes may sweep at
    /// the same time.
    fn purge_expired(
        &self,
        limit: u32,
        unknown_retention: Duration,
    ) -> impl Future<Output = Result<Purged, StoreError>> + Send;

    /// Returns soon after the claim with the fence `seen` has ended, in whatever process.
    ///
    /// Wakes the requests that wait for another request with their key, which read the
    /// record then. They also read it after pauses of 50 ms to one second, so a store may
    /// return too early, late or never. It returns at once if the claim has ended before the
    /// call. It is called for each waiter, and dropped with it.
    ///
    /// The default never returns. After an error, the waiter only has its pauses.
    fn wait(
        &self,
        name: &RecordName,
        seen: Fence,
    ) -> impl Future<Output = Result<(), StoreError>> + Send {
        let _ = (name, seen);
        pending()
    }

    /// Returns the time of the store's clock, since 1970.
    ///
    /// Schedules ask for it, so that a process whose clock is wrong does not run a job too
    /// early. A store with several clocks returns one of them.
    ///
    /// The default is the clock of this process. A store whose records live by the clock of
    /// a server returns that one.
    fn now(&self) -> impl Future<Output = Result<Duration, StoreError>> + Send {
        let now = SystemTime::UNIX_EPOCH.elapsed();
        async move { now.map_err(|_| StoreError::unavailable("the clock shows a time before 1970")) }
    }

    /// Adds up what scopes keep, and returns the usage of all the scopes that `deltas` name.
    ///
    /// [Quotas](crate::Quota) need it. The layer counts what its process adds, and calls
    /// this once a second for the scopes that had requests, never for a single request. A
    /// scope keeps one sum for each [period](UsageDelta::period_end) in which its records
    /// expire. So usage decays without a scan, also if a process or its sweeper dies. A
    /// period that has ended is not returned, and [`purge_expired`](Self::purge_expired)
    /// removes it. Several deltas may name one scope and period. The answer is in the order
    /// of the periods for each scope.
    ///
    /// Simultaneous calls are all added. Adding need not be durable at once. The layer does
    /// not repeat a call that may have been made, so that nothing is added twice.
    ///
    /// The default returns `None`: the store adds nothing up, and each process counts alone.
    fn add_usage(
        &self,
        deltas: &[UsageDelta],
    ) -> impl Future<Output = Result<Option<Vec<Usage>>, StoreError>> + Send {
        let _ = deltas;
        ready(Ok(None))
    }

    /// Extends the lease of the claim in progress with this token to `lease` from now,
    /// even if it has lapsed.
    fn renew(
        &self,
        name: &RecordName,
        token: Token,
        lease: Duration,
    ) -> impl Future<Output = Result<Transitioned, StoreError>> + Send {
        self.transition(
            name,
            Transition::Owner(token, OwnerTransition::Renew { lease }),
        )
    }

    /// Records the response of the claim with this token, if that is the last claim and is
    /// in progress or unknown. A lapsed lease does not matter.
    ///
    /// The response is durable when this returns. Completing again with the same token
    /// returns [`Transitioned::Applied`] and changes nothing.
    fn complete(
        &self,
        name: &RecordName,
        token: Token,
        completion: &Completion,
    ) -> impl Future<Output = Result<Transitioned, StoreError>> + Send {
        let complete = OwnerTransition::Complete(completion.clone());
        self.transition(name, Transition::Owner(token, complete))
    }

    /// Releases the claim in progress with this token, so that a retry runs. The record
    /// stays for the retention of its claim.
    ///
    /// If the record counts [`takeovers`](Record::takeovers), the release is always
    /// [`Release::SameRequest`]: an earlier run may have had its effect. Releasing again
    /// with the same token returns [`Transitioned::Applied`] and changes nothing.
    fn release(
        &self,
        name: &RecordName,
        token: Token,
        release: Release,
    ) -> impl Future<Output = Result<Transitioned, StoreError>> + Send {
        self.transition(
            name,
            Transition::Owner(token, OwnerTransition::Release(release)),
        )
    }

    /// Marks the claim in progress with this token as unknown, for `retention` from now.
    ///
    /// Marking again returns [`Transitioned::Applied`] and changes nothing.
    fn mark_unknown(
        &self,
        name: &RecordName,
        token: Token,
        retention: Duration,
    ) -> impl Future<Output = Result<Transitioned, StoreError>> + Send {
        let mark = OwnerTransition::MarkUnknown { retention };
        self.transition(name, Transition::Owner(token, mark))
    }

    /// Marks a record in progress that still has the fence `seen` as unknown, for
    /// `retention` from now, if its lease has lapsed.
    ///
    /// Any caller may do so. Marking again returns [`Transitioned::Applied`] and changes
    /// nothing.
    fn mark_lapsed(
        &self,
        name: &RecordName,
        seen: Fence,
        retention: Duration,
    ) -> impl Future<Output = Result<Transitioned, StoreError>> + Send {
        let mark = FencedTransition::MarkLapsed { retention };
        self.transition(name, Transition::Fenced(seen, mark))
    }

    /// Resolves a record that still has the fence `seen` and is unknown, or in progress
    /// with a lapsed lease, expired or not. Keeps it for `at_least` from now.
    ///
    /// Operators call it, and so does a layer for its hook or for a claim that never ran.
    ///
    /// After [`Happened`](Resolution::Happened) the last claim's token is invalid. If its
    /// owner was alive after all, it is superseded, and its client receives the resolved
    /// response.
    ///
    /// If the answer was lost, read the record: the call has no token by which it could be
    /// made again.
    fn resolve(
        &self,
        name: &RecordName,
        seen: Fence,
        resolution: &Resolution,
        at_least: Duration,
    ) -> impl Future<Output = Result<Transitioned, StoreError>> + Send {
        let resolution = Box::new(resolution.clone());
        let resolve = FencedTransition::Resolve {
            resolution,
            at_least,
        };
        self.transition(name, Transition::Fenced(seen, resolve))
    }

    /// Forgets a record that still has the fence `seen`, whatever its state.
    ///
    /// **The next request with this key runs**, as a new operation. An owner still at work
    /// finds its claim superseded. The record is released for any request, without its
    /// response, and is kept for one more day, so that the next fence is larger. Forgetting
    /// it again returns [`Transitioned::Applied`] and changes nothing.
    fn forget(
        &self,
        name: &RecordName,
        seen: Fence,
    ) -> impl Future<Output = Result<Transitioned, StoreError>> + Send {
        self.transition(name, Transition::Fenced(seen, FencedTransition::Forget))
    }

    /// Counts the records that `filter` chooses, up to `limit`: a number to alert on.
    ///
    /// Returns [`Count::Exactly`] unless counting stopped before it had seen all
    /// records that can be read. It stops at `limit` records, where zero counts as one, and after 32
    /// pages of [`list`](Self::list) at the latest. So it ends soon in a store of any
    /// size. In the SQL stores, 32 pages are 64,000 records, of which a filter for
    /// records in progress may choose few.
    fn count(
        &self,
        filter: &Filter,
        limit: u32,
    ) -> impl Future<Output = Result<Count, StoreError>> + Send {
        async move {
            let (limit, mut counted, mut after) = (limit.max(1), 0, None);
            for _ in 0..MOST_PAGES {
                let page = self.list(filter, after.as_ref(), limit - counted).await?;
                counted += page.records.len() as u32;
                after = page.next;
                if after.is_none() {
                    return Ok(Count::Exactly(counted.into()));
                }
                if counted >= limit {
                    break;
                }
            }
            Ok(Count::AtLeast(counted.into()))
        }
    }
}

/// How many pages of a list are counted.
const MOST_PAGES: usize = 32;
