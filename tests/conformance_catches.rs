//! The conformance suite fails for stores that break a promise, in the test of
//! that promise.

use std::{
    collections::HashMap,
    sync::{
        Arc, Mutex,
        atomic::{AtomicBool, Ordering},
    },
    time::Duration,
};

use bytes::Bytes;
use tower_idempotency::{
    Fence, Key, MemoryStore, Scope, Store, StoreError,
    conformance::{Subject, promises},
    store::{
        Claim, Claimed, Completion, FencedTransition, Grant, OwnerTransition, Purged, ReclaimAs,
        Record, RecordName, RecordState, Release, Token, Transition, Transitioned,
        admin::{Count, Filter, Page, Resolution},
    },
};

/// The defect of a store.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Defect {
    Nothing,
    ReadsThenClaims,
    ForgetsItsLastFence,
    TakesOverLiveLeases,
    ReclaimsWithAnyFence,
    ReplacesReleasedRecords,
    BeginsANewOperationForEachRetry,
    CountsNoTakeovers,
    FreesAfterTakeovers,
    LeavesTheTokenToTheOwner,
    RenewsWithAnyToken,
    RenewsNothingThatHasLapsed,
    TurnsLateOwnersAway,
    KeepsTheLastResponse,
    CutsResponsesAtNul,
    CountsRetentionFromTheCompletion,
    RemovesWhatIsReleased,
    MarksLiveLeasesUnknown,
    ResolvesWithAnyFence,
    SweepsLiveLeases,
    RemovesLapsedRecords,
    SweepsMoreThanItsLimit,
    JoinsScopeAndKey,
    FoldsCase,
    ListsFromTheStartAgain,
    EndsAtAShortPage,
    ListsByTheLimit,
    ListsEveryScope,
    ListsNoRefusedClaim,
    CountsToItsLimit,
    LapsesAtTheMomentItself,
    CompletesInTwoSteps,
    ComparesTheTokenAMomentBefore,
    RemovesWhatHadExpiredAMomentBefore,
    IsWedgedByADroppedCall,
}

/// The memory store with one defect.
#[derive(Clone)]
struct Broken {
    defect: Defect,
    inner: Arc<Mutex<MemoryStore>>,
    last_responses: Arc<Mutex<HashMap<RecordName, Bytes>>>,
    names: Arc<Mutex<Vec<RecordName>>>,
    refused: Arc<Mutex<Vec<Token>>>,
    busy: Arc<AtomicBool>,
}

impl Broken {
    fn has(&self, defect: Defect) -> bool {
        self.defect == defect
    }

    fn inner(&self) -> MemoryStore {
        self.inner.lock().unwrap().clone()
    }

    fn named(&self, name: &RecordName) -> RecordName {
        let (scope, key) = (name.scope().as_str(), name.key().as_str());
        match self.defect {
            Defect::JoinsScopeAndKey => {
                RecordName::new(Scope::single_tenant(), Key::new(format!("{scope}:{key}")))
            }
            Defect::FoldsCase => RecordName::new(
                Scope::from_stored(scope.to_lowercase()),
                Key::new(key.to_lowercase()),
            ),
            _ => name.clone(),
        }
    }

    /// The record as this store shows it.
    fn shown(&self, name: &RecordName, mut record: Record) -> Record {
        if self.has(Defect::CountsNoTakeovers) {
            record.takeovers = 0;
        }
        let lost = record.takeovers > 0;
        match &mut record.state {
            RecordState::Released(release) if lost && self.has(Defect::FreesAfterTakeovers) => {
                *release = Release::AnyRequest;
            }
            RecordState::InProgress { lease_left } if self.has(Defect::LapsesAtTheMomentItself) => {
                *lease_left = lease_left.filter(|left| !left.is_zero());
            }
            RecordState::Completed { response } if self.has(Defect::KeepsTheLastResponse) => {
                if let Some(last) = self.last_responses.lock().unwrap().get(name) {
                    *response = last.clone();
                }
            }
            _ => {}
        }
        record
    }

