//! The settings that all clones of a layer share, and their defaults.

use std::{collections::HashMap, sync::Arc, time::Duration};

use http::{HeaderName, HeaderValue, Method, StatusCode, request};
use thiserror::Error;

use crate::{
    Disconnect, Dispositions, KeptHeaders, KeySyntax, Recovery, Scope, StoreFailure,
    fingerprint::Fingerprinter, log::Warnings, policy::Requirement, rejection::Renderer,
};

pub(crate) type ScopeFn = Arc<dyn Fn(&request::Parts) -> Option<Scope> + Send + Sync>;
pub(crate) type GuardFn = Arc<dyn Fn(&request::Parts) -> bool + Send + Sync>;

/// What a layer was built with; checked once, then only read.
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
    pub(crate) waiters: usize,
    pub(crate) in_flight: usize,
    pub(crate) buffered_bytes: usize,
    pub(crate) dispositions: Dispositions,
    pub(crate) recovery: Recovery,
    pub(crate) attempts: u32,
    pub(crate) store_failure: StoreFailure,
    pub(crate) disconnect: Disconnect,
    pub(crate) marker: HeaderName,
    pub(crate) kept_headers: KeptHeaders,
    pub(crate) retention: Duration,
    pub(crate) retention_by_status: HashMap<StatusCode, Duration>,
    pub(crate) unknown_retention: Duration,
    pub(crate) request_limit: usize,
    pub(crate) request_time: Duration,
    pub(crate) response_limit: usize,
    pub(crate) response_time: Duration,
    pub(crate) live_types: Vec<HeaderValue>,
    pub(crate) lease: Duration,
    pub(crate) heartbeat: Duration,
    pub(crate) longest_run: Duration,
    pub(crate) store_timeout: Duration,
    pub(crate) late_time: Duration,
    pub(crate) late_bytes: usize,
    pub(crate) renderer: Renderer,
    pub(crate) warnings: Warnings,
}

/// A setting that cannot be: says which, its limit, and what was got.
#[derive(Clone, Debug, PartialEq, Eq, Error)]
#[error("{setting}: {reason}")]
pub struct BuildError {
    setting: &'static str,
    reason: String,
}

impl BuildError {
    pub(crate) fn new(setting: &'static str, reason: impl Into<String>) -> Self {
        Self {
            setting,
            reason: reason.into(),
        }
    }

    /// The name of the builder's method.
    #[must_use]
    pub fn setting(&self) -> &'static str {
        self.setting
    }
}

impl Config {
    pub(crate) fn check(&self) -> Result<(), BuildError> {
        self.check_durations()?;
        self.check_bounds()?;
        if let Some(fault) = self.syntax.fault() {
            return Err(BuildError::new("key_syntax", fault));
        }
        self.check_window()?;
        if let Some(safe) = self.methods.iter().find(|method| method.is_safe()) {
            return Err(BuildError::new(
                "methods",
                format!("{safe} is a safe method and needs no key"),
            ));
        }
        if self.methods.is_empty() && self.guard_if.is_none() {
            return Err(BuildError::new("methods", "there is none to guard"));
        }
        if self.marker == self.header {
            return Err(BuildError::new(
                "replay_marker",
                format!("{} is the name of the key's header", self.marker),
            ));
        }
        if !matches!(self.mismatch.as_u16(), 400 | 409 | 422) {
            return Err(BuildError::new(
                "mismatch_status",
                format!("it is 400, 409 or 422, not {}", self.mismatch.as_u16()),
            ));
        }
        Ok(())
    }

    fn check_durations(&self) -> Result<(), BuildError> {
        let named = [
            ("lease", self.lease),
            ("heartbeat", self.heartbeat),
            ("longest_run", self.longest_run),
            ("retention", self.retention),
            ("unknown_retention", self.unknown_retention),
            ("request_time", self.request_time),
            ("response_time", self.response_time),
            ("store_timeout", self.store_timeout),
            ("late_recording", self.late_time),
        ];
        let by_status = self.retention_by_status.values();
        for (setting, duration) in named
            .into_iter()
            .chain(by_status.map(|duration| ("retention_for", *duration)))
        {
            if duration.is_zero() {
                return Err(BuildError::new(setting, "it is zero"));
            }
            if duration < SHORTEST {
                return Err(BuildError::new(
                    setting,
                    format!("{duration:?} is shorter than {SHORTEST:?}"),
                ));
            }
            at_most(setting, duration, LONGEST, "ten years")?;
        }
        at_most("wait", self.wait, LONGEST, "ten years")?;
        let three = self.heartbeat.saturating_mul(3);
        if self.lease < three {
            return Err(BuildError::new(
                "lease",
                format!(
                    "{:?} is shorter than three heartbeats of {:?}",
                    self.lease, self.heartbeat
                ),
            ));
        }
        if self.lease < self.store_timeout.saturating_mul(2) {
            return Err(BuildError::new(
                "store_timeout",
                format!(
                    "{:?} is longer than half of the lease of {:?}",
                    self.store_timeout, self.lease
                ),
            ));
        }
        for (setting, duration) in [
            ("retention", self.retention),
            ("unknown_retention", self.unknown_retention),
            ("longest_run", self.longest_run),
        ]
        .into_iter()
        .chain(
            self.retention_by_status
                .values()
                .map(|duration| ("retention_for", *duration)),
        ) {
            if duration < self.lease {
                return Err(BuildError::new(
                    setting,
                    format!("{duration:?} is shorter than the lease of {:?}", self.lease),
                ));
            }
        }
        Ok(())
    }

