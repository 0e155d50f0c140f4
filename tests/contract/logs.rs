//! F110: each failure is a warning with its cause and its remedy.
//!
//! Many failures lead to a handful of events. No event shows a secret.

use std::{future::pending, ops::Deref, thread, time::Duration};

use axum::{Router, body::Body, routing::post};
use http::{HeaderValue, Response, header};
use http_body_util::BodyExt as _;
use tokio::{
    io::copy_bidirectional,
    net::{TcpListener, TcpStream},
    task::JoinSet,
};
use tower::{Layer as _, ServiceExt as _};
use tower_idempotency::{
    Disconnect, Dispositions, DynStore, Fingerprinting, IdempotencyBuilder, IdempotencyLayer,
    KeySyntax, MemoryStore, Operation, PostgresStore, Reconciler, Recovery, Scope, Store as _,
    StoreFailure, Sweeper,
    sqlx::postgres::{PgConnectOptions, PgSslMode},
    store::{
        Claim, Claimed, Completion, Transitioned,
        admin::{RecordedResponse, Resolution},
    },
};

use crate::{
    api::{Answer, Api, Ask, ask, fingerprint, required, send, settle},
    faulty::{Call, Fault, Faulty, corrupt, full, overloaded},
    probe::{Failure, Gate, Probe, breaking_after, chunks_and_trailers, data, streamed},
    stores::{Place, check, memory, run},
    told::{Event, Told},
};

/// Events and metrics, none of which may show a secret.
struct Log(Told);

impl Log {
    fn listen() -> Self {
        Self(Told::listen())
    }

    /// The only warning whose message has this part.
    #[track_caller]
    fn only(&self, part: &str) -> Event {
        let mut found = self.all(part);
        assert_eq!(found.len(), 1, "{part:?} in {:#?}", self.warnings());
        found.remove(0)
    }

    fn all(&self, part: &str) -> Vec<Event> {
        let mut warnings = self.warnings();
        warnings.retain(|event| event.message().contains(part));
        warnings
    }
}

impl Deref for Log {
    type Target = Told;

    fn deref(&self) -> &Told {
        &self.0
    }
}

impl Drop for Log {
    fn drop(&mut self) {
        if thread::panicking() {
            return;
        }
        let (_, _, text) = self.so_far();
        for secret in ["s3cr3t", "k3y", "acct", "b0dy", "answ3r"] {
            assert!(!text.contains(secret), "{secret} in {text}");
        }
    }
}

trait Says {
    fn says(&self, field: &str, part: &str) -> &Self;
    fn names_an_operation(&self) -> &Self;
}

impl Says for Event {
    #[track_caller]
    fn says(&self, field: &str, part: &str) -> &Self {
        assert!(self.field(field).contains(part), "{part:?} in {self:#?}");
        self
    }

    #[track_caller]
    fn names_an_operation(&self) -> &Self {
        assert_eq!(self.field("operation").len(), 32, "{self:#?}");
        self
    }
}

/// A request with secrets in each of its parts.
fn secret(key: &str) -> Ask {
    ask("/count")
        .key(&format!("k3y-s3cr3t-{key}"))
        .from("acct-s3cr3t")
        .body("{\"b0dy\":\"s3cr3t\"}")
}

fn name(key: &str) -> tower_idempotency::RecordName {
    let key = tower_idempotency::Key::new(format!("k3y-s3cr3t-{key}"));
    tower_idempotency::RecordName::new(Scope::new("acct-s3cr3t").unwrap(), key)
}

/// Claims the key of this request, as a process that has crashed since.
async fn claimed(store: &DynStore, key: &str, lease: Duration) -> Claim {
    let print = fingerprint(ask("/count").key("K").body("{\"b0dy\":\"s3cr3t\"}")).await;
    let claim = Claim::new(print, lease, HOUR);
    let claimed = store.claim(&name(key), &claim).await.unwrap();
    assert!(matches!(claimed, Claimed::Acquired(_)));
    claim
}

fn broken(call: Call, fault: Fault) -> (Faulty<MemoryStore>, DynStore) {
    let faulty = Faulty::new(MemoryStore::new());
    faulty.inject(call, .., fault);
    (faulty.clone(), DynStore::new(faulty))
}

fn answering() -> Probe {
    Probe::answering(|run| {
        let mut response = run.created();
        *response.body_mut() = "answ3r-s3cr3t".into();
        response
    })
}

const CLAIM_FAILED: &str = "claim failed, request refused with 503";

// Stores that fail.