    async fn renews(
        &self,
        name: &RecordName,
        mut token: Token,
        lease: Duration,
    ) -> Result<Transitioned, StoreError> {
        if let Some(record) = self.seen(name).await {
            if self.has(Defect::RenewsWithAnyToken) {
                token = record.token;
            }
            let lapsed = matches!(record.state, RecordState::InProgress { lease_left: None });
            if self.has(Defect::RenewsNothingThatHasLapsed) && lapsed {
                return Ok(Transitioned::Superseded);
            }
        }
        self.inner().renew(name, token, lease).await
    }

    async fn completes(
        &self,
        name: &RecordName,
        mut token: Token,
        mut completion: Completion,
    ) -> Result<Transitioned, StoreError> {
        match self.defect {
            Defect::ComparesTheTokenAMomentBefore => {
                let mine = |record: &Record| record.token == token;
                if self.seen(name).await.as_ref().is_some_and(mine) {
                    tokio::task::yield_now().await;
                    token = self.seen(name).await.map_or(token, |record| record.token);
                }
            }
            Defect::IsWedgedByADroppedCall => {
                if self.busy.swap(true, Ordering::Relaxed) {
                    return Err(StoreError::unavailable("the connection is busy"));
                }
                tokio::task::yield_now().await;
                self.busy.store(false, Ordering::Relaxed);
            }
            Defect::TurnsLateOwnersAway => {
                let record = self.seen(name).await;
                if record.is_some_and(|record| {
                    matches!(record.state, RecordState::InProgress { lease_left: None })
                }) {
                    return Ok(Transitioned::Superseded);
                }
            }
            Defect::CutsResponsesAtNul => {
                let end = completion.response.iter().position(|byte| *byte == 0);
                completion.response.truncate(end.unwrap_or(usize::MAX));
            }
            Defect::CountsRetentionFromTheCompletion => {
                completion.at_least = completion.retention;
            }
            Defect::CompletesInTwoSteps => {
                let _ = self
                    .inner()
                    .mark_unknown(name, token, completion.retention)
                    .await?;
                tokio::task::yield_now().await;
            }
            _ => {}
        }
        let settlement = self.inner().complete(name, token, &completion).await?;
        if settlement == Transitioned::Applied {
            let mut responses = self.last_responses.lock().unwrap();
            responses.insert(name.clone(), completion.response);
        }
        Ok(settlement)
    }

    async fn releases(
        &self,
        name: &RecordName,
        token: Token,
        release: Release,
    ) -> Result<Transitioned, StoreError> {
        let settlement = self.inner().release(name, token, release).await?;
        if self.has(Defect::RemovesWhatIsReleased)
            && settlement == Transitioned::Applied
            && let Some(record) = self.seen(name).await
        {
            return self.inner().forget(name, record.fence).await;
        }
        Ok(settlement)
    }

    async fn marks_lapsed(
        &self,
        name: &RecordName,
        seen: Fence,
        retention: Duration,
    ) -> Result<Transitioned, StoreError> {
        if let Some(record) = self.seen(name).await
            && self.has(Defect::MarksLiveLeasesUnknown)
            && record.fence == seen
        {
            let token = record.token;
            return self.inner().mark_unknown(name, token, retention).await;
        }
        self.inner().mark_lapsed(name, seen, retention).await
    }

    async fn resolves(
        &self,
        name: &RecordName,
        mut seen: Fence,
        resolution: &Resolution,
        at_least: Duration,
    ) -> Result<Transitioned, StoreError> {
        if let Some(record) = self.seen(name).await
            && self.has(Defect::ResolvesWithAnyFence)
        {
            seen = record.fence;
        }
        if self.has(Defect::LeavesTheTokenToTheOwner)
            && let Some(record) = self.seen(name).await
            && matches!(record.state, RecordState::Unknown)
            && record.fence == seen
            && let Resolution::Happened(response) = resolution
        {
            let completion = Completion::new(response.encode(), at_least, at_least);
            return self.completes(name, record.token, completion).await;
        }
        self.inner().resolve(name, seen, resolution, at_least).await
    }

