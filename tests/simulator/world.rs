//! One round: hosts, clients, a store, and the faults between them.

use std::{
    collections::{BTreeMap, BTreeSet, HashMap, hash_map::DefaultHasher},
    hash::{Hash, Hasher as _},
    pin::pin,
    sync::{
        Arc, Mutex, MutexGuard, PoisonError,
        atomic::{AtomicBool, Ordering},
    },
    task::{Context, Poll, Waker},
    time::Duration,
};

use http::{Request, Response};
use rand::{RngExt as _, SeedableRng as _, rngs::StdRng};
use tokio::{
    task::JoinSet,
    time::{self, Instant, sleep},
};
use tokio_util::sync::CancellationToken;
use tower::{Layer as _, service_fn, util::BoxCloneService};
use tower_idempotency::{
    Fence, IdempotencyLayer, Key, MemoryStore, OperationId, Recovery, ResponseBody, Scope,
    Store as _, seed_jitter,
    store::{
        Claim, Fingerprint, Grant, Record, RecordName, RecordState, Token, Transitioned,
        admin::{Filter, RecordedResponse, Resolution},
    },
};

use crate::{
    client::{self, OTHER, USUAL},
    handler::{Broken, Deed, SimBody, handle},
    history::{Brought, Call, Event, Granted, Line, Shown, ShownState},
    link::{Link, Way},
};

/// The result of a round.
pub(crate) struct Round {
    pub(crate) history: Vec<Line>,
    pub(crate) tally: Tally,
    /// Failures that the history does not show.
    pub(crate) faults: Vec<String>,
}

pub(crate) type Tally = BTreeMap<&'static str, usize>;

type Service = BoxCloneService<Request<SimBody>, Response<ResponseBody<SimBody>>, Broken>;

pub(crate) struct World {
    pub(crate) records: MemoryStore,
    start: Instant,
    names: Vec<RecordName>,
    recovery: Recovery,
    calm: AtomicBool,
    /// `None` while the host is down.
    hosts: [Mutex<Option<Host>>; HOSTS],
    cut_off: [AtomicBool; HOSTS],
    inner: Mutex<Inner>,
}

/// A host in one of its lives.
struct Host {
    life: CancellationToken,
    layer: IdempotencyLayer<Link>,
    service: Service,
}

struct Inner {
    dice: StdRng,
    history: Vec<Line>,
    tally: Tally,
    tokens: HashMap<Token, usize>,
    operations: HashMap<OperationId, usize>,
    fingerprints: HashMap<[u8; Fingerprint::LENGTH], usize>,
    /// The tokens whose completion has been tried.
    tried: BTreeSet<usize>,
    runs: usize,
    requests: usize,
    /// The keys under which a payment provider has charged.
    charges: BTreeSet<String>,
}

/// Plays one round, the same for the same seed.
pub(crate) fn play(seed: u64, recovery: Recovery) -> Round {
    seed_jitter(seed);
    tokio::runtime::Builder::new_current_thread()
        .enable_time()
        .start_paused(true)
        .build()
        .expect("a runtime")
        .block_on(round(seed, recovery))
}

async fn round(seed: u64, recovery: Recovery) -> Round {
    let world = World::new(seed, recovery);
    let mut actors = JoinSet::new();
    for _ in 0..CLIENTS {
        actors.spawn(client::client(world.clone()));
    }
    actors.spawn(chaos(world.clone()));
    actors.spawn(operator(world.clone()));
    sleep(CHAOS).await;
    world.calm.store(true, Ordering::SeqCst);
    let mut faults = Vec::new();
    while let Some(ended) = actors.join_next().await {
        if let Err(error) = ended {
            faults.push(format!("an actor failed: {error}"));
        }
    }
    for host in 0..HOSTS {
        world.connect(host);
        world.revive(host);
    }
    // The last delayed calls arrive.
    sleep(LATEST).await;
    faults.extend(each_key_gets_an_answer(&world).await);
    faults.extend(everything_ends(&world).await);
    for host in 0..HOSTS {
        world.kill(host);
    }
    let mut inner = world.inner();
    Round {
        history: std::mem::take(&mut inner.history),
        tally: std::mem::take(&mut inner.tally),
        faults,
    }
}

