use std::time::Instant;

use super::{
    CROWD, HOUR, Held, Subject, Trial, beyond,
    calls::Call,
    cases::Case,
    claims::RECLAIMS,
    fingerprint, good, long_claim, name,
    states::{State, Status, lease_left, same_claim, status_of, superseded},
};
use crate::store::{
    Claim, ReclaimAs, Record, RecordState, Release, Store, Transitioned, admin::Resolution,
};

/// # Claiming again
impl<S: Subject> Trial<S> {
    checks! {
        /// A takeover is granted if the record is in progress and its lease has lapsed.
        pub async fn i3_takeover_needs_a_lapsed_lease(&self)
            => self.reclaim_is_guarded(ReclaimAs::Takeover);

        /// A rerun is granted if the record is unknown and not expired.
        pub async fn rerun_needs_an_unknown_record(&self)
            => self.reclaim_is_guarded(ReclaimAs::Rerun);

        /// A claim for a hook is granted if the record is unknown and not expired.
        pub async fn reconcile_needs_an_unknown_record(&self)
            => self.reclaim_is_guarded(ReclaimAs::Reconcile);

        /// A retry is granted if the record is released and not expired.
        pub async fn retry_needs_a_released_record(&self)
            => self.reclaim_is_guarded(ReclaimAs::Retry);

        /// A replacement is granted if the record is released for any request and not
        /// expired.
        pub async fn replace_needs_a_record_free_for_any_request(&self)
            => self.reclaim_is_guarded(ReclaimAs::Replace);

        /// A new operation is granted if the record has expired and has no live lease.
        pub async fn expired_needs_an_expired_record_without_a_live_lease(&self)
            => self.reclaim_is_guarded(ReclaimAs::Expired);
    }

    async fn reclaim_is_guarded(&self, reclaim_as: ReclaimAs) {
        for case in self.cases(State::all()).await {
            let (state, held, former) = (case.state, case.held, case.former);
            let what = format!("reclaim by {reclaim_as:?} of {state:?}");
            let claim = long_claim(3);
            let before = self.peek(&held.name).await;
            for seen in [former.grant.fence, beyond(held.grant.fence)] {
                let reclaimed = self
                    .store
                    .reclaim(&held.name, seen, reclaim_as, &claim)
                    .await;
                assert_eq!(good(reclaimed), None, "{what}: not with another fence");
                self.stays(&held.name, &before, &what).await;
            }

            let grant = held.reclaim(&self.peer, reclaim_as, &claim).await;
            assert_eq!(
                grant.is_some(),
                state.allows(reclaim_as),
                "{what}: is granted in the state that it names, and in no other"
            );
            let Some(grant) = grant else {
                self.stays(&held.name, &before, &what).await;
                continue;
            };
            let after = self.peek(&held.name).await;
            let after = after.unwrap_or_else(|| panic!("{what}: leaves a record"));
            assert!(
                grant.fence > held.grant.fence && after.fence == grant.fence,
                "{what}: has a larger fence than before"
            );
            let (operation, attempt, takeovers) = match reclaim_as {
                ReclaimAs::Takeover | ReclaimAs::Rerun => {
                    (held.grant.operation, held.grant.attempt + 1, 1)
                }
                ReclaimAs::Reconcile => (held.grant.operation, held.grant.attempt, 0),
                ReclaimAs::Retry => (held.grant.operation, held.grant.attempt + 1, 0),
                ReclaimAs::Replace | ReclaimAs::Expired => (claim.operation, 1, 0),
            };
            assert_eq!(
                (grant.operation, grant.attempt),
                (operation, attempt),
                "{what}: grants the operation and attempt that follow"
            );
            assert_eq!(
                (after.operation, after.attempt, after.takeovers),
                (operation, attempt, takeovers),
                "{what}: the record says what was granted"
            );
            assert!(
                after.token == claim.token
                    && after.fingerprint == claim.fingerprint
                    && lease_left(&after).is_some(),
                "{what}: is in progress for the new claim, and was {after:?}"
            );
        }
    }

