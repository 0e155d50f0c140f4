//! The guards of the transitions.

use crate::{
    any_store::{guards, reference::Compared},
    redis_servers::Keys,
};

#[tokio::test(flavor = "multi_thread")]
async fn of_64_simultaneous_claims_exactly_one_is_acquired() {
    guards::one_of_64_claims_is_acquired(&Keys::on_cluster().connect().await).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn each_transition_checks_its_own_guard() {
    guards::each_transition_checks_its_own_guard(&Keys::on_server().connect().await).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_call_repeated_with_its_token_returns_the_lost_answer() {
    guards::a_repeated_call_returns_the_lost_answer(&Keys::on_server().connect().await).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_call_may_be_dropped_at_any_time() {
    guards::a_call_may_be_dropped_at_any_time(&Keys::on_cluster().connect().await, 100).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn every_transition_does_as_the_transition_function() {
    let store = Keys::on_server().connect().await;
    let mut compared = Compared::new(&store);
    (compared.expires, compared.lists_often) = (false, false);
    compared.every_transition().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn random_calls_answer_as_the_transition_function() {
    let store = Keys::on_cluster().connect().await;
    let mut compared = Compared::new(&store);
    (compared.expires, compared.lists_often) = (false, false);
    compared.random_walk(3, 300).await;
}