/// Kills, revives and cuts off hosts, lets all clocks jump, and sweeps.
async fn chaos(world: Arc<World>) {
    while !world.is_calm() {
        sleep(world.up_to(Duration::from_millis(1500))).await;
        let host = world.dice(HOSTS);
        match world.dice(10) {
            0..=2 => {
                world.kill(host);
                let world = world.clone();
                tokio::spawn(async move {
                    sleep(world.up_to(LEASE * 2)).await;
                    world.revive(host);
                });
            }
            3..=5 => {
                world.cut_off[host].store(true, Ordering::SeqCst);
                let what = "is cut off";
                world.push(Event::Weather { host, what });
                let world = world.clone();
                tokio::spawn(async move {
                    sleep(world.up_to(LEASE * 3)).await;
                    world.connect(host);
                });
            }
            6 => {
                let still = world.up_to(LEASE * 2);
                world.push(Event::Stood { still });
                time::advance(still).await;
            }
            7 | 8 => {
                sweep(&world);
            }
            _ => {}
        }
    }
}

/// The output of a future that yields but never waits. No other task runs
/// meanwhile.
fn at_once<T>(future: impl Future<Output = T>) -> T {
    let mut future = pin!(future);
    let mut cx = Context::from_waker(Waker::noop());
    loop {
        if let Poll::Ready(output) = future.as_mut().poll(&mut cx) {
            return output;
        }
    }
}

fn sweep(world: &World) {
    let purged = world.records.purge_expired(u32::MAX, UNKNOWN_RETENTION);
    let purged = at_once(purged).expect("memory answers");
    world.push(Event::Swept { purged });
}

/// Resolves some unknown outcomes by the charges of the provider.
async fn operator(world: Arc<World>) {
    while !world.is_calm() {
        sleep(world.up_to(Duration::from_secs(8))).await;
        let unknown = world.records.list(&Filter::unknown(), None, u32::MAX).await;
        let mut unknown = unknown.expect("memory answers").records;
        unknown.sort_by(|(one, _), (other, _)| one.cmp(other));
        if unknown.is_empty() {
            continue;
        }
        let (name, record) = unknown.swap_remove(world.dice(unknown.len()));
        let number = world.number_of(&name);
        let charged = record.operation.derive("charge");
        let charged = world.inner().charges.contains(&charged);
        let (resolution, happened) = if charged {
            let said = world.payload(
                number,
                "found",
                world.operation(record.operation),
                record.attempt,
                record.fence.get(),
            );
            let response = RecordedResponse::new(Response::new(said)).unwrap();
            let happened = digest(&response.encode());
            (Resolution::Happened(response), Some(happened))
        } else {
            (Resolution::DidNotHappen, None)
        };
        let resolved = world
            .records
            .resolve(&name, record.fence, &resolution, LEASE);
        let resolved = resolved.await.expect("memory answers");
        world.push(Event::Called {
            name: number,
            host: usize::MAX,
            call: Call::Resolve {
                seen: record.fence.get(),
                happened,
                at_least: LEASE,
            },
            applied: resolved == Transitioned::Applied,
        });
    }
}

/// I16: after the last fault, each key has its final answer within its wait, one
/// lease and one attempt.
async fn each_key_gets_an_answer(world: &Arc<World>) -> Vec<String> {
    let mut asked = JoinSet::new();
    for name in 0..world.names.len() {
        let world = world.clone();
        asked.spawn(async move {
            let start = Instant::now();
            let mut last = None;
            while start.elapsed() <= WAIT + LEASE + LONGEST_RUN + LEASE {
                let answer = client::request(&world, name, USUAL, CHAOS).await;
                last = answer.map(|answer| answer.outcome);
                match last {
                    Some("request-in-progress" | "store-unavailable") | None => {
                        sleep(Duration::from_millis(500)).await;
                    }
                    Some(_) => return None,
                }
            }
            Some(format!("I16: the last answer for key {name} was {last:?}"))
        });
    }
    let mut faults = Vec::new();
    while let Some(fault) = asked.join_next().await {
        faults.extend(fault.expect("clients do not fail"));
    }
    faults
}

