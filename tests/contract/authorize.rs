//! Rule 35: a hook decides who may receive a recorded response.

use std::{
    future::pending,
    sync::{
        Arc,
        atomic::{AtomicBool, AtomicUsize, Ordering},
    },
    time::Duration,
};

use axum::{Router, body::Body, routing::post};
use http::{HeaderValue, Request, Response, header, request};
use tokio::time::{Instant, advance, timeout};
use tower::ServiceExt as _;
use tower_idempotency::{
    Attributes, CommitError, Committed, DynStore, IdempotencyBuilder, MemoryStore, Operation,
    Outcome, Recovery, RejectionKind, ReplayAuthorizer, ReplayDecision, SqliteStore, Store,
    store::{
        CachedStore, Transitioned,
        admin::{RecordedResponse, Resolution},
    },
};

use crate::{
    api::{Answer, Api, Ask, keyed, named, record, required, send, settle},
    faulty::{Call, Fault, Faulty},
    probe::{Gate, Probe},
    stores::{Place, check, memory, on_each_store},
    told::Told,
};

on_each_store! {
    rule_35_only_its_own_user_receives_a_replay
    rule_35_a_revoked_user_gets_403_and_nothing_of_the_response
}

/// Allows a replay to the user who made the first request.
fn same_user() -> ReplayAuthorizer {
    deciding(|user, kept| match user.is_some() && user == kept {
        true => ReplayDecision::Allow,
        false => ReplayDecision::Refuse,
    })
}

/// Decides by the user of the request, and the one that was kept with the response.
fn deciding(
    decide: impl Fn(Option<&str>, Option<&str>) -> ReplayDecision + Send + Sync + 'static,
) -> ReplayAuthorizer {
    ReplayAuthorizer::new(move |request, record| {
        let decision = decide(user(request), record.attribute("user"));
        async move { decision }
    })
    .attributes(|request| {
        user(request)
            .map(|user| ("user", user))
            .into_iter()
            .collect()
    })
}

fn user(request: &request::Parts) -> Option<&str> {
    request.headers.get("x-user")?.to_str().ok()
}

fn by(user: &str) -> Ask {
    keyed("K").header("x-user", user)
}

fn authorized<S: Store>(store: S, authorizer: ReplayAuthorizer) -> IdempotencyBuilder<S> {
    required(store).authorize_replay(authorizer)
}

/// Asserts 403 without anything of the record.
#[track_caller]
fn assert_refused(answer: &Answer) {
    answer.assert_problem(403, "replay-refused");
    assert_eq!(answer.retry_after(), None);
    for name in ["x-run", "location", "etag"] {
        assert!(!answer.headers.contains_key(name), "{answer:?}");
    }
    let body = String::from_utf8_lossy(&answer.body);
    assert!(!body.contains("{\"n\":"), "{body}");
    let refused = Outcome::Refused(RejectionKind::ReplayRefused);
    assert_eq!(answer.outcome, Some(refused));
}

async fn rule_35_only_its_own_user_receives_a_replay(place: &Place) {
    let probe = Probe::counting();
    let api = Api::new(authorized(place.open().await, same_user()), &probe);
    let first = api.send(by("ann")).await;
    first.assert_run(1);
    api.send(by("ann")).await.assert_replay_of(&first);
    assert_refused(&api.send(by("bob")).await);
    assert_refused(&api.send(keyed("K")).await);
    // Another process reads the same attributes.
    let other = Api::new(authorized(place.open().await, same_user()), &probe);
    assert_refused(&other.send(by("bob")).await);
    other.send(by("ann")).await.assert_replay_of(&first);
    assert_eq!(probe.runs(), 1);
}

async fn rule_35_a_revoked_user_gets_403_and_nothing_of_the_response(place: &Place) {
    let (probe, revoked) = (Probe::counting(), Arc::new(AtomicBool::new(false)));
    let authorizer = deciding({
        let revoked = Arc::clone(&revoked);
        move |_, _| match revoked.load(Ordering::SeqCst) {
            true => ReplayDecision::Refuse,
            false => ReplayDecision::Allow,
        }
    });
    let api = Api::new(authorized(place.open().await, authorizer), &probe);
    let first = api.send(by("ann")).await;
    revoked.store(true, Ordering::SeqCst);
    for _ in 0..2 {
        assert_refused(&api.send(by("ann")).await);
    }
    // The record stays, and answers again.
    revoked.store(false, Ordering::SeqCst);
    api.send(by("ann")).await.assert_replay_of(&first);
    assert_eq!(probe.runs(), 1);
}

