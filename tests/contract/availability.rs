//! A failing store, a crashed owner or a slow neighbour costs the requests of
//! others no permit, no memory and no key.

use std::{
    convert::Infallible,
    pin::Pin,
    sync::{
        Arc,
        atomic::{AtomicUsize, Ordering},
    },
    task::{Context, Poll},
    time::Duration,
};

use axum::body::Body;
use bytes::Bytes;
use http::Method;
use http_body_util::BodyExt;
use tokio::time::{Instant, timeout};
use tower::{Layer as _, ServiceBuilder, ServiceExt as _};
use tower_idempotency::{
    DynStore, MemoryStore, Reconciler, Recovery, Scope, Store as _, StoreErrorKind,
    store::{
        Claim, Completion, RecordState, Release, Transitioned,
        admin::{RecordedResponse, Resolution},
    },
};

use crate::{
    api::{Answer, Api, ask, fingerprint, keyed, named, record, required, send, settle},
    client::Http2,
    crowd::claimed_elsewhere,
    faulty::{Call, Fault, Faulty, unsent},
    probe::{Gate, Probe},
    stores::{Place, on_each_store},
};

on_each_store! {
    rule_72_a_crashed_claim_binds_its_key_until_it_expires
}

async fn rule_72_a_crashed_claim_binds_its_key_until_it_expires(place: &Place) {
    let store = place.open().await;
    let probe = Probe::counting();
    let api = Api::new(required(store.clone()), &probe);
    let crash = async |key: &str, retention| {
        let lease = Duration::from_millis(1);
        claimed_elsewhere(&store, key, lease, retention).await;
    };
    crash("K", Duration::from_secs(3600)).await;
    crash("L", Duration::from_millis(2)).await;
    crash("M", Duration::from_millis(2)).await;
    tokio::time::sleep(Duration::from_millis(20)).await;

    let other = |key| keyed(key).body("{\"amount\":2}");
    api.send(other("K")).await.assert_problem(422, "key-reused");
    // Its record has expired, so that another request may claim the key without a
    // sweep.
    api.send(other("L")).await.assert_run(1);
    api.send(keyed("L")).await.assert_problem(422, "key-reused");
    // The same request gets `outcome-unknown`, as before.
    api.send(keyed("M"))
        .await
        .assert_problem(409, "outcome-unknown");
    let state = record(&store, "M").await.unwrap().state;
    assert!(matches!(state, RecordState::Unknown), "{state:?}");
    assert_eq!(probe.runs(), 1);
}

/// Counts the clones of a body that still exist.
struct Tracked(Arc<AtomicUsize>);

impl AsRef<[u8]> for Tracked {
    fn as_ref(&self) -> &[u8] {
        b"{}"
    }
}

impl Drop for Tracked {
    fn drop(&mut self) {
        self.0.fetch_sub(1, Ordering::SeqCst);
    }
}

#[tokio::test(start_paused = true)]
async fn f101_a_refused_claim_frees_the_inner_service_and_the_body() {
    let faulty = Faulty::new(MemoryStore::new());
    faulty.inject_all(Fault::unavailable());
    let layer = required(DynStore::new(faulty)).build().unwrap();
    let service = ServiceBuilder::new()
        .layer(layer)
        .concurrency_limit(1)
        .service(Probe::counting());
    let left = Arc::new(AtomicUsize::new(1));
    let body = Bytes::from_owner(Tracked(Arc::clone(&left)));
    send(service.clone(), keyed("K").body(body))
        .await
        .assert_problem(503, "store-unavailable");
    assert_eq!(left.load(Ordering::SeqCst), 0, "the body is kept");
    // The store is still down: the claim is being withdrawn.
    let get = send(service, ask("/count").method(Method::GET));
    let get = timeout(Duration::from_secs(1), get).await;
    get.expect("the permit is kept").assert_live(201);
}