/// I10: every state has an end, and so has every task of a living host.
async fn everything_ends(world: &Arc<World>) -> Vec<String> {
    let mut faults = Vec::new();
    for host in 0..HOSTS {
        let layer = world.host(host).as_ref().map(|host| host.layer.clone());
        let layer = layer.expect("every host is up");
        let left = layer.drain(LATE_TIME + LONGEST_RUN * 2).await.left();
        if left > 0 {
            faults.push(format!(
                "I10: host {host} could not be drained: {left} are left"
            ));
        }
    }
    for _ in 0..4 {
        sleep(RETENTION.max(UNKNOWN_RETENTION) + LEASE).await;
        sweep(world);
    }
    if !world.records.is_empty() {
        faults.push(format!(
            "I10: {} records stay for ever",
            world.records.len()
        ));
    }
    faults
}

impl World {
    fn new(seed: u64, recovery: Recovery) -> Arc<Self> {
        let names = ["ann", "bob"].iter().flat_map(|scope| {
            (0..KEYS).map(move |key| {
                let scope = Scope::new(scope).expect("a caller");
                RecordName::new(scope, Key::new(format!("key-number-{key}")))
            })
        });
        let world = Arc::new(Self {
            records: MemoryStore::new(),
            start: Instant::now(),
            names: names.collect(),
            recovery,
            calm: AtomicBool::new(false),
            hosts: Default::default(),
            cut_off: Default::default(),
            inner: Mutex::new(Inner {
                dice: StdRng::seed_from_u64(seed),
                history: Vec::new(),
                tally: Tally::new(),
                tokens: HashMap::new(),
                operations: HashMap::new(),
                fingerprints: HashMap::new(),
                tried: BTreeSet::new(),
                runs: 0,
                requests: 0,
                charges: BTreeSet::new(),
            }),
        });
        for host in 0..HOSTS {
            world.revive(host);
        }
        world
    }

    /// Starts a host that is down.
    fn revive(self: &Arc<Self>, host: usize) {
        let mut place = self.host(host);
        if place.is_some() {
            return;
        }
        let life = CancellationToken::new();
        let link = Link {
            world: self.clone(),
            host,
            life: life.clone(),
        };
        let layer = IdempotencyLayer::required(link, |parts| {
            Scope::new(parts.headers.get("x-account")?.to_str().ok()?)
        })
        .recovery(self.recovery.clone())
        .max_attempts(ATTEMPTS)
        .wait(WAIT)
        .max_waiters(2)
        .lease(LEASE)
        .max_run_time(LONGEST_RUN)
        .store_timeout(STORE_TIMEOUT)
        .late_recording_timeout(LATE_TIME)
        .max_late_recording_bytes(1 << 20)
        .max_response_body(RESPONSE_LIMIT)
        .retention(RETENTION)
        .unknown_retention(UNKNOWN_RETENTION)
        .build()
        .expect("the settings are right");
        let world = self.clone();
        let alive = life.clone();
        let handler =
            service_fn(move |request| handle(world.clone(), host, alive.clone(), request));
        *place = Some(Host {
            life,
            service: BoxCloneService::new(layer.layer(handler)),
            layer,
        });
        drop(place);
        let what = "is up";
        self.push(Event::Weather { host, what });
    }

    /// Stops a host where it stands.
    fn kill(&self, host: usize) {
        let Some(killed) = self.host(host).take() else {
            return;
        };
        killed.life.cancel();
        let what = "dies";
        self.push(Event::Weather { host, what });
    }

    fn connect(&self, host: usize) {
        self.cut_off[host].store(false, Ordering::SeqCst);
        let what = "is connected";
        self.push(Event::Weather { host, what });
    }

