//! The conditions that every key meets in the end.

use std::{
    collections::HashMap,
    fmt,
    sync::atomic::{AtomicUsize, Ordering},
    time::Duration,
};

use tokio::time;

use crate::{
    World,
    clients::{Case, Kind, ask},
    faults::{Fault, Injected},
    place::Place,
};

/// The faults of one key.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
struct Wrongs {
    /// More than one effect.
    doubled: usize,
    /// A success was answered, and there is no effect.
    lost: usize,
    /// No final answer, or an unknown outcome without a run.
    stuck: usize,
    /// Answers that differ.
    unlike: usize,
}

impl Wrongs {
    fn of(case: &Case, orders: usize, runs: usize, injected: &[Injected]) -> Self {
        let (effects, most) = match case.kind {
            Kind::Plain => (runs, 1),
            _ => (orders, usize::from(case.orders())),
        };
        Self {
            doubled: usize::from(effects > most),
            lost: usize::from(!case.done.is_empty() && effects == 0),
            stuck: usize::from(is_unsettled(case, runs, injected)),
            unlike: usize::from(case.done.len() > 1),
        }
    }

    fn add(&mut self, other: Self) {
        self.doubled += other.doubled;
        self.lost += other.lost;
        self.stuck += other.stuck;
        self.unlike += other.unlike;
    }

    fn is_none(self) -> bool {
        self == Self::default()
    }
}

/// The result of a run.
pub(crate) struct Findings {
    name: &'static str,
    keys: usize,
    rows: Vec<(String, usize, Wrongs)>,
    total: Wrongs,
    /// The number of keys that settled only without other requests.
    slow: usize,
    /// Each of these must be seen at least once.
    seen: Vec<(&'static str, usize)>,
    details: Vec<String>,
}

impl Findings {
    pub(crate) async fn gather(
        name: &'static str,
        place: &Place,
        world: &World,
        cases: &[Case],
        injected: &[Injected],
    ) -> Self {
        let orders = orders(world).await;
        let runs = runs(world);
        let mut details = world.notices.panics();
        let mut wrongs = Vec::new();
        let mut total = Wrongs::default();
        let mut takeovers = 0;
        for case in cases {
            let orders = orders.get(&case.key).copied().unwrap_or_default();
            let runs = runs.get(&case.key).copied().unwrap_or_default();
            let wrong = Wrongs::of(case, orders, runs, injected);
            if !wrong.is_none() {
                details.push(format!(
                    "{wrong:?}: {orders} orders, {runs} runs of {case:?}"
                ));
            }
            if runs > 1 {
                takeovers += usize::from(was_taken_over(world, &case.key).await);
            }
            total.add(wrong);
            wrongs.push(wrong);
        }
        let count = |number: &AtomicUsize| number.load(Ordering::Relaxed);
        let notices = &world.notices;
        let replays = |chosen: &dyn Fn(&Case) -> bool| {
            let chosen = cases.iter().filter(|case| chosen(case));
            chosen.map(|case| case.replays).sum()
        };
        Self {
            name,
            keys: cases.len(),
            rows: rows(cases, &wrongs, injected),
            total,
            slow: cases.iter().filter(|case| case.is_slow).count(),
            seen: {
                let mut seen = vec![
                    ("takeovers", takeovers),
                    ("owners fenced off", count(&notices.superseded)),
                    ("replays", replays(&|_| true)),
                    ("replays of large responses", replays(&|case| case.is_large)),
                ];
                match place {
                    Place::Postgres { proxy, .. } => seen.extend([
                        ("lost answers: committed", count(&notices.commit_found)),
                        ("lost answers: rolled back", count(&notices.abort_found)),
                        ("COMMITs without a standby", count(&world.stalled_commits)),
                        ("kB of answers slowed down", proxy.slowed() / 1_000),
                    ]),
                    // Its COMMIT has no answer to lose.
                    Place::Sqlite { .. } => {
                        seen.push(("warnings of a full disk", count(&notices.disk_full)));
                    }
                }
                seen
            },
            details,
        }
    }

    /// Returns whether no key was doubled, lost, stuck or contradicted.
    pub(crate) fn is_sound(&self) -> bool {
        self.details.is_empty()
    }

