//! The faults, and their times.

use std::{
    sync::atomic::{AtomicUsize, Ordering},
    time::Duration,
};

use rand::{RngExt as _, rngs::StdRng, seq::SliceRandom as _};
use tokio::time::{self, Instant};

use crate::{World, place::Place, processes::Seat};

/// A fault.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Fault {
    /// A process is killed, and another one is started in its place.
    Kill,
    /// Processes are stopped for longer than their leases, and resume.
    Stop,
    /// All connections to the server break.
    Cut,
    /// The network carries no bytes for longer than the store timeout.
    Stall,
    /// The network carries the server's answers slowly: a large one takes longer
    /// than the store timeout.
    Trickle,
    /// COMMITs wait for a missing standby for longer than the store timeout.
    Standby,
    /// A COMMIT does not arrive.
    CommitCut,
    /// A COMMIT arrives, and its answer does not.
    AnswerCut,
    /// The server ends its connections.
    Terminate,
    /// The server crashes, and is started again.
    Crash,
    /// Processes have a full disk, until they are started again.
    FullDisk,
}

impl Fault {
    pub(crate) fn name(self) -> &'static str {
        match self {
            Self::Kill => "process killed",
            Self::Stop => "processes stopped past leases",
            Self::Cut => "connections cut",
            Self::Stall => "network stalled",
            Self::Trickle => "network slow for large answers",
            Self::Standby => "synchronous standby gone",
            Self::CommitCut => "COMMIT cut off",
            Self::AnswerCut => "answer to COMMIT cut off",
            Self::Terminate => "backends terminated",
            Self::Crash => "server crashed",
            Self::FullDisk => "disk full",
        }
    }
}

const WITH_A_FILE: &[Fault] = &[Fault::Kill, Fault::Stop, Fault::FullDisk];
const WITH_A_SERVER: &[Fault] = &[
    Fault::Kill,
    // Only this fault lets a fenced owner try to commit.
    Fault::Stop,
    Fault::Stop,
    Fault::Stop,
    Fault::Cut,
    Fault::Stall,
    Fault::Trickle,
    Fault::Standby,
    Fault::CommitCut,
    Fault::AnswerCut,
    Fault::Terminate,
    Fault::Crash,
];

/// The file keeps its pages, and gets no more.
const NO_MORE_PAGES: (&str, &str) = ("SQLITE_PAGES", "1");

/// A fault and its time.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Injected {
    pub(crate) fault: Fault,
    pub(crate) begun: Instant,
    pub(crate) ended: Instant,
}

/// Injects one fault after another.
pub(crate) async fn inject(
    world: &World,
    place: &mut Place,
    until: Instant,
    rng: &mut StdRng,
) -> Vec<Injected> {
    let mut injected = Vec::new();
    let mut deck = Vec::new();
    while Instant::now() < until {
        time::sleep(Duration::from_millis(rng.random_range(200..700))).await;
        if deck.is_empty() {
            deck = shuffled(world, place, rng);
        }
        let Some(fault) = deck.pop() else {
            break;
        };
        let begun = Instant::now();
        if happen(fault, world, place, rng).await {
            injected.push(Injected {
                fault,
                begun,
                ended: Instant::now(),
            });
        }
    }
    injected
}

/// All faults in random order. Those whose effect has not been seen come first, at
/// the end of the deck.
fn shuffled(world: &World, place: &Place, rng: &mut StdRng) -> Vec<Fault> {
    let notices = &world.notices;
    let mut deck = match place {
        Place::Sqlite { .. } => WITH_A_FILE.to_vec(),
        Place::Postgres { .. } => WITH_A_SERVER.to_vec(),
    };
    deck.shuffle(rng);
    if let Place::Postgres { proxy, .. } = place {
        for (seen, fault) in [
            (proxy.slowed(), Fault::Trickle),
            (count(&world.stalled_commits), Fault::Standby),
        ] {
            // Once is enough to see its effect.
            if seen == 0 {
                deck.retain(|other| *other != fault);
                deck.push(fault);
            }
        }
    }
    for (seen, fault) in [
        (&notices.superseded, Fault::Stop),
        (&notices.commit_found, Fault::AnswerCut),
        (&notices.abort_found, Fault::CommitCut),
        (&notices.disk_full, Fault::FullDisk),
    ] {
        if deck.contains(&fault) && count(seen) == 0 {
            deck.push(fault);
        }
    }
    deck
}

