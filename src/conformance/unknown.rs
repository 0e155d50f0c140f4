use std::time::Duration;

use super::{
    HOUR, Subject, Trial, fingerprint, good, name,
    states::{Call, State, Status, applied, happened, status_of},
};
use crate::{
    Store,
    store::{Claim, Completion, ReclaimAs, admin::Resolution},
};

/// # Unknown outcomes
impl<S: Subject> Trial<S> {
    /// The owner may mark a record in progress, lapsed or not.
    pub async fn owner_marks_its_claim_unknown_at_any_time(&self) {
        self.guard_holds(Call::MarkByOwner).await;
    }

    /// Without the token, a record in progress is marked only after its lease has lapsed.
    pub async fn i3_mark_unknown_without_a_token_needs_a_lapsed_lease(&self) {
        self.guard_holds(Call::MarkLapsed).await;
    }

    /// `resolve` is applied to an unknown record with this fence.
    pub async fn resolve_as_happened_needs_an_unknown_record(&self) {
        self.guard_holds(Call::ResolveHappened).await;
    }

    /// `resolve` is applied to an unknown record with this fence.
    pub async fn resolve_as_not_happened_needs_an_unknown_record(&self) {
        self.guard_holds(Call::ResolveDidNotHappen).await;
    }

    /// A resolved record has not expired if the unknown one had not.
    pub async fn resolved_record_is_replayed_or_retried(&self) {
        let unknown = State {
            status: Status::Unknown,
            expired: false,
        };
        for case in self.cases([unknown; 2].into_iter()).await {
            let held = case.held;
            let has_happened = held.name == name(format!("0 {unknown:?}"));
            let resolution = match has_happened {
                true => happened(b"found"),
                false => Resolution::DidNotHappen,
            };
            let resolved = self
                .store
                .resolve(&held.name, held.grant.fence, &resolution, Duration::ZERO)
                .await;
            applied(good(resolved), "resolve with the fence seen");
            let record = self.record(&held.name).await;
            assert!(
                record.expires_in.is_some(),
                "resolve: what was live stays live, and was {record:?}"
            );
            let claim = Claim::new(fingerprint(1), HOUR, HOUR);
            let retried = self
                .peer
                .reclaim(&held.name, held.grant.fence, ReclaimAs::Retry, &claim)
                .await;
            assert_eq!(
                good(retried).is_none(),
                has_happened,
                "resolve: what did not happen is released, and what happened is not"
            );
        }
    }

    /// `at_least` counts from the call, also for an unknown record that has expired.
    pub async fn resolved_record_is_kept_at_least_as_long_as_asked(&self) {
        let expired = State {
            status: Status::Unknown,
            expired: true,
        };
        let resolutions = [happened(b"found"), Resolution::DidNotHappen];
        let cases = self.cases([expired; 2].into_iter()).await;
        for (case, resolution) in cases.iter().zip(resolutions) {
            let (name, seen) = (&case.held.name, case.held.grant.fence);
            let resolved = self.store.resolve(name, seen, &resolution, HOUR).await;
            applied(good(resolved), "resolve with the fence seen");
            let record = self.record(name).await;
            assert!(
                record.expires_in > Some(HOUR / 2),
                "resolve: the record is kept for an hour from now, and was {record:?}"
            );
        }
    }

    /// The record is kept for the longer of its retention and `at_least`.
    pub async fn resolve_does_not_shorten_the_retention(&self) {
        let unknown = State {
            status: Status::Unknown,
            expired: false,
        };
        let resolutions = [happened(b"found"), Resolution::DidNotHappen];
        let cases = self.cases([unknown; 2].into_iter()).await;
        for (case, resolution) in cases.iter().zip(resolutions) {
            let (name, seen) = (&case.held.name, case.held.grant.fence);
            let before = self.record(name).await.expires_in.unwrap_or_default();
            let second = Duration::from_secs(1);
            let resolved = self.store.resolve(name, seen, &resolution, second).await;
            applied(good(resolved), "resolve with the fence seen");
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
        let marked = Call::MarkLapsed
            .make(&self.store, &name, held.token, held.grant.fence)
            .await;
        applied(marked, "mark_unknown of a lapsed record by its fence");
        let record = self.record(&name).await;
        let expires_in = record
            .expires_in
            .unwrap_or_else(|| panic!("mark_unknown: is kept from now, and had expired at once"));
        // Marked after `before` was read, and before `record` was.
        let kept = record.age + expires_in;
        assert!(
            kept + Self::grain() >= before.age + HOUR * 3
                && kept <= record.age + HOUR * 3 + Self::grain(),
            "mark_unknown: is kept for its retention from now, and for {expires_in:?}"
        );
        let purged = good(self.store.purge_expired(10, HOUR).await);
        assert_eq!(
            (purged.touched(), status_of(&self.record(&name).await)),
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
        let marked = Call::MarkLapsed
            .make(&self.store, &name, held.token, held.grant.fence)
            .await;
        applied(marked, "mark_unknown of a lapsed record by its fence");
        let completion = Completion::new(super::response(), HOUR * 2, Duration::ZERO);
        let completed = self.peer.complete(&name, held.token, &completion).await;
        applied(
            good(completed),
            "complete of an unknown record by its owner",
        );
        let record = self.record(&name).await;
        let expires_in = record.expires_in.unwrap_or_default();
        assert!(
            status_of(&record) == Status::Completed
                && Self::close(record.age + expires_in, HOUR * 2),
            "complete: is kept for its retention from the claim, and was {record:?}"
        );
    }
}
