//! The metrics of the crate: their names, units and descriptions.

use ::metrics::{Unit, describe_counter};

/// Guarded requests, by [`Outcome::name`](crate::Outcome::name).
pub(crate) const REQUESTS: &str = "idempotency_requests_total";
/// Notices, by name.
pub(crate) const NOTICES: &str = "idempotency_notices_total";
/// Records that a sweeper removed or changed.
pub(crate) const SWEPT: &str = "idempotency_swept_total";
/// Events of outboxes.
#[cfg(feature = "outbox")]
pub(crate) const OUTBOX: &str = "idempotency_outbox_events_total";
#[cfg(feature = "outbox")]
pub(crate) const LAG_EVENTS: &str = "idempotency_outbox_lag_events";
#[cfg(feature = "outbox")]
pub(crate) const LAG_SECONDS: &str = "idempotency_outbox_lag_seconds";
#[cfg(feature = "outbox")]
pub(crate) const LAG_DEAD: &str = "idempotency_outbox_lag_dead";
#[cfg(feature = "outbox")]
pub(crate) const SNAPSHOT_SECONDS: &str = "idempotency_outbox_oldest_snapshot_seconds";

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
    #[cfg(feature = "outbox")]
    {
        describe_counter!(
            OUTBOX,
            Unit::Count,
            "Events of outboxes, by what happened to them."
        );
        ::metrics::describe_gauge!(
            LAG_EVENTS,
            Unit::Count,
            "Events of an outbox that are not published."
        );
        ::metrics::describe_gauge!(
            LAG_SECONDS,
            Unit::Seconds,
            "The age of the oldest event of an outbox that is not published."
        );
        ::metrics::describe_gauge!(
            LAG_DEAD,
            Unit::Count,
            "Aggregates of an outbox whose first event is dead, so that the others wait."
        );
        ::metrics::describe_gauge!(
            SNAPSHOT_SECONDS,
            Unit::Seconds,
            "The age of the oldest transaction that keeps deleted events on disk."
        );
    }
}
