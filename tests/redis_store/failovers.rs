//! Primaries that freeze, wake and die, and replicas that are promoted.

use std::time::Duration;

use futures_util::future::join_all;
use tower_idempotency::{
    RedisStore, Store, StoreErrorKind,
    store::{Claimed, RecordState},
};

use crate::{
    any_store::{acquired, applied, done, hour, name},
    connect, names_in,
    redis_nodes::{Cluster, Node, eventually},
};

#[tokio::test]
async fn a_claim_that_no_replica_has_is_never_acquired() {
    let primary = Node::start(&[]).await;
    let replica = Node::replica_of(&primary).await;
    let waiting = || RedisStore::builder(primary.url()).replicas(1, Duration::from_millis(200));
    let store = waiting().connect().await.unwrap();
    replica.freeze();
    let (name, claim) = (name("caller", "key"), hour());
    let refused = store.claim(&name, &claim).await.unwrap_err();
    assert_eq!(refused.kind(), StoreErrorKind::Unavailable);
    assert!(
        refused.to_string().contains("0 of 1 `replicas`"),
        "{refused}"
    );
    // Asked again over a new connection, whose only write is this one.
    let again = waiting().connect().await.unwrap();
    let refused = again.claim(&name, &claim).await.unwrap_err();
    assert!(
        refused.to_string().contains("0 of 1 `replicas`"),
        "{refused}"
    );
    let fence = again.read(&name).await.unwrap().unwrap().fence;

    replica.thaw();
    replica.catches_up().await;
    let claimed = eventually_ok(|| again.claim(&name, &claim)).await;
    let Claimed::Occupied(record) = claimed else {
        panic!("the claim was made before: {claimed:?}");
    };
    assert_eq!(record.token, claim.token);
    assert!(record.fence > fence);
    applied(store.complete(&name, claim.token, &done()).await);
}

/// Makes a call until it succeeds.
async fn eventually_ok<T, E>(mut call: impl AsyncFnMut() -> Result<T, E>) -> T {
    let mut answer = None;
    eventually("the call succeeds", async || {
        answer = call().await.ok();
        answer.is_some()
    })
    .await;
    answer.expect("it succeeded")
}

