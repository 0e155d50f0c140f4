//! Processes that die during an order, as their clients see them.

use std::{
    env,
    io::{BufRead as _, BufReader, Read as _, Write as _},
    net::TcpStream,
    path::{Path, PathBuf},
    process::{Child, Command, Stdio},
    thread,
    time::Duration,
};

use tower_idempotency::sqlx::ConnectOptions as _;

use crate::{
    databases::with_database,
    shop::{options, with_sqlite},
};

/// One process of the playground.
struct Playground {
    process: Child,
    address: String,
}

impl Playground {
    fn start(store: &str, runs: &Path) -> Self {
        let mut process = Command::new(program())
            .env("STORE", store)
            .env("RUNS", runs)
            .env("RECOVERY", "rerun")
            .env("LEASE_MS", "300")
            .env("PORT", "0")
            .stdout(Stdio::piped())
            .stderr(Stdio::null())
            .spawn()
            .unwrap();
        let mut line = String::new();
        let out = process.stdout.take().unwrap();
        BufReader::new(out).read_line(&mut line).unwrap();
        let address = line
            .trim()
            .strip_prefix("listening on ")
            .unwrap()
            .to_owned();
        Self { process, address }
    }

    /// The whole answer; empty if the connection broke without one.
    fn ask(&self, method: &str, target: &str, key: &str) -> String {
        let mut stream = TcpStream::connect(&self.address).unwrap();
        let request = format!(
            "{method} {target} HTTP/1.1\r\nHost: playground\r\nConnection: close\r\n\
             Authorization: Bearer ann.1\r\nIdempotency-Key: {key}\r\nContent-Length: 0\r\n\r\n"
        );
        stream.write_all(request.as_bytes()).unwrap();
        let mut answer = Vec::new();
        let _ = stream.read_to_end(&mut answer);
        String::from_utf8(answer).unwrap()
    }

    /// The answer once the lease of a process that died has lapsed.
    fn retry(&self, target: &str, key: &str) -> String {
        loop {
            let answer = self.ask("POST", target, key);
            if !answer.contains("request-in-progress") {
                return answer;
            }
            thread::sleep(Duration::from_millis(20));
        }
    }

    #[track_caller]
    fn assert_orders(&self, number: usize) {
        let answer = self.ask("GET", "/orders", "");
        let counted = format!("\"total\":{number}}}");
        assert!(answer.ends_with(&counted), "{answer}");
        let of_ann = format!("\"accounts\":{{\"ann\":{number}}}");
        assert_eq!(answer.contains(&of_ann), number > 0, "{answer}");
    }

    #[track_caller]
    fn assert_runs(&self, number: usize) {
        let answer = self.ask("GET", "/runs?path=/order", "");
        assert!(answer.ends_with(&format!("\r\n\r\n{number}")), "{answer}");
    }
}

impl Drop for Playground {
    fn drop(&mut self) {
        let _ = self.process.kill();
        let _ = self.process.wait();
    }
}

/// Cargo builds the examples next to the tests.
fn program() -> PathBuf {
    let test = env::current_exe().unwrap();
    let program = test.ancestors().nth(2).unwrap().join("examples/playground");
    assert!(
        program.exists(),
        "cargo build --example playground --all-features"
    );
    program
}

#[track_caller]
fn assert_answer(answer: &str, status: u16, replayed: bool) {
    let first = format!("HTTP/1.1 {status} ");
    assert!(answer.starts_with(&first), "{answer}");
    assert_eq!(
        answer.contains("idempotent-replayed: true"),
        replayed,
        "{answer}"
    );
}

fn every_mode(store: &str, runs: &Path) {
    let server = Playground::start(store, runs);
    server.assert_orders(0);

    let first = server.ask("POST", "/order?mode=commit", "commit");
    assert_answer(&first, 201, false);
    assert!(first.contains("location: /orders/"), "{first}");
    let retry = server.ask("POST", "/order?mode=commit", "commit");
    assert_answer(&retry, 201, true);
    assert_eq!(body(&first), body(&retry));
    server.assert_orders(1);
    server.assert_runs(1);

    for runs in [2, 3] {
        let answer = server.ask("POST", "/order?mode=rollback", "rollback");
        assert_answer(&answer, 503, false);
        server.assert_orders(1);
        server.assert_runs(runs);
    }
    for runs in [4, 5] {
        let answer = server.ask("POST", "/order?mode=swallow", "swallow");
        assert_answer(&answer, 500, false);
        assert!(answer.contains("problem:rolled-back"), "{answer}");
        server.assert_orders(1);
        server.assert_runs(runs);
    }
    assert_answer(&server.ask("POST", "/order?mode=else", "else"), 400, false);
    server.assert_orders(1);
}

fn a_crash_before_the_commit(store: &str, runs: &Path) {
    let target = "/order?mode=crash-before";
    let mut server = Playground::start(store, runs);
    assert_eq!(server.ask("POST", target, "key"), "");
    assert!(!server.process.wait().unwrap().success());

    let server = Playground::start(store, runs);
    server.assert_orders(0);
    server.assert_runs(1);
    assert_answer(&server.retry(target, "key"), 201, false);
    assert_answer(&server.ask("POST", target, "key"), 201, true);
    server.assert_orders(1);
    server.assert_runs(2);
}

fn a_crash_after_the_commit(store: &str, runs: &Path) {
    let target = "/order?mode=crash-after";
    let mut server = Playground::start(store, runs);
    assert_eq!(server.ask("POST", target, "key"), "");
    assert!(!server.process.wait().unwrap().success());

    let server = Playground::start(store, runs);
    server.assert_orders(1);
    assert_answer(&server.ask("POST", target, "key"), 201, true);
    server.assert_orders(1);
    server.assert_runs(1);
}

fn body(answer: &str) -> &str {
    answer.split_once("\r\n\r\n").unwrap().1
}

#[test]
fn a_store_in_memory_keeps_no_orders() {
    let server = Playground::start("memory", Path::new(""));
    assert_answer(&server.ask("POST", "/order", "key"), 501, false);
    assert_answer(&server.ask("GET", "/orders", ""), 501, false);
}

macro_rules! with_each_store {
    ($($name:ident: $story:ident;)*) => {
        mod postgres {
            $(#[tokio::test(flavor = "multi_thread")]
            async fn $name() {
                super::on_postgres(super::$story).await;
            })*
        }

        mod sqlite {
            $(#[tokio::test(flavor = "multi_thread")]
            async fn $name() {
                super::on_sqlite(super::$story).await;
            })*
        }
    };
}

with_each_store! {
    an_order_ends_as_its_mode_says: every_mode;
    i5_a_crash_before_the_commit_leaves_no_order_and_the_retry_makes_one: a_crash_before_the_commit;
    i5_a_crash_after_the_commit_leaves_the_order_and_its_response: a_crash_after_the_commit;
}

async fn on_postgres(story: impl FnOnce(&str, &Path)) {
    with_database(async |url| {
        let runs = env::temp_dir().join(format!("runs-{:016x}", rand::random::<u64>()));
        let store = options(&url).to_url_lossy().to_string();
        tokio::task::block_in_place(|| story(&store, &runs));
        std::fs::remove_file(&runs).unwrap();
    })
    .await;
}

async fn on_sqlite(story: impl FnOnce(&str, &Path)) {
    with_sqlite(async |shop| {
        let store = format!("sqlite:{}", shop.file.display());
        let runs = shop.file.with_file_name("runs");
        tokio::task::block_in_place(|| story(&store, &runs));
    })
    .await;
}
