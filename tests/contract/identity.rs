//! Rules 19 to 22, 31 to 35 and 38: the first request, its replays, and the requests
//! of other callers.

use std::sync::{
    Arc,
    atomic::{AtomicBool, AtomicUsize, Ordering},
};

use axum::{Router, body::Body, routing};
use http::{HeaderValue, Request, Response, StatusCode, header};
use tower::ServiceExt as _;
use tower_idempotency::{
    Dispositions, IdempotencyLayer, KeptHeaders, KeySyntax, Operation, Recovery, Scope,
    StoreFailure,
};

use crate::{
    api::{Answer, Api, Ask, ask, keyed, optional, record, required, send},
    probe::{Gate, Probe},
    stores::{Place, memory, on_each_store},
};

on_each_store! {
    rule_19_the_first_answer_is_the_handlers_response
    rule_20_a_retry_gets_the_same_response_and_the_marker
    rule_21_a_hundred_retries_make_one_run
    rule_22_created_with_its_location_is_replayed_with_its_location
    rule_31_another_key_runs_again
    rule_32_another_caller_runs_separately_and_learns_nothing
    rule_33_scope_and_key_do_not_run_into_one_another
    rule_34_without_a_scope_nothing_runs_and_nothing_is_replayed
}

async fn rule_19_the_first_answer_is_the_handlers_response(place: &Place) {
    let probe = Probe::answering(|run| {
        let mut response = run.created();
        response.extensions_mut().insert("the handler's");
        response
    });
    let bare = send(probe.clone(), keyed("K")).await;
    let api = Api::new(required(place.open().await), &probe);
    let first = api.send(keyed("K")).await;
    first.assert_live(201).assert_run(2);
    assert_eq!(first.headers.len(), bare.headers.len());
    assert_eq!((&*first.body, &first.trailers), (&b"{\"n\":2}"[..], &None));
    let response = api.respond(keyed("L").0).await.unwrap();
    assert_eq!(response.extensions().get(), Some(&"the handler's"));
}

async fn rule_20_a_retry_gets_the_same_response_and_the_marker(place: &Place) {
    let answers: [fn(Response<Body>) -> Response<Body>; 5] = [
        |response| response,
        |mut response| {
            *response.body_mut() = (0..=255).collect::<Vec<u8>>().into();
            response.headers_mut().insert(
                header::CONTENT_TYPE,
                HeaderValue::from_static("application/octet-stream"),
            );
            response
        },
        |mut response| {
            *response.status_mut() = StatusCode::SEE_OTHER;
            *response.body_mut() = Body::empty();
            response
        },
        |mut response| {
            *response.status_mut() = StatusCode::NOT_FOUND;
            response.headers_mut().remove(header::CONTENT_TYPE);
            response
        },
        |mut response| {
            *response.body_mut() = "null".into();
            response
                .headers_mut()
                .append("x-many", HeaderValue::from_static("1"));
            response
                .headers_mut()
                .append("x-many", HeaderValue::from_static("2, 3"));
            response
        },
    ];
    let probe = Probe::answering(move |run| answers[run.number - 1](run.created()));
    let api = Api::new(required(place.open().await), &probe);
    for number in 1..=answers.len() {
        let key = format!("K{number}");
        let first = api.send(keyed(&key)).await;
        first.assert_run(number);
        for _ in 0..2 {
            api.send(keyed(&key)).await.assert_replay_of(&first);
        }
        assert_eq!(probe.runs(), number);
    }
}

async fn rule_21_a_hundred_retries_make_one_run(place: &Place) {
    let probe = Probe::counting();
    let store = place.open().await;
    let strictest = Api::new(required(store.clone()), &probe);
    let first = strictest.send(keyed("K")).await;
    // Whatever else is allowed, a recorded request does not run again.
    let permissive = Api::new(
        optional(store)
            .dispositions(Dispositions::only_success())
            .recovery(Recovery::Rerun)
            .max_attempts(u32::MAX)
            .store_failure(StoreFailure::RunUnguarded)
            .key_syntax(KeySyntax::compat().length(1..=1024))
            .kept_headers(KeptHeaders::all_but_transient()),
        &probe,
    );
    for _ in 0..50 {
        strictest.send(keyed("K")).await.assert_replay_of(&first);
        permissive.send(keyed("K")).await.assert_replay_of(&first);
    }
    assert_eq!(probe.runs(), 1);
}