#[tokio::test(start_paused = true)]
async fn f102_a_claim_that_lands_late_is_withdrawn() {
    let faulty = Faulty::new(MemoryStore::new());
    faulty.inject(Call::Claim, ..=1, Fault::LandLater(Duration::from_secs(12)));
    let store = DynStore::new(faulty);
    let probe = Probe::counting();
    let api = Api::new(required(store.clone()), &probe);
    api.send(keyed("K"))
        .await
        .assert_problem(503, "store-unavailable");
    // The claim has arrived, and its lease would have lapsed.
    tokio::time::sleep(Duration::from_secs(60)).await;
    assert_eq!(probe.runs(), 0);
    api.send(keyed("K")).await.assert_run(1);
}

#[tokio::test(start_paused = true)]
async fn f102_a_claim_that_lands_after_a_long_outage_is_withdrawn() {
    let faulty = Faulty::new(MemoryStore::new());
    faulty.inject(
        Call::Claim,
        ..=1,
        Fault::LandLater(Duration::from_secs(300)),
    );
    for call in [Call::Claim, Call::Release, Call::Read] {
        faulty.inject(call, .., Fault::Hang);
    }
    let store = DynStore::new(faulty.clone());
    let api = Api::new(required(store), &Probe::counting());
    api.send(keyed("K"))
        .await
        .assert_problem(503, "store-unavailable");
    tokio::time::sleep(Duration::from_secs(299)).await;
    faulty.heal();
    tokio::time::sleep(Duration::from_secs(60)).await;
    api.send(keyed("K")).await.assert_run(1);
}

#[tokio::test(start_paused = true)]
async fn f102_a_reclaim_that_lands_late_is_withdrawn() {
    let faulty = Faulty::new(MemoryStore::new());
    let store = DynStore::new(faulty.clone());
    let probe = Probe::statuses(&[500, 201]);
    let api = Api::new(required(store.clone()), &probe);
    api.send(keyed("K")).await.assert_live(500);
    let state = record(&store, "K").await.unwrap().state;
    assert!(
        matches!(state, RecordState::Released(Release::SameRequest)),
        "{state:?}"
    );

    faulty.inject(
        Call::Reclaim,
        ..=1,
        Fault::LandLater(Duration::from_secs(12)),
    );
    api.send(keyed("K"))
        .await
        .assert_problem(503, "store-unavailable");
    tokio::time::sleep(Duration::from_secs(60)).await;
    assert_eq!(probe.runs(), 1);
    api.send(keyed("K")).await.assert_run(2);
}

/// A store whose first call of this kind arrives late. No later call is answered.
fn stalled(inner: &DynStore, call: Call) -> Faulty<DynStore> {
    let faulty = Faulty::new(inner.clone());
    faulty.inject(call, ..=1, Fault::LandLater(Duration::from_secs(10)));
    for claim in [Call::Claim, Call::Reclaim] {
        faulty.inject(claim, 2.., Fault::Hang);
    }
    for other in [Call::Release, Call::Read] {
        faulty.inject(other, .., Fault::Hang);
    }
    faulty
}

#[tokio::test(start_paused = true)]
async fn f102_a_late_claim_marked_unknown_is_withdrawn() {
    let inner = DynStore::new(MemoryStore::new());
    let probe = Probe::statuses(&[500, 201]);
    let direct = Api::new(required(inner.clone()), &probe);
    direct.send(keyed("released")).await.assert_live(500);
    let stalls = [("new", Call::Claim), ("released", Call::Reclaim)];
    let stalls = stalls.map(|(key, call)| (key, stalled(&inner, call)));
    for (key, faulty) in &stalls {
        let api = Api::new(required(DynStore::new(faulty.clone())), &probe);
        api.send(keyed(key))
            .await
            .assert_problem(503, "store-unavailable");
    }
    // The claims have arrived, and their leases have lapsed.
    tokio::time::sleep(Duration::from_secs(60)).await;
    for (key, _) in &stalls {
        let refused = direct.send(keyed(key)).await;
        refused.assert_problem(409, "outcome-unknown");
    }
    assert_eq!(probe.runs(), 1);
    for (index, (key, faulty)) in stalls.iter().enumerate() {
        faulty.heal();
        tokio::time::sleep(Duration::from_secs(60)).await;
        direct.send(keyed(key)).await.assert_run(index + 2);
    }
}

