//! The promises of a store by name, and a test of each.

/// Makes one test of each promise of a store.
///
/// Takes the [`Subject`](crate::conformance::Subject), as an expression that each test
/// evaluates and that may await. Attributes before it are those of the tests, and default
/// to `#[tokio::test]`. Put a second subject in the same file into its own module.
///
/// ```
/// # use tower_idempotency::{MemoryStore, conformance::Subject, conformance_tests};
/// # struct Memory;
/// # impl Subject for Memory {
/// #     type Store = MemoryStore;
/// #     async fn store(&self) -> MemoryStore { MemoryStore::new() }
/// # }
/// conformance_tests! {
///     #[tokio::test(flavor = "multi_thread", worker_threads = 4)]
///     Memory
/// }
/// ```
#[macro_export]
macro_rules! conformance_tests {
    (@each $attributes:tt $subject:tt $($promise:ident)*) => {
        $($crate::conformance_tests! { @test $attributes $subject $promise })*
    };
    (@test [$($attribute:tt)*] [$subject:expr] $promise:ident) => {
        $($attribute)*
        async fn $promise() {
            let trial = $crate::conformance::Trial::begin($subject).await;
            trial.$promise().await;
            trial.end().await;
        }
    };
    ($(#[$attribute:meta])+ $subject:expr) => {
        $crate::for_each_promise! {
            [$crate::conformance_tests] [@each [$(#[$attribute])+] [$subject]]
        }
    };
    ($subject:expr) => {
        $crate::conformance_tests! { #[tokio::test] $subject }
    };
}

/// Passes the name of every promise to a macro.
#[doc(hidden)]
#[macro_export]
macro_rules! for_each_promise {
    ([$($callback:tt)*] [$($before:tt)*]) => {
        $($callback)* ! {
            $($before)*
            claim_acquires_a_name_without_a_record
            claim_of_an_occupied_name_shows_its_record
            read_shows_each_state_expired_or_not
            every_call_without_a_record_is_superseded
            one_of_many_simultaneous_claims_is_acquired
            i1_repeated_claim_shows_its_own_record
            i1_repeated_reclaim_returns_its_grant
            i2_fences_grow_over_release_expiry_sweep_and_forget
            i2_fences_grow_while_claims_and_forgets_race
            abandoned_claim_lapses_and_stays_in_progress
            forget_frees_a_record_in_any_state
            ids_tokens_and_fingerprints_are_kept_whole
            i3_takeover_needs_a_lapsed_lease
            rerun_needs_an_unknown_record
            reconcile_needs_an_unknown_record
            retry_needs_a_released_record
            replace_needs_a_record_free_for_any_request
            expired_needs_an_expired_record_without_a_live_lease
            one_of_many_simultaneous_takeovers_is_granted
            one_of_many_simultaneous_reruns_is_granted
            one_of_many_simultaneous_reconciliations_is_granted
            one_of_many_simultaneous_retries_is_granted
            one_of_many_simultaneous_replacements_is_granted
            one_of_many_claims_of_an_expired_record_is_granted
            takeovers_are_counted_and_a_retry_keeps_one
            i6_release_after_a_takeover_is_for_the_same_request
            reclaim_sets_lease_retention_and_age_anew
            superseded_owner_changes_nothing
            late_completion_or_one_takeover_wins
            late_renewal_or_one_takeover_wins
            simultaneous_calls_get_their_own_answers
            simultaneous_claims_get_their_own_grants_or_records
            renew_needs_the_token_of_a_claim_in_progress
            complete_needs_the_token_of_the_last_claim
            release_for_the_same_request_needs_the_owners_token
            release_for_any_request_needs_the_owners_token
            repeated_complete_is_applied_and_changes_nothing
            repeated_release_is_applied_and_changes_nothing
            repeated_mark_unknown_is_applied_and_changes_nothing
            i4_completed_record_changes_only_after_its_expiry
            response_is_kept_byte_for_byte
            simultaneous_readers_get_their_own_responses_of_any_size
            i11_late_completion_of_an_unknown_record_is_kept
            simultaneous_completions_keep_one_response
            released_record_keeps_its_claim_and_retention
            owner_marks_its_claim_unknown_at_any_time
            i3_mark_unknown_without_a_token_needs_a_lapsed_lease
            resolve_as_happened_needs_a_lapsed_or_unknown_record
            resolve_as_not_happened_needs_a_lapsed_or_unknown_record
            resolved_record_is_replayed_or_retried
            resolved_record_is_kept_at_least_as_long_as_asked
            resolve_does_not_shorten_the_retention
            i11_unknown_record_is_kept_from_its_marking
            late_completion_sets_the_retention_of_a_completion
            renew_extends_the_lease_from_now_even_if_lapsed
            retention_of_a_completion_counts_from_the_claim
            at_least_counts_from_the_completion
            at_least_does_not_shorten_the_retention
            retention_of_a_century_is_kept
            zero_lease_and_retention_end_at_once
            i3_lease_is_live_at_its_last_moment
            i4_record_is_live_at_its_last_moment
            released_record_is_retried_at_its_last_moment
            filter_leaves_out_a_claim_of_exactly_its_age
            sweep_removes_expired_records_only
            i3_sweep_leaves_live_leases
            i11_sweep_marks_lapsed_records_unknown_before_removal
            sweep_keeps_to_its_limit
            simultaneous_sweeps_count_each_record_once
            i1_sweep_leaves_a_reclaimed_record
            list_has_the_records_of_its_filter_only
            list_has_each_record_once_in_one_order
            list_of_a_scope_has_its_records_only
            list_has_records_claimed_again_by_a_refused_claim
            count_is_exact_below_its_limit
            page_begins_after_a_removed_record
            page_keeps_to_its_limit
            i9_calls_in_one_scope_leave_the_others
            i9_similar_names_name_different_records
            unusual_names_are_kept_as_given
            usage_is_added_up_over_all_processes
            usage_ends_with_its_period
            i15_dropped_claim_happens_or_does_not
            i15_dropped_reclaim_happens_or_does_not
            i15_dropped_renew_happens_or_does_not
            i15_dropped_complete_happens_or_does_not
            i15_dropped_release_happens_or_does_not
            i15_dropped_mark_unknown_happens_or_does_not
            i15_dropped_resolve_happens_or_does_not
            i15_dropped_forget_happens_or_does_not
            i15_dropped_sweep_happens_or_does_not
            i15_dropped_read_or_list_changes_nothing
        }
    };
}
