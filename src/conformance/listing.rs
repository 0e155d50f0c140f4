use super::{
    HOUR, Subject, Trial, fingerprint, good, name,
    situation::{Situation, Status, status_of},
};
use crate::{
    Store,
    store::{Claim, Filter, Succession},
};

/// # Listing
impl<S: Subject> Trial<S> {
    /// Unknown records, or those in progress for too long, and no others.
    pub async fn a_list_has_the_records_that_its_filter_chooses_and_no_others(&self) {
        let cases = self.cases(Situation::all()).await;
        let in_progress: &[_] = &[Status::Live, Status::Lapsed];
        for (filter, statuses) in [
            (Filter::Unknown, &[Status::Unknown][..]),
            (Filter::InProgressFor(S::SHORT), in_progress),
            (Filter::InProgressFor(HOUR), &[]),
        ] {
            let listed = good(self.peer.list(filter, 100).await);
            for case in &cases {
                let name = &case.held.name;
                let found = listed.iter().filter(|(listed, _)| listed == name).count();
                let expected = usize::from(statuses.contains(&case.situation.status));
                assert_eq!(
                    found, expected,
                    "list: {filter:?} chooses {:?} so many times",
                    case.situation
                );
            }
            for (name, record) in &listed {
                let read = self.record(name).await;
                Self::unchanged(Some(record), Some(&read), "list: shows what `read` shows");
                if let Filter::InProgressFor(least) = filter {
                    assert!(
                        record.age + Self::grain() >= least,
                        "list: {filter:?} chooses older claims only, and {:?}",
                        record.age
                    );
                }
                assert!(
                    cases.iter().any(|case| case.held.name == *name),
                    "list: has names that were claimed"
                );
            }
        }
    }

    /// By the last claim, not by the first.
    pub async fn a_list_has_the_oldest_claim_first(&self) {
        let mut held = Vec::new();
        for key in ["c", "a", "d", "b"] {
            held.push(self.hold(&name(key), S::SHORT, HOUR).await);
            self.lapse().await;
        }
        let claim = Claim::new(fingerprint(1), S::SHORT, HOUR);
        self.hold_again(&held[1], Succession::TakeOver, claim).await;
        self.lapse().await;
        let filter = Filter::InProgressFor(S::SHORT);
        self.lists(filter, 10, &["c", "d", "b", "a"]).await;
        self.lists(filter, 2, &["c", "d"]).await;

        for held in &held {
            // The one that was claimed again has lost its token, and stays.
            let owner = crate::store::Witness::Owner(held.token);
            let _ = good(self.store.mark_unknown(&held.name, owner, HOUR).await);
        }
        self.lists(Filter::Unknown, 10, &["c", "d", "b"]).await;
        self.lists(Filter::Unknown, 1, &["c"]).await;
        self.lists(filter, 10, &["a"]).await;
    }

    async fn lists(&self, filter: Filter, limit: u32, keys: &[&str]) {
        let listed = good(self.store.list(filter, limit).await);
        let listed: Vec<_> = listed.iter().map(|(name, _)| name.key().as_str()).collect();
        assert_eq!(
            listed, keys,
            "list: the oldest claims that {filter:?} chooses come first, up to {limit}"
        );
    }

    /// From none to all.
    pub async fn a_list_has_no_more_records_than_its_limit(&self) {
        let unknown = Situation {
            status: Status::Unknown,
            expired: false,
        };
        self.cases([unknown; 7].into_iter()).await;
        for (limit, expected) in [(0, 0), (1, 1), (6, 6), (7, 7), (8, 7), (u32::MAX, 7)] {
            let listed = good(self.store.list(Filter::Unknown, limit).await);
            assert_eq!(
                listed.len(),
                expected,
                "list: up to {limit} records, and all if there are no more"
            );
            assert!(
                listed
                    .iter()
                    .all(|(_, record)| status_of(record) == Status::Unknown),
                "list: what the filter chooses"
            );
        }
    }
}
