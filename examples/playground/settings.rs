//! The settings in the environment.
//!
//! | variable | value | default |
//! |---|---|---|
//! | `PORT` | 0 picks one | 0 |
//! | `STORE` | `memory`, `memory:RECORDS` with a bound, `sqlite:PATH`, `postgres://…`, `redis://…`, `redis+cluster://…`, `redis+sentinel://…`, `etcd://HOST:PORT` or `etcd://HOST:PORT/PREFIX` | `memory` |
//! | `SQLITE_PAGES` | the most pages the file may have; what is there already stays | SQLite's |
//! | `POOLER` | `1` if a pooler stands between, one connection for each transaction | `0` |
//! | `RUNS` | the file that each run of a handler adds a line to | in memory |
//! | `KEY` | `required`, `optional` | `required` |
//! | `SYNTAX` | `compat`, `strict`, `uuid` | `compat` |
//! | `FINGERPRINT` | `bytes`, `json`, `multipart` | `bytes` |
//! | `LEASE_MS`, `RETENTION_MS` | the lease follows a shorter retention | the layer's |
//! | `WAIT_MS` | 0 does not wait | 0 |
//! | `RECOVERY` | `refuse`, `rerun` | `refuse` |
//! | `ATTEMPTS` | how many runs in a row may end without an answer | the layer's |
//! | `RECORD` | `default`, `everything` or `success`, and lists such as `release:400,403;unknown:500` | `default` |
//! | `KEEP_HEADERS` | a list of the only headers to keep | the layer's |
//! | `KEEP_COOKIES` | `1` keeps `Set-Cookie` too | `0` |
//! | `STORE_FAILURE` | `refuse`, `run` | `refuse` |
//! | `STORE_TIMEOUT_MS` | how long the layer waits for an answer of the store, at most half of the lease | the layer's |
//! | `BODY_LIMIT`, `RESPONSE_LIMIT` | bytes | the layer's |
//! | `OUTER_BODY_LIMIT` | bytes, a limit outside of the layer | none |
//! | `TIMEOUT_MS` | a timeout outside of the layer, answered 504 | none |
//! | `SWEEP_MS` | the time between two sweeps | no sweeps |
//! | `GRACE_MS` | how long a stop may take | 25000 |
//!
//! `#PREFIX` behind an address of Redis is what its keys begin with. An empty variable
//! counts as unset.

use std::{env, fmt, path::PathBuf, time::Duration};

use http::{HeaderName, StatusCode};
use tower_idempotency::{
    BuildError, Disposition, Dispositions, DynStore, Fingerprinting, IdempotencyLayer, KeptHeaders,
    KeySyntax, Recovery, Release, StoreFailure,
};

use crate::{caller, stores::StoreAddress};

pub(crate) struct Settings {
    pub(crate) port: u16,
    pub(crate) store: StoreAddress,
    pub(crate) is_pooled: bool,
    pub(crate) pages: Option<u32>,
    pub(crate) runs: Option<PathBuf>,
    pub(crate) outer_body_limit: Option<usize>,
    pub(crate) timeout: Option<Duration>,
    pub(crate) sweep: Option<Duration>,
    pub(crate) grace: Duration,
    key_required: bool,
    syntax: KeySyntax,
    fingerprint: Fingerprinting,
    lease: Option<Duration>,
    retention: Option<Duration>,
    wait: Duration,
    recovery: Recovery,
    attempts: Option<u32>,
    dispositions: Dispositions,
    kept_headers: KeptHeaders,
    store_failure: StoreFailure,
    store_timeout: Option<Duration>,
    body_limit: Option<usize>,
    max_response_body: Option<usize>,
}

impl Settings {
    pub(crate) fn from_environment() -> Result<Self, Malformed> {
        let lease = read("LEASE_MS", milliseconds)?;
        let retention = read("RETENTION_MS", milliseconds)?;
        let mut kept_headers = match read("KEEP_HEADERS", headers)? {
            Some(names) => KeptHeaders::only(names),
            None => KeptHeaders::all_but_transient(),
        };
        if choice("KEEP_COOKIES", &[("0", false), ("1", true)])? {
            kept_headers = kept_headers.with_cookies();
        }
        Ok(Self {
            port: read("PORT", number)?.unwrap_or(0),
            store: read("STORE", StoreAddress::parse)?
                .unwrap_or(StoreAddress::Memory { records: None }),
            is_pooled: choice("POOLER", &[("0", false), ("1", true)])?,
            pages: read("SQLITE_PAGES", number)?,
            runs: read("RUNS", |path| Ok(PathBuf::from(path)))?,
            outer_body_limit: read("OUTER_BODY_LIMIT", number)?,
            timeout: read("TIMEOUT_MS", milliseconds)?,
            sweep: read("SWEEP_MS", milliseconds)?,
            grace: read("GRACE_MS", milliseconds)?.unwrap_or(Duration::from_secs(25)),
            key_required: choice("KEY", &[("required", true), ("optional", false)])?,
            syntax: choice(
                "SYNTAX",
                &[
                    ("compat", KeySyntax::compat()),
                    ("strict", KeySyntax::strict()),
                    ("uuid", KeySyntax::compat().uuid()),
                ],
            )?,
            fingerprint: choice(
                "FINGERPRINT",
                &[
                    ("bytes", Fingerprinting::bytes()),
                    ("json", Fingerprinting::json()),
                    ("multipart", Fingerprinting::multipart()),
                ],
            )?,
            // The layer refuses a retention shorter than the lease, so a short
            // `RETENTION_MS` shortens the lease too.
            lease: lease.or(retention.map(|retention| retention.min(DEFAULT_LEASE))),
            retention,
            wait: read("WAIT_MS", milliseconds)?.unwrap_or_default(),
            recovery: choice(
                "RECOVERY",
                &[("refuse", Recovery::Refuse), ("rerun", Recovery::Rerun)],
            )?,
            attempts: read("ATTEMPTS", number)?,
            dispositions: read("RECORD", dispositions)?.unwrap_or_default(),
            kept_headers,
            store_failure: choice(
                "STORE_FAILURE",
                &[
                    ("refuse", StoreFailure::Refuse),
                    ("run", StoreFailure::RunUnguarded),
                ],
            )?,
            store_timeout: read("STORE_TIMEOUT_MS", milliseconds)?,
            body_limit: read("BODY_LIMIT", number)?,
            max_response_body: read("RESPONSE_LIMIT", number)?,
        })
    }

