//! A Redis cluster under random faults, with and without waiting for replicas.
//!
//! Several stores claim the same keys, and the one that acquires a key has its effect once
//! and completes it. In the end each key was acquired once, and each completion that was
//! acknowledged is there.

use std::{
    collections::BTreeMap,
    sync::{
        Arc, Mutex,
        atomic::{AtomicU64, Ordering},
    },
    time::Duration,
};

use futures_util::future::join_all;
use rand::{RngExt as _, SeedableRng as _, rngs::StdRng, seq::SliceRandom as _};
use tokio::time::{Instant, sleep, timeout};
use tower_idempotency::{
    Key, RedisStore, Scope, Store,
    store::{Claim, Claimed, Completion, Fingerprint, RecordName, RecordState, Transitioned},
};

use crate::{
    number,
    redis_nodes::{Cluster, Node, eventually},
};

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn chaos_on_a_redis_cluster_that_waits_for_replicas() {
    let findings = chaos("Redis, each write waits for its replica", 1).await;
    assert_eq!((findings.doubled, findings.lost, findings.stuck), (0, 0, 0));
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn chaos_on_a_redis_cluster_counts_what_is_lost() {
    let findings = chaos("Redis, no write waits", 0).await;
    assert_eq!(findings.stuck, 0);
    println!("  predicted by the documentation of RedisStore: \"{PREDICTION}\"",);
    let documentation = include_str!("../../src/store/redis/mod.rs").replace("\n/// ", " ");
    assert!(documentation.contains(PREDICTION));
}

const PREDICTION: &str = "After a failover the new primary may lack the last writes.";

#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
enum Fault {
    /// A primary is killed, and comes back as the replica of its successor.
    Kill,
    /// A primary is frozen, its replica promoted, and the primary wakes.
    Freeze,
    /// A replica is promoted beside its primary.
    Promote,
    /// A slot moves to another primary, and back.
    Migrate,
    /// A primary has no memory left for a while.
    Fill,
    /// All scripts are forgotten.
    Flush,
}

const FAULTS: [Fault; 6] = [
    Fault::Kill,
    Fault::Freeze,
    Fault::Promote,
    Fault::Migrate,
    Fault::Fill,
    Fault::Flush,
];

/// The end of one key.
#[derive(Default)]
struct Fate {
    acquired: u32,
    is_completed: bool,
}

struct Findings {
    keys: usize,
    faults: BTreeMap<Fault, u32>,
    refused: u64,
    doubled: usize,
    lost: usize,
    stuck: usize,
}

struct World {
    stores: Vec<RedisStore>,
    fates: Mutex<BTreeMap<String, Fate>>,
    refused: AtomicU64,
}

async fn chaos(title: &str, replicas: u32) -> Findings {
    let seed = number("CHAOS_SEED").unwrap_or_else(rand::random);
    println!("{title}: CHAOS_SEED={seed}");
    let length = Duration::from_secs(number("CHAOS_SECONDS").unwrap_or(10));
    let mut cluster = Cluster::start().await;
    let connecting = (0..3).map(|_| {
        let builder = RedisStore::builder(cluster.url()).response_timeout(Duration::from_secs(2));
        builder
            .replicas(replicas, Duration::from_millis(500))
            .connect()
    });
    let stores = join_all(connecting).await;
    let world = Arc::new(World {
        stores: stores.into_iter().map(Result::unwrap).collect(),
        fates: Mutex::default(),
        refused: AtomicU64::new(0),
    });
    let until = Instant::now() + length;
    let clients: Vec<_> = (0..CLIENTS)
        .map(|client| tokio::spawn(Arc::clone(&world).ask_until(until, client)))
        .collect();
    let mut rng = StdRng::seed_from_u64(seed);
    let faults = inject(&mut cluster, until, &mut rng).await;
    let asked = join_all(clients).await;
    let stuck = asked.into_iter().map(|stuck| stuck.unwrap()).sum();

    let findings = world.findings(faults, stuck).await;
    println!(
        "  {} keys, {} calls refused, faults {:?}\n  doubled {}, lost {}, stuck {}",
        findings.keys,
        findings.refused,
        findings.faults,
        findings.doubled,
        findings.lost,
        findings.stuck,
    );
    assert!(
        FAULTS
            .iter()
            .all(|fault| findings.faults.contains_key(fault))
    );
    findings
}

impl World {
    /// Uses one key after another, each on all stores at the same time. Returns how many
    /// did not settle.
    async fn ask_until(self: Arc<Self>, until: Instant, client: u32) -> usize {
        let mut stuck = 0;
        for number in 0.. {
            if Instant::now() > until {
                break;
            }
            let key = format!("{client}-{number}");
            let settled = join_all(self.stores.iter().map(|store| self.settle(store, &key)));
            stuck += usize::from(timeout(SETTLED_WITHIN, settled).await.is_err());
        }
        stuck
    }

    /// Asks with a key until its record is completed.
    async fn settle(&self, store: &RedisStore, key: &str) {
        let fingerprint = Fingerprint::from_bytes([0; Fingerprint::LENGTH]);
        let claim = Claim::new(fingerprint, HOUR, HOUR);
        let completion = Completion::new("done".into(), HOUR, HOUR);
        let mut is_ours = false;
        loop {
            let was_completed = self.is_completed(key);
            match store.claim(&name(key), &claim).await {
                Ok(Claimed::Acquired(_)) => is_ours |= self.acquire(key, is_ours),
                Ok(Claimed::Occupied(record)) if record.token == claim.token => {
                    is_ours |= self.acquire(key, is_ours);
                }
                Ok(Claimed::Occupied(record)) => {
                    let is_completed = matches!(record.state, RecordState::Completed { .. });
                    // A lost completion is not made again.
                    if is_completed || was_completed {
                        return;
                    }
                }
                Ok(Claimed::Vanished) => {}
                Err(_) => self.refuse(),
            }
            if is_ours {
                match store.complete(&name(key), claim.token, &completion).await {
                    Ok(Transitioned::Applied) => {
                        let mut fates = self.fates.lock().unwrap();
                        fates.entry(key.to_owned()).or_default().is_completed = true;
                        return;
                    }
                    // The claim was lost.
                    Ok(Transitioned::Superseded) => return,
                    Err(_) => self.refuse(),
                }
            }
            sleep(Duration::from_millis(20)).await;
        }
    }

    fn acquire(&self, key: &str, is_known: bool) -> bool {
        if !is_known {
            let mut fates = self.fates.lock().unwrap();
            fates.entry(key.to_owned()).or_default().acquired += 1;
        }
        true
    }

    fn is_completed(&self, key: &str) -> bool {
        let fates = self.fates.lock().unwrap();
        fates.get(key).is_some_and(|fate| fate.is_completed)
    }

    fn refuse(&self) {
        self.refused.fetch_add(1, Ordering::Relaxed);
    }

    async fn findings(&self, faults: BTreeMap<Fault, u32>, stuck: usize) -> Findings {
        let fates = std::mem::take(&mut *self.fates.lock().unwrap());
        let mut lost = 0;
        for (key, _) in fates.iter().filter(|(_, fate)| fate.is_completed) {
            let record = self.stores[0].read(&name(key)).await.unwrap();
            let state = record.map(|record| record.state);
            lost += usize::from(!matches!(state, Some(RecordState::Completed { .. })));
        }
        Findings {
            keys: fates.len(),
            doubled: fates.values().filter(|fate| fate.acquired > 1).count(),
            refused: self.refused.load(Ordering::Relaxed),
            faults,
            lost,
            stuck,
        }
    }
}

/// Injects one fault after another, each at least once, and waits until each is over.
async fn inject(cluster: &mut Cluster, until: Instant, rng: &mut StdRng) -> BTreeMap<Fault, u32> {
    let mut injected = BTreeMap::new();
    let mut deck = Vec::new();
    while Instant::now() < until || injected.len() < FAULTS.len() {
        let Some(fault) = deck.pop() else {
            deck = FAULTS.to_vec();
            deck.shuffle(rng);
            continue;
        };
        sleep(Duration::from_millis(rng.random_range(200..700))).await;
        let shard = rng.random_range(0..3);
        happen(fault, cluster, shard, rng).await;
        *injected.entry(fault).or_default() += 1;
    }
    injected
}

async fn happen(fault: Fault, cluster: &mut Cluster, shard: usize, rng: &mut StdRng) {
    let (primary, replica) = roles(cluster, shard).await;
    let node = |index: usize| &cluster.nodes[index];
    match fault {
        Fault::Kill => {
            node(primary).kill();
            becomes(node(replica), "role:master").await;
            cluster.nodes[primary].restart().await;
        }
        Fault::Freeze => {
            node(primary).freeze();
            sleep(Duration::from_millis(100)).await;
            node(replica).take_over().await;
            node(primary).thaw();
        }
        Fault::Promote => node(replica).take_over().await,
        Fault::Migrate => {
            let slot = rng.random_range(0..5_461) + (shard as u16) * 5_461;
            let (other, _) = roles(cluster, (shard + 1) % 3).await;
            cluster.migrate(slot, node(primary), node(other)).await;
            cluster.migrate(slot, node(other), node(primary)).await;
        }
        Fault::Fill => {
            node(primary)
                .ask::<()>("CONFIG SET maxmemory 1")
                .await
                .unwrap();
            sleep(Duration::from_millis(500)).await;
            node(primary)
                .ask::<()>("CONFIG SET maxmemory 0")
                .await
                .unwrap();
        }
        Fault::Flush => {
            for node in &cluster.nodes {
                node.ask::<()>("SCRIPT FLUSH").await.unwrap();
            }
        }
    }
    let (_, replica) = roles(cluster, shard).await;
    cluster.nodes[replica].catches_up().await;
}

/// The primary and the replica of a shard, once they agree.
async fn roles(cluster: &Cluster, shard: usize) -> (usize, usize) {
    let mut found = None;
    eventually("a shard has one primary", async || {
        let of = async |index: usize| {
            let info = cluster.nodes[index].ask::<String>("INFO replication").await;
            info.unwrap_or_default()
        };
        let is_primary = async |index| of(index).await.contains("role:master");
        found = match (is_primary(shard).await, is_primary(shard + 3).await) {
            (true, false) => Some((shard, shard + 3)),
            (false, true) => Some((shard + 3, shard)),
            _ => None,
        };
        found.is_some()
    })
    .await;
    found.expect("it was found")
}

async fn becomes(node: &Node, role: &str) {
    eventually(role, async || {
        let info = node.ask::<String>("INFO replication").await;
        info.is_ok_and(|info| info.contains(role))
    })
    .await;
}

fn name(key: &str) -> RecordName {
    RecordName::new(Scope::single_tenant(), Key::new(key))
}

const CLIENTS: u32 = 32;
const HOUR: Duration = Duration::from_secs(3600);

/// A failover, a restart and the timeouts of a call take a few seconds each.
const SETTLED_WITHIN: Duration = Duration::from_secs(60);
