//! The crate's events and metrics.

use std::{
    collections::{BTreeMap, BTreeSet},
    fmt,
    sync::{Arc, Mutex},
};

use metrics_util::debugging::{DebugValue, DebuggingRecorder, Snapshotter};
use tracing::{
    Level,
    field::{Field, Visit},
};
use tracing_subscriber::layer::{Context, SubscriberExt as _};

use crate::scan;

/// Listens to the events and metrics of this thread.
pub(crate) struct Told {
    events: Events,
    metrics: Snapshotter,
    _subscriber: tracing::subscriber::DefaultGuard,
    _recorder: metrics::LocalRecorderGuard<'static>,
}

impl Told {
    pub(crate) fn listen() -> Self {
        let events = Events::default();
        // The recorder is leaked, since its guard borrows it.
        let recorder = Box::leak(Box::new(DebuggingRecorder::new()));
        Self {
            events: events.clone(),
            metrics: recorder.snapshotter(),
            _subscriber: tracing::subscriber::set_default(
                tracing_subscriber::registry()
                    .with(events)
                    .with(scan::layer()),
            ),
            _recorder: metrics::set_default_local_recorder(recorder),
        }
    }

    /// The number of events of each outcome or notice, the count of each in the
    /// metrics, and the text of all events.
    pub(crate) fn so_far(
        &self,
    ) -> (
        BTreeMap<&'static str, u64>,
        BTreeMap<&'static str, u64>,
        String,
    ) {
        let mut text = String::new();
        let mut events = BTreeMap::new();
        for Event { fields, .. } in &*self.events.0.lock().unwrap() {
            text += &format!("{fields:?}\n");
            if let Some(name) = fields.get("outcome").or(fields.get("notice")) {
                *events.entry(known(name)).or_insert(0) += 1;
            }
        }
        let mut counts = BTreeMap::new();
        for (key, _, _, value) in self.metrics.snapshot().into_vec() {
            text += &format!("{key:?}\n");
            let labels: Vec<_> = key.key().labels().collect();
            let (metric, label) = (key.key().name(), labels[0]);
            assert_eq!(labels.len(), 1);
            assert!(
                matches!(
                    (metric, label.key()),
                    ("idempotency_requests_total", "outcome")
                        | ("idempotency_notices_total", "notice")
                        | ("idempotency_swept_total", "what")
                ),
                "{key:?}"
            );
            let DebugValue::Counter(count) = value else {
                panic!("not a counter: {key:?}");
            };
            *counts.entry(known(label.value())).or_insert(0) += count;
        }
        (events, counts, text)
    }

    /// The counted metrics without a unit or a description, and the names of the
    /// others.
    pub(crate) fn described(&self) -> Result<BTreeSet<String>, Vec<String>> {
        let counted = self.metrics.snapshot().into_vec().into_iter();
        let (described, bare): (Vec<_>, Vec<_>) = counted
            .map(|(key, unit, description, _)| {
                let is_described = unit.is_some() && description.is_some();
                (key.key().name().to_owned(), is_described)
            })
            .partition(|(_, is_described)| *is_described);
        match bare.is_empty() {
            true => Ok(described.into_iter().map(|(name, _)| name).collect()),
            false => Err(bare.into_iter().map(|(name, _)| name).collect()),
        }
    }

    /// The warnings of the crate, in order.
    pub(crate) fn warnings(&self) -> Vec<Event> {
        let events = self.events.0.lock().unwrap();
        let warnings = events.iter().filter(|event| event.level == Level::WARN);
        warnings.cloned().collect()
    }
}

/// The only labels that a metric may have.
fn known(name: &str) -> &'static str {
    [
        "recorded",
        "released",
        "unknown",
        "streamed",
        "unrecorded",
        "unguarded",
        "replayed",
        "left",
        "unready",
        "key-missing",
        "key-invalid",
        "key-stale",
        "caller-unknown",
        "body-too-large",
        "body-timeout",
        "body-invalid",
        "digest-invalid",
        "digest-mismatch",
        "key-reused",
        "request-in-progress",
        "outcome-unknown",
        "response-not-replayable",
        "replay-refused",
        "authorization-unavailable",
        "store-unavailable",
        "overloaded",
        "quota-exceeded",
        "scope-overloaded",
        "draining",
        "rolled-back",
        "handler-panicked",
        "callback-panicked",
        "runtime-missing",
        "client-gone",
        "superseded",
        "corrupt",
        "recorded-late",
        "gave-up-recording",
        "gave-up-withdrawing",
        "unknown-expired",
        "tombstone",
        "stream-broken",
        "upload-unverified",
        "uncommitted",
        "commit-found",
        "abort-found",
        "removed",
        "removed-unknown",
        "marked-unknown",
    ]
    .into_iter()
    .find(|known| *known == name)
    .unwrap_or_else(|| panic!("not a known label: {name}"))
}

/// An event of the crate, or a span.
#[derive(Clone, Debug)]
pub(crate) struct Event {
    level: Level,
    fields: BTreeMap<&'static str, String>,
}

impl Event {
    /// Empty if it has no such field.
    pub(crate) fn field(&self, name: &str) -> &str {
        self.fields.get(name).map_or("", String::as_str)
    }

    pub(crate) fn message(&self) -> &str {
        self.field("message")
    }
}

#[derive(Clone, Default)]
struct Events(Arc<Mutex<Vec<Event>>>);

impl<S: tracing::Subscriber> tracing_subscriber::Layer<S> for Events {
    fn on_event(&self, event: &tracing::Event<'_>, _: Context<'_, S>) {
        if event.metadata().target().starts_with("tower_idempotency") {
            let mut fields = Fields::default();
            event.record(&mut fields);
            self.push(*event.metadata().level(), fields);
        }
    }

    fn on_new_span(
        &self,
        span: &tracing::span::Attributes<'_>,
        _: &tracing::span::Id,
        _: Context<'_, S>,
    ) {
        if span.metadata().target().starts_with("tower_idempotency") {
            let mut fields = Fields::default();
            span.record(&mut fields);
            self.push(*span.metadata().level(), fields);
        }
    }
}

impl Events {
    fn push(&self, level: Level, Fields(fields): Fields) {
        self.0.lock().unwrap().push(Event { level, fields });
    }
}

#[derive(Default)]
struct Fields(BTreeMap<&'static str, String>);

impl Visit for Fields {
    fn record_debug(&mut self, field: &Field, value: &dyn fmt::Debug) {
        self.0.insert(field.name(), format!("{value:?}"));
    }

    fn record_str(&mut self, field: &Field, value: &str) {
        self.0.insert(field.name(), value.to_owned());
    }
}
