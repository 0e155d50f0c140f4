//! The contract of a store: where records live, and what each call promises.
//!
//! Applications hand a store to the layer and call it only as operators do:
//!
//! ```
//! use std::time::Duration;
//! use tower_idempotency::{
//!     MemoryStore, RecordedResponse, Store, StoreError,
//!     store::{Filter, Resolution, Settlement},
//! };
//!
//! /// Ends what nobody knows the outcome of, once it has been looked up.
//! async fn resolve_all(store: &impl Store) -> Result<usize, StoreError> {
//!     let (mut resolved, mut after) = (0, None);
//!     loop {
//!         let page = store.list(Filter::Unknown, after.as_ref(), 100).await?;
//!         for (name, record) in page.records {
//!             // … look `record.operation` up where its work would have been done …
//!             let happened = Resolution::Happened {
//!                 response: RecordedResponse::tombstone().encode(),
//!                 at_least: Duration::from_secs(24 * 3600),
//!             };
//!             let settled = store.resolve(&name, record.fence, &happened).await?;
//!             resolved += usize::from(settled == Settlement::Applied);
//!         }
//!         after = page.next;
//!         if after.is_none() {
//!             return Ok(resolved);
//!         }
//!     }
//! }
//!
//! # #[tokio::main(flavor = "current_thread")] async fn main() -> Result<(), StoreError> {
//! assert_eq!(resolve_all(&MemoryStore::new()).await?, 0);
//! # Ok(())
//! # }
//! ```

#[cfg(any(feature = "postgres", feature = "sqlite"))]
mod alone;
#[cfg(any(feature = "postgres", feature = "sqlite"))]
mod batch;
#[cfg(any(feature = "postgres", feature = "sqlite"))]
mod call;
mod error;
mod memory;
#[cfg(feature = "postgres")]
mod postgres;
#[cfg(any(feature = "postgres", feature = "sqlite"))]
mod reads;
mod shared;
#[cfg(any(feature = "postgres", feature = "sqlite"))]
pub(crate) mod sql;
#[cfg(feature = "sqlite")]
mod sqlite;
mod sweep;

use std::{fmt, time::Duration};

use bytes::Bytes;

#[cfg(feature = "postgres")]
pub use self::postgres::{PostgresStore, PostgresStoreBuilder, PostgresTransaction};
#[cfg(feature = "sqlite")]
pub use self::sqlite::{SqliteStore, SqliteTransaction};
pub use self::{
    error::{StoreError, StoreErrorKind},
    memory::MemoryStore,
    shared::SharedStore,
    sweep::{SweepReport, Sweeper, SweeperHandle},
};
use crate::{Fence, Fingerprint, OperationId, RecordName, Token};

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
    /// and is in the state that `succession` says; `None` otherwise.
    ///
    /// The new fence is larger than every fence of this name before it. Exactly
    /// one of all simultaneous calls gets a [`Grant`]. A crash right after the
    /// call leaves a record in progress whose lease lapses.
    fn reclaim(
        &self,
        name: &RecordName,
        seen: Fence,
        succession: Succession,
        claim: &Claim,
    ) -> impl Future<Output = Result<Option<Grant>, StoreError>> + Send;

    /// Extends the lease of the claim in progress with this token to `lease`
    /// from now, even if it has lapsed.
    fn renew(
        &self,
        name: &RecordName,
        token: Token,
        lease: Duration,
    ) -> impl Future<Output = Result<Settlement, StoreError>> + Send;

    /// Keeps the response of the claim with this token, if it is the last one
    /// granted and is in progress or unknown; a lapsed lease does not matter.
    ///
    /// Durable when it returns. Completing again with the same token is
    /// [`Settlement::Applied`] and changes nothing.
    fn complete(
        &self,
        name: &RecordName,
        token: Token,
        completion: &Completion,
    ) -> impl Future<Output = Result<Settlement, StoreError>> + Send;

    /// Gives the claim in progress with this token back, so that a retry runs;
    /// the record stays, for as long as its claim has set. Kept as
    /// [`Release::Bound`] whatever was asked, if the record counts
    /// [`takeovers`](Record::takeovers): a run before may have had its effect.
    /// Releasing again with the same token is [`Settlement::Applied`] and
    /// changes nothing.
    fn release(
        &self,
        name: &RecordName,
        token: Token,
        release: Release,
    ) -> impl Future<Output = Result<Settlement, StoreError>> + Send;

    /// Marks a record in progress as unknown, for `retention` from now.
    ///
    /// By its owner at any time, or by anybody who saw its lease lapse. Marking
    /// again is [`Settlement::Applied`] and changes nothing.
    fn mark_unknown(
        &self,
        name: &RecordName,
        witness: Witness,
        retention: Duration,
    ) -> impl Future<Output = Result<Settlement, StoreError>> + Send;

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
    ) -> impl Future<Output = Result<Settlement, StoreError>> + Send;

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
        filter: Filter,
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
    ) -> impl Future<Output = Result<Settlement, StoreError>> + Send;

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
}

