//! Warnings, notices and metrics, for operators.

pub(crate) mod log;
#[cfg(feature = "metrics")]
pub(crate) mod metrics;
pub(crate) mod notice;
