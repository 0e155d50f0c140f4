//! A store that fails, hangs or is late on demand.

use std::{
    fmt,
    future::pending,
    ops::RangeBounds,
    sync::{Arc, Mutex, MutexGuard, PoisonError},
    time::Duration,
};

use tokio::time::sleep;

use super::Gate;
use crate::{
    error::StoreError,
    key::RecordName,
    store::{
        Claim, Claimed, Fence, FencedTransition, Grant, OwnerTransition, Purged, ReclaimAs, Record,
        Store, Transition, Transitioned, Usage, UsageDelta,
        admin::{Count, Filter, Page},
    },
};

/// Wraps a store, counts its calls, and lets those fail, hang or come late that a test
/// chooses.
///
/// Without a fault, it is the store that it wraps. Clones share the store, the count and
/// the faults, so that a test keeps one and gives the layer another.
///
/// ```
/// # use axum::{Router, body::Body, http::{Request, StatusCode}, routing::post};
/// # use tower::ServiceExt;
/// use tower_idempotency::{
///     IdempotencyLayer, MemoryStore, Scope,
///     test_support::{Fault, FaultyStore, StoreCall},
/// };
///
/// # #[tokio::main(flavor = "current_thread")]
/// # async fn main() -> Result<(), Box<dyn std::error::Error>> {
/// let store = FaultyStore::new(MemoryStore::new());
/// let layer = IdempotencyLayer::required(store.clone(), |_| Some(Scope::single_tenant()));
/// let app = Router::new().route("/", post(StatusCode::CREATED).layer(layer.build()?));
/// # let request = Request::post("/").header("idempotency-key", "k").body(Body::empty())?;
///
/// // The first claim fails, and the layer makes it again.
/// store.inject(StoreCall::Claim, 1..=1, Fault::unavailable());
/// let response = app.oneshot(request).await?;
/// assert_eq!(response.status(), StatusCode::CREATED);
/// assert_eq!(store.calls_of(StoreCall::Claim), 2);
/// # Ok(())
/// # }
/// ```
pub struct FaultyStore<S> {
    inner: Arc<S>,
    plan: Arc<Mutex<Plan>>,
}

/// The kinds of calls to a [`Store`].
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum StoreCall {
    /// [`Store::claim`].
    Claim,
    /// [`Store::reclaim`].
    Reclaim,
    /// [`Store::renew`].
    Renew,
    /// [`Store::complete`].
    Complete,
    /// [`Store::release`].
    Release,
    /// [`Store::mark_unknown`] and [`Store::mark_lapsed`].
    MarkUnknown,
    /// [`Store::resolve`].
    Resolve,
    /// [`Store::read`].
    Read,
    /// [`Store::now`].
    Now,
    /// [`Store::list`].
    List,
    /// [`Store::count`].
    Count,
    /// [`Store::forget`].
    Forget,
    /// [`Store::purge_expired`].
    PurgeExpired,
    /// [`Store::add_usage`].
    AddUsage,
}

/// What happens to a call.
#[derive(Clone, Debug)]
#[non_exhaustive]
pub enum Fault {
    /// It does nothing, and returns this error.
    Error(StoreError),
    /// It is done, but returns [`Unavailable`](crate::StoreErrorKind::Unavailable).
    LoseAnswer,
    /// It does nothing, and never returns.
    Hang,
    /// It is done, but never returns.
    HangAfterwards,
    /// It is done after this time.
    Delay(Duration),
    /// It is done once the gate lets it pass.
    Wait(Gate),
    /// It is done, and returns once the gate lets it pass.
    WaitAfterwards(Gate),
    /// It never returns. It is done after this time nevertheless, even if its caller has
    /// gone. For [`Claim`](StoreCall::Claim) and [`Reclaim`](StoreCall::Reclaim); other
    /// calls only hang.
    LandLater(Duration),
    /// A claim finds that the record in its way has just gone, and returns
    /// [`Claimed::Vanished`]. Other calls are not changed.
    Vanish,
    /// It does nothing, and panics with this message.
    Panic(&'static str),
}

impl Fault {
    /// Returns an [`Error`](Self::Error) of the kind
    /// [`Unavailable`](crate::StoreErrorKind::Unavailable): the store cannot be reached.
    #[must_use]
    pub fn unavailable() -> Self {
        Self::Error(StoreError::unavailable(INJECTED))
    }
}

#[derive(Default)]
struct Plan {
    calls: Vec<StoreCall>,
    faults: Vec<Planned>,
    now: Option<Duration>,
}

struct Planned {
    /// `None` for every kind.
    call: Option<StoreCall>,
    chosen: Box<dyn Fn(usize) -> bool + Send>,
    fault: Fault,
}

impl<S> FaultyStore<S> {
    /// Wraps a store. No call has a fault.
    #[must_use]
    pub fn new(store: S) -> Self {
        Self {
            inner: Arc::new(store),
            plan: Arc::default(),
        }
    }

