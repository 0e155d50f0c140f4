//! Usage that is added up while answers get lost.

use std::{
    env,
    sync::{
        Arc,
        atomic::{AtomicBool, Ordering},
    },
    time::Duration,
};

use tokio::{
    io::{AsyncReadExt as _, AsyncWriteExt as _},
    net::{TcpListener, TcpStream},
};
use tower_idempotency::{
    RedisStore, Scope,
    store::{Store as _, UsageDelta},
};

#[tokio::test(flavor = "multi_thread")]
async fn usage_whose_answer_is_lost_is_not_added_twice() {
    let loses = Arc::new(AtomicBool::new(false));
    let url = proxy(Arc::clone(&loses)).await;
    let prefix = format!("usage{:016x}", rand::random::<u64>());
    let store = RedisStore::builder(&url).prefix(&prefix).connect().await;
    let store = store.unwrap();
    let scope = Scope::new("caller").unwrap();
    let mut delta = UsageDelta::none(scope.clone());
    delta.expires_in = Duration::from_secs(3600);
    delta.period = Duration::from_secs(3600);
    delta.records = 1;
    store.add_usage(&[delta.clone()]).await.unwrap();

    loses.store(true, Ordering::SeqCst);
    store.add_usage(&[delta]).await.unwrap_err();
    assert!(!loses.load(Ordering::SeqCst), "no answer was lost");
    let usage = store.add_usage(&[UsageDelta::none(scope)]).await.unwrap();
    let records: i64 = usage.iter().flatten().map(|usage| usage.records).sum();
    assert_eq!(records, 2);
}

/// A proxy that closes a connection in place of the next answer to a report of usage.
async fn proxy(loses: Arc<AtomicBool>) -> String {
    let server = env::var("REDIS_URL").expect("REDIS_URL");
    let server = server.strip_prefix("redis://").unwrap().to_owned();
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let url = format!("redis://{}", listener.local_addr().unwrap());
    tokio::spawn(async move {
        loop {
            let (client, _) = listener.accept().await.unwrap();
            let server = TcpStream::connect(&server).await.unwrap();
            tokio::spawn(forward(client, server, Arc::clone(&loses)));
        }
    });
    url
}

async fn forward(mut client: TcpStream, mut server: TcpStream, loses: Arc<AtomicBool>) {
    let (mut asked, mut answered) = ([0; 1 << 16], [0; 1 << 16]);
    let mut reports_usage = false;
    loop {
        tokio::select! {
            read = client.read(&mut asked) => {
                let Ok(read @ 1..) = read else { return };
                reports_usage = asked[..read].windows(6).any(|window| window == b"\0usage");
                server.write_all(&asked[..read]).await.unwrap();
            }
            read = server.read(&mut answered) => {
                let Ok(read @ 1..) = read else { return };
                if reports_usage && loses.swap(false, Ordering::SeqCst) {
                    return;
                }
                client.write_all(&answered[..read]).await.unwrap();
            }
        }
    }
}