/// What a layer brings to a claim.
#[derive(Clone, Copy, Debug)]
#[non_exhaustive]
pub struct Claim {
    /// Names this claim; new for every request.
    pub token: Token,
    /// The id of the operation, should this claim begin a new one.
    pub operation: OperationId,
    /// The request's fingerprint.
    pub fingerprint: Fingerprint,
    /// How long the claim lives without a heartbeat.
    pub lease: Duration,
    /// How long the record is kept, counted from this claim.
    pub retention: Duration,
    /// Whether the caller reads the response of a completed record in its way.
    /// Otherwise a store may leave a large response empty.
    pub reads_response: bool,
}

impl Claim {
    /// A claim with a new token and a new operation id, which reads the response of
    /// a completed record.
    #[must_use]
    pub fn new(fingerprint: Fingerprint, lease: Duration, retention: Duration) -> Self {
        Self {
            token: Token::random(),
            operation: OperationId::random(),
            fingerprint,
            lease,
            retention,
            reads_response: true,
        }
    }
}

/// The answer to a first claim.
#[derive(Clone, Debug)]
pub enum Claimed {
    /// The name was free and is now the caller's.
    Acquired(Grant),
    /// There is a record already.
    Occupied(Record),
    /// There was a record, but it changed before it could be read: ask again.
    Vanished,
}

/// A claim that was granted.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct Grant {
    /// The operation: the claim's own, or that of the claims before it.
    pub operation: OperationId,
    /// Larger than every fence of this name before it.
    pub fence: Fence,
    /// Which try of the operation this is, from 1.
    pub attempt: u32,
}

impl Grant {
    /// For the authors of stores.
    #[must_use]
    pub fn new(operation: OperationId, fence: Fence, attempt: u32) -> Self {
        Self {
            operation,
            fence,
            attempt,
        }
    }
}

/// In which state, and to what end, a record may be claimed again.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Succession {
    /// In progress and its lease has lapsed: the same operation, its next
    /// attempt, and one more takeover.
    TakeOver,
    /// Unknown and not expired: the same operation, its next attempt, and one
    /// more takeover.
    Rerun,
    /// Unknown and not expired: the same operation and attempt, for a hook that
    /// finds out what became of it.
    Reconcile,
    /// Released and not expired: the same operation, its next attempt.
    Retry,
    /// Released for any request and not expired: a new operation.
    Replace,
    /// Expired, and not in progress with a live lease: a new operation.
    Expired,
}

/// Whether a transition was applied. To overlook a lost claim is a bug.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[must_use]
pub enum Settlement {
    /// The record is as asked.
    Applied,
    /// The guard does not hold: another claim, another state, or no record.
    Superseded,
}

/// What [`Store::complete`] keeps.
#[derive(Clone, Debug)]
#[non_exhaustive]
pub struct Completion {
    /// The encoded response, opaque to the store.
    pub response: Bytes,
    /// How long the record is kept, **counted from its claim**, so that an
    /// unchanged retention leaves an indexed expiry unchanged.
    pub retention: Duration,
    /// How long it is kept at least, counted from now.
    pub at_least: Duration,
}

impl Completion {
    /// What to keep, for how long from the claim, and at least from now.
    #[must_use]
    pub fn new(response: Bytes, retention: Duration, at_least: Duration) -> Self {
        Self {
            response,
            retention,
            at_least,
        }
    }

    /// Whether it keeps no response.
    #[cfg(any(feature = "postgres", feature = "sqlite"))]
    pub(crate) fn is_tombstone(&self) -> bool {
        self.response == crate::RecordedResponse::tombstone().encode()
    }
}

/// For whom a released record is free.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Release {
    /// For the same request: another fingerprint stays a mismatch.
    Bound,
    /// For any request.
    Freed,
}

/// Who says that an outcome is unknown.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Witness {
    /// The owner, with its token.
    Owner(Token),
    /// Whoever saw the record with this fence and a lapsed lease.
    Lapsed(Fence),
}

