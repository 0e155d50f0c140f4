//! The page, its timeline and its switches.

use std::convert::Infallible;

use axum::{
    Json, Router,
    extract::State,
    response::{
        Html,
        sse::{Event, KeepAlive, Sse},
    },
    routing::{get, put},
};
use futures_util::{Stream, StreamExt as _, stream};
use http::{HeaderMap, StatusCode};
use serde::Deserialize;

use crate::{
    faults::{Fault, Faults},
    timeline::Timeline,
};

pub(crate) fn router(timeline: Timeline, faults: Faults) -> Router {
    Router::new()
        .route("/", get(Html(include_str!("page.html"))))
        .route("/timeline", get(events))
        .route("/faults", put(switch))
        .with_state(Page { timeline, faults })
}

#[derive(Clone)]
struct Page {
    timeline: Timeline,
    faults: Faults,
}

/// Server-Sent Events: the timeline from `Last-Event-ID` on, which a browser sends when it
/// connects again, and the faults that are on.
async fn events(
    State(page): State<Page>,
    headers: HeaderMap,
) -> Sse<impl Stream<Item = Result<Event, Infallible>>> {
    let last = headers.get("last-event-id").and_then(|id| id.to_str().ok());
    let last = last.and_then(|id| id.parse().ok()).unwrap_or(0);
    let happened = page.timeline.after(last).map(|(number, event)| {
        let event = Event::default().id(number.to_string()).json_data(event);
        event.expect("an event is JSON")
    });
    let faults = page.faults.changes().map(|faults| {
        let event = Event::default().event("faults").json_data(faults);
        event.expect("faults are JSON")
    });
    Sse::new(stream::select(happened, faults).map(Ok)).keep_alive(KeepAlive::default())
}

#[derive(Deserialize)]
struct Switch {
    fault: Fault,
    on: bool,
}

async fn switch(State(page): State<Page>, Json(Switch { fault, on }): Json<Switch>) -> StatusCode {
    page.faults.switch(fault, on);
    StatusCode::NO_CONTENT
}
