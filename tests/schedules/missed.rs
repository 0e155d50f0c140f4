//! Periods that nobody ran in time.

use std::time::Duration;

use tower_idempotency::schedule::{Job, Missed, Periods};

use crate::{ALL, Runs, billing, days, keeping, set_now, store};

/// The labels that run after July to September were missed.
async fn after_three_months(missed: Missed) -> Vec<String> {
    let (store, runs) = (store(), Runs::default());
    let job = billing(store.clone(), missed);
    set_now(&store, "2026-10-15T12:00:00Z");
    for _ in 0..2 {
        assert!(job.run_due(runs.work()).await.is_ok());
    }
    runs.take()
}

#[tokio::test]
async fn all_runs_each_missed_period_in_order() {
    let labels = after_three_months(ALL).await;
    assert_eq!(labels, ["2026-07", "2026-08", "2026-09"]);
}

#[tokio::test]
async fn all_runs_no_more_than_the_last_periods() {
    let labels = after_three_months(Missed::All { at_most: 2 }).await;
    assert_eq!(labels, ["2026-08", "2026-09"]);
}

#[tokio::test]
async fn latest_runs_the_last_missed_period_alone() {
    assert_eq!(after_three_months(Missed::Latest).await, ["2026-09"]);
}

#[tokio::test]
async fn skip_runs_only_a_period_that_has_just_ended() {
    let later_than = |time| Missed::Skip { later_than: time };
    assert!(after_three_months(later_than(days(14))).await.is_empty());
    assert_eq!(after_three_months(later_than(days(15))).await, ["2026-09"]);
    assert!(
        after_three_months(later_than(Duration::ZERO))
            .await
            .is_empty()
    );
    assert_eq!(
        after_three_months(later_than(Duration::MAX)).await,
        ["2026-09"]
    );
}

#[tokio::test]
async fn hours_that_repeat_run_once_each() {
    let (store, runs) = (store(), Runs::default());
    let hours = Periods::hourly("Europe/Berlin").unwrap();
    let guard = keeping(store.clone()).build().unwrap();
    let job = Job::builder(guard, "report", hours)
        .since("2026-10-25T01+02:00")
        .missed(ALL)
        .unwrap();
    set_now(&store, "2026-10-25T02:00:00Z");
    for _ in 0..2 {
        assert!(job.run_due(runs.work()).await.is_ok());
    }
    assert_eq!(
        runs.take(),
        [
            "2026-10-25T01+02:00",
            "2026-10-25T02+02:00",
            "2026-10-25T02+01:00"
        ]
    );
}
