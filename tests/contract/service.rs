//! The layer as a Tower service, and its limits.

use std::{
    pin::pin,
    sync::{
        Arc,
        atomic::{AtomicBool, AtomicUsize, Ordering},
    },
    task::{Context, Poll, Wake, Waker},
    time::Duration,
};

use axum::{body::Body, response::IntoResponse as _};
use bytes::Bytes;
use http::{Method, Request, Response, StatusCode};
use http_body::Frame;
use http_body_util::{BodyExt as _, Full};
use tower::{Layer as _, Service, ServiceExt};
use tower_idempotency::{
    Disconnect, DynStore, MemoryStore, Outcome, RejectionKind, Store,
    store::{Claim, Release},
};

use crate::{
    api::{Answer, Api, Ask, ask, fingerprint, keyed, named, optional, required, send, settle},
    crowd::claimed_elsewhere,
    faulty::{Call, Fault, Faulty, overloaded},
    probe::{Failure, Gate, Handled, Probe, streamed},
    stores::memory,
};

#[test]
fn without_a_tokio_runtime_only_guarded_requests_are_refused() {
    let store = MemoryStore::new();
    let probe = Probe::counting();
    let api = Api::new(required(DynStore::new(store.clone())), &probe);
    let refused = block_on(api.send(keyed("K")));
    refused.assert_problem(500, "runtime-missing");
    assert_eq!(refused.retry_after(), None);
    assert_eq!((probe.runs(), store.len()), (0, 0));
    let passed = block_on(api.send(keyed("K").method(Method::GET)));
    passed.assert_live(201).assert_run(1);
}

/// An executor without a Tokio runtime.
fn block_on<T>(future: impl Future<Output = T>) -> T {
    struct Unpark(std::thread::Thread);

    impl Wake for Unpark {
        fn wake(self: Arc<Self>) {
            self.0.unpark();
        }
    }

    let waker = Waker::from(Arc::new(Unpark(std::thread::current())));
    let mut future = pin!(future);
    loop {
        if let Poll::Ready(done) = future.as_mut().poll(&mut Context::from_waker(&waker)) {
            return done;
        }
        std::thread::park();
    }
}

#[tokio::test]
async fn a_second_layer_on_the_same_request_passes() {
    let (outer_store, inner_store) = (MemoryStore::new(), MemoryStore::new());
    let probe = Probe::counting();
    let inner = required(DynStore::new(inner_store.clone()))
        .build()
        .unwrap();
    let outer = required(DynStore::new(outer_store.clone()))
        .build()
        .unwrap();
    let service = outer.layer(inner.layer(probe.clone()));
    let first = send(service.clone(), keyed("K")).await;
    first.assert_run(1);
    send(service.clone(), keyed("K"))
        .await
        .assert_replay_of(&first);
    assert_eq!(
        (outer_store.len(), inner_store.len(), probe.runs()),
        (1, 0, 1)
    );
}

#[tokio::test]
async fn one_service_calls_the_inner_one_that_it_made_ready() {
    let probe = Probe::counting();
    let mut service = Api::new(optional(memory()), &probe).service();
    let mut asked = async |ask: Ask| {
        let ready = ServiceExt::<Request<Body>>::ready(&mut service).await;
        Answer::of(ready.unwrap().call(ask.0).await.unwrap()).await
    };
    for (index, ask) in [keyed("K"), ask("/count"), keyed("L"), keyed("M")]
        .into_iter()
        .enumerate()
    {
        asked(ask).await.assert_run(index + 1);
    }
    assert!(asked(keyed("K")).await.is_replay());
    assert_eq!(probe.runs(), 4);
}

/// Becomes ready a number of times, over all its clones.
#[derive(Clone)]
struct ReadyFor {
    times: Arc<AtomicUsize>,
    probe: Probe,
}

impl<B> Service<Request<B>> for ReadyFor
where
    Probe: Service<Request<B>, Response = Response<Body>, Error = Failure>,
{
    type Response = Response<Body>;
    type Error = Failure;
    type Future = <Probe as Service<Request<B>>>::Future;

    fn poll_ready(&mut self, cx: &mut Context<'_>) -> Poll<Result<(), Failure>> {
        let left = self
            .times
            .fetch_update(Ordering::SeqCst, Ordering::SeqCst, |times| {
                times.checked_sub(1)
            });
        match left {
            Ok(_) => self.probe.poll_ready(cx),
            Err(_) => Poll::Ready(Err(Failure("never ready again"))),
        }
    }

    fn call(&mut self, request: Request<B>) -> Self::Future {
        self.probe.call(request)
    }
}

