//! Quotas: what the scopes of a layer keep in the store, over all processes.
//!
//! The layer counts the records of its process, and reports the sums to the store once a
//! second, in the background. The store returns the sums of all processes. So a claim needs
//! no further call to the store, except the first one of a scope.

use std::{
    collections::{HashMap, hash_map::RandomState},
    hash::BuildHasher as _,
    panic::{AssertUnwindSafe, catch_unwind},
    sync::{Arc, Mutex, MutexGuard, Once, PoisonError},
    time::Duration,
};

use http::request;
use tokio::{
    task,
    time::{self, Instant},
};

use super::{
    config::Config,
    store_call::bounded,
    usage::{Expiry, Kept, ScopeUsage},
};
use crate::{
    error::StoreError,
    key::{RecordName, Scope},
    operation::request_name::RequestName,
    policy::quota::{Quota, QuotaSetting},
    rejection::{Callback, QuotaExceeded, Rejection},
    runtime::single_task::{Permit, SingleTask},
    store::{OwnerTransition, Store, Usage, UsageDelta},
    telemetry::log::Warnings,
};

/// The usage of the scopes of a layer.
pub(crate) struct Quotas<S> {
    store: Arc<S>,
    setting: QuotaSetting,
    store_timeout: Duration,
    /// Of a record, unless its response says otherwise.
    retention: Duration,
    warnings: Warnings,
    start: Instant,
    hasher: RandomState,
    shards: Box<[Mutex<Scopes>]>,
    /// The scopes of the next report.
    due: Mutex<Vec<Arc<ScopeUsage>>>,
    /// Reports regularly. Ends with its runtime, or once no scope is due.
    task: SingleTask,
    /// Held during a report.
    reporting: tokio::sync::Mutex<()>,
    counts_alone: Once,
}

type Scopes = HashMap<Scope, Arc<ScopeUsage>>;

/// The quota of one request, and the usage of its scope.
pub(super) struct RequestQuota {
    quota: Quota,
    pub(super) usage: Arc<ScopeUsage>,
}

impl<S: Store> Quotas<S> {
    /// Returns `None` if the layer has no quota.
    pub(crate) fn new(store: &Arc<S>, config: &Config) -> Option<Arc<Self>> {
        let setting = config.quota.clone()?;
        Some(Arc::new(Self {
            store: Arc::clone(store),
            setting,
            store_timeout: config.store_timeout(),
            retention: config.responses.retention,
            warnings: config.warnings().clone(),
            start: Instant::now(),
            hasher: RandomState::new(),
            shards: (0..SHARDS).map(|_| Mutex::default()).collect(),
            due: Mutex::default(),
            task: SingleTask::default(),
            reporting: tokio::sync::Mutex::default(),
            counts_alone: Once::new(),
        }))
    }

    /// Returns the quota of a request in `scope`, or `None` if nothing is counted for it.
    /// Fails if the function of the application panics.
    pub(super) fn of_request(
        &self,
        name: &RequestName,
        parts: &request::Parts,
    ) -> Result<Option<Box<RequestQuota>>, Rejection> {
        let quota = match &self.setting {
            QuotaSetting::Fixed(quota) => *quota,
            QuotaSetting::By(quota) => {
                let quota = catch_unwind(AssertUnwindSafe(|| quota(name.sent().scope(), parts)));
                quota.map_err(|_| Rejection::callback_panicked(Callback::Quota))?
            }
        };
        Ok(self.of(quota, name.scope()))
    }

    /// Returns the quota of work in `scope`, which has no request to choose by.
    #[cfg(feature = "guard")]
    pub(super) fn of_work(&self, scope: &Scope) -> Option<Box<RequestQuota>> {
        match &self.setting {
            QuotaSetting::Fixed(quota) => self.of(*quota, scope),
            QuotaSetting::By(_) => None,
        }
    }

    fn of(&self, quota: Quota, scope: &Scope) -> Option<Box<RequestQuota>> {
        if quota.is_unlimited() {
            return None;
        }
        let usage = self.usage(scope)?;
        Some(Box::new(RequestQuota { quota, usage }))
    }