    checks! {
        /// Of 32 simultaneous takeovers, one is granted.
        pub async fn one_of_many_simultaneous_takeovers_is_granted(&self)
            => self.one_succeeds(ReclaimAs::Takeover, Status::Lapsed.live());

        /// Of 32 simultaneous reruns, one is granted.
        pub async fn one_of_many_simultaneous_reruns_is_granted(&self)
            => self.one_succeeds(ReclaimAs::Rerun, Status::Unknown.live());

        /// Of 32 simultaneous reconciliations, one is granted.
        pub async fn one_of_many_simultaneous_reconciliations_is_granted(&self)
            => self.one_succeeds(ReclaimAs::Reconcile, Status::Unknown.live());

        /// Of 32 simultaneous retries, one is granted.
        pub async fn one_of_many_simultaneous_retries_is_granted(&self)
            => self.one_succeeds(ReclaimAs::Retry, Status::Released.live());

        /// Of 32 simultaneous replacements, one is granted.
        pub async fn one_of_many_simultaneous_replacements_is_granted(&self)
            => self.one_succeeds(ReclaimAs::Replace, Status::Free.live());

        /// Of 32 simultaneous claims of an expired record, one is granted.
        pub async fn one_of_many_claims_of_an_expired_record_is_granted(&self)
            => self.one_succeeds(ReclaimAs::Expired, Status::Completed.expired());
    }

    async fn one_succeeds(&self, reclaim_as: ReclaimAs, state: State) {
        for case in self.cases([state; 4]).await {
            let held = case.held;
            let calls = (0..CROWD).map(|turn| {
                let (store, held) = (self.either(turn).clone(), held.clone());
                async move {
                    let claim = long_claim(3);
                    let granted = held.reclaim(&store, reclaim_as, &claim).await;
                    granted.map(|grant| (claim.token, grant))
                }
            });
            let granted: Vec<_> = self.at_once(calls).await.into_iter().flatten().collect();
            let [(token, grant)] = granted[..] else {
                panic!(
                    "reclaim: one of all simultaneous calls by {reclaim_as:?} is granted, and {} were",
                    granted.len()
                );
            };
            let record = self.record(&held.name).await;
            assert!(
                record.token == token
                    && record.fence == grant.fence
                    && record.attempt == grant.attempt,
                "reclaim: the record is that of the one that was granted"
            );
        }
    }

    /// `takeovers` counts claims after unknown outcomes. A retry leaves one, and a
    /// resolution as not happened leaves none.
    pub async fn takeovers_are_counted_and_a_retry_keeps_one(&self) {
        let name = name("takeovers");
        let short = || Claim::new(fingerprint(1), S::SHORT, HOUR);
        let mut held = self.hold(&name, S::SHORT, HOUR).await;
        let operation = held.grant.operation;
        let expect = |record: &Record, attempt: u32, takeovers: u32| {
            assert_eq!(
                (record.operation, record.attempt, record.takeovers),
                (operation, attempt, takeovers),
                "reclaim: the operation stays, attempts are counted, and takeovers in a row"
            );
        };
        for count in 1..=2 {
            self.lapse().await;
            held = self.hold_again(&held, ReclaimAs::Takeover, short()).await;
            expect(&self.record(&name).await, count + 1, count);
        }
        self.release(&held, Release::SameRequest).await;
        expect(&self.record(&name).await, 3, 2);
        held = self.hold_again(&held, ReclaimAs::Retry, short()).await;
        expect(&self.record(&name).await, 4, 1);
        self.lapse().await;
        held = self.hold_again(&held, ReclaimAs::Takeover, short()).await;
        expect(&self.record(&name).await, 5, 2);
        self.mark_unknown(&held, HOUR).await;
        self.resolve(&held, &Resolution::DidNotHappen, HOUR).await;
        expect(&self.record(&name).await, 5, 0);
    }

    /// A run with an unknown outcome may have had its effect, which another request would
    /// repeat under another operation. So the key stays with its request while the record
    /// counts takeovers.
    pub async fn i6_release_after_a_takeover_is_for_the_same_request(&self) {
        let name = name("freed after a loss");
        let held = self.hold(&name, S::SHORT, HOUR).await;
        self.lapse().await;
        let claim = long_claim(1);
        let held = self.hold_again(&held, ReclaimAs::Takeover, claim).await;
        let freed = async |held: &Held| {
            self.release(held, Release::AnyRequest).await;
            assert_eq!(
                self.status(&name).await,
                Status::Released,
                "release: for any request, after a takeover, is for the same only"
            );
        };
        freed(&held).await;
        let claim = long_claim(1);
        let held = self.hold_again(&held, ReclaimAs::Retry, claim).await;
        freed(&held).await;
        let other = long_claim(2);
        let replaced = held.reclaim(&self.store, ReclaimAs::Replace, &other).await;
        assert!(
            replaced.is_none(),
            "reclaim: a key that counts takeovers is not for another request"
        );
    }

