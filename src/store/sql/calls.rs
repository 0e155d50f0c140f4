//! The calls that a store batches, and the replies to their callers.

use std::mem::{self, Discriminant};

use tokio::sync::oneshot;

use crate::{
    key::RecordName,
    store::{OwnerTransition, StoreError, Token},
};

/// A call that may share a batch with others.
pub(crate) trait Call: Send + Sync + 'static {
    /// Returns the name of the record.
    fn name(&self) -> &RecordName;

    /// Returns the identity of a call that may join an equal one.
    ///
    /// A call joins a waiting call with the same identity and receives its answer.
    /// The default is `None`: the call joins no other.
    fn identity(&self) -> Option<Identity> {
        None
    }

    /// Returns the size of the call and of its answer, unless the answer is small.
    fn bytes(&self) -> usize {
        self.name().bytes()
    }

    /// Returns whether the call is dropped when its callers leave.
    ///
    /// Claims are: a claim without a caller would hold its key until the lease
    /// lapses. Outcomes are not: they must be recorded either way. Only droppable
    /// calls count against the limit of waiting calls.
    fn is_droppable(&self) -> bool {
        true
    }
}

/// What two equal calls have in common.
#[derive(PartialEq, Eq, Hash)]
pub(crate) enum Identity {
    /// Recording an outcome twice is recording it once.
    Outcome {
        token: Token,
        name: RecordName,
        transition: Discriminant<OwnerTransition>,
    },
    /// A large response is read once for all callers that wait for it.
    Response { name: RecordName, bytes: usize },
}

impl Identity {
    /// Returns the identity of an outcome, or `None` for a renewal.
    ///
    /// Of equal outcomes the first counts. Of two renewals the later one does.
    pub(crate) fn of_outcome(
        name: &RecordName,
        token: Token,
        transition: &OwnerTransition,
    ) -> Option<Self> {
        (!transition.is_renewal()).then(|| Self::Outcome {
            token,
            name: name.clone(),
            transition: mem::discriminant(transition),
        })
    }
}

/// A call that waits to be made.
pub(crate) struct WaitingCall<C, A> {
    pub(crate) call: C,
    pub(crate) replies: Replies<A>,
}

/// The channels to a call's callers: the first, and those that joined it.
pub(crate) struct Replies<A> {
    pub(crate) first: Reply<A>,
    pub(crate) joined: Vec<Reply<A>>,
}

pub(crate) type Reply<A> = oneshot::Sender<Result<A, StoreError>>;

/// The caller's end of a [`Reply`].
pub(crate) struct Answer<A>(oneshot::Receiver<Result<A, StoreError>>);

impl<C: Call, A> WaitingCall<C, A> {
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
    /// Adds the callers of an equal call, and drops callers that have left.
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

/// A claim of a name that may have no record.
#[cfg(feature = "postgres")]
pub(crate) struct ClaimCall {
    pub(crate) name: RecordName,
    pub(crate) claim: crate::store::Claim,
}

#[cfg(feature = "postgres")]
impl Call for ClaimCall {
    fn name(&self) -> &RecordName {
        &self.name
    }
}

/// A read of one record.
pub(crate) struct ReadCall {
    pub(crate) name: RecordName,
    /// A longer response is left out.
    pub(crate) max_response: usize,
}

impl Call for ReadCall {
    fn name(&self) -> &RecordName {
        &self.name
    }

    fn identity(&self) -> Option<Identity> {
        (self.max_response > SMALL_RESPONSE).then(|| Identity::Response {
            name: self.name.clone(),
            bytes: self.max_response,
        })
    }

    fn bytes(&self) -> usize {
        match self.max_response {
            SMALL_RESPONSE => self.name.bytes(),
            bytes => self.name.bytes() + bytes,
        }
    }
}

/// The longest response, in bytes, that shares a batch with other calls.
pub(crate) const SMALL_RESPONSE: usize = 8 << 10;
