use std::time::Duration;

use super::{
    HOUR, Subject, Trial, fingerprint, good, name,
    situation::{Call, Situation, Status, applied, happened, status_of},
};
use crate::{
    Store,
    store::{Claim, Completion, ReclaimAs, admin::Resolution},
};

/// # Unknown outcomes
impl<S: Subject> Trial<S> {
    /// In progress, lapsed or not; nobody else's, and in no other state.
    pub async fn an_owner_may_mark_its_claim_in_progress_unknown_at_any_time(&self) {
        self.guard_holds(Call::MarkAsOwner).await;
    }

    /// A live lease is its owner's; no other state can be marked.
    pub async fn i3_anybody_may_mark_a_claim_unknown_once_its_lease_has_lapsed(&self) {
        self.guard_holds(Call::MarkAsWitness).await;
    }

    /// Unknown and seen with this fence, and in no other state.
    pub async fn an_operators_word_that_it_happened_ends_an_unknown_record_only(&self) {
        self.guard_holds(Call::ResolveHappened).await;
    }

    /// Unknown and seen with this fence, and in no other state.
    pub async fn an_operators_word_that_it_did_not_happen_ends_an_unknown_record_only(&self) {
        self.guard_holds(Call::ResolveDidNotHappen).await;
    }

    /// Live unknown records are live afterwards: replayed, or tried again.
    pub async fn what_an_operator_resolved_is_live(&self) {
        let unknown = Situation {
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

    /// Even if the unknown record has expired.
    pub async fn a_resolved_record_is_kept_at_least_so_long_from_now(&self) {
        let expired = Situation {
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

    /// The longer of the two counts.
    pub async fn resolve_does_not_shorten_the_retention(&self) {
        let unknown = Situation {
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

    /// An unknown outcome is shown for its own retention, not the claim's.
    pub async fn i11_an_unknown_record_is_kept_for_its_retention_from_the_marking(&self) {
        let name = name("unknown");
        let held = self.hold(&name, S::SHORT, S::SHORT).await;
        self.lapse().await;
        let before = self.record(&name).await;
        let marked = Call::MarkAsWitness
            .make(&self.store, &name, held.token, held.grant.fence)
            .await;
        applied(marked, "mark_unknown by whoever saw the lease lapse");
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

    /// The last owner may end its own unknown record, for the retention of a
    /// completion.
    pub async fn an_owner_that_completes_an_unknown_record_gives_it_the_retention_of_a_completion(
        &self,
    ) {
        let name = name("late");
        let held = self.hold(&name, S::SHORT, HOUR).await;
        self.lapse().await;
        let marked = Call::MarkAsWitness
            .make(&self.store, &name, held.token, held.grant.fence)
            .await;
        applied(marked, "mark_unknown by whoever saw the lease lapse");
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
