//! Rules 49 to 55: how a handler ends decides the fate of its key.

use std::{
    sync::{
        Arc,
        atomic::{AtomicUsize, Ordering},
    },
    time::Duration,
};

use axum::{Router, body::Body};
use http::StatusCode;
use http_body_util::BodyExt as _;
use tower_idempotency::{Disposition, Dispositions, KeepFor, Outcome, store::Release};

use crate::{
    api::{Answer, Api, keyed, required, send},
    client::{Wire, keyed_post},
    probe::{Failure, Probe, breaking_after},
    stores::{Place, memory, on_each_store},
};

on_each_store! {
    rule_49_a_panic_is_500_and_its_outcome_unknown
    rule_50_a_released_key_runs_again_for_the_same_request_alone
    rule_50_timeouts_and_gateway_errors_leave_an_unknown_outcome
    rule_51_refusals_of_the_handler_are_recorded
    rule_52_released_redirects_and_4xx_free_the_key
    rule_53_the_handlers_disposition_beats_the_table_and_is_removed
    rule_54_an_inner_error_passes_and_its_outcome_is_unknown
    rule_55_a_body_that_breaks_is_never_replayed_short
}

async fn rule_49_a_panic_is_500_and_its_outcome_unknown(place: &Place) {
    let store = place.open().await;
    // One handler panics in its future, one in `call` itself.
    let later = Probe::running(|_| async { panic!("the handler's secret") });
    let at_once = Probe::answering(|_| panic!("the handler's secret"));
    for (key, probe) in [("K", later), ("L", at_once)] {
        let api = Api::new(required(store.clone()), &probe);
        let answer = api.send(keyed(key)).await;
        answer.assert_problem(500, "handler-panicked");
        assert!(!String::from_utf8_lossy(&answer.body).contains("secret"));
        assert_eq!(answer.outcome, Some(Outcome::Unknown));
        for _ in 0..2 {
            let retry = api.send(keyed(key)).await;
            retry.assert_problem(409, "outcome-unknown");
            assert_eq!(retry.retry_after(), None);
        }
        api.send(keyed(key).body("{}"))
            .await
            .assert_problem(422, "key-reused");
        assert_eq!(probe.runs(), 1);
    }
}

async fn rule_50_a_released_key_runs_again_for_the_same_request_alone(place: &Place) {
    let store = place.open().await;
    for script in [
        &[500, 201][..],
        &[501, 201],
        &[503, 201],
        &[505, 201],
        &[599, 201],
    ] {
        let probe = Probe::statuses(script);
        let api = Api::new(required(store.clone()), &probe);
        let key = format!("K{}", script[0]);
        let failed = api.send(keyed(&key)).await;
        failed.assert_live(script[0]).assert_run(1);
        assert_eq!(failed.outcome, Some(Outcome::Released));
        api.send(keyed(&key).body("{}"))
            .await
            .assert_problem(422, "key-reused");
        let first = api.send(keyed(&key)).await;
        first.assert_live(201).assert_run(2);
        api.send(keyed(&key)).await.assert_replay_of(&first);
        assert_eq!(probe.runs(), 2);
    }
}

async fn rule_50_timeouts_and_gateway_errors_leave_an_unknown_outcome(place: &Place) {
    let store = place.open().await;
    for status in [408, 502, 504, 500, 503] {
        let probe = Probe::answering(move |run| {
            // 500 and 503 release the key, unless the handler had begun effects.
            if matches!(status, 500 | 503) {
                run.operation().effects_started();
            }
            run.status(status)
        });
        let api = Api::new(required(store.clone()), &probe);
        let key = format!("K{status}");
        let answer = api.send(keyed(&key)).await;
        answer.assert_live(status).assert_run(1);
        assert_eq!(answer.outcome, Some(Outcome::Unknown));
        api.send(keyed(&key))
            .await
            .assert_problem(409, "outcome-unknown");
        assert_eq!(probe.runs(), 1);
    }
}

async fn rule_51_refusals_of_the_handler_are_recorded(place: &Place) {
    let store = place.open().await;
    for script in [&[400][..], &[403], &[404], &[409], &[412], &[422], &[451]] {
        let probe = Probe::statuses(script);
        let api = Api::new(required(store.clone()), &probe);
        let key = format!("K{}", script[0]);
        let first = api.send(keyed(&key)).await;
        first.assert_live(script[0]);
        api.send(keyed(&key)).await.assert_replay_of(&first);
        assert_eq!(probe.runs(), 1);
    }
}

