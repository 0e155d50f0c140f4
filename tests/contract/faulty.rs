//! A store whose calls fail, hang or arrive late where a test says so, before or
//! after they are applied. Counts all calls.

use std::{
    ops::RangeBounds,
    sync::{Arc, Mutex, MutexGuard},
    time::Duration,
};

use tower_idempotency::{
    Fence, RecordName, Store, StoreError,
    store::{
        Claim, Claimed, Grant, Purged, ReclaimAs, Record, Transition, Transitioned,
        admin::{Filter, Page},
    },
};

use crate::probe::Gate;

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Call {
    Claim,
    Reclaim,
    Renew,
    Complete,
    Release,
    MarkUnknown,
    Resolve,
    Read,
    List,
    Forget,
    PurgeExpired,
}

#[derive(Clone)]
pub(crate) enum Fault {
    /// Not applied; answered with an error.
    Fails,
    /// Applied; answered with an error.
    LosesItsAnswer,
    /// Not applied; never answered.
    Hangs,
    /// Applied; never answered.
    HangsAfterwards,
    /// Applied and answered after this time.
    IsLate(Duration),
    /// Applied and answered once the gate lets it pass.
    Waits(Gate),
    /// Never answered; a claim or a reclaim is applied after this time.
    LandsLater(Duration),
    /// A claim finds a record that a sweep then removes.
    Vanishes,
    /// The row cannot be read.
    IsCorrupt,
    /// Fails before anything is sent.
    IsUnreachable,
    /// The store is full.
    IsFull,
    /// Too many calls wait for the store.
    IsOverloaded,
    Panics,
}

/// Wraps any store. Clones share their faults.
#[derive(Clone)]
pub(crate) struct Faulty<S> {
    inner: S,
    plan: Arc<Mutex<Plan>>,
}

#[derive(Default)]
struct Plan {
    calls: Vec<Call>,
    faults: Vec<Planned>,
    /// The number of claims that find their record removed.
    vanishing: usize,
}

struct Planned {
    call: Call,
    chosen: Box<dyn Fn(usize) -> bool + Send>,
    fault: Fault,
}

impl<S> Faulty<S> {
    pub(crate) fn over(inner: S) -> Self {
        Self {
            inner,
            plan: Arc::default(),
        }
    }

    /// Lets the calls of one kind fail whose number, from 1, lies in this range.
    pub(crate) fn breaks(
        &self,
        call: Call,
        numbers: impl RangeBounds<usize> + Send + 'static,
        fault: Fault,
    ) {
        let chosen = Box::new(move |number| numbers.contains(&number));
        self.plan().faults.push(Planned {
            call,
            chosen,
            fault,
        });
    }

    /// Lets every call fail from now on.
    pub(crate) fn breaks_down(&self, fault: &Fault) {
        for call in ALL {
            self.breaks(call, .., fault.clone());
        }
    }

    /// Lets the next `claims` claims find their record removed by a sweep.
    pub(crate) fn vanishes(&self, claims: usize) {
        self.plan().vanishing = claims;
    }

    fn has_vanished(&self) -> bool {
        let mut plan = self.plan();
        let vanished = plan.vanishing > 0;
        plan.vanishing = plan.vanishing.saturating_sub(1);
        vanished
    }

    /// Ends all faults.
    pub(crate) fn heals(&self) {
        self.plan().faults.clear();
    }

    /// The number of calls of this kind.
    pub(crate) fn count(&self, call: Call) -> usize {
        self.plan().calls.iter().filter(|c| **c == call).count()
    }

    /// All calls, in order.
    pub(crate) fn calls(&self) -> Vec<Call> {
        self.plan().calls.clone()
    }

