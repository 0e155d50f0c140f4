//! A server that is full, or that evicts records.

use std::time::Duration;

use futures_util::future::join_all;
use tokio::time::sleep;
use tower_idempotency::{
    RedisStore, Store, StoreErrorKind,
    store::{Claim, Claimed, Completion, Release, admin::Filter},
};

use crate::{
    any_store::{HOUR, acquired, applied, done, fingerprint, hour, name},
    connect,
    redis_nodes::{Node, eventually},
};

#[tokio::test]
async fn a_full_server_refuses_claims_and_records_work() {
    let node = Node::start(&["--maxmemory", "3mb"]).await;
    let store = connect(&node.url()).await;
    let claims =
        ["completed", "renewed", "released", "unknown"].map(|key| (name("caller", key), hour()));
    for (name, claim) in &claims {
        acquired(store.claim(name, claim).await);
    }
    let filler = Completion::new(vec![7; 50_000].into(), HOUR, HOUR);
    let mut refused = None;
    for number in 0..1_000 {
        let (name, claim) = (name("filler", &number.to_string()), hour());
        match store.claim(&name, &claim).await {
            Ok(_) => applied(store.complete(&name, claim.token, &filler).await),
            Err(error) => {
                refused = Some(error);
                break;
            }
        }
    }
    let refused = refused.expect("3 MB hold no 50 MB");
    assert_eq!(refused.kind(), StoreErrorKind::Full);
    assert!(refused.to_string().contains("`maxmemory`"), "{refused}");

    let [completed, renewed, released, unknown] = &claims;
    let token = |(_, claim): &(_, Claim)| claim.token;
    applied(
        store
            .complete(&completed.0, token(completed), &done())
            .await,
    );
    applied(store.renew(&renewed.0, token(renewed), HOUR).await);
    applied(
        store
            .release(&released.0, token(released), Release::SameRequest)
            .await,
    );
    applied(store.mark_unknown(&unknown.0, token(unknown), HOUR).await);
    assert_eq!(store.purge_expired(10, HOUR).await.unwrap().touched(), 0);
}

#[tokio::test]
async fn a_server_that_evicts_is_refused_at_first_and_later() {
    let node = Node::start(&["--maxmemory-policy", "volatile-lru"]).await;
    let refused = RedisStore::connect(&node.url()).await.unwrap_err();
    assert!(
        refused.to_string().contains("`maxmemory-policy`"),
        "{refused}"
    );

    let policy = async |policy: &str| {
        let set = format!("CONFIG SET maxmemory-policy {policy}");
        node.ask::<()>(&set).await.unwrap();
    };
    policy("noeviction").await;
    let store = connect(&node.url()).await;
    acquired(store.claim(&name("caller", "before"), &hour()).await);
    policy("allkeys-lru").await;
    let claim = Claim::new(fingerprint(1), HOUR, HOUR);
    let late = name("caller", "late");
    eventually("the store notices the policy", async || {
        let refused = store.claim(&late, &claim).await;
        refused.is_err_and(|error| error.to_string().contains("allkeys-lru"))
    })
    .await;
    policy("noeviction").await;
    let claimed = store.claim(&late, &hour()).await.unwrap();
    assert!(matches!(claimed, Claimed::Occupied(_)), "{claimed:?}");
}

#[tokio::test]
async fn a_new_connection_asks_for_the_policy_again() {
    let node = Node::start(&[]).await;
    let store = connect(&node.url()).await;
    acquired(store.claim(&name("caller", "before"), &hour()).await);
    node.ask::<()>("CONFIG SET maxmemory-policy volatile-lru")
        .await
        .unwrap();
    node.ask::<u32>("CLIENT KILL TYPE normal").await.unwrap();
    // At the latest when the closed connection has been noticed.
    eventually("the store connects anew", async || {
        let refused = store.read(&name("caller", "before")).await;
        refused.is_err_and(|error| error.to_string().contains("volatile-lru"))
    })
    .await;
}

#[tokio::test]
async fn a_replica_is_refused() {
    let primary = Node::start(&[]).await;
    let replica = Node::replica_of(&primary).await;
    let refused = RedisStore::connect(&replica.url()).await.unwrap_err();
    assert!(refused.to_string().contains("is a replica"), "{refused}");
}