#[tokio::test]
async fn f110_a_missing_table_is_logged_with_its_remedy() {
    check(Place::postgres_without_tables().await, async |place| {
        let log = Log::listen();
        let api = Api::new(required(place.open().await), &Probe::counting());
        api.send(secret("K"))
            .await
            .assert_problem(503, "store-unavailable");
        let event = log.only(CLAIM_FAILED);
        event
            .says("kind", "unavailable")
            .says("error", "42P01")
            .says("error", "call `PostgresStore::migrate`");
    })
    .await;
}

#[tokio::test]
async fn f110_missing_privileges_are_logged_with_the_grants() {
    check(Place::postgres().await, async |place| {
        let log = Log::listen();
        let role = format!("contract_{:016x}", rand::random::<u64>());
        run(&place.address(), format!("CREATE ROLE {role} LOGIN")).await;
        let options: PgConnectOptions = place.address().parse().unwrap();
        let store = PostgresStore::builder(options.username(&role))
            .connect()
            .await;
        let store = store.unwrap();
        let api = Api::new(required(DynStore::new(store.clone())), &Probe::counting());
        let refused = api.send(secret("K")).await;
        store.close().await;
        run(&place.address(), format!("DROP ROLE {role}")).await;
        refused.assert_problem(503, "store-unavailable");
        log.only(CLAIM_FAILED)
            .says("kind", "unavailable")
            .says("error", "42501")
            .says("error", "GRANT SELECT, INSERT, UPDATE, DELETE ON TABLE")
            .says("error", &role);
    })
    .await;
}

#[tokio::test]
async fn f110_a_dead_database_is_logged() {
    check(Place::postgres().await, async |place| {
        let log = Log::listen();
        let options: PgConnectOptions = place.address().parse().unwrap();
        let server = (options.get_host().to_owned(), options.get_port());
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let port = listener.local_addr().unwrap().port();
        let network = tokio::spawn(async move {
            let mut connections = JoinSet::new();
            loop {
                let (mut client, _) = listener.accept().await.unwrap();
                let mut server = TcpStream::connect(server.clone()).await.unwrap();
                connections
                    .spawn(async move { copy_bidirectional(&mut client, &mut server).await });
            }
        });
        let options = options
            .host("127.0.0.1")
            .port(port)
            .ssl_mode(PgSslMode::Disable);
        let store = PostgresStore::builder(options)
            .acquire_timeout(Duration::from_millis(500))
            .connect()
            .await
            .unwrap();
        let api = Api::new(required(DynStore::new(store.clone())), &Probe::counting());
        api.send(secret("K")).await.assert_live(201);
        // From now on connections are refused.
        network.abort();
        let _ = network.await;
        api.send(secret("L"))
            .await
            .assert_problem(503, "store-unavailable");
        log.only(CLAIM_FAILED)
            .says("kind", "unavailable")
            .says("error", "cannot connect to 127.0.0.1")
            .says("error", "refused");
        store.close().await;
    })
    .await;
}

#[tokio::test(start_paused = true)]
async fn f110_each_kind_of_failing_store_is_logged() {
    for (fault, kind, hint) in [
        (Fault::unavailable(), "unavailable", ""),
        (Fault::Hang, "timed-out", ""),
        (full(), "full", "Sweeper"),
        (corrupt(), "corrupt", "forget"),
        (overloaded(), "overloaded", "waiting_calls"),
    ] {
        let log = Log::listen();
        let (_, store) = broken(Call::Claim, fault);
        let api = Api::new(required(store), &Probe::counting());
        api.send(secret("K"))
            .await
            .assert_problem(503, "store-unavailable");
        let event = log.only(CLAIM_FAILED);
        event.says("hint", hint).says("error", "store");
        assert_eq!(event.field("kind"), kind);
        assert_eq!(event.field("suppressed"), "0");
    }
}

#[tokio::test(start_paused = true)]
async fn f110_a_full_memory_store_names_its_limit() {
    let log = Log::listen();
    let store = DynStore::new(MemoryStore::bounded(1, 1 << 20));
    let api = Api::new(required(store), &answering());
    api.send(secret("K")).await.assert_live(201);
    api.send(secret("L"))
        .await
        .assert_problem(503, "store-unavailable");
    log.only(CLAIM_FAILED)
        .says("error", "bound on records")
        .says("hint", "Sweeper");
}