async fn rule_52_released_redirects_and_4xx_free_the_key(place: &Place) {
    let store = place.open().await;
    for status in [307, 308, 401, 407, 413, 415, 421, 425, 429] {
        let probe = Probe::answering(move |run| {
            let mut response = run.created();
            if run.number <= 2 {
                *response.status_mut() = StatusCode::from_u16(status).unwrap();
            }
            response
        });
        let api = Api::new(required(store.clone()), &probe);
        let key = format!("K{status}");
        api.send(keyed(&key))
            .await
            .assert_live(status)
            .assert_run(1);
        api.send(keyed(&key))
            .await
            .assert_live(status)
            .assert_run(2);
        let first = api.send(keyed(&key).body("{\"corrected\":true}")).await;
        first.assert_live(201).assert_run(3);
        let again = api.send(keyed(&key).body("{\"corrected\":true}")).await;
        again.assert_replay_of(&first);
        // The key is now bound to the corrected request.
        api.send(keyed(&key))
            .await
            .assert_problem(422, "key-reused");
        assert_eq!(probe.runs(), 3);
    }
}

type Says = fn(&crate::probe::Run, &mut http::Response<Body>);

async fn rule_53_the_handlers_disposition_beats_the_table_and_is_removed(place: &Place) {
    let store = place.open().await;
    let record_500: [Says; 2] = [
        |_, response| _ = response.extensions_mut().insert(Disposition::Record),
        |run, _| run.operation().set_disposition(Disposition::Record),
    ];
    let release_201: [Says; 2] = [
        |_, response| {
            _ = response
                .extensions_mut()
                .insert(Disposition::Release(Release::AnyRequest));
        },
        |run, _| {
            run.operation()
                .set_disposition(Disposition::Release(Release::AnyRequest));
        },
    ];
    let unknown_201: [Says; 2] = [
        |_, response| _ = response.extensions_mut().insert(Disposition::Unknown),
        |run, _| run.operation().set_disposition(Disposition::Unknown),
    ];
    let saying = |status: u16, says: Says| {
        Probe::answering(move |run| {
            let mut response = run.status(status);
            says(&run, &mut response);
            response
        })
    };
    let unseen = async |api: &Api, key: &str| {
        let response = api.respond(keyed(key).0).await.unwrap();
        assert!(response.extensions().get::<Disposition>().is_none());
        Answer::of(response).await
    };
    for (index, says) in record_500.into_iter().enumerate() {
        let (key, probe) = (format!("record{index}"), saying(500, says));
        let api = Api::new(required(store.clone()), &probe);
        let first = unseen(&api, &key).await;
        first.assert_live(500);
        api.send(keyed(&key)).await.assert_replay_of(&first);
        assert_eq!(probe.runs(), 1);
    }
    for (index, says) in release_201.into_iter().enumerate() {
        let (key, probe) = (format!("release{index}"), saying(201, says));
        // A layer that records every response does not record it either.
        let everything = required(store.clone()).dispositions(Dispositions::everything());
        let api = Api::new(everything, &probe);
        unseen(&api, &key).await.assert_live(201).assert_run(1);
        api.send(keyed(&key)).await.assert_live(201).assert_run(2);
        // Any request may run under the key.
        api.send(keyed(&key).body("{}"))
            .await
            .assert_live(201)
            .assert_run(3);
    }
    for (index, says) in unknown_201.into_iter().enumerate() {
        let (key, probe) = (format!("unknown{index}"), saying(201, says));
        let api = Api::new(required(store.clone()), &probe);
        unseen(&api, &key).await.assert_live(201);
        api.send(keyed(&key))
            .await
            .assert_problem(409, "outcome-unknown");
        assert_eq!(probe.runs(), 1);
    }
}

#[tokio::test(start_paused = true)]
async fn rule_53_keep_for_sets_the_retention_of_the_response() {
    let store = memory();
    let minute = Duration::from_secs(60);
    let on_the_response: Says = |_, response| {
        let keep_for = KeepFor(Duration::from_secs(60));
        response.extensions_mut().insert(keep_for);
    };
    let on_the_operation: Says = |run, _| run.operation().keep_for(Duration::from_secs(60));
    let with_a_verdict: Says = |_, response| {
        *response.status_mut() = StatusCode::INTERNAL_SERVER_ERROR;
        response.extensions_mut().insert(Disposition::Record);
        let keep_for = KeepFor(Duration::from_secs(60));
        response.extensions_mut().insert(keep_for);
    };
    for (key, says) in [
        ("K", on_the_response),
        ("L", on_the_operation),
        ("M", with_a_verdict),
    ] {
        let probe = Probe::answering(move |run| {
            let mut response = run.created();
            says(&run, &mut response);
            response
        });
        let api = Api::new(required(store.clone()), &probe);
        let first = api.send(keyed(key)).await;
        tokio::time::advance(minute - Duration::from_millis(1)).await;
        api.send(keyed(key)).await.assert_replay_of(&first);
        tokio::time::advance(Duration::from_millis(2)).await;
        api.send(keyed(key)).await.assert_run(2);
    }
}

#[tokio::test]
async fn rule_53_the_response_wins_over_the_operation() {
    let probe = Probe::answering(|run| {
        run.operation().set_disposition(Disposition::Unknown);
        let mut response = run.created();
        response.extensions_mut().insert(Disposition::Record);
        response
    });
    let api = Api::new(required(memory()), &probe);
    let first = api.send(keyed("K")).await;
    api.send(keyed("K")).await.assert_replay_of(&first);
}

