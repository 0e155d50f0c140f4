//! Settings of runs: their leases, and what happens when one fails.

use std::time::Duration;

use super::IdempotencyBuilder;
use crate::{
    operation::recovery::Recovery,
    policy::{Disconnect, StoreFailure, authorizer::ReplayAuthorizer},
    store::Store,
};

/// Settings of runs: their leases, and what happens when one fails.
impl<S: Store> IdempotencyBuilder<S> {
    /// Sets what a retry receives while the outcome is unknown. Defaults to
    /// [`Recovery::Refuse`].
    pub fn recovery(mut self, recovery: Recovery) -> Self {
        self.settings.config.recovery = recovery;
        self
    }

    /// Sets how often in a row an operation may start without a response, before its
    /// outcome is unknown even under [`Recovery::Rerun`]. Defaults to 5.
    ///
    /// A release resets the count to one if an attempt had an unknown outcome, otherwise
    /// to zero.
    pub fn max_attempts(mut self, attempts: u32) -> Self {
        self.settings.config.max_attempts = attempts;
        self
    }

    /// Sets a hook that decides whether a request may receive a recorded response. Defaults
    /// to none: authentication outside of the layer decides.
    ///
    /// [`ReplayAuthorizer`] has an example.
    pub fn authorize_replay(mut self, authorizer: ReplayAuthorizer) -> Self {
        self.settings.config.authorizer = Some(authorizer);
        self
    }

    /// Sets what happens if the store cannot answer a claim. Defaults to
    /// [`StoreFailure::Refuse`].
    pub fn store_failure(mut self, policy: StoreFailure) -> Self {
        self.settings.config.store_failure = policy;
        self
    }

    /// Sets what happens to a running handler when its client leaves. Defaults to
    /// [`Disconnect::Finish`].
    pub fn disconnect(mut self, policy: Disconnect) -> Self {
        self.settings.config.disconnect = policy;
        self
    }

    /// Sets the lease: the time after which a claim without a heartbeat counts as
    /// abandoned. Defaults to 30 s.
    ///
    /// After a crash, retries receive 409 `request-in-progress` until the lease lapses.
    pub fn lease(mut self, lease: Duration) -> Self {
        self.settings.responses().lease = lease;
        self
    }

    /// Sets how often a running request renews its lease: at most a third of the lease.
    /// Defaults to a third of the lease.
    pub fn heartbeat(mut self, interval: Duration) -> Self {
        self.settings.heartbeat = Some(interval);
        self
    }

    /// Sets how long the lease of a running request is renewed. A handler that hangs
    /// loses it after that. Defaults to 15 minutes.
    pub fn max_run_time(mut self, time: Duration) -> Self {
        self.settings.config.max_run_time = time;
        self
    }

    /// Sets how long one call to the store may take: at most half of the lease, so that
    /// a failed heartbeat can be tried again before the lease lapses. Defaults to 5 s,
    /// or to a third of a lease that is shorter than 15 s.
    pub fn store_timeout(mut self, timeout: Duration) -> Self {
        self.settings.store_timeout = Some(timeout);
        self
    }
}
