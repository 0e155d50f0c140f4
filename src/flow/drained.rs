//! What draining left.

/// What [`IdempotencyLayer::drain`](crate::IdempotencyLayer::drain) left.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[must_use]
pub struct Drained {
    pub(super) left: usize,
}

impl Drained {
    /// How many requests were still running, and how many outcomes and withdrawals
    /// were still to be written; their keys are left to their leases.
    #[must_use]
    pub fn left(&self) -> usize {
        self.left
    }
}