    pub(crate) fn layer(&self, store: DynStore) -> Result<IdempotencyLayer<DynStore>, Malformed> {
        let mut builder = if self.key_required {
            IdempotencyLayer::required(store, caller::scope)
        } else {
            IdempotencyLayer::optional(store, caller::scope)
        };
        builder = builder
            .key_syntax(self.syntax.clone())
            .fingerprint(self.fingerprint.clone())
            .wait(self.wait)
            .recovery(self.recovery.clone())
            .dispositions(self.dispositions.clone())
            .kept_headers(self.kept_headers.clone())
            .store_failure(self.store_failure);
        if let Some(lease) = self.lease {
            builder = builder.lease(lease);
        }
        if let Some(retention) = self.retention {
            builder = builder.retention(retention);
        }
        if let Some(attempts) = self.attempts {
            builder = builder.max_attempts(attempts);
        }
        if let Some(bound) = self.store_timeout {
            builder = builder.store_timeout(bound);
        }
        if let Some(bytes) = self.body_limit {
            builder = builder.max_request_body(bytes);
        }
        if let Some(bytes) = self.max_response_body {
            builder = builder.max_response_body(bytes);
        }
        builder.build().map_err(|error| refused(&error))
    }
}

/// An invalid environment variable, and the reason.
#[derive(Debug)]
pub(crate) struct Malformed {
    variable: &'static str,
    fault: String,
}

impl Malformed {
    pub(crate) fn new(variable: &'static str, fault: impl fmt::Display) -> Self {
        Self {
            variable,
            fault: fault.to_string(),
        }
    }
}

impl fmt::Display for Malformed {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}: {}", self.variable, self.fault)
    }
}

impl std::error::Error for Malformed {}

/// The variable behind a setting that the layer refused.
fn refused(error: &BuildError) -> Malformed {
    let variable = match error.setting() {
        "retention" => "RETENTION_MS",
        "wait" => "WAIT_MS",
        "store_timeout" => "STORE_TIMEOUT_MS",
        "max_request_body" => "BODY_LIMIT",
        "max_response_body" => "RESPONSE_LIMIT",
        // The heartbeat and the bounds that a lease must fit follow from it.
        _ => "LEASE_MS",
    };
    Malformed::new(variable, error)
}

fn read<T>(
    variable: &'static str,
    parse: impl FnOnce(&str) -> Result<T, String>,
) -> Result<Option<T>, Malformed> {
    match env::var(variable) {
        Ok(text) if text.is_empty() => Ok(None),
        Ok(text) => parse(&text)
            .map(Some)
            .map_err(|fault| Malformed::new(variable, fault)),
        Err(env::VarError::NotPresent) => Ok(None),
        Err(error) => Err(Malformed::new(variable, error)),
    }
}

/// One of several values; the first if the variable is unset.
fn choice<T: Clone, const N: usize>(
    variable: &'static str,
    choices: &[(&str, T); N],
) -> Result<T, Malformed> {
    let chosen = read(variable, |text| {
        choices
            .iter()
            .find(|(word, _)| *word == text)
            .map(|(_, value)| value.clone())
            .ok_or_else(|| {
                let words: Vec<_> = choices.iter().map(|(word, _)| *word).collect();
                format!("{text:?} is none of {}", words.join(", "))
            })
    })?;
    Ok(chosen.unwrap_or_else(|| choices[0].1.clone()))
}

fn number<T: std::str::FromStr<Err: fmt::Display>>(text: &str) -> Result<T, String> {
    text.parse().map_err(|error| format!("{text:?}: {error}"))
}

fn milliseconds(text: &str) -> Result<Duration, String> {
    number(text).map(Duration::from_millis)
}

fn headers(list: &str) -> Result<Vec<HeaderName>, String> {
    list.split(',').map(|name| number(name.trim())).collect()
}

/// Presets and lists joined by `;`. Each changes the result of those before.
fn dispositions(text: &str) -> Result<Dispositions, String> {
    let mut table = Dispositions::standard();
    for part in text.split(';') {
        table = match part.split_once(':') {
            None => match part {
                "default" => Dispositions::standard(),
                "everything" => Dispositions::everything(),
                "success" => Dispositions::only_success(),
                _ => return Err(format!("{part:?} is none of default, everything, success")),
            },
            Some((word, statuses)) => {
                let disposition = match word {
                    "record" => Disposition::Record,
                    "release" => Disposition::Release(Release::AnyRequest),
                    "unknown" => Disposition::Unknown,
                    _ => return Err(format!("{word:?} is none of record, release, unknown")),
                };
                let mut statuses = statuses.split(',').map(number::<StatusCode>);
                statuses.try_fold(table, |table, status| {
                    Ok::<_, String>(table.status(status?, disposition))
                })?
            }
        };
    }
    Ok(table)
}

/// The layer's default.
const DEFAULT_LEASE: Duration = Duration::from_secs(30);
