//! The metrics of the crate: their names, units and descriptions.

use ::metrics::{Unit, describe_counter};

/// Guarded requests, by [`Outcome::name`](crate::Outcome::name).
pub(crate) const REQUESTS: &str = "idempotency_requests_total";
/// Notices, by name.
pub(crate) const NOTICES: &str = "idempotency_notices_total";
/// Records that a sweeper removed or changed.
pub(crate) const SWEPT: &str = "idempotency_swept_total";

/// Describes all metrics to the current recorder.
pub(crate) fn describe() {
    describe_counter!(
        REQUESTS,
        Unit::Count,
        "Requests that the idempotency layer guarded, by what it did with them."
    );
    describe_counter!(
        NOTICES,
        Unit::Count,
        "What happened to the records of guarded requests besides their outcomes."
    );
    describe_counter!(
        SWEPT,
        Unit::Count,
        "Expired idempotency records that a sweeper removed or marked as unknown."
    );
}