    /// Returns why a new record would exceed the quota, if it would.
    pub(super) async fn exceeded(
        self: &Arc<Self>,
        request: &RequestQuota,
        name: &RecordName,
    ) -> Option<QuotaExceeded> {
        let usage = &request.usage;
        if !usage.asked.initialized() {
            Box::pin(self.asked(usage)).await;
        }
        self.make_due(usage);
        usage.exceeded(request.quota, name)
    }

    /// Counts a record that was claimed at `since`, and no more the one in its place.
    pub(super) fn claimed(
        self: &Arc<Self>,
        usage: &Arc<ScopeUsage>,
        name: &RecordName,
        since: Instant,
        replaced: Option<Expiry>,
    ) {
        let record = Kept::of_record(name);
        if let Some(expiry) = replaced {
            usage.count(record.negative(), expiry, self.start);
        }
        let expiry = Expiry::from(since, self.retention);
        usage.count(record, expiry, self.start);
        self.make_due(usage);
    }

    /// Counts a record whose expiry was moved.
    pub(super) fn moved(
        self: &Arc<Self>,
        usage: &Arc<ScopeUsage>,
        name: &RecordName,
        before: Expiry,
        after: Expiry,
    ) {
        let record = Kept::of_record(name);
        usage.count(record.negative(), before, self.start);
        usage.count(record, after, self.start);
        self.make_due(usage);
    }

    /// Counts what the end of a claim changes, which was claimed at `since`.
    pub(super) fn ended(
        self: &Arc<Self>,
        usage: &Arc<ScopeUsage>,
        name: &RecordName,
        since: Instant,
        transition: &OwnerTransition,
    ) {
        let now = Instant::now();
        let before = Expiry::from(since, self.retention);
        let (response, after) = match transition {
            OwnerTransition::Renew { .. } | OwnerTransition::Release(_) => return,
            OwnerTransition::MarkUnknown { retention } => (0, Expiry::from(now, *retention)),
            OwnerTransition::Complete(completion) => {
                let mut after = Expiry::from(since, completion.retention);
                after.at = after.at.max(now + completion.at_least);
                (completion.response.len(), after)
            }
        };
        let mut kept = Kept::of_response(response);
        if after.at != before.at {
            let record = Kept::of_record(name);
            usage.count(record.negative(), before, self.start);
            kept = kept.plus(record);
        }
        usage.count(kept, after, self.start);
        self.make_due(usage);
    }

    /// Reports the scopes that are due.
    pub(crate) async fn report(&self) {
        let _reporting = self.reporting.lock().await;
        let mut left = lock(&self.due).len();
        while left > 0 {
            // Further ones stay due, should the runtime end meanwhile.
            let scopes: Vec<_> = {
                let mut due = lock(&self.due);
                let scopes = due.len().min(MOST_SCOPES);
                due.drain(..scopes).collect()
            };
            left = left.saturating_sub(MOST_SCOPES);
            self.report_scopes(&scopes).await;
            // A store in memory never waits, and requests must not wait for many scopes.
            task::yield_now().await;
        }
    }

    /// Returns once the store was asked about the scope. Simultaneous first requests ask
    /// together, in a task: the request that began may not be polled any more.
    async fn asked(self: &Arc<Self>, usage: &Arc<ScopeUsage>) {
        if let Some(permit) = usage.asking.try_begin() {
            let (quotas, usage) = (Arc::clone(self), Arc::clone(usage));
            tokio::spawn(async move {
                quotas.ask(&usage).await;
                let _ = usage.asked.set(());
                drop(permit);
            });
        }
        // The task ends with its runtime, and the runtime of this request may be another.
        let asked = time::timeout(self.store_timeout, usage.asked.wait());
        if asked.await.is_err() {
            self.warnings
                .warn(FAILED, Some(&StoreError::timed_out()), None);
        }
    }

