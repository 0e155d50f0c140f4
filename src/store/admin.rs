//! For operators: which records need attention, and how to end them.
//!
//! [`Store::list`] and [`Store::count`] find records, [`Store::resolve`] ends one whose
//! outcome is unknown, and [`Store::forget`] lets its next request run:
//!
//! ```
//! use std::time::Duration;
//! use tower_idempotency::{
//!     MemoryStore, Store, StoreError,
//!     store::{
//!         Transitioned,
//!         admin::{Count, Filter, RecordedResponse, Resolution},
//!     },
//! };
//!
//! /// Ends every unknown record, once its operation has been looked up.
//! async fn resolve_all(store: &impl Store) -> Result<usize, StoreError> {
//!     let (mut resolved, mut after) = (0, None);
//!     loop {
//!         let page = store.list(&Filter::unknown(), after.as_ref(), 100).await?;
//!         for (name, record) in page.records {
//!             // … look `record.operation` up where its work would have been done …
//!             let resolution = Resolution::Happened(RecordedResponse::tombstone());
//!             let day = Duration::from_secs(24 * 3600);
//!             let ended = store.resolve(&name, record.fence, &resolution, day).await?;
//!             resolved += usize::from(ended == Transitioned::Applied);
//!         }
//!         after = page.next;
//!         if after.is_none() {
//!             return Ok(resolved);
//!         }
//!     }
//! }
//!
//! # #[tokio::main(flavor = "current_thread")] async fn main() -> Result<(), StoreError> {
//! # use tower_idempotency::{Key, Scope, store::{Claim, Fingerprint, RecordName}};
//! # let hour = Duration::from_secs(3600);
//! let store = MemoryStore::new();
//! # for key in ["a", "b"] {
//! #     let name = RecordName::new(Scope::single_tenant(), Key::new(key));
//! #     let claim = Claim::new(Fingerprint::from_bytes([0; Fingerprint::LENGTH]), hour, hour);
//! #     store.claim(&name, &claim).await?;
//! #     let marked = store.mark_unknown(&name, claim.token, hour).await?;
//! #     assert_eq!(marked, Transitioned::Applied);
//! # }
//! // … two requests with unknown outcomes later, an alert:
//! assert_eq!(store.count(&Filter::unknown(), 1_000).await?, Count::Exactly(2));
//! assert_eq!(resolve_all(&store).await?, 2);
//! assert_eq!(store.count(&Filter::unknown(), 1_000).await?, Count::Exactly(0));
//! # Ok(())
//! # }
//! ```
//!
//! [`Store::list`]: super::Store::list
//! [`Store::count`]: super::Store::count
//! [`Store::resolve`]: super::Store::resolve
//! [`Store::forget`]: super::Store::forget

use std::time::Duration;

use super::{Record, RecordState, StoreError, StoreErrorKind};
use crate::key::{RecordName, Scope};
pub use crate::response::recorded::{NotRecordableError, RecordedResponse};

/// Which records to [list](super::Store::list) or [count](super::Store::count).
///
/// ```
/// use std::time::Duration;
/// use tower_idempotency::{Scope, store::admin::Filter};
///
/// let unknown = Filter::unknown();
/// let slow = Filter::in_progress_for(Duration::from_secs(600));
/// let of_one_caller = Filter::unknown().in_scope(Scope::new("acct_42").unwrap());
/// # assert!(unknown != slow && unknown != of_one_caller);
/// ```
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
#[must_use]
pub struct Filter {
    /// The state of the records.
    pub kind: FilterKind,
    /// The scope of the records, or `None` for every scope. Defaults to `None`.
    pub scope: Option<Scope>,
}

/// The state of the records that a [`Filter`] chooses.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum FilterKind {
    /// Records whose outcome is unknown, expired or not.
    Unknown,
    /// Records in progress whose claim is older than this, lapsed or not.
    InProgressFor(Duration),
}

impl Filter {
    /// Records whose outcome is unknown.
    pub fn unknown() -> Self {
        Self {
            kind: FilterKind::Unknown,
            scope: None,
        }
    }

    /// Records in progress whose last claim is older than `age`.
    pub fn in_progress_for(age: Duration) -> Self {
        Self {
            kind: FilterKind::InProgressFor(age),
            scope: None,
        }
    }

    /// Only records of this scope. Defaults to every scope.
    pub fn in_scope(mut self, scope: Scope) -> Self {
        self.scope = Some(scope);
        self
    }

    /// Whether the filter chooses this record: for stores that cannot ask their
    /// database.
    #[must_use]
    pub fn matches(&self, name: &RecordName, record: &Record) -> bool {
        let is_of_kind = match (self.kind, &record.state) {
            (FilterKind::Unknown, RecordState::Unknown) => true,
            (FilterKind::InProgressFor(age), RecordState::InProgress { .. }) => record.age > age,
            _ => false,
        };
        is_of_kind && self.includes_scope_of(name)
    }

    pub(crate) fn includes_scope_of(&self, name: &RecordName) -> bool {
        self.scope
            .as_ref()
            .is_none_or(|scope| scope == name.scope())
    }
}

/// A page of a [list](super::Store::list). Stores make one with a literal.
#[derive(Clone, Debug, Default)]
pub struct Page {
    /// The records, in the order of the store. None of them has a response.
    pub records: Vec<(RecordName, Record)>,
    /// The records that cannot be read, whether the filter would choose their state or not.
    /// A filter of one scope names those of this scope only. Each of their requests is refused
    /// with 503, until the record is removed from the engine.
    ///
    /// A list may lack some of them: a store that searches by state finds none whose state is
    /// unreadable.
    pub unreadable: Vec<RecordName>,
    /// The name after which the next page begins, or `None` on the last page.
    pub next: Option<RecordName>,
}

impl Page {
    /// Adds a record that was read, or the name of one that is unreadable.
    ///
    /// # Errors
    ///
    /// Each error other than [`Corrupt`](super::StoreErrorKind::Corrupt).
    pub(crate) fn add(
        &mut self,
        name: RecordName,
        read: Result<Record, StoreError>,
    ) -> Result<(), StoreError> {
        match read {
            Ok(record) => self.records.push((name, record)),
            Err(error) if error.kind() == StoreErrorKind::Corrupt => self.unreadable.push(name),
            Err(error) => return Err(error),
        }
        Ok(())
    }
}

/// How many records a filter chooses.
///
/// Exhaustive on purpose: a number that may be too small is not the number.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Count {
    /// Exactly this number.
    Exactly(u64),
    /// This number or more: counting stopped at its limit.
    AtLeast(u64),
}

impl Count {
    /// The number that was counted, which may be too small.
    #[must_use]
    pub fn counted(self) -> u64 {
        match self {
            Self::Exactly(counted) | Self::AtLeast(counted) => counted,
        }
    }
}

/// The outcome of an operation that was unknown, as an operator or a
/// [`Reconciler`](crate::Reconciler) found it out.
///
/// Exhaustive on purpose: an operation happened or it did not. A hook that cannot tell
/// returns no resolution.
#[derive(Clone, Debug)]
pub enum Resolution {
    /// It happened. Retries receive this response.
    ///
    /// Use [`RecordedResponse::tombstone`] if the response is not known.
    Happened(RecordedResponse),
    /// It did not happen. The key is released for the same request, so that a retry
    /// runs.
    ///
    /// The lost run may be paused rather than dead. Say this only if it cannot do its
    /// work any more, or if doing it again under the same derived keys has no further
    /// effect.
    DidNotHappen,
}
