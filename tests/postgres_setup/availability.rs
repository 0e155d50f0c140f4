//! One call notices that a server is gone, not each client.

use std::time::{Duration, Instant};

use futures_util::future::join_all;
use tokio::time::timeout;
use tower_idempotency::{PostgresStore, Store, StoreErrorKind, store::admin::Filter};

use crate::{
    database::{HOUR, acquired, hour, name, told},
    proxy::Proxy,
    server::Server,
};

#[tokio::test(flavor = "multi_thread")]
async fn rule_58_server_that_refuses_connections_fails_calls_at_once() {
    let mut server = Server::start().await;
    server.migrate().await;
    let builder = PostgresStore::builder(server.url(server.port()).parse().unwrap());
    let patience = Duration::from_secs(60);
    let store = builder.acquire_timeout(patience).connect().await.unwrap();
    acquired(store.claim(&name("before"), &hour()).await);
    server.stop();
    let begun = Instant::now();
    for round in 0..20 {
        let calls = (0..100).map(|call| {
            let store = store.clone();
            async move {
                store
                    .claim(&name(&format!("{round} {call}")), &hour())
                    .await
            }
        });
        for answer in join_all(calls).await {
            let error = answer.unwrap_err();
            assert_eq!(error.kind(), StoreErrorKind::Unavailable);
            if round > 0 {
                let address = format!("127.0.0.1:{}", server.port());
                assert!(told(&error).contains(&address), "{}", told(&error));
            }
        }
    }
    assert!(begun.elapsed() < patience / 2);
    server.start_again().await;
    back(&store, patience / 2).await;
    store.close().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn rule_58_server_that_swallows_everything_costs_one_timeout() {
    let server = Server::start().await;
    server.migrate().await;
    let proxy = Proxy::to(server.port()).await;
    let builder = PostgresStore::builder(server.url(proxy.port()).parse().unwrap());
    let patience = Duration::from_secs(2);
    let store = builder.acquire_timeout(patience).connect().await.unwrap();
    store.read(&name("key")).await.unwrap();
    // Longer than the pool uses a connection without a ping.
    tokio::time::sleep(Duration::from_millis(1_200)).await;
    proxy.stall(true);
    let begun = Instant::now();
    for _ in 0..50 {
        let error = store.read(&name("key")).await.unwrap_err();
        assert!(told(&error).contains("acquire_timeout"), "{}", told(&error));
    }
    assert!(begun.elapsed() < 10 * patience, "{:?}", begun.elapsed());
    proxy.stall(false);
    back(&store, 10 * patience).await;
    store.close().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn f110_server_that_does_not_answer_is_named_by_each_call() {
    let server = Server::start().await;
    server.migrate().await;
    let proxy = Proxy::to(server.port()).await;
    let address = format!("127.0.0.1:{}", proxy.port());
    for has_idle_connection in [false, true] {
        let builder = PostgresStore::builder(server.url(proxy.port()).parse().unwrap())
            .acquire_timeout(Duration::from_millis(800))
            .max_connections(1);
        let store = builder.connect().await.unwrap();
        if has_idle_connection {
            store.read(&name("key")).await.unwrap();
            // Longer than the pool uses a connection without a ping.
            tokio::time::sleep(Duration::from_millis(1_200)).await;
        }
        proxy.stall(true);
        let claim = hour();
        let name = name("key");
        // Calls of different kinds, since calls of one kind share a connection.
        let unknown = Filter::unknown();
        let (read, claimed, renewed, listed) = tokio::join!(
            store.read(&name),
            store.claim(&name, &claim),
            store.renew(&name, claim.token, HOUR),
            store.list(&unknown, None, 1),
        );
        for error in [
            read.unwrap_err(),
            claimed.unwrap_err(),
            renewed.unwrap_err(),
            listed.unwrap_err(),
        ] {
            assert_eq!(error.kind(), StoreErrorKind::TimedOut);
            let told = told(&error);
            assert!(told.contains(&address), "{told}");
            assert!(told.contains("`acquire_timeout` (800ms)"), "{told}");
        }
        proxy.stall(false);
        store.close().await;
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn rule_58_calls_on_a_stalled_network_hold_up_no_later_one() {
    let server = Server::start().await;
    server.migrate().await;
    let proxy = Proxy::to(server.port()).await;
    let builder = PostgresStore::builder(server.url(proxy.port()).parse().unwrap());
    let store = builder
        .acquire_timeout(Duration::from_secs(1))
        .statement_timeout(Duration::from_secs(600))
        .connect()
        .await
        .unwrap();
    store.read(&name("key")).await.unwrap();
    proxy.stall(true);
    let under_way: Vec<_> = (0..20)
        .map(|call| {
            let store = store.clone();
            tokio::spawn(async move {
                let _ = store.claim(&name(&call.to_string()), &hour()).await;
                let _ = store.read(&name(&call.to_string())).await;
            })
        })
        .collect();
    let noticed = async {
        while timeout(Duration::from_secs(1), store.read(&name("key")))
            .await
            .is_err()
        {}
    };
    timeout(Duration::from_secs(60), noticed).await.unwrap();
    let begun = Instant::now();
    for _ in 0..100 {
        assert!(store.read(&name("key")).await.is_err());
    }
    assert!(begun.elapsed() < Duration::from_secs(20));
    proxy.stall(false);
    back(&store, Duration::from_secs(30)).await;
    for call in under_way {
        call.await.unwrap();
    }
    store.close().await;
}

/// Waits until the store answers again.
async fn back(store: &PostgresStore, within: Duration) {
    let answers = async {
        while store.read(&name("key")).await.is_err() {
            tokio::time::sleep(Duration::from_millis(20)).await;
        }
    };
    timeout(within, answers).await.unwrap();
    acquired(store.claim(&name("after"), &hour()).await);
}
