//! Takes back a claim that may have reached the store although nothing ran.
//!
//! A claim whose answer got lost may be in the store, or may arrive there later. It
//! may also wait in a COMMIT that ends when a standby or a disk is back. Left alone,
//! it would lapse and show an unknown outcome of a request that never ran.

use std::{sync::Arc, time::Duration};

use tokio::time::{self, Instant};

use crate::{
    Fence, RecordName, Store, StoreError, StoreErrorKind,
    flow::claim::Hold,
    flow::shared::{Host, Share},
    jitter::jittered,
    outcome::{GaveUp, Notice},
    store::{
        Claim, Claimed, MarkedBy, ReclaimAs, Record, RecordState, Release, Resolution, Transitioned,
    },
};

/// What is left of a request once it has been answered: its name, its claim, and
/// what the claim's token may hold.
pub(crate) struct Withdrawal<S> {
    pub(crate) host: Arc<Host<S>>,
    pub(crate) name: RecordName,
    pub(crate) claim: Claim,
    pub(crate) hold: Hold,
}

/// How a record gets back to where it was before the claim.
enum Undo {
    Release(Release),
    /// The outcome was unknown, and still is.
    MarkUnknown,
}

impl<S: Store> Withdrawal<S> {
    /// Tries until the store has answered, rarely after a while, and gives up after
    /// the time for late recording, or a lease and a store timeout if that is
    /// longer. The request gives its `place` among the running back.
    pub(crate) async fn run(self, place: Option<Share>) {
        let host = &self.host;
        let config = &host.config;
        let taken = host.withdrawals.take(1);
        // Not before: `drain` counts the one or the other.
        drop(place);
        if taken.is_none() {
            Notice::GaveUpWithdrawing(GaveUp::TooMany).tell(&config.warnings, None);
            return;
        }
        let longest = config
            .late_recording_timeout
            .max(config.lease + config.store_timeout);
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

    /// Returns whether the token holds nothing, and can no longer come to hold it.
    async fn attempt(&self) -> Result<bool, StoreError> {
        if self.undo().await? == Transitioned::Applied {
            return Ok(true);
        }
        let record = match self.hold {
            Hold::Claim => self.claim_again().await?,
            // Its owner may be alive: to claim the record only to give it back would
            // take it from that owner.
            Hold::Reclaim {
                seen,
                reclaim_as: ReclaimAs::Takeover | ReclaimAs::Rerun | ReclaimAs::Reconcile,
                ..
            } => {
                let record = self.host.store.read(&self.name).await?;
                return Ok(record.is_none_or(|record| record.fence != seen));
            }
            Hold::Reclaim {
                seen, reclaim_as, ..
            } => self.reclaim_again(seen, reclaim_as).await?,
        };
        match record {
            Again::Pending => Ok(false),
            Again::Over => Ok(true),
            Again::Own(record) => self.undo_own(&record).await,
        }
    }

    /// The store waits for an earlier claim that is still being written. A released
    /// record is left, which keeps one that arrives later from being granted.
    async fn claim_again(&self) -> Result<Again, StoreError> {
        Ok(match self.host.store.claim(&self.name, &self.claim).await {
            Ok(Claimed::Acquired(_)) => match self.undo().await? {
                Transitioned::Applied => Again::Over,
                Transitioned::Superseded => Again::Pending,
            },
            Ok(Claimed::Occupied(record)) => self.found(record),
            Ok(Claimed::Vanished) => Again::Pending,
            // It holds no such record, and takes none.
            Err(error) if error.kind() == StoreErrorKind::Full => Again::Over,
            Err(error) => return Err(error),
        })
    }

    async fn reclaim_again(&self, seen: Fence, reclaim_as: ReclaimAs) -> Result<Again, StoreError> {
        let store = &self.host.store;
        let reclaimed = store.reclaim(&self.name, seen, reclaim_as, &self.claim);
        if reclaimed.await?.is_some() {
            return Ok(match self.undo().await? {
                Transitioned::Applied => Again::Over,
                Transitioned::Superseded => Again::Pending,
            });
        }
        Ok(match store.read(&self.name).await? {
            // Its time is over meanwhile: an earlier try may still be on its way.
            Some(record) if record.fence == seen => Again::Pending,
            Some(record) => self.found(record),
            None => Again::Over,
        })
    }

    fn found(&self, record: Record) -> Again {
        match record.token == self.claim.token {
            true => Again::Own(Box::new(record)),
            false => Again::Over,
        }
    }

    /// Nothing ran under this claim, whatever became of its record meanwhile.
    async fn undo_own(&self, record: &Record) -> Result<bool, StoreError> {
        let undone = match record.state {
            RecordState::InProgress { .. } => self.undo().await?,
            // Its lease has lapsed. An outcome that was unknown before stays unknown.
            RecordState::Unknown if record.takeovers == 0 => {
                let resolution = Resolution::DidNotHappen;
                let store = &self.host.store;
                let resolved = store.resolve(&self.name, record.fence, &resolution).await?;
                self.host.waiters.wake(&self.name);
                resolved
            }
            _ => Transitioned::Applied,
        };
        Ok(undone == Transitioned::Applied)
    }

    async fn undo(&self) -> Result<Transitioned, StoreError> {
        let store = &self.host.store;
        let (name, token) = (&self.name, self.claim.token);
        let undone = match self.hold.undo() {
            Undo::Release(release) => store.release(name, token, release).await,
            Undo::MarkUnknown => {
                let retention = self.host.config.unknown_retention;
                let owner = MarkedBy::Owner(token);
                store.mark_unknown(name, owner, retention).await
            }
        };
        self.host.waiters.wake(name);
        undone
    }
}

impl Hold {
    fn undo(self) -> Undo {
        match self {
            Self::Claim => Undo::Release(Release::AnyRequest),
            Self::Reclaim {
                reclaim_as,
                released,
                ..
            } => match reclaim_as {
                ReclaimAs::Takeover | ReclaimAs::Rerun | ReclaimAs::Reconcile => Undo::MarkUnknown,
                ReclaimAs::Retry => Undo::Release(released.unwrap_or(Release::SameRequest)),
                ReclaimAs::Replace | ReclaimAs::Expired => Undo::Release(Release::AnyRequest),
            },
        }
    }
}

/// What a claim that was made once more has found.
enum Again {
    /// An earlier try may still be granted.
    Pending,
    /// Nothing is held, and nothing will be.
    Over,
    /// The record of an earlier try.
    Own(Box<Record>),
}

const FIRST_PAUSE: Duration = Duration::from_millis(100);
const LONGEST_PAUSE: Duration = Duration::from_secs(15);