#[tokio::test]
async fn an_inner_service_failing_after_the_wait_frees_the_key() {
    let store = memory();
    let probe = Probe::counting();
    let layer = required(store.clone())
        .wait(Duration::from_secs(60))
        .build()
        .unwrap();
    let minute = Duration::from_secs(60);
    let claim = claimed_elsewhere(&store, "K", minute, 10 * minute).await;
    let service = layer.layer(ReadyFor {
        times: Arc::new(AtomicUsize::new(1)),
        probe: probe.clone(),
    });
    let waiter = tokio::spawn(service.oneshot(keyed("K").0));
    settle().await;
    let _ = store
        .release(&named("K"), claim.token, Release::SameRequest)
        .await
        .unwrap();
    let error = waiter.await.unwrap().err().unwrap();
    assert_eq!(error.0, "never ready again");
    assert_eq!(probe.runs(), 0);
    send(layer.layer(probe), keyed("K")).await.assert_run(1);
}

#[tokio::test]
async fn f46_an_inner_service_that_fails_before_the_call_claims_nothing() {
    let store = MemoryStore::new();
    let probe = Probe::counting();
    let layer = required(DynStore::new(store.clone())).build().unwrap();
    let failing = layer.layer(ReadyFor {
        times: Arc::default(),
        probe: probe.clone(),
    });
    let error = failing.oneshot(keyed("K").0).await.err().unwrap();
    assert_eq!(error.0, "never ready again");
    assert_eq!((probe.runs(), store.len()), (0, 0));
    send(layer.layer(probe), keyed("K")).await.assert_run(1);
}

#[tokio::test]
async fn max_in_flight_counts_runs_whose_clients_have_left() {
    let gate = Gate::closed();
    let probe = Probe::behind(&gate);
    let api = Api::new(required(memory()).max_in_flight(2), &probe);
    let owner = api.spawn(keyed("K"));
    let gone = api.spawn(keyed("L"));
    gate.arrival().await;
    gate.arrival().await;
    gone.abort();
    settle().await;
    for key in ["M", "K"] {
        let refused = api.send(keyed(key)).await;
        refused.assert_problem(503, "overloaded");
        assert!(refused.retry_after() >= Some(1));
    }
    // Both runs end, which returns their permits.
    gate.let_one_pass();
    gate.let_one_pass();
    owner.await.unwrap().assert_live(201);
    settle().await;
    gate.open();
    api.send(keyed("M")).await.assert_run(3);
    assert!(api.send(keyed("L")).await.is_replay());
}

#[tokio::test(start_paused = true)]
async fn a_late_recording_does_not_count_against_max_in_flight() {
    let faulty = Faulty::new(MemoryStore::new());
    faulty.inject(Call::Complete, 1..=5, Fault::unavailable());
    let probe = Probe::counting();
    let api = Api::new(required(DynStore::new(faulty)).max_in_flight(1), &probe);
    let first = api.send(keyed("K")).await;
    assert_eq!(first.header("idempotent-recorded"), Some("false"));
    settle().await;
    assert_eq!(api.send(keyed("L")).await.header("x-run"), Some("2"));
}

#[tokio::test]
async fn no_more_bytes_are_held_for_waiting_requests_than_allowed() {
    let store = memory();
    let probe = Probe::counting();
    let builder = required(store.clone())
        .max_request_body(100)
        .max_buffered_bytes(150)
        .max_buffered_bytes_per_scope(150)
        .wait(Duration::from_secs(60));
    let api = Api::new(builder, &probe);
    let large = || keyed("K").body("x".repeat(100));
    let claim = Claim::new(
        fingerprint(large()).await,
        Duration::from_secs(60),
        Duration::from_secs(600),
    );
    store.claim(&named("K"), &claim).await.unwrap();
    let waiter = api.spawn(large());
    settle().await;
    let refused = api.send(keyed("L").body("x".repeat(51))).await;
    refused.assert_problem(503, "overloaded");
    api.send(keyed("L").body("x".repeat(50)))
        .await
        .assert_run(1);
    let _ = store
        .release(&named("K"), claim.token, Release::SameRequest)
        .await
        .unwrap();
    waiter.await.unwrap().assert_run(2);
    api.send(keyed("M").body("x".repeat(100)))
        .await
        .assert_run(3);
}

