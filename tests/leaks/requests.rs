//! Each kind of request, with canaries in all of its parts.

use std::{convert::Infallible, panic, time::Duration};

use base64::{Engine as _, engine::general_purpose::STANDARD};
use http::{Response, StatusCode};
use http_body_util::BodyExt as _;
use tokio::time::sleep;
use tower_idempotency::{
    Disconnect, DynStore, Fingerprinting, Guard, Key, Quota, Scope, Store as _, Sweeper,
    store::{
        RecordName,
        admin::{Filter, RecordedResponse, Resolution},
    },
    test_support::{Fault, FaultyStore, StoreCall},
};

use crate::{
    api::{Api, eventually, required},
    caller::{Caller, answer, digests, named, print_answer, refused, sealing, secret, secret_ask},
    canaries::{ANSWER, BODY, FAILURE, HEADER, INPUT, KEY, SCOPE, VALUE},
    output::print,
    probe::{Failure, Probe, breaking_after, data, streamed},
};

/// Makes them all against this store. Prints what another caller may see.
pub(crate) async fn make_each_kind(store: DynStore, hidden: bool) {
    // The text of a panic is the application's.
    panic::set_hook(Box::new(|panic| {
        print(format_args!("panicked at {:?}", panic.location()));
    }));
    let caller = Caller { store, hidden };
    caller.succeed().await;
    caller.be_refused().await;
    caller.fail().await;
    caller.stream_and_leave().await;
    caller.meet_a_broken_store().await;
    caller.exceed_limits().await;
    caller.run_a_guard().await;
    caller.be_resolved_by_an_operator().await;
}

impl Caller {
    /// A first request and its retries, and another caller with the same key.
    async fn succeed(&self) {
        let api = self.api(&Probe::answering(|run| answer(&run)));
        print(format_args!("{:?}", api.layer));
        let first = api.send(secret_ask("paid")).await;
        assert_eq!(first.status, 201, "{first:?}");
        assert!(api.send(secret_ask("paid")).await.is_replay());
        let mismatch = secret_ask("paid").body(format!("{{\"{BODY}\":2}}"));
        refused(&api.send(mismatch).await, "key-reused");
        let revoked = secret_ask("paid").header("x-user", "other");
        refused(&api.send(revoked).await, "replay-refused");
        let other = secret_ask("paid").from("other").header("x-user", "other");
        print_answer(&api.send(other).await);
        let upload = format!("[{}]", "1,".repeat(10_000) + "1");
        let digest = STANDARD.encode(<sha2::Sha256 as sha2::Digest>::digest(&upload));
        let upload = secret_ask("upload")
            .header("content-digest", format!("sha-256=:{digest}:"))
            .body(upload);
        assert_eq!(api.send(upload).await.status, 201);
    }

    async fn be_refused(&self) {
        let api = self.api(&Probe::answering(|run| answer(&run)));
        refused(
            &api.send(secret_ask("").without("idempotency-key")).await,
            "key-missing",
        );
        for invalid in [format!("\"{KEY}"), format!("{KEY},{KEY}"), KEY.repeat(40)] {
            refused(&api.send(secret_ask("").key(&invalid)).await, "key-invalid");
        }
        refused(
            &api.send(secret_ask("a").without("x-account")).await,
            "caller-unknown",
        );
        refused(
            &api.send(secret_ask("b").body(format!("{{\"{BODY}\"")))
                .await,
            "body-invalid",
        );
        refused(
            &api.send(secret_ask("c").body(BODY.repeat(1_000))).await,
            "body-too-large",
        );
        let digest = |digest: String| secret_ask("d").header("content-digest", digest);
        refused(
            &api.send(digest(format!("sha-256={BODY}"))).await,
            "digest-invalid",
        );
        let wrong = format!("sha-256=:{}:", STANDARD.encode([7; 32]));
        refused(&api.send(digest(wrong)).await, "digest-mismatch");
        let (frames, body) = streamed();
        frames.send(Ok(data(BODY))).unwrap();
        refused(&api.send(secret_ask("e").body(body)).await, "body-timeout");
        drop(frames);
        let drained = self.api(&Probe::counting());
        let _ = drained.layer.drain(Duration::from_secs(1)).await;
        refused(&drained.send(secret_ask("f")).await, "draining");
        let panicking = self
            .builder(self.store.clone())
            .guard_if(|_| panic!("{FAILURE}"));
        let panicking = Api::new(panicking, &Probe::counting());
        refused(&panicking.send(secret_ask("g")).await, "callback-panicked");
    }