#[tokio::test(start_paused = true)]
async fn i11_a_late_takeover_marked_unknown_stays_unknown() {
    let inner = DynStore::new(MemoryStore::new());
    let probe = Probe::counting();
    let hour = Duration::from_secs(3600);
    claimed_elsewhere(&inner, "K", Duration::from_secs(1), hour).await;
    tokio::time::sleep(Duration::from_secs(2)).await;
    let faulty = stalled(&inner, Call::Reclaim);
    let reruns = required(DynStore::new(faulty.clone())).recovery(Recovery::Rerun);
    Api::new(reruns, &probe)
        .send(keyed("K"))
        .await
        .assert_problem(503, "store-unavailable");
    tokio::time::sleep(Duration::from_secs(60)).await;
    let direct = Api::new(required(inner), &probe);
    for _ in 0..2 {
        direct
            .send(keyed("K"))
            .await
            .assert_problem(409, "outcome-unknown");
        faulty.heal();
        tokio::time::sleep(Duration::from_secs(60)).await;
    }
    assert_eq!(probe.runs(), 0);
}

#[tokio::test(start_paused = true)]
async fn i16_a_late_claim_frees_its_key_within_a_lease() {
    let lease = Duration::from_secs(3);
    let inner = DynStore::new(MemoryStore::new());
    let mut stalls = Vec::new();
    for number in 0..10 {
        let key = format!("K{number}");
        let faulty = stalled(&inner, Call::Claim);
        let builder = required(DynStore::new(faulty.clone()))
            .lease(lease)
            .store_timeout(lease / 3);
        Api::new(builder, &Probe::counting())
            .send(keyed(&key))
            .await
            .assert_problem(503, "store-unavailable");
        stalls.push((key, faulty));
    }
    tokio::time::sleep(Duration::from_secs(60)).await;
    let direct = Api::new(required(inner), &Probe::counting());
    for (_, faulty) in &stalls {
        faulty.heal();
    }
    tokio::time::sleep(lease).await;
    for (number, (key, _)) in stalls.iter().enumerate() {
        direct.send(keyed(key)).await.assert_run(number + 1);
    }
}

#[tokio::test(start_paused = true)]
async fn i11_a_withdrawn_question_leaves_the_outcome_unknown() {
    let faulty = Faulty::new(MemoryStore::new());
    let store = DynStore::new(faulty.clone());
    let probe = Probe::statuses(&[504, 201]);
    let asks = Recovery::Reconcile(Reconciler::new(|_| async { None }));
    let api = Api::new(required(store.clone()).recovery(asks), &probe);
    api.send(keyed("K")).await.assert_live(504);
    // The reclaim that lets the hook ask is granted, but its answer is lost.
    faulty.inject(Call::Reclaim, .., Fault::LoseAnswer);
    faulty.inject(Call::Claim, 3.., Fault::unavailable());
    api.send(keyed("K"))
        .await
        .assert_problem(503, "store-unavailable");
    tokio::time::sleep(Duration::from_secs(5)).await;
    faulty.heal();
    let state = record(&store, "K").await.unwrap().state;
    assert!(matches!(state, RecordState::Unknown), "{state:?}");
    api.send(keyed("K"))
        .await
        .assert_problem(409, "outcome-unknown");
    assert_eq!(probe.runs(), 1);
}

#[tokio::test(start_paused = true)]
async fn a_claim_after_the_hook_that_was_not_sent_is_not_withdrawn() {
    let faulty = Faulty::new(MemoryStore::new());
    let did_not_happen = Reconciler::new(|_| async { Some(Resolution::DidNotHappen) });
    let asks =
        required(DynStore::new(faulty.clone())).recovery(Recovery::Reconcile(did_not_happen));
    let api = Api::new(asks, &Probe::statuses(&[504, 201]));
    api.send(keyed("K")).await.assert_live(504);
    // The first one is that of the hook.
    faulty.inject(Call::Reclaim, 2..=2, unsent());
    api.send(keyed("K"))
        .await
        .assert_problem(409, "outcome-unknown");
    let marked = faulty.calls_of(Call::MarkUnknown);
    tokio::time::sleep(Duration::from_secs(5)).await;
    assert_eq!(faulty.calls_of(Call::MarkUnknown), marked);
    api.send(keyed("K")).await.assert_live(201);
}

