//! A store on trial: what every check does with it.

use std::{fmt, panic::resume_unwind, sync::Arc, time::Duration};

use bytes::Bytes;
use tokio::sync::Barrier;

use super::{
    Subject,
    calls::Call,
    states::{Status, applied},
};
use crate::{
    error::StoreError,
    fingerprint::Fingerprint,
    key::{Key, RecordName, Scope},
    store::{
        Claim, Claimed, Completion, Fence, Grant, ReclaimAs, Record, Release, Store, Token,
        Transitioned, admin::Resolution,
    },
};

/// A fresh store on which one promise is tested. Each promise is a method.
///
/// A method panics if the store breaks the promise, and its message names the call.
#[derive(Debug)]
pub struct Trial<S: Subject> {
    pub(super) subject: S,
    pub(super) store: S::Store,
    pub(super) peer: S::Store,
}

impl<S: Subject> Trial<S> {
    /// Makes a fresh store.
    pub async fn begin(subject: S) -> Self {
        let store = subject.store().await;
        let peer = subject.peer(&store).await;
        Self {
            subject,
            store,
            peer,
        }
    }

    /// Removes the store, after its promise was kept.
    pub async fn end(self) {
        drop(self.peer);
        self.subject.finish(self.store).await;
    }

    /// Lets every lease and retention of [`Subject::SHORT`] pass.
    pub(super) async fn lapse(&self) {
        self.subject.pass(S::SHORT * 2).await;
    }

    /// The error of the store's clock that the suite accepts.
    pub(super) fn grain() -> Duration {
        if S::TICK.is_some() {
            Duration::ZERO
        } else {
            S::SHORT / 4
        }
    }

    pub(super) fn close(one: Duration, other: Duration) -> bool {
        one.abs_diff(other) <= Self::grain()
    }

    /// Returns a status whose expired records are removed by a sweep.
    pub(super) fn swept() -> Status {
        match S::REMOVES_BY_ITSELF {
            true => Status::Unknown,
            false => Status::Completed,
        }
    }

    /// Returns the store or its peer, by turns.
    pub(super) fn either(&self, turn: usize) -> &S::Store {
        if turn.is_multiple_of(2) {
            &self.store
        } else {
            &self.peer
        }
    }

    /// Claims a free name.
    pub(super) async fn hold(
        &self,
        name: &RecordName,
        lease: Duration,
        retention: Duration,
    ) -> Held {
        self.hold_through(&self.store, name, lease, retention).await
    }

    pub(super) async fn hold_through(
        &self,
        store: &S::Store,
        name: &RecordName,
        lease: Duration,
        retention: Duration,
    ) -> Held {
        let claim = Claim::new(fingerprint(1), lease, retention);
        acquired(store, name, claim).await
    }

    /// Claims a name again in a state that allows it.
    pub(super) async fn hold_again(
        &self,
        held: &Held,
        reclaim_as: ReclaimAs,
        claim: Claim,
    ) -> Held {
        let Some(grant) = held.reclaim(&self.store, reclaim_as, &claim).await else {
            let record = self.peek(&held.name).await;
            panic!("reclaim: {reclaim_as:?} is granted in its state, and was not for {record:?}");
        };
        Held::new(&held.name, claim, grant)
    }

    /// Completes a record as its owner.
    pub(super) async fn complete(&self, held: &Held, response: Bytes, retention: Duration) {
        let at_least = Duration::ZERO;
        self.complete_for(held, response, retention, at_least).await;
    }

    pub(super) async fn complete_for(
        &self,
        held: &Held,
        response: Bytes,
        retention: Duration,
        at_least: Duration,
    ) {
        let completion = Completion::new(response, retention, at_least);
        let completed = self.store.complete(&held.name, held.token, &completion);
        applied(good(completed.await), "complete by the owner");
    }

    /// Releases a record as its owner.
    pub(super) async fn release(&self, held: &Held, release: Release) {
        let released = self.store.release(&held.name, held.token, release).await;
        applied(good(released), "release by the owner");
    }

    /// Marks a record unknown as its owner.
    pub(super) async fn mark_unknown(&self, held: &Held, retention: Duration) {
        let marked = self.store.mark_unknown(&held.name, held.token, retention);
        applied(good(marked.await), "mark_unknown by the owner");
    }

    /// Resolves an unknown record.
    pub(super) async fn resolve(&self, held: &Held, resolution: &Resolution, at_least: Duration) {
        let seen = held.grant.fence;
        let resolved = self.store.resolve(&held.name, seen, resolution, at_least);
        applied(good(resolved.await), "resolve with the fence seen");
    }

