//! Whole servers under wrk, each in its own process.

use std::{
    convert::Infallible,
    env, fs,
    io::{BufRead as _, BufReader},
    path::Path,
    process::{Child, Command, Stdio},
};

use axum::{
    Router,
    body::{Body, Bytes},
    http::{HeaderMap, StatusCode},
    response::Response,
    routing::post,
};
use tokio::net::TcpListener;
use tower_idempotency::{IdempotencyLayer, MemoryStore, Scope, Store, sqlx::PgPool};

use crate::{
    Plan, calls, postgres,
    report::Report,
    target::{Bound, Target},
};

pub(crate) async fn measure(plan: Plan, report: &mut Report) {
    let url = postgres::database("driver_http").await;
    for (baseline, most, keys, name) in [
        (
            "bare",
            7.0,
            Keys::Fresh,
            "fresh keys, more than the bare handler",
        ),
        (
            "nothing",
            2.0,
            Keys::Recorded,
            "replays, more than a handler that does nothing",
        ),
    ] {
        // The server has one processor and the load the other. Otherwise the scheduler decides
        // anew in each run which of their threads share one. The report has both.
        for processor in [Some(0), None] {
            // Each on a new server, so that replays do not run in memory filled by a
            // million fresh keys.
            let baseline = Server::start(baseline, &url, processor);
            let memory = Server::start("memory", &url, processor);
            let pairs = in_turns(plan, &baseline, &memory, 16, keys);
            let on = match processor {
                Some(_) => "one processor",
                None => "all processors",
            };
            let name = format!("server on {on}, memory store, 16 connections, {name}");
            let processor_times = Target::new(
                format!("{name}: processor time a request"),
                Bound::AtMost(most),
                "µs",
                pairs
                    .iter()
                    .map(|(before, after)| (after.processor - before.processor) * 1e6)
                    .collect(),
            );
            match processor {
                Some(_) => report.add(processor_times),
                None => report.tell(&processor_times),
            }
            report.tell(&Target::new(
                format!("{name}: requests/s"),
                Bound::AtLeast(0.0),
                "×",
                pairs
                    .iter()
                    .map(|(before, after)| after.rate / before.rate)
                    .collect(),
            ));
        }
    }
    let by_hand = Server::start("by-hand", &url, None);
    let store = Server::start("postgres", &url, None);
    let pairs = in_turns(plan, &by_hand, &store, 64, Keys::Fresh);
    report.add(Target::new(
        "server on PostgreSQL, 64 connections, against two statements by hand: requests/s",
        Bound::AtLeast(2.5),
        "×",
        pairs
            .iter()
            .map(|(before, after)| after.rate / before.rate)
            .collect(),
    ));
}

/// The measurement of one load.
struct Measured {
    /// Requests a second.
    rate: f64,
    /// Seconds of processor time of the server for each request.
    processor: f64,
}

/// Loads the baseline and the layered server in turns.
fn in_turns(
    plan: Plan,
    baseline: &Server,
    layered: &Server,
    connections: usize,
    keys: Keys,
) -> Vec<(Measured, Measured)> {
    if let Keys::Recorded = keys {
        // Records all keys before the measured load.
        layered.load(1, 1, keys);
    }
    let run = |server: &Server| {
        let before = server.processor_time();
        let said = server.load(plan.length.as_secs().max(1), connections, keys);
        let processor = server.processor_time() - before;
        assert!(!said.contains("Non-2xx"), "{said}");
        let rate = said
            .lines()
            .find_map(|line| line.strip_prefix("Requests/sec:"));
        let requests = said
            .lines()
            .find_map(|line| line.split_once(" requests in "));
        let (requests, _) = requests.expect("wrk says how many requests");
        Measured {
            rate: rate.expect("wrk says a rate").trim().parse().unwrap(),
            processor: processor / requests.trim().parse::<f64>().unwrap(),
        }
    };
    (0..plan.pairs)
        .map(|_| {
            let before = run(baseline);
            (before, run(layered))
        })
        .collect()
}

/// Prints its address, and serves until it is killed.
pub(crate) async fn serve(kind: &str) {
    let payments = |handler| Router::new().route("/payments", handler);
    let router: Router = match kind {
        "bare" => payments(post(answer)),
        "nothing" => payments(post(do_nothing)),
        "memory" => {
            let store = MemoryStore::bounded(50_000_000, 1 << 36);
            payments(post(answer)).layer(layer(store))
        }
        "by-hand" => {
            let pool = postgres::plain_pool(&env::var("DRIVER_URL").unwrap()).await;
            payments(post(move |headers, body| {
                answer_by_hand(pool.clone(), headers, body)
            }))
        }
        "postgres" => {
            let store = postgres::store(&env::var("DRIVER_URL").unwrap()).await;
            payments(post(answer)).layer(layer(store))
        }
        _ => panic!("{kind:?} is nothing that is served"),
    };
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    println!("{}", listener.local_addr().unwrap());
    axum::serve(listener, router).await.unwrap();
}