#[tokio::test]
async fn a_body_over_both_limits_gets_413_and_not_503() {
    // A 503 would ask the client to send it again and again.
    let api = Api::new(
        required(memory())
            .max_request_body(100)
            .max_buffered_bytes(100),
        &Probe::counting(),
    );
    let (frames, body) = streamed();
    for _ in 0..2 {
        frames.send(Ok(Frame::data(vec![b'x'; 60].into()))).unwrap();
    }
    api.send(keyed("K").body(body))
        .await
        .assert_problem(413, "body-too-large");
}

#[tokio::test(start_paused = true)]
async fn a_response_is_recorded_before_its_client_is_answered() {
    let faulty = Faulty::new(MemoryStore::new());
    let gate = Gate::closed();
    faulty.inject(Call::Complete, .., Fault::Wait(gate.clone()));
    let patient = required(DynStore::new(faulty))
        .lease(Duration::from_secs(120))
        .store_timeout(Duration::from_secs(60));
    let probe = Probe::counting();
    let api = Api::new(patient, &probe);
    let owner = api.spawn(keyed("K"));
    gate.arrival().await;
    settle().await;
    assert!(!owner.is_finished());
    api.send(keyed("K"))
        .await
        .assert_problem(409, "request-in-progress");
    gate.open();
    let first = owner.await.unwrap();
    first.assert_run(1);
    api.send(keyed("K")).await.assert_replay_of(&first);
}

#[tokio::test(start_paused = true)]
async fn a_response_body_is_dropped_before_its_recording() {
    let faulty = Faulty::new(MemoryStore::new());
    let gate = Gate::closed();
    faulty.inject(Call::Complete, .., Fault::Wait(gate.clone()));
    let held = Arc::new(());
    let holds = Arc::clone(&held);
    let probe = Probe::answering(move |_| {
        let holds = Arc::clone(&holds);
        Response::new(Body::new(Body::from("done").map_frame(move |frame| {
            let _ = &holds;
            frame
        })))
    });
    let patient = required(DynStore::new(faulty))
        .lease(Duration::from_secs(120))
        .store_timeout(Duration::from_secs(60));
    let owner = Api::new(patient, &probe).spawn(keyed("K"));
    gate.arrival().await;
    // One is the test's, one the handler's for its next run.
    assert_eq!(Arc::strong_count(&held), 2);
    gate.open();
    assert_eq!(owner.await.unwrap().status, 200);
}

#[tokio::test(start_paused = true)]
async fn an_unconfirmed_slow_claim_on_a_busy_store_is_withdrawn() {
    let faulty = Faulty::new(MemoryStore::new());
    faulty.inject(Call::Claim, ..=1, Fault::Delay(Duration::from_secs(11)));
    faulty.inject(Call::Renew, ..=1, overloaded());
    let probe = Probe::counting();
    let patient = required(DynStore::new(faulty.clone())).store_timeout(Duration::from_secs(15));
    let api = Api::new(patient, &probe);
    api.send(keyed("K"))
        .await
        .assert_problem(503, "store-unavailable");
    settle().await;
    assert_eq!((probe.runs(), faulty.calls_of(Call::Release)), (0, 1));
    api.send(keyed("K")).await.assert_run(1);
}

#[tokio::test(start_paused = true)]
async fn a_slow_claim_is_confirmed_before_the_handler_starts() {
    let faulty = Faulty::new(MemoryStore::new());
    faulty.inject(Call::Claim, .., Fault::Delay(Duration::from_secs(11)));
    let calls = faulty.clone();
    let probe = Probe::answering(move |run| {
        assert_eq!(calls.calls_of(Call::Renew), 1);
        run.created()
    });
    let patient = required(DynStore::new(faulty.clone())).store_timeout(Duration::from_secs(15));
    Api::new(patient, &probe)
        .send(keyed("K"))
        .await
        .assert_run(1);
    // A quick claim is not confirmed.
    faulty.heal();
    let before = faulty.calls_of(Call::Renew);
    let quick = Api::new(required(DynStore::new(faulty.clone())), &Probe::counting());
    quick.send(keyed("L")).await.assert_run(1);
    assert_eq!(faulty.calls_of(Call::Renew), before);
}

