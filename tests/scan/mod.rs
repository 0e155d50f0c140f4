//! The search of a whole test run for secrets.
//!
//! The fixtures call [`sent`] for each request that a layer guards. From then on the process
//! compares what the crate shows with the keys, scopes, tokens and cookies of its requests:
//! each field of its events and spans at TRACE, each label of its metrics, and each problem in an
//! answer. `SCAN` names the directory for the results, and `tests/run` reads them. Without
//! it, nothing is compared.
//!
//! Only secrets of six characters with a digit and a letter beyond `f` are compared: no word
//! of a message is like that, and no number.
//!
//! # What it does not cover
//!
//! - Bodies and short secrets. `tests/leaks` has canaries in all
//!   parts of its requests, and searches all output of its processes and the stores.
//! - Processes that are no tests, such as the playground, whose output `tests/leaks` reads.
//! - Labels of metrics while a test has a recorder of its own.
//! - Tests of stores and messages without requests, and packages other than `tests`.

#![allow(dead_code, reason = "not every test binary uses all of it")]

use std::{
    collections::HashSet,
    env, fmt,
    fs::OpenOptions,
    io::Write as _,
    path::PathBuf,
    sync::{Mutex, OnceLock},
    thread,
};

use http::request;
use metrics::{Counter, Gauge, Histogram, Key, KeyName, Metadata, Recorder, SharedString, Unit};
use tracing::{
    Event, Subscriber,
    field::{Field, Visit},
    span::{Attributes, Id, Record},
};
use tracing_subscriber::{
    Layer,
    filter::filter_fn,
    layer::{Context, SubscriberExt as _},
    registry::LookupSpan,
};

/// Notes the secrets of a request.
pub(crate) fn sent(parts: &request::Parts) {
    if !is_on() {
        return;
    }
    for name in ["idempotency-key", "x-account", "authorization", "cookie"] {
        for line in parts.headers.get_all(name) {
            let line = String::from_utf8_lossy(line.as_bytes());
            secret(line.trim().trim_matches('"'));
            secret(line.trim_start_matches("Bearer "));
        }
    }
}

/// Notes a secret.
pub(crate) fn secret(text: &str) {
    if let Some(scan) = scan()
        && is_recognisable(text)
        && scan.secrets.lock().unwrap().insert(text.to_owned())
    {
        scan.write("secrets", text);
    }
}

/// Compares a problem of an answer with the secrets.
pub(crate) fn answered(headers: &http::HeaderMap, body: &[u8]) {
    let is_problem = |value: &http::HeaderValue| value == "application/problem+json";
    if is_on() && headers.get("content-type").is_some_and(is_problem) {
        compare("problem", &String::from_utf8_lossy(body));
        for value in headers.values() {
            compare(
                "header of a problem",
                &String::from_utf8_lossy(value.as_bytes()),
            );
        }
    }
}

/// A layer for a subscriber of a test, which the one of the process does not reach.
pub(crate) fn layer<S: Subscriber + for<'s> LookupSpan<'s>>() -> impl Layer<S> {
    is_on().then(|| {
        let is_own = |metadata: &tracing::Metadata<'_>| metadata.target().starts_with(TARGET);
        Shown.with_filter(filter_fn(is_own))
    })
}

/// Compares all fields of events and spans.
struct Shown;

impl<S: Subscriber> Layer<S> for Shown {
    fn on_new_span(&self, attributes: &Attributes<'_>, _: &Id, _: Context<'_, S>) {
        attributes.record(&mut Values);
    }

    fn on_record(&self, _: &Id, values: &Record<'_>, _: Context<'_, S>) {
        values.record(&mut Values);
    }

    fn on_event(&self, event: &Event<'_>, _: Context<'_, S>) {
        event.record(&mut Values);
    }
}

struct Values;

impl Visit for Values {
    fn record_debug(&mut self, field: &Field, value: &dyn fmt::Debug) {
        compare(field.name(), &format!("{value:?}"));
    }

    fn record_str(&mut self, field: &Field, value: &str) {
        compare(field.name(), value);
    }
}

/// Compares the labels of all metrics, and counts nothing.
struct Labels;

impl Labels {
    fn compare(key: &Key) {
        for label in key.labels() {
            compare(label.key(), label.value());
        }
    }
}

impl Recorder for Labels {
    fn describe_counter(&self, _: KeyName, _: Option<Unit>, _: SharedString) {}
    fn describe_gauge(&self, _: KeyName, _: Option<Unit>, _: SharedString) {}
    fn describe_histogram(&self, _: KeyName, _: Option<Unit>, _: SharedString) {}

    fn register_counter(&self, key: &Key, _: &Metadata<'_>) -> Counter {
        Self::compare(key);
        Counter::noop()
    }

    fn register_gauge(&self, key: &Key, _: &Metadata<'_>) -> Gauge {
        Self::compare(key);
        Gauge::noop()
    }

    fn register_histogram(&self, key: &Key, _: &Metadata<'_>) -> Histogram {
        Self::compare(key);
        Histogram::noop()
    }
}

struct Scan {
    directory: PathBuf,
    secrets: Mutex<HashSet<String>>,
}

impl Scan {
    fn write(&self, file: &str, line: &str) {
        let path = self.directory.join(file);
        let file = OpenOptions::new().create(true).append(true).open(path);
        // One call, so that the lines of processes do not mix.
        let line = format!("{}\n", line.escape_debug());
        file.unwrap().write_all(line.as_bytes()).unwrap();
    }
}

/// The first call begins to listen.
fn scan() -> Option<&'static Scan> {
    static SCAN: OnceLock<Option<Scan>> = OnceLock::new();
    let scan = SCAN.get_or_init(|| {
        let directory = env::var_os("SCAN")?.into();
        Some(Scan {
            directory,
            secrets: Mutex::default(),
        })
    });
    static LISTENING: OnceLock<()> = OnceLock::new();
    if scan.is_some() && LISTENING.set(()).is_ok() {
        // Another fixture of this process may have been first.
        let _ =
            tracing::subscriber::set_global_default(tracing_subscriber::registry().with(layer()));
        let _ = metrics::set_global_recorder(Labels);
    }
    scan.as_ref()
}

fn is_on() -> bool {
    scan().is_some()
}

fn compare(place: &str, text: &str) {
    let Some(scan) = scan() else { return };
    scan.write("values", text);
    let secrets = scan.secrets.lock().unwrap();
    let shown = |secret: &&String| text.contains(&***secret);
    for secret in secrets.iter().filter(shown) {
        let thread = thread::current();
        let test = thread.name().unwrap_or_default();
        scan.write("leaks", &format!("{test}: {place} shows {secret}: {text}"));
    }
}

fn is_recognisable(secret: &str) -> bool {
    let has = |is: fn(char) -> bool| secret.contains(is);
    let beyond_hex = |letter: char| matches!(letter.to_ascii_lowercase(), 'g'..='z');
    secret.len() >= 6 && has(|digit| digit.is_ascii_digit()) && has(beyond_hex)
}

const TARGET: &str = "tower_idempotency";
