//! Pauses that do not fall into step with those of others.

use std::time::Duration;

use rand::RngExt as _;

/// Between half of `pause` and all of it, at random.
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

/// The only randomness of the layer that shows in the order of events: a
/// simulation that seeds it goes the same way again.
#[cfg(feature = "__simulate")]
pub(crate) mod repeatable {
    use std::cell::RefCell;

    use rand::{SeedableRng as _, rngs::StdRng};

    thread_local! {
        pub(super) static DICE: RefCell<Option<StdRng>> = const { RefCell::new(None) };
    }

    /// Makes the pauses of this thread repeatable, from here on.
    pub fn seed_jitter(seed: u64) {
        DICE.set(Some(StdRng::seed_from_u64(seed)));
    }
}

const SHARE: std::ops::RangeInclusive<f64> = 0.5..=1.0;