    async fn ask(&self, usage: &Arc<ScopeUsage>) {
        let deltas = [UsageDelta::none(usage.scope.clone())];
        match self.add(&deltas).await {
            Ok(Some(answer)) => usage.set_known(&answer),
            Ok(None) => self.warn_alone(),
            Err(error) => self.warnings.warn(FAILED, Some(&error), None),
        }
    }

    async fn report_scopes(&self, scopes: &[Arc<ScopeUsage>]) {
        let deltas: Vec<_> = scopes
            .iter()
            .flat_map(|usage| usage.take_deltas())
            .collect();
        match self.add(&deltas).await {
            Ok(Some(answer)) => {
                let mut by_scope = HashMap::<_, Vec<_>>::new();
                for usage in answer {
                    by_scope.entry(usage.scope.clone()).or_default().push(usage);
                }
                for usage in scopes {
                    usage.set_known(by_scope.get(&usage.scope).map_or(&[], |usage| usage));
                }
            }
            Ok(None) => {
                self.warn_alone();
                scopes.iter().for_each(|usage| usage.count_sent_alone());
            }
            Err(error) => {
                self.warnings.warn(FAILED, Some(&error), None);
                match error.sent_nothing() {
                    true => scopes.iter().for_each(|usage| usage.unsend()),
                    false => scopes.iter().for_each(|usage| usage.count_sent_alone()),
                }
            }
        }
    }

    fn warn_alone(&self) {
        let warn = || self.warnings.warn(ALONE, None, None);
        self.counts_alone.call_once(warn);
    }

    async fn add(&self, deltas: &[UsageDelta]) -> Result<Option<Vec<Usage>>, StoreError> {
        let add = async { self.store.add_usage(deltas).await };
        bounded(self.store_timeout, add).await
    }

    /// Returns the usage of a scope. Returns `None` if too many scopes are in use.
    fn usage(&self, scope: &Scope) -> Option<Arc<ScopeUsage>> {
        let shard = self.hasher.hash_one(scope) as usize % self.shards.len();
        let mut shard = lock(&self.shards[shard]);
        if let Some(usage) = shard.get(scope) {
            return Some(Arc::clone(usage));
        }
        if shard.len() >= MOST_IN_SHARD {
            // The store still has what they keep.
            shard.retain(|_, usage| Arc::strong_count(usage) > 1 || !usage.is_idle());
        }
        if shard.len() >= MOST_IN_SHARD {
            self.warnings.warn(TOO_MANY, None, None);
            return None;
        }
        let usage = Arc::new(ScopeUsage::new(scope.clone()));
        shard.insert(scope.clone(), Arc::clone(&usage));
        Some(usage)
    }

    /// Makes the scope a part of the next report.
    fn make_due(self: &Arc<Self>, usage: &Arc<ScopeUsage>) {
        if usage.make_due() {
            lock(&self.due).push(Arc::clone(usage));
        }
        if let Some(permit) = self.task.try_begin() {
            // The task keeps the store for a last report after the layer was dropped.
            tokio::spawn(Arc::clone(self).report_regularly(permit));
        }
    }

    /// Reports once an interval, until no scope is due.
    async fn report_regularly(self: Arc<Self>, permit: Permit) {
        loop {
            time::sleep(INTERVAL).await;
            self.report().await;
            let due = lock(&self.due);
            if due.is_empty() {
                // Before another scope can be due, which then begins the next task.
                drop(permit);
                return;
            }
        }
    }
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

/// The time between two reports.
const INTERVAL: Duration = Duration::from_secs(1);
/// How many scopes one call to the store reports.
const MOST_SCOPES: usize = 100;
const SHARDS: usize = 16;
/// A scope takes about half a kibibyte.
const MOST_IN_SHARD: usize = 1024;
const ALONE: &str = "store adds no usage up, `quota` holds for each process alone: implement \
    `Store::add_usage`";
const FAILED: &str = "usage of `quota` not added up in the store: until that succeeds, each process \
    counts alone";
const TOO_MANY: &str = "more than 16,384 scopes are in use, further ones are not held to their \
    `quota`: take the scope from the caller's identity, not from what it can choose";
