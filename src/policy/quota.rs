//! How much a scope may keep in the store.

use std::{fmt, sync::Arc};

use http::request;

use crate::key::Scope;

/// How much a scope may keep in the store at a time, over all processes.
///
/// A record counts from its claim until it expires. It counts as one record, and as
/// [`RECORD_BYTES`](Self::RECORD_BYTES), its scope and key, and its recorded response in
/// bytes. A retry of a record that exists is always answered, since it adds nothing.
///
/// Set by [`IdempotencyBuilder::quota`](crate::IdempotencyBuilder::quota), which says how
/// exact it is.
///
/// ```
/// use tower_idempotency::Quota;
///
/// let free = Quota::unlimited().max_records(10_000);
/// let paid = Quota::unlimited().max_records(1_000_000).max_bytes(4 << 30);
/// assert_ne!(free, paid);
/// ```
#[derive(Clone, Copy, PartialEq, Eq)]
pub struct Quota {
    pub(crate) records: u64,
    pub(crate) bytes: u64,
}

impl Quota {
    /// What each record counts besides its name and its response, in bytes.
    pub const RECORD_BYTES: u64 = 256;

    /// Returns a quota without a limit.
    #[must_use]
    pub const fn unlimited() -> Self {
        Self {
            records: u64::MAX,
            bytes: u64::MAX,
        }
    }

    /// Sets how many records a scope may keep. Zero refuses every new key.
    #[must_use]
    pub const fn max_records(mut self, records: u64) -> Self {
        self.records = records;
        self
    }

    /// Sets how many bytes a scope may keep. A record is accepted as long as its name fits,
    /// since the size of its response is not known then: the last one may exceed the limit.
    #[must_use]
    pub const fn max_bytes(mut self, bytes: u64) -> Self {
        self.bytes = bytes;
        self
    }

    pub(crate) fn is_unlimited(self) -> bool {
        self == Self::unlimited()
    }
}

impl fmt::Debug for Quota {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let limit = |limit| Some(limit).filter(|limit| *limit != u64::MAX);
        f.debug_struct("Quota")
            .field("max_records", &limit(self.records))
            .field("max_bytes", &limit(self.bytes))
            .finish()
    }
}

/// The quotas of a layer.
#[derive(Clone)]
pub(crate) enum QuotaSetting {
    Fixed(Quota),
    By(QuotaFn),
}

type QuotaFn = Arc<dyn Fn(&Scope, &request::Parts) -> Quota + Send + Sync>;
