//! What happened, in its order.

use std::{
    collections::{BTreeMap, VecDeque},
    sync::{Arc, Mutex, MutexGuard, PoisonError},
    time::{SystemTime, UNIX_EPOCH},
};

use futures_util::{Stream, stream};
use serde::{Deserialize, Serialize};
use tokio::sync::watch;

/// Something that a process says, or that happens between two processes.
///
/// It is an event of tracing of the process, whose message and fields these are.
#[derive(Clone, Debug, Default, Deserialize, Serialize)]
pub(crate) struct Event {
    /// In milliseconds since 1970.
    #[serde(skip_deserializing)]
    pub(crate) at: u128,
    #[serde(skip_deserializing)]
    pub(crate) process: &'static str,
    #[serde(rename(deserialize = "message"))]
    pub(crate) what: String,
    pub(crate) cart: Option<String>,
    pub(crate) operation: Option<String>,
    pub(crate) attempt: Option<u32>,
    pub(crate) status: Option<u16>,
    /// Where the process listens.
    #[serde(skip_serializing)]
    pub(crate) address: Option<std::net::SocketAddr>,
}

impl Event {
    pub(crate) fn of(process: &'static str, what: &str) -> Self {
        Self {
            process,
            what: what.to_owned(),
            ..Self::default()
        }
    }
}

/// The last events, numbered from 1.
#[derive(Clone, Default)]
pub(crate) struct Timeline {
    shared: Arc<Shared>,
}

#[derive(Default)]
struct Shared {
    events: Mutex<Events>,
    /// The number of the newest event.
    newest: watch::Sender<usize>,
}

#[derive(Default)]
struct Events {
    last: VecDeque<Event>,
    /// How often each process has said what, since the start.
    counts: BTreeMap<(&'static str, String), usize>,
}

impl Timeline {
    pub(crate) fn add(&self, mut event: Event) {
        let now = SystemTime::now().duration_since(UNIX_EPOCH);
        event.at = now.unwrap_or_default().as_millis();
        let mut events = self.events();
        if events.last.len() == MOST {
            events.last.pop_front();
        }
        *events
            .counts
            .entry((event.process, event.what.clone()))
            .or_default() += 1;
        events.last.push_back(event);
        self.shared.newest.send_modify(|newest| *newest += 1);
    }

    /// How often a process has said this, since the start.
    pub(crate) fn count(&self, process: &'static str, what: &str) -> usize {
        let counts = &self.events().counts;
        counts
            .get(&(process, what.to_owned()))
            .copied()
            .unwrap_or(0)
    }

    /// The events after the one with this number, and those to come.
    pub(crate) fn after(&self, number: usize) -> impl Stream<Item = (usize, Event)> + use<> {
        let timeline = self.clone();
        let newest = self.shared.newest.subscribe();
        stream::unfold(
            (timeline, newest, number),
            async |(timeline, mut newest, last)| {
                newest.wait_for(|newest| *newest > last).await.ok()?;
                let found = timeline.first_after(last);
                Some((found.clone(), (timeline, newest, found.0)))
            },
        )
    }

    fn first_after(&self, number: usize) -> (usize, Event) {
        let events = &self.events().last;
        let oldest = *self.shared.newest.borrow() + 1 - events.len();
        let number = oldest.max(number + 1);
        (number, events[number - oldest].clone())
    }

    fn events(&self) -> MutexGuard<'_, Events> {
        let events = self.shared.events.lock();
        events.unwrap_or_else(PoisonError::into_inner)
    }
}

/// How many events are kept.
const MOST: usize = 20_000;