#[tokio::test(start_paused = true)]
async fn a_claim_lost_before_a_contended_one_is_withdrawn() {
    let faulty = Faulty::new(MemoryStore::new());
    faulty.inject(Call::Claim, ..=1, Fault::LoseAnswer);
    faulty.inject(Call::Claim, 2..=8, Fault::Vanish);
    let api = Api::new(required(DynStore::new(faulty)), &Probe::counting());
    api.send(keyed("K"))
        .await
        .assert_problem(503, "store-unavailable");
    settle().await;
    api.send(keyed("K")).await.assert_run(1);
}

#[tokio::test(start_paused = true)]
async fn f105_a_hanging_renewal_loses_the_lease_at_its_end() {
    let faulty = Faulty::new(MemoryStore::new());
    faulty.inject(Call::Renew, .., Fault::Hang);
    let probe = Probe::running(|run| async move {
        let start = Instant::now();
        run.operation().lease_lost().await;
        let mut response = run.created();
        *response.body_mut() = start.elapsed().as_secs().to_string().into();
        Ok(response)
    });
    let builder = required(DynStore::new(faulty))
        .lease(Duration::from_secs(30))
        .store_timeout(Duration::from_secs(15));
    let answer = Api::new(builder, &probe).send(keyed("K")).await;
    assert_eq!(answer.body, "30");
}

#[tokio::test(start_paused = true)]
async fn a_waiter_is_refused_while_the_inner_service_is_busy() {
    let store = MemoryStore::new();
    let hour = Duration::from_secs(3600);
    let claim = claimed_elsewhere(&store, "K", hour, hour).await;
    let gate = Gate::closed();
    let layer = required(DynStore::new(store.clone()))
        .wait(Duration::from_secs(20))
        .build()
        .unwrap();
    let service = ServiceBuilder::new()
        .layer(layer)
        .concurrency_limit(1)
        .service(Probe::behind(&gate));
    let waiter = tokio::spawn(send(service.clone(), keyed("K")));
    settle().await;
    // Takes the only permit and keeps it.
    let busy = tokio::spawn(send(service.clone(), keyed("L")));
    gate.arrival().await;
    let released = store
        .release(&named("K"), claim.token, Release::SameRequest)
        .await;
    assert_eq!(released.unwrap(), Transitioned::Applied);
    let refused = timeout(Duration::from_secs(60), waiter).await;
    let refused = refused.expect("the waiter hangs").unwrap();
    refused.assert_problem(503, "overloaded");
    gate.open();
    busy.await.unwrap().assert_live(201);
}

/// A layer whose functions panic, one at a time.
async fn asked_with_a_panic(in_which: &'static str, ready: &Probe, store: &DynStore) -> Answer {
    let panics = move |name| assert!(in_which != name, "as the test wants it");
    let builder = tower_idempotency::IdempotencyLayer::required(store.clone(), move |_| {
        panics("scope");
        Scope::new("acme-7")
    })
    .guard_if(move |_| {
        panics("guard_if");
        true
    })
    .key_syntax(tower_idempotency::KeySyntax::compat().validate(move |_| {
        panics("validate");
        true
    }))
    .fingerprint(tower_idempotency::Fingerprinting::custom(
        "test",
        move |_, body| {
            panics("fingerprint");
            body.to_vec()
        },
    ))
    .dispositions(tower_idempotency::Dispositions::standard().by(move |_| {
        panics("dispositions");
        None
    }))
    .render::<String>(move |_, _| {
        panics("render");
        None
    });
    let service = builder.build().unwrap().layer(ready.clone());
    Answer::of(service.oneshot(keyed("K").0).await.unwrap()).await
}

#[tokio::test]
async fn rule_49_a_panic_before_the_run_is_500_and_claims_nothing() {
    for function in ["scope", "guard_if", "validate", "fingerprint"] {
        let store = DynStore::new(MemoryStore::new());
        let probe = Probe::counting();
        asked_with_a_panic(function, &probe, &store)
            .await
            .assert_problem(500, "callback-panicked");
        assert!(record(&store, "K").await.is_none(), "{function}");
        assert_eq!(probe.runs(), 0, "{function}");
    }
}

