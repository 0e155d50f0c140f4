//! The operator's endpoints, which tests use to read and repair records. Not
//! guarded.

use std::{collections::HashMap, fmt, time::Duration};

use axum::{
    Json, Router,
    extract::{Path, Query, State},
    routing::{get, post},
};
use http::{Response, StatusCode};
use serde_json::{Value, json};
use tower_idempotency::{
    DynStore, Key, Scope, Store as _,
    store::{
        Record, RecordName, RecordState, Transitioned,
        admin::{Filter, RecordedResponse, Resolution},
    },
};

use crate::{
    orders::Orders,
    runs::{self, Runs},
};

/// - `GET /runs?path=` counts runs;
/// - `GET /orders` counts committed orders, all and of each account;
/// - `GET /records?filter=unknown|in-progress&older_ms=` lists, and
///   `?account=&key=` reads one;
/// - `POST /resolve/{happened|not}?account=&key=` ends an unknown outcome;
/// - `DELETE /records?account=&key=` forgets.
pub(crate) fn router(store: DynStore, runs: Runs, orders: Orders) -> Router {
    Router::new()
        .route("/records", get(records).delete(forget))
        .route("/resolve/{outcome}", post(resolve))
        .with_state(store)
        .merge(
            Router::new()
                .route("/runs", get(count_runs))
                .with_state(runs),
        )
        .merge(
            Router::new()
                .route("/orders", get(count_orders))
                .with_state(orders),
        )
}

type Asked = Query<HashMap<String, String>>;
type Answer<T> = Result<T, (StatusCode, String)>;

async fn count_runs(State(runs): State<Runs>, Query(asked): Asked) -> Answer<String> {
    runs.count(asked.get("path").map(String::as_str))
        .map(|runs| runs.to_string())
        .map_err(|error| runs::unwritable(&error))
}

async fn count_orders(State(orders): State<Orders>) -> Answer<Json<Value>> {
    let Some(accounts) = orders.count().await.map_err(failed)? else {
        let message = "this store keeps no orders".to_owned();
        return Err((StatusCode::NOT_IMPLEMENTED, message));
    };
    let total: i64 = accounts.values().sum();
    Ok(Json(json!({ "total": total, "accounts": accounts })))
}

async fn records(State(store): State<DynStore>, Query(asked): Asked) -> Answer<Json<Value>> {
    if asked.contains_key("key") {
        let name = name(&asked)?;
        let record = store.read(&name).await.map_err(failed)?;
        return Ok(Json(json!(record.map(|record| show(&name, &record)))));
    }
    let filter = match asked.get("filter").map(String::as_str) {
        None | Some("unknown") => Filter::unknown(),
        Some("in-progress") => Filter::in_progress_for(match asked.get("older_ms") {
            None => Duration::ZERO,
            Some(text) => text.parse().map(Duration::from_millis).map_err(mistaken)?,
        }),
        Some(filter) => return Err(mistaken(format!("filter: {filter:?} is no filter"))),
    };
    let (mut shown, mut after) = (Vec::new(), None);
    while shown.len() < MOST {
        let listed = store.list(&filter, after.as_ref(), PAGE).await;
        let page = listed.map_err(failed)?;
        shown.extend(page.records.iter().map(|(name, record)| show(name, record)));
        after = page.next;
        if after.is_none() {
            break;
        }
    }
    Ok(Json(json!(shown)))
}

async fn resolve(
    State(store): State<DynStore>,
    Path(outcome): Path<String>,
    Query(asked): Asked,
) -> Answer<StatusCode> {
    let resolution = match outcome.as_str() {
        "happened" => {
            let response = Response::new("resolved by an operator\n");
            Resolution::Happened(RecordedResponse::new(response).map_err(mistaken)?)
        }
        "not" => Resolution::DidNotHappen,
        _ => return Err(mistaken(format!("{outcome:?} is no outcome"))),
    };
    let name = name(&asked)?;
    let Some(record) = store.read(&name).await.map_err(failed)? else {
        return Ok(StatusCode::NOT_FOUND);
    };
    let day = Duration::from_secs(24 * 3600);
    let settled = store.resolve(&name, record.fence, &resolution, day).await;
    settled.map(status_of).map_err(failed)
}

async fn forget(State(store): State<DynStore>, Query(asked): Asked) -> Answer<StatusCode> {
    let name = name(&asked)?;
    let Some(record) = store.read(&name).await.map_err(failed)? else {
        return Ok(StatusCode::NOT_FOUND);
    };
    let settled = store.forget(&name, record.fence).await;
    settled.map(status_of).map_err(failed)
}

fn name(asked: &HashMap<String, String>) -> Answer<RecordName> {
    let text = |name: &str| asked.get(name).map_or("", String::as_str);
    let scope = Scope::new(text("account")).ok_or_else(|| mistaken("account: no scope"))?;
    Ok(RecordName::new(scope, Key::new(text("key"))))
}

fn show(name: &RecordName, record: &Record) -> Value {
    let (state, lease_left) = match &record.state {
        RecordState::InProgress { lease_left } => ("in-progress", *lease_left),
        RecordState::Completed { .. } => ("completed", None),
        RecordState::Unknown => ("unknown", None),
        RecordState::Released(_) => ("released", None),
        _ => ("other", None),
    };
    json!({
        "account": name.scope().as_str(),
        "key": name.key().as_str(),
        "state": state,
        "operation": record.operation.to_string(),
        "fence": record.fence.get(),
        "attempt": record.attempt,
        "takeovers": record.takeovers,
        "age_ms": milliseconds(record.age),
        "expires_in_ms": record.expires_in.map(milliseconds),
        "lease_left_ms": lease_left.map(milliseconds),
    })
}

fn milliseconds(duration: Duration) -> u64 {
    u64::try_from(duration.as_millis()).unwrap_or(u64::MAX)
}

fn status_of(settlement: Transitioned) -> StatusCode {
    match settlement {
        Transitioned::Applied => StatusCode::NO_CONTENT,
        Transitioned::Superseded => StatusCode::CONFLICT,
    }
}

fn mistaken(error: impl fmt::Display) -> (StatusCode, String) {
    (StatusCode::BAD_REQUEST, error.to_string())
}

fn failed(error: impl fmt::Display) -> (StatusCode, String) {
    (StatusCode::SERVICE_UNAVAILABLE, error.to_string())
}

/// The number of records in a list, and up to a page more.
const MOST: usize = 10_000;
const PAGE: u32 = 1_000;
