//! Large responses, read and written, beside the calls of another scope.

use std::{convert::Infallible, time::Duration};

use bytes::Bytes;
use futures_util::future::join_all;
use http::{Request, Response, StatusCode};
use http_body_util::Full;
use tokio::time::timeout;
use tower::{Layer as _, ServiceExt as _, service_fn};
use tower_idempotency::{
    IdempotencyLayer, PostgresStore, RequestBody, Scope, Store,
    store::{Claimed, RecordState, Transitioned},
};

use crate::{
    HOUR, claimed,
    databases::{run, with_database},
    hour, migrated, name,
    proxy::Proxy,
    response, store, until,
};

#[tokio::test(flavor = "multi_thread")]
async fn f104_slow_large_replays_delay_no_other_scope() {
    with_database(async |url| {
        let proxy = Proxy::to(&url).await;
        // Longer than this test takes.
        let store = migrated(
            PostgresStore::builder(proxy.options(&url)).statement_timeout(Duration::from_secs(120)),
        )
        .await;
        let first = name("large", "0");
        let (claim, _) = claimed(&store, &first).await;
        let completed = store.complete(&first, claim.token, &response(LARGE)).await;
        assert_eq!(completed.unwrap(), Transitioned::Applied);
        run(
            &url,
            "INSERT INTO idempotency_records
                 (scope, key, state, attempt, takeovers, fence, claimed_at, lease_until,
                  expires_at, operation, token, fingerprint, response)
             SELECT scope, number::text, state, attempt, takeovers, fence, claimed_at,
                    lease_until, expires_at, operation, token, fingerprint, response
             FROM idempotency_records, generate_series(1, 127) AS number",
        )
        .await;

        proxy.stick_after(LARGE / 2);
        let replays: Vec<_> = (0..128)
            .map(|number| {
                let (store, name) = (store.clone(), name("large", &number.to_string()));
                tokio::spawn(async move {
                    let record = if number % 2 == 0 {
                        match store.claim(&name, &hour()).await.unwrap() {
                            Claimed::Occupied(record) => record,
                            other => panic!("{other:?}"),
                        }
                    } else {
                        store.read(&name).await.unwrap().unwrap()
                    };
                    match record.state {
                        RecordState::Completed { response } => assert_eq!(response.len(), LARGE),
                        other => panic!("{other:?}"),
                    }
                })
            })
            .collect();
        until(async || proxy.stuck() > 0).await;

        // One after another, and many at once.
        let others = async {
            for number in 0..20 {
                one_request(&store, &format!("alone {number}")).await;
            }
            let requests = (0..200).map(|number| {
                let store = store.clone();
                tokio::spawn(async move { one_request(&store, &format!("among {number}")).await })
            });
            for request in join_all(requests).await {
                request.unwrap();
            }
        };
        timeout(Duration::from_secs(60), others).await.unwrap();
        assert!(replays.iter().all(|replay| !replay.is_finished()));
        assert!(proxy.stuck() <= 2, "{} are under way", proxy.stuck());

        proxy.stick_after(usize::MAX);
        for replay in replays {
            replay.await.unwrap();
        }
        // A call carries one large response, and no other record.
        let largest = proxy.largest_answer();
        assert!(largest < LARGE * 3 / 2, "{largest} bytes for one call");
        store.close().await;
    })
    .await;
}

#[tokio::test(flavor = "multi_thread")]
async fn f104_a_withdrawal_reads_no_large_response() {
    with_database(async |url| {
        let proxy = Proxy::to(&url).await;
        let store = store(proxy.options(&url)).await;
        let handler = service_fn(|_: Request<RequestBody<Full<Bytes>>>| async {
            let body = Full::from(vec![7; LARGE / 2]);
            Ok::<_, Infallible>(Response::new(body))
        });
        let layer = IdempotencyLayer::required(store.clone(), |_| Some(Scope::single_tenant()))
            .store_timeout(Duration::from_millis(500))
            .build()
            .unwrap();
        let service = layer.layer(handler);
        let ask = async || {
            let request = Request::post("/").header("idempotency-key", "K");
            let request = request.body(Full::<Bytes>::default()).unwrap();
            service.clone().oneshot(request).await.unwrap().status()
        };
        assert_eq!(ask().await, StatusCode::OK);
        proxy.stick_after(LARGE / 4);
        assert_eq!(ask().await, StatusCode::SERVICE_UNAVAILABLE);
        // The layer cannot know whether the claim was applied. Its withdrawal ends
        // although the response is stuck.
        let drained = layer.drain(Duration::from_secs(20)).await;
        assert_eq!(drained.left(), 0);
        proxy.stick_after(usize::MAX);
        store.close().await;
    })
    .await;
}

#[tokio::test(flavor = "multi_thread")]
async fn f104_slow_large_outcomes_delay_no_heartbeat() {
    with_database(async |url| {
        let proxy = Proxy::to(&url).await;
        let store = migrated(
            PostgresStore::builder(proxy.options(&url)).statement_timeout(Duration::from_secs(120)),
        )
        .await;
        let running = name("other", "running");
        let (owner, _) = claimed(&store, &running).await;
        let mut held = Vec::new();
        for number in 0..32 {
            let name = name("large", &number.to_string());
            let (claim, _) = claimed(&store, &name).await;
            held.push((name, claim.token));
        }

        proxy.stick_calls_after(LARGE / 2);
        let outcomes: Vec<_> = held
            .into_iter()
            .map(|(name, token)| {
                let store = store.clone();
                tokio::spawn(async move {
                    let done = response(LARGE);
                    store.complete(&name, token, &done).await.unwrap()
                })
            })
            .collect();
        until(async || proxy.stuck() > 0).await;

        let others = async {
            for number in 0..20 {
                let renewed = store.renew(&running, owner.token, HOUR).await;
                assert_eq!(renewed.unwrap(), Transitioned::Applied);
                one_request(&store, &format!("request {number}")).await;
            }
        };
        timeout(Duration::from_secs(60), others).await.unwrap();
        assert!(outcomes.iter().all(|outcome| !outcome.is_finished()));
        assert!(proxy.stuck() <= 2, "{} are under way", proxy.stuck());
        proxy.stick_calls_after(usize::MAX);
        for outcome in outcomes {
            assert_eq!(outcome.await.unwrap(), Transitioned::Applied);
        }
        store.close().await;
    })
    .await;
}

/// The calls of a request of another scope, and of its retry.
async fn one_request(store: &PostgresStore, key: &str) {
    let (name, done) = (name("other", key), response(500));
    let (claim, _) = claimed(store, &name).await;
    let completed = store.complete(&name, claim.token, &done).await;
    assert_eq!(completed.unwrap(), Transitioned::Applied);
    let again = store.claim(&name, &hour()).await.unwrap();
    assert!(matches!(again, Claimed::Occupied(_)));
    assert!(store.read(&name).await.unwrap().is_some());
}

const LARGE: usize = 1 << 20;