#[tokio::test]
async fn rule_49_a_panic_after_the_run_leaves_the_outcome_unknown() {
    let store = DynStore::new(MemoryStore::new());
    let probe = Probe::counting();
    asked_with_a_panic("dispositions", &probe, &store)
        .await
        .assert_problem(500, "callback-panicked");
    let state = record(&store, "K").await.unwrap().state;
    assert!(matches!(state, RecordState::Unknown), "{state:?}");
    assert_eq!(probe.runs(), 1);
    // The refusal of the next one cannot be rendered.
    asked_with_a_panic("render", &probe, &store)
        .await
        .assert_problem(500, "callback-panicked");
    asked_with_a_panic("none", &probe, &store)
        .await
        .assert_problem(409, "outcome-unknown");
    assert_eq!(probe.runs(), 1);
}

/// Panics when its length is asked for.
struct Lengthless;

impl http_body::Body for Lengthless {
    type Data = Bytes;
    type Error = Infallible;

    fn poll_frame(
        self: Pin<&mut Self>,
        _: &mut Context<'_>,
    ) -> Poll<Option<Result<http_body::Frame<Bytes>, Infallible>>> {
        Poll::Ready(None)
    }

    fn size_hint(&self) -> http_body::SizeHint {
        panic!("as the test wants it")
    }
}

#[tokio::test]
async fn rule_49_a_panicking_body_leaves_the_outcome_unknown() {
    let bodies: [fn() -> Body; 2] = [
        || {
            Body::new(BodyExt::map_frame(Body::from("paid"), |_| {
                panic!("as the test wants it")
            }))
        },
        || Body::new(Lengthless),
    ];
    for body in bodies {
        let store = DynStore::new(MemoryStore::new());
        let probe = Probe::answering(move |run| run.created().map(|_| body()));
        let api = Api::new(required(store.clone()), &probe);
        api.send(keyed("K"))
            .await
            .assert_problem(500, "handler-panicked");
        let state = record(&store, "K").await.unwrap().state;
        assert!(matches!(state, RecordState::Unknown), "{state:?}");
    }
}

#[tokio::test]
async fn rule_49_a_panicking_request_body_claims_nothing() {
    let store = DynStore::new(MemoryStore::new());
    let probe = Probe::counting();
    let service = required(store.clone())
        .build()
        .unwrap()
        .layer(probe.clone());
    let request = keyed("K")
        .0
        .map(|body| Body::new(BodyExt::map_frame(body, |_| panic!("as the test wants it"))));
    Answer::of(service.oneshot(request).await.unwrap())
        .await
        .assert_problem(500, "callback-panicked");
    assert!(record(&store, "K").await.is_none());
    assert_eq!(probe.runs(), 0);
}

#[tokio::test]
async fn rule_49_a_panic_leaves_the_other_streams_alone() {
    let gate = Gate::closed();
    let probe = Probe::behind(&gate);
    let builder =
        tower_idempotency::IdempotencyLayer::required(DynStore::new(MemoryStore::new()), |parts| {
            let caller = parts.headers["x-account"].to_str().unwrap();
            assert_ne!(caller, "panics", "as the test wants it");
            Scope::new(caller)
        });
    let server = Api::new(builder, &probe).serve().await;
    let http2 = Http2::open(&server).await;
    let mut other = http2.clone();
    let running = tokio::spawn(async move { other.ask(keyed("K").0).await });
    gate.arrival().await;
    let mut http2 = http2;
    http2
        .ask(keyed("K").from("panics").0)
        .await
        .assert_problem(500, "callback-panicked");
    gate.open();
    running.await.unwrap().assert_live(201);
}

