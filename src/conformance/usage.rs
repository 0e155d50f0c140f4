use std::time::Duration;

use super::{HOUR, Subject, Trial, good};
use crate::{
    key::Scope,
    store::{Store, Usage, UsageDelta, admin::Filter},
};

/// # Usage
impl<S: Subject> Trial<S> {
    /// What all processes add is returned to each of them, for each scope and period apart.
    pub async fn usage_is_added_up_over_all_processes(&self) {
        if !S::ADDS_USAGE {
            return self.adds_nothing_up().await;
        }
        let (one, other) = (scope("one"), scope("other"));
        let added = (0..20).map(|turn| {
            let (store, one) = (self.either(turn).clone(), one.clone());
            async move { add(&store, &[delta(&one, HOUR * 5, 2)]).await }
        });
        self.at_once(added).await;
        let moved = [
            delta(&one, HOUR * 5, -1),
            delta(&one, HOUR * 9, 1),
            delta(&other, HOUR, 7),
        ];
        add(&self.store, &moved).await;
        for store in [&self.store, &self.peer] {
            let asked = [UsageDelta::none(one.clone())];
            let kept = add(store, &asked).await;
            let records: Vec<_> = kept.iter().map(|usage| usage.records).collect();
            assert_eq!(records, [39, 1], "add_usage: the periods of one scope");
            for (usage, hours) in kept.iter().zip([5, 9]) {
                assert_eq!(usage.scope, one);
                assert_eq!(usage.bytes, 100 * usage.records);
                let (least, most) = (HOUR * hours, HOUR * (hours + 1));
                let left = usage.expires_in + Self::grain();
                let is_its_period = left + HOUR / 2 >= least && usage.expires_in <= most;
                assert!(is_its_period, "add_usage: a period ends at {left:?}");
            }
            let both = [&other, &one, &scope("none")].map(|scope| UsageDelta::none(scope.clone()));
            let kept = add(store, &both).await;
            let of_other: Vec<_> = kept.iter().filter(|usage| usage.scope == other).collect();
            assert_eq!((kept.len(), of_other.len()), (3, 1));
            assert_eq!((of_other[0].records, of_other[0].bytes), (7, 700));
        }
    }

    /// A period that has ended is not returned, whether it was swept or not.
    pub async fn usage_ends_with_its_period(&self) {
        if !S::ADDS_USAGE {
            return self.adds_nothing_up().await;
        }
        let scope = scope("short");
        let short = UsageDelta {
            period: S::SHORT,
            ..delta(&scope, S::SHORT, 3)
        };
        let kept = add(&self.store, &[short, delta(&scope, HOUR, 2)]).await;
        let records: Vec<_> = kept.iter().map(|usage| usage.records).collect();
        assert_eq!(records, [3, 2], "add_usage: both periods are live");
        self.lapse().await;
        self.lapse().await;
        for is_swept in [false, true] {
            let kept = add(&self.peer, &[UsageDelta::none(scope.clone())]).await;
            let records: Vec<_> = kept.iter().map(|usage| usage.records).collect();
            assert_eq!(records, [2], "add_usage: one has ended, swept: {is_swept}");
            good(self.store.purge_expired(100, HOUR).await);
        }
        let unknown = Filter::unknown();
        let listed = self.store.list(&unknown, None, 10).await;
        assert!(good(listed).records.is_empty(), "list: usage is no record");
    }

    async fn adds_nothing_up(&self) {
        let added = self.store.add_usage(&[delta(&scope("one"), HOUR, 1)]).await;
        assert_eq!(
            good(added),
            None,
            "add_usage: set `Subject::ADDS_USAGE` for a store that adds usage up"
        );
    }
}

async fn add(store: &impl Store, deltas: &[UsageDelta]) -> Vec<Usage> {
    let added = good(store.add_usage(deltas).await);
    added.unwrap_or_else(|| panic!("add_usage: returns the usage, as `ADDS_USAGE` says"))
}

fn scope(caller: &str) -> Scope {
    Scope::from_stored(format!("conformance-{caller}"))
}

/// A change of records with 100 bytes each, in a period of half an hour.
fn delta(scope: &Scope, expires_in: Duration, records: i64) -> UsageDelta {
    UsageDelta {
        scope: scope.clone(),
        expires_in,
        period: HOUR / 2,
        records,
        bytes: 100 * records,
    }
}
