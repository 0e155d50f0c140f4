//! A COMMIT whose answer gets lost.

use std::{sync::Arc, time::Duration};

use tokio::time::timeout;
use tower_idempotency::{
    PostgresStore,
    messages::{MessageError, MessageErrorKind, Received},
    sqlx::query,
};

use crate::{
    proxy::{Network, Proxy},
    shop::{PostgresShop, Shop, with_postgres},
};

/// Receives one message while the network is as said, then again over a sound one.
async fn receive(network: Network) -> (Result<Received<()>, MessageError>, Received<()>, usize) {
    let mut ended = None;
    with_postgres(async |shop| {
        let proxy = Proxy::to(&shop.url).await;
        let store = PostgresStore::builder(proxy.options(&shop.url))
            .lock_timeout(Duration::from_millis(100))
            .acquire_timeout(Duration::from_secs(1))
            .connect()
            .await
            .unwrap();
        let through = PostgresShop {
            store,
            ..shop.clone()
        };
        let inbox = through.inbox("billing");
        let work = async |on: &mut tower_idempotency::sqlx::PgConnection| {
            query("INSERT INTO effects (effect) VALUES ('effect')")
                .execute(&mut *on)
                .await?;
            Ok::<_, MessageError>(())
        };
        proxy.set(network);
        let first = inbox.receive("id", work).await;
        proxy.set(Network::Sound);
        let second = shop.inbox("billing").receive("id", work).await.unwrap();
        through.store.close().await;
        ended = Some((first, second, shop.effects().await.len()));
    })
    .await;
    ended.unwrap()
}

#[tokio::test(flavor = "multi_thread")]
async fn connection_cut_before_commit_is_aborted() {
    let (first, second, effects) = Box::pin(receive(Network::CutBefore)).await;
    assert_eq!(first.unwrap_err().kind(), MessageErrorKind::Aborted);
    assert_eq!((second, effects), (Received::First(()), 1));
}

#[tokio::test(flavor = "multi_thread")]
async fn connection_cut_after_commit_is_first() {
    let (first, second, effects) = Box::pin(receive(Network::CutAfter)).await;
    assert_eq!(first.unwrap(), Received::First(()));
    assert_eq!((second, effects), (Received::Repeat, 1));
}

#[tokio::test(flavor = "multi_thread")]
async fn server_gone_after_commit_is_unknown() {
    let (first, second, effects) = Box::pin(receive(Network::GoneAfter)).await;
    assert_eq!(first.unwrap_err().kind(), MessageErrorKind::Unknown);
    assert_eq!((second, effects), (Received::Repeat, 1));
}

#[tokio::test(flavor = "multi_thread")]
async fn commit_held_back_is_unknown_until_it_arrives() {
    let (first, second, effects) = Box::pin(receive(Network::HoldBefore)).await;
    assert_eq!(first.unwrap_err().kind(), MessageErrorKind::Unknown);
    // Its transaction commits, or ends with its connection.
    assert_eq!(effects, 1, "{second:?}");
}

#[tokio::test(flavor = "multi_thread")]
async fn late_answer_to_commit_is_first() {
    let (first, second, effects) = Box::pin(receive(Network::HoldAfter)).await;
    assert_eq!(first.unwrap(), Received::First(()));
    assert_eq!((second, effects), (Received::Repeat, 1));
}

#[tokio::test(flavor = "multi_thread")]
async fn server_gone_before_commit_is_unknown_and_runs_again() {
    let (first, second, effects) = Box::pin(receive(Network::GoneBefore)).await;
    assert_eq!(first.unwrap_err().kind(), MessageErrorKind::Unknown);
    assert_eq!((second, effects), (Received::First(()), 1));
}

#[tokio::test(flavor = "multi_thread")]
async fn network_silent_before_commit_is_aborted() {
    with_postgres(async |shop| {
        let proxy = Arc::new(Proxy::to(&shop.url).await);
        let store = PostgresStore::builder(proxy.options(&shop.url))
            .connect()
            .await
            .unwrap();
        let through = PostgresShop {
            store,
            ..shop.clone()
        };
        let inbox = through.inbox("billing");
        let silenced = Arc::clone(&proxy);
        let received = inbox.receive("id", async move |on| {
            query("INSERT INTO effects (effect) VALUES ('effect')")
                .execute(&mut *on)
                .await?;
            silenced.set(Network::Silent);
            Ok::<_, MessageError>(())
        });
        // Limited by `receive` itself.
        let error = timeout(Duration::from_secs(60), received).await;
        let error = error.expect("it waits for the network").unwrap_err();
        assert_eq!(error.kind(), MessageErrorKind::Aborted, "{error}");
        proxy.set(Network::Gone);
        let inbox = shop.inbox("billing");
        let again = inbox.receive("id", async |_| Ok::<_, MessageError>(()));
        assert_eq!(again.await.unwrap(), Received::First(()));
        assert!(shop.effects().await.is_empty());
    })
    .await;
}
