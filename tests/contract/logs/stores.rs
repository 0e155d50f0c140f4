//! Stores that fail.

use std::time::Duration;

use tokio::{
    io::copy_bidirectional,
    net::{TcpListener, TcpStream},
    task::JoinSet,
};
use tower_idempotency::{
    DynStore, Fingerprinting, MemoryStore, PostgresStore, Store as _, StoreFailure,
    sqlx::postgres::{PgConnectOptions, PgSslMode},
    store::{Completion, Transitioned},
};

use super::{CLAIM_FAILED, HOUR, Log, Says, answering, broken, claimed, name, secret};
use crate::{
    api::{Api, required},
    databases::run,
    faulty::{Call, Fault, Faulty, corrupt, full, overloaded},
    probe::{Gate, Probe},
    stores::{Place, check, memory},
};

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
        run(&place.address(), &format!("CREATE ROLE {role} LOGIN")).await;
        let options: PgConnectOptions = place.address().parse().unwrap();
        let store = PostgresStore::builder(options.username(&role))
            .connect()
            .await;
        let store = store.unwrap();
        let api = Api::new(required(DynStore::new(store.clone())), &Probe::counting());
        let refused = api.send(secret("K")).await;
        store.close().await;
        run(&place.address(), &format!("DROP ROLE {role}")).await;
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
    log.only("record not readable, nothing ran")
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

#[tokio::test(start_paused = true)]
async fn f110_unreadable_record_behind_an_invalid_body_is_logged() {
    let log = Log::listen();
    let store = Faulty::new(MemoryStore::new());
    store.inject(Call::Read, .., Fault::unavailable());
    let by_json = required(DynStore::new(store)).fingerprint(Fingerprinting::json());
    let api = Api::new(by_json, &Probe::counting());
    let invalid = secret("K").body("{");
    api.send(invalid).await.assert_problem(400, "body-invalid");
    log.only("the request is refused because of its body");
}
