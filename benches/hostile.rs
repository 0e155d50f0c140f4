//! Hostile requests of one caller beside the requests of another one.
//!
//! `cargo bench -p benches --bench hostile -- --requests 1000000 --rate 10000`
//!
//! Keys are missing, invalid or far too long. One key comes with other bodies. New keys
//! exceed a quota. Bodies are too large, or never end. Some callers are new each time, and
//! some requests are replays.
//!
//! The requests are made in the process, at a fixed rate. The processor of an attacker is not
//! that of the server, so their thread has a low priority (`--nice`, 19 by default). What
//! remains is the work of the server itself. To tell the layer's part, the same requests are
//! first sent to the same handler without the layer.
//!
//! Prints the number of answers by status, and the resident memory at the start, after a
//! tenth and at the end. Prints the other caller's latency alone, beside the requests to the
//! bare handler, and beside those to the layer. Before that, prints the time that each kind
//! of request takes. `--kinds OtherBody,OverQuota` sends these kinds alone.

#![allow(missing_docs, clippy::print_stdout, reason = "a program that reports")]

use std::{
    collections::BTreeMap,
    convert::Infallible,
    env,
    fmt::Debug,
    fs,
    pin::Pin,
    process::Command,
    str::FromStr,
    sync::{Arc, Mutex},
    task::{Context, Poll, ready},
    thread,
    time::{Duration, Instant},
};

use bytes::Bytes;
use hdrhistogram::Histogram;
use http::{Request, Response, StatusCode};
use http_body::{Body, Frame};
use http_body_util::Full;
use rand::{RngExt as _, SeedableRng as _, rngs::StdRng};
use tokio::{
    runtime::{Builder, Handle},
    task::{spawn_blocking, yield_now},
    time::{MissedTickBehavior, Sleep, interval, sleep},
};
use tower::{Layer as _, ServiceExt as _, util::BoxCloneSyncService};
use tower_idempotency::{Idempotency, IdempotencyLayer, MemoryStore, Quota, Scope, Sweeper};

fn main() {
    let runtime = Builder::new_multi_thread()
        .worker_threads(2)
        .enable_all()
        .build()
        .unwrap();
    runtime.block_on(async {
        let handle = tokio::spawn(measure(
            argument("--requests", 1_000_000),
            argument("--rate", 10_000),
        ));
        handle.await.unwrap();
    });
}

/// Returns the number behind an option of the command line.
fn argument<T: FromStr<Err: Debug>>(name: &str, default: T) -> T {
    let mut arguments = env::args().skip_while(|argument| argument != name);
    let number = arguments.nth(1);
    number.map_or(default, |number| number.parse().unwrap())
}