#[tokio::test(start_paused = true)]
async fn f110_an_unreadable_response_is_logged_by_its_operation() {
    let log = Log::listen();
    let store = memory();
    let claim = claimed(&store, "K", HOUR).await;
    let garbage = Completion::new("answ3r-s3cr3t".into(), HOUR, HOUR);
    let completed = store.complete(&name("K"), claim.token, &garbage).await;
    assert_eq!(completed.unwrap(), Transitioned::Applied);
    let api = Api::new(required(store), &Probe::counting());
    api.send(secret("K"))
        .await
        .assert_problem(503, "store-unavailable");
    log.only("record not readable, request refused with 503")
        .says("kind", "corrupt")
        .says("error", "not a recorded response")
        .says("hint", "forget")
        .says("operation", &claim.operation.to_string());
    assert_eq!(log.so_far().0["corrupt"], 1);
}

#[tokio::test(start_paused = true)]
async fn f110_a_claim_that_succeeds_at_last_is_logged() {
    let log = Log::listen();
    let faulty = Faulty::new(MemoryStore::new());
    faulty.inject(Call::Claim, ..=1, Fault::unavailable());
    let api = Api::new(required(DynStore::new(faulty)), &answering());
    api.send(secret("K")).await.assert_live(201);
    log.only("claim failed and was tried again")
        .says("error", "injected by a test");
}

#[tokio::test(start_paused = true)]
async fn f110_a_contended_claim_is_logged() {
    let log = Log::listen();
    let (_, store) = broken(Call::Claim, Fault::Vanish);
    let api = Api::new(required(store), &Probe::counting());
    api.send(secret("K"))
        .await
        .assert_problem(503, "store-unavailable");
    log.only(CLAIM_FAILED).says("message", "changed");
}

#[tokio::test(start_paused = true)]
async fn f110_an_unguarded_run_is_logged_with_its_cause() {
    let log = Log::listen();
    let (_, store) = broken(Call::Claim, Fault::unavailable());
    let open = required(store).store_failure(StoreFailure::RunUnguarded);
    Api::new(open, &answering()).send(secret("K")).await;
    log.only("claim failed, request runs unguarded")
        .says("kind", "unavailable");
    assert_eq!(log.so_far().0["unguarded"], 1);
}

#[tokio::test(start_paused = true)]
async fn f110_a_failed_withdrawal_is_logged_until_it_is_given_up() {
    let log = Log::listen();
    let faulty = Faulty::new(MemoryStore::new());
    faulty.inject_all(Fault::unavailable());
    let api = Api::new(required(DynStore::new(faulty)), &Probe::counting());
    api.send(secret("K"))
        .await
        .assert_problem(503, "store-unavailable");
    tokio::time::sleep(HOUR).await;
    let failed = log.all("withdrawal of a claim failed");
    failed[0].says("error", "injected by a test");
    log.only("withdrawal of a claim given up")
        .says("notice", "gave-up-withdrawing")
        .says("error", "injected by a test")
        .says("message", "`late_recording_timeout`")
        .says("hint", "resolve");
}

#[tokio::test(start_paused = true)]
async fn f110_a_store_that_panics_fails_and_is_logged() {
    let log = Log::listen();
    let (faulty, store) = broken(Call::Claim, Fault::Panic("s3cr3t"));
    let api = Api::new(required(store), &answering());
    api.send(secret("K"))
        .await
        .assert_problem(503, "store-unavailable");
    log.only(CLAIM_FAILED).says("error", "the store panicked");
    faulty.heal();
    faulty.inject(Call::Complete, ..=2, Fault::Panic("s3cr3t"));
    let first = api.send(secret("L")).await;
    assert_eq!(first.header("idempotent-recorded"), Some("false"));
    tokio::time::sleep(Duration::from_secs(60)).await;
    assert!(api.send(secret("L")).await.is_replay());
}

#[tokio::test(start_paused = true)]
async fn f110_a_lapsed_lease_that_cannot_be_marked_is_logged() {
    let log = Log::listen();
    let (_, store) = broken(Call::MarkUnknown, Fault::unavailable());
    let claim = claimed(&store, "K", Duration::from_millis(1)).await;
    tokio::time::sleep(Duration::from_secs(1)).await;
    let api = Api::new(required(store), &Probe::counting());
    api.send(secret("K"))
        .await
        .assert_problem(409, "outcome-unknown");
    log.only("recording failed of a lapsed lease")
        .says("error", "injected by a test")
        .says("operation", &claim.operation.to_string());
}

