//! Several stores and processes on one file.

use std::time::{Duration, Instant};

use futures_util::future::join_all;
use tower_idempotency::{
    Fence, SqliteStore, Store, StoreErrorKind,
    sqlx::Connection as _,
    store::{Claimed, RecordState},
};

use crate::{
    File,
    any_store::{HOUR, acquired, applied, hour, name},
};

#[tokio::test(flavor = "multi_thread")]
async fn acknowledged_records_survive_a_killed_process() {
    let file = File::new();
    let name = name("caller", "key");
    let output = file.child("claims_and_dies").await;
    assert!(!output.status.success());
    let store = file.open().await;
    let record = store
        .read(&name)
        .await
        .unwrap()
        .expect("an acknowledged claim");
    assert!(matches!(record.state, RecordState::InProgress { .. }));
    store.close().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn two_stores_on_one_file_race_for_each_key() {
    let file = File::new();
    let (one, two) = tokio::join!(file.open(), file.open());
    let mut last = Fence::from(0);
    for round in 0..100 {
        let name = name("caller", &round.to_string());
        let (here, there) = (hour(), hour());
        let (here, there) = tokio::join!(one.claim(&name, &here), two.claim(&name, &there));
        let grants: Vec<_> = [here.unwrap(), there.unwrap()]
            .into_iter()
            .filter_map(|answer| match answer {
                Claimed::Acquired(grant) => Some(grant),
                _ => None,
            })
            .collect();
        assert_eq!(grants.len(), 1);
        assert!(grants[0].fence > last);
        last = grants[0].fence;
    }
    one.close().await;
    two.close().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn eight_processes_open_one_new_file_and_share_its_keys() {
    let file = File::new();
    let outputs = join_all((0..8).map(|_| file.child("claims_every_key"))).await;
    let mut acquired = Vec::new();
    for output in outputs {
        let said = String::from_utf8_lossy(&output.stdout).into_owned();
        assert!(output.status.success(), "{said}");
        acquired.extend(
            said.lines()
                .filter_map(|line| line.split_once("acquired ").map(|(_, key)| key.to_owned())),
        );
    }
    acquired.sort();
    let mut keys: Vec<_> = (0..KEYS).map(|key| key.to_string()).collect();
    keys.sort();
    assert_eq!(acquired, keys);
}

#[tokio::test(flavor = "multi_thread")]
async fn reads_and_duplicate_claims_do_not_wait_for_a_writer() {
    let file = File::new();
    let store = SqliteStore::open_with(file.options().busy_timeout(Duration::from_secs(1)))
        .await
        .unwrap();
    let name = name("caller", "key");
    let claim = hour();
    acquired(store.claim(&name, &claim).await);
    let mut other = file.connect().await;
    let lock = other.begin_with("BEGIN IMMEDIATE").await.unwrap();
    let begun = Instant::now();
    assert!(store.read(&name).await.unwrap().is_some());
    assert!(matches!(
        store.claim(&name, &hour()).await.unwrap(),
        Claimed::Occupied(_)
    ));
    assert!(begun.elapsed() < Duration::from_secs(1));
    let error = store.renew(&name, claim.token, HOUR).await.unwrap_err();
    assert_eq!(error.kind(), StoreErrorKind::TimedOut);
    lock.rollback().await.unwrap();
    applied(store.renew(&name, claim.token, HOUR).await);
    store.close().await;
    other.close().await.unwrap();
}

#[tokio::test(flavor = "multi_thread")]
#[ignore = "a process of the other tests"]
async fn a_child_process_plays_its_part() {
    let store = SqliteStore::open(std::env::var(DATABASE).unwrap()).await;
    let store = store.unwrap();
    match &*std::env::var(PART).unwrap() {
        "claims_and_dies" => {
            acquired(store.claim(&name("caller", "key"), &hour()).await);
            std::process::abort();
        }
        "claims_every_key" => {
            for key in 0..KEYS {
                let name = name("caller", &key.to_string());
                if let Claimed::Acquired(_) = store.claim(&name, &hour()).await.unwrap() {
                    use std::io::Write as _;
                    writeln!(std::io::stdout(), "acquired {key}").unwrap();
                }
            }
            store.close().await;
        }
        part => panic!("{part}"),
    }
}

impl File {
    /// Runs a part in another process, on this file.
    async fn child(&self, part: &str) -> std::process::Output {
        tokio::process::Command::new(std::env::current_exe().unwrap())
            .args([
                "--exact",
                "--ignored",
                "processes::a_child_process_plays_its_part",
                "--nocapture",
            ])
            .env(PART, part)
            .env(DATABASE, self.path())
            .output()
            .await
            .unwrap()
    }
}

const KEYS: usize = 40;
const PART: &str = "IDEMPOTENCY_TEST_PART";
const DATABASE: &str = "IDEMPOTENCY_TEST_DATABASE";