    async fn seen(&self, name: &RecordName) -> Option<Record> {
        self.inner().read(name).await.unwrap()
    }
}

impl Store for Broken {
    async fn claim(&self, name: &RecordName, claim: &Claim) -> Result<Claimed, StoreError> {
        let name = &self.named(name);
        self.names.lock().unwrap().push(name.clone());
        let free = self.seen(name).await.is_none();
        if self.has(Defect::ReadsThenClaims) {
            tokio::task::yield_now().await;
        }
        Ok(match self.inner().claim(name, claim).await? {
            Claimed::Occupied(record) if free && self.has(Defect::ReadsThenClaims) => {
                Claimed::Acquired(Grant {
                    operation: claim.operation,
                    fence: record.fence,
                    attempt: 1,
                })
            }
            Claimed::Occupied(record) => {
                self.refused.lock().unwrap().push(claim.token);
                Claimed::Occupied(self.shown(name, record))
            }
            claimed => claimed,
        })
    }

    async fn reclaim(
        &self,
        name: &RecordName,
        mut seen: Fence,
        mut reclaim_as: ReclaimAs,
        claim: &Claim,
    ) -> Result<Option<Grant>, StoreError> {
        let name = &self.named(name);
        let mut claim = *claim;
        if let Some(record) = self.seen(name).await {
            if self.has(Defect::ReclaimsWithAnyFence) {
                seen = record.fence;
            }
            let live = matches!(
                record.state,
                RecordState::InProgress {
                    lease_left: Some(_)
                }
            );
            if self.has(Defect::TakesOverLiveLeases)
                && live
                && reclaim_as == ReclaimAs::Takeover
                && seen == record.fence
            {
                let _ = self
                    .release(name, record.token, Release::SameRequest)
                    .await?;
                reclaim_as = ReclaimAs::Retry;
            }
            if self.has(Defect::ReplacesReleasedRecords) && reclaim_as == ReclaimAs::Replace {
                reclaim_as = ReclaimAs::Retry;
                claim.operation = record.operation;
            }
        }
        let grant = self.inner().reclaim(name, seen, reclaim_as, &claim).await?;
        Ok(grant.map(|grant| {
            if self.has(Defect::BeginsANewOperationForEachRetry) {
                Grant {
                    operation: claim.operation,
                    ..grant
                }
            } else {
                grant
            }
        }))
    }

    async fn transition(
        &self,
        name: &RecordName,
        transition: Transition,
    ) -> Result<Transitioned, StoreError> {
        let name = &self.named(name);
        match transition {
            Transition::Owner(token, transition) => match transition {
                OwnerTransition::Renew { lease } => self.renews(name, token, lease).await,
                OwnerTransition::Complete(completion) => {
                    self.completes(name, token, completion).await
                }
                OwnerTransition::Release(release) => self.releases(name, token, release).await,
                OwnerTransition::MarkUnknown { retention } => {
                    self.inner().mark_unknown(name, token, retention).await
                }
            },
            Transition::Fenced(seen, FencedTransition::MarkLapsed { retention }) => {
                self.marks_lapsed(name, seen, retention).await
            }
            Transition::Fenced(
                seen,
                FencedTransition::Resolve {
                    resolution,
                    at_least,
                },
            ) => self.resolves(name, seen, &resolution, at_least).await,
            Transition::Fenced(seen, FencedTransition::Forget) => {
                let forgotten = self.inner().forget(name, seen).await?;
                if forgotten == Transitioned::Applied && self.has(Defect::ForgetsItsLastFence) {
                    *self.inner.lock().unwrap() = MemoryStore::new();
                }
                Ok(forgotten)
            }
        }
    }

    async fn read(&self, name: &RecordName) -> Result<Option<Record>, StoreError> {
        let name = &self.named(name);
        let record = self.inner().read(name).await?;
        Ok(record.map(|record| self.shown(name, record)))
    }