#[tokio::test(start_paused = true)]
async fn rule_35_a_replay_from_the_cache_is_authorized_each_time() {
    let cache = CachedStore::new(MemoryStore::new(), 1 << 20, Duration::from_secs(60));
    let api = Api::new(
        authorized(DynStore::new(cache), same_user()),
        &Probe::counting(),
    );
    let first = api.send(by("ann")).await;
    for _ in 0..2 {
        api.send(by("ann")).await.assert_replay_of(&first);
        assert_refused(&api.send(by("bob")).await);
    }
}

#[tokio::test(start_paused = true)]
async fn rule_35_the_hook_sees_the_facts_of_the_record() {
    let seen = Arc::new(std::sync::Mutex::new(None));
    let authorizer = ReplayAuthorizer::new({
        let seen = Arc::clone(&seen);
        move |request, record| {
            assert_eq!(request.uri.path(), "/count");
            *seen.lock().unwrap() = Some(record);
            async { ReplayDecision::Allow }
        }
    })
    .attributes(|_| Attributes::new().with("role", "clerk").with("user", "ann"));
    let store = MemoryStore::new();
    let builder = authorized(DynStore::new(store.clone()), authorizer);
    let api = Api::new(builder, &Probe::statuses(&[503, 202]));
    api.send(keyed("K")).await.assert_live(503);
    api.send(keyed("K")).await.assert_live(202);
    assert!(seen.lock().unwrap().is_none(), "a run asked the hook");
    advance(Duration::from_secs(3_600)).await;
    assert!(api.send(keyed("K")).await.is_replay());
    let seen = seen.lock().unwrap().take().unwrap();
    assert_eq!(
        (seen.status(), seen.attempt()),
        (Some(http::StatusCode::ACCEPTED), 2)
    );
    let hours = |hours: u64| Duration::from_secs(hours * 3_600);
    assert_eq!((seen.age(), seen.expires_in()), (hours(1), hours(23)));
    let record = record(&store, "K").await.unwrap();
    assert_eq!(seen.operation(), record.operation);
    let attributes = Attributes::new().with("role", "clerk").with("user", "ann");
    assert_eq!(*seen.attributes(), attributes);
}

#[tokio::test(start_paused = true)]
async fn rule_35_a_waiter_is_authorized_too() {
    let gate = Gate::closed();
    let builder = authorized(memory(), same_user()).wait(Duration::from_secs(60));
    let api = Api::new(builder, &Probe::behind(&gate));
    let owner = api.spawn(by("ann"));
    gate.arrival().await;
    let waiters = ["ann", "bob"].map(|user| api.spawn(by(user)));
    settle().await;
    gate.open();
    let first = owner.await.unwrap();
    let [same, other] = waiters;
    same.await.unwrap().assert_replay_of(&first);
    assert_refused(&other.await.unwrap());
}

#[tokio::test(start_paused = true)]
async fn rule_35_a_superseded_owner_receives_only_its_own_users_response() {
    for (user, is_allowed) in [("ann", true), ("bob", false)] {
        let store = MemoryStore::new();
        let gate = Gate::closed();
        let cut_off = Faulty::new(store.clone());
        cut_off.inject(Call::Renew, .., Fault::unavailable());
        let layer = |store| authorized(store, same_user()).recovery(Recovery::Rerun);
        let loser = Api::new(layer(DynStore::new(cut_off)), &Probe::behind(&gate));
        let winner = Api::new(layer(DynStore::new(store)), &Probe::statuses(&[202]));
        let lost = loser.spawn(by(user));
        gate.arrival().await;
        advance(Duration::from_secs(31)).await;
        let won = winner.send(by("ann")).await;
        gate.open();
        let lost = lost.await.unwrap();
        match is_allowed {
            true => drop(lost.assert_replay_of(&won)),
            false => assert_refused(&lost),
        }
    }
}

