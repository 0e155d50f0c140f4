//! The contract of a store: where records live, and what each call promises.
//!
//! Applications give a store to the layer. Operators call it as [`admin`] shows. The
//! authors of stores implement [`Store`], and use [`transition`].

mod types;
mod error;
mod dyn_store;
mod sweep;
pub mod transition;
pub mod admin;
mod memory;
#[cfg(any(feature = "postgres", feature = "sqlite"))]
pub(crate) mod sql;
#[cfg(feature = "postgres")]
mod postgres;
#[cfg(feature = "sqlite")]
mod sqlite;

use std::time::Duration;

use self::admin::{Count, Filter, Page, Resolution};
#[cfg(feature = "postgres")]
pub use self::postgres::{
    PostgresStore, builder::PostgresStoreBuilder, transaction::PostgresTransaction,
};
#[cfg(feature = "sqlite")]
pub use self::sqlite::{SqliteStore, SqliteTransaction};
pub use self::{
    dyn_store::DynStore,
    error::{StoreError, StoreErrorKind},
    memory::MemoryStore,
    sweep::{SweepReport, Sweeper, SweeperHandle},
    types::{
        Claim, Claimed, Completion, Fence, Grant, MarkedBy, Purged, ReclaimAs, Record, RecordState,
        Release, Token, Transition, Transitioned,
    },
};
use crate::RecordName;

