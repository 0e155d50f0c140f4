//! The protocol of one record, explored in every order of events.
//!
//! A few requests, each on its own host, share one record. These steps happen in
//! any order:
//!
//! - A request reads, claims, takes over, renews, has its effect, completes,
//!   releases, or marks its outcome unknown.
//! - A host crashes. A call loses its answer, or arrives late.
//! - Time passes, a sweep runs, an operator resolves an unknown outcome.
//!
//! A slow host is one that takes no step for a while, so that owners which come
//! back after their lease are explored too.
//!
//! The transitions are those of the crate: the requests share a
//! [`StoredRecord`](tower_idempotency::store::transition::StoredRecord). The
//! decisions of the layer are modelled here.
//!
//! A handler with *outside* effects has its effect in the middle of its run. A
//! handler with *committed* effects has it in the transaction that completes the
//! record. The state carries the history that the invariants need
//! ([`Ghost`](world::Ghost)), and [`Broken`] names the invariants.
//!
//! # Assumptions
//!
//! - No call arrives after its record has expired or was removed.
//! - A request that repeats a claim learns of its grant before that claim lapses
//!   and is ended by another request.
//! - An operator resolves an outcome as "did not happen" only if its owner is gone.
//!
//! # Bugs
//!
//! The same is explored with one guard broken at a time ([`Bug`]). Each bug must
//! break an invariant; otherwise the model could not find such a fault in the real
//! transitions either.
//!
//! # Longer
//!
//! `ACTORS=4 FAULTS=3 TICKS=4 CLAIMS=4 cargo test --release -p model` explores more
//! requests, faults (crashes, lost answers, late calls), time and claims. It may
//! take hours.

mod calls;
mod protocol;
mod steps;
mod world;

use protocol::{Broken, Bug, Effects, Protocol, Recovery};

#[test]
fn i1_to_i11_hold_for_outside_effects_under_refuse() {
    Protocol::new(Recovery::Refuse, Effects::Outside).holds();
}

#[test]
fn i1_to_i11_hold_for_committed_effects_with_more_faults() {
    let two = Protocol {
        actors: 2,
        faults: 2,
        ..Protocol::new(Recovery::Refuse, Effects::Committed)
    };
    two.holds();
}

#[test]
fn i1_to_i11_hold_for_committed_effects_under_rerun() {
    Protocol::new(Recovery::Rerun, Effects::Committed).holds();
}

/// The reason for [`Recovery::Refuse`]: a rerun repeats the effect of a handler
/// that charges and then crashes.
#[test]
fn i6_fails_for_outside_effects_under_rerun() {
    Protocol::new(Recovery::Rerun, Effects::Outside).finds(Broken::I6);
}

#[test]
fn a_take_over_of_a_live_lease_is_noticed() {
    Protocol::new(Recovery::Rerun, Effects::Committed)
        .with(Bug::TakesOverLive)
        .finds(Broken::I3);
}

#[test]
fn a_reclaim_that_does_not_compare_fences_is_noticed() {
    Protocol::new(Recovery::Rerun, Effects::Committed)
        .with(Bug::ReclaimsAnyFence)
        .finds(Broken::I8);
}

#[test]
fn a_reclaim_that_keeps_the_old_token_is_noticed() {
    Protocol::new(Recovery::Rerun, Effects::Committed)
        .with(Bug::KeepsTheToken)
        .finds(Broken::I1);
}

#[test]
fn a_completion_without_the_token_is_noticed() {
    Protocol::new(Recovery::Rerun, Effects::Committed)
        .with(Bug::CompletesForAnyToken)
        .finds(Broken::I5);
}

#[test]
fn a_completion_over_a_completed_record_is_noticed() {
    Protocol::new(Recovery::Refuse, Effects::Outside)
        .with(Bug::CompletesAgain)
        .finds(Broken::I4);
}

#[test]
fn a_release_without_the_token_is_noticed() {
    Protocol::new(Recovery::Rerun, Effects::Committed)
        .with(Bug::ReleasesForAnyToken)
        .finds(Broken::I1);
}

#[test]
fn a_renewal_by_a_superseded_owner_is_noticed() {
    Protocol::new(Recovery::Rerun, Effects::Committed)
        .with(Bug::RenewsForAnyToken)
        .finds(Broken::I1);
}

#[test]
fn a_live_lease_that_is_marked_unknown_is_noticed() {
    Protocol::new(Recovery::Refuse, Effects::Outside)
        .with(Bug::MarksLive)
        .finds(Broken::I3);
}

#[test]
fn fences_that_start_again_after_a_sweep_are_noticed() {
    Protocol::new(Recovery::Refuse, Effects::Outside)
        .with(Bug::FencesStartAgain)
        .finds(Broken::I2);
}

#[test]
fn a_sweep_of_a_leased_record_is_noticed() {
    Protocol::new(Recovery::Refuse, Effects::Outside)
        .with(Bug::SweepsLeased)
        .finds(Broken::I3);
}

#[test]
fn a_sweep_that_removes_a_lapsed_record_unseen_is_noticed() {
    Protocol::new(Recovery::Refuse, Effects::Outside)
        .with(Bug::SweepsLapsed)
        .finds(Broken::I11);
}

#[test]
fn an_unknown_outcome_that_is_released_is_noticed() {
    Protocol::new(Recovery::Refuse, Effects::Outside)
        .with(Bug::ReleasesUnknown)
        .finds(Broken::I11);
}
