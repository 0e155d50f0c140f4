//! Any future may be dropped at any await, and all invariants hold (I15).
//!
//! Each call of the store yields before it is applied and again before its answer
//! arrives. A test polls the response future by hand and lets the rest of the
//! runtime take one step after each poll. It drops the future after its n-th poll,
//! for every n up to the poll that completes it. A drop leaves no task, no taken
//! permit and no stuck key, and the handler runs at most once.
//!
//! The inner futures are dropped too: each store call in turn never answers, so
//! that the store timeout drops it before or after it was applied.

use std::{
    convert::Infallible,
    fmt,
    future::{pending, poll_fn},
    sync::{
        Arc,
        atomic::{AtomicUsize, Ordering},
    },
    task::Poll,
    time::Duration,
};

use bytes::Bytes;
use futures_util::stream::{self, StreamExt as _};
use http::{Request, Response, StatusCode};
use http_body::{Body, Frame};
use http_body_util::{BodyExt as _, Full, StreamBody, combinators::UnsyncBoxBody};
use tokio::{
    runtime::Handle,
    task::yield_now,
    time::{self, Instant, sleep},
};
use tower::{Layer as _, Service, ServiceExt as _, service_fn, util::BoxCloneService};
use tower_idempotency::{
    Disconnect, Fence, IdempotencyBuilder, IdempotencyLayer, Key, MemoryStore, Operation, Outcome,
    Recovery, RejectionKind, RequestBody, ResponseBody, Scope, Store, StoreError,
    store::{
        Claim, Claimed, Grant, Purged, ReclaimAs, Record, RecordName, RecordState, Token,
        Transition, Transitioned,
        admin::{Filter, Page},
    },
};

#[tokio::test(start_paused = true)]
async fn f42_i15_a_request_dropped_at_any_poll_runs_once() {
    let seen = at_every_poll(async |polls| {
        let trial = Trial::new(|layer| layer);
        let ended = polled(trial.send(whole("amount=100")), polls).await;
        trial.settles().await;
        assert_ne!(trial.state().await, Some("unknown"));
        let retry = trial.send(whole("amount=100")).await;
        trial.ran_once();
        assert_eq!(retry.status(), StatusCode::CREATED);
        (ended.is_some(), outcome(&retry))
    })
    .await;
    assert!(seen.contains(&Outcome::Recorded) && seen.contains(&Outcome::Replayed));
}

#[tokio::test(start_paused = true)]
async fn f42_i11_a_run_cancelled_with_its_client_leaves_an_unknown_outcome() {
    let seen = at_every_poll(async |polls| {
        let trial = Trial::new(|layer| layer.disconnect(Disconnect::Cancel));
        let ended = polled(trial.send(whole("amount=100")), polls).await;
        trial.settles().await;
        let started = trial.runs();
        let state = trial.state().await;
        let retry = outcome(&trial.send(whole("amount=100")).await);
        trial.ran_once();
        match retry {
            // Its client left before the claim, or during it.
            Outcome::Recorded => {
                assert!(
                    started == 0 && matches!(state, None | Some("released")),
                    "{state:?}"
                );
            }
            Outcome::Replayed => assert_eq!((started, state), (1, Some("completed"))),
            UNKNOWN => assert_eq!((started, state), (1, Some("unknown"))),
            other => panic!("after {polls} polls a retry got {other:?}"),
        }
        (ended.is_some(), retry)
    })
    .await;
    assert!(seen.contains(&Outcome::Recorded) && seen.contains(&UNKNOWN));
}