    fn host(&self, host: usize) -> MutexGuard<'_, Option<Host>> {
        self.hosts[host]
            .lock()
            .unwrap_or_else(PoisonError::into_inner)
    }

    fn inner(&self) -> MutexGuard<'_, Inner> {
        self.inner.lock().unwrap_or_else(PoisonError::into_inner)
    }

    pub(crate) fn is_calm(&self) -> bool {
        self.calm.load(Ordering::SeqCst)
    }

    pub(crate) fn push(&self, event: Event) {
        let now = self.start.elapsed();
        self.inner().history.push((now, event));
    }

    pub(crate) fn count(&self, what: &'static str) {
        *self.inner().tally.entry(what).or_default() += 1;
    }
}

/// Random choices.
impl World {
    fn dice(&self, sides: usize) -> usize {
        self.inner().dice.random_range(0..sides)
    }

    pub(crate) fn up_to(&self, time: Duration) -> Duration {
        let share = self.inner().dice.random_range(0.0..1.0);
        time.mul_f64(share)
    }

    /// A key, and whether it is reused for another request.
    pub(crate) fn intention(&self) -> (usize, bool) {
        (self.dice(self.names.len()), self.dice(12) == 0)
    }

    /// How long a client waits: some leave at once, most do not leave.
    pub(crate) fn patience(&self) -> Duration {
        match self.dice(4) {
            0 => self.up_to(LEASE),
            _ => LONGEST_RUN * 2,
        }
    }

    pub(crate) fn some_host(&self) -> Option<(usize, Service, CancellationToken)> {
        let first = self.dice(HOSTS);
        (0..HOSTS).find_map(|step| {
            let number = (first + step) % HOSTS;
            let host = self.host(number);
            let host = host.as_ref()?;
            Some((number, host.service.clone(), host.life.clone()))
        })
    }

    pub(crate) fn deed(&self) -> Deed {
        if self.is_calm() {
            return Deed::Quick;
        }
        let sum = Deed::ALL.iter().map(|(_, parts)| parts).sum::<u32>();
        let mut left = self.inner().dice.random_range(0..sum);
        for (deed, parts) in Deed::ALL {
            if left < parts {
                return deed;
            }
            left -= parts;
        }
        unreachable!("the parts add up")
    }

    /// The fate of a call to the store.
    pub(crate) fn way(&self, host: usize) -> Way {
        let brief = Duration::from_millis(6);
        let clear = |there, back| Way::Clear { there, back };
        if self.is_calm() {
            return clear(brief, brief);
        }
        if self.cut_off[host].load(Ordering::SeqCst) {
            return match self.dice(3) {
                0 => Way::Refused,
                _ => Way::Stuck,
            };
        }
        match self.dice(100) {
            0..=2 => Way::Refused,
            3..=6 => Way::Lost,
            7 | 8 => Way::Stuck,
            9..=11 => Way::StuckAfter,
            12 => Way::Late(STORE_TIMEOUT + self.up_to(LATEST - STORE_TIMEOUT)),
            13..=16 => clear(self.up_to(STORE_TIMEOUT), self.up_to(STORE_TIMEOUT)),
            _ => clear(self.up_to(brief), self.up_to(brief)),
        }
    }
}

/// Numbers that stand for random or long values.
impl World {
    pub(crate) fn run(&self) -> usize {
        let mut inner = self.inner();
        inner.runs += 1;
        inner.runs
    }

    pub(crate) fn request(&self) -> usize {
        let mut inner = self.inner();
        inner.requests += 1;
        inner.requests
    }

    pub(crate) fn number_of(&self, name: &RecordName) -> usize {
        let number = self.names.iter().position(|other| other == name);
        number.expect("I9: a name that some client sent")
    }

    pub(crate) fn numbered(&self, scope: &Scope, key: &Key) -> usize {
        self.number_of(&RecordName::new(scope.clone(), key.clone()))
    }

    pub(crate) fn spelled(&self, name: usize) -> (&str, &str) {
        let name = &self.names[name];
        (name.scope().as_str(), name.key().as_str())
    }

