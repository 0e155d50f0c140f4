//! A process that is killed while its work runs.

use std::{
    convert::Infallible,
    env,
    io::{BufRead as _, BufReader},
    process::{Child, Command, Stdio},
    time::Duration,
};

use tokio::time::sleep;
use tower_idempotency::{Guard, Operation, PostgresStore, Ran, Recovery, SqliteStore, Store};

use crate::{
    Runs,
    databases::options,
    name, retry, short,
    stores::{with_postgres, with_sqlite},
};

macro_rules! in_both_databases {
    ($($name:ident;)*) => {
        mod sqlite {
            $(#[tokio::test(flavor = "multi_thread")]
            async fn $name() {
                super::with_sqlite(async |store, url| super::$name(store, &url).await).await;
            })*
        }

        mod postgres {
            $(#[tokio::test(flavor = "multi_thread")]
            async fn $name() {
                super::with_postgres(async |store, url| super::$name(store, &url).await).await;
            })*
        }
    };
}

in_both_databases! {
    work_of_a_killed_process_has_an_unknown_outcome;
    work_of_a_killed_process_runs_again_under_rerun;
}

async fn work_of_a_killed_process_has_an_unknown_outcome(store: impl Store, url: &str) {
    kill_during_work(url).await;
    let (guard, runs) = (short(store).build().unwrap(), Runs::default());
    assert_eq!(once_lapsed(&guard, &runs).await, "unknown");
    assert_eq!(retry(&guard, "job", &runs).await, "unknown");
    assert_eq!(runs.count(), 0);
}

async fn work_of_a_killed_process_runs_again_under_rerun(store: impl Store, url: &str) {
    kill_during_work(url).await;
    let guard = short(store)
        .wait(Duration::from_secs(60))
        .recovery(Recovery::Rerun);
    let attempt =
        guard
            .build()
            .unwrap()
            .run(&name("job"), &"input", async |operation: Operation| {
                Ok::<_, Infallible>(operation.attempt())
            });
    assert_eq!(attempt.await.unwrap(), Ran::Now(2));
}

async fn once_lapsed<S: Store>(guard: &Guard<S>, runs: &Runs) -> &'static str {
    loop {
        match retry(guard, "job", runs).await {
            "in progress" => sleep(Duration::from_millis(20)).await,
            other => return other,
        }
    }
}

/// A process that is killed when it is dropped.
struct Process(Child);

impl Drop for Process {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

async fn kill_during_work(url: &str) {
    let mut process = Command::new(env::current_exe().unwrap());
    process
        .args([
            "--exact",
            "--ignored",
            "processes::a_child_process_works_until_it_is_killed",
            "--nocapture",
        ])
        .env(STORE, url)
        .stdout(Stdio::piped());
    tokio::task::spawn_blocking(move || {
        let mut process = Process(process.spawn().unwrap());
        let said = BufReader::new(process.0.stdout.take().unwrap());
        assert!(said.lines().any(|line| line.unwrap().contains(WORKING)));
    })
    .await
    .unwrap();
}

#[tokio::test(flavor = "multi_thread")]
#[ignore = "a process of the other tests"]
async fn a_child_process_works_until_it_is_killed() {
    let url = env::var(STORE).unwrap();
    match url.starts_with("postgres") {
        true => {
            work_for_ever(
                PostgresStore::builder(options(&url))
                    .connect()
                    .await
                    .unwrap(),
            )
            .await;
        }
        false => work_for_ever(SqliteStore::open(&url).await.unwrap()).await,
    }
}

async fn work_for_ever(store: impl Store) {
    use std::io::Write as _;
    let guard = short(store).build().unwrap();
    let ran = guard.run(&name("job"), &"input", async |_| {
        let mut out = std::io::stdout();
        writeln!(out, "{WORKING}").unwrap();
        std::future::pending::<()>().await;
        Ok::<_, Infallible>(0)
    });
    panic!("{:?}", ran.await);
}

const STORE: &str = "GUARD_TEST_STORE";
const WORKING: &str = "the work has begun";