#[tokio::test(start_paused = true)]
async fn f42_i13_a_waiter_dropped_at_any_poll_returns_its_permit() {
    let seen = at_every_poll(async |polls| {
        // One permit to wait: a second waiter shows whether the first returned it.
        let trial = Trial::new(|layer| layer.wait(MINUTE).max_waiters(1).max_in_flight(3));
        let owner = tokio::spawn(trial.send(whole("amount=100")));
        while trial.runs() == 0 {
            yield_now().await;
        }
        let ended = polled(trial.send(whole("amount=100")), polls).await;
        // A waiter notices within one pause that its client has left.
        for _ in 0..20 {
            yield_now().await;
        }
        let next = trial.send(whole("amount=100")).await;
        assert_eq!(outcome(&next), Outcome::Replayed, "after {polls} polls");
        let owner = owner.await.expect("the owner answers");
        assert_eq!(outcome(&owner), Outcome::Recorded);
        trial.settles().await;
        trial.ran_once();
        (ended.is_some(), Outcome::Replayed)
    })
    .await;
    assert!(
        seen.len() > 20,
        "the waiter waited for {} polls",
        seen.len()
    );
}

#[tokio::test(start_paused = true)]
async fn f6_a_completion_wakes_local_waiters_at_once() {
    for steps in 0..40 {
        let trial = Trial::new(|layer| layer.wait(MINUTE).max_in_flight(2));
        let owner = tokio::spawn(trial.send(whole("amount=100")));
        // The handler ends ten steps from now; the waiter comes after `steps`.
        sleep(LEASE / 2).await;
        for _ in 0..steps {
            yield_now().await;
        }
        let start = Instant::now();
        let waiter = trial.send(whole("amount=100")).await;
        assert_eq!(outcome(&waiter), Outcome::Replayed, "{steps} steps");
        assert_eq!(start.elapsed(), Duration::ZERO, "{steps} steps");
        owner.await.expect("the owner answers");
    }
}

#[tokio::test(start_paused = true)]
async fn f42_i4_a_replay_dropped_at_any_poll_changes_nothing() {
    at_every_poll(async |polls| {
        let trial = Trial::new(|layer| layer);
        let first = trial.send(whole("amount=100")).await;
        let before = trial.record().await;
        let ended = polled(trial.send(whole("amount=100")), polls).await;
        trial.settles().await;
        let after = trial.record().await;
        assert_eq!(
            (before.token, before.fence, before.attempt),
            (after.token, after.fence, after.attempt)
        );
        let retry = trial.send(whole("amount=100")).await;
        trial.ran_once();
        assert_eq!(outcome(&retry), Outcome::Replayed);
        assert_eq!(bytes(first).await, bytes(retry).await);
        (ended.is_some(), Outcome::Replayed)
    })
    .await;
}

#[tokio::test(start_paused = true)]
async fn f42_i2_a_takeover_dropped_at_any_poll_runs_once() {
    let seen = at_every_poll(async |polls| {
        let mut trial = Trial::new(|layer| layer.recovery(Recovery::Rerun));
        let dead = trial.die_in_progress(whole("amount=100")).await;
        let ended = polled(trial.send(whole("amount=100")), polls).await;
        trial.settles().await;
        let retry = trial.send(whole("amount=100")).await;
        let last = trial.record().await;
        trial.ran_once();
        assert_eq!(retry.status(), StatusCode::CREATED);
        assert!(last.fence > dead.fence && last.operation == dead.operation);
        assert_eq!((last.attempt, last.takeovers), (2, 1));
        (ended.is_some(), outcome(&retry))
    })
    .await;
    assert!(seen.contains(&Outcome::Recorded) && seen.contains(&Outcome::Replayed));
}

#[tokio::test(start_paused = true)]
async fn f42_f4_a_stream_dropped_at_any_poll_never_runs_again() {
    let seen = at_every_poll(async |polls| {
        let trial = Trial::new(|layer| layer.max_response_body(8));
        let whole_answer = async {
            let answer = trial.send(whole("live")).await;
            assert_eq!(outcome(&answer), Outcome::Streamed);
            bytes(answer).await.len()
        };
        let ended = polled(whole_answer, polls).await;
        trial.settles().await;
        let started = trial.runs();
        let retry = outcome(&trial.send(whole("live")).await);
        trial.settles().await;
        trial.ran_once();
        match retry {
            Outcome::Streamed => assert_eq!(started, 0),
            UNKNOWN => assert!(started == 1 && ended.is_none()),
            NOT_KEPT => assert!(started == 1 && ended.is_none_or(|length| length == 4 * 16)),
            other => panic!("after {polls} polls a retry got {other:?}"),
        }
        (ended.is_some(), retry)
    })
    .await;
    for expected in [Outcome::Streamed, UNKNOWN, NOT_KEPT] {
        assert!(seen.contains(&expected), "{expected:?}");
    }
}

