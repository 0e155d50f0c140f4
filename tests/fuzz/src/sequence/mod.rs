//! Sequences of requests, against a model of the contract.

mod checks;
mod handler;
mod model;
mod steps;

use std::{collections::BTreeMap, fmt, sync::Arc, time::Duration};

use arbitrary::Unstructured;
use bytes::Bytes;
use http::{Request, Response as HttpResponse, StatusCode};
use tokio::{
    runtime::Builder,
    task::JoinHandle,
    time::{Instant, sleep, timeout},
};
use tower_idempotency::{
    IdempotencyLayer, Key, MemoryStore, Operation, Recovery, Scope, Store,
    store::{
        RecordName, Transitioned,
        admin::{RecordedResponse, Resolution},
    },
    test_support::{Fault, FaultyStore, StoreCall},
};

use self::{
    handler::{Received, Runs, Service, received, service},
    model::{
        ATTEMPTS, Answer, LARGEST, LEASE, LONGEST_RUN, Model, RESOLVED_FOR, RETENTION, Response,
        UNKNOWN_RETENTION,
    },
    steps::{End, Name, Plan, Step, StoreFault, step},
};

/// Makes up to 24 steps, and compares each answer and the number of runs.
pub fn sequence(data: &[u8]) {
    let mut input = Unstructured::new(data);
    let reruns = input.arbitrary().unwrap_or_default();
    // Tasks that hang end with their runtime.
    let runtime = Builder::new_current_thread()
        .enable_time()
        .start_paused(true)
        .build()
        .expect("a runtime of one thread needs nothing");
    runtime.block_on(async {
        let mut world = World::new(reruns);
        for _ in 0..STEPS {
            if input.is_empty() {
                break;
            }
            let Ok(step) = step(&mut input) else { break };
            world.history.push(format!("{step:?}"));
            world.make(step).await;
        }
        world.pass(SLOW * 2).await;
        assert_eq!(world.runs.count(), world.expected_runs, "{world}");
    });
}

struct World {
    model: Model,
    store: FaultyStore<MemoryStore>,
    service: Service,
    runs: Arc<Runs>,
    expected_runs: usize,
    running: BTreeMap<Name, Running>,
    operations: BTreeMap<Name, Operation>,
    history: Vec<String>,
}

/// A run that takes time.
struct Running {
    ends_at: Instant,
    plan: Plan,
    run: usize,
    /// `None` if its client has left.
    client: Option<JoinHandle<Received>>,
}

impl World {
    fn new(reruns: bool) -> Self {
        let store = FaultyStore::new(MemoryStore::new());
        let recovery = if reruns {
            Recovery::Rerun
        } else {
            Recovery::Refuse
        };
        let scope = |parts: &http::request::Parts| {
            Scope::new(parts.headers.get("x-caller")?.to_str().ok()?)
        };
        let layer = IdempotencyLayer::required(store.clone(), scope)
            .recovery(recovery)
            .max_attempts(ATTEMPTS)
            .retention(RETENTION)
            .unknown_retention(UNKNOWN_RETENTION)
            .lease(LEASE)
            .max_run_time(LONGEST_RUN)
            .max_response_body(LARGEST)
            .build()
            .expect("the settings are valid");
        let runs = Arc::new(Runs::default());
        Self {
            model: Model {
                reruns,
                records: BTreeMap::new(),
            },
            store,
            service: service(&layer, Arc::clone(&runs)),
            runs,
            expected_runs: 0,
            running: BTreeMap::new(),
            operations: BTreeMap::new(),
            history: Vec::new(),
        }
    }

    async fn make(&mut self, step: Step) {
        if self.model.is_about_to_lapse(Instant::now()) {
            self.pass(LEASE * 10).await;
        }
        match step {
            Step::Wait(time) => self.pass(time).await,
            Step::Sweep => {
                let swept = self.store.purge_expired(100, UNKNOWN_RETENTION);
                let _ = swept.await.expect("memory answers");
                self.model.sweep(Instant::now());
            }
            // An owner that is superseded answers with another's response.
            Step::Forget(name) if self.is_slow(name) => {}
            Step::Forget(name) => self.forget(name).await,
            Step::Resolve { name, happened } => self.resolve(name, happened).await,
            Step::Send {
                name,
                request,
                plan,
                fault: None,
            } => self.send(name, request, plan).await,
            Step::Send {
                name,
                request,
                plan,
                fault: Some(fault),
            } => {
                self.pass(SLOW * 2).await;
                self.send_despite(name, request, plan, fault).await;
                self.store.heal();
                self.pass(UNTIL_RECORDED).await;
            }
        }
        sleep(Duration::from_millis(1)).await;
    }

