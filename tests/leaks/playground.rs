//! The playground as a process that is killed, one that dies after a COMMIT, and one that
//! takes their records over.

use std::{env, fs, path::PathBuf, process::Stdio, time::Duration};

use reqwest::{Client, Response};
use tokio::{
    io::{AsyncBufReadExt as _, AsyncReadExt as _, BufReader},
    process::{Child, ChildStderr, ChildStdout, Command},
    task::JoinHandle,
};

use crate::{
    api::eventually,
    canaries::{BODY, COOKIE, KEY, QUERY, SCOPE, TOKEN},
    stores::Place,
};

/// Runs the processes against this place. Returns their output, and the refusals of the last
/// one.
pub(crate) async fn of_killed_processes(place: &Place) -> String {
    let runs = format!("{:016x}.runs", rand::random::<u64>());
    let runs = PathBuf::from(env!("CARGO_TARGET_TMPDIR")).join(runs);
    let start = async || Playground::start(&place.address(), &runs).await;

    let killed = start().await;
    let running = tokio::spawn(killed.ask("/slow?ms=1000&q=", "killed"));
    eventually(async || {
        let begun = fs::read_to_string(&runs).unwrap_or_default();
        begun.contains("/slow").then_some(())
    })
    .await;
    let mut output = killed.killed().await;
    running.await.unwrap().unwrap_err();

    let crashed = start().await;
    let order = "/order?mode=crash-after&q=";
    let has_orders = match crashed.ask(order, "ordered").await {
        Ok(answer) => {
            assert_eq!(answer.status(), 501);
            false
        }
        Err(_) => true,
    };
    output += &crashed.killed().await;

    let last = start().await;
    eventually(async || {
        let answer = last.ask("/slow?ms=1000&q=", "killed").await.unwrap();
        (answer.status() == 201).then_some(())
    })
    .await;
    let answer = last.ask("/slow?ms=1000&q=", "killed").await.unwrap();
    assert!(
        answer.headers().contains_key("idempotent-replayed"),
        "{answer:?}"
    );
    let answer = last.ask(order, "ordered").await.unwrap();
    let is_replay = answer.headers().contains_key("idempotent-replayed");
    assert_eq!(is_replay, has_orders, "{answer:?}");
    for (path, key, status) in [
        ("/slow?ms=2000&q=", "killed", 422),
        ("/count?q=", "k,k", 400),
    ] {
        let refused = last.ask(path, key).await.unwrap();
        assert_eq!(refused.status(), status);
        output += &format!("{:?}\n", refused.headers());
        output += &refused.text().await.unwrap();
    }
    output += &last.killed().await;
    let _ = fs::remove_file(&runs);
    output
}

struct Playground {
    url: String,
    child: Child,
    /// Reads what the process writes, which would wait for a full pipe.
    output: JoinHandle<String>,
}

impl Playground {
    async fn start(store: &str, runs: &std::path::Path) -> Self {
        // Beside the directory of the tests.
        let tests = env::current_exe().unwrap();
        let built = tests.parent().unwrap().parent().unwrap();
        let mut child = Command::new(built.join("examples/playground"))
            .env_clear()
            .env("STORE", store)
            .env("RUNS", runs)
            .env("LEASE_MS", "1200")
            .env("RECOVERY", "rerun")
            .env("NO_COLOR", "1")
            .env(
                "RUST_LOG",
                "playground=trace,sqlx=trace,tower_idempotency=trace",
            )
            .stdout(Stdio::piped())
            .stderr(Stdio::piped())
            .kill_on_drop(true)
            .spawn()
            .expect("the playground is not built: cargo build --examples --all-features");
        let mut out = BufReader::new(child.stdout.take().unwrap());
        let mut line = String::new();
        out.read_line(&mut line).await.unwrap();
        let address = line.trim_end().strip_prefix("listening on ").unwrap();
        Self {
            url: format!("http://{address}"),
            output: tokio::spawn(read(out, child.stderr.take().unwrap())),
            child,
        }
    }

    /// Sends a request with a canary in each part. `path` ends where the one of the query
    /// stands.
    fn ask(
        &self,
        path: &str,
        key: &str,
    ) -> impl Future<Output = reqwest::Result<Response>> + Send + use<> {
        let request = Client::new()
            .post(format!("{}{path}{QUERY}", self.url))
            .header("authorization", format!("Bearer {SCOPE}.{TOKEN}"))
            .header("cookie", COOKIE)
            .header("idempotency-key", format!("{KEY}-{key}").into_bytes())
            .timeout(Duration::from_secs(20))
            .body(BODY);
        request.send()
    }

    /// Kills the process, and returns its output and errors.
    async fn killed(mut self) -> String {
        // One that has crashed is gone.
        let _ = self.child.kill().await;
        self.output.await.unwrap()
    }
}

async fn read(mut out: BufReader<ChildStdout>, mut errors: ChildStderr) -> String {
    let (mut output, mut written) = (String::new(), String::new());
    let read = tokio::try_join!(
        out.read_to_string(&mut output),
        errors.read_to_string(&mut written)
    );
    read.unwrap();
    output + &written
}
