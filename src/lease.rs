//! Who holds a claim, and for how long.

use std::{fmt, sync::Arc};

use rand::RngExt as _;
use tokio::time::{self, Instant};
use tokio_util::sync::{CancellationToken, DropGuard};

use crate::{RecordName, Store, host::Host, store::Settlement};

/// Names one claim: 128 random bits, made by the layer before it asks the
/// store, so that a claim whose answer got lost can be recognised.
///
/// Whoever shows the token may renew, complete or release the claim. `Debug`
/// does not show it.
#[derive(Clone, Copy, PartialEq, Eq, Hash)]
pub struct Token([u8; 16]);

impl Token {
    /// A new random token.
    #[must_use]
    pub fn random() -> Self {
        Self(rand::rng().random())
    }

    /// The token that a store kept.
    #[must_use]
    pub const fn from_bytes(bytes: [u8; 16]) -> Self {
        Self(bytes)
    }

    /// The bytes for a store to keep.
    #[must_use]
    pub fn as_bytes(&self) -> &[u8; 16] {
        &self.0
    }
}

impl fmt::Debug for Token {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Token(..)")
    }
}

/// A number that only grows: every claim of a key gets a larger one.
///
/// Downstream systems that keep the largest fence they have seen can turn away
/// an owner whose lease was lost.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct Fence(u64);

impl Fence {
    /// The fence with this number.
    #[must_use]
    pub fn new(number: u64) -> Self {
        Self(number)
    }

    /// The number.
    #[must_use]
    pub fn get(self) -> u64 {
        self.0
    }
}

impl fmt::Display for Fence {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.fmt(f)
    }
}

/// Keeps a claim's lease alive while it exists, from a task of its own: a
/// handler that never yields does not stop it on a multi-threaded runtime.
pub(crate) struct Heartbeats {
    _stop: DropGuard,
}

impl Heartbeats {
    /// `granted` is a moment before the store granted the claim. `lost` is
    /// cancelled when the lease is, or may be, over.
    pub(crate) fn start<S: Store>(
        host: &Arc<Host<S>>,
        name: &RecordName,
        token: Token,
        granted: Instant,
        lost: CancellationToken,
    ) -> Self {
        let stop = CancellationToken::new();
        let beat = beat(Arc::clone(host), name.clone(), token, granted, lost);
        let stopped = stop.clone();
        tokio::spawn(async move {
            // A call under way may be dropped: it is one atomic transition.
            stopped.run_until_cancelled(beat).await;
        });
        Self {
            _stop: stop.drop_guard(),
        }
    }
}

/// Extends the lease until it is superseded, or past the longest run. If it is
/// not extended for so long that the store may see it lapsed, it may be lost:
/// that is said, and it is tried on, since a lapsed lease that nobody has taken
/// over is still its owner's.
async fn beat<S: Store>(
    host: Arc<Host<S>>,
    name: RecordName,
    token: Token,
    granted: Instant,
    lost: CancellationToken,
) {
    let config = &host.config;
    let last = granted + config.longest_run;
    let mut until = granted + config.lease;
    let mut next = Instant::now() + config.heartbeat;
    loop {
        if !lost.is_cancelled() {
            next = next.min(until);
        }
        time::sleep_until(next.min(last)).await;
        let asked = Instant::now();
        if asked >= last {
            return lost.cancel();
        }
        if asked >= until {
            lost.cancel();
        }
        let renewed = host.store.renew(&name, token, config.lease);
        next = match time::timeout(config.store_timeout, renewed).await {
            Ok(Ok(Settlement::Applied)) => {
                until = asked + config.lease;
                asked + config.heartbeat
            }
            Ok(Ok(Settlement::Superseded)) => return lost.cancel(),
            // The store may be back before the lease lapses: ask more often.
            Ok(Err(_)) | Err(_) => Instant::now() + config.heartbeat / 4,
        };
    }
}