#[tokio::test(start_paused = true)]
async fn lease_lost_resolves_when_the_lease_may_be_lost() {
    // Renewals reach the store; they fail; `max_run_time` passes.
    for (cut_off, longest, expected) in [
        (false, 900, None),
        (true, 900, Some(30)),
        (false, 60, Some(60)),
    ] {
        let faulty = Faulty::new(MemoryStore::new());
        if cut_off {
            faulty.inject(Call::Renew, .., Fault::unavailable());
        }
        let probe = Probe::running(|run| async move {
            let start = tokio::time::Instant::now();
            let lost =
                tokio::time::timeout(Duration::from_secs(300), run.operation().lease_lost()).await;
            let after = lost.ok().map(|()| start.elapsed().as_secs());
            let mut response = run.created();
            *response.body_mut() = format!("{after:?}").into();
            Ok(response)
        });
        let builder = required(DynStore::new(faulty)).max_run_time(Duration::from_secs(longest));
        let first = Api::new(builder, &probe).send(keyed("K")).await;
        // No other request took over, so its response stands.
        first.assert_live(201);
        assert_eq!(first.body, format!("{expected:?}"));
    }
}

#[tokio::test]
async fn disconnect_cancel_stops_the_handler_of_a_client_that_leaves() {
    struct Stopped(Arc<AtomicBool>);

    impl Drop for Stopped {
        fn drop(&mut self) {
            self.0.store(true, Ordering::SeqCst);
        }
    }

    let gate = Gate::closed();
    let stopped = Arc::new(AtomicBool::new(false));
    let probe = {
        let (gate, stopped) = (gate.clone(), Arc::clone(&stopped));
        Probe::running(move |run| {
            let (gate, stopped) = (gate.clone(), Stopped(Arc::clone(&stopped)));
            async move {
                gate.pass().await;
                let _ran_to_its_end = stopped;
                Handled::Ok(run.created())
            }
        })
    };
    let api = Api::new(required(memory()).disconnect(Disconnect::Cancel), &probe);
    let owner = api.spawn(keyed("K"));
    gate.arrival().await;
    assert!(!stopped.load(Ordering::SeqCst));
    owner.abort();
    settle().await;
    assert!(stopped.load(Ordering::SeqCst));
    api.send(keyed("K"))
        .await
        .assert_problem(409, "outcome-unknown");
    // A handler whose client stays runs to its end.
    gate.open();
    api.send(keyed("L")).await.assert_live(201);
    assert_eq!(probe.runs(), 2);
}

#[tokio::test(start_paused = true)]
async fn handler_whose_client_left_during_the_claim_is_not_called() {
    let faulty = Faulty::new(MemoryStore::new());
    let store = DynStore::new(faulty.clone());
    let probe = Probe::counting();
    let api = Api::new(required(store).disconnect(Disconnect::Cancel), &probe);
    let gate = Gate::closed();
    faulty.inject(Call::Claim, ..=1, Fault::WaitAfterwards(gate.clone()));
    let left = api.spawn(keyed("K"));
    gate.arrival().await;
    left.abort();
    settle().await;
    gate.open();
    settle().await;
    // The claim was withdrawn, and the key is free.
    api.send(keyed("K")).await.assert_run(1);
}

#[tokio::test]
async fn other_unsafe_methods_may_be_guarded() {
    let probe = Probe::counting();
    let api = Api::new(
        required(memory()).methods([Method::PUT, Method::DELETE]),
        &probe,
    );
    let first = api.send(keyed("K").method(Method::PUT)).await;
    api.send(keyed("K").method(Method::PUT))
        .await
        .assert_replay_of(&first);
    api.send(keyed("K").method(Method::DELETE))
        .await
        .assert_problem(422, "key-reused");
    // POST is no longer guarded.
    api.send(ask("/count")).await.assert_run(2);
}