#[tokio::test(start_paused = true)]
async fn f1_f42_an_upload_dropped_at_any_poll_leaves_nothing_behind() {
    let seen = at_every_poll(async |polls| {
        let trial = Trial::new(|layer| layer);
        let arrived = Arc::new(AtomicUsize::new(0));
        let ended = polled(trial.send(upload(&arrived)), polls).await;
        let complete = arrived.load(Ordering::SeqCst) == UPLOAD.len();
        trial.settles().await;
        if !complete {
            assert_eq!((trial.runs(), trial.state().await), (0, None));
            assert_eq!(trial.store.calls(), 0, "a claim without a whole body");
        }
        // The retry needs all of `max_buffered_bytes`.
        let retry = trial.send(upload(&arrived)).await;
        trial.ran_once();
        assert_eq!(retry.status(), StatusCode::CREATED);
        (ended.is_some(), outcome(&retry))
    })
    .await;
    assert!(seen.contains(&Outcome::Recorded) && seen.contains(&Outcome::Replayed));
}

#[tokio::test(start_paused = true)]
async fn f54_i15_any_store_call_of_a_request_may_be_dropped() {
    at_every_call(|layer| layer, None).await;
}

#[tokio::test(start_paused = true)]
async fn f54_i15_any_store_call_of_a_takeover_may_be_dropped() {
    at_every_call(
        |layer| layer.recovery(Recovery::Rerun),
        Some(Lapsed::IsRunAgain),
    )
    .await;
}

#[tokio::test(start_paused = true)]
async fn f54_i11_any_store_call_of_a_refusal_may_be_dropped() {
    at_every_call(|layer| layer, Some(Lapsed::IsRefused)).await;
}

#[tokio::test(start_paused = true)]
async fn f54_i13_any_store_call_of_a_waiter_may_be_dropped() {
    for when in [When::Before, When::After] {
        for number in 0.. {
            let trial = Trial::new(|layer| layer.wait(MINUTE).max_waiters(1).max_in_flight(2));
            let owner = tokio::spawn(trial.send(whole("amount=100")));
            while trial.runs() == 0 {
                yield_now().await;
            }
            trial.store.hang(trial.store.calls() + number, when);
            let waiter = trial.send(whole("amount=100")).await;
            owner.await.expect("the owner answers");
            trial.settles().await;
            let hung = trial.store.calls() > trial.store.hanging();
            trial.store.hang(usize::MAX, when);
            let allowed = [
                Outcome::Replayed,
                Outcome::Refused(RejectionKind::StoreUnavailable),
            ];
            assert!(
                allowed.contains(&outcome(&waiter)),
                "call {number} {when:?}"
            );
            let retry = trial.send(whole("amount=100")).await;
            assert_eq!(outcome(&retry), Outcome::Replayed, "call {number} {when:?}");
            trial.ran_once();
            if !hung {
                assert!(number > 3, "only {number} calls");
                break;
            }
        }
    }
}

/// The treatment of a claim whose owner died.
#[derive(Clone, Copy, PartialEq)]
enum Lapsed {
    IsRunAgain,
    IsRefused,
}