#[tokio::test(start_paused = true)]
async fn f110_a_waiter_that_cannot_read_is_logged() {
    let log = Log::listen();
    let (_, store) = broken(Call::Read, Fault::unavailable());
    claimed(&store, "K", HOUR).await;
    let waits = required(store).wait(Duration::from_secs(10));
    let api = Api::new(waits, &Probe::counting());
    api.send(secret("K"))
        .await
        .assert_problem(409, "request-in-progress");
    let events = log.all("record not readable, the request goes on waiting");
    events[0].says("error", "injected by a test");
}

#[tokio::test(start_paused = true)]
async fn f110_a_loser_that_cannot_read_the_winner_is_logged() {
    let log = Log::listen();
    let (faulty, store) = broken(Call::Read, Fault::unavailable());
    let gate = Gate::closed();
    let api = Api::new(required(store.clone()), &Probe::behind(&gate));
    let running = api.spawn(secret("K"));
    gate.arrival().await;
    faulty.heal();
    let record = store.read(&name("K")).await.unwrap().unwrap();
    let _ = store.forget(&name("K"), record.fence).await.unwrap();
    faulty.inject(Call::Read, .., Fault::unavailable());
    gate.open();
    let answer = running.await.unwrap();
    answer.assert_problem(503, "store-unavailable");
    let detail = answer.problem()["detail"].as_str().unwrap().to_owned();
    assert!(!detail.contains("nothing ran"), "{detail}");
    log.only("record not readable after the run")
        .says("error", "injected by a test");
    log.only("a run has lost its key")
        .says("notice", "superseded")
        .says("operation", &record.operation.to_string());
}

// Outcomes that cannot be recorded, and leases that cannot be kept.

#[tokio::test(start_paused = true)]
async fn f110_late_recording_is_logged_with_its_cause() {
    let log = Log::listen();
    let (faulty, store) = broken(Call::Complete, Fault::unavailable());
    let api = Api::new(required(store), &answering());
    api.send(secret("K")).await;
    log.only("recording of an outcome failed")
        .says("error", "injected by a test")
        .names_an_operation();
    faulty.heal();
    tokio::time::sleep(Duration::from_secs(60)).await;
    let (told, _, _) = log.so_far();
    assert_eq!((told["unrecorded"], told["recorded-late"]), (1, 1));
    assert!(log.all("given up").is_empty());
}

#[tokio::test(start_paused = true)]
async fn f110_giving_up_late_recording_is_logged_with_its_cause() {
    let log = Log::listen();
    let (_, store) = broken(Call::Complete, Fault::unavailable());
    let minute = Duration::from_secs(60);
    let builder = required(store)
        .late_recording_timeout(minute)
        .max_late_recording_bytes(1 << 20);
    Api::new(builder, &answering()).send(secret("K")).await;
    tokio::time::sleep(2 * minute).await;
    log.only("recording of an outcome given up")
        .says("notice", "gave-up-recording")
        .says("message", "within `late_recording_timeout`")
        .says("error", "injected by a test")
        .says("hint", "resolve")
        .names_an_operation();
}

#[tokio::test(start_paused = true)]
async fn f110_too_many_late_outcomes_name_the_setting() {
    let log = Log::listen();
    let (_, store) = broken(Call::Complete, Fault::unavailable());
    let of_one_byte = required(store.clone())
        .late_recording_timeout(HOUR)
        .max_late_recording_bytes(1);
    Api::new(of_one_byte, &answering()).send(secret("K")).await;
    let one_at_a_time = required(store).max_in_flight(1);
    let api = Api::new(one_at_a_time, &answering());
    for key in ["L", "M"] {
        api.send(secret(key)).await;
        settle().await;
    }
    for setting in ["`max_late_recording_bytes`", "`max_in_flight`"] {
        let event = log.only(setting);
        event.says("notice", "gave-up-recording");
    }
}

#[tokio::test(start_paused = true)]
async fn f110_a_failing_renewal_and_a_lapsed_lease_are_logged() {
    let log = Log::listen();
    let (_, store) = broken(Call::Renew, Fault::unavailable());
    let probe = Probe::running(|run| async move {
        tokio::time::sleep(Duration::from_secs(40)).await;
        Ok(run.created())
    });
    let api = Api::new(required(store), &probe);
    api.send(secret("K")).await.assert_live(201);
    let renewals = log.all("renewal of a lease failed");
    assert!((3..=7).contains(&renewals.len()), "{renewals:?}");
    renewals[0]
        .says("error", "injected by a test")
        .names_an_operation();
    log.only("lease lapsed without a renewal")
        .says("message", "`lease_lost()`")
        .says("operation", renewals[0].field("operation"));
}

