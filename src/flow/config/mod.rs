//! The settings that all clones of a layer share.

mod checks;
pub(crate) mod error;
pub(crate) mod settings;

use std::{sync::Arc, time::Duration};

use http::{HeaderName, Method, StatusCode, request};

use crate::{
    fingerprint::Fingerprinter,
    key::{KeySyntax, RecordName, Scope},
    operation::{
        disposition::Dispositions, recovery::Recovery, request_name::RequestName,
        response_settings::ResponseSettings,
    },
    policy::{
        ContentDigest, Disconnect, OversizedBody, Requirement, StoreFailure,
        authorizer::ReplayAuthorizer, quota::QuotaSetting,
    },
    store::{OwnerTransition, Record},
    telemetry::log::Warnings,
};

#[cfg(all(feature = "sealing", feature = "tracing"))]
use crate::sealing::log_ids::LogIds;
#[cfg(feature = "sealing")]
use crate::{rejection::Rejection, sealing::names::NameDigests};

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
    pub(crate) max_uploads: usize,
    pub(crate) per_scope: PerScope,
    pub(crate) max_request_body: usize,
    pub(crate) request_body_timeout: Duration,
    pub(crate) content_digest: ContentDigest,
    pub(crate) oversized_body: OversizedBody,
    pub(crate) dispositions: Dispositions,
    pub(crate) recovery: Recovery,
    pub(crate) authorizer: Option<ReplayAuthorizer>,
    pub(crate) max_attempts: u32,
    pub(crate) store_failure: StoreFailure,
    pub(crate) disconnect: Disconnect,
    pub(crate) unknown_retention: Duration,
    pub(crate) heartbeat: Duration,
    pub(crate) max_run_time: Duration,
    pub(crate) quota: Option<QuotaSetting>,
    pub(crate) late_recording_timeout: Duration,
    pub(crate) max_late_recording_bytes: usize,
    /// What replaces scopes and keys in the store, if anything does.
    #[cfg(feature = "sealing")]
    pub(crate) names: Option<NameDigests>,
    #[cfg(all(feature = "sealing", feature = "tracing"))]
    pub(crate) log_ids: Option<LogIds>,
    pub(crate) responses: Arc<ResponseSettings>,
}

/// What one scope may take of the limits of a process, once more than half is taken. A
/// quarter of the limit if it is not set.
#[derive(Clone, Copy, Default)]
pub(crate) struct PerScope {
    pub(crate) waiters: Option<usize>,
    pub(crate) in_flight: Option<usize>,
    pub(crate) buffered_bytes: Option<usize>,
    pub(crate) uploads: Option<usize>,
}

/// What a body over `max_request_body` meets.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(crate) enum Oversized {
    Refuse,
    Stream { max_upload: u64 },
    RunUnguarded,
}

impl Oversized {
    /// Returns the largest body that this lets pass.
    pub(crate) fn max(self, config: &Config) -> u64 {
        match self {
            Self::Refuse => config.max_request_body as u64,
            Self::Stream { max_upload } => max_upload,
            Self::RunUnguarded => u64::MAX,
        }
    }
}

impl Config {
    /// `has_digest`: whether the request declares a digest that counts.
    pub(crate) fn oversized(&self, has_digest: bool) -> Oversized {
        match (self.content_digest, self.oversized_body) {
            (ContentDigest::Stream { max_upload }, _) if has_digest => {
                Oversized::Stream { max_upload }
            }
            (_, OversizedBody::Refuse) => Oversized::Refuse,
            (_, OversizedBody::RunUnguarded) => Oversized::RunUnguarded,
        }
    }

    pub(crate) fn lease(&self) -> Duration {
        self.responses.lease
    }

    pub(crate) fn store_timeout(&self) -> Duration {
        self.responses.store_timeout
    }

    pub(crate) fn warnings(&self) -> &Warnings {
        &self.responses.warnings
    }

    /// Returns the name of the record of the scope and the key that were sent.
    pub(crate) fn name(&self, sent: RecordName) -> RequestName {
        #[cfg(feature = "sealing")]
        if let Some(digests) = &self.names {
            return RequestName::digested(digests, sent);
        }
        RequestName::readable(sent)
    }

    /// Loads the key that seals responses. It is there before anything is claimed, so that
    /// no response of a run waits for it.
    #[cfg(feature = "sealing")]
    pub(super) async fn load_key(&self) -> Result<(), Rejection> {
        match &self.responses.sealing {
            Some(sealing) if sealing.seals() && sealing.current_if_loaded().is_none() => {
                let loaded = Box::pin(sealing.load()).await;
                loaded.map_err(|error| Rejection::sealing_key_missing(&error))
            }
            _ => Ok(()),
        }
    }

    pub(crate) fn mark_unknown(&self) -> OwnerTransition {
        OwnerTransition::MarkUnknown {
            retention: self.unknown_retention,
        }
    }

    /// Whether the operation of a record may start once more after an unknown outcome.
    pub(crate) fn has_attempts_left(&self, record: &Record) -> bool {
        record.takeovers.saturating_add(1) < self.max_attempts
    }
}