/// Lets each store call of one request hang in turn, and checks the outcome of a
/// retry.
async fn at_every_call(
    settings: fn(IdempotencyBuilder<Yielding>) -> IdempotencyBuilder<Yielding>,
    lapsed: Option<Lapsed>,
) {
    for when in [When::Before, When::After] {
        for number in 0.. {
            let mut trial = Trial::new(settings);
            if lapsed.is_some() {
                trial.die_in_progress(whole("amount=100")).await;
            }
            trial.store.hang(trial.store.calls() + number, when);
            let first = outcome(&trial.send(whole("amount=100")).await);
            trial.settles().await;
            let hung = trial.store.calls() > trial.store.hanging();
            trial.store.hang(usize::MAX, when);
            let retry = outcome(&trial.send(whole("amount=100")).await);
            let context = format!("call {number} dropped {when:?}: {first:?}, then {retry:?}");
            if lapsed == Some(Lapsed::IsRefused) {
                assert_eq!(retry, UNKNOWN, "{context}");
                assert_eq!(trial.runs(), 0, "{context}");
            } else {
                assert!(
                    matches!(retry, Outcome::Recorded | Outcome::Replayed),
                    "{context}"
                );
                assert_eq!(trial.runs(), 1, "{context}");
                // Only a run that is not repeated was answered.
                let answered = matches!(first, Outcome::Recorded | Outcome::Unrecorded);
                assert_eq!(answered, retry == Outcome::Replayed, "{context}");
            }
            if !hung {
                break;
            }
        }
    }
}

/// Runs `scenario` with 0, 1, 2 … polls until its future completes within them.
/// Returns the outcomes of the retries.
async fn at_every_poll(scenario: impl AsyncFn(usize) -> (bool, Outcome)) -> Vec<Outcome> {
    let mut seen = Vec::new();
    for polls in 0..MOST_POLLS {
        let (ended, retry) = scenario(polls).await;
        seen.push(retry);
        if ended {
            return seen;
        }
    }
    panic!("the request has not ended after {MOST_POLLS} polls");
}

/// Polls `future` up to `polls` times, with one step of the runtime after each,
/// and drops it. Returns its output if it completed.
async fn polled<F: Future>(future: F, polls: usize) -> Option<F::Output> {
    let mut future = Box::pin(future);
    for poll in 0..polls {
        let polled = poll_fn(|cx| Poll::Ready(future.as_mut().poll(cx))).await;
        if let Poll::Ready(output) = polled {
            return Some(output);
        }
        // The paused clock moves only while no task is ready to run.
        match poll % 6 {
            5 => sleep(Duration::from_millis(4)).await,
            _ => yield_now().await,
        }
    }
    None
}

/// One layer over one store, and the handler below it.
struct Trial {
    store: Yielding,
    service: BoxCloneService<Request<TestBody>, Response<ResponseBody<TestBody>>, Infallible>,
    runs: Arc<AtomicUsize>,
    /// The claim of a process that died.
    dead: Option<Token>,
}

type TestBody = UnsyncBoxBody<Bytes, Infallible>;

impl Trial {
    /// Limits suffice for exactly one request, so that the next one is refused if
    /// a dropped one keeps a permit.
    fn new(
        settings: impl FnOnce(IdempotencyBuilder<Yielding>) -> IdempotencyBuilder<Yielding>,
    ) -> Self {
        let store = Yielding::default();
        let builder = IdempotencyLayer::required(store.clone(), |_| Some(Scope::single_tenant()))
            .max_in_flight(1)
            .lease(LEASE)
            .max_request_body(UPLOAD_BYTES)
            .max_buffered_bytes(UPLOAD_BYTES)
            .store_timeout(Duration::from_millis(25))
            .late_recording_timeout(Duration::from_secs(30))
            .max_late_recording_bytes(1 << 10);
        let layer = settings(builder).build().expect("the settings are right");
        let runs = Arc::new(AtomicUsize::new(0));
        let counted = runs.clone();
        let handler = service_fn(move |request: Request<RequestBody<TestBody>>| {
            counted.fetch_add(1, Ordering::SeqCst);
            handle(request)
        });
        Self {
            store,
            service: BoxCloneService::new(layer.layer(handler)),
            runs,
            dead: None,
        }
    }

    fn send(
        &self,
        body: TestBody,
    ) -> impl Future<Output = Response<ResponseBody<TestBody>>> + Send + use<> {
        let mut service = self.service.clone();
        let request = Request::post("/payments")
            .header("idempotency-key", KEY)
            .body(body)
            .expect("the request is well-formed");
        async move {
            let ready = service.ready().await.expect("the handler is always ready");
            let Ok(response) = ready.call(request).await;
            response
        }
    }