#[tokio::test(start_paused = true)]
async fn f110_a_renewal_that_panics_loses_the_lease_in_time() {
    let log = Log::listen();
    let (_, store) = broken(Call::Renew, Fault::Panic("s3cr3t"));
    let probe = Probe::running(|run| async move {
        run.operation().lease_lost().await;
        Ok(run.created())
    });
    let api = Api::new(required(store), &probe);
    let answer = tokio::time::timeout(Duration::from_secs(60), api.send(secret("K"))).await;
    answer
        .expect("`lease_lost()` did not resolve")
        .assert_live(201);
    log.only("lease lapsed without a renewal");
}

#[tokio::test(start_paused = true)]
async fn f110_a_run_longer_than_allowed_is_logged() {
    let log = Log::listen();
    let minute = Duration::from_secs(60);
    let probe = Probe::running(move |run| async move {
        tokio::time::sleep(2 * minute).await;
        Ok(run.created())
    });
    let builder = required(memory()).max_run_time(minute);
    Api::new(builder, &probe).send(secret("K")).await;
    log.only("run takes longer than `max_run_time`")
        .names_an_operation();
}

#[tokio::test(start_paused = true)]
async fn f110_a_sweeper_logs_failures_and_keeps_running() {
    for (fault, message) in [
        (Fault::unavailable(), "sweep failed"),
        (Fault::Panic("s3cr3t"), "sweep panicked"),
    ] {
        let log = Log::listen();
        let faulty = Faulty::new(MemoryStore::new());
        faulty.inject(Call::PurgeExpired, ..=3, fault);
        let sweeper = Sweeper::new(DynStore::new(faulty));
        let sweeper = sweeper.every(Duration::from_secs(1)).spawn();
        tokio::time::sleep(Duration::from_secs(30)).await;
        let report = sweeper.stop().await;
        assert_eq!(report.failures, 3, "{message}");
        assert!(report.sweeps > 3, "{message}");
        let event = log.only(message);
        if message == "sweep failed" {
            event.says("error", "injected by a test");
        }
    }
}

// Requests that are refused.

#[tokio::test(start_paused = true)]
async fn f110_an_unknown_caller_is_logged_with_its_remedy() {
    let log = Log::listen();
    let api = Api::new(required(memory()), &Probe::counting());
    api.send(secret("K").without("x-account"))
        .await
        .assert_problem(403, "caller-unknown");
    log.only("scope function returned None")
        .says("message", "authentication must stand outside");
}

#[tokio::test(start_paused = true)]
async fn f110_overload_names_the_setting() {
    let log = Log::listen();
    let gate = Gate::closed();
    let api = Api::new(required(memory()).max_in_flight(1), &Probe::behind(&gate));
    let running = api.spawn(secret("K"));
    gate.arrival().await;
    api.send(secret("L"))
        .await
        .assert_problem(503, "overloaded");
    log.only("`max_in_flight`");
    gate.open();
    running.await.unwrap();

    let builder = required(memory())
        .max_request_body(100)
        .max_buffered_bytes(100);
    let api = Api::new(builder, &Probe::counting());
    let (frames, body) = streamed();
    frames
        .send(Ok(data("s3cr3t-b0dy".repeat(8).leak())))
        .unwrap();
    let uploading = api.spawn(secret("K").body(body));
    settle().await;
    api.send(secret("L").body("s3cr3t-b0dy".repeat(8)))
        .await
        .assert_problem(503, "overloaded");
    log.only("`max_buffered_bytes`");
    drop(frames);
    uploading.await.unwrap();
}

#[tokio::test(start_paused = true)]
async fn f110_an_unknown_fingerprint_names_the_setting() {
    let log = Log::listen();
    let store = memory();
    let earlier = Fingerprinting::bytes().header(header::CONTENT_LANGUAGE);
    let before = required(store.clone()).fingerprint(earlier);
    Api::new(before, &answering()).send(secret("K")).await;
    let api = Api::new(required(store), &Probe::counting());
    api.send(secret("K"))
        .await
        .assert_problem(503, "store-unavailable");
    log.only("`earlier_fingerprint`");
}

#[tokio::test(start_paused = true)]
async fn f110_draining_is_logged() {
    let log = Log::listen();
    let api = Api::new(required(memory()), &Probe::counting());
    let _ = api.layer.drain(Duration::from_secs(1)).await;
    api.send(secret("K")).await.assert_problem(503, "draining");
    log.only("`drain` was called");
}

