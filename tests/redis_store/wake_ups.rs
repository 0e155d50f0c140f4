//! Waiters of another process: of another store on the same servers.

use std::{pin::pin, time::Duration};

use tokio::time::timeout;
use tower_idempotency::{RedisStore, Release, Store};

use crate::{
    any_store::{HOUR, acquired, applied, done, hour, name},
    connect,
    redis_nodes::Node,
    redis_servers::Keys,
};

/// Long enough for a busy machine.
const PATIENCE: Duration = Duration::from_secs(20);
/// Long enough for a wake-up that should not come.
const SOON: Duration = Duration::from_millis(200);

async fn is_woken_by_each_end(store: &RedisStore, other: &RedisStore) {
    for end in ["complete", "release", "unknown"] {
        let (name, claim) = (name("caller", end), hour());
        let seen = acquired(store.claim(&name, &claim).await).fence;
        let mut waiter = pin!(other.wait(&name, seen));
        assert!(timeout(SOON, &mut waiter).await.is_err());
        applied(store.renew(&name, claim.token, HOUR).await);
        assert!(timeout(SOON, &mut waiter).await.is_err());
        let token = claim.token;
        applied(match end {
            "complete" => store.complete(&name, token, &done()).await,
            "release" => store.release(&name, token, Release::AnyRequest).await,
            _ => store.mark_unknown(&name, token, HOUR).await,
        });
        timeout(PATIENCE, waiter).await.unwrap().unwrap();
        // It has ended: a later waiter returns at once.
        let late = timeout(PATIENCE, other.wait(&name, seen)).await;
        late.unwrap().unwrap();
    }
}

#[tokio::test]
async fn a_waiter_is_woken_when_its_claim_ends_elsewhere() {
    let keys = Keys::on_server();
    let (store, other) = (keys.connect().await, keys.connect().await);
    Box::pin(is_woken_by_each_end(&store, &other)).await;
}

#[tokio::test]
async fn a_waiter_on_a_cluster_is_woken_when_its_claim_ends_elsewhere() {
    let keys = Keys::on_cluster();
    let (store, other) = (keys.connect().await, keys.connect().await);
    Box::pin(is_woken_by_each_end(&store, &other)).await;
}

#[tokio::test]
async fn waiters_subscribe_again_after_a_lost_connection() {
    let node = Node::start(&[]).await;
    let (store, other) = (connect(&node.url()).await, connect(&node.url()).await);
    for round in 0..2 {
        let (name, claim) = (name("caller", &round.to_string()), hour());
        let seen = acquired(store.claim(&name, &claim).await).fence;
        let mut waiter = pin!(other.wait(&name, seen));
        assert!(timeout(SOON, &mut waiter).await.is_err());
        applied(store.complete(&name, claim.token, &done()).await);
        timeout(PATIENCE, waiter).await.unwrap().unwrap();
        let mut kill = redis::cmd("CLIENT");
        kill.arg("KILL").arg("TYPE").arg("pubsub");
        let _: redis::Value = node.command(&kill).await.unwrap();
    }
}

#[tokio::test]
async fn a_waiter_that_leaves_ends_its_subscription() {
    let node = Node::start(&[]).await;
    let store = connect(&node.url()).await;
    let (name, claim) = (name("caller", "key"), hour());
    let seen = acquired(store.claim(&name, &claim).await).fence;
    let channels = async || -> Vec<Vec<u8>> {
        let mut command = redis::cmd("PUBSUB");
        command.arg("SHARDCHANNELS");
        node.command(&command).await.unwrap()
    };
    {
        let mut waiters = [0, 1].map(|_| Box::pin(store.wait(&name, seen)));
        for waiter in &mut waiters {
            assert!(timeout(SOON, waiter).await.is_err());
        }
        assert_eq!(channels().await.len(), 1);
    }
    timeout(PATIENCE, async {
        while !channels().await.is_empty() {
            tokio::time::sleep(Duration::from_millis(10)).await;
        }
    })
    .await
    .unwrap();
}

#[test]
fn a_waiter_may_be_dropped_outside_of_a_runtime() {
    let runtime = tokio::runtime::Runtime::new().unwrap();
    let keys = Keys::on_server();
    let store = runtime.block_on(keys.connect());
    let (name, claim) = (name("caller", "key"), hour());
    let seen = acquired(runtime.block_on(store.claim(&name, &claim))).fence;
    let mut waiter = Box::pin(store.wait(&name, seen));
    let waited = runtime.block_on(async { timeout(SOON, &mut waiter).await });
    assert!(waited.is_err());
    drop(waiter);
    // The store still serves.
    let completed = runtime.block_on(store.complete(&name, claim.token, &done()));
    applied(completed);
}
