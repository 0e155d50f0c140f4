//! Rules 56, 60 and 74, and F41, on processes that are killed and stopped. The
//! server is the playground.

use std::{
    net::SocketAddr,
    path::PathBuf,
    process::Stdio,
    sync::{
        Arc, Mutex,
        atomic::{AtomicBool, Ordering::SeqCst},
    },
    time::Duration,
};

use tokio::{
    io::{AsyncBufReadExt as _, AsyncReadExt as _, AsyncWriteExt as _, BufReader},
    net::TcpStream,
    process::{Child, ChildStdout, Command},
    time::sleep,
};

use crate::{
    api::eventually,
    client::{Wire, WireAnswer},
    stores::{Place, on_each_shared_store},
};

on_each_shared_store! {
    rule_56_a_killed_process_leaves_an_unknown_outcome
    rule_56_a_killed_process_is_followed_by_exactly_one_rerun
    f41_a_process_asleep_past_its_lease_replays_the_winner
    rule_60_processes_run_one_request_once
    rule_74_a_stopped_process_finishes_what_it_began
    rule_74_a_rolling_restart_under_load_strands_no_key
}

async fn rule_56_a_killed_process_leaves_an_unknown_outcome(place: &Place) {
    let site = Site::at(place, &[("LEASE_MS", "1500")]);
    let (one, other) = (site.start().await, site.start().await);
    let mut left_alone = one.asked("/slow?ms=600000").await;
    site.runs("/slow", 1).await;
    let before = other.ask("/slow?ms=600000").await;
    assert_eq!(
        (before.status, &*before.problem()),
        (409, "request-in-progress")
    );
    one.kill().await;
    assert!(left_alone.rest().await.is_empty());
    let after = eventually(async || {
        let answer = other.ask("/slow?ms=600000").await;
        (answer.problem() != "request-in-progress").then_some(answer)
    })
    .await;
    assert_eq!((after.status, &*after.problem()), (409, "outcome-unknown"));
    // A process that starts later finds the same.
    let later = site.start().await.ask("/slow?ms=600000").await;
    assert_eq!(later.problem(), "outcome-unknown");
    site.runs("/slow", 1).await;
}

async fn rule_56_a_killed_process_is_followed_by_exactly_one_rerun(place: &Place) {
    let site = Site::at(place, &[("LEASE_MS", "1500"), ("RECOVERY", "rerun")]);
    let (one, other) = (site.start().await, site.start().await);
    let _left_alone = one.asked("/slow?ms=2000").await;
    site.runs("/slow", 1).await;
    one.kill().await;
    let rerun = eventually(async || {
        // Ten at once, until one of them runs.
        let answers =
            futures_util::future::join_all((0..10).map(|_| other.ask("/slow?ms=2000"))).await;
        answers.into_iter().find(|answer| answer.status == 201)
    })
    .await;
    assert!(!rerun.is_replay());
    let replay = other.ask("/slow?ms=2000").await;
    assert!(replay.is_replay());
    assert_eq!(replay.body, rerun.body);
    site.runs("/slow", 2).await;
}

async fn f41_a_process_asleep_past_its_lease_replays_the_winner(place: &Place) {
    let site = Site::at(place, &[("LEASE_MS", "1500"), ("RECOVERY", "rerun")]);
    let (sleeper, other) = (site.start().await, site.start().await);
    let mut left_alone = sleeper.asked("/slow?ms=2000").await;
    site.runs("/slow", 1).await;
    sleeper.signal("-STOP").await;
    let winner = eventually(async || {
        let answer = other.ask("/slow?ms=2000").await;
        (answer.status == 201).then_some(answer)
    })
    .await;
    assert!(!winner.is_replay());
    sleeper.signal("-CONT").await;
    let woken = left_alone.answer().await;
    assert!(woken.is_replay(), "{woken:?}");
    assert_eq!((woken.status, woken.body), (201, winner.body));
    site.runs("/slow", 2).await;
}

async fn rule_60_processes_run_one_request_once(place: &Place) {
    let site = Site::at(place, &[("WAIT_MS", "60000")]);
    let processes = [site.start().await, site.start().await, site.start().await];
    let asked = (0..30).map(|index| processes[index % 3].ask("/slow?ms=200"));
    let answers = futures_util::future::join_all(asked).await;
    assert_eq!(
        answers.iter().filter(|answer| !answer.is_replay()).count(),
        1
    );
    for answer in &answers {
        assert_eq!((answer.status, &answer.body), (201, &answers[0].body));
    }
    site.runs("/slow", 1).await;
}

async fn rule_74_a_stopped_process_finishes_what_it_began(place: &Place) {
    let site = Site::at(place, &[]);
    let (one, other) = (site.start().await, site.start().await);
    let mut attended = one.asked("/slow?ms=1500").await;
    site.runs("/slow", 1).await;
    one.terminate().await;
    let first = attended.answer().await;
    assert_eq!((first.status, first.is_replay()), (201, false));
    let replay = other.ask("/slow?ms=1500").await;
    assert!(replay.is_replay());
    assert_eq!(replay.body, first.body);
    site.runs("/slow", 1).await;
}

