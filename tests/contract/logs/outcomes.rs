//! Outcomes that cannot be recorded, responses that cannot be kept, and lost leases.

use std::time::Duration;

use http::{HeaderValue, header};
use http_body_util::BodyExt as _;
use tower_idempotency::{Disconnect, DynStore, MemoryStore, Sweeper};

use super::{HOUR, Log, Says, answering, broken, secret};
use crate::{
    api::{Api, required, settle},
    faulty::{Call, Fault, Faulty},
    probe::{Failure, Gate, Probe, breaking_after},
    stores::memory,
};

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