/// Returns whether the fault could be injected.
async fn happen(fault: Fault, world: &World, place: &mut Place, rng: &mut StdRng) -> bool {
    let mut millis = |range| Duration::from_millis(rng.random_range(range));
    let pause = match fault {
        Fault::Stop => millis(1_500..2_500),
        Fault::Stall => millis(1_500..4_000),
        Fault::Trickle => millis(2_000..4_000),
        Fault::Standby => millis(1_000..3_000),
        Fault::FullDisk => millis(1_500..3_000),
        _ => Duration::ZERO,
    };
    let seats: Vec<&Seat> = world.rerunning.iter().chain(&world.refusing).collect();
    let seat = seats[rng.random_range(0..seats.len())];
    // The first of the rerunning processes may then take over these orders.
    let several = &world.rerunning[1..];
    let several = several.iter().chain(world.refusing.first());
    match (fault, place) {
        (Fault::Kill, _) => seat.signal("KILL"),
        (Fault::Stop, _) => {
            for seat in several.clone() {
                seat.signal("STOP");
            }
            time::sleep(pause).await;
            for seat in several {
                seat.signal("CONT");
            }
        }
        (Fault::FullDisk, Place::Sqlite { .. }) => {
            for seat in several.clone() {
                seat.restart_with(Some(NO_MORE_PAGES));
            }
            time::sleep(pause).await;
            for seat in several {
                seat.restart_with(None);
            }
        }
        (_, Place::Sqlite { .. }) | (Fault::FullDisk, _) => return false,
        (Fault::Cut, Place::Postgres { proxy, .. }) => proxy.cut(),
        (Fault::Stall, Place::Postgres { proxy, .. }) => {
            proxy.stall(true);
            time::sleep(pause).await;
            proxy.stall(false);
        }
        (Fault::Trickle, Place::Postgres { proxy, .. }) => {
            proxy.slow_down(true);
            time::sleep(pause).await;
            proxy.slow_down(false);
        }
        (Fault::Standby, Place::Postgres { server, .. }) => {
            let is_lost = server.lose_standby().await.is_ok();
            time::sleep(pause).await;
            let stalled = server.stalled_commits().await.unwrap_or(0);
            // One of them is the server's own.
            let stalled = usize::try_from(stalled - 1).unwrap_or(0);
            world.stalled_commits.fetch_add(stalled, Ordering::Relaxed);
            while server.regain_standby().await.is_err() {
                time::sleep(Duration::from_millis(100)).await;
            }
            return is_lost;
        }
        (Fault::CommitCut | Fault::AnswerCut, Place::Postgres { proxy, .. }) => {
            let commits = rng.random_range(1..4);
            match fault {
                Fault::CommitCut => proxy.cut_before_commits(commits),
                _ => proxy.cut_after_commits(commits),
            }
            let end = Instant::now() + Duration::from_secs(2);
            while !proxy.is_done() && Instant::now() < end {
                time::sleep(Duration::from_millis(20)).await;
            }
            let is_done = proxy.is_done();
            proxy.cut_before_commits(0);
            proxy.cut_after_commits(0);
            return is_done;
        }
        (Fault::Terminate, Place::Postgres { server, .. }) => {
            return server.terminate_backends().await.is_ok();
        }
        (Fault::Crash, Place::Postgres { server, .. }) => server.restart().await,
    }
    true
}

fn count(number: &AtomicUsize) -> usize {
    number.load(Ordering::Relaxed)
}
