//! Records that the server removes by itself, and records that it never removes.

use std::time::Duration;

use redis::Value;
use tower_idempotency::{
    RedisStore, Store,
    store::{Claim, Completion, Purged, ReclaimAs, RecordName, RecordState},
};

use crate::{
    any_store::{HOUR, acquired, applied, done, fingerprint, hour, name},
    asked, connect, key,
    redis_nodes::Node,
};

#[tokio::test]
async fn a_lapsed_and_expired_claim_stays_until_it_is_marked_once() {
    let node = Node::start(&[]).await;
    let store = connect(&node.url()).await;
    let name = name("caller", "key");
    let short = Duration::from_millis(1);
    acquired(
        store
            .claim(&name, &Claim::new(fingerprint(1), short, short))
            .await,
    );
    assert_eq!(expiry(&node, &name).await, NEVER);
    tokio::time::sleep(Duration::from_millis(50)).await;
    let record = store.read(&name).await.unwrap().unwrap();
    assert!(matches!(
        record.state,
        RecordState::InProgress { lease_left: None }
    ));
    assert!(record.expires_in.is_none());
    let marked = Purged {
        marked_unknown: 1,
        ..Purged::default()
    };
    assert_eq!(store.purge_expired(10, HOUR).await.unwrap(), marked);
    assert_eq!(
        store.purge_expired(10, HOUR).await.unwrap(),
        Purged::default()
    );
    let record = store.read(&name).await.unwrap().unwrap();
    assert!(matches!(record.state, RecordState::Unknown), "{record:?}");
    assert_eq!(expiry(&node, &name).await, NEVER);
}

#[tokio::test]
async fn a_completed_record_is_removed_an_hour_after_its_expiry() {
    let node = Node::start(&[]).await;
    let store = connect(&node.url()).await;
    let (name, claim) = (name("caller", "key"), hour());
    acquired(store.claim(&name, &claim).await);
    applied(store.complete(&name, claim.token, &done()).await);
    let millis = Duration::from_millis(expiry(&node, &name).await.unsigned_abs());
    let left = store
        .read(&name)
        .await
        .unwrap()
        .unwrap()
        .expires_in
        .unwrap();
    assert!(
        millis.abs_diff(left + HOUR) < Duration::from_secs(10),
        "{millis:?}"
    );
    // A repeated call does not change the time to live.
    applied(store.complete(&name, claim.token, &done()).await);
    assert!(expiry(&node, &name).await > 0);
}

#[tokio::test]
async fn a_record_with_a_response_of_512_bytes_takes_less_than_a_kibibyte() {
    let node = Node::start(&[]).await;
    let store = connect(&node.url()).await;
    let (name, claim) = (
        name("account_42", "8e03978e-40d5-43dd-bc93-6894a57f9324"),
        hour(),
    );
    acquired(store.claim(&name, &claim).await);
    let completion = Completion::new(vec![7; 512].into(), HOUR, HOUR);
    applied(store.complete(&name, claim.token, &completion).await);
    let usage = asked(&node, redis::cmd("MEMORY").arg("USAGE").arg(key(&name))).await;
    let Value::Int(bytes) = usage else {
        panic!("{usage:?}");
    };
    assert!(bytes < 1_024, "{bytes} bytes");
}

#[tokio::test]
async fn a_forgotten_record_keeps_its_fence_while_the_clock_is_set_back() {
    let node = Node::start(&[]).await;
    let store = connect(&node.url()).await;
    let (name, claim) = (name("caller", "key"), hour());
    let grant = acquired(store.claim(&name, &claim).await);
    // As if the clock had been a minute ahead at the claim.
    let ahead = grant.fence.get() + 60_000_000;
    let mut patch = redis::cmd("SETRANGE");
    patch
        .arg(key(&name))
        .arg(FENCE_AT)
        .arg(&ahead.to_le_bytes());
    asked(&node, &patch).await;
    let seen = store.read(&name).await.unwrap().unwrap().fence;
    assert_eq!(seen.get(), ahead);
    applied(store.forget(&name, seen).await);
    let again = store
        .reclaim(&name, seen, ReclaimAs::Replace, &hour())
        .await;
    assert!(again.unwrap().unwrap().fence > seen);
}

async fn expiry(node: &Node, name: &RecordName) -> i64 {
    match asked(node, redis::cmd("PTTL").arg(key(name))).await {
        Value::Int(millis) => millis,
        other => panic!("{other:?}"),
    }
}

/// Behind version, state, attempt and takeovers.
const FENCE_AT: usize = 1 + 1 + 4 + 4;

/// A key without a time to live.
const NEVER: i64 = -1;

#[tokio::test]
async fn longest_timeouts_are_accepted() {
    let node = Node::start(&[]).await;
    let builder = RedisStore::builder(node.url());
    let builder = builder.connect_timeout(Duration::MAX);
    let store = builder.response_timeout(Duration::MAX).connect().await;
    acquired(store.unwrap().claim(&name("caller", "key"), &hour()).await);
}