#[tokio::test(start_paused = true)]
async fn rule_35_a_response_that_was_not_kept_is_authorized_too() {
    let probe = Probe::answering(|run| {
        let mut response = run.created();
        let events = HeaderValue::from_static("text/event-stream");
        response.headers_mut().insert(header::CONTENT_TYPE, events);
        response
    });
    let api = Api::new(authorized(memory(), same_user()), &probe);
    api.send(by("ann")).await.assert_live(201);
    settle().await;
    let own = api.send(by("ann")).await;
    own.assert_problem(409, "response-not-replayable");
    assert_refused(&api.send(by("bob")).await);
}

#[tokio::test(start_paused = true)]
async fn rule_35_another_request_gets_422_without_the_hook() {
    let api = Api::new(authorized(memory(), same_user()), &Probe::counting());
    api.send(by("ann")).await.assert_run(1);
    let mismatch = api.send(by("bob").body("{}")).await;
    mismatch.assert_problem(422, "key-reused");
}

#[tokio::test(start_paused = true)]
async fn rule_35_an_operators_response_has_the_attributes_it_was_given() {
    let store = MemoryStore::new();
    let builder = authorized(DynStore::new(store.clone()), same_user());
    let api = Api::new(builder, &Probe::statuses(&[504]));
    for (key, owner) in [("K", Some("ann")), ("L", None)] {
        let ask = |user| keyed(key).header("x-user", user);
        api.send(ask("ann")).await.assert_live(504);
        let unknown = record(&store, key).await.unwrap();
        let attributes = owner.map(|owner| ("user", owner)).into_iter().collect();
        let found = RecordedResponse::new(Response::new("paid")).unwrap();
        let happened = Resolution::Happened(found.with_attributes(attributes));
        let hour = Duration::from_secs(3_600);
        let name = named(key);
        let resolved = store.resolve(&name, unknown.fence, &happened, hour);
        assert_eq!(resolved.await.unwrap(), Transitioned::Applied);
        assert_refused(&api.send(ask("bob")).await);
        let own = api.send(ask("ann")).await;
        match owner {
            Some(_) => assert_eq!((own.is_replay(), &own.body[..]), (true, &b"paid"[..])),
            None => assert_refused(&own),
        }
    }
}

#[tokio::test]
async fn rule_35_a_commit_keeps_the_attributes() {
    check(Place::sqlite().await, commit_keeps_the_attributes).await;
}

async fn commit_keeps_the_attributes(place: &Place) {
    async fn order(store: SqliteStore, operation: Operation) -> Result<Committed, CommitError> {
        let transaction = store.begin(&operation).await?;
        store.commit(&operation, transaction, "ordered").await
    }
    let address = place.address();
    let path = address.strip_prefix("sqlite:").unwrap();
    let store = SqliteStore::open(path).await.unwrap();
    let layer = authorized(store.clone(), same_user()).build().unwrap();
    let opened = store.clone();
    let handler = move |operation| order(opened.clone(), operation);
    let app = Router::new().route("/count", post(handler)).layer(layer);
    let first = send(app.clone(), by("ann")).await;
    assert_eq!(first.outcome, Some(Outcome::Recorded));
    send(app.clone(), by("ann")).await.assert_replay_of(&first);
    assert_refused(&send(app, by("bob")).await);
    store.close().await;
}

#[tokio::test(start_paused = true)]
async fn rule_35_a_panicking_hook_shows_nothing() {
    let panics: [fn() -> ReplayAuthorizer; 2] = [
        || deciding(|_, _| panic!("s3cr3t")),
        || ReplayAuthorizer::new(|_, _| async { panic!("s3cr3t") }),
    ];
    for authorizer in panics {
        let told = Told::listen();
        let api = Api::new(authorized(memory(), authorizer()), &Probe::counting());
        api.send(by("ann")).await.assert_run(1);
        let refused = api.send(by("ann")).await;
        refused.assert_problem(500, "callback-panicked");
        assert!(!refused.headers.contains_key("x-run"));
        let (events, _, text) = told.so_far();
        assert_eq!(events["callback-panicked"], 1);
        assert!(text.contains("`ReplayAuthorizer` panicked"), "{text}");
        assert!(!text.contains("s3cr3t"), "{text}");
    }
}

#[tokio::test(start_paused = true)]
async fn rule_35_a_panic_of_the_attributes_runs_nothing() {
    let (store, probe) = (MemoryStore::new(), Probe::counting());
    let authorizer = same_user().attributes(|_| panic!("s3cr3t"));
    let api = Api::new(authorized(DynStore::new(store.clone()), authorizer), &probe);
    let refused = api.send(by("ann")).await;
    refused.assert_problem(500, "callback-panicked");
    assert_eq!(probe.runs(), 0);
    assert!(record(&store, "K").await.is_none());
}