#[tokio::test]
async fn f110_an_operation_without_a_layer_is_logged() {
    let log = Log::listen();
    let app: Router = Router::new().route("/count", post(async |_: Operation| "ran"));
    let response = app.oneshot(secret("K").0).await.unwrap();
    assert_eq!(response.status(), 500);
    log.only("`Operation` not extracted")
        .says("message", "`Option<Operation>`");
}

// Functions of the application that panic.

#[tokio::test(start_paused = true)]
async fn f110_each_panic_of_the_application_is_logged() {
    type Set = fn(IdempotencyBuilder<DynStore>) -> IdempotencyBuilder<DynStore>;
    let functions: [(&str, Set); 5] = [
        ("`guard_if`", |layer| layer.guard_if(|_| panic!("s3cr3t"))),
        ("key validator", |layer| {
            layer.key_syntax(KeySyntax::compat().validate(|_| panic!("s3cr3t")))
        }),
        ("fingerprint function", |layer| {
            let panics = Fingerprinting::custom("test", |_, _| panic!("s3cr3t"));
            layer.fingerprint(panics)
        }),
        ("`Dispositions::by`", |layer| {
            layer.dispositions(Dispositions::standard().by(|_| panic!("s3cr3t")))
        }),
        ("`render`", |layer| {
            layer.render::<String>(|_, _| panic!("s3cr3t"))
        }),
    ];
    for (function, set) in functions {
        let log = Log::listen();
        let api = Api::new(set(required(memory())), &Probe::counting());
        let ask = match function {
            "`render`" => secret("K").key("\"s3cr3t"),
            _ => secret("K"),
        };
        api.send(ask).await.assert_problem(500, "callback-panicked");
        log.only(function).says("message", "panicked");
    }
    let log = Log::listen();
    let layer = IdempotencyLayer::required(memory(), |_| panic!("s3cr3t"));
    let service = layer.build().unwrap().layer(Probe::counting());
    send(service, secret("K"))
        .await
        .assert_problem(500, "callback-panicked");
    log.only("scope function");
}

#[tokio::test(start_paused = true)]
async fn f110_a_panic_of_handler_or_body_is_logged() {
    let probe = Probe::answering(|run| {
        if run.number == 1 {
            panic!("s3cr3t");
        }
        let (parts, body) = run.created().into_parts();
        Response::from_parts(parts, Body::new(body.map_frame(|_| panic!("s3cr3t"))))
    });
    for key in ["K", "L"] {
        let log = Log::listen();
        let api = Api::new(required(memory()), &probe);
        api.send(secret(key))
            .await
            .assert_problem(500, "handler-panicked");
        log.only("panicked").names_an_operation();
        assert_eq!(log.so_far().0["unknown"], 1);
    }
}

#[tokio::test(start_paused = true)]
async fn f110_a_rendering_that_cannot_be_sent_is_logged() {
    let log = Log::listen();
    let builder = required(memory()).render(|_, _| {
        let mut response = Response::<String>::default();
        *response.status_mut() = http::StatusCode::TOO_MANY_REQUESTS;
        Some(response)
    });
    let api = Api::new(builder, &Probe::counting());
    api.send(secret("K").without("x-account"))
        .await
        .assert_problem(403, "caller-unknown");
    log.only("response of `render` not used");
}

#[tokio::test(start_paused = true)]
async fn f110_a_rendering_that_is_not_whole_is_logged() {
    let trailers = || {
        let sum = HeaderValue::from_static("5d41");
        chunks_and_trailers(
            &["a"],
            [("x-sum".parse().unwrap(), sum)].into_iter().collect(),
        )
    };
    let pending = || {
        let (frames, body) = streamed();
        std::mem::forget(frames);
        body
    };
    let renderers: [fn() -> Body; 3] = [pending, trailers, || breaking_after(&["a"])];
    for body in renderers {
        let log = Log::listen();
        let builder = required(memory()).render(move |_, _| Some(Response::new(body())));
        let api = Api::new(builder, &Probe::counting());
        api.send(secret("K").without("x-account"))
            .await
            .assert_problem(403, "caller-unknown");
        log.only("its body is not ready as a whole");
    }
}

