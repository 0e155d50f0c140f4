//! The limits of the settings.

use std::time::Duration;

use super::{Config, error::BuildError};
use crate::policy::{ContentDigest, OversizedBody, Requirement, quota::QuotaSetting};

/// Fails with the reason unless the condition of a setting holds.
macro_rules! ensure {
    ($setting:expr => $holds:expr, $($reason:tt)+) => {
        if !$holds {
            return Err(BuildError::new($setting, format!($($reason)+)));
        }
    };
}

/// Refuses settings that are not possible.
pub(super) fn check(config: &Config) -> Result<(), BuildError> {
    check_durations(config)?;
    check_limits(config)?;
    if let Some(fault) = config.syntax.fault() {
        return Err(BuildError::new("key_syntax", fault));
    }
    check_window(config)?;
    for method in &config.methods {
        ensure!("methods" => !method.is_safe(), "must be unsafe, got {method}");
    }
    let guards_any = !config.methods.is_empty() || config.guard_if.is_some();
    ensure!("methods" => guards_any, "must name at least one method, got none");
    let (header, marker) = (&config.header, &config.responses.marker);
    ensure!("replay_marker" => marker != header,
        "must differ from `header`, got {marker} for both");
    let mismatch = config.mismatch.as_u16();
    ensure!("mismatch_status" => matches!(mismatch, 400 | 409 | 422),
        "must be 400, 409 or 422, got {mismatch}");
    Ok(())
}

fn check_durations(config: &Config) -> Result<(), BuildError> {
    let (lease, heartbeat, wait) = (config.lease(), config.heartbeat, config.wait);
    let store_timeout = config.store_timeout();
    let others = [
        ("lease", lease),
        ("heartbeat", heartbeat),
        ("request_body_timeout", config.request_body_timeout),
        ("response_body_timeout", config.responses.body_timeout),
        ("store_timeout", store_timeout),
        ("late_recording_timeout", config.late_recording_timeout),
    ];
    let run_time = ("max_run_time", config.max_run_time);
    let authorizer = config.authorizer.as_ref();
    let authorizer = authorizer.map(|authorizer| ("authorize_replay", authorizer.longest()));
    let all = retentions(config).chain([run_time]).chain(others);
    for (setting, time) in all.chain(authorizer) {
        ensure!(setting => time >= SHORTEST, "must be at least {SHORTEST:?}, got {time:?}");
        ensure!(setting => time <= TEN_YEARS, "must be at most 10 years, got {time:?}");
    }
    ensure!("wait" => wait <= TEN_YEARS, "must be at most 10 years, got {wait:?}");
    let three = heartbeat.saturating_mul(3);
    ensure!("lease" => lease >= three,
        "must be at least 3 × `heartbeat` ({three:?}), got {lease:?}");
    ensure!("store_timeout" => lease >= store_timeout.saturating_mul(2),
        "must be at most half of `lease` ({:?}), got {store_timeout:?}", lease / 2);
    for (setting, time) in retentions(config).chain([run_time]) {
        ensure!(setting => time >= lease, "must be at least `lease` ({lease:?}), got {time:?}");
    }
    Ok(())
}

fn retentions(config: &Config) -> impl Iterator<Item = (&'static str, Duration)> {
    let by_status = config.responses.retention_by_status.values();
    [
        ("retention", config.responses.retention),
        ("unknown_retention", config.unknown_retention),
    ]
    .into_iter()
    .chain(by_status.map(|retention| ("retention_for", *retention)))
}

/// A key that outlives its record would run its operation a second time.
fn check_window(config: &Config) -> Result<(), BuildError> {
    let window = config.syntax.window().unwrap_or_default();
    for (setting, retention) in retentions(config) {
        ensure!("key_syntax" => window <= retention,
            "must have a window of UUIDv7 keys of at most `{setting}` ({retention:?}), got {window:?}");
    }
    Ok(())
}

fn check_limits(config: &Config) -> Result<(), BuildError> {
    let (buffered, body) = (config.max_buffered_bytes, config.max_request_body);
    for (setting, limit) in [
        ("max_waiters", config.max_waiters),
        ("max_in_flight", config.max_in_flight),
        ("max_buffered_bytes", buffered),
        ("max_uploads", config.max_uploads),
        ("max_late_recording_bytes", config.max_late_recording_bytes),
    ] {
        ensure!(setting => (1..=LARGEST_LIMIT).contains(&limit),
            "must be 1 to {LARGEST_LIMIT}, got {limit}");
    }
    if let ContentDigest::Stream { max_upload } = config.content_digest {
        ensure!("content_digest" => max_upload >= body as u64,
            "must have a `max_upload` of at least `max_request_body` ({body}), got {max_upload}");
    }
    ensure!("oversized_body" => config.oversized_body == OversizedBody::Refuse
            || config.requirement == Requirement::Optional,
        "must be `Refuse` where keys are required, got `RunUnguarded`");
    if let Some(QuotaSetting::Fixed(quota)) = config.quota {
        ensure!("quota" => quota.records > 0 && quota.bytes > 0,
            "must allow at least 1 record and 1 byte, got {quota:?}");
    }
    ensure!("max_attempts" => config.max_attempts > 0, "must be at least 1, got 0");
    ensure!("max_buffered_bytes" => buffered >= body,
        "must be at least `max_request_body` ({body}), got {buffered}");
    let per_scope = &config.per_scope;
    for (setting, limit, max) in [
        (
            "max_waiters_per_scope",
            per_scope.waiters,
            config.max_waiters,
        ),
        (
            "max_in_flight_per_scope",
            per_scope.in_flight,
            config.max_in_flight,
        ),
        (
            "max_uploads_per_scope",
            per_scope.uploads,
            config.max_uploads,
        ),
        (
            "max_buffered_bytes_per_scope",
            per_scope.buffered_bytes,
            buffered,
        ),
    ] {
        let limit = limit.unwrap_or(max);
        let of = setting.trim_end_matches("_per_scope");
        ensure!(setting => (1..=max).contains(&limit),
            "must be 1 to `{of}` ({max}), got {limit}");
    }
    let of_scope = per_scope.buffered_bytes.unwrap_or(body);
    ensure!("max_buffered_bytes_per_scope" => of_scope >= body,
        "must be at least `max_request_body` ({body}), got {of_scope}");
    // A record's lengths are 32-bit numbers, and stores limit a value to one gibibyte.
    for (setting, limit) in [
        ("max_request_body", body),
        ("max_response_body", config.responses.max_body),
    ] {
        ensure!(setting => limit <= LARGEST_BODY,
            "must be at most {LARGEST_BODY} bytes, got {limit}");
    }
    Ok(())
}

/// Far below the range of the stores' clocks.
const TEN_YEARS: Duration = Duration::from_secs(10 * 365 * 24 * 3600);
const SHORTEST: Duration = Duration::from_millis(1);
const LARGEST_BODY: usize = 256 << 20;
const LARGEST_LIMIT: usize = u32::MAX as usize >> 3;
