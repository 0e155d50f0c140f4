//! Calls that wait for others: for their command, or for the connection.

use std::{
    env,
    pin::pin,
    sync::{Arc, Mutex},
    time::Duration,
};

use futures_util::{future::join_all, poll};
use tokio::{
    io::copy_bidirectional,
    net::{TcpListener, TcpStream},
    runtime::Builder,
    sync::watch,
    task::JoinSet,
    time::{sleep, timeout},
};
use tower_idempotency::{RedisStore, Scope, Store as _, store::UsageDelta};

use crate::{any_store::name, redis_servers::Keys};

#[tokio::test]
async fn call_that_fails_leaves_the_answers_of_others() {
    let prefix = format!("calls{:016x}", rand::random::<u64>());
    let url = env::var("REDIS_URL").expect("REDIS_URL");
    let store = RedisStore::builder(&url).prefix(&prefix).connect().await;
    let store = store.unwrap();
    let deltas: Vec<_> = (0..32)
        .map(|number| {
            let scope = Scope::new(format!("caller {number}")).unwrap();
            let mut delta = UsageDelta::none(scope);
            (delta.records, delta.expires_in) = (1, Duration::from_secs(60));
            [delta]
        })
        .collect();
    join_all(deltas.iter().map(|delta| store.add_usage(delta))).await;
    let client = redis::Client::open(url).unwrap();
    let mut connection = client.get_multiplexed_async_connection().await.unwrap();
    let broken = format!("{prefix}:*caller 31*");
    let keys: Vec<Vec<u8>> = redis::cmd("KEYS")
        .arg(broken)
        .query_async(&mut connection)
        .await
        .unwrap();
    let [key] = &keys[..] else {
        panic!("{} keys", keys.len());
    };
    let mut damage = redis::cmd("SET");
    damage.arg(key).arg("no hash");
    damage.exec_async(&mut connection).await.unwrap();

    let added = join_all(deltas.iter().map(|delta| store.add_usage(delta))).await;
    let failed: Vec<_> = (0..32).filter(|number| added[*number].is_err()).collect();
    assert_eq!(failed, [31]);
}

#[test]
fn runtime_that_ends_before_its_calls_are_made_fails_them() {
    let runtime = || Builder::new_current_thread().enable_all().build().unwrap();
    let (first, ended) = (runtime(), runtime());
    let store = first.block_on(Keys::on_server().connect());
    let names: Vec<_> = (0..32)
        .map(|key| name("caller", &key.to_string()))
        .collect();
    let mut reads: Vec<_> = names
        .iter()
        .map(|name| Box::pin(store.read(name)))
        .collect();
    // A few calls are sent alone.
    for (runtime, some) in [(&first, 0..4), (&ended, 4..32)] {
        runtime.block_on(async {
            for read in &mut reads[some] {
                assert!(poll!(read).is_pending());
            }
        });
    }
    drop(ended);
    let reads = first.block_on(async { timeout(PATIENCE, join_all(reads)).await });
    let failed: Vec<_> = reads.unwrap().iter().map(Result::is_err).collect();
    assert_eq!(failed, [[false; 4].as_slice(), &[true; 28]].concat());
}

#[tokio::test]
async fn call_that_nobody_polls_holds_up_no_connection() {
    let server = env::var("REDIS_URL").expect("REDIS_URL");
    let server = server.strip_prefix("redis://").unwrap().to_owned();
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let url = format!("redis://{}", listener.local_addr().unwrap());
    let (accepted, mut connections) = watch::channel(0);
    let forwarded = Arc::new(Mutex::new(JoinSet::new()));
    let forwards = Arc::clone(&forwarded);
    tokio::spawn(async move {
        loop {
            let (mut client, _) = listener.accept().await.unwrap();
            accepted.send_modify(|count| *count += 1);
            let mut server = TcpStream::connect(&server).await.unwrap();
            forwards.lock().unwrap().spawn(async move {
                sleep(Duration::from_millis(100)).await;
                let _ = copy_bidirectional(&mut client, &mut server).await;
            });
        }
    });
    let store = RedisStore::connect(&url).await.unwrap();
    forwarded.lock().unwrap().abort_all();
    let (first, second) = (name("caller", "first"), name("caller", "second"));
    let mut first = pin!(store.read(&first));
    while *connections.borrow_and_update() < 2 {
        assert!(poll!(first.as_mut()).is_pending());
        sleep(Duration::from_millis(1)).await;
    }
    // The first call is about to connect, and is not polled any more.
    let read = timeout(PATIENCE, store.read(&second)).await;
    assert!(read.expect("it waits for the first call").is_ok());
}

/// Long enough for a busy machine.
const PATIENCE: Duration = Duration::from_secs(20);
