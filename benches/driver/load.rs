//! A closed loop: a number of callers, each of which calls again once it is
//! answered.

use std::{
    sync::Arc,
    time::{Duration, Instant},
};

use hdrhistogram::Histogram;
use tokio::{sync::Barrier, task::JoinSet};

use crate::Plan;

/// The result of a load.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Load {
    pub(crate) per_second: f64,
    /// In seconds.
    pub(crate) p50: f64,
    pub(crate) p99: f64,
}

/// Baseline and store, measured in turns.
pub(crate) struct Pairs(pub(crate) Vec<(Load, Load)>);

impl Pairs {
    /// Pairs that follow each other closely, since the speed of the machine
    /// changes within minutes.
    pub(crate) async fn measure<B, S>(
        plan: Plan,
        in_flight: usize,
        baseline: impl Fn() -> B + Clone + Send + 'static,
        store: impl Fn() -> S + Clone + Send + 'static,
    ) -> Self
    where
        B: Future<Output = ()> + Send + 'static,
        S: Future<Output = ()> + Send + 'static,
    {
        let mut pairs = Vec::new();
        for _ in 0..plan.pairs {
            let before = run(in_flight, plan.length, baseline.clone()).await;
            let after = run(in_flight, plan.length, store.clone()).await;
            pairs.push((before, after));
        }
        Self(pairs)
    }

    /// The store's number divided by the baseline's.
    pub(crate) fn ratios(&self, number: impl Fn(&Load) -> f64) -> Vec<f64> {
        self.0
            .iter()
            .map(|(baseline, store)| number(store) / number(baseline))
            .collect()
    }

    /// The medians of both.
    pub(crate) fn medians(&self, number: impl Fn(&Load) -> f64) -> (f64, f64) {
        let median = |mut numbers: Vec<f64>| {
            numbers.sort_by(f64::total_cmp);
            numbers[numbers.len() / 2]
        };
        (
            median(
                self.0
                    .iter()
                    .map(|(baseline, _)| number(baseline))
                    .collect(),
            ),
            median(self.0.iter().map(|(_, store)| number(store)).collect()),
        )
    }
}

/// Calls `operation` for `length`, `max_in_flight` at a time, after a tenth of that
/// for warming up.
pub(crate) async fn run<F>(
    in_flight: usize,
    length: Duration,
    operation: impl Fn() -> F + Clone + Send + 'static,
) -> Load
where
    F: Future<Output = ()> + Send + 'static,
{
    let barrier = Arc::new(Barrier::new(in_flight));
    let mut callers = JoinSet::new();
    for _ in 0..in_flight {
        let (operation, barrier) = (operation.clone(), Arc::clone(&barrier));
        callers.spawn(async move {
            barrier.wait().await;
            let warm = Instant::now() + length / 10;
            let end = warm + length;
            let mut times = histogram();
            let mut called = Instant::now();
            while called < end {
                operation().await;
                let now = Instant::now();
                if called >= warm {
                    let nanos = (now - called).as_nanos();
                    times.saturating_record(u64::try_from(nanos).unwrap_or(u64::MAX));
                }
                called = now;
            }
            times
        });
    }
    let mut times = histogram();
    while let Some(of_one) = callers.join_next().await {
        times.add(of_one.expect("a caller panicked")).unwrap();
    }
    Load {
        per_second: times.len() as f64 / length.as_secs_f64(),
        p50: times.value_at_quantile(0.5) as f64 / 1e9,
        p99: times.value_at_quantile(0.99) as f64 / 1e9,
    }
}

fn histogram() -> Histogram<u64> {
    let minute = 60_000_000_000;
    Histogram::new_with_bounds(1, minute, 3).unwrap()
}
