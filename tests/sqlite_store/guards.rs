//! The guards of the transitions, as the memory store has them.

use tower_idempotency::{
    Fence,
    sqlx::{Connection as _, query_scalar},
};

use crate::{
    File,
    any_store::{guards, reference::Compared},
    with_store,
};

#[tokio::test(flavor = "multi_thread")]
async fn of_64_simultaneous_claims_exactly_one_is_acquired() {
    with_store(async |store| guards::one_of_64_claims_is_acquired(&store).await).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn each_transition_checks_its_own_guard() {
    with_store(async |store| guards::each_transition_checks_its_own_guard(&store).await).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_call_repeated_with_its_token_returns_the_lost_answer() {
    with_store(async |store| guards::a_repeated_call_returns_the_lost_answer(&store).await).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_dropped_outcome_is_still_written() {
    with_store(async |store| guards::a_dropped_outcome_is_still_written(&store).await).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_sweep_obeys_its_limit_and_spares_leased_records() {
    with_store(async |store| {
        guards::a_sweep_obeys_its_limit_and_spares_leased_records(&store).await;
    })
    .await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_sweep_never_deletes_a_record_that_was_claimed_again() {
    let file = File::new();
    let (store, sweeping) = (file.open().await, file.open().await);
    guards::a_sweep_never_deletes_a_record_claimed_again(&store, &sweeping).await;
    store.close().await;
    sweeping.close().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_call_may_be_dropped_at_any_time() {
    let file = File::new();
    let store = file.open().await;
    guards::a_call_may_be_dropped_at_any_time(&store, 100).await;
    store.close().await;
    let mut connection = file.connect().await;
    let completed: i64 = query_scalar("SELECT count(*) FROM idempotency_records WHERE state = 2")
        .fetch_one(&mut connection)
        .await
        .unwrap();
    assert_eq!(completed, 100);
    connection.close().await.unwrap();
}

#[tokio::test(flavor = "multi_thread")]
async fn every_transition_does_as_the_transition_function() {
    with_store(async |store| Compared::new(&store).every_transition().await).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn random_calls_answer_as_the_transition_function() {
    with_store(async |store| Compared::new(&store).random_walk(2, 300).await).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn fences_grow_over_sweeping_forgetting_and_reopening() {
    let file = File::new();
    let mut last = Fence::from(0);
    for _ in 0..6 {
        let store = file.open().await;
        last = guards::fences_grow_over_sweeping_and_forgetting(&store, last).await;
        store.close().await;
    }
}
