//! Whole servers under wrk, each in a process of its own.

use std::{
    convert::Infallible,
    env, fs,
    io::{BufRead as _, BufReader},
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
    for (name, least, keys) in [
        ("fresh keys", 0.75, Keys::Fresh),
        ("replays", 0.92, Keys::Recorded),
    ] {
        // Each on a server of its own: replays are not to bear what a million fresh
        // keys have left in memory.
        let bare = Server::start("bare", &url);
        let memory = Server::start("memory", &url);
        report.add(Target::new(
            format!("server on the memory store, 16 connections, against the bare handler, {name}: requests/s"),
            Bound::AtLeast(least),
            "×",
            in_turns(plan, &bare, &memory, 16, keys),
        ));
    }
    let by_hand = Server::start("by-hand", &url);
    let store = Server::start("postgres", &url);
    report.add(Target::new(
        "server on PostgreSQL, 64 connections, against two statements by hand: requests/s",
        Bound::AtLeast(2.5),
        "×",
        in_turns(plan, &by_hand, &store, 64, Keys::Fresh),
    ));
}

fn in_turns(
    plan: Plan,
    baseline: &Server,
    layered: &Server,
    connections: usize,
    keys: Keys,
) -> Vec<f64> {
    if let Keys::Recorded = keys {
        // All of them, before anybody is in a hurry.
        layered.load(1, 1, keys);
    }
    let run = |server: &Server| {
        let said = server.load(plan.length.as_secs().max(1), connections, keys);
        assert!(!said.contains("Non-2xx"), "{said}");
        let rate = said
            .lines()
            .find_map(|line| line.strip_prefix("Requests/sec:"));
        rate.expect("wrk says a rate")
            .trim()
            .parse::<f64>()
            .unwrap()
    };
    (0..plan.pairs)
        .map(|_| {
            let before = run(baseline);
            run(layered) / before
        })
        .collect()
}

/// Serves until it is killed, and says first where.
pub(crate) async fn serve(kind: &str) {
    let payments = |handler| Router::new().route("/payments", handler);
    let router: Router = match kind {
        "bare" => payments(post(answer)),
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

/// Without a fingerprint, a lease, a fence or a replay: what is written by hand.
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
    /// A few that come again and again.
    Recorded,
}

struct Server {
    child: Child,
    address: String,
}

impl Server {
    fn start(kind: &str, url: &str) -> Self {
        let mut child = Command::new(env::current_exe().unwrap())
            .args(["serve", kind])
            .env("DRIVER_URL", url)
            .stdout(Stdio::piped())
            .spawn()
            .unwrap();
        let mut line = String::new();
        let mut out = BufReader::new(child.stdout.take().unwrap());
        out.read_line(&mut line).unwrap();
        let address = line.trim().to_owned();
        Self { child, address }
    }

    /// What wrk says.
    fn load(&self, seconds: u64, connections: usize, keys: Keys) -> String {
        let script = env::temp_dir().join(format!("driver-{}.lua", std::process::id()));
        let run: u64 = rand::random();
        let key = match keys {
            Keys::Fresh => format!("\"{run:016x}-\" .. number"),
            Keys::Recorded => format!("\"recorded-\" .. number % {RECORDED}"),
        };
        // One thread: the number is its own.
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
        let said = Command::new("wrk")
            .args([
                "-t1",
                &format!("-c{connections}"),
                &format!("-d{seconds}s"),
                "-s",
            ])
            .arg(&script)
            .arg(format!("http://{}/payments", self.address))
            .output()
            .expect("wrk is not installed");
        let said = String::from_utf8(said.stdout).unwrap();
        fs::remove_file(&script).unwrap();
        said
    }
}

/// So few that one caller records them all in a second.
const RECORDED: usize = 1_000;

impl Drop for Server {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}
