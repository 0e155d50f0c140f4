//! The settings that all clones of a layer share.

use std::{collections::HashMap, sync::Arc, time::Duration};

use http::{HeaderName, HeaderValue, Method, StatusCode, request};

use crate::{
    Disconnect, Dispositions, KeptHeaders, KeySyntax, Recovery, Scope, StoreFailure,
    fingerprint::Fingerprinter, log::Warnings, policy::Requirement, rejection::Renderer,
};

pub(crate) type ScopeFn = Arc<dyn Fn(&request::Parts) -> Option<Scope> + Send + Sync>;
pub(crate) type GuardFn = Arc<dyn Fn(&request::Parts) -> bool + Send + Sync>;

/// The settings of a layer. The builder checks them once.
pub(crate) struct Config {
    pub(crate) requirement: Requirement,
    pub(crate) scope: ScopeFn,
    pub(crate) header: HeaderName,
    pub(crate) syntax: KeySyntax,
    pub(crate) methods: Vec<Method>,
    pub(crate) guard_if: Option<GuardFn>,
    pub(crate) fingerprinter: Fingerprinter,
    pub(crate) mismatch: StatusCode,
    pub(crate) wait: Duration,
    pub(crate) max_waiters: usize,
    pub(crate) max_in_flight: usize,
    pub(crate) max_buffered_bytes: usize,
    pub(crate) dispositions: Dispositions,
    pub(crate) recovery: Recovery,
    pub(crate) max_attempts: u32,
    pub(crate) store_failure: StoreFailure,
    pub(crate) disconnect: Disconnect,
    pub(crate) marker: HeaderName,
    pub(crate) kept_headers: KeptHeaders,
    pub(crate) retention: Duration,
    pub(crate) retention_by_status: HashMap<StatusCode, Duration>,
    pub(crate) unknown_retention: Duration,
    pub(crate) max_request_body: usize,
    pub(crate) request_body_timeout: Duration,
    pub(crate) max_response_body: usize,
    pub(crate) response_body_timeout: Duration,
    pub(crate) streamed_types: Vec<HeaderValue>,
    pub(crate) lease: Duration,
    pub(crate) heartbeat: Duration,
    pub(crate) max_run_time: Duration,
    pub(crate) store_timeout: Duration,
    pub(crate) late_recording_timeout: Duration,
    pub(crate) max_late_recording_bytes: usize,
    pub(crate) renderer: Renderer,
    pub(crate) warnings: Warnings,
}

impl Config {
    /// Returns how long a response with this status is kept, counted from the claim.
    pub(crate) fn retention_of(&self, status: StatusCode) -> Duration {
        self.retention_by_status
            .get(&status)
            .copied()
            .unwrap_or(self.retention)
    }
}

/// The header that says that a response was not recorded.
pub(crate) const RECORDED: HeaderName = HeaderName::from_static("idempotent-recorded");
/// The longest duration of any setting: far below what the clocks of the stores can
/// add to the present.
pub(crate) const LONGEST: Duration = Duration::from_secs(10 * 365 * 24 * 3600);