async fn rule_22_created_with_its_location_is_replayed_with_its_location(place: &Place) {
    let api = Api::new(required(place.open().await), &Probe::counting());
    api.send(keyed("K")).await.assert_live(201);
    let replay = api.send(keyed("K")).await;
    assert!(replay.is_replay());
    assert_eq!(replay.status, StatusCode::CREATED);
    assert_eq!(replay.header("location"), Some("/things/1"));
}

async fn rule_31_another_key_runs_again(place: &Place) {
    let probe = Probe::counting();
    let api = Api::new(required(place.open().await), &probe);
    for number in 1..=3 {
        api.send(keyed(&format!("K{number}")))
            .await
            .assert_run(number);
    }
    assert_eq!(probe.runs(), 3);
}

async fn rule_32_another_caller_runs_separately_and_learns_nothing(place: &Place) {
    let gate = Gate::closed();
    let probe = Probe::behind(&gate);
    let api = Api::new(required(place.open().await), &probe);
    // While the first request runs, it affects neither the same request …
    let ours = api.spawn(keyed("K"));
    gate.arrival().await;
    let theirs = api.spawn(keyed("K").from("other"));
    // … nor a different one of another caller.
    let third = api.spawn(ask("/elsewhere").key("K").body("{}").from("third"));
    gate.arrival().await;
    gate.arrival().await;
    gate.open();
    let (ours, theirs, third) = (
        ours.await.unwrap(),
        theirs.await.unwrap(),
        third.await.unwrap(),
    );
    for answer in [&ours, &theirs, &third] {
        answer.assert_live(201);
    }
    assert_eq!(probe.runs(), 3);
    // Each caller gets a replay of its own run.
    api.send(keyed("K")).await.assert_replay_of(&ours);
    api.send(keyed("K").from("other"))
        .await
        .assert_replay_of(&theirs);
    // A key that one caller may not use again is free for the others.
    api.send(keyed("K").body("{}").from("fourth"))
        .await
        .assert_run(4);
}

async fn rule_33_scope_and_key_do_not_run_into_one_another(place: &Place) {
    let probe = Probe::counting();
    let api = Api::new(required(place.open().await), &probe);
    let pairs = [
        ("a", "bc"),
        ("ab", "c"),
        ("a:b", "c"),
        ("a", "b:c"),
        ("a/b", "c"),
        ("a", "\"b c\""),
    ];
    let mut first = Vec::new();
    for (scope, key) in pairs {
        first.push(api.send(keyed(key).from(scope)).await);
    }
    assert_eq!(probe.runs(), pairs.len());
    for ((scope, key), first) in pairs.into_iter().zip(&first) {
        api.send(keyed(key).from(scope))
            .await
            .assert_replay_of(first);
    }
}

async fn rule_34_without_a_scope_nothing_runs_and_nothing_is_replayed(place: &Place) {
    let store = place.open().await;
    let probe = Probe::counting();
    let first = Api::new(required(store.clone()), &probe);
    first.send(keyed("K")).await.assert_run(1);
    let permissive = optional(store)
        .store_failure(StoreFailure::RunUnguarded)
        .recovery(Recovery::Rerun);
    let permissive = Api::new(permissive, &probe);
    let nobody: [fn(Ask) -> Ask; 4] = [
        |ask| ask.without("x-account"),
        |ask| ask.from(""),
        |ask| ask.header("x-account", "a\tb"),
        |ask| ask.header("x-account", "x".repeat(256)),
    ];
    for anonymous in nobody {
        let answer = permissive.send(anonymous(keyed("K"))).await;
        answer.assert_problem(403, "caller-unknown");
        assert_eq!(answer.retry_after(), None);
    }
    assert_eq!(probe.runs(), 1);
}

#[tokio::test]
async fn rule_34_a_single_tenant_is_a_scope_by_name() {
    let probe = Probe::counting();
    let everybody = IdempotencyLayer::required(memory(), |_| Some(Scope::single_tenant()));
    let api = Api::new(everybody, &probe);
    let first = api.send(keyed("K").from("one")).await;
    api.send(keyed("K").from("other"))
        .await
        .assert_replay_of(&first);
}

