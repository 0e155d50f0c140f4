//! Jittered pauses between attempts.

use std::time::Duration;

use rand::RngExt as _;

/// Pauses that double up to a maximum.
///
/// Each one is jittered, so that callers that failed together do not try again
/// together.
#[derive(Clone, Debug)]
pub(crate) struct Backoff {
    next: Duration,
    longest: Duration,
}

impl Backoff {
    pub(crate) const fn new(first: Duration, longest: Duration) -> Self {
        Self {
            next: first,
            longest,
        }
    }

    /// Returns the next pause.
    pub(crate) fn pause(&mut self) -> Duration {
        let pause = self.next;
        self.next = (pause * 2).min(self.longest);
        jittered(pause)
    }

    /// Returns the pause after so many failures, at least one.
    #[cfg(all(feature = "outbox", any(feature = "postgres", feature = "sqlite")))]
    pub(crate) fn after(&self, failures: u32) -> Duration {
        let doublings = failures.saturating_sub(1).min(31);
        let pause = self.next.saturating_mul(1 << doublings);
        jittered(pause.min(self.longest))
    }

    /// Returns a random duration of up to the next pause, for callers that need not pause.
    #[cfg(feature = "client")]
    pub(crate) fn full_jitter(&mut self) -> Duration {
        let pause = self.next;
        self.next = (pause * 2).min(self.longest);
        pause.mul_f64(rand::rng().random())
    }
}

/// Returns a random duration between half of `pause` and all of it.
pub(crate) fn jittered(pause: Duration) -> Duration {
    pause.mul_f64(share())
}

#[cfg(not(feature = "__simulate"))]
fn share() -> f64 {
    rand::rng().random_range(SHARE)
}

#[cfg(feature = "__simulate")]
fn share() -> f64 {
    repeatable::DICE.with_borrow_mut(|dice| match dice {
        Some(dice) => dice.random_range(SHARE),
        None => rand::rng().random_range(SHARE),
    })
}

/// Makes the pauses of a simulation repeatable. No other randomness of the layer
/// changes the order of events.
#[cfg(feature = "__simulate")]
pub(crate) mod repeatable {
    use std::cell::RefCell;

    use rand::{SeedableRng as _, rngs::StdRng};

    thread_local! {
        pub(super) static DICE: RefCell<Option<StdRng>> = const { RefCell::new(None) };
    }

    /// Seeds the pauses of this thread.
    pub fn seed_jitter(seed: u64) {
        DICE.set(Some(StdRng::seed_from_u64(seed)));
    }
}

const SHARE: std::ops::RangeInclusive<f64> = 0.5..=1.0;