    /// A key that outlives its record would run its operation a second time.
    fn check_window(&self) -> Result<(), BuildError> {
        let Some(window) = self.syntax.window() else {
            return Ok(());
        };
        let by_status = self.retention_by_status.values();
        for (setting, retention) in [
            ("retention", self.retention),
            ("unknown_retention", self.unknown_retention),
        ]
        .into_iter()
        .chain(by_status.map(|retention| ("retention_for", *retention)))
        {
            if window > retention {
                return Err(BuildError::new(
                    "key_syntax",
                    format!(
                        "the window of UUIDv7 keys, {window:?}, is longer than `{setting}` of {retention:?}"
                    ),
                ));
            }
        }
        Ok(())
    }

    fn check_bounds(&self) -> Result<(), BuildError> {
        for (setting, bound) in [
            ("waiters", self.waiters),
            ("in_flight", self.in_flight),
            ("buffered_bytes", self.buffered_bytes),
            ("late_recording", self.late_bytes),
        ] {
            if bound == 0 {
                return Err(BuildError::new(setting, "it is zero"));
            }
            if bound > LARGEST_BOUND {
                return Err(BuildError::new(
                    setting,
                    format!("{bound} is more than {LARGEST_BOUND}"),
                ));
            }
        }
        if self.attempts == 0 {
            return Err(BuildError::new("attempts", "it is zero"));
        }
        if self.buffered_bytes < self.request_limit {
            return Err(BuildError::new(
                "buffered_bytes",
                format!(
                    "{} are less than one request_limit of {}",
                    self.buffered_bytes, self.request_limit
                ),
            ));
        }
        // A record's lengths are 32-bit numbers, and stores bound a value at
        // one gibibyte.
        for (setting, limit) in [
            ("request_limit", self.request_limit),
            ("response_limit", self.response_limit),
        ] {
            if limit > LARGEST_BODY {
                return Err(BuildError::new(
                    setting,
                    format!("{limit} bytes are more than {LARGEST_BODY}"),
                ));
            }
        }
        Ok(())
    }

    /// How long a response of this status is kept, from the claim.
    pub(crate) fn retention_of(&self, status: StatusCode) -> Duration {
        self.retention_by_status
            .get(&status)
            .copied()
            .unwrap_or(self.retention)
    }
}

fn at_most(
    setting: &'static str,
    duration: Duration,
    limit: Duration,
    spelled: &str,
) -> Result<(), BuildError> {
    if duration > limit {
        return Err(BuildError::new(
            setting,
            format!("{duration:?} is longer than {spelled}"),
        ));
    }
    Ok(())
}

pub(crate) const KEY_HEADER: HeaderName = HeaderName::from_static("idempotency-key");
pub(crate) const MARKER: HeaderName = HeaderName::from_static("idempotent-replayed");
pub(crate) const RECORDED: HeaderName = HeaderName::from_static("idempotent-recorded");
pub(crate) const WAITERS: usize = 1_000;
pub(crate) const IN_FLIGHT: usize = 4_096;
pub(crate) const BUFFERED_BYTES: usize = 256 << 20;
pub(crate) const ATTEMPTS: u32 = 5;
pub(crate) const RETENTION: Duration = Duration::from_secs(24 * 3600);
pub(crate) const UNKNOWN_RETENTION: Duration = Duration::from_secs(7 * 24 * 3600);
pub(crate) const BODY_LIMIT: usize = 1 << 20;
pub(crate) const REQUEST_TIME: Duration = Duration::from_secs(10);
pub(crate) const RESPONSE_TIME: Duration = Duration::from_secs(5);
pub(crate) const LEASE: Duration = Duration::from_secs(30);
pub(crate) const LONGEST_RUN: Duration = Duration::from_secs(15 * 60);
pub(crate) const STORE_TIMEOUT: Duration = Duration::from_secs(5);
pub(crate) const LATE_TIME: Duration = Duration::from_secs(15 * 60);
pub(crate) const LATE_BYTES: usize = 64 << 20;
/// Far below what the clocks of the stores can add to the present.
pub(crate) const LONGEST: Duration = Duration::from_secs(10 * 365 * 24 * 3600);

const SHORTEST: Duration = Duration::from_millis(1);
const LARGEST_BODY: usize = 256 << 20;
const LARGEST_BOUND: usize = u32::MAX as usize >> 3;
