//! `Recovery::Reconcile`: one request at a time asks a hook about an unknown
//! outcome, and the answer decides.

use std::{
    convert::Infallible,
    sync::{
        Arc, Mutex,
        atomic::{AtomicUsize, Ordering::SeqCst},
    },
    time::Duration,
};

use bytes::Bytes;
use http::{Request, Response, StatusCode};
use http_body_util::{BodyExt as _, Full};
use tokio::time::{sleep, timeout};
use tower::{Layer as _, ServiceExt as _, service_fn, util::BoxCloneSyncService};
use tower_idempotency::{
    IdempotencyLayer, Key, MemoryStore, Operation, OperationId, Reconciler, Recovery, RequestBody,
    ResponseBody, Scope, Store, StoreError,
    store::{
        Claim, Completion, Record, RecordName, RecordState,
        admin::{RecordedResponse, Resolution},
    },
    test_support::{Fault, FaultyStore, StoreCall},
};

type Service =
    BoxCloneSyncService<Request<Full<Bytes>>, Response<ResponseBody<Full<Bytes>>>, Infallible>;

/// A handler that panics while `fails` is not zero, and counts its runs.
#[derive(Clone, Default)]
struct Handler {
    runs: Arc<AtomicUsize>,
    fails: Arc<AtomicUsize>,
    ids: Arc<Mutex<Vec<(OperationId, u32)>>>,
}

impl Handler {
    fn failing(times: usize) -> Self {
        let handler = Self::default();
        handler.fails.store(times, SeqCst);
        handler
    }

    fn behind(&self, store: impl Store, reconciler: Reconciler) -> Service {
        let handler = self.clone();
        let layer = IdempotencyLayer::required(store, |_| Some(Scope::single_tenant()))
            .recovery(Recovery::Reconcile(reconciler))
            .build()
            .unwrap();
        let service = service_fn(move |request: Request<RequestBody<Full<Bytes>>>| {
            let handler = handler.clone();
            async move {
                handler.runs.fetch_add(1, SeqCst);
                let operation = request.extensions().get::<Operation>().unwrap();
                let ran = (operation.id(), operation.attempt());
                handler.ids.lock().unwrap().push(ran);
                let left = handler
                    .fails
                    .fetch_update(SeqCst, SeqCst, |left| left.checked_sub(1));
                assert!(left.is_err(), "the handler fails");
                Ok::<_, Infallible>(Response::new(Full::from("done")))
            }
        });
        BoxCloneSyncService::new(layer.layer(service))
    }

    fn runs(&self) -> usize {
        self.runs.load(SeqCst)
    }
}

fn request() -> Request<Full<Bytes>> {
    Request::post("/pay")
        .header("idempotency-key", "k")
        .body(Full::from("body"))
        .unwrap()
}

async fn send(service: &Service) -> (StatusCode, Bytes, bool) {
    let response = service.clone().oneshot(request()).await.unwrap();
    let replayed = response.headers().contains_key("idempotent-replayed");
    let status = response.status();
    let body = response.into_body().collect().await.unwrap().to_bytes();
    (status, body, replayed)
}

async fn record(store: &MemoryStore) -> Record {
    let name = RecordName::new(Scope::single_tenant(), Key::new("k"));
    store.read(&name).await.unwrap().unwrap()
}

#[tokio::test(start_paused = true)]
async fn an_outcome_confirmed_by_the_hook_is_recorded_and_replayed() {
    let (handler, asked) = (Handler::failing(1), Arc::new(Mutex::new(Vec::new())));
    let hook = Reconciler::new({
        let asked = asked.clone();
        move |operation: Operation| {
            asked.lock().unwrap().push(operation.id());
            async {
                let mut found = Response::new("found");
                *found.status_mut() = StatusCode::CREATED;
                Some(Resolution::Happened(RecordedResponse::new(found).unwrap()))
            }
        }
    });
    let service = handler.behind(MemoryStore::new(), hook);
    assert_eq!(send(&service).await.0, StatusCode::INTERNAL_SERVER_ERROR);
    for _ in 0..2 {
        let (status, body, replayed) = send(&service).await;
        assert_eq!(
            (status, &body[..], replayed),
            (StatusCode::CREATED, &b"found"[..], true)
        );
    }
    assert_eq!(handler.runs(), 1);
    assert_eq!(*asked.lock().unwrap(), [handler.ids.lock().unwrap()[0].0]);
}

#[tokio::test(start_paused = true)]
async fn an_operation_that_did_not_happen_runs_again_as_itself() {
    let handler = Handler::failing(1);
    let hook = Reconciler::new(|_| async { Some(Resolution::DidNotHappen) });
    let service = handler.behind(MemoryStore::new(), hook);
    assert_eq!(send(&service).await.0, StatusCode::INTERNAL_SERVER_ERROR);
    let (status, body, replayed) = send(&service).await;
    assert_eq!(
        (status, &body[..], replayed),
        (StatusCode::OK, &b"done"[..], false)
    );
    assert!(send(&service).await.2);
    let ids = handler.ids.lock().unwrap();
    assert_eq!(ids.len(), 2);
    assert_eq!((ids[0].0, ids[0].1, ids[1].1), (ids[1].0, 1, 2));
}

