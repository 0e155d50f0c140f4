//! The calls of a store that travel together.

use std::{
    convert::Infallible,
    hash::{Hash, Hasher},
    mem::{self, Discriminant},
    time::Duration,
};

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

/// What makes two outcomes of a claim one: to write down either of them is to
/// write down both.
#[derive(PartialEq, Eq)]
pub(super) struct Outcome {
    token: Token,
    name: RecordName,
    transition: Discriminant<Goal>,
}

impl Hash for Outcome {
    /// Tokens are random.
    fn hash<H: Hasher>(&self, state: &mut H) {
        self.token.hash(state);
    }
}

impl Call for ClaimCall {
    type Identity = Infallible;

    fn name(&self) -> &RecordName {
        &self.name
    }

    fn identity(&self) -> Option<Infallible> {
        None
    }

    fn bytes(&self) -> usize {
        self.name.bytes()
    }

    fn is_for_its_caller(&self) -> bool {
        true
    }
}

impl Call for SettleCall {
    type Identity = Outcome;

    fn name(&self) -> &RecordName {
        &self.name
    }

    /// The first outcome of a kind is the one that counts. Of two heartbeats the
    /// later one does.
    fn identity(&self) -> Option<Outcome> {
        (!self.is_for_its_caller()).then(|| Outcome {
            token: self.token,
            name: self.name.clone(),
            transition: mem::discriminant(&self.goal),
        })
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
    type Identity = Infallible;

    fn name(&self) -> &RecordName {
        self
    }

    fn identity(&self) -> Option<Infallible> {
        None
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