#[tokio::test(start_paused = true)]
async fn f108_expired_records_give_way_in_a_full_memory_store() {
    let store = MemoryStore::bounded(10, 1 << 20);
    let probe = Probe::counting();
    let minute = Duration::from_secs(60);
    let builder = required(DynStore::new(store.clone())).retention(minute);
    let api = Api::new(builder, &probe);
    for number in 0..10 {
        api.send(keyed(&format!("K{number}")))
            .await
            .assert_live(201);
    }
    api.send(keyed("L"))
        .await
        .assert_problem(503, "store-unavailable");
    tokio::time::sleep(2 * minute).await;
    // No sweeper runs.
    for number in 0..10 {
        api.send(keyed(&format!("L{number}")))
            .await
            .assert_live(201);
    }
    assert_eq!(store.len(), 10);
    api.send(keyed("M"))
        .await
        .assert_problem(503, "store-unavailable");
}

#[tokio::test(start_paused = true)]
async fn f108_only_expired_records_give_way() {
    let store = MemoryStore::bounded(3, 1 << 20);
    let minute = Duration::from_secs(60);
    let claim = async |key: &str, lease| {
        let claim = Claim::new(fingerprint(keyed(key)).await, lease, minute);
        let claimed = store.claim(&named(key), &claim).await;
        claimed.map(|_| claim.token)
    };
    // In progress, crashed, and of an unknown outcome.
    claim("K", 10 * minute).await.unwrap();
    claim("L", minute).await.unwrap();
    let token = claim("M", minute).await.unwrap();
    let marked = store.mark_unknown(&named("M"), token, 10 * minute).await;
    assert_eq!(marked.unwrap(), Transitioned::Applied);
    tokio::time::sleep(5 * minute).await;
    let full = claim("N", minute).await.unwrap_err();
    assert_eq!(full.kind(), StoreErrorKind::Full);
    tokio::time::sleep(6 * minute).await;
    claim("N", minute).await.unwrap();
    assert!(store.read(&named("M")).await.unwrap().is_none());
}

#[tokio::test(start_paused = true)]
async fn f108_expired_responses_give_way_in_a_full_memory_store() {
    let store = MemoryStore::bounded(100, 3_000);
    let probe = Probe::answering(|_| http::Response::new(Body::from("x".repeat(1_000))));
    let minute = Duration::from_secs(60);
    let builder = required(DynStore::new(store)).retention(minute);
    let api = Api::new(builder, &probe);
    api.send(keyed("K")).await.assert_live(200);
    api.send(keyed("L")).await.assert_live(200);
    let unrecorded = api.send(keyed("M")).await;
    assert_eq!(unrecorded.header("idempotent-recorded"), Some("false"));
    tokio::time::sleep(2 * minute).await;
    api.send(keyed("N")).await.assert_live(200);
}

#[tokio::test]
async fn purging_a_memory_store_lets_other_tasks_run() {
    let store = MemoryStore::new();
    let print = fingerprint(keyed("K")).await;
    for number in 0..10_000 {
        let name = named(&number.to_string());
        let claim = Claim::new(print, HOUR, Duration::ZERO);
        store.claim(&name, &claim).await.unwrap();
        let released = store
            .release(&name, claim.token, Release::SameRequest)
            .await;
        assert_eq!(released.unwrap(), Transitioned::Applied);
    }
    tokio::time::sleep(Duration::from_millis(1)).await;
    let others = Arc::new(AtomicUsize::new(0));
    let counted = Arc::clone(&others);
    let other = tokio::spawn(async move {
        loop {
            counted.fetch_add(1, Ordering::SeqCst);
            tokio::task::yield_now().await;
        }
    });
    let purged = store.purge_expired(u32::MAX, HOUR).await.unwrap();
    other.abort();
    assert_eq!(purged.removed, 10_000);
    assert!(others.load(Ordering::SeqCst) > 100);
}

const HOUR: Duration = Duration::from_secs(3600);

/// A hook that finds the outcome of its operation.
fn finds() -> Recovery {
    Recovery::Reconcile(Reconciler::new(|_| async {
        let found = http::Response::new("found");
        Some(Resolution::Happened(RecordedResponse::new(found).unwrap()))
    }))
}