#[tokio::test(start_paused = true)]
async fn f110_a_reconciler_that_fails_is_logged() {
    fn reconciler(which: &'static str) -> Reconciler {
        Reconciler::new(move |_| async move {
            match which {
                "panics" => panic!("s3cr3t"),
                "hangs" => pending().await,
                _ => {
                    let response = RecordedResponse::new(Response::new("answ3r-s3cr3t"));
                    Some(Resolution::Happened(response.unwrap()))
                }
            }
        })
    }
    for (which, message) in [
        ("panics", "`Reconciler` panicked"),
        ("hangs", "`Reconciler` took longer than `max_run_time`"),
        (
            "happened",
            "recording failed of what a `Reconciler` found out",
        ),
    ] {
        let (_, store) = broken(Call::Complete, Fault::unavailable());
        let log = Log::listen();
        let asks = required(store).recovery(Recovery::Reconcile(reconciler(which)));
        let api = Api::new(asks, &Probe::statuses(&[504]));
        api.send(secret("K")).await.assert_live(504);
        log.only("handler answered with a status or a disposition")
            .names_an_operation()
            .says("message", "`resolve`");
        api.send(secret("K"))
            .await
            .assert_problem(409, "outcome-unknown");
        log.only(message).names_an_operation();
    }
}

// Responses that cannot be kept.

#[tokio::test(start_paused = true)]
async fn f110_a_response_that_breaks_is_logged() {
    let log = Log::listen();
    let probe = Probe::answering(|run| {
        let mut response = run.created();
        *response.body_mut() = breaking_after(&["answ3r-s3cr3t"]);
        if run.number == 2 {
            let stream = HeaderValue::from_static("text/event-stream");
            response.headers_mut().insert(header::CONTENT_TYPE, stream);
        }
        response
    });
    let api = Api::new(required(memory()), &probe);
    for key in ["K", "L"] {
        let response = api.respond(secret(key).0).await.unwrap();
        assert!(response.into_body().collect().await.is_err());
        settle().await;
    }
    log.only("response body broke off").names_an_operation();
    log.only("sent as it came broke off")
        .says("notice", "stream-broken")
        .names_an_operation();
}

#[tokio::test(start_paused = true)]
async fn f110_an_inner_service_that_fails_is_logged() {
    let log = Log::listen();
    let probe = Probe::running(async |_| Err(Failure("s3cr3t")));
    let api = Api::new(required(memory()), &probe);
    assert!(api.respond(secret("K").0).await.is_err());
    log.only("inner service failed").names_an_operation();
}

#[tokio::test(start_paused = true)]
async fn f110_a_response_with_too_large_headers_is_logged() {
    let log = Log::listen();
    let probe = Probe::answering(|run| {
        let mut response = run.created();
        let large = HeaderValue::try_from("s3cr3t".repeat(20_000)).unwrap();
        response.headers_mut().insert("x-large", large);
        response
    });
    let api = Api::new(required(memory()).max_response_body(1_000), &probe);
    api.send(secret("K")).await.assert_live(201);
    api.send(secret("K"))
        .await
        .assert_problem(409, "response-not-replayable");
    log.only("headers and body exceed `max_response_body`");
}

#[tokio::test(start_paused = true)]
async fn f110_a_handler_stopped_with_its_client_is_logged() {
    let log = Log::listen();
    let gate = Gate::closed();
    let stops = required(memory()).disconnect(Disconnect::Cancel);
    let api = Api::new(stops, &Probe::behind(&gate));
    let client = api.spawn(secret("K"));
    gate.arrival().await;
    client.abort();
    settle().await;
    log.only("`Disconnect::Cancel` stopped the handler")
        .names_an_operation();
}

#[tokio::test(start_paused = true)]
async fn f110_an_unknown_outcome_that_expires_is_logged() {
    let log = Log::listen();
    let minute = Duration::from_secs(60);
    let builder = required(memory()).unknown_retention(minute);
    let api = Api::new(builder, &Probe::statuses(&[504, 201]));
    api.send(secret("K")).await.assert_live(504);
    tokio::time::sleep(2 * minute).await;
    api.send(secret("K")).await.assert_run(2);
    log.only("expired while its outcome was unknown")
        .says("notice", "unknown-expired")
        .says("hint", "`unknown_retention`");
}

// Floods.