#[tokio::test]
async fn rule_53_a_disposition_is_a_part_of_an_axum_response() {
    let runs = Arc::new(AtomicUsize::new(0));
    let counted = Arc::clone(&runs);
    let app = Router::new()
        .route(
            "/count",
            axum::routing::post(async move || {
                counted.fetch_add(1, Ordering::SeqCst);
                (
                    StatusCode::BAD_REQUEST,
                    Disposition::Release(Release::AnyRequest),
                    "correct it",
                )
            }),
        )
        .layer(required(memory()).build().unwrap());
    for _ in 0..2 {
        send(app.clone(), keyed("K")).await.assert_live(400);
    }
    assert_eq!(runs.load(Ordering::SeqCst), 2);
}

async fn rule_54_an_inner_error_passes_and_its_outcome_is_unknown(place: &Place) {
    let probe = Probe::running(|_| async { Err(Failure("the very error")) });
    let api = Api::new(required(place.open().await), &probe);
    let error = api.respond(keyed("K").0).await.unwrap_err();
    assert_eq!(error.0, "the very error");
    api.send(keyed("K"))
        .await
        .assert_problem(409, "outcome-unknown");
    assert_eq!(probe.runs(), 1);
}

async fn rule_55_a_body_that_breaks_is_never_replayed_short(place: &Place) {
    let probe = Probe::answering(|run| {
        let mut response = run.created();
        *response.body_mut() = breaking_after(&["the first ", "half"]);
        response
    });
    let api = Api::new(required(place.open().await), &probe);
    let server = api.serve().await;
    let mut wire = Wire::open(&server).await;
    wire.write(keyed_post("K")).await;
    // The first client sees that its response is incomplete …
    let rest = wire.rest().await;
    assert!(!rest.ends_with(b"0\r\n\r\n"), "{}", rest.escape_ascii());
    // … although it gets the whole first half.
    let response = api.respond(keyed("L").0).await.unwrap();
    assert_eq!(response.status(), StatusCode::CREATED);
    let mut body = response.into_body();
    let read = body.frame().await.unwrap().unwrap().into_data().unwrap();
    assert_eq!(read, "the first half");
    assert_eq!(
        body.frame().await.unwrap().unwrap_err().to_string(),
        "the body broke"
    );
    for _ in 0..2 {
        for key in ["K", "L"] {
            let retry = api.send(keyed(key)).await;
            retry.assert_problem(409, "outcome-unknown");
        }
    }
    assert_eq!(probe.runs(), 2);
}

#[tokio::test]
async fn presets_and_predicates_say_which_responses_are_recorded() {
    use tower_idempotency::Disposition::{Record, Unknown};
    const RELEASE: Disposition = Disposition::Release(Release::SameRequest);
    let replays = async |dispositions: Dispositions, status: u16| {
        let probe = Probe::statuses(&[status]);
        let api = Api::new(required(memory()).dispositions(dispositions), &probe);
        api.send(keyed("K")).await;
        let retry = api.send(keyed("K")).await;
        match (retry.is_replay(), probe.runs()) {
            (true, 1) => Record,
            (false, 2) => RELEASE,
            _ => {
                retry.assert_problem(409, "outcome-unknown");
                Unknown
            }
        }
    };
    for (status, standard, everything, success) in [
        (201, Record, Record, Record),
        (303, Record, Record, RELEASE),
        (400, Record, Record, RELEASE),
        (401, RELEASE, Record, RELEASE),
        (408, Unknown, Record, Unknown),
        (429, RELEASE, Record, RELEASE),
        (500, RELEASE, Record, RELEASE),
        (502, Unknown, Record, Unknown),
        (503, RELEASE, Record, RELEASE),
        (504, Unknown, Record, Unknown),
    ] {
        assert_eq!(
            replays(Dispositions::standard(), status).await,
            standard,
            "{status}"
        );
        assert_eq!(
            replays(Dispositions::everything(), status).await,
            everything,
            "{status}"
        );
        assert_eq!(
            replays(Dispositions::only_success(), status).await,
            success,
            "{status}"
        );
    }
    let own = || {
        Dispositions::standard()
            .status(StatusCode::BAD_REQUEST, RELEASE)
            .status(StatusCode::BAD_GATEWAY, Record)
            .by(|response| response.headers.contains_key("x-never").then_some(Record))
    };
    assert_eq!(replays(own(), 400).await, RELEASE);
    assert_eq!(replays(own(), 502).await, Record);
    assert_eq!(replays(own(), 201).await, Record);
    let by_header = Dispositions::everything()
        .by(|response| response.headers.contains_key("x-run").then_some(Unknown));
    assert_eq!(replays(by_header, 201).await, Unknown);
}
