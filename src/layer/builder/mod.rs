//! The builder of a layer: its settings, their defaults and their limits.

mod checks;
mod error;
mod limits;
mod records;
mod refusals;
mod requests;
mod runs;
#[cfg(feature = "sealing")]
mod sealing;

use std::{fmt, sync::Arc, time::Duration};

use http::{HeaderValue, Method, StatusCode, request};

use self::checks::check;
#[cfg(feature = "guard")]
use self::checks::ensure;
pub use self::error::BuildError;
#[cfg(feature = "sealing")]
use crate::sealing::settings::Sealing;
use crate::{
    fingerprint::{Fingerprinter, Fingerprinting},
    flow::config::{Config, PerScope, ScopeFn},
    key::{KeySyntax, Scope},
    layer::IdempotencyLayer,
    operation::{
        disposition::Dispositions, recovery::Recovery, response_settings::ResponseSettings,
    },
    policy::{ContentDigest, Disconnect, OversizedBody, Requirement, StoreFailure},
    store::Store,
};

/// Builds an [`IdempotencyLayer`].
///
/// Made by [`IdempotencyLayer::required`] and [`IdempotencyLayer::optional`], which
/// ask for the two settings that have no default. Every other setting has the default
/// that its method names.
///
/// ```
/// use std::time::Duration;
/// use tower_idempotency::{IdempotencyLayer, KeySyntax, MemoryStore, Scope};
///
/// # fn main() -> Result<(), Box<dyn std::error::Error>> {
/// let layer = IdempotencyLayer::required(MemoryStore::new(), |_| Some(Scope::single_tenant()))
///     .key_syntax(KeySyntax::compat().uuid())
///     .wait(Duration::from_secs(2))
///     .retention(Duration::from_secs(48 * 3600))
///     .build()?;
/// # Ok(())
/// # }
/// ```
#[must_use = "a builder does nothing until it is built"]
pub struct IdempotencyBuilder<S> {
    store: S,
    config: Config,
    fingerprinting: Fingerprinting,
    earlier: Vec<Fingerprinting>,
    heartbeat: Option<Duration>,
    store_timeout: Option<Duration>,
    documentation: Option<String>,
}

/// The constructors of a layer, which return its builder.
impl<S: Store> IdempotencyLayer<S> {
    /// Guards requests that have a key. Requests without one receive 400
    /// `key-missing`.
    ///
    /// `scope` returns whose key it is, from what an outer layer found out about the
    /// caller. `None` refuses the request with 403 `caller-unknown`. Take the caller's
    /// identity, never its credential: a token that is refreshed between two attempts
    /// would run the operation twice.
    ///
    /// Nested routers shorten the path. With the feature `axum`, the original one is
    /// read from the `OriginalUri` of axum 0.8. Without the feature, and with another
    /// version of axum, the layer must stand outside of nested routers; see
    /// [`Fingerprinting`](Fingerprinting#path).
    pub fn required(
        store: S,
        scope: impl Fn(&request::Parts) -> Option<Scope> + Send + Sync + 'static,
    ) -> IdempotencyBuilder<S> {
        IdempotencyBuilder::new(store, Arc::new(scope), Requirement::Required)
    }

    /// Guards requests that have a key. Requests without one run unguarded.
    ///
    /// `scope` is that of [`required`](Self::required).
    pub fn optional(
        store: S,
        scope: impl Fn(&request::Parts) -> Option<Scope> + Send + Sync + 'static,
    ) -> IdempotencyBuilder<S> {
        IdempotencyBuilder::new(store, Arc::new(scope), Requirement::Optional)
    }
}

impl<S: Store> IdempotencyBuilder<S> {
    fn new(store: S, scope: ScopeFn, requirement: Requirement) -> Self {
        Self {
            store,
            fingerprinting: Fingerprinting::bytes(),
            earlier: Vec::new(),
            heartbeat: None,
            store_timeout: None,
            documentation: None,
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

    fn responses(&mut self) -> &mut ResponseSettings {
        Arc::make_mut(&mut self.config.responses)
    }

    /// Returns the layer.
    ///
    /// With the feature `metrics`, it describes the crate's metrics to the recorder. One
    /// that is installed later counts them without a description.
    ///
    /// # Errors
    ///
    /// A [`BuildError`] names the first setting that is refused, its limit and its value:
    ///
    /// - a duration that is zero, overflows or contradicts another;
    /// - a limit of zero;
    /// - a safe method;
    /// - bodies that stream, where a function needs them;
    /// - a required key, and bodies that run unguarded;
    /// - a lease shorter than three heartbeats;
    /// - a window of UUIDv7 keys longer than a retention;
    /// - a `Sealing` without the name of a table, or with two keys of one id.
    pub fn build(self) -> Result<IdempotencyLayer<S>, BuildError> {
        let mut config = self.config;
        let documentation = self.documentation.as_deref().map(link).transpose()?;
        let responses = Arc::make_mut(&mut config.responses);
        responses.renderer.documentation = documentation;
        responses.store_timeout = self
            .store_timeout
            .unwrap_or_else(|| LONGEST_STORE_TIMEOUT.min(responses.lease / 3));
        config.heartbeat = self.heartbeat.unwrap_or(responses.lease / 3);
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
        if let Some(fault) = responses.sealing.as_ref().and_then(Sealing::fault) {
            return Err(BuildError::new("sealing", fault));
        }
        config.fingerprinter = Fingerprinter::new(self.fingerprinting, self.earlier);
        check(&config)?;
        #[cfg(feature = "metrics")]
        crate::telemetry::metrics::describe();
        Ok(IdempotencyLayer::new(self.store, config))
    }
}

impl<S> fmt::Debug for IdempotencyBuilder<S> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("IdempotencyBuilder").finish_non_exhaustive()
    }
}

/// For the builder of a guard.
#[cfg(feature = "guard")]
impl<S: Store> IdempotencyBuilder<S> {
    pub(crate) fn build_guard(mut self, schema: String) -> Result<IdempotencyLayer<S>, BuildError> {
        let length = schema.len();
        ensure!("schema" => length <= LONGEST_SCHEMA,
            "must have a name of at most {LONGEST_SCHEMA} bytes, got {length}");
        self.responses().schema = Some(schema);
        self.build().map_err(|error| match error.setting {
            "max_response_body" => BuildError::new("max_value", error.reason),
            _ => error,
        })
    }
}

fn link(url: &str) -> Result<HeaderValue, BuildError> {
    let is_sound = !url.is_empty() && !url.contains(['<', '>', ' ']);
    Some(format!("<{url}>; rel=\"describedby\""))
        .filter(|_| is_sound)
        .and_then(|link| HeaderValue::try_from(link).ok())
        .ok_or_else(|| BuildError::new("documentation", format!("must be a URL, got {url:?}")))
}

const HOUR: u64 = 3600;
const CUSTOM: &str =
    "must not be `Stream` with `Fingerprinting::custom`, whose function needs the body";
const MIB: usize = 1 << 20;
const LONGEST_STORE_TIMEOUT: Duration = Duration::from_secs(5);
#[cfg(feature = "guard")]
const LONGEST_SCHEMA: usize = u8::MAX as usize;