    async fn list(
        &self,
        filter: &Filter,
        after: Option<&RecordName>,
        limit: u32,
    ) -> Result<Page, StoreError> {
        let after = after.filter(|_| !self.has(Defect::ListsFromTheStartAgain));
        let mut filter = filter.clone();
        if self.has(Defect::ListsEveryScope) {
            filter.scope = None;
        }
        let mut page = self.inner().list(&filter, after, limit).await?;
        if self.has(Defect::EndsAtAShortPage) && limit < 3 {
            page.next = None;
        }
        if self.has(Defect::ListsByTheLimit) && limit == 3 {
            page.records.reverse();
        }
        let mut records = page.records;
        if self.has(Defect::ListsNoRefusedClaim) {
            let refused = self.refused.lock().unwrap();
            records.retain(|(_, record)| !refused.contains(&record.token));
        }
        let shown = records
            .into_iter()
            .map(|(name, record)| (name.clone(), self.shown(&name, record)));
        page.records = shown.collect();
        Ok(page)
    }

    async fn count(&self, filter: &Filter, limit: u32) -> Result<Count, StoreError> {
        let count = self.inner().count(filter, limit).await?;
        Ok(match count {
            Count::AtLeast(counted) if self.has(Defect::CountsToItsLimit) => {
                Count::Exactly(counted)
            }
            count => count,
        })
    }

    async fn purge_expired(
        &self,
        mut limit: u32,
        unknown_retention: Duration,
    ) -> Result<Purged, StoreError> {
        let inner = self.inner();
        let mut removed = 0;
        let sweeps_live = self.has(Defect::SweepsLiveLeases);
        let sweeps_lapsed = self.has(Defect::RemovesLapsedRecords);
        let in_progress = Filter::in_progress_for(Duration::ZERO);
        for (name, record) in inner.list(&in_progress, None, u32::MAX).await?.records {
            let lapsed = matches!(record.state, RecordState::InProgress { lease_left: None });
            let swept = if lapsed { sweeps_lapsed } else { sweeps_live };
            if swept && record.expires_in.is_none() {
                let _ = inner.forget(&name, record.fence).await?;
                removed += 1;
            }
        }
        if self.has(Defect::RemovesWhatHadExpiredAMomentBefore) {
            let mut due = Vec::new();
            let names = self.names.lock().unwrap().clone();
            for name in names {
                due.extend(
                    self.seen(&name)
                        .await
                        .filter(|record| record.expires_in.is_none())
                        .map(|_| name),
                );
            }
            tokio::task::yield_now().await;
            for name in due {
                if let Some(record) = self.seen(&name).await {
                    let _ = inner.forget(&name, record.fence).await?;
                    removed += 1;
                }
            }
        }
        if self.has(Defect::SweepsMoreThanItsLimit) && limit > 0 {
            limit = u32::MAX;
        }
        let mut purged = inner.purge_expired(limit, unknown_retention).await?;
        purged.removed += removed;
        if self.has(Defect::ForgetsItsLastFence) && inner.is_empty() {
            *self.inner.lock().unwrap() = MemoryStore::new();
        }
        Ok(purged)
    }
}

/// Makes stores with a defect.
#[derive(Clone, Copy)]
struct With(Defect);

impl Subject for With {
    type Store = Broken;
    const TICK: Option<Duration> = Some(Duration::from_nanos(1));

    async fn store(&self) -> Broken {
        Broken {
            defect: self.0,
            inner: Arc::default(),
            last_responses: Arc::default(),
            names: Arc::default(),
            refused: Arc::default(),
            busy: Arc::default(),
        }
    }

    async fn pass(&self, time: Duration) {
        tokio::time::advance(time).await;
    }
}

/// The promises that a store with this defect breaks, with the messages of the
/// suite.
async fn broken_by(defect: Defect) -> Vec<(&'static str, String)> {
    let mut broken = Vec::new();
    for promise in promises() {
        let name = promise.name();
        let check = tokio::spawn(async move { promise.check(With(defect)).await });
        if let Err(error) = check.await {
            let message = error.into_panic();
            let message = message
                .downcast_ref::<String>()
                .cloned()
                .or_else(|| message.downcast_ref::<&str>().map(ToString::to_string));
            broken.push((name, message.expect("the suite says what is wrong")));
        }
    }
    broken
}

