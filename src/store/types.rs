//! What crosses the interface between the layer and a store.

use std::{fmt, time::Duration};

use bytes::Bytes;
use rand::RngExt as _;

use super::{StoreError, admin::Resolution, transition::Swept};
use crate::{fingerprint::Fingerprint, key::OperationId};

/// Names one claim: 128 random bits, made by the layer before it asks the
/// store, so that a claim whose answer got lost can be recognised.
///
/// A call with the token may renew, complete or release the claim. `Debug` does not show
/// it.
#[derive(Clone, Copy, PartialEq, Eq, Hash)]
pub struct Token([u8; 16]);

impl Token {
    /// A new random token.
    #[must_use]
    pub fn random() -> Self {
        Self(rand::rng().random::<u128>().to_ne_bytes())
    }

    /// The token that a store kept.
    #[must_use]
    pub const fn from_bytes(bytes: [u8; 16]) -> Self {
        Self(bytes)
    }

    /// The bytes for a store to keep.
    #[must_use]
    pub fn as_bytes(&self) -> &[u8; 16] {
        &self.0
    }
}

impl fmt::Debug for Token {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Token(..)")
    }
}

/// A number that only grows: every claim of a key gets a larger one.
///
/// Downstream systems that keep the largest fence they have seen can turn away
/// an owner whose lease was lost.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct Fence(u64);

impl Fence {
    /// Smaller than that of every claim.
    pub(crate) const ZERO: Self = Self(0);

    /// The number.
    #[must_use]
    pub fn get(self) -> u64 {
        self.0
    }
}

impl From<u64> for Fence {
    fn from(number: u64) -> Self {
        Self(number)
    }
}

impl fmt::Display for Fence {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.fmt(f)
    }
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

/// A claim that was granted. Stores make one with a literal.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Grant {
    /// The operation: the claim's own, or that of the claims before it.
    pub operation: OperationId,
    /// Larger than every fence of this name before it.
    pub fence: Fence,
    /// Which try of the operation this is, from 1.
    pub attempt: u32,
}

/// The state in which a record may be claimed again, and the resulting operation.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ReclaimAs {
    /// In progress and its lease has lapsed: the same operation, its next
    /// attempt, and one more takeover.
    Takeover,
    /// Unknown and not expired: the same operation, its next attempt, and one
    /// more takeover.
    Rerun,
    /// Unknown and not expired: the same operation and attempt, for a hook that finds out
    /// whether it happened.
    Reconcile,
    /// Released and not expired: the same operation, its next attempt.
    Retry,
    /// Released for any request and not expired: a new operation.
    Replace,
    /// Expired, and not in progress with a live lease: a new operation.
    Expired,
}

/// A change of the record of the last claim, with its guard.
///
/// The methods of [`Store`](super::Store) that are named like the variants say what each
/// transition promises. Exhaustive on purpose: a store that does not know one of them must
/// not compile.
#[derive(Clone, Debug)]
pub enum Transition {
    /// By the owner of the claim with this token.
    Owner(Token, OwnerTransition),
    /// By a caller that saw the record with this fence.
    Fenced(Fence, FencedTransition),
}

/// A transition that a claim's owner makes.
#[derive(Clone, Debug)]
pub enum OwnerTransition {
    /// See [`Store::renew`](super::Store::renew).
    Renew {
        /// How long the lease lasts from now.
        lease: Duration,
    },
    /// See [`Store::complete`](super::Store::complete).
    Complete(Completion),
    /// See [`Store::release`](super::Store::release).
    Release(Release),
    /// See [`Store::mark_unknown`](super::Store::mark_unknown).
    MarkUnknown {
        /// How long the record is kept from now.
        retention: Duration,
    },
}

/// A transition that others than the claim's owner make.
#[derive(Clone, Debug)]
pub enum FencedTransition {
    /// See [`Store::mark_lapsed`](super::Store::mark_lapsed).
    MarkLapsed {
        /// How long the record is kept from now.
        retention: Duration,
    },
    /// See [`Store::resolve`](super::Store::resolve).
    Resolve {
        /// The outcome. Boxed, so that other transitions are small.
        resolution: Box<Resolution>,
        /// How long the record is kept from now at least.
        at_least: Duration,
    },
    /// See [`Store::forget`](super::Store::forget).
    Forget,
}