#[tokio::test]
async fn a_function_decides_which_unsafe_requests_are_guarded() {
    let probe = Probe::counting();
    let by_path = required(memory()).guard_if(|parts| parts.uri.path().starts_with("/pay"));
    let api = Api::new(by_path, &probe);
    for method in [Method::POST, Method::PUT, Method::DELETE] {
        let asked = || ask("/pay").key(method.as_str()).method(method.clone());
        let first = api.send(asked()).await;
        api.send(asked()).await.assert_replay_of(&first);
        api.send(ask("/pay").method(method.clone()))
            .await
            .assert_problem(400, "key-missing");
        api.send(ask("/other").method(method.clone()))
            .await
            .assert_live(201);
    }
    // Safe methods are never guarded.
    let everything = Api::new(required(memory()).guard_if(|_| true), &probe);
    for _ in 0..2 {
        let answer = everything.send(keyed("K").method(Method::GET)).await;
        assert_eq!((answer.status.as_u16(), answer.outcome), (201, None));
        assert!(!answer.is_replay());
    }
}

#[tokio::test]
async fn refusals_may_have_custom_types_and_renderings() {
    let builder = required(memory()).problem_types("https://errors.test/");
    let refused = Api::new(builder, &Probe::counting())
        .send(ask("/count"))
        .await;
    assert_eq!(refused.problem()["type"], "https://errors.test/key-missing");

    let builder = required(memory()).render(|rejection, _| {
        assert!(!rejection.detail().is_empty());
        (rejection.kind() == RejectionKind::KeyMissing).then(|| {
            let body = format!(
                "{} {:?}",
                rejection.status(),
                rejection.retry_after_seconds()
            );
            let response = Response::builder().status(StatusCode::PRECONDITION_REQUIRED);
            response.body(body).unwrap()
        })
    });
    let api = Api::new(builder, &Probe::counting());
    let refused = api.send(ask("/count")).await;
    assert_eq!(
        (refused.status.as_u16(), &*refused.body),
        (428, &b"400 Bad Request None"[..])
    );
    assert_eq!(refused.header("cache-control"), Some("no-store"));
    api.send(keyed("\""))
        .await
        .assert_problem(400, "key-invalid");
}

#[tokio::test]
async fn rule_70_a_renderer_neither_sets_nor_removes_retry_after() {
    let gate = Gate::closed();
    let builder = required(memory()).render(|_, _| {
        let response = Response::builder().status(409).header("retry-after", "77");
        Some(response.body("refused").unwrap())
    });
    let api = Api::new(builder, &Probe::behind(&gate));
    let owner = api.spawn(keyed("K"));
    gate.arrival().await;
    let in_progress = api.send(keyed("K")).await;
    assert_eq!(in_progress.retry_after(), Some(1));
    let reused = api.send(keyed("K").body("{}")).await;
    assert_eq!(
        (&*reused.body, reused.retry_after()),
        (&b"refused"[..], None)
    );
    gate.open();
    owner.await.unwrap();
}

#[tokio::test]
async fn renderers_return_any_body_that_is_whole() {
    fn answered<B>(body: B) -> Option<Response<B>> {
        Some(Response::new(body))
    }
    let layer = || required(memory());
    for (builder, body) in [
        (layer().render(|_, _| answered("static")), "static"),
        (layer().render(|_, _| answered("owned".to_owned())), "owned"),
        (layer().render(|_, _| answered(())), ""),
        (
            layer().render(|_, _| answered(Full::<Bytes>::from("boxed").boxed())),
            "boxed",
        ),
        (
            layer().render(|_, _| Some(axum::Json("of axum").into_response())),
            "\"of axum\"",
        ),
    ] {
        let refused = Api::new(builder, &Probe::counting())
            .send(ask("/count"))
            .await;
        assert_eq!(
            (refused.status.as_u16(), &*refused.body),
            (200, body.as_bytes())
        );
    }
}

