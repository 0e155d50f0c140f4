//! The numbers of a limit that a request would exceed.

use std::fmt;

/// The numbers of a limit, for the log alone.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Numbers {
    pub(crate) limit: u64,
    /// What the limit counts.
    pub(crate) unit: &'static str,
    /// The sum with what was refused.
    pub(crate) got: u64,
    pub(crate) refused: &'static str,
}

impl fmt::Display for Numbers {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self {
            limit,
            unit,
            got,
            refused,
        } = self;
        write!(
            f,
            "up to {limit} {unit} are allowed, and with {refused} it would be {got}"
        )
    }
}

/// Why a new record would exceed a quota.
#[derive(Clone, Copy, Debug)]
pub(crate) struct QuotaExceeded {
    /// What the limit counts: records or bytes.
    pub(crate) unit: &'static str,
    pub(crate) limit: u64,
    /// The records or bytes with the new record.
    pub(crate) got: u64,
    /// The seconds until enough records have expired.
    pub(crate) retry_after: u64,
}

impl QuotaExceeded {
    pub(super) fn numbers(self) -> Numbers {
        Numbers {
            limit: self.limit,
            unit: self.unit,
            got: self.got,
            refused: "the new record",
        }
    }
}