    /// Returns the violations, and the faults that the run has not shown.
    pub(crate) fn faults(&self) -> Vec<String> {
        let unseen = self
            .seen
            .iter()
            .filter(|(_, number)| *number == 0)
            .map(|(name, _)| format!("not seen: {name}"));
        self.details.iter().cloned().chain(unseen).collect()
    }
}

impl fmt::Display for Findings {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { name, keys, .. } = self;
        let head = format!("{name}: {keys} keys");
        writeln!(
            f,
            "{head:<32} {:>8} {:>8} {:>8} {:>8} {:>8}",
            "injected", "doubled", "lost", "stuck", "unlike"
        )?;
        let all = ("all".to_owned(), 0, self.total);
        for (name, injected, wrongs) in self.rows.iter().chain([&all]) {
            let Wrongs {
                doubled,
                lost,
                stuck,
                unlike,
            } = wrongs;
            let injected = match injected {
                0 => String::new(),
                number => number.to_string(),
            };
            writeln!(
                f,
                "  {name:<30} {injected:>8} {doubled:>8} {lost:>8} {stuck:>8} {unlike:>8}"
            )?;
        }
        let slow = ("slow beside other keys", self.slow);
        for (name, number) in self.seen.iter().chain([&slow]) {
            writeln!(f, "  {name:<30} {number:>8}")?;
        }
        Ok(())
    }
}

/// Returns whether a key has no final answer, or an unknown outcome although its handler
/// never ran.
pub(crate) fn is_unsettled(case: &Case, runs: usize, injected: &[Injected]) -> bool {
    let never_ran = case.kind == Kind::Plain && runs == 0;
    !case.is_final || (never_ran && !may_have_died(case, injected))
}

/// Returns whether a process may have died between its claim of this key and the
/// run of its handler.
fn may_have_died(case: &Case, injected: &[Injected]) -> bool {
    injected
        .iter()
        .filter(|injected| matches!(injected.fault, Fault::Kill | Fault::FullDisk))
        .any(|kill| case.begun <= kill.ended && kill.begun <= case.ended + WITHDRAWN_WITHIN)
}

/// Each fault, with the keys whose requests ran during it.
fn rows(cases: &[Case], wrongs: &[Wrongs], injected: &[Injected]) -> Vec<(String, usize, Wrongs)> {
    let mut rows: Vec<(String, usize, Wrongs)> = Vec::new();
    let mut kinds: Vec<Fault> = Vec::new();
    for injected in injected {
        if !kinds.contains(&injected.fault) {
            kinds.push(injected.fault);
        }
    }
    for fault in kinds {
        let of_it: Vec<_> = injected
            .iter()
            .filter(|injected| injected.fault == fault)
            .collect();
        let mut sum = Wrongs::default();
        for (case, wrong) in cases.iter().zip(wrongs) {
            if of_it
                .iter()
                .any(|fault| fault.begun <= case.ended && case.begun <= fault.ended)
            {
                sum.add(*wrong);
            }
        }
        rows.push((fault.name().to_owned(), of_it.len(), sum));
    }
    for kind in [
        Kind::CrashBefore,
        Kind::CrashAfter,
        Kind::Rollback,
        Kind::Swallow,
    ] {
        let mut sum = (0, Wrongs::default());
        for (_, wrong) in cases
            .iter()
            .zip(wrongs)
            .filter(|(case, _)| case.kind == kind)
        {
            sum.0 += 1;
            sum.1.add(*wrong);
        }
        let name = match kind {
            Kind::CrashBefore => "handler dies before COMMIT",
            Kind::CrashAfter => "handler dies after COMMIT",
            Kind::Rollback => "handler rolls back",
            _ => "handler swallows an error",
        };
        rows.push((name.to_owned(), sum.0, sum.1));
    }
    rows
}

/// The committed orders of each key.
async fn orders(world: &World) -> HashMap<String, usize> {
    let answer = answer(world, "/orders", "-").await;
    let mut answer: serde_json::Value = serde_json::from_str(&answer).unwrap();
    serde_json::from_value(answer["accounts"].take()).unwrap()
}

/// How often the handler ran for each key.
pub(crate) fn runs(world: &World) -> HashMap<String, usize> {
    let mut runs = HashMap::new();
    for line in std::fs::read_to_string(&world.runs).unwrap().lines() {
        if let Some((_, key)) = line.split_once(' ') {
            *runs.entry(key.to_owned()).or_default() += 1;
        }
    }
    runs
}

async fn was_taken_over(world: &World, key: &str) -> bool {
    let answer = answer(world, &format!("/records?account={key}&key={key}"), key).await;
    let record: serde_json::Value = serde_json::from_str(&answer).unwrap();
    record["takeovers"]
        .as_u64()
        .is_some_and(|number| number > 0)
}

/// From the first process that gives it: nothing breaks any more.
async fn answer(world: &World, target: &str, key: &str) -> String {
    for _ in 0..100 {
        for seat in &world.rerunning {
            if let Some(address) = seat.address()
                && let Some(answer) = ask(address, "GET", target, key).await
                && answer.status == 200
            {
                return answer.body;
            }
        }
        time::sleep(Duration::from_millis(100)).await;
    }
    panic!("no process answers {target}");
}

/// A withdrawal is tried again within a lease of 800 ms; the rest is for a busy
/// machine.
const WITHDRAWN_WITHIN: Duration = Duration::from_secs(5);
