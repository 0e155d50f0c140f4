//! Settings of jobs that are refused.

use tower_idempotency::{
    Guard, MemoryStore,
    schedule::{Job, Missed, Periods},
};

use crate::{days, keeping};

fn refusal(
    guard: Guard<MemoryStore>,
    name: &str,
    periods: Periods,
    since: &str,
    missed: Missed,
) -> String {
    let job = Job::builder(guard, name, periods)
        .since(since)
        .missed(missed);
    job.unwrap_err().to_string()
}

fn months() -> Periods {
    Periods::monthly("UTC").unwrap()
}

#[test]
fn a_retention_below_400_days_is_refused() {
    let of = |retention, unknown| {
        let guard = Guard::builder(MemoryStore::new());
        let guard = guard.retention(retention).unknown_retention(unknown);
        refusal(
            guard.build().unwrap(),
            "billing",
            months(),
            "2026-07",
            Missed::Latest,
        )
    };
    assert_eq!(
        of(days(399), days(400)),
        "`retention` must be at least 400 days for this job, so that no period runs again, got 34473600s"
    );
    assert!(of(days(400), days(7)).starts_with("`unknown_retention` must be at least 400 days"));
}

#[test]
fn a_retention_shorter_than_all_missed_periods_is_refused() {
    let guard = || keeping(MemoryStore::new()).build().unwrap();
    let all = |at_most| Missed::All { at_most };
    let refused = refusal(guard(), "billing", months(), "2026-07", all(13));
    assert!(
        refused.starts_with("`retention` must be at least 404 days"),
        "{refused}"
    );
    let hours = Periods::hourly("UTC").unwrap();
    let since = "2026-07-01T00+00:00";
    let job = Job::builder(guard(), "report", hours)
        .since(since)
        .missed(all(9_500));
    assert!(job.is_ok());
}

#[test]
fn faulty_names_and_labels_are_refused() {
    let guard = || keeping(MemoryStore::new()).build().unwrap();
    let long = "x".repeat(201);
    for name in ["", "a\nb", &long] {
        let refused = refusal(guard(), name, months(), "2026-07", Missed::Latest);
        assert!(
            refused.starts_with("`name` must have 1 to 200 printable bytes"),
            "{refused}"
        );
    }
    let refused = refusal(guard(), "billing", months(), "July", Missed::Latest);
    assert_eq!(
        refused,
        "`since` must be the label of one of its monthly periods, as 2026-10, got \"July\""
    );
    let none = Missed::All { at_most: 0 };
    let refused = refusal(guard(), "billing", months(), "2026-07", none);
    assert_eq!(refused, "`missed` must be at least 1 period, got 0");
}