#[tokio::test(start_paused = true)]
async fn f110_a_thousand_refusals_are_a_handful_of_events() {
    let log = Log::listen();
    let faulty = Faulty::new(MemoryStore::new());
    faulty.inject_all(Fault::unavailable());
    let api = Api::new(required(DynStore::new(faulty)), &Probe::counting());
    let mut asked = JoinSet::new();
    for number in 0..1_000 {
        let api = api.clone();
        asked.spawn(async move { api.send(secret(&number.to_string())).await });
    }
    let answers: Vec<Answer> = asked.join_all().await;
    assert!(answers.iter().all(|answer| answer.status == 503));
    assert!(log.warnings().len() < 10, "{:#?}", log.warnings());
    assert_eq!(log.so_far().0["store-unavailable"], 1_000);
    let before = log.all(CLAIM_FAILED).len();
    tokio::time::sleep(Duration::from_secs(6)).await;
    api.send(secret("next")).await;
    let events = log.all(CLAIM_FAILED);
    let suppressed: usize = events
        .iter()
        .map(|event| event.field("suppressed").parse::<usize>().unwrap())
        .sum();
    assert_eq!(suppressed + events.len(), 1_001);
    assert!(events.len() > before);
}

#[tokio::test(start_paused = true)]
async fn f110_a_thousand_unknown_outcomes_are_one_warning() {
    let log = Log::listen();
    let api = Api::new(required(memory()), &Probe::statuses(&[504]));
    for number in 0..1_000 {
        api.send(secret(&number.to_string())).await.assert_live(504);
    }
    assert_eq!(log.warnings().len(), 1, "{:#?}", log.warnings());
    // Each operation is an event of its own.
    assert_eq!(log.so_far().0["unknown"], 1_000);
    tokio::time::sleep(Duration::from_secs(6)).await;
    api.send(secret("next")).await;
    let last = log.warnings().pop().unwrap();
    assert_eq!(last.field("suppressed"), "999");
}

#[tokio::test(start_paused = true)]
async fn f110_a_thousand_notices_are_one_warning() {
    let log = Log::listen();
    let (_, store) = broken(Call::Complete, Fault::unavailable());
    let builder = required(store)
        .late_recording_timeout(Duration::from_secs(1))
        .max_late_recording_bytes(1 << 20);
    let api = Api::new(builder, &answering());
    for number in 0..1_000 {
        api.send(secret(&number.to_string())).await;
    }
    tokio::time::sleep(Duration::from_secs(4)).await;
    assert!(log.warnings().len() < 10, "{:#?}", log.warnings());
    log.only("recording of an outcome given up");
    assert_eq!(log.so_far().0["gave-up-recording"], 1_000);
}

#[tokio::test(start_paused = true)]
async fn f110_kinds_of_failures_do_not_suppress_one_another() {
    let log = Log::listen();
    let faulty = Faulty::new(MemoryStore::new());
    let store = DynStore::new(faulty.clone());
    let api = Api::new(required(store), &Probe::counting());
    for fault in [full(), corrupt(), overloaded()] {
        faulty.heal();
        faulty.inject(Call::Claim, .., fault);
        for _ in 0..2 {
            api.send(secret("K")).await;
        }
    }
    let kinds: Vec<_> = log
        .warnings()
        .iter()
        .map(|e| e.field("kind").to_owned())
        .collect();
    assert_eq!(kinds, ["full", "corrupt", "overloaded"]);
    // Another layer has its own limits.
    let other = Api::new(required(DynStore::new(faulty)), &Probe::counting());
    other.send(secret("K")).await;
    assert_eq!(log.warnings().len(), 4);
}

#[tokio::test(start_paused = true)]
async fn rule_75_a_layer_describes_each_metric_it_counts() {
    let log = Log::listen();
    let store = MemoryStore::new();
    let broken = Probe::answering(|_| Response::new(breaking_after(&["s3cr3t"])));
    let streaming = required(DynStore::new(store.clone())).max_response_body(1);
    let api = Api::new(streaming, &broken);
    let first = api.respond(secret("K").0).await.unwrap();
    first.into_body().collect().await.unwrap_err();
    settle().await;
    let names = ["idempotency_notices_total", "idempotency_requests_total"];
    assert_eq!(log.described(), Ok(names.map(str::to_owned).into()));
}

#[tokio::test(start_paused = true)]
async fn rule_75_a_sweeper_without_a_layer_describes_its_metric() {
    let store = MemoryStore::new();
    let api = Api::new(required(DynStore::new(store.clone())), &Probe::counting());
    api.send(secret("K")).await;
    let log = Log::listen();
    let sweeper = Sweeper::new(store).every(25 * HOUR).spawn();
    tokio::time::sleep(30 * HOUR).await;
    assert_eq!(sweeper.stop().await.removed, 1);
    let names = ["idempotency_swept_total".to_owned()];
    assert_eq!(log.described(), Ok(names.into()));
}

const HOUR: Duration = Duration::from_secs(3600);