#[tokio::test]
async fn an_unreachable_server_is_unavailable_and_was_sent_nothing() {
    let node = Node::start(&[]).await;
    let store = connect(&node.url()).await;
    acquired(store.claim(&name("caller", "before"), &hour()).await);
    node.kill();
    eventually("the store notices", async || {
        let refused = store.claim(&name("caller", "after"), &hour()).await;
        refused
            .is_err_and(|error| error.kind() == StoreErrorKind::Unavailable && error.sent_nothing())
    })
    .await;
    let builder = RedisStore::builder(node.url()).connect_timeout(Duration::from_millis(200));
    let refused = builder.connect().await.unwrap_err();
    assert_eq!(refused.kind(), StoreErrorKind::Unavailable);
}

#[tokio::test]
async fn a_key_that_holds_no_record_is_corrupt() {
    let node = Node::start(&[]).await;
    let store = connect(&node.url()).await;
    let name = name("caller", "foreign");
    for words in [["SET", "no record"], ["SADD", "no record"]] {
        let mut command = redis::cmd(words[0]);
        command.arg(crate::key(&name)).arg(words[1]);
        crate::asked(&node, redis::cmd("FLUSHALL").arg("SYNC")).await;
        crate::asked(&node, &command).await;
        for error in [
            store.read(&name).await.unwrap_err(),
            store.claim(&name, &hour()).await.unwrap_err(),
        ] {
            assert_eq!(error.kind(), StoreErrorKind::Corrupt, "{error}");
        }
    }
}

#[tokio::test]
async fn unreadable_record_stops_neither_a_list_nor_a_sweep() {
    let node = Node::start(&[]).await;
    let store = connect(&node.url()).await;
    let names: Vec<_> = (0..8)
        .map(|number| name("caller", &number.to_string()))
        .collect();
    for name in &names {
        let claim = hour();
        acquired(store.claim(name, &claim).await);
        let marked = store.mark_unknown(name, claim.token, Duration::ZERO).await;
        applied(marked);
    }
    let mut command = redis::cmd("SET");
    command.arg(crate::key(&names[3])).arg("no record");
    crate::asked(&node, &command).await;
    let mut command = redis::cmd("ZADD");
    command.arg(crate::index(&names[4])).arg(0).arg("no entry");
    crate::asked(&node, &command).await;

    let page = store.list(&Filter::unknown(), None, 100).await.unwrap();
    assert_eq!(page.unreadable, [names[3].clone()]);
    assert_eq!(page.records.len(), 7);
    sleep(Duration::from_millis(5)).await;
    assert_eq!(store.purge_expired(100, HOUR).await.unwrap().removed, 7);
    let error = store.purge_expired(100, HOUR).await.unwrap_err();
    assert_eq!(error.kind(), StoreErrorKind::Corrupt);
}

#[tokio::test]
async fn list_of_a_scope_names_no_unreadable_record_of_another() {
    let node = Node::start(&[]).await;
    let store = connect(&node.url()).await;
    let (own, other) = (name("caller", "key"), name("other", "key"));
    for name in [&own, &other] {
        acquired(store.claim(name, &hour()).await);
        let mut command = redis::cmd("SET");
        command.arg(crate::key(name)).arg("no record");
        crate::asked(&node, &command).await;
    }
    let filter = Filter::unknown().in_scope(own.scope().clone());
    let page = store.list(&filter, None, 100).await.unwrap();
    assert_eq!(page.unreadable, [own]);
}

#[tokio::test]
async fn a_corrupt_record_fails_its_own_call_alone() {
    let node = Node::start(&[]).await;
    let store = connect(&node.url()).await;
    let names: Vec<_> = (0..64)
        .map(|number| name("caller", &number.to_string()))
        .collect();
    let mut command = redis::cmd("SADD");
    command.arg(crate::key(&names[50])).arg("no record");
    crate::asked(&node, &command).await;
    // Made at the same time, most of them share a command.
    let claims = names.iter().map(|name| {
        let store = &store;
        async move { store.claim(name, &hour()).await }
    });
    for (number, claimed) in join_all(claims).await.into_iter().enumerate() {
        match claimed {
            Err(error) => {
                assert_eq!(
                    (number, error.kind()),
                    (50, StoreErrorKind::Corrupt),
                    "{error}"
                );
            }
            claimed => drop(acquired(claimed)),
        }
    }
}
