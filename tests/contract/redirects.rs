//! Rules 50 and 52 for redirects, which report that nothing was done.

use http::{HeaderValue, StatusCode, header};
use tower_idempotency::{Disposition, Dispositions, Release};

use crate::{
    api::{Api, ask, keyed, required},
    probe::{Probe, Run},
    stores::{Place, memory, on_each_store},
};

on_each_store! {
    rule_52_a_client_follows_a_redirect_with_its_key
}

/// Redirects `/old` to `/new`, and creates things at `/new`.
fn moved(run: &Run, status: u16) -> http::Response<axum::body::Body> {
    let mut response = run.created();
    if run.request.uri().path() == "/old" {
        *response.status_mut() = StatusCode::from_u16(status).unwrap();
        let address = HeaderValue::from_static("/new");
        response.headers_mut().insert(header::LOCATION, address);
    }
    response
}

async fn rule_52_a_client_follows_a_redirect_with_its_key(place: &Place) {
    let store = place.open().await;
    for status in [307, 308] {
        let probe = Probe::answering(move |run| moved(&run, status));
        let api = Api::new(required(store.clone()), &probe);
        let key = format!("K{status}");
        api.send(ask("/old").key(&key)).await.assert_live(status);
        let first = api.send(ask("/new").key(&key)).await;
        first.assert_live(201).assert_run(2);
        api.send(ask("/new").key(&key))
            .await
            .assert_replay_of(&first);
        api.send(ask("/old").key(&key))
            .await
            .assert_problem(422, "key-reused");
        assert_eq!(probe.runs(), 2);
    }
}

#[tokio::test]
async fn rule_52_a_redirect_that_a_table_releases_frees_the_key() {
    let probe = Probe::answering(move |run| moved(&run, 303));
    let released = Dispositions::standard().status(
        StatusCode::SEE_OTHER,
        Disposition::Release(Release::AnyRequest),
    );
    let api = Api::new(required(memory()).dispositions(released), &probe);
    api.send(ask("/old").key("K")).await.assert_live(303);
    api.send(ask("/new").key("K")).await.assert_run(2);
}

#[tokio::test]
async fn rule_50_after_effects_a_redirect_leaves_the_outcome_unknown() {
    for status in [307, 308, 413, 415] {
        let probe = Probe::answering(move |run| {
            run.operation().effects_started();
            run.status(status)
        });
        let api = Api::new(required(memory()), &probe);
        api.send(keyed("K")).await.assert_live(status);
        api.send(keyed("K"))
            .await
            .assert_problem(409, "outcome-unknown");
        assert_eq!(probe.runs(), 1);
    }
}
