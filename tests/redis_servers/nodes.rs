//! Nodes of one test, which it may freeze, kill and promote.

#![allow(dead_code, reason = "not every test binary uses all of it")]

use std::{
    path::PathBuf,
    process::{Child, Command, Stdio},
    time::Duration,
};

use redis::{Client, FromRedisValue, RedisResult};
use tokio::time::{sleep, timeout};

use crate::ports::free_port;

/// A server on a free port of the loopback interface, killed when it is dropped.
pub(crate) struct Node {
    pub(crate) port: u16,
    process: Child,
    arguments: Vec<String>,
    directory: PathBuf,
}

impl Node {
    /// Starts a server with more arguments.
    pub(crate) async fn start(arguments: &[&str]) -> Self {
        Self::start_with(&[], &[&["--save", ""], arguments].concat()).await
    }

    async fn start_with(first: &[&str], last: &[&str]) -> Self {
        let port = free_port();
        let directory = std::env::temp_dir().join(format!("idempotency-redis-{port}"));
        std::fs::create_dir_all(&directory).unwrap();
        let own = [
            "--port",
            &port.to_string(),
            "--bind",
            "127.0.0.1",
            "--dir",
            directory.to_str().unwrap(),
        ];
        let arguments = [first, &own, last].concat();
        let arguments: Vec<_> = arguments.into_iter().map(str::to_owned).collect();
        let node = Self {
            port,
            process: run(&arguments),
            arguments,
            directory,
        };
        eventually("a server answers", async || {
            node.ask::<String>("PING").await.is_ok()
        })
        .await;
        node
    }

    /// Starts a replica that has caught up.
    pub(crate) async fn replica_of(primary: &Self) -> Self {
        let address = format!("127.0.0.1 {}", primary.port);
        let replica =
            Self::start(&["--replicaof", &address, "--repl-diskless-sync-delay", "0"]).await;
        replica.catches_up().await;
        replica
    }

    /// Starts a Sentinel that watches `primary` as `service`.
    pub(crate) async fn sentinel(primary: &Self) -> Self {
        let file = std::env::temp_dir().join(format!("idempotency-sentinel-{}.conf", primary.port));
        let settings = format!(
            "sentinel monitor service 127.0.0.1 {} 1\n\
             sentinel down-after-milliseconds service 500\n\
             sentinel failover-timeout service 3000\n",
            primary.port
        );
        std::fs::write(&file, settings).unwrap();
        Self::start_with(&[file.to_str().unwrap(), "--sentinel"], &[]).await
    }

    pub(crate) async fn catches_up(&self) {
        eventually("a replica catches up", async || {
            let info = self.ask::<String>("INFO replication").await;
            info.is_ok_and(|info| info.contains("master_link_status:up"))
        })
        .await;
    }

    pub(crate) fn url(&self) -> String {
        format!("redis://127.0.0.1:{}", self.port)
    }

    /// Sends a command, given as its words, over a connection of its own.
    pub(crate) async fn ask<T: FromRedisValue>(&self, words: &str) -> RedisResult<T> {
        let mut words = words.split(' ');
        let mut command = redis::cmd(words.next().unwrap_or_default());
        command.arg(words.collect::<Vec<_>>());
        self.command(&command).await
    }

    pub(crate) async fn command<T: FromRedisValue>(&self, command: &redis::Cmd) -> RedisResult<T> {
        let client = Client::open(self.url())?;
        let mut connection = client.get_multiplexed_async_connection().await?;
        command.query_async(&mut connection).await
    }

    /// Makes this replica the primary of its shard, whatever the primary does.
    pub(crate) async fn take_over(&self) {
        self.ask::<()>("CLUSTER FAILOVER TAKEOVER").await.unwrap();
        eventually("the replica is promoted", async || {
            let role = self.ask::<String>("INFO replication").await;
            role.is_ok_and(|info| info.contains("role:master"))
        })
        .await;
    }

    /// Starts the server again after it was killed, without its records.
    pub(crate) async fn restart(&mut self) {
        self.process.wait().unwrap();
        self.process = run(&self.arguments);
        eventually("a server answers", async || {
            self.ask::<String>("PING").await.is_ok()
        })
        .await;
    }

    pub(crate) fn freeze(&self) {
        self.signal("-STOP");
    }

    pub(crate) fn thaw(&self) {
        self.signal("-CONT");
    }

    pub(crate) fn kill(&self) {
        self.signal("-KILL");
    }

    fn signal(&self, signal: &str) {
        let process = self.process.id().to_string();
        let sent = Command::new("kill").args([signal, &process]).status();
        assert!(sent.unwrap().success());
    }
}

impl Drop for Node {
    fn drop(&mut self) {
        let _ = self.process.kill();
        let _ = self.process.wait();
        let _ = std::fs::remove_dir_all(&self.directory);
    }
}

/// Three primaries, and as many replicas: the replica of `nodes[n]` is `nodes[n + 3]`.
pub(crate) struct Cluster {
    pub(crate) nodes: Vec<Node>,
}

