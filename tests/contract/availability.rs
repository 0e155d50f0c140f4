//! What a failing store, a crashed owner or a slow neighbour may not cost the
//! requests of others: permits, memory, keys.

use std::time::Duration;

use tower_idempotency::{
    Store as _,
    store::{Claim, Claimed, RecordState},
};

use crate::{
    api::{Api, fingerprint, keyed, named, record, required},
    probe::Probe,
    stores::{Place, on_each_store},
};

on_each_store! {
    rule_72_a_crashed_claim_binds_its_key_until_it_expires
}

async fn rule_72_a_crashed_claim_binds_its_key_until_it_expires(place: &Place) {
    let store = place.open().await;
    let probe = Probe::counting();
    let api = Api::new(required(store.clone()), &probe);
    let crash = async |key: &str, retention| {
        let lease = Duration::from_millis(1);
        let claim = Claim::new(fingerprint(keyed(key)).await, lease, retention);
        let claimed = store.claim(&named(key), &claim).await.unwrap();
        assert!(matches!(claimed, Claimed::Acquired(_)));
    };
    crash("K", Duration::from_secs(3600)).await;
    crash("L", Duration::from_millis(2)).await;
    crash("M", Duration::from_millis(2)).await;
    tokio::time::sleep(Duration::from_millis(20)).await;

    let other = |key| keyed(key).body("{\"amount\":2}");
    api.send(other("K")).await.assert_problem(422, "key-reused");
    // Expired, so that another request has the key; no sweep is needed.
    api.send(other("L")).await.assert_run(1);
    api.send(keyed("L")).await.assert_problem(422, "key-reused");
    // The outcome of the same request is unknown as before.
    api.send(keyed("M"))
        .await
        .assert_problem(409, "outcome-unknown");
    let state = record(&store, "M").await.unwrap().state;
    assert!(matches!(state, RecordState::Unknown), "{state:?}");
    assert_eq!(probe.runs(), 1);
}
