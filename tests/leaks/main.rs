//! Rule 75, and rules 88 to 93: secrets of a caller stay in the caller's records.
//!
//! A process of its own makes each kind of request with canaries in all of its parts. Its
//! whole output is searched: the events of all crates at TRACE, its metrics, the text of its
//! panics, `Debug` output, refusals, and the answers to another caller. So is everything
//! that the stores keep, and the output of playgrounds that are killed.

#[allow(dead_code, reason = "it serves other tests too")]
#[path = "../contract/api.rs"]
mod api;
mod caller;
mod canaries;
#[path = "../databases/mod.rs"]
mod databases;
#[path = "../etcd/mod.rs"]
mod etcd;
mod kept;
mod messages;
mod output;
mod playground;
#[allow(dead_code, reason = "it serves other tests too")]
#[path = "../contract/probe.rs"]
mod probe;
#[path = "../redis_servers/mod.rs"]
mod redis_servers;
mod requests;
#[path = "../scan/mod.rs"]
mod scan;
#[allow(dead_code, reason = "it serves other tests too")]
#[path = "../contract/server.rs"]
mod server;
#[allow(
    dead_code,
    unused_imports,
    unused_macros,
    reason = "it serves other tests too"
)]
#[path = "../messages/shop.rs"]
mod shop;
#[allow(
    dead_code,
    unused_imports,
    unused_macros,
    reason = "it serves other tests too"
)]
#[path = "../contract/stores.rs"]
mod stores;

use self::{
    canaries::{BODY, COOKIE, KEPT, PAYLOAD, QUERY, SCOPE, TOKEN, found},
    kept::Kept,
    stores::{Place, on_each_shared_store, on_each_store},
};

on_each_store! {
    rule_75_secrets_stay_in_the_records
    rule_88_hidden_secrets_are_nowhere
}

async fn rule_75_secrets_stay_in_the_records(place: &Place) {
    search_output(place, false).await;
    let kept = kept::all(place).await;
    for Kept { place, bytes } in &kept {
        let allowed: &[&str] = match &**place {
            "idempotency_usage.scope" => &[SCOPE],
            "idempotency_events.payload" => &[PAYLOAD],
            "idempotency_records.scope"
            | "idempotency_records.key"
            | "idempotency_records.response"
            | "keys" => KEPT,
            // It has all tables.
            "file" => &[KEPT, &[PAYLOAD]].concat(),
            _ => &[],
        };
        for canary in found(bytes) {
            assert!(allowed.contains(&canary), "{canary} in {place}");
        }
    }
    // The search finds those that a record keeps.
    if !kept.is_empty() {
        let all: Vec<u8> = kept.into_iter().flat_map(|kept| kept.bytes).collect();
        let seen = found(&all);
        for canary in KEPT {
            assert!(seen.contains(canary), "{canary} is nowhere");
        }
    }
}

async fn rule_88_hidden_secrets_are_nowhere(place: &Place) {
    search_output(place, true).await;
    for Kept { place, bytes } in kept::all(place).await {
        let is_of_application = matches!(&*place, "idempotency_events.payload" | "file");
        for canary in found(&bytes) {
            assert!(
                is_of_application && canary == PAYLOAD,
                "{canary} in {place}"
            );
        }
    }
}

on_each_shared_store! {
    rule_75_killed_processes_and_a_commit_show_no_secrets
}

async fn rule_75_killed_processes_and_a_commit_show_no_secrets(place: &Place) {
    let output = playground::of_killed_processes(place).await;
    let shown = found(output.as_bytes());
    assert!(shown.is_empty(), "{shown:?} in {output}");
    for seen in ["recorded", "replayed", "key-reused", "key-invalid"] {
        assert!(
            output.contains(&format!("outcome=\"{seen}\"")),
            "{seen}: {output}"
        );
    }
    for Kept { place, bytes } in kept::all(place).await {
        for canary in found(&bytes) {
            let is_transient = [TOKEN, COOKIE, QUERY, BODY].contains(&canary);
            assert!(!is_transient, "{canary} in {place}");
        }
    }
}

/// Runs the requests in a process, and searches all that it puts out.
async fn search_output(place: &Place, hidden: bool) {
    let output = output::of_requests(place, hidden).await;
    let shown = found(output.as_bytes());
    let lines = output.lines().filter(|line| line.contains("c4n4ry"));
    let lines: Vec<_> = lines.collect();
    assert!(shown.is_empty(), "{shown:?} in {lines:#?}");
    // The search saw each outcome in the events and in the metrics.
    for outcome in output::OUTCOMES {
        let event = format!("outcome=\"{outcome}\"");
        assert!(output.contains(&event), "no {outcome} in {output}");
        let count = format!("outcome = \"{outcome}\"");
        assert!(output.contains(&count), "{outcome} is not counted");
    }
    for seen in [output::TRACED, output::PRINTED] {
        assert!(output.contains(seen), "not in the output: {seen}");
    }
}
