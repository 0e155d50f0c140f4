//! The parameters of statements that make a transition in SQL.

use std::time::Duration;

use bytes::Bytes;

use super::{
    columns::{COMPLETED, IN_PROGRESS, RELEASED_ANY_REQUEST, RELEASED_SAME_REQUEST, UNKNOWN},
    commit::ClaimStatus,
};
use crate::{
    Fence,
    store::{ReclaimAs, StoreError, Transitioned, admin::Resolution},
};

/// Returns microseconds for a statement to add to its clock.
pub(crate) fn micros(duration: Duration) -> i64 {
    let micros = duration.min(LONGEST).as_micros();
    micros.try_into().unwrap_or(i64::MAX)
}

/// Returns the fence as a column has it. A fence that is too large for the column
/// becomes one that no record has.
pub(crate) fn fence(seen: Fence) -> i64 {
    i64::try_from(seen.get()).unwrap_or(-1)
}

/// Returns the number by which statements know the kind of a reclaim.
pub(crate) fn reclaim_as(reclaim_as: ReclaimAs) -> i64 {
    match reclaim_as {
        ReclaimAs::Takeover => 1,
        ReclaimAs::Retry => 2,
        ReclaimAs::Replace => 3,
        ReclaimAs::Expired => 4,
        ReclaimAs::Rerun => 5,
        ReclaimAs::Reconcile => 6,
    }
}

/// What a resolution makes of a record.
pub(crate) struct Resolved {
    pub(crate) state: i64,
    pub(crate) response: Option<Bytes>,
    /// The least time that the record is kept from now.
    pub(crate) at_least: i64,
}

impl Resolved {
    pub(crate) fn new(resolution: &Resolution, at_least: Duration) -> Self {
        let (state, response) = match resolution {
            Resolution::Happened(response) => (COMPLETED, Some(response.encode())),
            Resolution::DidNotHappen => (RELEASED_SAME_REQUEST, None),
        };
        Self {
            state,
            response,
            at_least: micros(at_least),
        }
    }
}

/// Returns the answer to a transition that changed no row. It is applied if the record
/// of the claim is in one of the states that an earlier, unanswered call leaves.
pub(crate) fn repeated(state: Option<i64>, applied: &[i64]) -> Result<Transitioned, StoreError> {
    match state {
        None => Ok(Transitioned::Superseded),
        Some(state) if applied.contains(&state) => Ok(Transitioned::Applied),
        Some(IN_PROGRESS..=RELEASED_ANY_REQUEST) => Ok(Transitioned::Superseded),
        Some(_) => Err(StoreError::corrupt("state")),
    }
}

/// Returns the status of a claim. `state` is that of the record with its token.
pub(crate) fn claim_status(state: Option<i64>) -> Result<ClaimStatus, StoreError> {
    match state {
        Some(COMPLETED) => Ok(ClaimStatus::Completed),
        Some(IN_PROGRESS | UNKNOWN) => Ok(ClaimStatus::Open),
        None | Some(RELEASED_SAME_REQUEST | RELEASED_ANY_REQUEST) => Ok(ClaimStatus::Superseded),
        Some(_) => Err(StoreError::corrupt("state")),
    }
}

/// The longest duration that a clock can be moved by within the range of a timestamp.
const LONGEST: Duration = Duration::from_secs(100 * 365 * 24 * 3600);
