//! Connections that are cut, fall silent or lead to a standby.

use std::{
    sync::Arc,
    time::{Duration, Instant},
};

use futures_util::future::join_all;
use tower_idempotency::{
    PostgresStore, Store, StoreErrorKind,
    sqlx::{Connection as _, PgConnection, postgres::PgConnectOptions, query_scalar, raw_sql},
    store::{Claimed, Token},
};

use crate::{
    any_store::{acquired, hour, name},
    databases::{options, run, with_database},
    hex, migrated, told, with_store,
};

#[tokio::test(flavor = "multi_thread")]
async fn claims_on_a_lost_connection_are_answered_and_granted_once() {
    with_store(async |store, url| {
        let killer = tokio::spawn({
            let url = url.to_owned();
            async move {
                for _ in 0..20 {
                    tokio::time::sleep(Duration::from_millis(20)).await;
                    run(
                        &url,
                        "SELECT pg_terminate_backend(pid) FROM pg_stat_activity
                         WHERE application_name = 'tower-idempotency'
                           AND datname = current_database()",
                    )
                    .await;
                }
            }
        });
        let mut lost = 0;
        while !killer.is_finished() {
            let calls = (0..64).map(|_| {
                let store = store.clone();
                tokio::spawn(async move {
                    let (name, claim) = (name("caller", &hex(Token::random())), hour());
                    let first = store.claim(&name, &claim).await;
                    let was_lost = first.is_err();
                    // Repeats the claim until the store answers; it must be the
                    // same claim.
                    let mut claimed = first;
                    while claimed.is_err() {
                        claimed = store.claim(&name, &claim).await;
                    }
                    let is_mine = match claimed.unwrap() {
                        Claimed::Acquired(grant) => grant.operation == claim.operation,
                        Claimed::Occupied(record) => record.token == claim.token,
                        Claimed::Vanished => false,
                    };
                    assert!(is_mine);
                    was_lost
                })
            });
            for was_lost in join_all(calls).await {
                lost += usize::from(was_lost.unwrap());
            }
        }
        killer.await.unwrap();
        assert!(lost > 0, "no connection was lost on its way");
    })
    .await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_cut_connection_is_an_error_and_then_forgotten() {
    with_database(async |url| {
        let store = migrated(
            PostgresStore::builder(options(&url))
                .lock_timeout(Duration::from_secs(20))
                .statement_timeout(Duration::from_secs(20)),
        )
        .await;
        let name = name("caller", "key");
        let mut blocker = PgConnection::connect(&url).await.unwrap();
        let grant = acquired(store.claim(&name, &hour()).await);
        let mut lock = blocker.begin().await.unwrap();
        raw_sql("LOCK TABLE idempotency_records")
            .execute(&mut *lock)
            .await
            .unwrap();
        let call = tokio::spawn({
            let (store, name) = (store.clone(), name.clone());
            async move { store.forget(&name, grant.fence).await }
        });
        // Cuts the connection while the call waits for the table.
        let mut killer = PgConnection::connect(&url).await.unwrap();
        let begun = Instant::now();
        loop {
            let cut: i64 = query_scalar(
                "SELECT count(pg_terminate_backend(pid)) FROM pg_stat_activity
                 WHERE wait_event_type = 'Lock' AND datname = current_database()",
            )
            .fetch_one(&mut killer)
            .await
            .unwrap();
            if cut > 0 {
                break;
            }
            assert!(begun.elapsed() < Duration::from_secs(15));
        }
        let error = call.await.unwrap().unwrap_err();
        assert_eq!(error.kind(), StoreErrorKind::Unavailable);
        lock.rollback().await.unwrap();
        assert!(store.read(&name).await.unwrap().is_some());

        // Cuts idle connections; each may fail one call.
        run(
            &url,
            "SELECT pg_terminate_backend(pid) FROM pg_stat_activity
             WHERE application_name = 'tower-idempotency' AND datname = current_database()",
        )
        .await;
        let mut failures = 0;
        while store.read(&name).await.is_err() {
            failures += 1;
            assert!(
                failures <= 10,
                "every connection of the pool failed and more"
            );
        }
        tokio::time::sleep(Duration::from_millis(100)).await;
        assert!(store.read(&name).await.unwrap().is_some());
        store.close().await;
    })
    .await;
}

#[tokio::test(flavor = "multi_thread")]
async fn connections_cut_while_idle_fail_no_call() {
    with_store(async |store, url| {
        let name = name("caller", "key");
        acquired(store.claim(&name, &hour()).await);
        run(
            &url,
            "SELECT pg_terminate_backend(pid) FROM pg_stat_activity
             WHERE application_name = 'tower-idempotency' AND datname = current_database()",
        )
        .await;
        tokio::time::sleep(Duration::from_millis(1_200)).await;
        assert!(store.read(&name).await.unwrap().is_some());
    })
    .await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_silent_server_holds_no_connection_past_a_timeout() {
    with_database(async |url| {
        let proxy = Proxy::to(&url).await;
        let store = migrated(
            PostgresStore::builder(proxy.options(&url))
                .max_connections(1)
                .statement_timeout(Duration::from_millis(500)),
        )
        .await;
        let name = name("caller", "key");
        acquired(store.claim(&name, &hour()).await);
        proxy.silence(true);
        let error = store.read(&name).await.unwrap_err();
        assert_eq!(error.kind(), StoreErrorKind::TimedOut);
        proxy.silence(false);
        let begun = Instant::now();
        while store.read(&name).await.is_err() {
            assert!(begun.elapsed() < Duration::from_secs(15));
        }
        assert!(store.read(&name).await.unwrap().is_some());
        store.close().await;
    })
    .await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 4)]
async fn a_standby_is_refused_with_its_reason() {
    with_database(async |url| {
        // A server that reports itself as a standby.
        run(
            &url,
            "CREATE SCHEMA standby;
             CREATE FUNCTION standby.pg_is_in_recovery() RETURNS boolean
             LANGUAGE sql AS 'SELECT true';
             DO $$ BEGIN EXECUTE format(
                 'ALTER DATABASE %I SET search_path = standby, pg_catalog, public',
                 current_database()); END $$",
        )
        .await;
        let error = PostgresStore::connect(&url).await.unwrap_err();
        assert_eq!(error.kind(), StoreErrorKind::Unavailable);
        assert!(told(&error).contains("standby"), "{}", told(&error));
    })
    .await;
}

#[tokio::test(flavor = "multi_thread")]
async fn errors_never_contain_keys_tokens_or_responses() {
    with_store(async |store, url| {
        run(
            &url,
            "ALTER TABLE idempotency_records ADD CHECK (length(key) < 5 OR scope = '')",
        )
        .await;
        let secret = name("the-scope", "the-key");
        let errors = [
            store.claim(&secret, &hour()).await.unwrap_err(),
            store
                .claim(&name("the-scope", "the-key\0"), &hour())
                .await
                .unwrap_err(),
            PostgresStore::connect("postgres://the-key:the-scope@127.0.0.1:1/x")
                .await
                .unwrap_err(),
        ];
        for error in &errors {
            let text = told(error);
            assert!(
                !text.contains("the-key") && !text.contains("the-scope"),
                "{text}"
            );
        }
        assert!(!format!("{store:?}").contains("postgres:"));
    })
    .await;
}

/// Stands between a store and its server, and can drop the server's answers.
struct Proxy {
    port: u16,
    silent: Arc<std::sync::atomic::AtomicBool>,
}

impl Proxy {
    async fn to(url: &str) -> Self {
        let server = (options(url).get_host().to_owned(), options(url).get_port());
        let listener = tokio::net::TcpListener::bind("127.0.0.1:0").await.unwrap();
        let port = listener.local_addr().unwrap().port();
        let silent = Arc::new(std::sync::atomic::AtomicBool::new(false));
        let swallow = silent.clone();
        tokio::spawn(async move {
            loop {
                let (client, _) = listener.accept().await.unwrap();
                let server = tokio::net::TcpStream::connect(&server).await.unwrap();
                let (mut from_client, mut to_client) = client.into_split();
                let (mut from_server, mut to_server) = server.into_split();
                let swallow = swallow.clone();
                tokio::spawn(
                    async move { tokio::io::copy(&mut from_client, &mut to_server).await },
                );
                tokio::spawn(async move {
                    use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
                    let mut said = [0; 8_192];
                    while let Ok(length @ 1..) = from_server.read(&mut said).await {
                        let silent = swallow.load(std::sync::atomic::Ordering::Relaxed);
                        if !silent && to_client.write_all(&said[..length]).await.is_err() {
                            break;
                        }
                    }
                });
            }
        });
        Self { port, silent }
    }

    fn options(&self, url: &str) -> PgConnectOptions {
        options(url).host("127.0.0.1").port(self.port)
    }

    fn silence(&self, silent: bool) {
        self.silent
            .store(silent, std::sync::atomic::Ordering::Relaxed);
    }
}
