use std::time::Duration;

use super::{
    HOUR, Subject, Trial,
    calls::Call,
    good,
    lists::listed,
    long_claim, name, response,
    states::{Status, applied, lease_left, status_of, superseded},
};
use crate::store::{ReclaimAs, Release, Store, admin::Filter};

/// # Time
impl<S: Subject> Trial<S> {
    /// `lease` counts from the call, whatever was left of the lease.
    pub async fn renew_extends_the_lease_from_now_even_if_lapsed(&self) {
        let name = name("renewed");
        let held = self.hold(&name, S::SHORT, HOUR).await;
        self.lapse().await;
        for (lease, store) in [
            (HOUR, &self.store),
            (HOUR * 3, &self.peer),
            (HOUR, &self.store),
        ] {
            let before = self.record(&name).await;
            let renewed = store.renew(&name, held.token, lease).await;
            applied(good(renewed), "renew by the owner, even if it has lapsed");
            let record = self.record(&name).await;
            let left = lease_left(&record);
            Self::counts_from_now(&before, &record, left, lease, "renew: the lease");
            Self::kept_from_its_claim(&record, HOUR, "renew");
        }
        let claim = long_claim(1);
        let taken = held.reclaim(&self.peer, ReclaimAs::Takeover, &claim).await;
        assert_eq!(
            taken, None,
            "renew: a lease that was extended is not taken over"
        );
    }

    /// The retention of a completion may be longer or shorter than that of its claim.
    pub async fn retention_of_a_completion_counts_from_the_claim(&self) {
        for retention in [HOUR, HOUR * 2, HOUR * 4] {
            let name = name(format!("kept for {retention:?}"));
            let held = self.hold(&name, HOUR, HOUR * 2).await;
            self.lapse().await;
            self.complete(&held, response(), retention).await;
            Self::kept_from_its_claim(&self.record(&name).await, retention, "complete");
        }
    }

    /// The response of a long run can still be replayed.
    pub async fn at_least_counts_from_the_completion(&self) {
        let name = name("kept at least");
        let held = self.hold(&name, HOUR, S::SHORT).await;
        self.lapse().await;
        let before = self.record(&name).await;
        self.complete_for(&held, response(), S::SHORT, HOUR).await;
        let record = self.record(&name).await;
        let left = record.expires_in;
        Self::counts_from_now(&before, &record, left, HOUR, "complete: `at_least`");
    }

    /// The record is kept for the longer of its retention and `at_least`.
    pub async fn at_least_does_not_shorten_the_retention(&self) {
        let name = name("kept for longer");
        let held = self.hold(&name, HOUR, HOUR * 3).await;
        self.complete_for(&held, response(), HOUR * 3, HOUR).await;
        Self::kept_from_its_claim(&self.record(&name).await, HOUR * 3, "complete");
    }

    /// No record expires early because a number did not fit.
    pub async fn retention_of_a_century_is_kept(&self) {
        let century = Duration::from_secs(100 * 365 * 24 * 3600);
        let name = name("century");
        let held = self.hold(&name, century, century).await;
        let record = self.record(&name).await;
        assert!(
            lease_left(&record).is_some_and(|left| left > century / 2)
                && record.expires_in.is_some_and(|left| left > century / 2),
            "claim: lives and is kept for as long as asked, and was {record:?}"
        );
        self.complete_for(&held, response(), century, century).await;
        let record = self.record(&name).await;
        assert!(
            record.expires_in.is_some_and(|left| left > century / 2),
            "complete: is kept for as long as asked, and was {record:?}"
        );
    }

    /// A claim with a lease and retention of zero is lapsed and expired right after.
    pub async fn zero_lease_and_retention_end_at_once(&self) {
        let name = name("no time");
        let held = self.hold(&name, Duration::ZERO, Duration::ZERO).await;
        self.subject.pass(S::SHORT).await;
        let record = self.record(&name).await;
        assert!(
            status_of(&record) == Status::Lapsed && record.expires_in.is_none(),
            "claim: lapses and expires after no time, and was {record:?}"
        );
        self.complete(&held, response(), Duration::ZERO).await;
        self.subject.pass(S::SHORT).await;
        let record = self.record(&name).await;
        assert!(
            status_of(&record) == Status::Completed && record.expires_in.is_none(),
            "complete: expires after no time, and was {record:?}"
        );
    }

