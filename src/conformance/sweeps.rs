use super::{
    CROWD, HOUR, Subject, Trial,
    cases::Case,
    good, long_claim, name, response,
    states::{State, Status, same_claim, status_of},
};
use crate::store::{Purged, ReclaimAs, Store};

/// # Sweeping
impl<S: Subject> Trial<S> {
    /// A sweep removes expired records that are completed, released or unknown, marks
    /// lapsed ones in progress, and leaves the others.
    pub async fn sweep_removes_expired_records_only(&self) {
        let mut cases = Vec::new();
        for case in self.cases(State::all()).await {
            let before = self.peek(&case.held.name).await;
            cases.push((case, before));
        }
        let purged = good(self.store.purge_expired(100, HOUR).await);
        let removed = if S::REMOVES_BY_ITSELF { 1 } else { 4 };
        assert_eq!(
            purged,
            counts(removed, 1, 1),
            "purge_expired: removed completed, unknown and released records, and marked one"
        );
        for (case, before) in cases {
            let Case { state, held, .. } = case;
            let what = format!("purge_expired over {state:?}");
            let after = self.peek(&held.name).await;
            match state.status {
                Status::Lapsed if state.expired => {
                    let (Some(before), Some(after)) = (before, after) else {
                        panic!("{what}: a record in progress is never removed");
                    };
                    same_claim(&before, &after, &what);
                    assert_eq!(status_of(&after), Status::Unknown, "{what}");
                    Self::counts_from_now(&before, &after, after.expires_in, HOUR, &what);
                }
                Status::Completed | Status::Released | Status::Free
                    if state.expired && S::REMOVES_BY_ITSELF => {}
                Status::Completed | Status::Unknown | Status::Released | Status::Free
                    if state.expired =>
                {
                    assert!(after.is_none(), "{what}: is removed, and was {after:?}");
                }
                _ => Self::unchanged(before.as_ref(), after.as_ref(), &what),
            }
        }
        let purged = good(self.peer.purge_expired(100, HOUR).await);
        assert_eq!(
            purged,
            Purged::default(),
            "purge_expired: nothing is due after a sweep"
        );
    }

    /// An expired record with a live lease is not marked either.
    pub async fn i3_sweep_leaves_live_leases(&self) {
        let held = self.hold(&name("at work"), HOUR, S::SHORT).await;
        self.lapse().await;
        let before = self.peek(&held.name).await;
        for store in [&self.store, &self.peer] {
            let purged = good(store.purge_expired(10, HOUR).await);
            assert_eq!(
                purged,
                Purged::default(),
                "purge_expired: a record with a live lease is never touched"
            );
            self.stays(&held.name, &before, "a sweep over a live lease")
                .await;
        }
        self.complete(&held, response(), HOUR).await;
    }

    /// A lapsed record becomes unknown, is kept for its retention, and is counted when it
    /// is removed.
    pub async fn i11_sweep_marks_lapsed_records_unknown_before_removal(&self) {
        let held = self.hold(&name("lost"), S::SHORT, S::SHORT).await;
        self.lapse().await;
        let purged = good(self.store.purge_expired(10, S::SHORT).await);
        assert_eq!(
            purged,
            counts(0, 0, 1),
            "purge_expired: a lapsed claim becomes unknown, and is not removed"
        );
        assert_eq!(
            self.status(&held.name).await,
            Status::Unknown,
            "purge_expired: a lapsed claim becomes unknown"
        );
        self.lapse().await;
        let purged = good(self.peer.purge_expired(10, S::SHORT).await);
        assert_eq!(
            purged,
            counts(1, 1, 0),
            "purge_expired: an unknown record goes after its retention, and is counted as unknown"
        );
        assert!(
            self.peek(&held.name).await.is_none(),
            "purge_expired: an unknown record goes after its retention"
        );
    }

