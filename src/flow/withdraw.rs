//! Withdraws a claim that the store may have although nothing ran.
//!
//! A claim whose answer was lost may be in the store, or may arrive there later. It may
//! also wait in a COMMIT that ends when a standby or a disk is back. Left alone, its
//! lease would lapse, and the outcome of a request that never ran would be unknown.

use std::{sync::Arc, time::Duration};

use tokio::time::{self, Instant};

use super::{config::Config, limits::Permit, shared::Shared};
use crate::{
    error::{StoreError, StoreErrorKind},
    key::RecordName,
    runtime::backoff::Backoff,
    store::{
        Claim, Claimed, Fence, OwnerTransition, ReclaimAs, Record, RecordState, Release, Store,
        Transitioned, admin::Resolution,
    },
    telemetry::notice::{GaveUp, Notice},
};

/// What a token holds, or may hold if the answer of the store was lost.
#[derive(Clone, Copy, Debug)]
pub(super) enum Hold {
    /// A name that had no record.
    Claim,
    /// The record that was seen with this fence.
    Reclaim {
        seen: Fence,
        reclaim_as: ReclaimAs,
        /// For whom the record was released, if it was.
        released: Option<Release>,
    },
}

/// A claim to withdraw. Nothing else of the request outlives its answer.
pub(super) struct Withdrawal<S> {
    pub(super) shared: Arc<Shared<S>>,
    pub(super) name: RecordName,
    pub(super) claim: Claim,
    pub(super) hold: Hold,
}

impl<S: Store> Withdrawal<S> {
    /// Tries until the store has answered, with pauses that grow. Gives up after
    /// `late_recording_timeout`, or after a lease and a store timeout if that is longer.
    /// `permit` is that of the running request.
    pub(super) async fn run(self, permit: Permit) {
        let shared = &self.shared;
        let config = &shared.config;
        let withdrawal_permit = shared.withdrawals.try_acquire(1);
        // `drain` counts one of the two permits at any moment.
        drop(permit);
        if withdrawal_permit.is_none() {
            Notice::GaveUpWithdrawing(GaveUp::TooMany).tell(config.warnings(), None);
            return;
        }
        let timeout = config
            .late_recording_timeout
            .max(config.lease() + config.store_timeout());
        let deadline = Instant::now() + timeout;
        // A retry waits at most a lease for the key of a claim that arrived late.
        let longest_pause = LONGEST_PAUSE.min(config.lease() / 3);
        let mut backoff = Backoff::new(FIRST_PAUSE, longest_pause);
        loop {
            let failure = match self.attempt().await {
                Ok(true) => return,
                Ok(false) => None,
                Err(error) => Some(error),
            };
            if Instant::now() >= deadline {
                let gave_up = Notice::GaveUpWithdrawing(GaveUp::TimedOut);
                gave_up.tell_because(config.warnings(), None, failure.as_ref());
                return;
            }
            if let Some(error) = &failure {
                config.warnings().warn(
                    "withdrawal of a claim failed, it is tried again",
                    Some(error),
                    None,
                );
            }
            time::sleep(backoff.pause()).await;
        }
    }

    /// Returns whether the token holds nothing and can no longer come to hold anything.
    async fn attempt(&self) -> Result<bool, StoreError> {
        if self.undo().await? == Transitioned::Applied {
            return Ok(true);
        }
        let record = match self.hold {
            Hold::Claim => self.claim_again().await?,
            // Its owner may be alive: claiming the record only to give it back would
            // take it from that owner.
            Hold::Reclaim {
                seen,
                reclaim_as: ReclaimAs::Takeover | ReclaimAs::Rerun | ReclaimAs::Reconcile,
                ..
            } => {
                let record = self.read().await?;
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

    /// Claims with the same token. The store waits for an earlier claim that is still
    /// being written. The released record that is left keeps a later one from being
    /// granted.
    async fn claim_again(&self) -> Result<Again, StoreError> {
        Ok(
            match self
                .shared
                .call(|store| store.claim(&self.name, &self.claim))
                .await
            {
                Ok(Claimed::Acquired(_)) => match self.undo().await? {
                    Transitioned::Applied => Again::Over,
                    Transitioned::Superseded => Again::Pending,
                },
                Ok(Claimed::Occupied(record)) => self.found(record),
                Ok(Claimed::Vanished) => Again::Pending,
                // The store has no such record, and accepts none.
                Err(error) if error.kind() == StoreErrorKind::Full => Again::Over,
                Err(error) => return Err(error),
            },
        )
    }

    async fn reclaim_again(&self, seen: Fence, reclaim_as: ReclaimAs) -> Result<Again, StoreError> {
        let reclaimed = self
            .shared
            .call(|store| store.reclaim(&self.name, seen, reclaim_as, &self.claim));
        if reclaimed.await?.is_some() {
            return Ok(match self.undo().await? {
                Transitioned::Applied => Again::Over,
                Transitioned::Superseded => Again::Pending,
            });
        }
        Ok(match self.read().await? {
            // It has expired meanwhile: an earlier attempt may still be on its way.
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

    /// Undoes the record of an earlier attempt, whatever its state is now: nothing ran
    /// under this claim.
    async fn undo_own(&self, record: &Record) -> Result<bool, StoreError> {
        let undone = match record.state {
            RecordState::InProgress { .. } => self.undo().await?,
            // Its lease has lapsed. An outcome that was unknown before stays unknown.
            RecordState::Unknown if record.takeovers == 0 => {
                let (resolution, at_least) = (Resolution::DidNotHappen, Duration::ZERO);
                let resolving = self
                    .shared
                    .call(|store| store.resolve(&self.name, record.fence, &resolution, at_least));
                let resolved = resolving.await?;
                self.shared.waiters.wake(&self.name);
                resolved
            }
            _ => Transitioned::Applied,
        };
        Ok(undone == Transitioned::Applied)
    }

    async fn read(&self) -> Result<Option<Record>, StoreError> {
        self.shared.call(|store| store.read(&self.name)).await
    }

    async fn undo(&self) -> Result<Transitioned, StoreError> {
        let undo = self.hold.undo(&self.shared.config);
        self.shared.end(&self.name, self.claim.token, undo).await
    }
}

impl Hold {
    /// Returns the transition that brings a record back to its state before the claim.
    fn undo(self, config: &Config) -> OwnerTransition {
        OwnerTransition::Release(match self {
            Self::Claim => Release::AnyRequest,
            Self::Reclaim {
                reclaim_as,
                released,
                ..
            } => match reclaim_as {
                // The outcome was unknown, and still is.
                ReclaimAs::Takeover | ReclaimAs::Rerun | ReclaimAs::Reconcile => {
                    return config.mark_unknown();
                }
                ReclaimAs::Retry => released.unwrap_or(Release::SameRequest),
                ReclaimAs::Replace | ReclaimAs::Expired => Release::AnyRequest,
            },
        })
    }
}

/// What claiming again has found.
enum Again {
    /// An earlier attempt may still be granted.
    Pending,
    /// The token holds nothing, and never will.
    Over,
    /// The record of an earlier attempt.
    Own(Box<Record>),
}

const FIRST_PAUSE: Duration = Duration::from_millis(100);
const LONGEST_PAUSE: Duration = Duration::from_secs(15);
