use std::time::Duration;

use super::{
    HOUR, Subject, Trial,
    calls::{Call, happened},
    good, long_claim, name,
    states::{Status, applied, status_of},
};
use crate::store::{Completion, ReclaimAs, Store, admin::Resolution};

/// # Unknown outcomes
impl<S: Subject> Trial<S> {
    checks! {
        /// The owner may mark a record in progress, lapsed or not.
        pub async fn owner_marks_its_claim_unknown_at_any_time(&self)
            => self.guard_holds(Call::MarkByOwner);

        /// Without the token, a record in progress is marked only after its lease has lapsed.
        pub async fn i3_mark_unknown_without_a_token_needs_a_lapsed_lease(&self)
            => self.guard_holds(Call::MarkLapsed);

        /// `resolve` is applied to a record with this fence that is unknown, or whose lease
        /// has lapsed.
        pub async fn resolve_as_happened_needs_a_lapsed_or_unknown_record(&self)
            => self.guard_holds(Call::ResolveHappened);

        /// `resolve` is applied to a record with this fence that is unknown, or whose lease
        /// has lapsed.
        pub async fn resolve_as_not_happened_needs_a_lapsed_or_unknown_record(&self)
            => self.guard_holds(Call::ResolveDidNotHappen);
    }

    /// A resolved record has not expired if the unknown one had not.
    pub async fn resolved_record_is_replayed_or_retried(&self) {
        let unknown = Status::Unknown.live();
        for case in self.cases([unknown; 2]).await {
            let held = case.held;
            let has_happened = held.name == name(format!("0 {unknown:?}"));
            let resolution = match has_happened {
                true => happened(b"found"),
                false => Resolution::DidNotHappen,
            };
            self.resolve(&held, &resolution, Duration::ZERO).await;
            let record = self.record(&held.name).await;
            assert!(
                record.expires_in.is_some(),
                "resolve: what was live stays live, and was {record:?}"
            );
            let claim = long_claim(1);
            let retried = held.reclaim(&self.peer, ReclaimAs::Retry, &claim).await;
            assert_eq!(
                retried.is_none(),
                has_happened,
                "resolve: what did not happen is released, and what happened is not"
            );
        }
    }

    /// `at_least` counts from the call, also for an unknown record that has expired.
    pub async fn resolved_record_is_kept_at_least_as_long_as_asked(&self) {
        let resolutions = [happened(b"found"), Resolution::DidNotHappen];
        let cases = self.cases([Status::Unknown.expired(); 2]).await;
        for (case, resolution) in cases.iter().zip(resolutions) {
            let name = &case.held.name;
            self.resolve(&case.held, &resolution, HOUR).await;
            let record = self.record(name).await;
            assert!(
                record.expires_in > Some(HOUR / 2),
                "resolve: the record is kept for an hour from now, and was {record:?}"
            );
        }
    }

    /// The record is kept for the longer of its retention and `at_least`.
    pub async fn resolve_does_not_shorten_the_retention(&self) {
        let resolutions = [happened(b"found"), Resolution::DidNotHappen];
        let cases = self.cases([Status::Unknown.live(); 2]).await;
        for (case, resolution) in cases.iter().zip(resolutions) {
            let name = &case.held.name;
            let before = self.record(name).await.expires_in.unwrap_or_default();
            let second = Duration::from_secs(1);
            self.resolve(&case.held, &resolution, second).await;
            let after = self.record(name).await.expires_in.unwrap_or_default();
            assert!(
                after + HOUR > before,
                "resolve: the record was kept for {before:?}, and is for {after:?}"
            );
        }
    }

    /// The retention of an unknown record counts from `mark_unknown`, not from the claim.
    pub async fn i11_unknown_record_is_kept_from_its_marking(&self) {
        let name = name("unknown");
        let held = self.hold(&name, S::SHORT, S::SHORT).await;
        self.lapse().await;
        let before = self.record(&name).await;
        let marked = held.make(Call::MarkLapsed, &self.store).await;
        applied(marked, "mark_unknown of a lapsed record by its fence");
        let record = self.record(&name).await;
        let left = record.expires_in;
        Self::counts_from_now(
            &before,
            &record,
            left,
            HOUR * 3,
            "mark_unknown: the retention",
        );
        let purged = good(self.store.purge_expired(10, HOUR).await);
        assert_eq!(
            (purged.touched(), self.status(&name).await),
            (0, Status::Unknown),
            "mark_unknown: a sweep leaves it for its retention"
        );
    }

    /// The last owner may complete its unknown record, which then has the retention of
    /// the completion.
    pub async fn late_completion_sets_the_retention_of_a_completion(&self) {
        let name = name("late");
        let held = self.hold(&name, S::SHORT, HOUR).await;
        self.lapse().await;
        let marked = held.make(Call::MarkLapsed, &self.store).await;
        applied(marked, "mark_unknown of a lapsed record by its fence");
        let completion = Completion::new(super::response(), HOUR * 2, Duration::ZERO);
        let completed = self.peer.complete(&name, held.token, &completion).await;
        applied(
            good(completed),
            "complete of an unknown record by its owner",
        );
        let record = self.record(&name).await;
        assert_eq!(status_of(&record), Status::Completed, "complete: is kept");
        Self::kept_from_its_claim(&record, HOUR * 2, "complete");
    }
}