    /// Handlers that fail in each way.
    async fn fail(&self) {
        for (key, status) in [("released", 500), ("unknown", 504)] {
            let api = self.api(&Probe::answering(move |run| {
                let mut response = answer(&run);
                *response.status_mut() = StatusCode::from_u16(status).unwrap();
                response
            }));
            assert_eq!(api.send(secret_ask(key)).await.status, status);
        }
        let api = self.api(&Probe::counting());
        refused(&api.send(secret_ask("unknown")).await, "outcome-unknown");
        let panicking = self.api(&Probe::running(async |_| panic!("{FAILURE}")));
        refused(
            &panicking.send(secret_ask("panic")).await,
            "handler-panicked",
        );
        let failing = self.api(&Probe::running(async |_| Err(Failure(FAILURE))));
        assert!(failing.respond(secret_ask("error").0).await.is_err());
        let breaking = self.api(&Probe::answering(|run| {
            let mut response = run.created();
            *response.body_mut() = breaking_after(&[ANSWER]);
            response
        }));
        let response = breaking.respond(secret_ask("broken").0).await.unwrap();
        assert!(response.into_body().collect().await.is_err());
    }

    async fn stream_and_leave(&self) {
        let api = self.api(&Probe::answering(|run| {
            let mut response = run.created();
            *response.body_mut() = ANSWER.repeat(1_000).into();
            response
        }));
        assert_eq!(api.send(secret_ask("large")).await.status, 201);
        eventually(async || {
            let retry = api.send(secret_ask("large")).await;
            let is_recorded = retry.problem()["type"]
                .as_str()?
                .ends_with("not-replayable");
            print_answer(&retry);
            is_recorded.then_some(())
        })
        .await;
        let slow = Probe::running(|run| async move {
            sleep(Duration::from_millis(600)).await;
            Ok(answer(&run))
        });
        let api = self.api(&slow);
        let running = api.spawn(secret_ask("slow"));
        sleep(Duration::from_millis(200)).await;
        refused(&api.send(secret_ask("slow")).await, "request-in-progress");
        assert_eq!(running.await.unwrap().status, 201);
        let stops = self
            .builder(self.store.clone())
            .disconnect(Disconnect::Cancel);
        let leaving = Api::new(stops, &slow).spawn(secret_ask("left"));
        sleep(Duration::from_millis(200)).await;
        leaving.abort();
        sleep(Duration::from_millis(200)).await;
    }

    async fn meet_a_broken_store(&self) {
        for call in [
            StoreCall::Claim,
            StoreCall::Read,
            StoreCall::Renew,
            StoreCall::Complete,
            StoreCall::AddUsage,
        ] {
            let faulty = FaultyStore::new(self.store.clone());
            faulty.inject(call, .., Fault::unavailable());
            let quota = Quota::unlimited().max_records(1_000);
            let builder = self.builder(DynStore::new(faulty.clone())).quota(quota);
            let probe = Probe::running(|run| async move {
                sleep(Duration::from_millis(700)).await;
                Ok(answer(&run))
            });
            let api = Api::new(builder, &probe);
            let answer = api.send(secret_ask(&format!("faulty-{call:?}"))).await;
            if !answer.status.is_success() {
                print_answer(&answer);
            }
            faulty.heal();
        }
        // A record that no layer wrote, which cannot be read.
        let corrupt = FaultyStore::new(self.store.clone());
        let error = tower_idempotency::StoreError::corrupt("injected by a test");
        corrupt.inject(StoreCall::Claim, .., Fault::Error(error));
        let api = Api::new(self.builder(DynStore::new(corrupt)), &Probe::counting());
        refused(&api.send(secret_ask("paid")).await, "store-unavailable");
        let other_form = required(self.store.clone()).fingerprint(Fingerprinting::bytes());
        let other_form = match self.hidden {
            true => other_form.name_digests(digests()),
            false => other_form,
        };
        let other_form = Api::new(other_form, &Probe::counting());
        refused(
            &other_form.send(secret_ask("paid")).await,
            "store-unavailable",
        );
    }

