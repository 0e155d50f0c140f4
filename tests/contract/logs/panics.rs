//! Functions of the application, and stores, that panic.

use std::{
    future::{pending, ready},
    time::Duration,
};

use axum::body::Body;
use http::{HeaderValue, Response};
use http_body_util::BodyExt as _;
use tower::Layer as _;
use tower_idempotency::{
    Dispositions, DynStore, Fence, Fingerprinting, IdempotencyBuilder, IdempotencyLayer, KeySyntax,
    MemoryStore, Reconciler, Recovery, Store, StoreError,
    store::{
        Claim, Claimed, Grant, Purged, ReclaimAs, Record, RecordName, Transition, Transitioned,
        admin::{Filter, Page, RecordedResponse, Resolution},
    },
};

use super::{Log, Says, broken, secret};
use crate::{
    api::{Api, required, send},
    faulty::{Call, Fault},
    probe::{Probe, breaking_after, chunks_and_trailers, streamed},
    stores::memory,
};

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

/// A store whose transitions panic before they return a future.
struct Hasty(MemoryStore);

impl Store for Hasty {
    async fn claim(&self, name: &RecordName, claim: &Claim) -> Result<Claimed, StoreError> {
        self.0.claim(name, claim).await
    }

    async fn reclaim(
        &self,
        name: &RecordName,
        seen: Fence,
        reclaim_as: ReclaimAs,
        claim: &Claim,
    ) -> Result<Option<Grant>, StoreError> {
        self.0.reclaim(name, seen, reclaim_as, claim).await
    }

    fn transition(
        &self,
        _: &RecordName,
        _: Transition,
    ) -> impl Future<Output = Result<Transitioned, StoreError>> + Send {
        if self.0.is_empty() {
            return ready(Ok(Transitioned::Superseded));
        }
        panic!("s3cr3t")
    }

    async fn read(&self, name: &RecordName) -> Result<Option<Record>, StoreError> {
        self.0.read(name).await
    }

    async fn list(
        &self,
        filter: &Filter,
        after: Option<&RecordName>,
        limit: u32,
    ) -> Result<Page, StoreError> {
        self.0.list(filter, after, limit).await
    }

    async fn purge_expired(&self, limit: u32, retention: Duration) -> Result<Purged, StoreError> {
        self.0.purge_expired(limit, retention).await
    }
}

#[tokio::test(start_paused = true)]
async fn f110_a_panic_before_the_future_is_an_error_too() {
    let log = Log::listen();
    let probe = Probe::running(|run| async move {
        run.operation().lease_lost().await;
        Ok(run.created())
    });
    let api = Api::new(required(DynStore::new(Hasty(MemoryStore::new()))), &probe);
    let answer = tokio::time::timeout(Duration::from_secs(60), api.send(secret("K"))).await;
    let answer = answer.expect("`lease_lost()` did not resolve");
    assert_eq!(answer.status, 201);
    assert_eq!(answer.header("idempotent-recorded"), Some("false"));
    log.only("lease lapsed without a renewal");
}
