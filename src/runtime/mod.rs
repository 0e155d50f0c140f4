//! Pauses between attempts, and state of Tokio runtimes.

pub(crate) mod backoff;
pub(crate) mod per_runtime;
pub(crate) mod single_task;
