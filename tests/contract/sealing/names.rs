//! Rules 93 and 95: digests in the place of names, and ids of keys in logs.

use tower_idempotency::{
    Store as _,
    sealing::{LogIds, NameDigests},
};

use super::secret;
use crate::{
    api::{Api, keyed, named, record, required},
    probe::Probe,
    stores::{Place, memory, on_each_store},
    told::Told,
};

on_each_store! {
    rule_93_records_are_kept_under_digests_of_their_names
}

async fn rule_93_records_are_kept_under_digests_of_their_names(place: &Place) {
    let (store, probe) = (place.open().await, Probe::counting());
    let digests = NameDigests::new(&secret(1));
    let api = Api::new(
        required(store.clone()).name_digests(digests.clone()),
        &probe,
    );
    let first = api.send(keyed("K")).await;
    first.assert_run(1);
    api.send(keyed("K")).await.assert_replay_of(&first);
    api.send(keyed("K").from("other")).await.assert_run(2);
    api.send(keyed("K").body("{}"))
        .await
        .assert_problem(422, "key-reused");
    assert!(record(&store, "K").await.is_none());
    let kept = digests.of(&named("K"));
    let record = store.read(&kept).await.unwrap().unwrap();
    assert_eq!(record.attempt, 1);
    // An operator frees the key by its digests.
    let _ = store.forget(&kept, record.fence).await.unwrap();
    api.send(keyed("K")).await.assert_run(3);
}

#[tokio::test]
async fn rule_95_the_event_of_an_outcome_has_the_id_of_its_key() {
    let told = Told::listen();
    let (ids, probe) = (LogIds::new(&secret(1)), Probe::counting());
    let api = Api::new(required(memory()).log_ids(ids.clone()), &probe);
    for name in ["k3y-s3cr3t", "k3y-s3cr3t", "other"] {
        api.send(keyed(name)).await;
    }
    api.send(keyed("k3y-s3cr3t").body("{}")).await;
    let digested = required(memory())
        .log_ids(ids.clone())
        .name_digests(NameDigests::new(&secret(2)));
    Api::new(digested, &probe).send(keyed("k3y-s3cr3t")).await;
    let (_, _, text) = told.so_far();
    let of = |name: &str| format!("\"key_id\": \"{}\"", ids.of(&named(name)));
    assert_eq!(text.matches(&of("k3y-s3cr3t")).count(), 4, "{text}");
    assert_eq!(text.matches(&of("other")).count(), 1, "{text}");
    assert!(!text.contains("s3cr3t"));
    // Without the setting there is no such field.
    let told = Told::listen();
    Api::new(required(memory()), &probe).send(keyed("K")).await;
    assert!(!told.so_far().2.contains("key_id"));
}