/// Where records live.
///
/// A store stores; the layer decides. Each method is **one atomic transition**
/// of one record, whose guard is checked under the record's lock, and nothing
/// else: a store never compares fingerprints, waits for an owner, or repeats a
/// handler. All times are measured on the store's own clock, and what crosses
/// this interface are durations.
///
/// A record's lease has *lapsed*, and a record has *expired*, once the moment
/// lies in the past; at the moment itself it has not. A store counts a duration
/// longer than it can add to its clock as the longest that it can.
///
/// A name is kept as it is, byte for byte: a key of up to 1,024 bytes and a
/// scope of up to 512, neither with a NUL.
///
/// # Errors
///
/// Every method fails with a [`StoreError`] if the store cannot be reached,
/// answers too late, is full, or holds a row that it cannot read. After an
/// error it is not known whether the transition happened. Asking again with the
/// same token is always safe, and gives the answer that got lost.
///
/// # Cancellation
///
/// The layer drops a call's future when it takes longer than the store timeout.
/// The transition may or may not happen then, but nothing else may: no
/// connection in an odd state, no half-written record.
///
/// # Testing an implementation
///
/// The feature `conformance` brings each promise here as a test.
pub trait Store: Send + Sync + 'static {
    /// Claims a name that has no record.
    ///
    /// Exactly one of all simultaneous calls gets [`Claimed::Acquired`]; the
    /// others get the record that is there, which may show a smaller fence while
    /// its claim is being granted. To the claim itself, asked again because its
    /// answer got lost, it shows its token and a fence that is larger than every
    /// fence of this name before it. A crash right after the call leaves a record
    /// in progress whose lease lapses.
    ///
    /// A claim whose answer got lost is made again with its token, at once or later,
    /// and then released. While the first is still being written, the second waits for
    /// it or fails; once the second is answered, the first is never granted. A token
    /// whose claim was released or has ended gets the record that is there.
    fn claim(
        &self,
        name: &RecordName,
        claim: &Claim,
    ) -> impl Future<Output = Result<Claimed, StoreError>> + Send;

    /// Claims a name whose record is still the one seen with the fence `seen`,
    /// and is in the state that `reclaim_as` says; `None` otherwise.
    ///
    /// The new fence is larger than every fence of this name before it. Exactly
    /// one of all simultaneous calls gets a [`Grant`]. A crash right after the
    /// call leaves a record in progress whose lease lapses.
    fn reclaim(
        &self,
        name: &RecordName,
        seen: Fence,
        reclaim_as: ReclaimAs,
        claim: &Claim,
    ) -> impl Future<Output = Result<Option<Grant>, StoreError>> + Send;

    /// Makes one transition of the last claim of a record.
    ///
    /// The methods named like the variants of [`Transition`] make one each, and say
    /// what is promised. [`StoredRecord::apply`](transition::StoredRecord::apply) is
    /// all of them as a pure function.
    fn transition(
        &self,
        name: &RecordName,
        transition: Transition<'_>,
    ) -> impl Future<Output = Result<Transitioned, StoreError>> + Send;

    /// The record as it is now, expired or not.
    fn read(
        &self,
        name: &RecordName,
    ) -> impl Future<Output = Result<Option<Record>, StoreError>> + Send;

    /// Lists records that `filter` chooses, page by page.
    ///
    /// The order is the store's own, and always the same. A page begins after the
    /// record `after`, which need not exist any more, or at the start; it has at
    /// most `limit` records, where zero counts as one. Expired records are listed
    /// too, until they are swept.
    ///
    /// Each call looks at a bounded number of records, so that it ends soon in a
    /// store of any size. **A page may therefore be short, or empty, before the
    /// last one**: continue after [`Page::next`] until there is none. A record that
    /// the filter chooses all the while is then listed once.
    ///
    /// The SQL stores find unknown records through an index. To find records in
    /// progress, a walk reads the whole table, 2,000 records a page.
    fn list(
        &self,
        filter: &Filter,
        after: Option<&RecordName>,
        limit: u32,
    ) -> impl Future<Output = Result<Page, StoreError>> + Send;

    /// Removes a record that is still the one seen with the fence `seen`,
    /// whatever its state; where an answer got lost, read the record. **The next request with this key runs**, and an owner
    /// still at work finds its claim superseded.
    fn forget(
        &self,
        name: &RecordName,
        seen: Fence,
    ) -> impl Future<Output = Result<Transitioned, StoreError>> + Send;

    /// Touches no more than `limit` expired records: removes those that are
    /// completed, released or unknown, and marks those in progress whose lease
    /// has lapsed as unknown, for `unknown_retention` from now. A record with a
    /// live lease is never touched, and does not count. Safe from several
    /// processes at once.
    fn purge_expired(
        &self,
        limit: u32,
        unknown_retention: Duration,
    ) -> impl Future<Output = Result<Purged, StoreError>> + Send;

    /// Extends the lease of the claim in progress with this token to `lease`
    /// from now, even if it has lapsed.
    fn renew(
        &self,
        name: &RecordName,
        token: Token,
        lease: Duration,
    ) -> impl Future<Output = Result<Transitioned, StoreError>> + Send {
        self.transition(name, Transition::Renew { token, lease })
    }

    /// Keeps the response of the claim with this token, if it is the last one
    /// granted and is in progress or unknown; a lapsed lease does not matter.
    ///
    /// Durable when it returns. Completing again with the same token is
    /// [`Transitioned::Applied`] and changes nothing.
    fn complete(
        &self,
        name: &RecordName,
        token: Token,
        completion: &Completion,
    ) -> impl Future<Output = Result<Transitioned, StoreError>> + Send {
        self.transition(name, Transition::Complete { token, completion })
    }

    /// Gives the claim in progress with this token back, so that a retry runs;
    /// the record stays, for as long as its claim has set. Kept as
    /// [`Release::SameRequest`] whatever was asked, if the record counts
    /// [`takeovers`](Record::takeovers): a run before may have had its effect.
    /// Releasing again with the same token is [`Transitioned::Applied`] and
    /// changes nothing.
    fn release(
        &self,
        name: &RecordName,
        token: Token,
        release: Release,
    ) -> impl Future<Output = Result<Transitioned, StoreError>> + Send {
        self.transition(name, Transition::Release { token, release })
    }

    /// Marks a record in progress as unknown, for `retention` from now.
    ///
    /// By its owner at any time, or by anybody who saw its lease lapse. Marking
    /// again is [`Transitioned::Applied`] and changes nothing.
    fn mark_unknown(
        &self,
        name: &RecordName,
        marked_by: MarkedBy,
        retention: Duration,
    ) -> impl Future<Output = Result<Transitioned, StoreError>> + Send {
        let mark = Transition::MarkUnknown {
            marked_by,
            retention,
        };
        self.transition(name, mark)
    }

    /// Ends an unknown record that is still the one seen with the fence `seen`,
    /// by the word of an operator, of a hook, or of a layer whose claim never ran;
    /// expired or not.
    ///
    /// Once it [`Happened`](Resolution::Happened), the last claim's token is
    /// good for nothing: an owner that was alive after all finds itself
    /// superseded, and shows what was resolved.
    ///
    /// There is no token to show: where an answer got lost, read the record.
    fn resolve(
        &self,
        name: &RecordName,
        seen: Fence,
        resolution: &Resolution,
        at_least: Duration,
    ) -> impl Future<Output = Result<Transitioned, StoreError>> + Send {
        let resolve = Transition::Resolve {
            seen,
            resolution,
            at_least,
        };
        self.transition(name, resolve)
    }

    /// Counts the records that `filter` chooses, up to `limit`: a number to alert on.
    ///
    /// Returns [`Count::Exactly`] unless counting stopped before it had seen all
    /// records. It stops at `limit` records, where zero counts as one, and after 32
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