async fn measure(requests: u64, rate: u64) {
    let store = MemoryStore::bounded(500_000, 256 << 20);
    let sweeper = Sweeper::new(store.clone())
        .every(Duration::from_millis(500))
        .spawn();
    let layer = IdempotencyLayer::required(store.clone(), |parts| {
        Scope::new(parts.headers.get("x-account")?.to_str().ok()?)
    })
    .quota_by(|scope, _| match scope.as_str() {
        OTHER => Quota::unlimited(),
        _ => Quota::unlimited().max_records(1_000),
    })
    .max_uploads(1_000)
    .max_request_body(64 << 10)
    .request_body_timeout(BODY_TIMEOUT)
    .lease(Duration::from_secs(3))
    .retention(Duration::from_secs(5))
    .build()
    .unwrap();
    let service = layer.layer(Handler);

    print_kinds(&service).await;

    // Its own records come and go at the same rate in each phase.
    other_caller(&service, 0, Duration::from_secs(7)).await;
    let alone = other_caller(&service, 1, Duration::from_secs(10)).await;
    let time = Duration::from_millis(requests * 1_000 / rate);

    let hostile = tokio::spawn(attack(boxed(Handler), requests, rate));
    let beside_bare = other_caller(&service, 2, time).await;
    hostile.await.unwrap();

    let start = resident();
    let hostile = tokio::spawn(attack(boxed(service.clone()), requests, rate));
    let beside_layer = other_caller(&service, 3, time).await;
    let Attack {
        answers,
        after_a_tenth,
        end,
        took,
    } = hostile.await.unwrap();

    let answered: u64 = answers.values().sum();
    println!(
        "hostile requests: {answered} in {:.1} s",
        took.as_secs_f64()
    );
    for (status, count) in &answers {
        println!("  {status}: {count}");
    }
    println!(
        "resident memory: {start} MiB at the start, {after_a_tenth} MiB after a tenth, {end} MiB at the end"
    );
    for (name, at) in [("p50", 0.5), ("p99", 0.99)] {
        let of = |latency: &Histogram<u64>| latency.value_at_quantile(at);
        let (bare, layer) = (of(&beside_bare), of(&beside_layer));
        println!(
            "the other caller's {name}: {} µs alone, {bare} µs beside the bare handler, \
             {layer} µs beside the layer, {:.2} × the bare handler",
            of(&alone),
            layer as f64 / bare as f64
        );
    }
    println!("records at the end: {}", store.len());
    let _ = sweeper.stop().await;
}

/// Prints the time of one request of each kind, in a row.
async fn print_kinds(service: &Service) {
    const REQUESTS: u64 = 20_000;
    let mut random = StdRng::seed_from_u64(7);
    for kind in Kind::ALL {
        // A slow body takes until its timeout.
        if matches!(kind, Kind::SlowBody) {
            continue;
        }
        let mut took = Duration::ZERO;
        for number in 0..REQUESTS {
            let request = kind.request(random.random(), number);
            let begun = Instant::now();
            let _ = service.clone().oneshot(request).await;
            took += begun.elapsed();
        }
        println!("{kind:?}: {:?} for each request", took / REQUESTS as u32);
    }
}

struct Attack {
    answers: BTreeMap<String, u64>,
    after_a_tenth: u64,
    end: u64,
    took: Duration,
}

/// Sends requests at a rate, without waiting for their answers. They are made on a thread of
/// their own, which gives way to the server.
async fn attack(service: Target, requests: u64, rate: u64) -> Attack {
    let begun = Instant::now();
    let answers = Arc::new(Mutex::new(BTreeMap::new()));
    let runtime = Handle::current();
    let counted = Arc::clone(&answers);
    let send = move || {
        give_way();
        let mut random = StdRng::seed_from_u64(76);
        let chosen = Kind::chosen();
        let mut after_a_tenth = 0;
        let mut due = Duration::ZERO;
        for sent in 1..=requests {
            // Requests that are late by more are left out, since a burst of them measures the
            // scheduler.
            due = due.max(begun.elapsed().saturating_sub(MOST_BEHIND));
            due += Duration::from_nanos(1_000_000_000 / rate);
            thread::sleep(due.saturating_sub(begun.elapsed()));
            let request = hostile(&chosen, &mut random, sent);
            let (service, answers) = (service.clone(), Arc::clone(&counted));
            runtime.spawn(async move {
                let response = service.oneshot(request).await.unwrap();
                let status = response.status().as_u16();
                let kind = match response.headers().contains_key("idempotent-replayed") {
                    true => format!("{status} replayed"),
                    false => status.to_string(),
                };
                *answers.lock().unwrap().entry(kind).or_default() += 1;
            });
            if sent == requests / 10 {
                after_a_tenth = resident();
            }
        }
        (after_a_tenth, resident())
    };
    let (after_a_tenth, end) = spawn_blocking(send).await.unwrap();
    let took = begun.elapsed();
    // The slow bodies end by their timeout.
    sleep(BODY_TIMEOUT * 2).await;
    let answers = answers.lock().unwrap().clone();
    Attack {
        answers,
        after_a_tenth,
        end,
        took,
    }
}