    /// Forgets a record.
    pub(super) async fn forget(&self, held: &Held) {
        let forgotten = self.store.forget(&held.name, held.grant.fence).await;
        applied(good(forgotten), "forget with the fence seen");
    }

    /// Returns the record, which must exist.
    pub(super) async fn record(&self, name: &RecordName) -> Record {
        self.peek(name)
            .await
            .unwrap_or_else(|| panic!("read: a record stays until it is swept"))
    }

    /// Returns the record, or `None` if there is none.
    pub(super) async fn peek(&self, name: &RecordName) -> Option<Record> {
        good(self.store.read(name).await)
    }

    /// Makes all calls at the same time, and returns their answers in order.
    pub(super) async fn at_once<C>(&self, calls: impl IntoIterator<Item = C>) -> Vec<C::Output>
    where
        C: Future<Output: Send + 'static> + Send + 'static,
    {
        let calls: Vec<_> = calls.into_iter().collect();
        let start = Arc::new(Barrier::new(calls.len()));
        let tasks: Vec<_> = calls
            .into_iter()
            .map(|call| {
                let start = start.clone();
                tokio::spawn(async move {
                    start.wait().await;
                    call.await
                })
            })
            .collect();
        let mut answers = Vec::with_capacity(tasks.len());
        for task in tasks {
            answers.push(
                task.await
                    .unwrap_or_else(|error| resume_unwind(error.into_panic())),
            );
        }
        answers
    }
}

/// A claim that was granted.
#[derive(Clone, Debug)]
pub(super) struct Held {
    pub(super) name: RecordName,
    pub(super) token: Token,
    pub(super) grant: Grant,
    pub(super) claim: Claim,
}

impl Held {
    pub(super) fn new(name: &RecordName, claim: Claim, grant: Grant) -> Self {
        Self {
            name: name.clone(),
            token: claim.token,
            grant,
            claim,
        }
    }

    /// Makes a call with the token and fence of this claim.
    pub(super) async fn make(&self, call: Call, store: &impl Store) -> Transitioned {
        call.make(store, &self.name, self.token, self.grant.fence)
            .await
    }

    /// Claims the name again, after this claim.
    pub(super) async fn reclaim(
        &self,
        store: &impl Store,
        reclaim_as: ReclaimAs,
        claim: &Claim,
    ) -> Option<Grant> {
        let seen = self.grant.fence;
        good(store.reclaim(&self.name, seen, reclaim_as, claim).await)
    }
}

/// Claims a free name.
pub(super) async fn acquired(store: &impl Store, name: &RecordName, claim: Claim) -> Held {
    match good(store.claim(name, &claim).await) {
        Claimed::Acquired(grant) => Held::new(name, claim, grant),
        other => panic!("claim: a name without a record is acquired, and was {other:?}"),
    }
}

/// Claims a name that has a record, and returns the record.
pub(super) async fn occupied(store: &impl Store, name: &RecordName, what: &str) -> Record {
    match good(store.claim(name, &long_claim(3)).await) {
        Claimed::Occupied(record) => record,
        other => panic!("{what}: returns the record of the name, and not {other:?}"),
    }
}

/// Returns a claim with a lease and a retention of an hour.
pub(super) fn long_claim(seed: u8) -> Claim {
    Claim::new(fingerprint(seed), HOUR, HOUR)
}

pub(super) fn fingerprint(seed: u8) -> Fingerprint {
    Fingerprint::from_bytes(std::array::from_fn(|index| index as u8 ^ seed))
}

pub(super) fn name(key: impl fmt::Display) -> RecordName {
    RecordName::new(Scope::from_stored("conformance"), Key::new(key.to_string()))
}

/// Returns a larger fence, which was not granted.
pub(super) fn beyond(fence: Fence) -> Fence {
    Fence::from(fence.get() + 1)
}

#[track_caller]
pub(super) fn good<T>(answer: Result<T, StoreError>) -> T {
    answer.unwrap_or_else(|error| panic!("a store that can be reached answers: {error:?}"))
}

pub(super) fn response() -> Bytes {
    Bytes::from_static(b"the response")
}

/// Longer than any trial.
pub(super) const HOUR: Duration = Duration::from_secs(3600);
/// How many callers make the same call at the same time.
pub(super) const CROWD: usize = 32;
