//! The calls of a store, and the callers that wait for their answers.

use std::{
    convert::Infallible,
    hash::{Hash, Hasher},
    mem::{self, Discriminant},
    time::Duration,
};

use tokio::sync::oneshot;

use super::reads::SMALL;
use crate::{
    RecordName, StoreError, Token,
    store::{Claim, Completion, Release, sql},
};

/// A call that may travel with others.
pub(crate) trait Call: Send + Sync + 'static {
    type Identity: Eq + Hash + Send;

    fn name(&self) -> &RecordName;

    /// Two calls with the same identity have the same effect and the same answer:
    /// a call joins an equal one that waits. `None` for a call that joins no other.
    fn identity(&self) -> Option<Self::Identity>;

    /// The bytes that it carries.
    fn bytes(&self) -> usize;

    /// Returns whether the call is dropped when its callers leave.
    ///
    /// A claim is: without a caller it would hold its key. An outcome is not: it
    /// must be recorded either way. Only a call that may be dropped is refused when
    /// too many wait; there are no more outcomes than requests that run.
    fn is_for_its_caller(&self) -> bool;
}

/// A call and its callers.
pub(crate) struct Member<C, A> {
    pub(crate) call: C,
    pub(crate) replies: Replies<A>,
}

/// The callers of a call: the first, and those that joined it.
pub(crate) struct Replies<A> {
    pub(crate) first: Reply<A>,
    pub(crate) joined: Vec<Reply<A>>,
}

pub(crate) type Reply<A> = oneshot::Sender<Result<A, StoreError>>;

/// The answer to a call that was handed over.
pub(crate) struct Answer<A>(oneshot::Receiver<Result<A, StoreError>>);

impl<C: Call, A> Member<C, A> {
    pub(crate) fn new(call: C) -> (Self, Answer<A>) {
        let (first, answer) = oneshot::channel();
        let replies = Replies {
            first,
            joined: Vec::new(),
        };
        (Self { call, replies }, Answer(answer))
    }
}

impl<A: Clone> Replies<A> {
    pub(crate) fn send(self, answer: Result<A, StoreError>) {
        for reply in self.joined {
            let _ = reply.send(answer.clone());
        }
        let _ = self.first.send(answer);
    }
}

impl<A> Replies<A> {
    /// Drops the callers that left, so that retries do not pile up.
    pub(crate) fn extend(&mut self, others: Self) {
        self.joined.retain(|reply| !reply.is_closed());
        self.joined.extend(others.joined);
        self.joined.push(others.first);
    }

    pub(crate) fn are_closed(&self) -> bool {
        self.first.is_closed() && self.joined.iter().all(oneshot::Sender::is_closed)
    }
}

impl<A> Answer<A> {
    pub(crate) async fn get(self) -> Result<A, StoreError> {
        let answer = self.0.await;
        answer.unwrap_or_else(|_| Err(StoreError::unavailable("the call was broken off")))
    }
}

pub(crate) struct ClaimCall {
    pub(crate) name: RecordName,
    pub(crate) claim: Claim,
}

/// What ends or prolongs a claim.
pub(crate) struct SettleCall {
    pub(crate) name: RecordName,
    pub(crate) token: Token,
    pub(crate) goal: Goal,
}

/// What a claim's owner wants of its record.
pub(crate) enum Goal {
    Renewed { lease: Duration },
    Completed(Completion),
    Released(Release),
    Unknown { retention: Duration },
}

/// What makes two outcomes of a claim one: to write down either of them is to
/// write down both.
#[derive(PartialEq, Eq)]
pub(crate) struct Outcome {
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

impl SettleCall {
    /// Whether it would delay the calls that travel with it.
    pub(crate) fn is_large(&self) -> bool {
        self.goal.response().map_or(0, <[u8]>::len) > SMALL
    }
}

impl Goal {
    /// The state that the record is to have.
    pub(crate) fn state(&self) -> i64 {
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
    pub(crate) fn reached(&self) -> &'static [i64] {
        match self {
            Self::Renewed { .. } => &[],
            Self::Completed(_) => &[sql::COMPLETED],
            Self::Released(_) => &[sql::RELEASED_BOUND, sql::RELEASED_FREED],
            Self::Unknown { .. } => &[sql::UNKNOWN],
        }
    }

    /// Whether the owner of a record in this state may have its goal.
    #[cfg(feature = "postgres")]
    pub(crate) fn is_open_in(&self, state: i64) -> bool {
        let is_late = state == sql::UNKNOWN && matches!(self, Self::Completed(_));
        state == sql::IN_PROGRESS || is_late
    }

    pub(crate) fn response(&self) -> Option<&[u8]> {
        match self {
            Self::Completed(completion) => Some(&completion.response),
            _ => None,
        }
    }

    /// How long the lease lasts, or the record; and for a completion, from now
    /// at least.
    pub(crate) fn times(&self) -> (i64, i64) {
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