    /// Waits until the tasks of the dropped request have ended.
    async fn settles(&self) {
        let tasks = Handle::current().metrics();
        let ended = async {
            while tasks.num_alive_tasks() > 0 {
                sleep(Duration::from_millis(20)).await;
            }
        };
        time::timeout(MINUTE, ended)
            .await
            .expect("every task comes to its end");
        let record = self.store.records.read(&name()).await;
        if let Some(record) = record.expect("memory answers") {
            assert!(
                !matches!(record.state, RecordState::InProgress { .. })
                    || Some(record.token) == self.dead,
                "I10: a request that has ended leaves no claim behind"
            );
        }
    }

    /// A claim of this request whose process died.
    async fn die_in_progress(&mut self, body: TestBody) -> Record {
        let dead = Self::new(|layer| layer);
        // Another layer computes the fingerprint of the same request.
        dead.send(body).await;
        let fingerprint = dead.record().await.fingerprint;
        let claim = Claim::new(fingerprint, Duration::from_millis(1), MINUTE * 60);
        let claimed = self.store.records.claim(&name(), &claim).await;
        assert!(matches!(claimed, Ok(Claimed::Acquired(_))));
        sleep(LEASE).await;
        self.dead = Some(claim.token);
        self.record().await
    }

    async fn record(&self) -> Record {
        let record = self.store.records.read(&name()).await;
        record.expect("memory answers").expect("there is a record")
    }

    async fn state(&self) -> Option<&'static str> {
        let record = self.store.records.read(&name()).await;
        record
            .expect("memory answers")
            .map(|record| match record.state {
                RecordState::InProgress { .. } => "in progress",
                RecordState::Completed { .. } => "completed",
                RecordState::Unknown => "unknown",
                RecordState::Released(_) => "released",
                other => panic!("{other:?}"),
            })
    }

    fn runs(&self) -> usize {
        self.runs.load(Ordering::SeqCst)
    }

    #[track_caller]
    fn ran_once(&self) {
        assert_eq!(self.runs(), 1, "I6: the handler runs once");
    }
}

/// Runs for longer than a heartbeat. Answers with its operation, or for `live` with
/// more than `max_response_body`.
async fn handle(request: Request<RequestBody<TestBody>>) -> Result<Response<TestBody>, Infallible> {
    let operation = request.extensions().get::<Operation>().cloned();
    let operation = operation.expect("the request is guarded");
    let sent = collected(request.into_body()).await;
    yield_now().await;
    sleep(LEASE / 2).await;
    for _ in 0..10 {
        yield_now().await;
    }
    let body = if sent == "live" {
        slowly(
            [[b'x'; 16]; 4]
                .map(|part| Bytes::copy_from_slice(&part))
                .into(),
            Arc::default(),
        )
    } else {
        whole(format!("{} done", operation.id()))
    };
    let mut response = Response::new(body);
    *response.status_mut() = StatusCode::CREATED;
    Ok(response)
}

fn whole(text: impl Into<Bytes>) -> TestBody {
    Full::new(text.into()).boxed_unsync()
}

fn upload(arrived: &Arc<AtomicUsize>) -> TestBody {
    arrived.store(0, Ordering::SeqCst);
    slowly(UPLOAD.map(Bytes::from_static).into(), arrived.clone())
}

/// A body with a pause before each of its parts.
fn slowly(parts: Vec<Bytes>, arrived: Arc<AtomicUsize>) -> TestBody {
    let parts = stream::iter(parts).then(move |part| {
        let arrived = arrived.clone();
        async move {
            yield_now().await;
            sleep(Duration::from_millis(2)).await;
            arrived.fetch_add(1, Ordering::SeqCst);
            Ok(Frame::data(part))
        }
    });
    StreamBody::new(parts).boxed_unsync()
}

async fn bytes(response: Response<ResponseBody<TestBody>>) -> Bytes {
    collected(response.into_body()).await
}

async fn collected<B: Body<Data = Bytes, Error: fmt::Debug>>(body: B) -> Bytes {
    body.collect().await.unwrap().to_bytes()
}

