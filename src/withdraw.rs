//! Takes back a claim that may have reached the store although nothing ran.
//!
//! A claim whose answer got lost may be in the store, may arrive there later, or
//! may wait in a COMMIT that ends when a standby or a disk is back. Left alone, it
//! would lapse and show an unknown outcome of a request that never ran.

use std::{sync::Arc, time::Duration};

use tokio::time::{self, Instant};

use crate::{
    RecordName, Store, StoreError,
    claim::Doubt,
    host::{Host, Share},
    jitter::jittered,
    outcome::{GaveUp, Notice},
    store::{
        Claim, Claimed, Record, RecordState, Release, Resolution, Settlement, Succession, Witness,
    },
};

/// What is left of a request once it has been answered: its name, its claim, and
/// the call whose answer got lost.
pub(crate) struct Withdrawal<S> {
    pub(crate) host: Arc<Host<S>>,
    pub(crate) name: RecordName,
    pub(crate) claim: Claim,
    pub(crate) doubt: Doubt,
}

impl<S: Store> Withdrawal<S> {
    /// Tries until the store has answered, rarely after a while, and gives up once
    /// a lease, a store timeout and the time for late recording have passed. The
    /// request gives its `place` among the running back.
    pub(crate) async fn run(self, place: Option<Share>) {
        let host = &self.host;
        let taken = host.late.take(1);
        // Not before: `drain` counts the one or the other.
        drop(place);
        let config = &host.config;
        if taken.is_none() {
            Notice::GaveUpWithdrawing(GaveUp::TooMany).tell(&config.warnings, None);
            return;
        }
        let longest = config.late_time.max(config.lease + config.store_timeout);
        let end = Instant::now() + longest;
        // A retry waits no longer than a lease for the key of a claim that landed.
        let longest_pause = LONGEST_PAUSE.min(config.lease / 3);
        let mut pause = FIRST_PAUSE;
        loop {
            let failure = match host.timely(self.attempt()).await {
                Ok(true) => return,
                Ok(false) => None,
                Err(error) => Some(error),
            };
            if Instant::now() >= end {
                let gave_up = Notice::GaveUpWithdrawing(GaveUp::TimedOut);
                gave_up.tell_because(&config.warnings, None, failure.as_ref());
                return;
            }
            if let Some(error) = &failure {
                config.warnings.warn(
                    "withdrawal of a claim failed, it is tried again",
                    Some(error),
                    None,
                );
            }
            time::sleep(jittered(pause)).await;
            pause = (pause * 2).min(longest_pause);
        }
    }

    /// Returns whether the claim can no longer be granted and holds nothing.
    ///
    /// If the claim is not there, it is made once more with the same token: the
    /// store waits for an earlier one that is still being written, and what is
    /// left behind, a released record, keeps one that arrives later from being
    /// granted.
    async fn attempt(&self) -> Result<bool, StoreError> {
        let store = &self.host.store;
        if self.give_back().await? == Settlement::Applied {
            return Ok(true);
        }
        let record = match self.doubt {
            Doubt::Reclaim(seen, succession) => {
                let reclaimed = store.reclaim(&self.name, seen, succession, &self.claim);
                if reclaimed.await?.is_some() {
                    return Ok(self.give_back().await? == Settlement::Applied);
                }
                match store.read(&self.name).await? {
                    // The state or the time has changed under the same fence: an
                    // earlier try may still be waiting.
                    Some(record) if record.fence == seen => return Ok(false),
                    Some(record) => record,
                    None => return Ok(true),
                }
            }
            Doubt::Claim => match store.claim(&self.name, &self.claim).await? {
                Claimed::Acquired(_) => {
                    return Ok(self.give_back().await? == Settlement::Applied);
                }
                Claimed::Occupied(record) => record,
                Claimed::Vanished => return Ok(false),
            },
        };
        match record.state {
            _ if record.token != self.claim.token => Ok(true),
            RecordState::InProgress { .. } => Ok(self.give_back().await? == Settlement::Applied),
            RecordState::Unknown if self.is_first_run(&record) => {
                let resolution = Resolution::DidNotHappen;
                let resolved = store.resolve(&self.name, record.fence, &resolution);
                Ok(resolved.await? == Settlement::Applied)
            }
            _ => Ok(true),
        }
    }

    /// Nothing ran under this claim. One that was to ask what became of an unknown
    /// outcome leaves it unknown.
    async fn give_back(&self) -> Result<Settlement, StoreError> {
        let store = &self.host.store;
        let (name, token) = (&self.name, self.claim.token);
        let given_back = match self.doubt {
            Doubt::Reclaim(_, Succession::Reconcile) => {
                let retention = self.host.config.unknown_retention;
                let owner = Witness::Owner(token);
                store.mark_unknown(name, owner, retention).await
            }
            _ => store.release(name, token, Release::Bound).await,
        };
        self.host.waiters.wake(name);
        given_back
    }

    /// Whether no run before this claim has an unknown outcome. Its own, which
    /// another request saw lapse and marked unknown, is known: nothing ran.
    fn is_first_run(&self, record: &Record) -> bool {
        let asks = matches!(self.doubt, Doubt::Reclaim(_, Succession::Reconcile));
        record.takeovers == 0 && !asks
    }
}

const FIRST_PAUSE: Duration = Duration::from_millis(100);
const LONGEST_PAUSE: Duration = Duration::from_secs(15);