    /// Adds a fault for the calls of one kind with these numbers. `..` is every one.
    ///
    /// The calls of each kind are counted from 1, since the store was made. If several
    /// faults apply, the first one that was added does.
    pub fn inject(
        &self,
        call: StoreCall,
        numbers: impl RangeBounds<usize> + Send + 'static,
        fault: Fault,
    ) {
        self.plan().faults.push(Planned {
            call: Some(call),
            chosen: Box::new(move |number| numbers.contains(&number)),
            fault,
        });
    }

    /// Adds a fault for every call.
    pub fn inject_all(&self, fault: Fault) {
        self.plan().faults.push(Planned {
            call: None,
            chosen: Box::new(|_| true),
            fault,
        });
    }

    /// Sets the time that [`Store::now`] returns, since 1970. Leases and retentions still
    /// follow the clock of the store that it wraps.
    pub fn set_now(&self, now: Duration) {
        self.plan().now = Some(now);
    }

    /// Removes all faults. A call that waits or hangs still does.
    pub fn heal(&self) {
        self.plan().faults.clear();
    }

    /// Returns how many calls of this kind there were, with those that had a fault.
    #[must_use]
    pub fn calls_of(&self, call: StoreCall) -> usize {
        self.plan().count(call)
    }

    /// Returns all calls, in their order.
    #[must_use]
    pub fn calls(&self) -> Vec<StoreCall> {
        self.plan().calls.clone()
    }

    /// Returns the store that it wraps.
    #[must_use]
    pub fn get_ref(&self) -> &S {
        &self.inner
    }

    fn plan(&self) -> MutexGuard<'_, Plan> {
        self.plan.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Counts a call, and returns its fault.
    fn begin(&self, call: StoreCall) -> Option<Fault> {
        let mut plan = self.plan();
        plan.calls.push(call);
        let number = plan.count(call);
        let planned = plan.faults.iter().find(|planned| {
            planned.call.is_none_or(|planned| planned == call) && (planned.chosen)(number)
        });
        planned.map(|planned| planned.fault.clone())
    }

    async fn call<T>(
        &self,
        call: StoreCall,
        done: impl Future<Output = Result<T, StoreError>>,
    ) -> Result<T, StoreError> {
        under(self.begin(call), done).await
    }
}

impl Plan {
    fn count(&self, call: StoreCall) -> usize {
        self.calls.iter().filter(|made| **made == call).count()
    }
}

async fn under<T>(
    fault: Option<Fault>,
    done: impl Future<Output = Result<T, StoreError>>,
) -> Result<T, StoreError> {
    match fault {
        None | Some(Fault::Vanish) => done.await,
        Some(Fault::Error(error)) => Err(error),
        Some(Fault::LoseAnswer) => {
            let _ = done.await;
            Err(StoreError::unavailable(INJECTED))
        }
        Some(Fault::Hang | Fault::LandLater(_)) => pending().await,
        Some(Fault::HangAfterwards) => {
            let _ = done.await;
            pending().await
        }
        Some(Fault::Delay(delay)) => {
            sleep(delay).await;
            done.await
        }
        Some(Fault::Wait(gate)) => {
            gate.pass().await;
            done.await
        }
        Some(Fault::WaitAfterwards(gate)) => {
            let answer = done.await;
            gate.pass().await;
            answer
        }
        Some(Fault::Panic(message)) => panic!("{message}"),
    }
}

impl<S: Store> Store for FaultyStore<S> {
    async fn claim(&self, name: &RecordName, claim: &Claim) -> Result<Claimed, StoreError> {
        let fault = self.begin(StoreCall::Claim);
        match fault {
            Some(Fault::Vanish) => return Ok(Claimed::Vanished),
            Some(Fault::LandLater(delay)) => {
                let (inner, name, claim) = (Arc::clone(&self.inner), name.clone(), *claim);
                tokio::spawn(async move {
                    sleep(delay).await;
                    inner.claim(&name, &claim).await
                });
            }
            _ => {}
        }
        under(fault, self.inner.claim(name, claim)).await
    }