/// Gives this thread a low priority.
fn give_way() {
    let thread = fs::read_link("/proc/thread-self").unwrap();
    let renice = Command::new("renice")
        .args(["-n", &argument("--nice", 19_i64).to_string(), "-p"])
        .arg(thread.file_name().unwrap())
        .output();
    let reniced = renice.is_ok_and(|output| output.status.success());
    assert!(
        reniced,
        "the thread that makes the requests has no lower priority"
    );
}

fn hostile(kinds: &[Kind], random: &mut StdRng, number: u64) -> Request<Sent> {
    let shares = kinds.iter().map(|kind| kind.share()).sum();
    let (chosen, bytes) = (random.random_range(0..shares), random.random());
    let mut sum = 0;
    let kind = kinds.iter().find(|kind| {
        sum += kind.share();
        chosen < sum
    });
    kind.unwrap().request(bytes, number)
}

#[derive(Clone, Copy, Debug)]
enum Kind {
    SlowBody,
    NoKey,
    ListOfKeys,
    HugeKey,
    LargeBody,
    OtherBody,
    Replay,
    NoCaller,
    NewCaller,
    OverQuota,
}

impl Kind {
    const ALL: [Self; 10] = [
        Self::SlowBody,
        Self::NoKey,
        Self::ListOfKeys,
        Self::HugeKey,
        Self::LargeBody,
        Self::OtherBody,
        Self::Replay,
        Self::NoCaller,
        Self::NewCaller,
        Self::OverQuota,
    ];

    /// Those that `--kinds` names, or all.
    fn chosen() -> Vec<Self> {
        let names = argument("--kinds", String::new());
        let is_chosen = |kind: &Self| names.is_empty() || names.contains(&format!("{kind:?}"));
        Self::ALL.into_iter().filter(is_chosen).collect()
    }

    /// Of 200 requests.
    fn share(self) -> u32 {
        match self {
            Self::SlowBody => 1,
            Self::HugeKey | Self::LargeBody | Self::NoCaller => 10,
            Self::NoKey | Self::ListOfKeys | Self::NewCaller => 20,
            Self::OtherBody | Self::Replay => 30,
            Self::OverQuota => 49,
        }
    }

    fn request(self, random: u64, number: u64) -> Request<Sent> {
        let from = |account: &str| Request::post("/payments").header("x-account", account);
        let keyed = |key: &str| from("hostile").header("idempotency-key", key);
        let whole = |body: &'static [u8]| Sent::whole(Bytes::from_static(body));
        match self {
            Self::SlowBody => keyed(&format!("slow-{number}")).body(Sent::slow()),
            Self::NoKey => from("hostile").body(whole(b"no key")),
            Self::ListOfKeys => keyed("a, b").body(whole(b"a list")),
            Self::HugeKey => keyed(&"k".repeat(16 << 10)).body(whole(b"a huge key")),
            Self::LargeBody => keyed("large").body(whole(&[0; 65 << 10])),
            Self::OtherBody => keyed("one").body(Sent::whole(random.to_le_bytes().to_vec().into())),
            Self::Replay => keyed("again").body(whole(b"a replay")),
            Self::NoCaller => Request::post("/payments")
                .header("idempotency-key", "k")
                .body(whole(b"no caller")),
            Self::NewCaller => from(&format!("new-{random:x}"))
                .header("idempotency-key", "k")
                .body(whole(b"another caller each time")),
            Self::OverQuota => keyed(&format!("new-{random:x}")).body(whole(b"over the quota")),
        }
        .unwrap()
    }
}