/// How an operator or a hook ends an unknown record.
#[derive(Clone, Debug)]
pub enum Resolution {
    /// It happened, and this response is replayed from now on.
    Happened {
        /// The encoded response: see
        /// [`RecordedResponse`](crate::RecordedResponse).
        response: Bytes,
        /// How long it is kept at least, counted from now.
        at_least: Duration,
    },
    /// It did not happen: released for the same request.
    DidNotHappen,
}

/// A record as the store saw it at one moment.
#[derive(Clone, Debug)]
#[non_exhaustive]
pub struct Record {
    /// The operation that the record stands for.
    pub operation: OperationId,
    /// The fence of its last claim.
    pub fence: Fence,
    /// Which try of the operation the last claim was.
    pub attempt: u32,
    /// How many claims in a row began although nobody knew the outcome of the
    /// one before: by [`TakeOver`](Succession::TakeOver) or
    /// [`Rerun`](Succession::Rerun). A [`Retry`](Succession::Retry) leaves one of
    /// them, so that the record still tells that an outcome is unknown; only
    /// [`DidNotHappen`](Resolution::DidNotHappen) leaves none.
    pub takeovers: u32,
    /// The fingerprint of the last claim.
    pub fingerprint: Fingerprint,
    /// The token of the last claim.
    pub token: Token,
    /// The time since the last claim.
    pub age: Duration,
    /// The time until the record expires; `None` once it has.
    pub expires_in: Option<Duration>,
    /// What became of the last claim.
    pub state: RecordState,
}

impl Record {
    /// For the authors of stores.
    #[must_use]
    #[expect(clippy::too_many_arguments, reason = "one for each field")]
    pub fn new(
        operation: OperationId,
        fence: Fence,
        attempt: u32,
        takeovers: u32,
        fingerprint: Fingerprint,
        token: Token,
        age: Duration,
        expires_in: Option<Duration>,
        state: RecordState,
    ) -> Self {
        Self {
            operation,
            fence,
            attempt,
            takeovers,
            fingerprint,
            token,
            age,
            expires_in,
            state,
        }
    }
}

/// What became of a record's last claim.
#[derive(Clone)]
#[non_exhaustive]
pub enum RecordState {
    /// Its owner is at work.
    InProgress {
        /// The time until its lease lapses; `None` once it has.
        lease_left: Option<Duration>,
    },
    /// Its response is kept.
    Completed {
        /// The encoded response.
        response: Bytes,
    },
    /// Nobody knows whether it happened.
    Unknown,
    /// It did not happen, and may be tried again.
    Released(Release),
}

impl fmt::Debug for RecordState {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::InProgress { lease_left } => f
                .debug_struct("InProgress")
                .field("lease_left", lease_left)
                .finish(),
            Self::Completed { response } => write!(f, "Completed({} bytes)", response.len()),
            Self::Unknown => f.write_str("Unknown"),
            Self::Released(release) => f.debug_tuple("Released").field(release).finish(),
        }
    }
}

/// Which records an operator wants to see.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum Filter {
    /// Those whose outcome is unknown.
    Unknown,
    /// Those in progress whose claim is older than this.
    InProgressFor(Duration),
}

/// A page of a [list](Store::list).
#[derive(Clone, Debug, Default)]
#[non_exhaustive]
pub struct Page {
    /// The records, in the order of the store. None of them has a response.
    pub records: Vec<(RecordName, Record)>,
    /// Where the next page begins: after this name. `None` on the last page.
    pub next: Option<RecordName>,
}

impl Page {
    /// For the authors of stores.
    #[must_use]
    pub fn new(records: Vec<(RecordName, Record)>, next: Option<RecordName>) -> Self {
        Self { records, next }
    }
}

/// What one call of [`Store::purge_expired`] did.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub struct Purged {
    /// Records removed.
    pub removed: u64,
    /// Of those removed, the ones whose outcome was still unknown.
    pub removed_unknown: u64,
    /// Records in progress that became unknown.
    pub marked_unknown: u64,
}

impl Purged {
    /// For the authors of stores.
    #[must_use]
    pub fn new(removed: u64, removed_unknown: u64, marked_unknown: u64) -> Self {
        Self {
            removed,
            removed_unknown,
            marked_unknown,
        }
    }

    /// How many records were touched: less than the limit means that no more
    /// are due.
    #[must_use]
    pub fn touched(&self) -> u64 {
        self.removed + self.marked_unknown
    }
}