    fn plan(&self) -> MutexGuard<'_, Plan> {
        self.plan.lock().unwrap()
    }

    fn next_fault(&self, call: Call) -> Option<Fault> {
        let mut plan = self.plan();
        plan.calls.push(call);
        let number = plan.calls.iter().filter(|c| **c == call).count();
        plan.faults
            .iter()
            .find(|planned| planned.call == call && (planned.chosen)(number))
            .map(|planned| planned.fault.clone())
    }

    async fn around<T>(
        &self,
        call: Call,
        done: impl Future<Output = Result<T, StoreError>> + Send,
    ) -> Result<T, StoreError> {
        Self::under(self.next_fault(call), done).await
    }

    async fn under<T>(
        fault: Option<Fault>,
        done: impl Future<Output = Result<T, StoreError>> + Send,
    ) -> Result<T, StoreError> {
        let lost = || Err(StoreError::unavailable("as the test wants it"));
        match fault {
            None => done.await,
            Some(Fault::Fails) => lost(),
            Some(Fault::LosesItsAnswer) => {
                let _ = done.await;
                lost()
            }
            Some(Fault::Hangs | Fault::LandsLater(_)) => std::future::pending().await,
            Some(Fault::Vanishes) => unreachable!("only claims vanish"),
            Some(Fault::HangsAfterwards) => {
                let _ = done.await;
                std::future::pending().await
            }
            Some(Fault::IsLate(delay)) => {
                tokio::time::sleep(delay).await;
                done.await
            }
            Some(Fault::Waits(gate)) => {
                gate.pass().await;
                done.await
            }
            Some(Fault::IsCorrupt) => Err(StoreError::corrupt("as the test wants it")),
            Some(Fault::IsUnreachable) => {
                Err(StoreError::unavailable("as the test wants it").unsent())
            }
            Some(Fault::IsFull) => Err(StoreError::full("as the test wants it")),
            Some(Fault::IsOverloaded) => Err(StoreError::overloaded()),
            Some(Fault::Panics) => panic!("s3cr3t, as the test wants it"),
        }
    }
}

impl<S: Store + Clone> Store for Faulty<S> {
    async fn claim(&self, name: &RecordName, claim: &Claim) -> Result<Claimed, StoreError> {
        let done = async {
            if self.has_vanished() {
                return Ok(Claimed::Vanished);
            }
            self.inner.claim(name, claim).await
        };
        let fault = self.next_fault(Call::Claim);
        match fault {
            Some(Fault::Vanishes) => return Ok(Claimed::Vanished),
            Some(Fault::LandsLater(delay)) => {
                let (inner, name, claim) = (self.inner.clone(), name.clone(), *claim);
                tokio::spawn(async move {
                    tokio::time::sleep(delay).await;
                    inner.claim(&name, &claim).await
                });
            }
            _ => {}
        }
        Self::under(fault, done).await
    }

    async fn reclaim(
        &self,
        name: &RecordName,
        seen: Fence,
        reclaim_as: ReclaimAs,
        claim: &Claim,
    ) -> Result<Option<Grant>, StoreError> {
        let done = self.inner.reclaim(name, seen, reclaim_as, claim);
        let fault = self.next_fault(Call::Reclaim);
        if let Some(Fault::LandsLater(delay)) = fault {
            let (inner, name, claim) = (self.inner.clone(), name.clone(), *claim);
            tokio::spawn(async move {
                tokio::time::sleep(delay).await;
                inner.reclaim(&name, seen, reclaim_as, &claim).await
            });
        }
        Self::under(fault, done).await
    }

    async fn transition(
        &self,
        name: &RecordName,
        transition: Transition<'_>,
    ) -> Result<Transitioned, StoreError> {
        let call = match transition {
            Transition::Renew { .. } => Call::Renew,
            Transition::Complete { .. } => Call::Complete,
            Transition::Release { .. } => Call::Release,
            Transition::MarkUnknown { .. } => Call::MarkUnknown,
            Transition::Resolve { .. } => Call::Resolve,
        };
        self.around(call, self.inner.transition(name, transition))
            .await
    }

    async fn read(&self, name: &RecordName) -> Result<Option<Record>, StoreError> {
        self.around(Call::Read, self.inner.read(name)).await
    }

    async fn list(
        &self,
        filter: &Filter,
        after: Option<&RecordName>,
        limit: u32,
    ) -> Result<Page, StoreError> {
        self.around(Call::List, self.inner.list(filter, after, limit))
            .await
    }

    async fn forget(&self, name: &RecordName, seen: Fence) -> Result<Transitioned, StoreError> {
        self.around(Call::Forget, self.inner.forget(name, seen))
            .await
    }

    async fn purge_expired(
        &self,
        limit: u32,
        unknown_retention: Duration,
    ) -> Result<Purged, StoreError> {
        let done = self.inner.purge_expired(limit, unknown_retention);
        self.around(Call::PurgeExpired, done).await
    }
}

const ALL: [Call; 11] = [
    Call::Claim,
    Call::Reclaim,
    Call::Renew,
    Call::Complete,
    Call::Release,
    Call::MarkUnknown,
    Call::Resolve,
    Call::Read,
    Call::List,
    Call::Forget,
    Call::PurgeExpired,
];
