//! How a claim knows that its fence is larger than all before it.

use std::sync::atomic::{AtomicI64, Ordering};

/// The number that was drawn for the last removal of records this process has
/// heard of.
///
/// Between the drawing of a fence and the insertion of its record, another claim
/// of the same name can come and go with a later fence. Whatever goes draws a
/// number first: a claim that still sees the number which was heard before it
/// was sent has nothing to fear.
#[derive(Debug, Default)]
pub(super) struct Removals(AtomicI64);

impl Removals {
    pub(super) fn heard(&self) -> i64 {
        self.0.load(Ordering::Relaxed)
    }

    pub(super) fn hear(&self, removals: i64) {
        self.0.store(removals, Ordering::Relaxed);
    }
}
