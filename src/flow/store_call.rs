//! Calls to the store: bounded in time, and safe from its panics.

use std::{panic::AssertUnwindSafe, time::Duration};

use futures_util::FutureExt as _;

use crate::{body::timeout::LazyTimeout, error::StoreError};

/// Runs a call for up to `timeout`. A panic of the store is an error.
///
/// Not an `async fn`, whose future would hold the call twice.
pub(crate) fn bounded<T>(
    timeout: Duration,
    call: impl Future<Output = Result<T, StoreError>>,
) -> impl Future<Output = Result<T, StoreError>> {
    LazyTimeout::new(timeout, catch_panic(call))
        .map(|answer| answer.unwrap_or_else(|| Err(StoreError::timed_out())))
}

/// Turns a panic of the store into an error, so that it ends neither a background
/// task nor the caller's connection.
pub(crate) fn catch_panic<T>(
    call: impl Future<Output = Result<T, StoreError>>,
) -> impl Future<Output = Result<T, StoreError>> {
    AssertUnwindSafe(call)
        .catch_unwind()
        .map(|answer| answer.unwrap_or_else(|_| Err(StoreError::unavailable("the store panicked"))))
}
