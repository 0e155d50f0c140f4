//! The settings that a builder collects, their defaults, and their limits.

use std::{sync::Arc, time::Duration};

use http::{Method, StatusCode};

use super::{Config, PerScope, ScopeFn, checks::check, error::BuildError};
#[cfg(feature = "sealing")]
use crate::sealing::settings::Sealing;
use crate::{
    fingerprint::{Fingerprinter, Fingerprinting},
    key::KeySyntax,
    operation::{
        disposition::Dispositions, recovery::Recovery, response_settings::ResponseSettings,
    },
    policy::{ContentDigest, Disconnect, OversizedBody, Requirement, StoreFailure},
};

/// The settings of a layer or a guard, which [`build`](Self::build) checks.
pub(crate) struct Settings {
    pub(crate) config: Config,
    pub(crate) fingerprinting: Fingerprinting,
    pub(crate) earlier: Vec<Fingerprinting>,
    /// Defaults to a third of the lease.
    pub(crate) heartbeat: Option<Duration>,
    /// Defaults to a third of the lease, and to 5 s at most.
    pub(crate) store_timeout: Option<Duration>,
}

impl Settings {
    pub(crate) fn new(scope: ScopeFn, requirement: Requirement) -> Self {
        Self {
            fingerprinting: Fingerprinting::bytes(),
            earlier: Vec::new(),
            heartbeat: None,
            store_timeout: None,
            config: Config {
                requirement,
                scope,
                header: crate::key::HEADER,
                syntax: KeySyntax::compat(),
                methods: vec![Method::POST, Method::PATCH],
                guard_if: None,
                fingerprinter: Fingerprinter::new(Fingerprinting::bytes(), Vec::new()),
                mismatch: StatusCode::UNPROCESSABLE_ENTITY,
                wait: Duration::ZERO,
                max_waiters: 1_000,
                max_in_flight: 4_096,
                max_buffered_bytes: 256 * MIB,
                max_uploads: 4_096,
                per_scope: PerScope::default(),
                max_request_body: MIB,
                request_body_timeout: Duration::from_secs(10),
                content_digest: ContentDigest::Ignore,
                oversized_body: OversizedBody::Refuse,
                dispositions: Dispositions::standard(),
                recovery: Recovery::Refuse,
                authorizer: None,
                max_attempts: 5,
                store_failure: StoreFailure::Refuse,
                disconnect: Disconnect::Finish,
                unknown_retention: Duration::from_secs(7 * 24 * HOUR),
                heartbeat: Duration::from_secs(10),
                max_run_time: Duration::from_secs(15 * 60),
                quota: None,
                late_recording_timeout: Duration::from_secs(15 * 60),
                max_late_recording_bytes: 64 * MIB,
                #[cfg(feature = "sealing")]
                names: None,
                #[cfg(all(feature = "sealing", feature = "tracing"))]
                log_ids: None,
                responses: Arc::default(),
            },
        }
    }

    pub(crate) fn responses(&mut self) -> &mut ResponseSettings {
        Arc::make_mut(&mut self.config.responses)
    }

    /// Returns the settings of a layer or a guard, or names the first one that is refused.
    pub(crate) fn build(mut self) -> Result<Config, BuildError> {
        let store_timeout = self.store_timeout;
        let responses = self.responses();
        let third = responses.lease / 3;
        responses.store_timeout = store_timeout.unwrap_or(LONGEST_STORE_TIMEOUT.min(third));
        #[cfg(feature = "sealing")]
        let sealing_fault = responses.sealing.as_ref().and_then(Sealing::fault);
        let mut config = self.config;
        config.heartbeat = self.heartbeat.unwrap_or(third);
        let current = ("fingerprint", &self.fingerprinting);
        let earlier = self.earlier.iter();
        let earlier = earlier.map(|form| ("earlier_fingerprint", form));
        for (setting, form) in std::iter::once(current).chain(earlier) {
            if let Some(fault) = form.fault() {
                return Err(BuildError::new(setting, fault));
            }
        }
        let streams = matches!(config.content_digest, ContentDigest::Stream { .. });
        if streams && self.fingerprinting.is_custom() {
            return Err(BuildError::new("content_digest", CUSTOM));
        }
        #[cfg(feature = "sealing")]
        if let Some(fault) = sealing_fault {
            return Err(BuildError::new("sealing", fault));
        }
        config.fingerprinter = Fingerprinter::new(self.fingerprinting, self.earlier);
        check(&config)?;
        #[cfg(feature = "metrics")]
        crate::telemetry::metrics::describe();
        Ok(config)
    }
}

const LONGEST_STORE_TIMEOUT: Duration = Duration::from_secs(5);
const CUSTOM: &str =
    "must not be `Stream` with `Fingerprinting::custom`, whose function needs the body";
const HOUR: u64 = 3600;
const MIB: usize = 1 << 20;