    /// Makes a record in each state that allows a reclaim, and returns the first one.
    async fn reclaimable_cases(&self) -> Vec<(Case, ReclaimAs)> {
        let allowed = |case: &Case| RECLAIMS.into_iter().find(|by| case.state.allows(*by));
        let cases = self.cases(State::all()).await.into_iter();
        cases
            .filter_map(|case| allowed(&case).map(|reclaim_as| (case, reclaim_as)))
            .collect()
    }

    /// Lease, retention and age count from the new claim.
    pub async fn reclaim_sets_lease_retention_and_age_anew(&self) {
        for (case, reclaim_as) in self.reclaimable_cases().await {
            let what = format!("reclaim by {reclaim_as:?} of {:?}", case.state);
            let began = Instant::now();
            let claim = Claim::new(fingerprint(4), HOUR * 5, HOUR * 7);
            self.hold_again(&case.held, reclaim_as, claim).await;
            let record = self.record(&case.held.name).await;
            Self::lives_for(&record, began, HOUR * 5, HOUR * 7, &what);
        }
    }

    /// Every call with the token or the fence of an earlier claim is refused.
    pub async fn superseded_owner_changes_nothing(&self) {
        for (case, reclaim_as) in self.reclaimable_cases().await {
            let claim = Claim::new(fingerprint(4), S::SHORT, HOUR);
            self.hold_again(&case.held, reclaim_as, claim).await;
            self.former_owner_changes_nothing(&case.held, &format!("{reclaim_as:?}"))
                .await;
        }
    }

    /// Asserts that every call by the owner of the claim `former` is refused.
    async fn former_owner_changes_nothing(&self, former: &Held, reclaim_as: &str) {
        let before = self.record(&former.name).await;
        for call in Call::ALL {
            let what = format!("{call:?} by an owner superseded by {reclaim_as}");
            let answer = former.make(call, &self.peer).await;
            superseded(answer, &what);
            let after = self.record(&former.name).await;
            same_claim(&before, &after, &what);
            assert!(
                matches!(after.state, RecordState::InProgress { .. }),
                "{what}: changes nothing, and made {after:?}"
            );
        }
    }

    checks! {
        /// If a lapsed owner completes while others take over, either the completion is kept
        /// or one of the others owns the record.
        pub async fn late_completion_or_one_takeover_wins(&self)
            => self.one_wins(Call::Complete, Status::Completed);

        /// If a lapsed owner renews while others take over, either the lease is extended or
        /// one of the others owns the record.
        pub async fn late_renewal_or_one_takeover_wins(&self)
            => self.one_wins(Call::Renew, Status::Live);
    }

    async fn one_wins(&self, call: Call, status: Status) {
        let lapsed = Status::Lapsed.live();
        let cases = self.cases([lapsed; 9]).await;
        // The owner's call starts at each position among the others.
        for (owner, case) in cases.into_iter().enumerate() {
            let held = case.held;
            let name = held.name.clone();
            let calls = (0..9).map(|turn| {
                let (store, held) = (self.either(turn).clone(), held.clone());
                async move {
                    if turn == owner {
                        let answer = held.make(call, &store).await;
                        return (answer == Transitioned::Applied).then_some(held.token);
                    }
                    let claim = long_claim(3);
                    let granted = held.reclaim(&store, ReclaimAs::Takeover, &claim).await;
                    granted.map(|_| claim.token)
                }
            });
            let winners: Vec<_> = self.at_once(calls).await.into_iter().flatten().collect();
            let [winner] = winners[..] else {
                panic!(
                    "of {call:?} by a lapsed owner and takeovers one wins, and {} did",
                    winners.len()
                );
            };
            let record = self.record(&name).await;
            let expected = if winner == held.token {
                status
            } else {
                Status::Live
            };
            assert!(
                record.token == winner && status_of(&record) == expected,
                "of {call:?} by a lapsed owner and takeovers the winner's stays, and not {record:?}"
            );
        }
    }
}
