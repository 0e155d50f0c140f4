//! Real processes on a real store under random faults. In the end each key has one
//! effect and one answer.
//!
//! `CHAOS_SECONDS` sets the time of the faults on each store, and `CHAOS_SEED`
//! their order. `./tests/run chaos` runs this test alone.

#![cfg(unix)]
#![allow(
    clippy::print_stdout,
    reason = "the table is what it has to say, passed or failed"
)]

mod clients;
mod faults;
mod oracle;
mod place;
#[path = "../ports/mod.rs"]
mod ports;
mod processes;
mod proxy;
mod redis;
#[path = "../redis_servers/nodes.rs"]
mod redis_nodes;
mod server;

use std::{
    env,
    path::PathBuf,
    sync::{Arc, atomic::AtomicUsize},
    time::Duration,
};

use futures_util::{StreamExt as _, future::join_all, stream};
use rand::{SeedableRng as _, rngs::StdRng};
use tokio::time::{self, Instant};

use self::{
    clients::Case,
    faults::Injected,
    oracle::Findings,
    place::Place,
    processes::{Notices, Seat},
};

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn chaos_on_postgres() {
    chaos("PostgreSQL", Place::postgres().await).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn chaos_through_pgbouncer() {
    chaos("PgBouncer", Place::pgbouncer().await).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn chaos_on_sqlite() {
    chaos("SQLite", Place::sqlite()).await;
}

/// The processes, their logs and their runs.
pub(crate) struct World {
    /// Processes with `Recovery::Rerun`.
    pub(crate) rerunning: Vec<Seat>,
    /// Processes with `Recovery::Refuse`.
    pub(crate) refusing: Vec<Seat>,
    pub(crate) notices: Arc<Notices>,
    /// The file with a line for each run of a handler.
    pub(crate) runs: PathBuf,
    /// The number of COMMITs that waited for a missing standby.
    pub(crate) stalled_commits: AtomicUsize,
}

impl World {
    fn on(place: &Place) -> Self {
        let name = format!("chaos-{:016x}.runs", rand::random::<u64>());
        let runs = env::temp_dir().join(name);
        let notices = Arc::new(Notices::default());
        let seat = |recovery: &str| {
            let settings = [
                ("PORT", "0"),
                ("LEASE_MS", "800"),
                ("WAIT_MS", "500"),
                ("STORE_TIMEOUT_MS", "400"),
                ("RECOVERY", recovery),
                // More attempts in a row fail here than any default allows.
                ("ATTEMPTS", "100"),
                ("POOLER", if place.is_pooled() { "1" } else { "0" }),
                ("STORE", &place.address()),
                ("RUNS", runs.to_str().unwrap()),
            ];
            let environment = settings.map(|(name, value)| (name, value.to_owned()));
            Seat::open(environment.into(), Arc::clone(&notices))
        };
        Self {
            rerunning: (0..3).map(|_| seat("rerun")).collect(),
            refusing: (0..2).map(|_| seat("refuse")).collect(),
            notices,
            runs,
            stalled_commits: AtomicUsize::new(0),
        }
    }
}

impl Drop for World {
    fn drop(&mut self) {
        let _ = std::fs::remove_file(&self.runs);
    }
}

async fn chaos(name: &'static str, mut place: Place) {
    let seed = number("CHAOS_SEED").unwrap_or_else(rand::random);
    println!("{name}: CHAOS_SEED={seed}");
    let length = Duration::from_secs(number("CHAOS_SECONDS").unwrap_or(15));
    let world = World::on(&place);
    let mut rng = StdRng::seed_from_u64(seed);
    let (mut cases, mut injected) = (Vec::new(), Vec::new());
    let mut faults = Vec::new();
    for period in 0..PERIODS {
        let until = Instant::now() + length;
        let clients = (0..CLIENTS).map(|client| client + period * CLIENTS);
        let clients = join_all(clients.map(|client| ask_until(until, &world, client, seed)));
        let injecting = faults::inject(&world, &mut place, until, &mut rng);
        let (asked, happened) = tokio::join!(clients, injecting);
        cases.extend(asked.concat());
        injected.extend(happened);
        cases = ask_again(&world, cases, &injected, seed).await;
        let findings = Findings::gather(name, &place, &world, &cases, &injected).await;
        println!("{findings}");
        faults = findings.faults();
        if !findings.is_sound() || faults.is_empty() {
            break;
        }
        // A slow machine needs more time for every fault to show.
    }
    assert!(
        faults.is_empty(),
        "{name}: CHAOS_SEED={seed}\n{}",
        faults.join("\n")
    );
}

/// Runs one client, which uses one key after another.
async fn ask_until(until: Instant, world: &World, client: u64, seed: u64) -> Vec<Case> {
    let mut rng = StdRng::seed_from_u64(seed.wrapping_add(1 + client));
    let mut cases = Vec::new();
    while Instant::now() < until {
        let mut case = Case::new(client, cases.len(), &mut rng);
        case.pursue(world, until, &mut rng).await;
        if case.is_large && case.is_final {
            case.insist(world, &mut rng).await;
        }
        case.ended = Instant::now();
        cases.push(case);
    }
    cases
}

/// After the last fault, asks with every key again. Each must get its final answer
/// in time, the same as before.
async fn ask_again(world: &World, cases: Vec<Case>, injected: &[Injected], seed: u64) -> Vec<Case> {
    let asking = cases.into_iter().enumerate().map(|(index, mut case)| {
        let mut rng = StdRng::seed_from_u64(seed.wrapping_sub(index as u64));
        async move {
            let until = Instant::now() + SETTLED_WITHIN;
            case.pursue(world, until, &mut rng).await;
            case
        }
    });
    let mut cases: Vec<_> = stream::iter(asking)
        .buffer_unordered(CLIENTS as usize)
        .collect()
        .await;
    // SQLite has one writer, and an order may hold it for longer than the store
    // timeout. A key that does not settle without other requests is stuck.
    let runs = oracle::runs(world);
    for case in &mut cases {
        let runs = runs.get(&case.key).copied().unwrap_or_default();
        let mut rng = StdRng::seed_from_u64(seed);
        let until = Instant::now() + SETTLED_WITHIN;
        while oracle::is_unsettled(case, runs, injected) && Instant::now() < until {
            case.is_slow = true;
            case.pursue(world, until, &mut rng).await;
            if !case.done.is_empty() {
                break;
            }
            time::sleep(Duration::from_millis(200)).await;
        }
    }
    cases
}

fn number(variable: &str) -> Option<u64> {
    let text = env::var(variable).ok()?;
    Some(
        text.parse()
            .unwrap_or_else(|_| panic!("{variable}={text:?} is no number")),
    )
}

const CLIENTS: u64 = 14;

/// The most periods of faults, until each fault has shown.
const PERIODS: u64 = 4;

/// The wait, the lease and one attempt take 2.5 s at most. The rest is for the
/// reads after a commit without an answer, and for a busy machine.
const SETTLED_WITHIN: Duration = Duration::from_secs(15);
