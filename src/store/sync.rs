//! What threads share state through. The tests of interleavings compile the
//! modules that use it with another one, which tries the orders of threads.

pub(crate) use std::sync::{
    Arc, Mutex, MutexGuard, PoisonError,
    atomic::{AtomicU64, AtomicUsize, Ordering},
};
