//! Stores that fail on demand, by the names of these tests.

use tower_idempotency::StoreError;
pub(crate) use tower_idempotency::test_support::{Fault, FaultyStore as Faulty, StoreCall as Call};

/// The row cannot be read.
pub(crate) fn corrupt() -> Fault {
    Fault::Error(StoreError::corrupt("injected by a test"))
}

/// There is no room.
pub(crate) fn full() -> Fault {
    Fault::Error(StoreError::full("injected by a test"))
}

/// Too many calls wait for the store.
pub(crate) fn overloaded() -> Fault {
    Fault::Error(StoreError::overloaded())
}

/// Nothing is sent, and an error is the answer.
pub(crate) fn unsent() -> Fault {
    Fault::Error(StoreError::unavailable("injected by a test").unsent())
}