#[tokio::test(flavor = "multi_thread")]
async fn a_frozen_primary_that_wakes_grants_nothing_twice() {
    let cluster = Cluster::start().await;
    let names = names_in(&cluster.nodes[0], 0, 20).await;
    let waiting = || {
        RedisStore::builder(cluster.url())
            .replicas(1, Duration::from_millis(500))
            .response_timeout(Duration::from_secs(8))
    };
    let before = waiting().connect().await.unwrap();
    // Connections and scripts are there before the freeze.
    for warm in names_in(&cluster.nodes[0], 0, 40).await.split_off(20) {
        acquired(before.claim(&warm, &hour()).await);
    }
    let frozen = &cluster.nodes[0];
    frozen.freeze();
    let pending: Vec<_> = names
        .iter()
        .map(|name| {
            let (store, name) = (before.clone(), name.clone());
            tokio::spawn(async move { store.claim(&name, &hour()).await })
        })
        .collect();
    tokio::time::sleep(Duration::from_millis(100)).await;
    cluster.nodes[3].take_over().await;
    // The promoted one has no replica until the frozen one wakes.
    let after = connect(&cluster.url()).await;
    let mut granted = Vec::new();
    for name in &names {
        let claim = hour();
        let claimed = eventually_ok(|| after.claim(name, &claim)).await;
        granted.push(match claimed {
            Claimed::Acquired(_) => true,
            Claimed::Occupied(record) => record.token == claim.token,
            Claimed::Vanished => false,
        });
    }
    frozen.thaw();
    for (pending, is_granted) in join_all(pending).await.into_iter().zip(granted) {
        let both = is_granted && matches!(pending.unwrap(), Ok(Claimed::Acquired(_)));
        assert!(!both, "a key was granted by both primaries");
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_frozen_primary_stops_its_own_shard_alone_and_for_a_while() {
    let cluster = Cluster::start().await;
    let timeout = Duration::from_millis(500);
    let builder = RedisStore::builder(cluster.url()).response_timeout(timeout);
    let store = builder.connect().await.unwrap();
    let names = names_in(&cluster.nodes[0], 0, 40).await;
    acquired(store.claim(&names[0], &hour()).await);
    cluster.nodes[0].freeze();

    let others = [1, 2].map(|shard| {
        let (store, node) = (store.clone(), &cluster.nodes[1]);
        async move {
            for name in names_in(node, shard, 30).await {
                acquired(store.claim(&name, &hour()).await);
                tokio::time::sleep(Duration::from_millis(50)).await;
            }
        }
    });
    let own = async {
        let mut fresh = names[1..].iter().cycle();
        // The primary stays frozen: its replica takes over.
        eventually_ok(async || {
            let name = fresh.next().expect("a cycle has no end");
            let claimed = store.claim(name, &hour()).await;
            if let Err(error) = &claimed {
                let kind = error.kind();
                let is_known = [StoreErrorKind::TimedOut, StoreErrorKind::Unavailable];
                assert!(is_known.contains(&kind), "{error}");
            }
            claimed
        })
        .await;
    };
    tokio::join!(own, join_all(others));
}

#[tokio::test(flavor = "multi_thread")]
async fn scripts_come_back_while_another_primary_is_down() {
    let cluster = Cluster::start().await;
    let store = connect(&cluster.url()).await;
    let names = names_in(&cluster.nodes[0], 0, 20).await;
    acquired(store.claim(&names[0], &hour()).await);
    cluster.nodes[2].kill();
    cluster.nodes[5].kill();
    cluster.nodes[0].ask::<()>("SCRIPT FLUSH").await.unwrap();
    let claim = hour();
    acquired(store.claim(&names[1], &claim).await);
    applied(store.complete(&names[1], claim.token, &done()).await);

    cluster.nodes[3].take_over().await;
    let claim = hour();
    let claimed = eventually_ok(|| store.claim(&names[2], &claim)).await;
    let is_ours = match claimed {
        Claimed::Acquired(_) => true,
        Claimed::Occupied(record) => record.token == claim.token,
        Claimed::Vanished => false,
    };
    assert!(is_ours);
    applied(store.complete(&names[2], claim.token, &done()).await);
    let record = store.read(&names[1]).await.unwrap().unwrap();
    assert!(matches!(record.state, RecordState::Completed { .. }));
}

#[tokio::test(flavor = "multi_thread")]
async fn sentinel_names_the_new_primary() {
    let primary = Node::start(&[]).await;
    let replica = Node::replica_of(&primary).await;
    let sentinel = Node::sentinel(&primary).await;
    eventually("the sentinel knows the replica", async || {
        let known = sentinel.ask::<String>("INFO sentinel").await;
        known.is_ok_and(|info| info.contains("slaves=1"))
    })
    .await;
    let url = format!("redis+sentinel://127.0.0.1:{}/service", sentinel.port);
    let builder = RedisStore::builder(url).response_timeout(Duration::from_millis(500));
    let store = builder.connect().await.unwrap();
    let (first, claim) = (name("caller", "first"), hour());
    acquired(store.claim(&first, &claim).await);
    replica.catches_up().await;
    eventually("the replica has the claim", async || {
        replica
            .ask::<u32>("DBSIZE")
            .await
            .is_ok_and(|keys| keys > 0)
    })
    .await;
    // It stays frozen, and its connections stay open.
    primary.freeze();
    eventually("the sentinel promotes the replica", async || {
        sentinel
            .ask::<()>("SENTINEL FAILOVER service")
            .await
            .is_ok()
            || replica
                .ask::<String>("INFO replication")
                .await
                .is_ok_and(|info| info.contains("role:master"))
    })
    .await;
    let (second, its_claim) = (name("caller", "second"), hour());
    eventually_ok(|| store.claim(&second, &its_claim)).await;
    applied(store.complete(&first, claim.token, &done()).await);
}