    async fn send(&mut self, name: Name, request: u8, plan: Plan) {
        let now = Instant::now();
        let answer = self.model.send(name, request, &plan, now, true);
        let (Answer::Runs, true) = (&answer, plan.takes_time()) else {
            let received = self.ask(name, request, &plan).await;
            return self.check(name, &plan, &answer, received, false);
        };
        self.expected_runs += 1;
        let service = self.service.clone();
        let client = tokio::spawn(received(service, asked(name, request, &plan)));
        sleep(Duration::from_millis(1)).await;
        self.check_operation(name);
        let client = match plan.client_leaves {
            true => {
                client.abort();
                None
            }
            false => Some(client),
        };
        if plan.end != End::Hangs {
            let running = Running {
                ends_at: now + SLOW,
                plan,
                run: self.expected_runs,
                client,
            };
            self.running.insert(name, running);
        }
    }

    async fn send_despite(&mut self, name: Name, request: u8, plan: Plan, fault: StoreFault) {
        let unavailable = Fault::unavailable();
        match fault {
            StoreFault::Claim => {
                self.store.inject(StoreCall::Claim, .., unavailable);
                let received = self.ask(name, request, &plan).await;
                let refused = Answer::Refused(StatusCode::SERVICE_UNAVAILABLE, "store-unavailable");
                self.check(name, &plan, &refused, received, false);
                return self.model.withdraw(name, request, Instant::now());
            }
            StoreFault::ClaimAnswer => {
                let next = self.store.calls_of(StoreCall::Claim) + 1;
                let lost = Fault::LoseAnswer;
                self.store.inject(StoreCall::Claim, next..=next, lost);
            }
            StoreFault::End => {
                for call in [
                    StoreCall::Complete,
                    StoreCall::Release,
                    StoreCall::MarkUnknown,
                ] {
                    self.store.inject(call, .., unavailable.clone());
                }
            }
        }
        let marks = fault != StoreFault::End;
        let answer = self.model.send(name, request, &plan, Instant::now(), marks);
        let received = self.ask(name, request, &plan).await;
        self.check(name, &plan, &answer, received, !marks);
    }

    async fn ask(&self, name: Name, request: u8, plan: &Plan) -> Received {
        let received = received(self.service.clone(), asked(name, request, plan));
        let Ok(received) = timeout(LONGEST_RUN, received).await else {
            panic!("a request that must not run hangs {self}");
        };
        received
    }

    /// Lets time pass. Slow handlers end.
    async fn pass(&mut self, time: Duration) {
        sleep(time).await;
        let now = Instant::now();
        let ended = self
            .running
            .extract_if(.., |_, running| running.ends_at <= now);
        for (name, running) in ended.collect::<Vec<_>>() {
            let Running {
                ends_at,
                plan,
                run,
                client,
            } = running;
            if let Some(client) = client {
                let received = client.await.expect("clients do not fail");
                self.check_run(&plan, run, received, false);
            }
            self.model.end(name, &plan, run, ends_at);
        }
    }

    fn is_slow(&self, name: Name) -> bool {
        self.running.contains_key(&name)
    }

    async fn forget(&mut self, name: Name) {
        let stored = stored(name);
        if let Some(record) = self.store.read(&stored).await.expect("memory answers") {
            let forgotten = self.store.forget(&stored, record.fence).await;
            assert_eq!(forgotten.expect("memory answers"), Transitioned::Applied);
        }
        self.model.forget(name);
    }

    async fn resolve(&mut self, name: Name, happened: bool) {
        let stored = stored(name);
        let Some(record) = self.store.read(&stored).await.expect("memory answers") else {
            return;
        };
        let response = Response {
            status: StatusCode::ACCEPTED,
            text: "an operator's".to_owned(),
        };
        let resolution = match happened {
            true => {
                let response = HttpResponse::builder()
                    .status(response.status)
                    .body(response.text.clone());
                let response = RecordedResponse::new(response.expect("a valid response"));
                Resolution::Happened(response.expect("its body is whole"))
            }
            false => Resolution::DidNotHappen,
        };
        let resolved = self
            .store
            .resolve(&stored, record.fence, &resolution, RESOLVED_FOR);
        let resolved = resolved.await.expect("memory answers") == Transitioned::Applied;
        let response = Some(response).filter(|_| happened);
        let expected = self.model.resolve(name, response, Instant::now());
        assert_eq!(resolved, expected, "{self}");
    }
}

/// The steps so far.
impl fmt::Display for World {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "after\n{}", self.history.join("\n"))
    }
}

fn asked((caller, key): Name, request: u8, plan: &Plan) -> Request<Bytes> {
    let (path, body) = match request {
        0 => ("/", "a"),
        1 => ("/", "b"),
        _ => ("/other", "a"),
    };
    Request::post(path)
        .header("x-caller", u16::from(caller))
        .header("idempotency-key", format!("key-{key}"))
        .extension(plan.clone())
        .body(body.into())
        .expect("a valid request")
}

fn stored((caller, key): Name) -> RecordName {
    let scope = Scope::new(caller.to_string()).expect("a caller");
    RecordName::new(scope, Key::new(format!("key-{key}")))
}

const STEPS: usize = 24;
/// The time that a slow handler takes.
const SLOW: Duration = Duration::from_secs(5);
/// By then an outcome is recorded, and a claim withdrawn.
const UNTIL_RECORDED: Duration = Duration::from_secs(60);
