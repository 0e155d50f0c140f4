//! The calls of a store that travel together.

use std::time::Duration;

use super::{Claim, Completion, Release, batch::Call, sql};
use crate::{RecordName, Token};

pub(super) struct ClaimCall {
    pub(super) name: RecordName,
    pub(super) claim: Claim,
}

/// What ends or prolongs a claim.
pub(super) struct SettleCall {
    pub(super) name: RecordName,
    pub(super) token: Token,
    pub(super) goal: Goal,
}

/// What a claim's owner wants of its record.
pub(super) enum Goal {
    Renewed { lease: Duration },
    Completed(Completion),
    Released(Release),
    Unknown { retention: Duration },
}

impl Call for ClaimCall {
    fn name(&self) -> &RecordName {
        &self.name
    }

    fn bytes(&self) -> usize {
        self.name.bytes()
    }

    fn is_for_its_caller(&self) -> bool {
        true
    }
}

impl Call for SettleCall {
    fn name(&self) -> &RecordName {
        &self.name
    }

    fn bytes(&self) -> usize {
        self.name.bytes() + self.goal.response().map_or(0, <[u8]>::len)
    }

    /// A heartbeat that comes late is followed by the next one; an outcome is
    /// written down whoever has left.
    fn is_for_its_caller(&self) -> bool {
        matches!(self.goal, Goal::Renewed { .. })
    }
}

/// A look at the record.
impl Call for RecordName {
    fn name(&self) -> &RecordName {
        self
    }

    fn bytes(&self) -> usize {
        self.scope().as_str().len() + self.key().as_str().len()
    }

    fn is_for_its_caller(&self) -> bool {
        true
    }
}

impl Goal {
    /// The state that the record is to have.
    pub(super) fn state(&self) -> i64 {
        match self {
            Self::Renewed { .. } => sql::IN_PROGRESS,
            Self::Completed(_) => sql::COMPLETED,
            Self::Released(release) => sql::released(*release),
            Self::Unknown { .. } => sql::UNKNOWN,
        }
    }

    /// The states in which the record is where the goal has it, of those that end
    /// a claim.
    #[cfg(feature = "postgres")]
    pub(super) fn reached(&self) -> &'static [i64] {
        match self {
            Self::Renewed { .. } => &[],
            Self::Completed(_) => &[sql::COMPLETED],
            Self::Released(_) => &[sql::RELEASED_BOUND, sql::RELEASED_FREED],
            Self::Unknown { .. } => &[sql::UNKNOWN],
        }
    }

    /// Whether the owner of a record in this state may have its goal.
    #[cfg(feature = "postgres")]
    pub(super) fn is_open_in(&self, state: i64) -> bool {
        let is_late = state == sql::UNKNOWN && matches!(self, Self::Completed(_));
        state == sql::IN_PROGRESS || is_late
    }

    pub(super) fn response(&self) -> Option<&[u8]> {
        match self {
            Self::Completed(completion) => Some(&completion.response),
            _ => None,
        }
    }

    /// How long the lease lasts, or the record; and for a completion, from now
    /// at least.
    pub(super) fn times(&self) -> (i64, i64) {
        let micros = sql::micros;
        match self {
            Self::Renewed { lease } => (micros(*lease), 0),
            Self::Completed(completion) => {
                (micros(completion.retention), micros(completion.at_least))
            }
            Self::Released(_) => (0, 0),
            Self::Unknown { retention } => (micros(*retention), 0),
        }
    }
}
