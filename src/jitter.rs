//! Pauses that do not fall into step with those of others.

use std::time::Duration;

use rand::RngExt as _;

/// Between half of `pause` and all of it, at random.
pub(crate) fn jittered(pause: Duration) -> Duration {
    pause.mul_f64(rand::rng().random_range(0.5..=1.0))
}