#[track_caller]
fn outcome<B>(response: &Response<B>) -> Outcome {
    *response
        .extensions()
        .get()
        .expect("a guarded request has an outcome")
}

fn name() -> RecordName {
    RecordName::new(Scope::single_tenant(), Key::new(KEY.trim_matches('"')))
}

/// A remote store: each call yields before it is applied and again before its
/// answer arrives. One call may hang.
#[derive(Clone, Default)]
struct Yielding {
    records: MemoryStore,
    calls: Arc<AtomicUsize>,
    hanging: Arc<Hanging>,
}

#[derive(Default)]
struct Hanging {
    number: AtomicUsize,
    after: AtomicUsize,
}

/// Whether a call hangs before or after it is applied.
#[derive(Clone, Copy, Debug, PartialEq)]
enum When {
    Before,
    After,
}

impl Yielding {
    fn calls(&self) -> usize {
        self.calls.load(Ordering::SeqCst)
    }

    /// Lets the call with this number hang, counted from 0.
    fn hang(&self, number: usize, when: When) {
        let after = usize::from(when == When::After);
        self.hanging.after.store(after, Ordering::SeqCst);
        let stored = number.saturating_add(1);
        self.hanging.number.store(stored, Ordering::SeqCst);
    }

    fn hanging(&self) -> usize {
        self.hanging.number.load(Ordering::SeqCst) - 1
    }

    async fn far_away<T>(
        &self,
        call: impl Future<Output = Result<T, StoreError>>,
    ) -> Result<T, StoreError> {
        let number = self.calls.fetch_add(1, Ordering::SeqCst) + 1;
        let hangs = number == self.hanging.number.load(Ordering::SeqCst);
        let after = self.hanging.after.load(Ordering::SeqCst) == 1;
        yield_now().await;
        yield_now().await;
        if hangs && !after {
            pending::<()>().await;
        }
        let answer = call.await;
        yield_now().await;
        if hangs {
            pending::<()>().await;
        }
        yield_now().await;
        answer
    }
}

impl Store for Yielding {
    async fn claim(&self, name: &RecordName, claim: &Claim) -> Result<Claimed, StoreError> {
        self.far_away(self.records.claim(name, claim)).await
    }

    async fn reclaim(
        &self,
        name: &RecordName,
        seen: Fence,
        reclaim_as: ReclaimAs,
        claim: &Claim,
    ) -> Result<Option<Grant>, StoreError> {
        self.far_away(self.records.reclaim(name, seen, reclaim_as, claim))
            .await
    }

    async fn transition(
        &self,
        name: &RecordName,
        transition: Transition,
    ) -> Result<Transitioned, StoreError> {
        self.far_away(self.records.transition(name, transition))
            .await
    }

    async fn read(&self, name: &RecordName) -> Result<Option<Record>, StoreError> {
        let answer = self.far_away(self.records.read(name)).await;
        // Long enough for a completion to be applied and answered meanwhile.
        for _ in 0..6 {
            yield_now().await;
        }
        answer
    }

    async fn list(
        &self,
        filter: &Filter,
        after: Option<&RecordName>,
        limit: u32,
    ) -> Result<Page, StoreError> {
        self.far_away(self.records.list(filter, after, limit)).await
    }

    async fn purge_expired(
        &self,
        limit: u32,
        unknown_retention: Duration,
    ) -> Result<Purged, StoreError> {
        self.far_away(self.records.purge_expired(limit, unknown_retention))
            .await
    }
}

const UNKNOWN: Outcome = Outcome::Refused(RejectionKind::OutcomeUnknown);
const NOT_KEPT: Outcome = Outcome::Refused(RejectionKind::ResponseNotReplayable);
const KEY: &str = "\"a-key-of-one-client\"";
const LEASE: Duration = Duration::from_millis(90);
const MINUTE: Duration = Duration::from_secs(60);
const UPLOAD: [&[u8]; 3] = [b"amount", b"=", b"100"];
const UPLOAD_BYTES: usize = 10;
const MOST_POLLS: usize = 1_000;