#[tokio::test]
async fn rule_35_revoked_credentials_get_the_outer_layers_answer() {
    let revoked = Arc::new(AtomicBool::new(false));
    let probe = Probe::counting();
    let guarded = Api::new(required(memory()), &probe).service();
    let checked = Arc::clone(&revoked);
    let app = tower::service_fn(move |request: Request<Body>| {
        let (guarded, checked) = (guarded.clone(), Arc::clone(&checked));
        async move {
            if checked.load(Ordering::SeqCst) {
                let denied = Response::builder().status(StatusCode::UNAUTHORIZED);
                return Ok(denied.body(Body::from("revoked")).unwrap());
            }
            let response = guarded.oneshot(request).await?;
            Ok::<_, crate::probe::Failure>(response.map(Body::new))
        }
    });
    let first = send(app.clone(), keyed("K")).await;
    first.assert_run(1);
    revoked.store(true, Ordering::SeqCst);
    let denied = send(app.clone(), keyed("K")).await;
    assert_eq!(
        (denied.status, &*denied.body),
        (StatusCode::UNAUTHORIZED, &b"revoked"[..])
    );
    assert!(!denied.is_replay());
    revoked.store(false, Ordering::SeqCst);
    send(app, keyed("K")).await.assert_replay_of(&first);
}

#[tokio::test]
async fn rule_38_a_stale_precondition_does_not_fail_the_retry() {
    let version = Arc::new(AtomicUsize::new(1));
    let probe = Probe::answering(move |run| {
        let current = version.load(Ordering::SeqCst);
        let mut response = run.created();
        if run.request.headers()["if-match"] != format!("\"{current}\"") {
            *response.status_mut() = StatusCode::PRECONDITION_FAILED;
            return response;
        }
        let next = version.fetch_add(1, Ordering::SeqCst) + 1;
        let etag = HeaderValue::from_str(&format!("\"{next}\"")).unwrap();
        response.headers_mut().insert(header::ETAG, etag);
        response
    });
    let api = Api::new(required(memory()), &probe);
    let change = || keyed("K").header("if-match", "\"1\"");
    let first = api.send(change()).await;
    first.assert_live(201);
    assert_eq!(first.header("etag"), Some("\"2\""));
    api.send(change()).await.assert_replay_of(&first);
    // Under another key the precondition fails.
    api.send(change().key("L")).await.assert_live(412);
}

#[tokio::test]
async fn the_handler_sees_key_scope_and_a_stable_operation() {
    let probe = Probe::answering(|run| {
        let operation = run.operation();
        let mut response = run.status(503);
        *response.body_mut() = format!(
            "{} {} {} {} {}",
            operation.key().as_str(),
            operation.scope().as_str(),
            operation.attempt(),
            operation.id(),
            operation.derive("payments"),
        )
        .into();
        response
    });
    let store = memory();
    let api = Api::new(required(store.clone()), &probe);
    let mut fences = Vec::new();
    let mut said: Vec<String> = Vec::new();
    for _ in 0..2 {
        let answer: Answer = api.send(keyed("\"K\\\"1\"")).await;
        said.push(String::from_utf8(answer.body.to_vec()).unwrap());
        fences.push(record(&store, "K\"1").await.unwrap().fence);
    }
    let words: Vec<Vec<&str>> = said.iter().map(|said| said.split(' ').collect()).collect();
    assert_eq!(words[0][..3], ["K\"1", "acme-7", "1"]);
    assert_eq!(words[1][..3], ["K\"1", "acme-7", "2"]);
    assert_eq!(words[0][3..], words[1][3..]);
    assert!(fences[0] < fences[1]);
}

#[tokio::test]
async fn the_handler_extracts_its_operation_with_axum() {
    let layer = optional(memory()).build().unwrap();
    let app = Router::new()
        .route(
            "/needs",
            routing::post(async |operation: Operation| operation.key().as_str().to_owned()),
        )
        .route(
            "/may",
            routing::post(async |operation: Option<Operation>| operation.is_some().to_string()),
        )
        .layer(layer);
    let body = async |ask: Ask| {
        let answer = send(app.clone(), ask).await;
        (answer.status.as_u16(), answer.body)
    };
    assert_eq!(body(ask("/needs").key("K")).await, (200, "K".into()));
    assert_eq!(body(ask("/needs")).await.0, 500);
    assert_eq!(body(ask("/may").key("L")).await, (200, "true".into()));
    assert_eq!(body(ask("/may")).await, (200, "false".into()));
}
