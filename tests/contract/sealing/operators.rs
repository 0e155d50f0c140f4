//! Rule 96: operators and hooks on a store whose responses are sealed.

use std::time::Duration;

use http::{Response, StatusCode};
use tower_idempotency::{
    DynStore, Reconciler, Recovery, Store as _,
    store::{
        Transitioned,
        admin::{RecordedResponse, Resolution},
    },
};

use super::{sealed, sealing};
use crate::{
    api::{Api, keyed, named, record},
    probe::{Failure, Probe},
    stores::{Place, on_each_store},
};

on_each_store! {
    rule_96_an_operator_seals_the_response_of_a_resolved_record
    rule_96_the_response_of_a_hook_is_sealed
    rule_96_a_response_that_a_hook_sealed_is_replayed
}

fn found() -> RecordedResponse {
    let found = Response::builder().status(StatusCode::CREATED);
    RecordedResponse::new(found.body("paid after all").unwrap()).unwrap()
}

/// Runs K with an unknown outcome.
async fn lost(store: &DynStore, recovery: Recovery) -> (Api, Probe) {
    let probe = Probe::running(|_| async move { Err(Failure("lost")) });
    let api = Api::new(sealed(store.clone()).recovery(recovery), &probe);
    assert!(api.respond(keyed("K").0).await.is_err());
    (api, probe)
}

async fn rule_96_an_operator_seals_the_response_of_a_resolved_record(place: &Place) {
    let store = place.open().await;
    let (api, probe) = lost(&store, Recovery::Refuse).await;
    let (name, minute) = (named("K"), Duration::from_secs(60));
    let seen = record(&store, "K").await.unwrap();
    let own = sealing().seal(&name, &seen, &found()).await.unwrap();
    assert_eq!(own.status(), None);
    let happened = Resolution::Happened(own);
    let resolved = store.resolve(&name, seen.fence, &happened, minute).await;
    assert_eq!(resolved.unwrap(), Transitioned::Applied);
    let replay = api.send(keyed("K")).await;
    assert!(replay.is_replay());
    assert_eq!(
        (replay.status.as_u16(), &replay.body[..]),
        (201, &b"paid after all"[..])
    );
    // And reads it again.
    let record = record(&store, "K").await.unwrap();
    let read = sealing().open(&name, &record).await.unwrap().unwrap();
    assert_eq!(read.status(), Some(StatusCode::CREATED));
    assert!(sealing().open(&named("L"), &record).await.is_err());
    assert_eq!(probe.runs(), 1);
}

async fn rule_96_the_response_of_a_hook_is_sealed(place: &Place) {
    let store = place.open().await;
    let hook = Reconciler::new(async |_| Some(Resolution::Happened(found())));
    let (api, probe) = lost(&store, Recovery::Reconcile(hook)).await;
    for _ in 0..2 {
        let replay = api.send(keyed("K")).await;
        assert!(replay.is_replay());
        assert_eq!(replay.body, "paid after all");
    }
    let record = record(&store, "K").await.unwrap();
    let read = sealing().open(&named("K"), &record).await.unwrap().unwrap();
    assert_eq!(read.status(), Some(StatusCode::CREATED));
    assert_eq!(probe.runs(), 1);
}

async fn rule_96_a_response_that_a_hook_sealed_is_replayed(place: &Place) {
    let store = place.open().await;
    let read = store.clone();
    let hook = Reconciler::new(move |_| {
        let store = read.clone();
        async move {
            let seen = record(&store, "K").await.unwrap();
            let own = sealing().seal(&named("K"), &seen, &found()).await;
            Some(Resolution::Happened(own.unwrap()))
        }
    });
    let (api, probe) = lost(&store, Recovery::Reconcile(hook)).await;
    for _ in 0..2 {
        let replay = api.send(keyed("K")).await;
        assert!(replay.is_replay(), "{replay:?}");
        assert_eq!(replay.body, "paid after all");
    }
    assert_eq!(probe.runs(), 1);
}