#[tokio::test]
async fn a_custom_renderer_sees_the_request_and_the_default_problem() {
    let probe = Probe::answering(|_| panic!("after an effect"));
    let builder = required(memory()).max_request_body(20);
    let builder = builder.problem_types("https://errors.test/");
    let builder = builder.render(|rejection, parts| {
        let mut problem = rejection.to_json();
        assert_eq!(problem["type"], rejection.problem_type());
        assert_eq!(problem["title"], rejection.title());
        problem["path"] = parts.uri.path().into();
        let response = Response::builder().status(rejection.status());
        Some(response.body(problem.to_string()).unwrap())
    });
    let api = Api::new(builder, &probe);
    let (frames, large) = streamed();
    frames.send(Ok(Frame::data("x".repeat(21).into()))).unwrap();
    // Refused for the head, for the body, after the run, and for the record.
    for (asked, status, slug) in [
        (ask("/count"), 400, "key-missing"),
        (keyed("L").body(large), 413, "body-too-large"),
        (keyed("K"), 500, "handler-panicked"),
        (keyed("K"), 409, "outcome-unknown"),
    ] {
        let refused = api.send(asked).await;
        assert_eq!(refused.status, status);
        let problem = refused.problem();
        assert_eq!(problem["type"], format!("https://errors.test/{slug}"));
        assert_eq!(problem["path"], "/count");
    }
}

#[tokio::test]
async fn a_full_store_refuses_new_keys_and_evicts_no_record() {
    let store = MemoryStore::bounded(2, 1 << 20);
    let probe = Probe::counting();
    let api = Api::new(required(DynStore::new(store.clone())), &probe);
    let first = api.send(keyed("K")).await;
    api.send(keyed("L")).await.assert_run(2);
    api.send(keyed("M"))
        .await
        .assert_problem(503, "store-unavailable");
    api.send(keyed("K")).await.assert_replay_of(&first);
    assert_eq!((probe.runs(), store.len()), (2, 2));
}

#[tokio::test(start_paused = true)]
async fn a_full_store_leaves_a_response_unrecorded_without_a_rerun() {
    let store = MemoryStore::bounded(10, 4);
    let probe = Probe::counting();
    let api = Api::new(required(DynStore::new(store)), &probe);
    let first = api.send(keyed("K")).await;
    assert_eq!(first.status, StatusCode::CREATED);
    assert_eq!(first.outcome, Some(Outcome::Unrecorded));
    assert_eq!(first.header("idempotent-recorded"), Some("false"));
    for _ in 0..5 {
        assert_eq!(api.send(keyed("K")).await.status, StatusCode::CONFLICT);
        tokio::time::sleep(Duration::from_secs(600)).await;
    }
    assert_eq!(probe.runs(), 1);
}

tokio::task_local! {
    static TENANT: &'static str;
}

#[tokio::test]
async fn handler_sees_the_task_locals_of_its_caller() {
    let probe = Probe::running(|run| async move {
        // Also after it was pending once.
        tokio::task::yield_now().await;
        let mut response = run.created();
        *response.body_mut() = TENANT.get().into();
        Ok(response)
    });
    let api = Api::new(required(memory()), &probe);
    let answer = TENANT.scope("acme-7", api.send(keyed("K"))).await;
    assert_eq!(answer.body, "acme-7");
}

#[tokio::test]
async fn a_run_whose_client_left_stays_in_its_callers_span() {
    let _subscriber = tracing::subscriber::set_default(tracing_subscriber::registry());
    let gate = Gate::closed();
    let (tell, told) = tokio::sync::oneshot::channel();
    let tell = std::sync::Mutex::new(Some(tell));
    let (at_the_gate, tell) = (gate.clone(), Arc::new(tell));
    let probe = Probe::running(move |run| {
        let (gate, tell) = (at_the_gate.clone(), Arc::clone(&tell));
        async move {
            gate.pass().await;
            let span = tracing::Span::current();
            let name = span.metadata().map(tracing::Metadata::name);
            tell.lock().unwrap().take().unwrap().send(name).unwrap();
            Ok(run.created())
        }
    });
    let api = Api::new(required(memory()), &probe);
    let span = tracing::info_span!("request");
    let request = tokio::spawn(tracing::Instrument::instrument(
        async move { api.send(keyed("K")).await },
        span,
    ));
    gate.arrival().await;
    request.abort();
    assert!(request.await.unwrap_err().is_cancelled());
    gate.open();
    assert_eq!(told.await.unwrap(), Some("request"));
}