    async fn reclaim(
        &self,
        name: &RecordName,
        seen: Fence,
        reclaim_as: ReclaimAs,
        claim: &Claim,
    ) -> Result<Option<Grant>, StoreError> {
        let fault = self.begin(StoreCall::Reclaim);
        if let Some(Fault::LandLater(delay)) = fault {
            let (inner, name, claim) = (Arc::clone(&self.inner), name.clone(), *claim);
            tokio::spawn(async move {
                sleep(delay).await;
                inner.reclaim(&name, seen, reclaim_as, &claim).await
            });
        }
        under(fault, self.inner.reclaim(name, seen, reclaim_as, claim)).await
    }

    async fn transition(
        &self,
        name: &RecordName,
        transition: Transition,
    ) -> Result<Transitioned, StoreError> {
        let call = match &transition {
            Transition::Owner(_, OwnerTransition::Renew { .. }) => StoreCall::Renew,
            Transition::Owner(_, OwnerTransition::Complete(_)) => StoreCall::Complete,
            Transition::Owner(_, OwnerTransition::Release(_)) => StoreCall::Release,
            Transition::Owner(_, OwnerTransition::MarkUnknown { .. })
            | Transition::Fenced(_, FencedTransition::MarkLapsed { .. }) => StoreCall::MarkUnknown,
            Transition::Fenced(_, FencedTransition::Resolve { .. }) => StoreCall::Resolve,
            Transition::Fenced(_, FencedTransition::Forget) => StoreCall::Forget,
        };
        self.call(call, self.inner.transition(name, transition))
            .await
    }

    async fn now(&self) -> Result<Duration, StoreError> {
        let now = self.plan().now;
        self.call(StoreCall::Now, async {
            match now {
                Some(now) => Ok(now),
                None => self.inner.now().await,
            }
        })
        .await
    }

    async fn read(&self, name: &RecordName) -> Result<Option<Record>, StoreError> {
        self.call(StoreCall::Read, self.inner.read(name)).await
    }

    async fn list(
        &self,
        filter: &Filter,
        after: Option<&RecordName>,
        limit: u32,
    ) -> Result<Page, StoreError> {
        self.call(StoreCall::List, self.inner.list(filter, after, limit))
            .await
    }

    async fn count(&self, filter: &Filter, limit: u32) -> Result<Count, StoreError> {
        self.call(StoreCall::Count, self.inner.count(filter, limit))
            .await
    }

    async fn wait(&self, name: &RecordName, seen: Fence) -> Result<(), StoreError> {
        self.inner.wait(name, seen).await
    }

    async fn add_usage(&self, deltas: &[UsageDelta]) -> Result<Option<Vec<Usage>>, StoreError> {
        let added = self.inner.add_usage(deltas);
        self.call(StoreCall::AddUsage, added).await
    }

    async fn purge_expired(
        &self,
        limit: u32,
        unknown_retention: Duration,
    ) -> Result<Purged, StoreError> {
        let done = self.inner.purge_expired(limit, unknown_retention);
        self.call(StoreCall::PurgeExpired, done).await
    }
}

impl<S> Clone for FaultyStore<S> {
    fn clone(&self) -> Self {
        Self {
            inner: Arc::clone(&self.inner),
            plan: Arc::clone(&self.plan),
        }
    }
}

impl<S: fmt::Debug> fmt::Debug for FaultyStore<S> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("FaultyStore")
            .field("inner", &self.inner)
            .finish_non_exhaustive()
    }
}

const INJECTED: &str = "fault injected by a test";
