//! The project's list of faults, from F1 to F112, with the tests of the right
//! behaviour in each, or the reason for none.
//!
//! The name of a test is that of its function, which may be one test for each
//! store, or a fuzz target.

use std::{
    collections::BTreeSet,
    fs,
    path::{Path, PathBuf},
};

/// A fault, by its number.
struct Fault(usize, &'static str, Held);

enum Held {
    /// Tested under these names.
    By(&'static [&'static str]),
    /// Not tested, for this reason.
    ByNone(&'static str),
}

use Held::{By, ByNone};

/// Faults of the client.
const CLIENT: &[Fault] = &[
    Fault(
        1,
        "the client is gone before its upload has ended",
        By(&[
            "f1_f42_an_upload_dropped_at_any_poll_leaves_nothing_behind",
            "rule_47_a_client_that_leaves_during_its_upload_leaves_nothing_behind",
        ]),
    ),
    Fault(
        2,
        "the client is gone between the claim and the handler",
        By(&[
            "f42_i15_a_request_dropped_at_any_poll_runs_once",
            "f02_f42_a_dropped_request_runs_once_and_its_retry_succeeds",
        ]),
    ),
    Fault(
        3,
        "the client is gone while the handler runs, noticed or not",
        By(&[
            "rule_46_the_client_closes_the_connection_and_the_handler_finishes",
            "rule_46_the_client_resets_the_stream_and_the_handler_finishes",
            "f03_a_client_that_pipelines_and_leaves_finds_its_answer",
            "disconnect_cancel_stops_the_handler_of_a_client_that_leaves",
        ]),
    ),
    Fault(
        4,
        "the client is gone in the middle of its answer",
        By(&[
            "f42_f4_a_stream_dropped_at_any_poll_never_runs_again",
            "f04_a_retry_gets_the_whole_answer_after_a_broken_download",
            "a_response_is_recorded_before_its_client_is_answered",
            "rule_69_a_broken_or_abandoned_stream_leaves_an_unknown_outcome",
        ]),
    ),
    Fault(
        5,
        "the client closes its sending half and listens on",
        By(&["rule_46_the_client_closes_its_half_and_the_handler_finishes"]),
    ),
    Fault(
        6,
        "the retry reaches another host than the first try",
        By(&[
            "rule_60_two_processes_keep_each_others_claims_and_records",
            "rule_60_processes_run_one_request_once",
        ]),
    ),
    Fault(
        7,
        "the retry comes after the record's time",
        By(&[
            "rule_72_after_the_retention_the_key_runs_again_without_a_sweep",
            "rule_72_the_retention_of_a_record_starts_at_its_claim",
            "expired_needs_an_expired_record_without_a_live_lease",
        ]),
    ),
    Fault(
        8,
        "a body trickles in",
        By(&[
            "f08_a_dripping_body_is_refused_and_claims_nothing",
            "f08_an_upload_below_the_floor_is_408",
            "f08_an_upload_that_stops_is_408_after_the_timeout",
            "rule_47_a_slow_upload_is_refused_before_any_claim",
        ]),
    ),
    Fault(
        9,
        "a body is enormous",
        By(&[
            "rule_61_a_body_over_the_limit_is_refused_without_claim",
            "rule_61_a_client_that_writes_before_it_reads_sees_the_refusal",
            "rule_61_discarding_is_bounded_in_bytes_time_and_number",
            "rule_61_the_limit_covers_every_framing_of_keyed_requests",
            "no_more_bytes_are_held_for_waiting_requests_than_allowed",
        ]),
    ),
    Fault(
        10,
        "reading the body fails half-way",
        By(&["rule_47_a_body_that_breaks_off_is_refused_before_any_claim"]),
    ),
    Fault(
        11,
        "the same bytes come in another framing or version of HTTP",
        By(&["rule_36_neither_the_framing_nor_the_borders_of_chunks_matter"]),
    ),
    Fault(
        12,
        "the retry's body is compressed to other bytes",
        By(&["f12_a_recompressed_body_matches_where_an_outer_layer_unpacks_it"]),
    ),
    Fault(
        13,
        "JSON comes back in another order or layout",
        By(&[
            "rule_24_reordered_members_mismatch_by_bytes_and_replay_by_structure",
            "rule_25_by_structure_numbers_keep_their_spelling_and_duplicates_are_refused",
        ]),
    ),
    Fault(
        14,
        "the client waits to be told to continue",
        By(&["rule_18_a_refusal_comes_before_100_continue"]),
    ),
    Fault(
        15,
        "a safe request carries a key",
        By(&[
            "rule_17_other_methods_pass_unbuffered_even_with_a_malformed_key",
            "a_function_decides_which_unsafe_requests_are_guarded",
        ]),
    ),
    Fault(
        16,
        "a request has trailers",
        By(&[
            "f16_request_trailers_reach_the_handler_and_do_not_count",
            "rule_16_a_key_in_trailers_is_absent",
        ]),
    ),
    Fault(
        17,
        "the key's header comes twice",
        By(&[
            "rule_05_two_lines_are_refused_equal_or_not",
            "rule_06_one_line_with_two_members_is_refused",
        ]),
    ),
    Fault(
        18,
        "the key is empty, or has bytes that are no text",
        By(&[
            "rule_04_an_empty_key_is_never_an_absent_one",
            "rule_08_bytes_outside_visible_ascii_are_refused_without_a_panic",
            "key",
        ]),
    ),
    Fault(
        19,
        "the key is as long as the server lets it be",
        By(&["rule_10_a_key_of_64_kib_is_refused_before_any_work"]),
    ),
    Fault(
        20,
        "an answer has no end: upgrades, tunnels, event streams",
        By(&[
            "f20_web_sockets_and_tunnels_pass_with_their_upgrade_extension",
            "rule_69_an_upgrade_is_not_recorded",
            "rule_69_event_streams_and_streamed_types_are_sent_at_once",
            "rule_69_a_slow_response_is_streamed_after_its_timeout",
        ]),
    ),
    Fault(
        21,
        "an answer is larger than what is kept",
        By(&[
            "rule_69_an_oversized_response_is_streamed_and_leaves_a_tombstone",
            "rule_69_a_large_response_reaches_the_client_whole_over_every_version",
            "i13_a_response_not_kept_rolls_back_and_a_retry_runs",
        ]),
    ),
    Fault(
        22,
        "an answer's body breaks off",
        By(&[
            "rule_55_a_body_that_breaks_is_never_replayed_short",
            "rule_69_a_broken_or_abandoned_stream_leaves_an_unknown_outcome",
            "i13_a_response_not_kept_rolls_back_and_a_retry_runs",
        ]),
    ),
    Fault(
        23,
        "an answer has headers of one hop, a date, or trailers",
        By(&[
            "rule_62_no_setting_replays_a_hop_by_hop_header",
            "rule_64_a_replay_has_one_date_of_now_and_no_age",
            "rule_68_trailers_are_replayed_as_trailers",
            "rule_71_a_record_replays_over_another_version_of_http",
        ]),
    ),
    Fault(
        24,
        "answers are compressed outside or inside of the layer",
        By(&[
            "rule_71_outer_layers_add_their_headers_to_a_replay_exactly_once",
            "f24_an_inner_compression_is_recorded_with_its_encoding",
        ]),
    ),
    Fault(
        25,
        "a header has several lines, or commas in one",
        By(&[
            "f25_any_header_lines_replay_unchanged",
            "rule_66_lines_of_one_header_keep_their_order_and_their_bytes",
        ]),
    ),
];

/// Faults of the handler.
const HANDLER: &[Fault] = &[
    Fault(
        26,
        "the handler panics",
        By(&[
            "rule_49_a_panic_is_500_and_its_outcome_unknown",
            "a_panic_before_commit_leaves_an_unknown_outcome",
        ]),
    ),
    Fault(
        27,
        "the handler answers that the server failed",
        By(&[
            "rule_50_a_released_key_runs_again_for_the_same_request_alone",
            "rule_50_timeouts_and_gateway_errors_leave_an_unknown_outcome",
            "presets_and_predicates_say_which_responses_are_recorded",
            "a_dropped_transaction_is_rolled_back_and_a_retry_runs",
        ]),
    ),
    Fault(
        28,
        "the handler refuses, before or after effects",
        By(&[
            "rule_51_refusals_of_the_handler_are_recorded",
            "rule_52_released_redirects_and_4xx_free_the_key",
            "rule_53_the_handlers_disposition_beats_the_table_and_is_removed",
        ]),
    ),
    Fault(
        29,
        "the handler outlives its lease",
        By(&[
            "rule_57_heartbeats_keep_a_lease_that_the_handler_outlives",
            "lease_lost_resolves_when_the_lease_may_be_lost",
            "rule_57_a_fenced_owner_changes_nothing_and_answers_as_the_winner",
        ]),
    ),
    Fault(
        30,
        "the handler blocks its thread",
        By(&[
            "f30_another_thread_renews_the_lease_of_a_blocking_handler",
            "f30_a_handler_that_blocks_the_only_thread_answers_as_winner",
        ]),
    ),
    Fault(
        31,
        "the handler hangs",
        By(&["rule_57_a_hanging_handler_loses_its_lease_after_max_run_time"]),
    ),
    Fault(
        32,
        "a request brings every process down that takes it",
        By(&[
            "f32_f40_a_request_that_kills_each_process_ends_as_unknown",
            "rule_56_rerun_ends_after_the_attempts_that_were_set",
            "f32_a_request_that_always_fails_stops_running",
        ]),
    ),
    Fault(
        33,
        "the handler overlooks an error of its transaction",
        By(&[
            "f33_an_error_swallowed_in_the_transaction_records_nothing",
            "f33_a_statement_by_which_sqlite_rolls_all_back_records_nothing",
        ]),
    ),
    Fault(
        34,
        "the record is completed in a savepoint that is undone",
        By(&[
            "f34_a_savepoint_that_is_rolled_back_does_no_harm",
            "f34_a_transaction_that_the_handler_ended_itself_records_nothing",
        ]),
    ),
    Fault(
        35,
        "the handler writes elsewhere than in its transaction",
        By(&[
            "f35_a_transaction_on_another_postgres_database_is_refused",
            "f35_a_transaction_on_another_sqlite_file_is_refused",
            "i11_success_after_a_failed_commit_with_effects_is_unknown",
        ]),
    ),
    Fault(
        36,
        "duplicates use up the connections that the handler needs",
        By(&["f36_duplicates_take_no_connection_from_the_handler"]),
    ),
    Fault(
        37,
        "two of the layers guard one request",
        By(&["a_second_layer_on_the_same_request_passes"]),
    ),
];

/// Faults of the process and its runtime.
const PROCESS: &[Fault] = &[
    Fault(
        38,
        "the process is killed, at any step",
        By(&[
            "chaos_on_postgres",
            "chaos_on_sqlite",
            "a_crash_before_the_commit",
            "a_crash_after_the_commit",
            "rule_56_a_killed_process_leaves_an_unknown_outcome",
            "rule_56_a_killed_process_is_followed_by_exactly_one_rerun",
            "acknowledged_records_survive_a_killed_process",
        ]),
    ),
    Fault(
        39,
        "the process is asked to stop while requests run",
        By(&[
            "rule_74_a_stopped_process_finishes_what_it_began",
            "rule_74_a_run_finishes_and_is_recorded_within_the_drain",
            "rule_74_a_run_that_outlasts_the_drain_keeps_its_lease",
        ]),
    ),
    Fault(
        40,
        "the runtime ends under a detached task",
        By(&[
            "rule_74_a_run_that_outlasts_the_drain_keeps_its_lease",
            "f32_f40_a_request_that_kills_each_process_ends_as_unknown",
        ]),
    ),
    Fault(
        41,
        "the process stands still for longer than its lease",
        By(&[
            "chaos_on_postgres",
            "f41_a_process_asleep_past_its_lease_replays_the_winner",
            "i7_a_fenced_owner_rolls_back_and_answers_as_the_winner",
        ]),
    ),
    Fault(
        42,
        "the future of a response is dropped at any await",
        By(&[
            "f42_i15_a_request_dropped_at_any_poll_runs_once",
            "f42_i13_a_waiter_dropped_at_any_poll_returns_its_permit",
            "f42_i4_a_replay_dropped_at_any_poll_changes_nothing",
            "f42_i2_a_takeover_dropped_at_any_poll_runs_once",
            "f02_f42_a_dropped_request_runs_once_and_its_retry_succeeds",
            "rule_45_a_waiter_that_leaves_frees_its_permit",
            "i15_an_order_whose_client_leaves_matches_its_record",
        ]),
    ),
    Fault(
        43,
        "heartbeats go on without their owner",
        By(&["f43_heartbeats_stop_however_their_owner_ends"]),
    ),
    Fault(
        44,
        "a task ends between its last statement and COMMIT",
        By(&[
            "f44_a_savepoint_dropped_while_beginning_rolls_everything_back",
            "i15_an_order_dropped_at_any_await_matches_its_record",
            "i15_an_order_whose_client_leaves_matches_its_record",
        ]),
    ),
];

/// Faults around the contract of a Tower service.
const TOWER: &[Fault] = &[
    Fault(
        45,
        "a clone is called that never was ready",
        By(&[
            "one_service_calls_the_inner_one_that_it_made_ready",
            "rule_45_waiters_do_not_hold_the_readiness_that_the_owner_needs",
        ]),
    ),
    Fault(
        46,
        "the inner service fails to become ready",
        By(&[
            "f46_an_inner_service_that_fails_before_the_call_claims_nothing",
            "an_inner_service_failing_after_the_wait_frees_the_key",
        ]),
    ),
    Fault(
        47,
        "waiters keep the readiness that others need",
        By(&["rule_45_waiters_do_not_hold_the_readiness_that_the_owner_needs"]),
    ),
    Fault(
        48,
        "a timeout outside of the layer drops the request",
        By(&["rule_48_an_outer_timeout_leaves_the_real_result_recorded"]),
    ),
    Fault(
        49,
        "each request gets a clone, and bounds are not shared",
        By(&[
            "f49_clones_of_a_router_share_max_waiters",
            "max_in_flight_counts_runs_whose_clients_have_left",
        ]),
    ),
    Fault(
        50,
        "an error of the store ends the connection",
        By(&[
            "rule_58_while_the_store_cannot_be_reached_nothing_runs",
            "rule_54_an_inner_error_passes_and_its_outcome_is_unknown",
        ]),
    ),
];

/// Faults of a store.
const STORE: &[Fault] = &[
    Fault(
        51,
        "the store is down when the key is claimed",
        By(&[
            "rule_58_while_the_store_cannot_be_reached_nothing_runs",
            "rule_58_a_route_may_run_unguarded_with_a_marker",
        ]),
    ),
    Fault(
        52,
        "the store is down when the response is recorded",
        By(&[
            "rule_59_an_unrecorded_response_is_sent_and_recorded_late",
            "rule_59_a_response_never_recorded_never_runs_again",
        ]),
    ),
    Fault(
        53,
        "the store is down for heartbeats and releases",
        By(&[
            "lease_lost_resolves_when_the_lease_may_be_lost",
            "rule_59_a_failed_release_or_unknown_mark_is_written_late",
        ]),
    ),
    Fault(
        54,
        "the store is slow",
        By(&[
            "f54_i15_any_store_call_of_a_request_may_be_dropped",
            "f54_i15_any_store_call_of_a_takeover_may_be_dropped",
            "rule_58_while_the_store_cannot_be_reached_nothing_runs",
            "a_dropped_outcome_is_still_written",
            "a_silent_server_holds_no_connection_past_a_timeout",
            "a_role_s_careless_defaults_do_not_reach_the_store",
        ]),
    ),
    Fault(
        55,
        "no connection is free",
        By(&[
            "f55_a_pool_without_a_free_connection_gives_503_until_freed",
            "a_locked_record_times_out_and_the_store_stays_usable",
        ]),
    ),
    Fault(
        56,
        "a claim is made and its answer gets lost",
        By(&[
            "rule_58_a_request_recovers_its_claim_after_a_lost_answer",
            "i1_repeated_claim_shows_its_own_record",
        ]),
    ),
];

/// Faults of PostgreSQL.
const POSTGRES: &[Fault] = &[
    Fault(
        57,
        "an insert waits for a transaction that may have claimed",
        By(&[
            "f57_a_claim_blocked_by_another_transaction_times_out",
            "a_duplicate_does_not_wait_for_a_completion_under_way",
        ]),
    ),
    Fault(
        58,
        "the loser of a race cannot see the winner's row yet",
        By(&[
            "of_64_simultaneous_claims_exactly_one_is_acquired",
            "one_of_many_simultaneous_claims_is_acquired",
        ]),
    ),
    Fault(
        59,
        "the row in the way is swept before it is read",
        By(&[
            "f59_a_claim_retries_when_its_record_vanishes",
            "i2_fences_grow_while_claims_and_forgets_race",
        ]),
    ),
    Fault(
        60,
        "the role's isolation is a stricter one",
        By(&[
            "a_role_s_careless_defaults_do_not_reach_the_store",
            "f60_a_transaction_of_another_isolation_is_refused_by_its_name",
        ]),
    ),
    Fault(
        61,
        "the role does not wait for the disk",
        By(&[
            "a_role_s_careless_defaults_do_not_reach_the_store",
            "f61_a_table_that_a_crash_would_empty_is_refused",
            "f61_a_commit_is_durable_under_any_pool_default",
        ]),
    ),
    Fault(
        62,
        "the answer to COMMIT gets lost",
        By(&[
            "f62_a_connection_cut_before_commit_aborts_and_a_retry_orders",
            "f62_a_connection_cut_after_commit_counts_as_committed",
            "f62_a_late_commit_answer_is_resolved_from_the_record",
            "f62_a_commit_that_outlasts_its_deadline_is_waited_for",
            "i11_an_undecided_commit_is_unknown_until_it_arrives",
        ]),
    ),
    Fault(
        63,
        "COMMIT succeeds in rolling back",
        By(&[
            "f33_an_error_swallowed_in_the_transaction_records_nothing",
            "f63_success_after_a_failed_commit_becomes_500_and_reruns",
        ]),
    ),
    Fault(
        64,
        "a constraint fails as late as at COMMIT",
        By(&["f64_a_constraint_failing_at_commit_aborts_and_a_retry_runs"]),
    ),
    Fault(
        65,
        "waiting for the standby is given up",
        ByNone(
            "The server then calls the COMMIT a success, with no more than a warning, and only a \
         failover in that moment tells the difference: that takes a cluster of two servers.",
        ),
    ),
    Fault(
        66,
        "a standby takes over without the last claims",
        ByNone(
            "What the standby never received is gone for whoever asks it, and no client of it can \
         tell: the store's documentation says that such a retry runs again.",
        ),
    ),
    Fault(
        67,
        "the server is a standby, or refuses to write",
        By(&[
            "a_standby_is_refused_with_its_reason",
            "a_role_s_careless_defaults_do_not_reach_the_store",
        ]),
    ),
    Fault(
        68,
        "the server's patience ends: statements, locks, idleness",
        By(&[
            "a_locked_record_times_out_and_the_store_stays_usable",
            "a_locked_record_aborts_the_commit_in_time",
            "f68_a_transaction_ended_for_idleness_records_nothing",
            "f68_a_commit_past_its_timeout_is_unknown_until_it_ends",
        ]),
    ),
    Fault(
        69,
        "two calls lock rows in opposite orders",
        By(&[
            // A call locks one row; a sweep locks many, and waits for none.
            "simultaneous_sweeps_count_each_record_once",
            "a_sweep_never_deletes_a_record_that_was_claimed_again",
        ]),
    ),
    Fault(
        70,
        "a pooler changes the connection between transactions",
        By(&[
            "chaos_through_pgbouncer",
            // `tests/conformance_pgbouncer.rs` runs these checks behind that
            // pooler.
            "one_of_many_simultaneous_claims_is_acquired",
            "i2_fences_grow_over_release_expiry_sweep_and_forget",
        ]),
    ),
    Fault(
        71,
        "a heartbeat meets the handler's own transaction",
        By(&["f71_a_heartbeat_during_the_transaction_does_no_harm"]),
    ),
    Fault(
        72,
        "heartbeats and completions bloat an index",
        By(&["a_completion_touches_no_index"]),
    ),
    Fault(
        73,
        "a sweep removes what lives, or locks for long",
        By(&[
            "a_sweep_never_deletes_a_record_that_was_claimed_again",
            "a_sweep_obeys_its_limit_and_spares_leased_records",
            "i3_sweep_leaves_live_leases",
        ]),
    ),
    Fault(
        74,
        "the database cannot hold a key, or holds two for equal",
        By(&[
            "names_that_other_collations_merge_stay_apart",
            "unusual_names_are_kept_as_given",
            "rule_14_keys_are_byte_exact_and_case_sensitive",
        ]),
    ),
    Fault(
        75,
        "records of another version of the crate",
        By(&[
            "recorded_bytes_of_version_1_stay_readable",
            "rule_73_an_unreadable_record_answers_503_and_never_runs",
            "an_unreadable_row_is_an_error_and_never_absent",
            "rule_30_earlier_fingerprints_are_compared_and_unknown_ones_refused",
            "a_store_of_a_later_version_is_refused",
            "eight_processes_may_migrate_at_once",
        ]),
    ),
];

/// Faults of other stores.
const OTHER_STORES: &[Fault] = &[
    Fault(
        76,
        "Redis evicts a claim",
        ByNone("There is no store on Redis yet."),
    ),
    Fault(
        77,
        "Redis fails over, is a cluster, or busy",
        ByNone("There is no store on Redis yet."),
    ),
    Fault(
        78,
        "SQLite is locked, full, or does not wait for the disk",
        By(&[
            "f78_a_stale_sqlite_read_transaction_aborts_and_a_retry_runs",
            "f78_a_full_database_rolls_back_and_the_retry_orders",
            "a_full_database_is_reported_and_keeps_no_partial_record",
            "the_store_forces_wal_and_full_against_other_settings",
            "two_stores_on_one_file_race_for_each_key",
        ]),
    ),
    Fault(
        79,
        "the memory store has no more room",
        By(&[
            "a_full_store_refuses_new_keys_and_evicts_no_record",
            "a_full_store_leaves_a_response_unrecorded_without_a_rerun",
            "a_full_store_repeats_its_answers_and_refuses_new_responses",
        ]),
    ),
];

/// Faults of clocks.
const TIME: &[Fault] = &[
    Fault(
        80,
        "the clocks of the hosts differ",
        By(&["f80_no_decision_reads_the_clock_of_a_host"]),
    ),
    Fault(
        81,
        "the server's clock jumps",
        By(&[
            "f81_a_clock_jumping_forward_fences_the_owner",
            "f81_a_heartbeat_repairs_the_lease_after_a_clock_jumps_back",
            "i7_a_fenced_owner_rolls_back_and_answers_as_the_winner",
        ]),
    ),
    Fault(
        82,
        "durations are zero, too long, or at odds",
        By(&[
            "rule_77_durations_that_cannot_be_are_refused_by_name",
            "rule_77_durations_that_contradict_one_another_are_refused_by_name",
            "zero_lease_and_retention_end_at_once",
            "retention_of_a_century_is_kept",
        ]),
    ),
    Fault(
        83,
        "much of the lease is gone when the claim is granted",
        By(&["a_slow_claim_is_confirmed_before_the_handler_starts"]),
    ),
    Fault(
        84,
        "the retry comes at the very end of a lease or a retention",
        By(&[
            "i3_lease_is_live_at_its_last_moment",
            "i4_record_is_live_at_its_last_moment",
            "released_record_is_retried_at_its_last_moment",
            "rule_72_the_retention_of_a_record_starts_at_its_claim",
        ]),
    ),
];

/// Faults and attacks of other callers.
const SECURITY: &[Fault] = &[
    Fault(
        85,
        "a response is replayed to another tenant",
        By(&[
            "rule_32_another_caller_runs_separately_and_learns_nothing",
            "rule_34_without_a_scope_nothing_runs_and_nothing_is_replayed",
            "rule_34_a_single_tenant_is_a_scope_by_name",
            "i9_calls_in_one_scope_leave_the_others",
        ]),
    ),
    Fault(
        86,
        "a key comes back on another endpoint",
        By(&[
            "rule_26_another_path_or_method_is_a_mismatch",
            "rule_26_a_scope_with_the_endpoint_makes_them_two_operations",
            "rule_27_another_query_is_a_mismatch",
            "rule_28_equal_paths_under_two_prefixes_are_two_requests",
        ]),
    ),
    Fault(
        87,
        "two names become one when their parts are joined",
        By(&[
            "rule_33_scope_and_key_do_not_run_into_one_another",
            "rule_33_different_parts_make_different_names",
            "i9_similar_names_name_different_records",
        ]),
    ),
    Fault(
        88,
        "an answer tells whether a key of another caller exists",
        By(&[
            "rule_32_another_caller_runs_separately_and_learns_nothing",
            "rule_70_refusals_are_problem_details_without_stored_data",
        ]),
    ),
    Fault(
        89,
        "a caller has lost its rights since the first request",
        By(&[
            "rule_35_revoked_credentials_get_the_outer_layers_answer",
            "rule_35_only_its_own_user_receives_a_replay",
        ]),
    ),
    Fault(
        90,
        "an attacker uses a key before its owner does",
        By(&["rule_32_another_caller_runs_separately_and_learns_nothing"]),
    ),
    Fault(
        91,
        "two requests have one fingerprint",
        By(&[
            "rule_94_secrets_of_fingerprints_rotate_while_both_processes_serve",
            "without_its_secret_no_part_of_a_fingerprint_can_be_guessed",
            // No test can show that digests have no collisions.
            "rule_23_every_one_of_many_headers_is_compared",
        ]),
    ),
    Fault(
        92,
        "a key or a name holds SQL",
        By(&[
            "rule_15_keys_that_look_like_code_are_opaque_text",
            "unusual_names_are_kept_as_given",
            "two_stores_in_two_schemas_share_nothing",
        ]),
    ),
    Fault(
        93,
        "cookies, credentials or ids of one request are replayed",
        By(&[
            "rule_65_cookies_reach_the_first_client_and_never_the_store",
            "rule_62_no_setting_replays_a_hop_by_hop_header",
            "rule_62_stored_bytes_pass_the_rules_when_they_are_replayed",
            "rule_68_trailers_pass_the_rules_of_headers",
        ]),
    ),
    Fault(
        94,
        "stored responses hold secrets",
        By(&[
            "rule_88_the_store_receives_nothing_readable",
            "rule_88_rows_of_postgres_show_nothing_readable",
            "rule_89_a_sealed_response_opens_in_its_own_record_alone",
            "rule_90_a_response_of_an_unknown_key_is_refused_and_logged",
        ]),
    ),
    Fault(
        95,
        "a key reaches a log or a metric",
        By(&[
            "rule_75_each_outcome_is_logged_and_counted_once_without_secrets",
            "rule_75_debug_output_shows_no_secret",
            // Every other test in `tests/contract/logs` checks this too.
            "f110_each_kind_of_failing_store_is_logged",
            "f110_values_in_postgres_errors_are_never_shown",
            "f110_values_in_sqlite_errors_are_never_shown",
        ]),
    ),
    Fault(
        96,
        "a caller fills the store with fresh keys",
        By(&[
            "rule_76_scope_over_its_quota_gets_429_until_its_records_expire",
            "rule_76_processes_share_one_quota",
            "rule_76_bytes_count_with_their_responses",
        ]),
    ),
    Fault(
        97,
        "a herd of duplicates waits",
        By(&[
            "f97_a_herd_of_waiters_is_bounded_in_number_and_reads",
            "f49_clones_of_a_router_share_max_waiters",
            "i13_waiters_stay_within_their_limit_and_return_every_permit",
        ]),
    ),
    Fault(
        98,
        "stored bytes are made to break their decoder",
        By(&[
            "record",
            "every_damaged_byte_and_every_cut_is_noticed",
            "rule_73_an_unreadable_record_answers_503_and_never_runs",
        ]),
    ),
    Fault(
        99,
        "a client or a handler sends the marker of a replay",
        By(&[
            "f99_a_marker_that_the_client_sends_means_nothing",
            "the_layer_strips_its_own_headers_from_a_handlers_response",
        ]),
    ),
    Fault(
        100,
        "a shared cache keeps a replay or a refusal",
        By(&["f100_a_replay_keeps_the_cache_control_of_its_response"]),
    ),
];

/// Faults that were found later.
const LATER: &[Fault] = &[
    Fault(
        101,
        "a refused request keeps permits, body or response",
        By(&[
            "f101_a_refused_claim_frees_the_inner_service_and_the_body",
            "a_response_body_is_dropped_before_its_recording",
        ]),
    ),
    Fault(
        102,
        "a claim commits after its withdrawal has looked",
        By(&[
            "f102_a_claim_that_lands_late_is_withdrawn",
            "f102_a_claim_that_lands_after_a_long_outage_is_withdrawn",
            "f102_a_reclaim_that_lands_late_is_withdrawn",
            "f102_a_late_claim_marked_unknown_is_withdrawn",
            "f102_claims_behind_a_lost_standby_are_withdrawn",
            "i11_a_withdrawn_question_leaves_the_outcome_unknown",
        ]),
    ),
    Fault(
        103,
        "each try of a late outcome leaves another call in the queue",
        By(&[
            "f103_retried_outcome_joins_the_waiting_one",
            "f103_retried_outcome_joins_the_waiting_single_one",
            "f103_late_outcomes_yield_to_others_without_starving",
            "f103_late_outcomes_count_against_no_limit",
            "f103_outcome_that_becomes_late_goes_with_the_batch",
            "f103_an_outcome_tried_many_times_in_an_outage_waits_once",
        ]),
    ),
    Fault(
        104,
        "one scope's large replays delay another's claims",
        By(&[
            "f104_a_batch_leaves_large_responses_out",
            "f104_slow_large_replays_delay_no_other_scope",
            "f104_slow_large_outcomes_delay_no_heartbeat",
        ]),
    ),
    Fault(
        105,
        "a renewal hangs past the end of the lease, or a commit outlasts it",
        By(&[
            "f105_a_hanging_renewal_loses_the_lease_at_its_end",
            "f110_a_renewal_that_panics_loses_the_lease_in_time",
            "lease_lost_never_resolves_after_its_own_commit",
            "lost_never_resolves_while_the_commit_is_pending",
        ]),
    ),
    Fault(
        106,
        "strangers lock rows, and calls that wait use up all connections",
        By(&[
            "f106_locked_records_hold_no_permit",
            "f106_calls_with_one_locked_name_use_one_permit",
            "f106_a_call_resumes_once_the_lock_is_released",
            "f106_locked_records_of_strangers_delay_no_other_scope",
            "f106_a_lost_commit_is_found_while_strangers_lock_other_records",
        ]),
    ),
    Fault(
        107,
        "a body arrives while the process drains",
        By(&[
            "f107_a_body_that_ends_while_draining_is_refused",
            "f107_an_upload_over_a_socket_is_refused_while_draining",
        ]),
    ),
    Fault(
        108,
        "the memory store is full of expired records",
        By(&[
            "f108_expired_records_give_way_in_a_full_memory_store",
            "f108_expired_responses_give_way_in_a_full_memory_store",
            "f108_only_expired_records_give_way",
        ]),
    ),
    Fault(
        109,
        "a handler commits its transaction itself, or forgets to",
        By(&[
            // The example at `OperationTransaction` must not compile.
            "f109_success_after_a_dropped_transaction_is_denied_and_unknown",
            "f109_success_beside_an_open_transaction_is_never_recorded",
            "f109_rerun_after_a_panic_does_the_work_once",
            "f109_rerun_after_a_dropped_transaction_does_the_work_once",
            "f109_an_uncommitted_transaction_counts_as_one_notice",
        ]),
    ),
    Fault(
        110,
        "an error is answered with a 5xx, and its cause is in no log",
        By(&[
            // All tests of `tests/contract/logs`, among them:
            "f110_a_missing_table_is_logged_with_its_remedy",
            "f110_missing_privileges_are_logged_with_the_grants",
            "f110_a_dead_database_is_logged",
            "f110_an_unknown_caller_is_logged_with_its_remedy",
            "f110_a_thousand_refusals_are_a_handful_of_events",
            "f110_a_failed_statement_or_commit_is_logged_with_its_cause",
            "f110_a_sql_error_in_a_mounted_handler_is_logged",
            "f110_errors_name_the_cause_and_the_remedy",
            "f110_failed_attempt_to_connect_is_logged",
        ]),
    ),
    Fault(
        111,
        "a layer inside makes a 500 of a panic",
        By(&[
            "f111_a_panic_caught_outside_leaves_the_outcome_unknown",
            "f111_a_panic_caught_inside_frees_the_key",
        ]),
    ),
    Fault(
        112,
        "a neighbour's settings are left on a pooled connection",
        By(&[
            "f112_settings_left_behind_a_pooler_do_not_reach_the_store",
            "f112_commit_completes_under_a_search_path_of_the_handler",
            "f112_commit_completes_under_a_role_without_rights_on_the_records",
            "f112_completion_uses_no_operator_of_the_handler_s_schema",
        ]),
    ),
];

#[test]
fn each_fault_has_a_test_or_a_reason() {
    let parts = [
        CLIENT,
        HANDLER,
        PROCESS,
        TOWER,
        STORE,
        POSTGRES,
        OTHER_STORES,
        TIME,
        SECURITY,
        LATER,
    ];
    let faults: Vec<_> = parts.into_iter().flatten().collect();
    let numbers: Vec<_> = faults.iter().map(|fault| fault.0).collect();
    assert_eq!(numbers, (1..=112).collect::<Vec<_>>());

    let functions = functions();
    for Fault(number, what, held) in faults {
        match held {
            By(tests) => {
                assert!(!tests.is_empty(), "F{number}, {what}: held by nothing");
                for test in *tests {
                    assert!(functions.contains(*test), "F{number}, {what}: no {test}");
                }
            }
            ByNone(reason) => assert!(reason.ends_with('.'), "F{number}, {what}: why?"),
        }
    }
}

/// The clock of the store decides; on one host its monotonic clock does. So the
/// host's time of day may be off by years. What reads it documents it: the age of UUIDs of
/// version 7, the expiry of records in an engine without a clock, and a client's pause
/// until a date, if the response has no date of its own. `Store::now` of a store without a
/// server tells it to schedules, whose periods still run once.
#[test]
fn f80_no_decision_reads_the_clock_of_a_host() {
    let readers: BTreeSet<_> = sources("src")
        .into_iter()
        .filter(|path| {
            let source = fs::read_to_string(path).unwrap();
            ["SystemTime", "Utc::now", "OffsetDateTime"]
                .iter()
                .any(|clock| source.contains(clock))
        })
        .collect();
    // The clock of an SQLite store is that of its machine.
    let documented = [
        "src/client/retry.rs",
        "src/key/syntax.rs",
        "src/store/cas/backend.rs",
        "src/store/mod.rs",
        "src/store/sqlite/statements.rs",
    ];
    assert_eq!(readers, documented.map(|path| root().join(path)).into());
}

#[test]
fn each_rule_of_the_contract_is_held_by_a_test() {
    let contract = fs::read_to_string(root().join("docs/contract.md")).unwrap();
    let functions = functions();
    for rule in 1..=96 {
        let is_row = contract.contains(&format!("\n| {rule} |"));
        let is_reserved = contract.contains(&format!("**{rule} (D)** is reserved"));
        assert!(
            is_row || contract.contains(&format!("**{rule} (")),
            "rule {rule} is not in the contract"
        );
        let prefix = format!("rule_{rule:02}_");
        let is_tested = functions.iter().any(|name| name.starts_with(&prefix));
        assert_eq!(is_tested, !is_reserved, "rule {rule}");
    }
}

/// The tests of the threat model are the last column of its tables.
#[test]
fn each_defence_of_the_threat_model_has_a_test() {
    let model = fs::read_to_string(root().join("docs/threat-model.md")).unwrap();
    let functions = functions();
    let rows = model.lines().filter(|line| line.starts_with("| "));
    let defences: Vec<_> = rows.filter(|row| !row.starts_with("| it tries")).collect();
    assert!(defences.len() > 20, "{defences:#?}");
    for defence in defences {
        let tests = defence.trim_end_matches(" |").rsplit(" | ").next().unwrap();
        let tests: Vec<_> = tests.split('`').skip(1).step_by(2).collect();
        assert!(!tests.is_empty(), "no test: {defence}");
        for test in tests {
            assert!(functions.contains(test), "no {test}: {defence}");
        }
    }
}

/// Cargo discovers no tests in this package: a file without a target never runs.
#[test]
fn each_test_file_is_a_target_of_its_package() {
    let manifest = fs::read_to_string(root().join("tests/Cargo.toml")).unwrap();
    for entry in fs::read_dir(root().join("tests")).unwrap() {
        let path = entry.unwrap().path();
        let name = path.file_stem().unwrap().to_str().unwrap();
        let file = match path.extension() {
            Some(extension) if extension == "rs" => format!("{name}.rs"),
            _ if path.join("main.rs").exists() => format!("{name}/main.rs"),
            _ => continue,
        };
        let target = format!("name = \"{name}\"\npath = \"{file}\"\n");
        assert!(manifest.contains(&target), "no target: {file}");
    }
}

/// The names of all functions in the tests and in the crate.
fn functions() -> BTreeSet<String> {
    let mut names = BTreeSet::new();
    for path in sources("tests").into_iter().chain(sources("src")) {
        for after in fs::read_to_string(path).unwrap().split("fn ").skip(1) {
            let is_of_name = |c: char| c.is_ascii_alphanumeric() || c == '_';
            let end = after.find(|c| !is_of_name(c)).unwrap_or(after.len());
            names.insert(after[..end].to_owned());
        }
    }
    names
}

/// The Rust files in this folder and below.
fn sources(folder: impl AsRef<Path>) -> Vec<PathBuf> {
    let mut files = Vec::new();
    for entry in fs::read_dir(root().join(folder)).unwrap() {
        let path = entry.unwrap().path();
        if path.is_dir() {
            files.extend(sources(path));
        } else if path.extension().is_some_and(|extension| extension == "rs") {
            files.push(path);
        }
    }
    files
}

fn root() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR"))
        .parent()
        .unwrap()
        .to_owned()
}