/// Sends a request with a new key each millisecond, and returns their latencies in
/// microseconds. Each is a task of its own, as on a server.
async fn other_caller(service: &Service, round: u32, time: Duration) -> Histogram<u64> {
    let mut latencies = Histogram::new(3).unwrap();
    let mut ticks = interval(Duration::from_millis(1));
    ticks.set_missed_tick_behavior(MissedTickBehavior::Delay);
    let begun = Instant::now();
    let mut number = 0_u64;
    while begun.elapsed() < time {
        ticks.tick().await;
        number += 1;
        let request = Request::post("/payments")
            .header("x-account", OTHER)
            .header("idempotency-key", format!("{round}-{number}"))
            .body(Sent::whole(Bytes::from_static(b"amount=100")))
            .unwrap();
        let (service, sent) = (service.clone(), Instant::now());
        let answered = tokio::spawn(async move {
            let response = service.oneshot(request).await.unwrap();
            assert_eq!(response.status(), StatusCode::CREATED);
            sent.elapsed()
        });
        let micros = answered.await.unwrap().as_micros();
        latencies.record(micros.max(1) as u64).unwrap();
    }
    latencies
}

/// A handler that waits for something once, and answers with half a kibibyte.
#[derive(Clone)]
struct Handler;

impl<B> tower::Service<Request<B>> for Handler {
    type Response = Response<Full<Bytes>>;
    type Error = Infallible;
    type Future = Pin<Box<dyn Future<Output = Result<Self::Response, Infallible>> + Send>>;

    fn poll_ready(&mut self, _: &mut Context<'_>) -> Poll<Result<(), Infallible>> {
        Poll::Ready(Ok(()))
    }

    fn call(&mut self, _: Request<B>) -> Self::Future {
        Box::pin(async {
            yield_now().await;
            let mut response = Response::new(Full::from(Bytes::from_static(&[b'x'; 512])));
            *response.status_mut() = StatusCode::CREATED;
            Ok(response)
        })
    }
}

type Service = Idempotency<Handler, MemoryStore>;

/// The layer, or the bare handler.
type Target = BoxCloneSyncService<Request<Sent>, Response<()>, Infallible>;

fn boxed<S, B>(service: S) -> Target
where
    S: tower::Service<Request<Sent>, Response = Response<B>, Error = Infallible>,
    S: Clone + Send + Sync + 'static,
    S::Future: Send + 'static,
    B: 'static,
{
    BoxCloneSyncService::new(service.map_response(|response: Response<B>| response.map(drop)))
}

/// A body that is there at once, or never ends.
struct Sent {
    data: Option<Bytes>,
    pause: Option<Pin<Box<Sleep>>>,
}

impl Sent {
    fn whole(data: Bytes) -> Self {
        let (data, pause) = (Some(data), None);
        Self { data, pause }
    }

    fn slow() -> Self {
        let (data, pause) = (None, Some(Box::pin(sleep(SLOW))));
        Self { data, pause }
    }
}

impl Body for Sent {
    type Data = Bytes;
    type Error = Infallible;

    fn poll_frame(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, Infallible>>> {
        if let Some(pause) = &mut self.pause {
            ready!(pause.as_mut().poll(cx));
            pause.as_mut().set(sleep(SLOW));
            return Poll::Ready(Some(Ok(Frame::data(Bytes::from_static(b".")))));
        }
        Poll::Ready(self.data.take().map(|data| Ok(Frame::data(data))))
    }
}

/// The resident memory of this process, in mebibytes.
fn resident() -> u64 {
    let status = fs::read_to_string("/proc/self/status").unwrap_or_default();
    let line = status.lines().find(|line| line.starts_with("VmRSS:"));
    let kib = line.and_then(|line| line.split_whitespace().nth(1)?.parse::<u64>().ok());
    kib.unwrap_or_default() / 1024
}

/// How late a request may be.
const MOST_BEHIND: Duration = Duration::from_millis(1);
const OTHER: &str = "other";
const BODY_TIMEOUT: Duration = Duration::from_secs(5);
/// Between two bytes of a slow body.
const SLOW: Duration = Duration::from_millis(500);