    /// One tick after its last moment, a lease has lapsed. Tested with an exact clock
    /// only.
    pub async fn i3_lease_is_live_at_its_last_moment(&self) {
        let Some(tick) = S::TICK else { return };
        let name = name("moment");
        let held = self.hold(&name, S::SHORT, HOUR).await;
        let claim = long_claim(1);
        let take_over = || held.reclaim(&self.store, ReclaimAs::Takeover, &claim);
        self.subject.pass(S::SHORT).await;
        let record = self.record(&name).await;
        assert_eq!(
            lease_left(&record),
            Some(Duration::ZERO),
            "a lease has not lapsed at the moment itself"
        );
        assert_eq!(
            take_over().await,
            None,
            "reclaim: a lease has not lapsed at the moment itself"
        );
        superseded(
            held.make(Call::MarkLapsed, &self.store).await,
            "mark_unknown by a marked_by at the very end of a lease",
        );
        self.subject.pass(tick).await;
        assert_eq!(
            self.status(&name).await,
            Status::Lapsed,
            "a lease has lapsed once its end lies in the past"
        );
        assert!(
            take_over().await.is_some(),
            "reclaim: a lease has lapsed once its end lies in the past"
        );
    }

    /// One tick after its last moment, a record has expired. Tested with an exact clock
    /// only.
    pub async fn i4_record_is_live_at_its_last_moment(&self) {
        let Some(tick) = S::TICK else { return };
        let completed = self.hold(&name("completed"), HOUR, S::SHORT).await;
        self.complete(&completed, response(), S::SHORT).await;
        let released = self.hold(&name("released"), HOUR, S::SHORT).await;
        self.release(&released, Release::AnyRequest).await;
        let claim = long_claim(1);
        self.subject.pass(S::SHORT).await;
        let purged = good(self.store.purge_expired(10, HOUR).await);
        assert_eq!(
            purged.touched(),
            0,
            "purge_expired: a record has not expired at the moment itself"
        );
        for held in [&completed, &released] {
            assert_eq!(
                self.record(&held.name).await.expires_in,
                Some(Duration::ZERO),
                "a record has not expired at the moment itself"
            );
            assert_eq!(
                held.reclaim(&self.store, ReclaimAs::Expired, &claim).await,
                None,
                "reclaim: a record has not expired at the moment itself"
            );
        }
        self.subject.pass(tick).await;
        for reclaim_as in [ReclaimAs::Retry, ReclaimAs::Replace] {
            let reclaimed = released.reclaim(&self.store, reclaim_as, &claim).await;
            assert_eq!(
                reclaimed, None,
                "reclaim: a released record has expired once its end lies in the past"
            );
        }
        for held in [&completed, &released] {
            assert_eq!(
                self.record(&held.name).await.expires_in,
                None,
                "a record has expired once its end lies in the past"
            );
        }
        assert!(
            completed
                .reclaim(&self.store, ReclaimAs::Expired, &claim)
                .await
                .is_some(),
            "reclaim: a record has expired once its end lies in the past"
        );
        let purged = good(self.store.purge_expired(10, HOUR).await);
        assert_eq!(
            purged.removed, 1,
            "purge_expired: a record has expired once its end lies in the past"
        );
    }

    /// Tested with an exact clock only.
    pub async fn released_record_is_retried_at_its_last_moment(&self) {
        if S::TICK.is_none() {
            return;
        }
        let held = self.hold(&name("retried"), HOUR, S::SHORT).await;
        self.release(&held, Release::SameRequest).await;
        self.subject.pass(S::SHORT).await;
        let claim = long_claim(1);
        self.hold_again(&held, ReclaimAs::Retry, claim).await;
    }

    /// A filter chooses claims older than its age, not as old. Tested with an exact clock
    /// only.
    pub async fn filter_leaves_out_a_claim_of_exactly_its_age(&self) {
        let Some(tick) = S::TICK else { return };
        self.hold(&name("as old"), HOUR, HOUR).await;
        self.subject.pass(S::SHORT).await;
        let filter = Filter::in_progress_for(S::SHORT);
        assert!(
            listed(&self.store, &filter, 10).await.is_empty(),
            "list: a claim as old as the filter says is not older"
        );
        self.subject.pass(tick).await;
        assert_eq!(
            listed(&self.store, &filter, 10).await.len(),
            1,
            "list: a claim older than the filter says is listed"
        );
    }
}