    /// A call touches no more records than its limit. Fewer mean that no more are due.
    pub async fn sweep_keeps_to_its_limit(&self) {
        // Live leases whose records expired before all others.
        let at_work: Vec<_> = [Status::Live.expired(); 5].into();
        let all: Vec<_> = State::all().collect();
        let due = all
            .into_iter()
            .filter(|state| state.expired && state.status != Status::Live)
            .filter(|state| {
                let is_open = matches!(state.status, Status::Lapsed | Status::Unknown);
                is_open || !S::REMOVES_BY_ITSELF
            })
            .cycle()
            .take(10);
        let cases = self.cases(at_work.into_iter().chain(due)).await;
        let none = good(self.store.purge_expired(0, HOUR).await);
        assert_eq!(
            none,
            Purged::default(),
            "purge_expired: a limit of none touches none"
        );
        let mut touched = Vec::new();
        loop {
            let purged = good(self.store.purge_expired(3, HOUR).await);
            touched.push(purged.touched());
            assert!(
                purged.touched() <= 3,
                "purge_expired: looks at no more than the limit of 3, and touched {touched:?}"
            );
            if purged.touched() < 3 {
                break;
            }
        }
        assert_eq!(
            touched,
            [3, 3, 3, 1],
            "purge_expired: touches as many as the limit while that many are due"
        );
        for case in cases {
            assert_eq!(
                self.status(&case.held.name).await,
                match case.state.status {
                    Status::Live => Status::Live,
                    Status::Lapsed => Status::Unknown,
                    _ => Status::Absent,
                },
                "purge_expired: less than the limit means that no more are due"
            );
        }
    }

    /// Several processes may sweep at once, and together count each record once.
    pub async fn simultaneous_sweeps_count_each_record_once(&self) {
        let states = [Self::swept(), Status::Unknown, Status::Lapsed]
            .map(Status::expired)
            .into_iter()
            .cycle()
            .take(60);
        let cases = self.cases(states).await;
        let calls = (0..4).map(|turn| {
            let store = self.either(turn).clone();
            async move {
                let mut sum = Purged::default();
                for _ in 0..4 {
                    add(&mut sum, good(store.purge_expired(7, HOUR).await));
                }
                sum
            }
        });
        let mut sum = Purged::default();
        for purged in self.at_once(calls).await {
            add(&mut sum, purged);
        }
        // A sweep may skip a record that another sweep has locked.
        add(&mut sum, good(self.store.purge_expired(100, HOUR).await));
        let unknown = if S::REMOVES_BY_ITSELF { 40 } else { 20 };
        assert_eq!(
            sum,
            counts(40, unknown, 20),
            "purge_expired: several sweeps count each record once"
        );
        for case in cases {
            let left = self.peek(&case.held.name).await;
            assert_eq!(
                left.is_some(),
                case.state.status == Status::Lapsed,
                "purge_expired: several sweeps do what one does"
            );
        }
    }

    /// A sweep that found an expired record checks it again before it removes it.
    pub async fn i1_sweep_leaves_a_reclaimed_record(&self) {
        let cases = self.cases([Status::Completed.expired(); CROWD]).await;
        let calls = cases.iter().enumerate().flat_map(|(turn, case)| {
            let reclaim = (self.either(turn).clone(), Some(case.held.clone()));
            let sweep = (self.either(turn + 1).clone(), None);
            [reclaim, sweep].map(|(store, held)| async move {
                let Some(held) = held else {
                    good(store.purge_expired(CROWD as u32, HOUR).await);
                    return None;
                };
                let claim = long_claim(3);
                let granted = held.reclaim(&store, ReclaimAs::Expired, &claim).await;
                granted.map(|grant| (held.name, claim.token, grant))
            })
        });
        for (name, token, grant) in self.at_once(calls).await.into_iter().flatten() {
            let record = self.peek(&name).await;
            assert!(
                record.is_some_and(|record| record.token == token && record.fence == grant.fence),
                "purge_expired: a record that was claimed again has a live lease and stays"
            );
        }
    }
}

fn counts(removed: u64, removed_unknown: u64, marked_unknown: u64) -> Purged {
    Purged {
        removed,
        removed_unknown,
        marked_unknown,
    }
}

fn add(sum: &mut Purged, purged: Purged) {
    sum.removed += purged.removed;
    sum.removed_unknown += purged.removed_unknown;
    sum.marked_unknown += purged.marked_unknown;
}