async fn rule_74_a_rolling_restart_under_load_strands_no_key(place: &Place) {
    const CLIENTS: usize = 8;
    let site = Site::at(place, &[]);
    let mut processes = [site.start().await, site.start().await];
    let serving = Arc::new(Mutex::new(
        processes.each_ref().map(|process| process.address),
    ));
    let over = Arc::new(AtomicBool::new(false));
    let clients: Vec<_> = (0..CLIENTS)
        .map(|client| {
            let (serving, over) = (serving.clone(), over.clone());
            tokio::spawn(async move {
                let mut done = 0;
                while !over.load(SeqCst) {
                    let key = format!("{client}-{done}");
                    for attempt in 0.. {
                        assert!(attempt < 1_000, "the key is stranded");
                        let address = serving.lock().unwrap()[attempt % 2];
                        match status_of(address, "/slow?ms=30", &key).await {
                            Some(201) => break,
                            // The process is stopping or stopped, or another one
                            // still runs it.
                            None | Some(503 | 409) => sleep(Duration::from_millis(20)).await,
                            Some(other) => panic!("{other}"),
                        }
                    }
                    done += 1;
                }
                done
            })
        })
        .collect();
    for index in [0, 1, 0, 1] {
        let next = site.start().await;
        serving.lock().unwrap()[index] = next.address;
        std::mem::replace(&mut processes[index], next)
            .terminate()
            .await;
    }
    over.store(true, SeqCst);
    let mut keys = 0;
    for client in clients {
        keys += client.await.unwrap();
    }
    assert!(keys > CLIENTS);
    site.runs("/slow", keys).await;
}

/// The status of a request with this key, if the process answers it.
async fn status_of(address: SocketAddr, path: &str, key: &str) -> Option<u16> {
    let mut socket = TcpStream::connect(address).await.ok()?;
    let request = format!(
        "POST {path} HTTP/1.1\r\nHost: test\r\nAuthorization: Bearer acme-7.1\r\nIdempotency-Key: {key}\r\nContent-Length: 0\r\nConnection: close\r\n\r\n"
    );
    socket.write_all(request.as_bytes()).await.ok()?;
    let mut answer = Vec::new();
    socket.read_to_end(&mut answer).await.ok()?;
    let line = String::from_utf8_lossy(&answer);
    line.strip_prefix("HTTP/1.1 ")?.get(..3)?.parse().ok()
}

/// Servers on one store, which note their runs in one file.
struct Site {
    environment: Vec<(&'static str, String)>,
    runs: PathBuf,
}

impl Site {
    fn at(place: &Place, settings: &[(&'static str, &str)]) -> Self {
        let name = format!("{:016x}.runs", rand::random::<u64>());
        let runs = PathBuf::from(env!("CARGO_TARGET_TMPDIR")).join(name);
        let mut environment = vec![
            ("PORT", "0".to_owned()),
            ("STORE", place.address()),
            ("RUNS", runs.to_str().unwrap().to_owned()),
        ];
        environment.extend(
            settings
                .iter()
                .map(|(name, value)| (*name, (*value).to_owned())),
        );
        Self { environment, runs }
    }

    async fn start(&self) -> Process {
        // Beside the directory of the tests.
        let tests = std::env::current_exe().unwrap();
        let built = tests.parent().unwrap().parent().unwrap();
        let mut child = Command::new(built.join("examples/playground"))
            .env_clear()
            .envs(self.environment.iter().map(|(name, value)| (name, value)))
            .stdout(Stdio::piped())
            .kill_on_drop(true)
            .spawn()
            .expect("the playground is not built: cargo build --examples --all-features");
        let mut said = BufReader::new(child.stdout.take().unwrap());
        let mut line = String::new();
        said.read_line(&mut line).await.unwrap();
        let address = line.trim_end().strip_prefix("listening on ").unwrap();
        Process {
            address: address.parse().unwrap(),
            child,
            _said: said,
        }
    }

    /// Waits until the handler at this path has begun this often. Fails if it
    /// begins more often.
    async fn runs(&self, path: &str, expected: usize) {
        eventually(async || {
            let runs = std::fs::read_to_string(&self.runs).unwrap_or_default();
            let begun = runs.lines().filter(|line| line.starts_with(path)).count();
            assert!(begun <= expected, "{runs}");
            (begun == expected).then_some(())
        })
        .await;
    }
}

impl Drop for Site {
    fn drop(&mut self) {
        let _ = std::fs::remove_file(&self.runs);
    }
}

struct Process {
    address: SocketAddr,
    child: Child,
    // The process would end if its output were closed.
    _said: BufReader<ChildStdout>,
}

impl Process {
    /// Sends the request with the key K; the caller reads its answer.
    async fn asked(&self, path: &str) -> Wire {
        let mut wire = Wire::connect(self.address).await;
        wire.write(format!(
            "POST {path} HTTP/1.1\r\nHost: test\r\nAuthorization: Bearer acme-7.1\r\nIdempotency-Key: K\r\nContent-Length: 0\r\n\r\n"
        ))
        .await;
        wire
    }

    async fn ask(&self, path: &str) -> WireAnswer {
        self.asked(path).await.answer().await
    }

    async fn signal(&self, signal: &str) {
        let process = self.child.id().unwrap().to_string();
        let told = Command::new("kill").args([signal, &process]).status().await;
        assert!(told.unwrap().success());
    }

    async fn kill(mut self) {
        self.child.kill().await.unwrap();
    }

    /// Sends SIGTERM, and waits until the process has ended.
    async fn terminate(mut self) {
        self.signal("-TERM").await;
        let grace = Duration::from_secs(60);
        let ended = tokio::time::timeout(grace, self.child.wait()).await;
        assert!(ended.unwrap().unwrap().success());
    }
}
