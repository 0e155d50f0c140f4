//! The tables of dispositions.

use http::{HeaderMap, Response, StatusCode};
use tower_idempotency::{Disposition, Dispositions, Operation, Release};

use crate::service::{keyed, layer, send, status};

/// The outcome of a response.
async fn outcome(dispositions: Dispositions, status: u16, starts_effects: bool) -> &'static str {
    let layer = layer().dispositions(dispositions).build().unwrap();
    let handler = move |operation: &Operation| {
        if starts_effects {
            operation.effects_started();
        }
        let response = Response::builder().status(status);
        (response.body("").unwrap(), HeaderMap::new())
    };
    send(&layer, keyed("k"), handler).await.outcome()
}

#[tokio::test(start_paused = true)]
async fn presets_decide_by_status() {
    for (status, standard, success) in [
        (200, "recorded", "recorded"),
        (299, "recorded", "recorded"),
        (301, "recorded", "released"),
        (307, "released", "released"),
        (404, "recorded", "released"),
        (408, "unknown", "unknown"),
        (429, "released", "released"),
        (500, "released", "released"),
        (502, "unknown", "unknown"),
        (504, "unknown", "unknown"),
        (505, "released", "released"),
    ] {
        assert_eq!(
            outcome(Dispositions::standard(), status, false).await,
            standard,
            "{status}"
        );
        assert_eq!(
            outcome(Dispositions::default(), status, false).await,
            standard,
            "{status}"
        );
        assert_eq!(
            outcome(Dispositions::only_success(), status, false).await,
            success,
            "{status}"
        );
        assert_eq!(
            outcome(Dispositions::everything(), status, false).await,
            "recorded"
        );
    }
}

#[tokio::test(start_paused = true)]
async fn rule_50_started_effects_turn_a_release_into_unknown() {
    for (status, expected) in [
        (200, "recorded"),
        (404, "recorded"),
        (429, "unknown"),
        (500, "unknown"),
    ] {
        assert_eq!(
            outcome(Dispositions::standard(), status, true).await,
            expected,
            "{status}"
        );
    }
}

#[tokio::test(start_paused = true)]
async fn a_predicate_goes_before_a_status_and_that_before_the_preset() {
    let table = || {
        let release = Disposition::Release(Release::AnyRequest);
        Dispositions::everything().status(StatusCode::CONFLICT, release)
    };
    assert_eq!(outcome(table(), 409, false).await, "released");
    assert_eq!(outcome(table(), 404, false).await, "recorded");
    let by =
        |status| table().by(move |parts| (parts.status == status).then_some(Disposition::Unknown));
    assert_eq!(
        outcome(by(StatusCode::CONFLICT), 409, false).await,
        "unknown"
    );
    assert_eq!(outcome(by(StatusCode::GONE), 409, false).await, "released");
    let shown = format!("{:?}", by(StatusCode::GONE));
    let expected = "Dispositions { preset: Everything, by_status: {409: Release(AnyRequest)}, predicate: true }";
    assert_eq!(shown, expected);
}

#[tokio::test(start_paused = true)]
async fn only_success_frees_the_key_as_the_status_says() {
    for (code, may_change) in [(301, true), (404, true), (500, false)] {
        let layer = layer()
            .dispositions(Dispositions::only_success())
            .build()
            .unwrap();
        let handler = move |_: &Operation| {
            let response = Response::builder().status(code);
            (response.body("").unwrap(), HeaderMap::new())
        };
        assert_eq!(
            send(&layer, keyed("k"), handler).await.outcome(),
            "released"
        );
        let other = status(&layer, keyed("k").uri("/other")).await;
        assert_eq!(other.1 == "key-reused", !may_change, "{code}");
    }
}
