//! Outcomes that are retried while the server does not answer.

use std::time::Duration;

use futures_util::future::join_all;
use tokio::time::timeout;
use tower_idempotency::{
    Store,
    store::{RecordState, Transitioned},
};

use crate::{
    claimed,
    databases::{options, with_database},
    name,
    proxy::Proxy,
    response, store, until,
};

#[tokio::test(flavor = "multi_thread")]
async fn f103_an_outcome_tried_many_times_in_an_outage_waits_once() {
    with_database(async |url| {
        let proxy = Proxy::to(&url).await;
        let store = store(proxy.options(&url)).await;
        let mut held = Vec::new();
        for number in 0..RECORDS {
            let name = name("caller", &format!("key {number}"));
            let (claim, _) = claimed(&store, &name).await;
            held.push((name, claim.token));
        }
        proxy.stall(true);
        for _ in 0..TRIES {
            let tries = held.iter().map(|(name, token)| {
                let (store, name, token) = (store.clone(), name.clone(), *token);
                tokio::spawn(async move {
                    let done = response(RESPONSE);
                    let completed = store.complete(&name, token, &done);
                    let answer = timeout(Duration::from_millis(100), completed).await;
                    assert!(answer.is_err(), "{answer:?}");
                })
            });
            for tried in join_all(tries).await {
                tried.unwrap();
            }
        }
        let before = proxy.sent();
        proxy.stall(false);

        let live = name("other", "live");
        let (claim, _) = claimed(&store, &live).await;
        let completed = store.complete(&live, claim.token, &response(1)).await;
        assert_eq!(completed.unwrap(), Transitioned::Applied);
        // Without the proxy, so that only the store's own bytes count.
        let direct = crate::store(options(&url)).await;
        for (name, _) in &held {
            until(async || {
                let record = direct.read(name).await.unwrap().unwrap();
                matches!(record.state, RecordState::Completed { .. })
            })
            .await;
        }
        store.close().await;
        direct.close().await;
        let sent = proxy.sent() - before;
        // One that waited sends it, and up to two that waited for a connection.
        let once = (RECORDS * RESPONSE) as u64;
        assert!(sent < once * 6, "{sent} bytes for {once}");
    })
    .await;
}

const RECORDS: usize = 40;
const TRIES: usize = 12;
const RESPONSE: usize = 10_000;