#[tokio::test(start_paused = true)]
async fn i11_an_answer_lost_before_a_question_releases_nothing() {
    let faulty = Faulty::new(MemoryStore::new());
    let store = DynStore::new(faulty.clone());
    let probe = Probe::statuses(&[504, 201]);
    let api = Api::new(required(store.clone()).recovery(finds()), &probe);
    api.send(keyed("K")).await.assert_live(504);
    // The first claim of the retry is lost, the second asks the hook, and the
    // resolution cannot be recorded.
    faulty.inject(Call::Claim, 2..=2, Fault::unavailable());
    faulty.inject(Call::Complete, .., Fault::unavailable());
    api.send(keyed("K"))
        .await
        .assert_problem(409, "outcome-unknown");
    tokio::time::sleep(Duration::from_secs(5)).await;
    let state = record(&store, "K").await.unwrap().state;
    assert!(matches!(state, RecordState::Unknown), "{state:?}");
    faulty.heal();
    let found = api.send(keyed("K")).await;
    assert_eq!((found.is_replay(), found.body), (true, "found".into()));
    assert_eq!(probe.runs(), 1);
}

#[tokio::test(start_paused = true)]
async fn f102_a_claim_that_lapsed_before_its_withdrawal_is_resolved() {
    let faulty = Faulty::new(MemoryStore::new());
    // The claim is in the store, which is then down for longer than the lease.
    faulty.inject(Call::Claim, ..=1, Fault::HangAfterwards);
    faulty.inject(Call::Claim, 2..=8, Fault::Hang);
    faulty.inject(Call::Release, .., Fault::unavailable());
    let store = DynStore::new(faulty.clone());
    let probe = Probe::counting();
    let api = Api::new(required(store.clone()), &probe);
    api.send(keyed("K"))
        .await
        .assert_problem(503, "store-unavailable");
    tokio::time::sleep(Duration::from_secs(40)).await;
    // The retry comes before the withdrawal, and finds a lapsed lease.
    faulty.heal();
    api.send(keyed("K"))
        .await
        .assert_problem(409, "outcome-unknown");
    tokio::time::sleep(Duration::from_secs(20)).await;
    api.send(keyed("K")).await.assert_run(1);
}

#[tokio::test(start_paused = true)]
async fn a_withdrawn_takeover_leaves_a_late_owner_its_record() {
    let faulty = Faulty::new(MemoryStore::new());
    let store = DynStore::new(faulty.clone());
    let minute = Duration::from_secs(60);
    let owner = claimed_elsewhere(&store, "K", Duration::ZERO, HOUR).await;
    tokio::time::sleep(Duration::from_millis(1)).await;
    // The takeover of its retry does not arrive.
    faulty.inject(Call::Reclaim, .., Fault::unavailable());
    let api = Api::new(
        required(store.clone()).recovery(Recovery::Rerun),
        &Probe::counting(),
    );
    api.send(keyed("K"))
        .await
        .assert_problem(503, "store-unavailable");
    faulty.heal();
    tokio::time::sleep(minute).await;
    let completion = Completion::new(Bytes::new(), HOUR, HOUR);
    let late = store.complete(&named("K"), owner.token, &completion).await;
    assert_eq!(late.unwrap(), Transitioned::Applied);
}

#[tokio::test(start_paused = true)]
async fn a_withdrawn_claim_leaves_its_key_to_any_request() {
    let faulty = Faulty::new(MemoryStore::new());
    faulty.inject(Call::Claim, ..=8, Fault::LoseAnswer);
    let api = Api::new(required(DynStore::new(faulty)), &Probe::counting());
    api.send(keyed("K"))
        .await
        .assert_problem(503, "store-unavailable");
    settle().await;
    api.send(keyed("K").body("{\"amount\":2}"))
        .await
        .assert_run(1);
}

#[tokio::test(start_paused = true)]
async fn a_claim_that_was_not_sent_is_not_withdrawn() {
    let faulty = Faulty::new(MemoryStore::new());
    faulty.inject(Call::Claim, .., unsent());
    let api = Api::new(required(DynStore::new(faulty.clone())), &Probe::counting());
    api.send(keyed("K"))
        .await
        .assert_problem(503, "store-unavailable");
    tokio::time::sleep(Duration::from_secs(60)).await;
    assert_eq!(faulty.calls_of(Call::Release), 0);
}