#[cfg(any(feature = "postgres", feature = "sqlite"))]
impl OwnerTransition {
    /// Whether another one follows if this one is not made: the next heartbeat.
    pub(crate) fn is_renewal(&self) -> bool {
        matches!(self, Self::Renew { .. })
    }

    /// Returns the length of the response that it carries.
    pub(crate) fn response_len(&self) -> usize {
        match self {
            Self::Complete(completion) => completion.response.len(),
            _ => 0,
        }
    }
}

#[cfg(any(feature = "postgres", feature = "sqlite"))]
impl FencedTransition {
    /// Returns the length of the body that it carries.
    pub(crate) fn response_len(&self) -> usize {
        match self {
            Self::Resolve { resolution, .. } => match &**resolution {
                Resolution::Happened(response) => response.body_len(),
                Resolution::DidNotHappen => 0,
            },
            Self::MarkLapsed { .. } | Self::Forget => 0,
        }
    }
}

/// Whether a transition was applied. To overlook a lost claim is a bug.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[must_use]
pub enum Transitioned {
    /// The record is in the state that the transition asked for.
    Applied,
    /// The guard does not hold: another claim, another state, or no record.
    Superseded,
}

/// What [`Store::complete`](super::Store::complete) keeps.
#[derive(Clone)]
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
        crate::response::codec::is_tombstone(&self.response)
    }
}

impl fmt::Debug for Completion {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Completion")
            .field("response", &format_args!("{} bytes", self.response.len()))
            .field("retention", &self.retention)
            .field("at_least", &self.at_least)
            .finish()
    }
}

/// For whom a released record is free.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Release {
    /// For the same request: another fingerprint stays a mismatch.
    SameRequest,
    /// For any request.
    AnyRequest,
}

/// A record as the store saw it at one moment. Stores make one with a literal, or
/// from a [`StoredRecord`](super::transition::StoredRecord).
#[derive(Clone, Debug)]
pub struct Record {
    /// The operation that the record stands for.
    pub operation: OperationId,
    /// The fence of its last claim.
    pub fence: Fence,
    /// Which try of the operation the last claim was.
    pub attempt: u32,
    /// How many claims in a row began while the outcome of the one before was unknown: by
    /// [`Takeover`](ReclaimAs::Takeover) or [`Rerun`](ReclaimAs::Rerun). A [`Retry`](ReclaimAs::Retry) leaves one of
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
    /// The state of the last claim.
    pub state: RecordState,
}

/// The state of a record's last claim.
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
    /// It may or may not have happened.
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

/// What one call of [`Store::purge_expired`](super::Store::purge_expired) did. Stores
/// make one with a literal, or [add](Self::add) to an empty one.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Purged {
    /// Records removed.
    pub removed: u64,
    /// Of those removed, the ones whose outcome was still unknown.
    pub removed_unknown: u64,
    /// Records in progress that became unknown.
    pub marked_unknown: u64,
}

impl Purged {
    /// Counts one more record.
    pub fn add(&mut self, swept: Swept) {
        match swept {
            Swept::Kept => {}
            Swept::MarkedUnknown => self.marked_unknown += 1,
            Swept::Remove { unknown } => {
                self.removed += 1;
                self.removed_unknown += u64::from(unknown);
            }
        }
    }

    /// Returns the error of an unreadable record only if nothing else was due, so that it
    /// does not stop a sweep.
    pub(crate) fn or_unreadable(self, error: Option<StoreError>) -> Result<Self, StoreError> {
        match error {
            Some(error) if self.touched() == 0 => Err(error),
            _ => Ok(self),
        }
    }

    /// Returns the number of records that were changed. Less than the limit means
    /// that no more are due.
    #[must_use]
    pub fn touched(&self) -> u64 {
        self.removed + self.marked_unknown
    }
}