impl Cluster {
    pub(crate) async fn start() -> Self {
        let mut nodes = Vec::new();
        for epoch in 1..=6 {
            let node = Node::start(&[
                "--cluster-enabled",
                "yes",
                "--cluster-node-timeout",
                "1000",
                "--cluster-require-full-coverage",
                "no",
                "--cluster-replica-validity-factor",
                "0",
                "--repl-diskless-sync-delay",
                "0",
            ])
            .await;
            let epoch = format!("CLUSTER SET-CONFIG-EPOCH {epoch}");
            node.ask::<()>(&epoch).await.unwrap();
            nodes.push(node);
        }
        let cluster = Self { nodes };
        cluster.join().await;
        cluster
    }

    async fn join(&self) {
        for (shard, primary) in self.nodes.iter().take(3).enumerate() {
            let (first, last) = (shard * SLOTS / 3, (shard + 1) * SLOTS / 3 - 1);
            let slots = format!("CLUSTER ADDSLOTSRANGE {first} {last}");
            primary.ask::<()>(&slots).await.unwrap();
        }
        for node in &self.nodes[1..] {
            let meet = format!("CLUSTER MEET 127.0.0.1 {}", self.nodes[0].port);
            node.ask::<()>(&meet).await.unwrap();
        }
        self.all(
            "every node knows the others",
            "CLUSTER INFO",
            "cluster_known_nodes:6",
        )
        .await;
        for shard in 0..3 {
            let id = self.nodes[shard]
                .ask::<String>("CLUSTER MYID")
                .await
                .unwrap();
            let replicate = format!("CLUSTER REPLICATE {id}");
            let replica = &self.nodes[shard + 3];
            eventually("a node becomes a replica", async || {
                replica.ask::<()>(&replicate).await.is_ok()
            })
            .await;
        }
        for replica in &self.nodes[3..] {
            replica.catches_up().await;
        }
        self.all(
            "the cluster is complete",
            "CLUSTER INFO",
            "cluster_state:ok",
        )
        .await;
    }

    async fn all(&self, what: &str, question: &str, answer: &str) {
        for node in &self.nodes {
            eventually(what, async || {
                let answered = node.ask::<String>(question).await;
                answered.is_ok_and(|text| text.contains(answer))
            })
            .await;
        }
    }

    pub(crate) fn url(&self) -> String {
        let addresses = self
            .nodes
            .iter()
            .map(|node| format!("127.0.0.1:{}", node.port));
        format!(
            "redis+cluster://{}",
            addresses.collect::<Vec<_>>().join(",")
        )
    }

    /// Makes the replica of a shard its primary, whatever the primary does.
    pub(crate) async fn promote(&self, shard: usize) {
        let replica = &self.nodes[shard + 3];
        replica
            .ask::<()>("CLUSTER FAILOVER TAKEOVER")
            .await
            .unwrap();
        eventually("the replica is promoted", async || {
            let role = replica.ask::<String>("INFO replication").await;
            role.is_ok_and(|info| info.contains("role:master"))
        })
        .await;
    }

    /// Moves a slot with its keys from one primary to another.
    pub(crate) async fn migrate(&self, slot: u16, from: &Node, to: &Node) {
        let from_id = from.ask::<String>("CLUSTER MYID").await.unwrap();
        let to_id = to.ask::<String>("CLUSTER MYID").await.unwrap();
        let set = |state: String| format!("CLUSTER SETSLOT {slot} {state}");
        to.ask::<()>(&set(format!("IMPORTING {from_id}")))
            .await
            .unwrap();
        from.ask::<()>(&set(format!("MIGRATING {to_id}")))
            .await
            .unwrap();
        loop {
            let keys = format!("CLUSTER GETKEYSINSLOT {slot} 10");
            let keys: Vec<Vec<u8>> = from.ask(&keys).await.unwrap();
            if keys.is_empty() {
                break;
            }
            let mut migrate = redis::cmd("MIGRATE");
            migrate
                .arg("127.0.0.1")
                .arg(to.port)
                .arg("")
                .arg(0)
                .arg(5_000);
            migrate.arg("KEYS").arg(keys);
            from.command::<redis::Value>(&migrate).await.unwrap();
        }
        let node = set(format!("NODE {to_id}"));
        to.ask::<()>(&node).await.unwrap();
        from.ask::<()>(&node).await.unwrap();
    }
}

fn run(arguments: &[String]) -> Child {
    let mut server = Command::new("redis-server");
    server.args(arguments).stdout(Stdio::null());
    server
        .spawn()
        .expect("redis-server of Debian's package of that name")
}

/// Returns the shard that has a slot at first.
pub(crate) fn shard_of(slot: u16) -> usize {
    let first = |shard: usize| shard * SLOTS / 3;
    (0..3)
        .rfind(|shard| usize::from(slot) >= first(*shard))
        .unwrap_or_default()
}

/// Waits for what must happen soon.
pub(crate) async fn eventually(what: &str, mut happens: impl AsyncFnMut() -> bool) {
    let waiting = async {
        while !happens().await {
            sleep(Duration::from_millis(20)).await;
        }
    };
    let waited = timeout(LONGEST, waiting).await;
    waited.unwrap_or_else(|_| panic!("within {LONGEST:?}: {what}"));
}

const SLOTS: usize = 16_384;
const LONGEST: Duration = Duration::from_secs(30);
