use super::{
    HOUR, Subject, Trial, fingerprint, good, name,
    states::{State, Status},
};
use crate::{
    key::{Key, RecordName, Scope},
    store::{
        Claim, Claimed, ReclaimAs, Record, Store, Transitioned,
        admin::{Count, Filter, FilterKind},
    },
};

/// # Listing
impl<S: Subject> Trial<S> {
    /// A list has the unknown records, or those in progress for longer than asked, and no
    /// others.
    pub async fn list_has_the_records_of_its_filter_only(&self) {
        let cases = self.cases(State::all()).await;
        let in_progress: &[_] = &[Status::Live, Status::Lapsed];
        for (filter, statuses) in [
            (Filter::unknown(), &[Status::Unknown][..]),
            (Filter::in_progress_for(S::SHORT), in_progress),
            (Filter::in_progress_for(HOUR), &[]),
        ] {
            let listed = listed(&self.peer, &filter, 100).await;
            for case in &cases {
                let name = &case.held.name;
                let found = listed.iter().filter(|(listed, _)| listed == name).count();
                let expected = usize::from(statuses.contains(&case.state.status));
                assert_eq!(
                    found, expected,
                    "list: how often {filter:?} lists {:?}",
                    case.state
                );
            }
            for (name, record) in &listed {
                let read = self.record(name).await;
                Self::unchanged(Some(record), Some(&read), "list: shows what `read` shows");
                if let FilterKind::InProgressFor(least) = filter.kind {
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

    /// The order does not depend on the limit or the filter.
    pub async fn list_has_each_record_once_in_one_order(&self) {
        let mut held = Vec::new();
        for key in ["c", "a", "e", "b", "d", "f", "a b", "a!"] {
            held.push(self.hold(&name(key), S::SHORT, HOUR).await);
        }
        self.lapse().await;
        let in_progress = Filter::in_progress_for(S::SHORT);
        let names = self.has_one_order(&in_progress, held.len()).await;
        for held in held.iter().skip(2) {
            self.mark_unknown(held, HOUR).await;
        }
        let is_unknown = Filter::unknown();
        let unknown = self.has_one_order(&is_unknown, held.len() - 2).await;
        let still = self.has_one_order(&in_progress, 2).await;
        for (filter, some) in [(is_unknown, unknown), (in_progress, still)] {
            let all = names.iter().filter(|name| some.contains(name));
            assert!(
                all.eq(&some),
                "list: {filter:?} has the order that another filter has"
            );
        }
    }

    /// Returns the names in the order of the store, which each limit has to give.
    async fn has_one_order(&self, filter: &Filter, expected: usize) -> Vec<RecordName> {
        let mut orders = Vec::new();
        for (turn, limit) in [1, 2, 3, 100].into_iter().enumerate() {
            let listed = listed(self.either(turn), filter, limit).await;
            assert_eq!(
                listed.len(),
                expected,
                "list: pages of {limit} have all that {filter:?} chooses"
            );
            let names: Vec<_> = listed.into_iter().map(|(name, _)| name).collect();
            orders.push(names);
        }
        assert!(
            orders.iter().all(|order| *order == orders[0]),
            "list: the order does not depend on the limit"
        );
        orders.swap_remove(0)
    }

    /// A filter with a scope chooses records of this scope, not of those that begin
    /// alike.
    pub async fn list_of_a_scope_has_its_records_only(&self) {
        let scopes = ["", "a", "a~b", "ab", "b"].map(Scope::from_stored);
        for scope in &scopes {
            for key in ["1", "2", "3"] {
                let name = RecordName::new(scope.clone(), Key::new(key));
                let held = self.hold(&name, S::SHORT, HOUR).await;
                if key == "3" {
                    self.mark_unknown(&held, HOUR).await;
                }
            }
        }
        self.lapse().await;
        for scope in scopes {
            for (filter, keys) in [
                (Filter::in_progress_for(S::SHORT), &["1", "2"][..]),
                (Filter::unknown(), &["3"][..]),
            ] {
                let filter = filter.in_scope(scope.clone());
                for limit in [1, 2, 100] {
                    let mut names: Vec<_> = listed(&self.peer, &filter, limit)
                        .await
                        .into_iter()
                        .map(|(name, _)| name)
                        .collect();
                    names.sort();
                    let expected = keys
                        .iter()
                        .map(|key| RecordName::new(scope.clone(), Key::new(*key)));
                    assert!(
                        names.iter().cloned().eq(expected),
                        "list: a scope's records and no others, and had {names:?}"
                    );
                }
            }
        }
    }

    /// The layer claims again with the token that was refused.
    pub async fn list_has_records_claimed_again_by_a_refused_claim(&self) {
        for number in 0..20 {
            let former = self.case(name(number), Status::Released.live()).await.held;
            let claim = Claim::new(fingerprint(1), S::SHORT, HOUR);
            let occupied = good(self.store.claim(&former.name, &claim).await);
            assert!(
                matches!(occupied, Claimed::Occupied(_)),
                "claim: a released record occupies its name"
            );
            let grant = former.reclaim(&self.store, ReclaimAs::Retry, &claim).await;
            assert!(grant.is_some(), "reclaim: a released record is granted");
        }
        self.lapse().await;
        let in_progress = Filter::in_progress_for(S::SHORT);
        let listed = listed(&self.peer, &in_progress, 100).await;
        assert_eq!(
            listed.len(),
            20,
            "list: has each record that was claimed again"
        );
    }

    /// A count that stopped at its limit is no exact number.
    pub async fn count_is_exact_below_its_limit(&self) {
        let scope = Scope::from_stored("conformance");
        let (other, filter) = (Scope::from_stored("other"), Filter::unknown());
        for number in 0..5 {
            let scope = if number < 3 { &scope } else { &other };
            let name = RecordName::new(scope.clone(), Key::new(number.to_string()));
            let held = self.hold(&name, HOUR, HOUR).await;
            self.mark_unknown(&held, HOUR).await;
        }
        for (filter, limit, expected) in [
            (filter.clone(), 100, Count::Exactly(5)),
            (filter.clone(), 4, Count::AtLeast(4)),
            (filter.clone(), 0, Count::AtLeast(1)),
            (filter.in_scope(scope), 100, Count::Exactly(3)),
            (Filter::in_progress_for(HOUR), 100, Count::Exactly(0)),
        ] {
            let count = good(self.peer.count(&filter, limit).await);
            assert_eq!(count, expected, "count: {filter:?} up to {limit}");
        }
    }

    /// An operator may forget each record of a page before the next page.
    pub async fn page_begins_after_a_removed_record(&self) {
        let unknown = Status::Unknown.live();
        self.cases([unknown; 7]).await;
        let (mut after, mut gone) = (None, 0);
        loop {
            let page = good(self.store.list(&Filter::unknown(), after.as_ref(), 2).await);
            for (name, record) in page.records {
                let forgotten = good(self.peer.forget(&name, record.fence).await);
                assert_eq!(
                    forgotten,
                    Transitioned::Applied,
                    "forget with the fence listed"
                );
                gone += 1;
            }
            match page.next {
                Some(next) => after = Some(next),
                None => break,
            }
        }
        assert_eq!(gone, 7, "list: goes on after a record that is gone");
    }

    /// A limit of zero counts as one. The last page has no next one.
    pub async fn page_keeps_to_its_limit(&self) {
        let unknown = Status::Unknown.live();
        self.cases([unknown; 7]).await;
        for limit in [0, 1, 6, 7, 8, u32::MAX] {
            let listed = listed(&self.store, &Filter::unknown(), limit).await;
            assert_eq!(listed.len(), 7, "list: pages of {limit} have all records");
        }
    }
}

/// Returns all records that the filter chooses, page by page.
pub(super) async fn listed(
    store: &impl Store,
    filter: &Filter,
    limit: u32,
) -> Vec<(RecordName, Record)> {
    let (mut listed, mut after) = (Vec::<(RecordName, Record)>::new(), None);
    loop {
        let page = good(store.list(filter, after.as_ref(), limit).await);
        assert!(
            page.records.len() <= limit.max(1) as usize,
            "list: no more records than the limit of {limit}"
        );
        for (name, _) in &page.records {
            assert!(
                !listed.iter().any(|(before, _)| before == name),
                "list: each record is on one page"
            );
        }
        listed.extend(page.records);
        assert!(
            page.next.is_none() || page.next != after,
            "list: the next page begins elsewhere"
        );
        after = page.next;
        if after.is_none() {
            return listed;
        }
    }
}
