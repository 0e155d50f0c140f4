//! Rules 90, 92 and 94: keys that are not known, and keys that change.

use tower_idempotency::{
    DynStore, Fingerprinting, IdempotencyBuilder,
    sealing::{NameDigests, Sealing},
};

use super::{key, sealed, sealing, secret};
use crate::{
    api::{Api, keyed, required},
    probe::Probe,
    stores::{Place, memory, on_each_store},
    told::Told,
};

on_each_store! {
    rule_92_keys_rotate_while_both_processes_serve
    rule_94_secrets_of_fingerprints_rotate_while_both_processes_serve
}

fn keyed_by(store: &DynStore, filled: u8) -> IdempotencyBuilder<DynStore> {
    let current = Fingerprinting::bytes().keyed(&secret(filled));
    required(store.clone()).fingerprint(current)
}

#[tokio::test]
async fn rule_90_a_response_of_an_unknown_key_is_refused_and_logged() {
    let told = Told::listen();
    let (store, probe) = (memory(), Probe::counting());
    Api::new(sealed(store.clone()), &probe)
        .send(keyed("K"))
        .await
        .assert_run(1);
    let december = Sealing::new("payments", key("2026-12", 12));
    let api = Api::new(required(store.clone()).sealing(december), &probe);
    let refused = api.send(keyed("K")).await;
    refused.assert_problem(503, "store-unavailable");
    let (events, counts, _) = told.so_far();
    assert_eq!((events["corrupt"], counts["corrupt"]), (1, 1));
    let warnings = told.warnings();
    assert_eq!(warnings.len(), 1);
    let error = warnings[0].field("error");
    assert!(error.contains("the key `2026-11`, which is not known here: add it with"));
    // Nor does a key open what another secret with its id has sealed.
    let renamed = Sealing::new("payments", key("2026-11", 12));
    let api = Api::new(required(store).sealing(renamed), &probe);
    api.send(keyed("K"))
        .await
        .assert_problem(503, "store-unavailable");
    assert_eq!(probe.runs(), 1);
}

async fn rule_92_keys_rotate_while_both_processes_serve(place: &Place) {
    let (store, probe) = (place.open().await, Probe::counting());
    let with = |sealing| Api::new(required(store.clone()).sealing(sealing), &probe);
    // First every process learns the new key, then it becomes current.
    let learning = with(sealing().earlier(key("2026-12", 12)));
    let rotated = with(Sealing::new("payments", key("2026-12", 12)).earlier(key("2026-11", 11)));
    for (one, other, name) in [(&learning, &rotated, "K"), (&rotated, &learning, "L")] {
        let first = one.send(keyed(name)).await;
        first.assert_live(201);
        other.send(keyed(name)).await.assert_replay_of(&first);
    }
    // Without the old key, its responses are refused and those of the new one replay.
    let done = with(Sealing::new("payments", key("2026-12", 12)));
    done.send(keyed("K"))
        .await
        .assert_problem(503, "store-unavailable");
    assert!(done.send(keyed("L")).await.is_replay());
    assert_eq!(probe.runs(), 2);
}

async fn rule_94_secrets_of_fingerprints_rotate_while_both_processes_serve(place: &Place) {
    let (store, probe) = (place.open().await, Probe::counting());
    let form = |filled| Fingerprinting::bytes().keyed(&secret(filled));
    let learning = Api::new(keyed_by(&store, 1).earlier_fingerprint(form(2)), &probe);
    let rotated = Api::new(keyed_by(&store, 2).earlier_fingerprint(form(1)), &probe);
    for (one, other, name) in [(&learning, &rotated, "K"), (&rotated, &learning, "L")] {
        let first = one.send(keyed(name)).await;
        first.assert_live(201);
        other.send(keyed(name)).await.assert_replay_of(&first);
        let differs = other.send(keyed(name).body("{}")).await;
        differs.assert_problem(422, "key-reused");
        assert_eq!(differs.problem()["differs"], serde_json::json!(["body"]));
    }
    // Without the old secret, its records cannot be compared.
    let done = Api::new(keyed_by(&store, 2), &probe);
    done.send(keyed("K"))
        .await
        .assert_problem(503, "store-unavailable");
    // Nor can those of readable fingerprints, unless the settings name them.
    Api::new(required(store.clone()), &probe)
        .send(keyed("M"))
        .await
        .assert_run(3);
    done.send(keyed("M"))
        .await
        .assert_problem(503, "store-unavailable");
    let beginning = keyed_by(&store, 2).earlier_fingerprint(Fingerprinting::bytes());
    assert!(
        Api::new(beginning, &probe)
            .send(keyed("M"))
            .await
            .is_replay()
    );
    assert_eq!(probe.runs(), 3);
}

#[tokio::test]
async fn a_sealing_is_refused_without_a_table_or_with_one_id_twice() {
    let build = |sealing| {
        let refused = required(memory()).sealing(sealing).build().err();
        refused.map(|error| error.to_string()).unwrap_or_default()
    };
    let unnamed = build(Sealing::new("", key("2026-11", 11)));
    assert_eq!(
        unnamed,
        "`sealing` must name its table in 1 to 255 bytes, got 0"
    );
    let twice = build(sealing().earlier(key("2026-11", 12)));
    assert_eq!(
        twice,
        "`sealing` must have keys with different ids, got `2026-11` twice"
    );
    assert_eq!(build(sealing()), "");
}

#[test]
fn debug_of_settings_shows_no_secret() {
    let settings = sealing().earlier(key("2026-10", 10));
    let digests = NameDigests::new(&secret(11));
    let form = Fingerprinting::bytes().keyed(&secret(11));
    let shown = format!("{settings:?} {digests:?} {form:?} {:?}", secret(11));
    assert!(shown.contains("2026-10"), "{shown}");
    for digits in ["11, 11", "0b0b", "10, 10", "0a0a"] {
        assert!(!shown.contains(digits), "{shown}");
    }
}