#[tokio::test(start_paused = true)]
async fn rule_35_a_hanging_hook_ends_in_503_after_its_timeout() {
    let told = Told::listen();
    let authorizer = ReplayAuthorizer::new(|_, _| pending()).timeout(Duration::from_secs(3));
    let api = Api::new(authorized(memory(), authorizer), &Probe::counting());
    api.send(by("ann")).await.assert_run(1);
    let start = Instant::now();
    let refused = api.send(by("ann")).await;
    assert_eq!(start.elapsed(), Duration::from_secs(3));
    refused.assert_problem(503, "authorization-unavailable");
    assert_eq!(refused.retry_after(), Some(1));
    let (events, counts, text) = told.so_far();
    assert_eq!(events["authorization-unavailable"], 1);
    assert_eq!(counts["authorization-unavailable"], 1);
    assert!(text.contains("raise `ReplayAuthorizer::timeout`"), "{text}");
}

#[tokio::test(start_paused = true)]
async fn rule_35_a_hook_that_cannot_decide_ends_in_503() {
    let authorizer = deciding(|_, _| ReplayDecision::Unavailable);
    let api = Api::new(authorized(memory(), authorizer), &Probe::counting());
    api.send(by("ann")).await.assert_run(1);
    let refused = api.send(by("ann")).await;
    refused.assert_problem(503, "authorization-unavailable");
}

#[tokio::test(start_paused = true)]
async fn rule_35_the_hook_is_dropped_when_the_client_leaves() {
    struct Dropped(Arc<AtomicUsize>);
    impl Drop for Dropped {
        fn drop(&mut self) {
            self.0.fetch_add(1, Ordering::SeqCst);
        }
    }
    let dropped = Arc::new(AtomicUsize::new(0));
    let authorizer = ReplayAuthorizer::new({
        let dropped = Arc::clone(&dropped);
        move |_, _| {
            let dropped = Dropped(Arc::clone(&dropped));
            async move {
                let _dropped = dropped;
                pending().await
            }
        }
    });
    let api = Api::new(authorized(memory(), authorizer), &Probe::counting());
    api.send(by("ann")).await.assert_run(1);
    let retry = api.service().oneshot(request_of(by("ann")));
    assert!(timeout(Duration::from_millis(1), retry).await.is_err());
    settle().await;
    assert_eq!(dropped.load(Ordering::SeqCst), 1);
    assert_eq!(api.layer.drain(Duration::ZERO).await.left(), 0);
}

fn request_of(ask: Ask) -> Request<Body> {
    ask.0
}

#[tokio::test(start_paused = true)]
async fn rule_35_attributes_that_are_too_large_are_not_kept() {
    let told = Told::listen();
    let authorizer = same_user().attributes(|request| {
        let large = "x".repeat(4 << 10);
        let user = user(request).unwrap_or_default();
        Attributes::new().with("user", user).with("large", large)
    });
    let api = Api::new(authorized(memory(), authorizer), &Probe::counting());
    api.send(by("ann")).await.assert_run(1);
    assert_refused(&api.send(by("ann")).await);
    let (_, _, text) = told.so_far();
    assert!(text.contains("exceed 4 KiB"), "{text}");
}

#[tokio::test(start_paused = true)]
async fn rule_75_a_refused_replay_is_one_event_and_one_count() {
    let told = Told::listen();
    let api = Api::new(authorized(memory(), same_user()), &Probe::counting());
    api.send(by("ann")).await.assert_run(1);
    assert_refused(&api.send(by("bob")).await);
    let (events, counts, text) = told.so_far();
    assert_eq!(events["replay-refused"], 1);
    assert_eq!(counts["replay-refused"], 1);
    assert!(!text.contains("bob") && !text.contains("ann"), "{text}");
}

#[tokio::test]
async fn rule_77_a_timeout_of_zero_is_refused() {
    let authorizer = same_user().timeout(Duration::ZERO);
    let fault = authorized(memory(), authorizer).build().unwrap_err();
    assert_eq!(fault.setting(), "authorize_replay");
}
