//! Transactions on a server that refuses connections.

use std::{
    sync::Arc,
    time::{Duration, Instant},
};

use axum::response::IntoResponse as _;
use tokio::{
    io::copy_bidirectional,
    net::{TcpListener, TcpStream},
    sync::Notify,
    task::JoinSet,
};
use tower_idempotency::{CommitErrorKind, PostgresStore};

use crate::{
    service::Service,
    shop::{options, with_postgres},
};

#[tokio::test(flavor = "multi_thread")]
async fn rule_58_begin_fails_soon_once_the_server_is_gone() {
    with_postgres(async |shop| {
        let gone = Arc::new(Notify::new());
        let way = way_to(&shop.url, Arc::clone(&gone)).await;
        let patience = Duration::from_secs(120);
        let store = PostgresStore::builder(options(&shop.url).host("127.0.0.1").port(way))
            .acquire_timeout(patience)
            .connect()
            .await
            .unwrap();
        let service = Service::new(&shop.with_store(store.clone()), move |run| {
            let gone = Arc::clone(&gone);
            async move {
                gone.notify_one();
                let begun = Instant::now();
                for _ in 0..10 {
                    let error = run.shop.store.begin(&run.operation).await.unwrap_err();
                    assert_eq!(error.kind(), CommitErrorKind::Unavailable);
                }
                assert!(begun.elapsed() < patience / 2);
                (http::StatusCode::ACCEPTED, "refused").into_response()
            }
        });
        service.post("key").await.assert_is(202, "refused");
        store.close().await;
    })
    .await;
}

/// A port that leads to the server, and refuses connections once notified.
async fn way_to(url: &str, gone: Arc<Notify>) -> u16 {
    let server = (options(url).get_host().to_owned(), options(url).get_port());
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let port = listener.local_addr().unwrap().port();
    tokio::spawn(async move {
        let mut carried = JoinSet::new();
        loop {
            tokio::select! {
                () = gone.notified() => return,
                accepted = listener.accept() => {
                    let (mut client, _) = accepted.unwrap();
                    let mut server = TcpStream::connect(&server).await.unwrap();
                    carried.spawn(async move {
                        let _ = copy_bidirectional(&mut client, &mut server).await;
                    });
                }
            }
        }
    });
    port
}