fn layer<S: Store>(store: S) -> IdempotencyLayer<S> {
    IdempotencyLayer::required(store, |_| Some(Scope::single_tenant()))
        .build()
        .unwrap()
}

async fn answer(_: Bytes) -> Response {
    Response::new(Body::from(calls::response()))
}

/// Reads the request, and answers with a response of the same size at no cost: the
/// part that a replay needs too.
async fn do_nothing(_: Bytes) -> Response {
    static RESPONSE: [u8; 512] = [7; 512];
    Response::new(Body::from(Bytes::from_static(&RESPONSE)))
}

/// Handwritten idempotency, without a fingerprint, a lease, a fence or a replay.
async fn answer_by_hand(
    pool: PgPool,
    headers: HeaderMap,
    _: Bytes,
) -> Result<Response, Infallible> {
    let Some(key) = headers
        .get("idempotency-key")
        .and_then(|key| key.to_str().ok())
    else {
        let mut response = Response::new(Body::empty());
        *response.status_mut() = StatusCode::BAD_REQUEST;
        return Ok(response);
    };
    postgres::plain_with(&pool, key).await;
    Ok(Response::new(Body::from(calls::response())))
}

#[derive(Clone, Copy)]
enum Keys {
    Fresh,
    /// A few keys, used repeatedly.
    Recorded,
}

struct Server {
    child: Child,
    address: String,
    /// The only processor on which it runs.
    processor: Option<usize>,
}

impl Server {
    fn start(kind: &str, url: &str, processor: Option<usize>) -> Self {
        let mut child = on_processor(processor, &env::current_exe().unwrap())
            .args(["serve", kind])
            .env("DRIVER_URL", url)
            .stdout(Stdio::piped())
            .spawn()
            .unwrap();
        let mut line = String::new();
        let mut out = BufReader::new(child.stdout.take().unwrap());
        out.read_line(&mut line).unwrap();
        let address = line.trim().to_owned();
        Self {
            child,
            address,
            processor,
        }
    }

    /// The processor time that the server has used, in seconds.
    fn processor_time(&self) -> f64 {
        let stat = fs::read_to_string(format!("/proc/{}/stat", self.child.id())).unwrap();
        // After the name in parentheses: utime and stime are the 12th and 13th.
        let (_, fields) = stat.rsplit_once(')').unwrap();
        let ticks: f64 = fields
            .split_whitespace()
            .skip(11)
            .take(2)
            .map(|ticks| ticks.parse::<f64>().unwrap())
            .sum();
        ticks / TICKS_PER_SECOND
    }

    /// The output of wrk.
    fn load(&self, seconds: u64, connections: usize, keys: Keys) -> String {
        let script = env::temp_dir().join(format!("driver-{}.lua", std::process::id()));
        let run: u64 = rand::random();
        let key = match keys {
            Keys::Fresh => format!("\"{run:016x}-\" .. number"),
            Keys::Recorded => format!("\"recorded-\" .. number % {RECORDED}"),
        };
        // With one thread, the number belongs to it alone.
        let text = format!(
            "local number = 0
             request = function()
                 number = number + 1
                 wrk.headers[\"Idempotency-Key\"] = {key}
                 return wrk.format(\"POST\", \"/payments\", nil, '{{\"amount\":100,\"currency\":\"EUR\"}}')
             end
             wrk.headers[\"Content-Type\"] = \"application/json\""
        );
        fs::write(&script, text).unwrap();
        let other = self.processor.map(|processor| processor + 1);
        let said = on_processor(other, "wrk".as_ref())
            .args([
                "-t1",
                &format!("-c{connections}"),
                &format!("-d{seconds}s"),
                "-s",
            ])
            .arg(&script)
            .arg(format!("http://{}/payments", self.address))
            .output()
            .expect("wrk or taskset is not installed");
        let said = String::from_utf8(said.stdout).unwrap();
        fs::remove_file(&script).unwrap();
        said
    }
}

/// Returns the command that runs `program`, on this processor only if one is given.
fn on_processor(processor: Option<usize>, program: &Path) -> Command {
    let Some(processor) = processor else {
        return Command::new(program);
    };
    let mut command = Command::new("taskset");
    command.args(["--cpu-list", &processor.to_string()]);
    command.arg(program);
    command
}

/// Linux reports processor times in hundredths of a second.
const TICKS_PER_SECOND: f64 = 100.0;

/// Few enough that one caller records all of them in a second.
const RECORDED: usize = 1_000;

impl Drop for Server {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}
