//! Rules 76, 88 and 93 together: quotas of scopes whose names and responses are hidden.

use std::time::Duration;

use tower_idempotency::{
    DynStore, Key, Quota, Scope, Store as _,
    sealing::NameDigests,
    store::{RecordName, RecordState, Usage, UsageDelta},
};

use super::{
    assert_nothing_readable, contains, hidden, secret, secret_answers, secret_ask, watched::Watched,
};
use crate::{
    api::{Api, eventually},
    stores::{Place, on_each_store},
};

on_each_store! {
    rule_76_quotas_count_the_bytes_of_sealed_records
    rule_76_the_quota_of_a_hidden_scope_shows_nothing_readable
}

async fn rule_76_quotas_count_the_bytes_of_sealed_records(place: &Place) {
    let store = place.open().await;
    let quota = Quota::unlimited().max_bytes(1 << 20);
    let api = Api::new(hidden(store.clone()).quota(quota), &secret_answers());
    api.send(secret_ask()).await.assert_run(1);
    let name = kept_name();
    let record = store.read(&name).await.unwrap().unwrap();
    let RecordState::Completed { response } = record.state else {
        panic!("not completed");
    };
    let response = response.len();
    assert!(response > 0);
    let names = name.scope().as_str().len() + name.key().as_str().len();
    let expected = Quota::RECORD_BYTES as usize + names + response;
    // The layer reports once a second.
    let kept = eventually(async || {
        let asked = [UsageDelta::none(name.scope().clone())];
        let usage = store.add_usage(&asked).await.unwrap().unwrap();
        let sum = |kept: fn(&Usage) -> i64| usage.iter().map(kept).sum::<i64>();
        let kept = (sum(|usage| usage.records), sum(|usage| usage.bytes));
        (kept.0 > 0).then_some(kept)
    })
    .await;
    assert_eq!(kept, (1, i64::try_from(expected).unwrap()));
}

async fn rule_76_the_quota_of_a_hidden_scope_shows_nothing_readable(place: &Place) {
    let store = Watched::new(place.open().await);
    let quota = Quota::unlimited().max_records(1);
    let builder = hidden(DynStore::new(store.clone())).quota(quota);
    let api = Api::new(builder, &secret_answers());
    let first = api.send(secret_ask()).await;
    first.assert_run(1);
    let refused = api.send(secret_ask().key("k3y-s3cr3t-2")).await;
    refused.assert_problem(429, "quota-exceeded");
    assert_nothing_readable(&refused.body);
    api.send(secret_ask()).await.assert_replay_of(&first);
    tokio::time::sleep(INTERVAL).await;
    let scope = kept_name().scope().as_str().to_owned();
    assert!(contains(&store.counted(), scope.as_bytes()));
    assert_nothing_readable(&store.counted());
    assert_nothing_readable(&store.received());
}

/// The name under which the record of [`secret_ask`] is kept.
fn kept_name() -> RecordName {
    let (scope, key) = ("acct-s3cr3t", "k3y-s3cr3t");
    let scope = Scope::new(scope).unwrap();
    let sent = RecordName::new(scope, Key::new(key));
    NameDigests::new(&secret(1)).of(&sent)
}

/// After this, the store has been told.
const INTERVAL: Duration = Duration::from_millis(1_100);