    async fn exceed_limits(&self) {
        let quota = Quota::unlimited().max_bytes(1);
        let builder = self.builder(self.store.clone()).quota(quota);
        let api = Api::new(builder, &Probe::counting());
        refused(&api.send(secret_ask("quota")).await, "quota-exceeded");
        let slow = Probe::running(|run| async move {
            sleep(Duration::from_millis(400)).await;
            Ok(answer(&run))
        });
        let api = Api::new(self.builder(self.store.clone()).max_in_flight(1), &slow);
        let running = api.spawn(secret_ask("in-flight"));
        sleep(Duration::from_millis(200)).await;
        refused(&api.send(secret_ask("one-more")).await, "overloaded");
        running.await.unwrap();
    }

    async fn run_a_guard(&self) {
        let guard = Guard::builder(self.store.clone());
        let guard = match self.hidden {
            true => guard
                .sealing(sealing())
                .name_digests(digests())
                .fingerprint_secret(&secret(1)),
            false => guard,
        };
        let guard = guard.build().unwrap();
        let scope = Scope::new(SCOPE).unwrap();
        let name = |key| RecordName::new(scope.clone(), Key::new(named(key)));
        for _ in 0..2 {
            let work = async |_| Ok::<_, Infallible>(VALUE.to_owned());
            let ran = guard.run(&name("job"), &INPUT, work).await;
            assert_eq!(ran.unwrap().into_inner(), VALUE);
        }
        let work = async |_| Ok::<_, Infallible>(VALUE.to_owned());
        let other = guard.run(&name("job"), &"other", work).await;
        print(format_args!("{:?}", other.map(|_| ()).unwrap_err()));
        let work = async |_| Err::<String, _>(Failure("the work failed"));
        let failed = guard.run(&name("failing"), &INPUT, work).await;
        print(format_args!("{:?}", failed.map(|_| ()).unwrap_err()));
        print(format_args!("{guard:?}"));
    }

    async fn be_resolved_by_an_operator(&self) {
        let page = self
            .store
            .list(&Filter::unknown(), None, 100)
            .await
            .unwrap();
        print(format_args!("{page:?}"));
        let name = self.kept_name("unknown");
        let record = self.store.read(&name).await.unwrap().unwrap();
        print(format_args!("{record:?}"));
        let found = Response::builder()
            .status(StatusCode::CREATED)
            .header("x-found", HEADER)
            .body(ANSWER)
            .unwrap();
        let found = RecordedResponse::new(found).unwrap();
        print(format_args!("{found:?}"));
        let found = match self.hidden {
            true => sealing().seal(&name, &record, &found).await.unwrap(),
            false => found,
        };
        let resolution = Resolution::Happened(found);
        print(format_args!("{resolution:?}"));
        let resolved = self
            .store
            .resolve(&name, record.fence, &resolution, DAY)
            .await;
        print(format_args!("{resolved:?}"));
        let name = self.kept_name("panic");
        let record = self.store.read(&name).await.unwrap().unwrap();
        let forgotten = self.store.forget(&name, record.fence).await;
        print(format_args!("{forgotten:?}"));
        let sweeper = Sweeper::new(self.store.clone())
            .every(Duration::from_millis(50))
            .spawn();
        sleep(Duration::from_millis(200)).await;
        print(format_args!("{:?}", sweeper.stop().await));
    }
}

const DAY: Duration = Duration::from_secs(24 * 3_600);