    pub(crate) fn token(&self, token: Token) -> usize {
        if *token.as_bytes() == [0; 16] {
            return NOBODY;
        }
        let tokens = &mut self.inner().tokens;
        let next = tokens.len();
        *tokens.entry(token).or_insert(next)
    }

    pub(crate) fn operation(&self, operation: OperationId) -> usize {
        let operations = &mut self.inner().operations;
        let next = operations.len();
        *operations.entry(operation).or_insert(next)
    }

    pub(crate) fn brought(&self, claim: &Claim) -> Brought {
        Brought {
            token: self.token(claim.token),
            fingerprint: self.fingerprint(claim.fingerprint.as_bytes()),
            lease: claim.lease,
            retention: claim.retention,
        }
    }

    pub(crate) fn granted(&self, grant: &Grant) -> Granted {
        Granted {
            operation: self.operation(grant.operation),
            fence: grant.fence.get(),
            attempt: grant.attempt,
        }
    }

    pub(crate) fn shown(&self, record: &Record) -> Shown {
        Shown {
            token: self.token(record.token),
            operation: self.operation(record.operation),
            fence: Fence::get(record.fence),
            attempt: record.attempt,
            takeovers: record.takeovers,
            fingerprint: self.fingerprint(record.fingerprint.as_bytes()),
            expired: record.expires_in.is_none(),
            state: match &record.state {
                RecordState::InProgress { lease_left } => ShownState::InProgress {
                    lapsed: lease_left.is_none(),
                },
                RecordState::Completed { response } => ShownState::Completed {
                    response: digest(response),
                },
                RecordState::Unknown => ShownState::Unknown,
                RecordState::Released(release) => ShownState::Released(*release),
                other => unreachable!("{other:?}"),
            },
        }
    }

    fn fingerprint(&self, fingerprint: &[u8; Fingerprint::LENGTH]) -> usize {
        let fingerprints = &mut self.inner().fingerprints;
        let next = fingerprints.len();
        *fingerprints.entry(*fingerprint).or_insert(next)
    }

    /// The body of an answer, which the oracle parses.
    pub(crate) fn payload(
        &self,
        name: usize,
        body: &str,
        operation: usize,
        attempt: u32,
        fence: u64,
    ) -> String {
        format!("{name} {body} {operation} {attempt} {fence}")
    }

    pub(crate) fn body_of(sent: &[u8]) -> &'static str {
        let bodies = [USUAL, OTHER];
        let body = bodies.into_iter().find(|body| body.as_bytes() == sent);
        body.expect("a body arrives as it was sent")
    }

    /// Charges once for each key.
    pub(crate) fn charge(&self, key: &str) {
        self.inner().charges.insert(key.to_owned());
    }

    /// Whether a completion with this token has been tried before.
    pub(crate) fn tries_again(&self, token: Token) -> bool {
        let token = self.token(token);
        !self.inner().tried.insert(token)
    }
}

pub(crate) fn digest(bytes: &[u8]) -> u64 {
    let mut hasher = DefaultHasher::new();
    bytes.hash(&mut hasher);
    hasher.finish()
}

pub(crate) const LEASE: Duration = Duration::from_secs(3);
pub(crate) const LONGEST_RUN: Duration = Duration::from_secs(9);
pub(crate) const RESPONSE_LIMIT: usize = 400;
pub(crate) const ATTEMPTS: u32 = 4;
/// Stands for the token of a record that an operator resolved.
pub(crate) const NOBODY: usize = usize::MAX;
const HOSTS: usize = 3;
const CLIENTS: usize = 8;
const KEYS: usize = 4;
const WAIT: Duration = Duration::from_secs(2);
const STORE_TIMEOUT: Duration = Duration::from_millis(400);
/// The longest that a call takes to reach the store.
const LATEST: Duration = Duration::from_secs(4);
const LATE_TIME: Duration = Duration::from_secs(20);
const RETENTION: Duration = Duration::from_secs(25);
pub(crate) const UNKNOWN_RETENTION: Duration = Duration::from_secs(20);
const CHAOS: Duration = Duration::from_secs(120);