#[tokio::test(start_paused = true)]
async fn an_undecided_outcome_is_shown_and_asked_again() {
    let (handler, asked) = (Handler::failing(1), Arc::new(AtomicUsize::new(0)));
    let hook = Reconciler::new({
        let asked = asked.clone();
        move |_| {
            let asked = asked.clone();
            async move {
                // More often than `max_attempts`: a question is no attempt.
                match asked.fetch_add(1, SeqCst) {
                    0..=7 => None,
                    8 => panic!("the hook fails"),
                    _ => Some(Resolution::DidNotHappen),
                }
            }
        }
    });
    let store = MemoryStore::new();
    let service = handler.behind(store.clone(), hook);
    assert_eq!(send(&service).await.0, StatusCode::INTERNAL_SERVER_ERROR);
    for _ in 0..9 {
        let (status, body, _) = send(&service).await;
        assert_eq!(status, StatusCode::CONFLICT);
        assert!(String::from_utf8_lossy(&body).contains("outcome-unknown"));
        assert!(matches!(record(&store).await.state, RecordState::Unknown));
    }
    assert_eq!(send(&service).await.0, StatusCode::OK);
    assert_eq!((handler.runs(), asked.load(SeqCst)), (2, 10));
}

#[tokio::test(start_paused = true)]
async fn one_request_at_a_time_asks_a_slow_hook() {
    let (handler, at_once) = (Handler::failing(1), Arc::new(AtomicUsize::new(0)));
    let asked = Arc::new(AtomicUsize::new(0));
    let hook = Reconciler::new({
        let (at_once, asked) = (at_once.clone(), asked.clone());
        move |_| {
            let (at_once, asked) = (at_once.clone(), asked.clone());
            async move {
                assert_eq!(at_once.fetch_add(1, SeqCst), 0);
                asked.fetch_add(1, SeqCst);
                // Longer than the lease: heartbeats keep the claim.
                sleep(Duration::from_secs(100)).await;
                at_once.fetch_sub(1, SeqCst);
                let found = RecordedResponse::new(Response::new(()));
                Some(Resolution::Happened(found.unwrap()))
            }
        }
    });
    let service = handler.behind(MemoryStore::new(), hook);
    assert_eq!(send(&service).await.0, StatusCode::INTERNAL_SERVER_ERROR);
    let first = tokio::spawn({
        let service = service.clone();
        async move { send(&service).await.0 }
    });
    for _ in 0..20 {
        sleep(Duration::from_secs(4)).await;
        assert_eq!(send(&service).await.0, StatusCode::CONFLICT);
    }
    assert_eq!(first.await.unwrap(), StatusCode::OK);
    assert_eq!((handler.runs(), asked.load(SeqCst)), (1, 1));
}

#[tokio::test(start_paused = true)]
async fn the_hook_is_asked_once_a_dead_owners_lease_lapses() -> Result<(), StoreError> {
    let handler = Handler::failing(1);
    let hook = Reconciler::new(|_| async { Some(Resolution::DidNotHappen) });
    let store = MemoryStore::new();
    let service = handler.behind(store.clone(), hook);
    // A dead owner: the record is in progress, not unknown.
    assert_eq!(send(&service).await.0, StatusCode::INTERNAL_SERVER_ERROR);
    let name = RecordName::new(Scope::single_tenant(), Key::new("k"));
    let lost = record(&store).await;
    let second = Duration::from_secs(1);
    let zombie = Claim::new(lost.fingerprint, second, 100 * second);
    let reclaim_as = tower_idempotency::store::ReclaimAs::Rerun;
    let grant = store
        .reclaim(&name, lost.fence, reclaim_as, &zombie)
        .await?;
    assert!(grant.is_some());
    assert_eq!(send(&service).await.0, StatusCode::CONFLICT);
    sleep(2 * second).await;
    assert_eq!(send(&service).await.0, StatusCode::OK);
    // The lapsed owner comes back, and is fenced.
    let late = Completion::new(Bytes::from("late"), second, second);
    let settled = store.complete(&name, zombie.token, &late).await?;
    assert_eq!(settled, tower_idempotency::store::Transitioned::Superseded);
    assert_eq!(handler.runs(), 2);
    Ok(())
}

#[tokio::test(start_paused = true)]
async fn f32_a_request_that_always_fails_stops_running() {
    let handler = Handler::failing(100);
    let hook = Reconciler::new(|_| async { Some(Resolution::DidNotHappen) });
    let service = handler.behind(MemoryStore::new(), hook);
    for _ in 0..10 {
        let status = timeout(Duration::from_secs(60), send(&service))
            .await
            .unwrap()
            .0;
        assert!(status == StatusCode::INTERNAL_SERVER_ERROR || status == StatusCode::CONFLICT);
    }
    assert_eq!(handler.runs(), 5);
}

#[tokio::test(start_paused = true)]
async fn claim_after_the_hook_whose_answer_is_lost_is_withdrawn() {
    let (handler, store) = (Handler::failing(1), MemoryStore::new());
    let hook = Reconciler::new(|_| async { Some(Resolution::DidNotHappen) });
    let faulty = FaultyStore::new(store.clone());
    let service = handler.behind(faulty.clone(), hook);
    assert_eq!(send(&service).await.0, StatusCode::INTERNAL_SERVER_ERROR);
    // The first one is that of the hook.
    faulty.inject(StoreCall::Reclaim, 2..=2, Fault::LoseAnswer);
    assert_eq!(send(&service).await.0, StatusCode::CONFLICT);
    tokio::time::sleep(Duration::from_millis(500)).await;
    let withdrawn = record(&store).await;
    assert!(
        matches!(withdrawn.state, RecordState::Unknown),
        "{withdrawn:?}"
    );
    assert_eq!(send(&service).await.0, StatusCode::OK);
    assert_eq!(handler.runs(), 2);
}