/// Asserts that the suite finds the promise `named` broken, for the reason
/// `because`, and does not find all promises broken.
async fn is_caught(defect: Defect, named: &str, because: &str) {
    let broken = broken_by(defect).await;
    let Some((_, message)) = broken.iter().find(|(name, _)| *name == named) else {
        panic!("{defect:?} does not break {named:?}, and breaks {broken:#?}");
    };
    assert!(
        message.contains(because),
        "{defect:?} breaks {named:?} because {because:?}, and the suite says {message:?}"
    );
    assert!(
        broken.len() < promises::<With>().len() / 2,
        "{defect:?} breaks some promises, and {} were blamed",
        broken.len()
    );
}

macro_rules! catches {
    ($($test:ident: $defect:ident breaks $promise:ident because $because:literal;)*) => {
        $(
            #[tokio::test(start_paused = true)]
            async fn $test() {
                is_caught(Defect::$defect, stringify!($promise), $because).await;
            }
        )*
    };
}

catches! {
    a_second_owner_is_caught:
        ReadsThenClaims breaks one_of_many_simultaneous_claims_is_acquired
        because "one of all simultaneous calls is acquired, and";
    a_fence_that_was_granted_before_is_caught:
        ForgetsItsLastFence
        breaks i2_fences_grow_over_release_expiry_sweep_and_forget
        because "the fences of a name grow over a removal";
    fences_that_begin_again_in_a_race_are_caught:
        ForgetsItsLastFence breaks i2_fences_grow_while_claims_and_forgets_race
        because "each fence is larger than all before it";
    a_live_lease_that_is_taken_over_is_caught:
        TakesOverLiveLeases breaks i3_takeover_needs_a_lapsed_lease
        because "is granted in the state that it names, and in no other";
    a_fence_that_is_not_compared_is_caught:
        ReclaimsWithAnyFence breaks retry_needs_a_released_record
        because "not with another fence";
    a_replaced_record_of_the_same_request_is_caught:
        ReplacesReleasedRecords breaks replace_needs_a_record_free_for_any_request
        because "is granted in the state that it names, and in no other";
    a_retry_under_another_operation_is_caught:
        BeginsANewOperationForEachRetry
        breaks retry_needs_a_released_record
        because "grants the operation and attempt that follow";
    takeovers_that_are_not_counted_are_caught:
        CountsNoTakeovers breaks takeovers_are_counted_and_a_retry_keeps_one
        because "takeovers in a row";
    a_key_that_is_free_after_a_takeover_is_caught:
        FreesAfterTakeovers breaks i6_release_after_a_takeover_is_for_the_same_request
        because "is for the same only";
    a_resolution_that_leaves_the_token_is_caught:
        LeavesTheTokenToTheOwner
        breaks resolve_as_happened_needs_a_lapsed_or_unknown_record
        because "changes only if it happened";
    a_renewal_with_any_token_is_caught:
        RenewsWithAnyToken breaks renew_needs_the_token_of_a_claim_in_progress
        because "by a stranger on";
    a_lapsed_lease_that_its_owner_cannot_renew_is_caught:
        RenewsNothingThatHasLapsed
        breaks renew_extends_the_lease_from_now_even_if_lapsed
        because "even if it has lapsed";
    a_late_completion_that_is_refused_is_caught:
        TurnsLateOwnersAway breaks complete_needs_the_token_of_the_last_claim
        because "is applied";
    a_response_that_is_overwritten_is_caught:
        KeepsTheLastResponse breaks repeated_complete_is_applied_and_changes_nothing
        because "already: changes nothing";
    a_completed_record_that_changes_is_caught:
        KeepsTheLastResponse breaks i4_completed_record_changes_only_after_its_expiry
        because "Complete of a completed record: changes nothing";
    bytes_that_are_cut_are_caught:
        CutsResponsesAtNul breaks response_is_kept_byte_for_byte
        because "comes back byte for byte";
    a_retention_from_the_completion_is_caught:
        CountsRetentionFromTheCompletion
        breaks retention_of_a_completion_counts_from_the_claim
        because "from its claim";
    a_live_lease_that_is_marked_unknown_is_caught:
        MarksLiveLeasesUnknown
        breaks i3_mark_unknown_without_a_token_needs_a_lapsed_lease
        because "its guard does not hold";
    a_resolution_of_another_claim_is_caught:
        ResolvesWithAnyFence breaks resolve_as_happened_needs_a_lapsed_or_unknown_record
        because "its guard does not hold";
    a_live_lease_that_is_swept_is_caught:
        SweepsLiveLeases breaks i3_sweep_leaves_live_leases
        because "a record with a live lease is never touched";
    an_unknown_outcome_that_is_swept_away_is_caught:
        RemovesLapsedRecords
        breaks i11_sweep_marks_lapsed_records_unknown_before_removal
        because "becomes unknown, and is not removed";
    a_sweep_beyond_its_limit_is_caught:
        SweepsMoreThanItsLimit
        breaks sweep_keeps_to_its_limit
        because "looks at no more than the limit";
    scopes_that_run_into_keys_are_caught:
        JoinsScopeAndKey breaks i9_similar_names_name_different_records
        because "a name without a record is acquired";
    keys_without_case_are_caught:
        FoldsCase breaks i9_similar_names_name_different_records
        because "a name without a record is acquired";
    a_list_that_begins_again_is_caught:
        ListsFromTheStartAgain breaks list_has_each_record_once_in_one_order
        because "each record is on one page";
    a_list_that_ends_too_early_is_caught:
        EndsAtAShortPage breaks list_has_each_record_once_in_one_order
        because "have all that";
    a_list_of_every_scope_is_caught:
        ListsEveryScope breaks list_of_a_scope_has_its_records_only
        because "a scope's records and no others";
    a_list_without_refused_claims_is_caught:
        ListsNoRefusedClaim breaks list_has_records_claimed_again_by_a_refused_claim
        because "has each record that was claimed again";
    a_count_that_is_too_small_is_caught:
        CountsToItsLimit breaks count_is_exact_below_its_limit
        because "up to 4";
    a_list_without_an_order_is_caught:
        ListsByTheLimit breaks list_has_each_record_once_in_one_order
        because "does not depend on the limit";
    a_lease_that_ends_a_moment_early_is_caught:
        LapsesAtTheMomentItself
        breaks i3_lease_is_live_at_its_last_moment
        because "has not lapsed at the moment itself";
    a_completion_in_two_steps_is_caught:
        CompletesInTwoSteps breaks i15_dropped_complete_happens_or_does_not
        because "happens or does not";
    an_owner_that_completes_anothers_claim_is_caught:
        ComparesTheTokenAMomentBefore breaks late_completion_or_one_takeover_wins
        because "by a lapsed owner and takeovers one wins";
    a_sweep_that_does_not_look_again_is_caught:
        RemovesWhatHadExpiredAMomentBefore
        breaks i1_sweep_leaves_a_reclaimed_record
        because "a record that was claimed again has a live lease and stays";
    a_store_that_a_dropped_call_wedges_is_caught:
        IsWedgedByADroppedCall breaks i15_dropped_complete_happens_or_does_not
        because "a store that can be reached answers";
}

#[tokio::test(start_paused = true)]
async fn a_released_record_that_is_removed_is_caught() {
    // Nearly every check begins with a release, so that this defect fails more
    // checks than its own.
    let broken = broken_by(Defect::RemovesWhatIsReleased).await;
    let named = "released_record_keeps_its_claim_and_retention";
    assert!(broken.iter().any(|(name, _)| *name == named));
}

#[tokio::test(start_paused = true)]
async fn a_store_without_a_defect_breaks_no_promise() {
    assert_eq!(broken_by(Defect::Nothing).await, []);
}
