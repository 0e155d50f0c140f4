//! The index of open claims after clients were killed between two commands.

use std::time::Duration;

use redis::Value;
use tower_idempotency::{
    Store,
    store::{RecordName, Token, admin::Filter},
};

use crate::{
    any_store::{HOUR, acquired, applied, done, hour, name},
    asked, connect, index,
    redis_nodes::{Node, eventually},
};

#[tokio::test]
async fn the_list_has_exactly_the_open_claims() {
    let node = Node::start(&[]).await;
    let store = connect(&node.url()).await;
    let now = std::time::UNIX_EPOCH.elapsed().unwrap();
    let [added, claimed, completed, again] =
        ["added", "claimed", "completed", "again"].map(|key| name("caller", key));
    // Killed before the claim, after it, and before the entry was removed.
    add(&node, &added, Token::random(), now).await;
    acquired(store.claim(&claimed, &hour()).await);
    let claim = hour();
    acquired(store.claim(&completed, &claim).await);
    applied(store.complete(&completed, claim.token, &done()).await);
    eventually("the entry of the completed claim is removed", async || {
        entries(&node, &completed).await == 0
    })
    .await;
    add(&node, &completed, claim.token, now).await;
    // An entry of a claim before the last one.
    acquired(store.claim(&again, &hour()).await);
    add(&node, &again, Token::random(), now).await;

    let filter = Filter::in_progress_for(Duration::ZERO);
    let page = store.list(&filter, None, 100).await.unwrap();
    let mut listed: Vec<_> = page.records.into_iter().map(|(name, _)| name).collect();
    listed.sort();
    assert_eq!(listed, [again.clone(), claimed.clone()]);
}

#[tokio::test]
async fn a_sweep_removes_old_entries_without_a_claim() {
    let node = Node::start(&[]).await;
    let store = connect(&node.url()).await;
    let now = std::time::UNIX_EPOCH.elapsed().unwrap();
    let [young, old, open] = ["young", "old", "open"].map(|key| name("caller", key));
    add(&node, &young, Token::random(), now).await;
    add(&node, &old, Token::random(), now - 2 * HOUR).await;
    let claim = hour();
    acquired(store.claim(&open, &claim).await);
    add(&node, &open, claim.token, Duration::ZERO).await;
    assert_eq!(store.purge_expired(100, HOUR).await.unwrap().touched(), 0);
    // A young one may be that of a claim on its way.
    assert_eq!(entries(&node, &young).await, 1);
    assert_eq!(entries(&node, &old).await, 0);
    assert_eq!(entries(&node, &open).await, 1);
}

async fn add(node: &Node, name: &RecordName, token: Token, added: Duration) {
    let (scope, key) = (name.scope().as_str(), name.key().as_str());
    let entry = [token.as_bytes(), scope.as_bytes(), b"\0", key.as_bytes()].concat();
    let mut command = redis::cmd("ZADD");
    command
        .arg(index(name))
        .arg(added.as_micros() as u64)
        .arg(entry);
    asked(node, &command).await;
}

async fn entries(node: &Node, name: &RecordName) -> i64 {
    match asked(node, redis::cmd("ZCARD").arg(index(name))).await {
        Value::Int(entries) => entries,
        other => panic!("{other:?}"),
    }
}
