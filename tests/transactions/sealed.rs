//! Rule 88 in a handler's transaction: its response is sealed.

use tower_idempotency::{
    Key, Outcome, Scope, Store as _,
    sealing::{Sealing, SealingKey, Secret},
    store::{RecordName, RecordState},
};

use crate::{
    commit::respond,
    service::Service,
    shop::{Shop, with_each_database},
};

with_each_database! {
    rule_88_an_order_and_its_sealed_response_are_committed_and_replayed;
}

async fn rule_88_an_order_and_its_sealed_response_are_committed_and_replayed<S: Shop>(shop: S) {
    let secret = Secret::from_bytes(&[11; 32]).unwrap();
    let sealing = || Sealing::new("orders", SealingKey::new("2026-11", &secret).unwrap());
    let service = Service::new(&shop, respond).set(|layer| layer.sealing(sealing()));
    let first = service.post("key").await;
    first.assert_is(201, "ordered by run 1");
    assert_eq!(first.outcome, Outcome::Recorded);
    // Headers that are not kept show that the client got the handler's own response.
    assert_eq!(first.headers["set-cookie"], "cart=; Max-Age=0");
    assert!(shop.i5_has_order("key").await);
    let retry = service.post("key").await;
    retry.assert_is(201, "ordered by run 1");
    assert!(retry.is_replay());

    let name = RecordName::new(Scope::single_tenant(), Key::new("key"));
    let record = shop.store().read(&name).await.unwrap().unwrap();
    let RecordState::Completed { response } = &record.state else {
        panic!("{record:?}");
    };
    assert!(!response.windows(7).any(|window| window == b"ordered"));
    assert!(sealing().open(&name, &record).await.unwrap().is_some());
}
