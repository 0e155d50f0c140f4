//! Values as parameters of statements.

use std::time::Duration;

use crate::store::ReclaimAs;

/// Returns microseconds for a statement to add to its clock.
pub(crate) fn micros(duration: Duration) -> i64 {
    let micros = duration.min(LONGEST).as_micros();
    micros.try_into().unwrap_or(i64::MAX)
}

/// Returns the number of a reclaim's kind in statements.
pub(super) fn reclaim_as(reclaim_as: ReclaimAs) -> i64 {
    match reclaim_as {
        ReclaimAs::Takeover => 1,
        ReclaimAs::Retry => 2,
        ReclaimAs::Replace => 3,
        ReclaimAs::Expired => 4,
        ReclaimAs::Rerun => 5,
        ReclaimAs::Reconcile => 6,
    }
}

/// The longest duration that a clock can be moved by within the range of a timestamp.
const LONGEST: Duration = Duration::from_secs(100 * 365 * 24 * 3600);
