//! The SQLite store on real files.

mod reference;

use std::{
    path::{Path, PathBuf},
    time::{Duration, Instant},
};

use bytes::Bytes;
use futures_util::future::join_all;
use reference::{Compared, name};
use tower_idempotency::{
    Fence, Fingerprint, RecordName, SqliteStore, Store, StoreError, StoreErrorKind, Token,
    sqlx::{
        AssertSqlSafe, ConnectOptions as _, Connection as _, SqliteConnection,
        migrate::{Migration, MigrationType, Migrator},
        query_scalar, raw_sql,
        sqlite::SqliteConnectOptions,
    },
    store::{
        Claim, Claimed, Completion, Grant, MarkedBy, ReclaimAs, RecordState, Release, Transitioned,
        admin::{Filter, Resolution},
    },
};

#[tokio::test(flavor = "multi_thread")]
async fn of_64_simultaneous_claims_exactly_one_is_acquired() {
    let file = File::new();
    let store = file.open().await;
    for round in 0..10 {
        let name = name("caller", &format!("key {round}"));
        let answers = join_all((0..64).map(|_| {
            let (store, name) = (store.clone(), name.clone());
            tokio::spawn(async move { store.claim(&name, &hour()).await.unwrap() })
        }))
        .await;
        let acquired = answers
            .iter()
            .filter(|answer| matches!(answer.as_ref().unwrap(), Claimed::Acquired(_)))
            .count();
        assert_eq!(acquired, 1);
    }
    store.close().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn every_transition_has_the_guard_of_the_memory_store() {
    let file = File::new();
    let store = file.open().await;
    Compared::new(&store).every_transition().await;
    store.close().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_random_walk_gets_the_answers_of_the_memory_store() {
    let file = File::new();
    let store = file.open().await;
    Compared::new(&store).random_walk(2, 300).await;
    store.close().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn each_transition_checks_its_own_guard() {
    let file = File::new();
    let store = file.open().await;
    use Transitioned::{Applied, Superseded};
    let name = name("caller", "key");
    let live = hour();
    let first = acquired(store.claim(&name, &live).await);
    let other = Token::random();

    // In progress, leased.
    assert!(
        taken(&store, &name, first, ReclaimAs::Takeover)
            .await
            .is_none()
    );
    assert!(
        taken(&store, &name, first, ReclaimAs::Expired)
            .await
            .is_none()
    );
    assert_eq!(store.renew(&name, other, HOUR).await.unwrap(), Superseded);
    assert_eq!(
        store.complete(&name, other, &done()).await.unwrap(),
        Superseded
    );
    assert_eq!(
        store
            .release(&name, other, Release::AnyRequest)
            .await
            .unwrap(),
        Superseded
    );
    let lapsed = MarkedBy::Lapsed(first.fence);
    assert_eq!(
        store.mark_unknown(&name, lapsed, HOUR).await.unwrap(),
        Superseded
    );
    let word = Resolution::DidNotHappen;
    assert_eq!(
        store
            .resolve(&name, first.fence, &word, HOUR)
            .await
            .unwrap(),
        Superseded
    );
    assert_eq!(
        store.forget(&name, Fence::from(0)).await.unwrap(),
        Superseded
    );

    // Released for the same request: not to be replaced by another one.
    assert_eq!(
        store
            .release(&name, live.token, Release::SameRequest)
            .await
            .unwrap(),
        Applied
    );
    assert_eq!(
        store.complete(&name, live.token, &done()).await.unwrap(),
        Superseded
    );
    assert!(
        taken(&store, &name, first, ReclaimAs::Replace)
            .await
            .is_none()
    );
    let second = taken(&store, &name, first, ReclaimAs::Retry).await.unwrap();
    assert_eq!((second.operation, second.attempt), (first.operation, 2));
    assert!(second.fence > first.fence);
    assert!(
        taken(&store, &name, first, ReclaimAs::Retry)
            .await
            .is_none()
    );
    assert_eq!(
        store.renew(&name, live.token, HOUR).await.unwrap(),
        Superseded
    );
    store.close().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_call_repeated_with_its_token_returns_the_lost_answer() {
    let file = File::new();
    let store = file.open().await;
    let (completed, released, unknown) = (
        name("s", "completed"),
        name("s", "released"),
        name("s", "unknown"),
    );
    let claim = hour();
    acquired(store.claim(&completed, &claim).await);
    for response in ["first", "second"] {
        let completion = Completion::new(response.into(), HOUR, Duration::ZERO);
        let settlement = store
            .complete(&completed, claim.token, &completion)
            .await
            .unwrap();
        assert_eq!(settlement, Transitioned::Applied);
    }
    let record = store.read(&completed).await.unwrap().unwrap();
    assert!(matches!(record.state, RecordState::Completed { response } if response == "first"));

    let claim = hour();
    acquired(store.claim(&released, &claim).await);
    for release in [Release::SameRequest, Release::AnyRequest] {
        let settlement = store
            .release(&released, claim.token, release)
            .await
            .unwrap();
        assert_eq!(settlement, Transitioned::Applied);
    }
    let record = store.read(&released).await.unwrap().unwrap();
    assert!(matches!(
        record.state,
        RecordState::Released(Release::SameRequest)
    ));

    let claim = hour();
    acquired(store.claim(&unknown, &claim).await);
    for retention in [HOUR, Duration::ZERO] {
        let owner = MarkedBy::Owner(claim.token);
        let settlement = store
            .mark_unknown(&unknown, owner, retention)
            .await
            .unwrap();
        assert_eq!(settlement, Transitioned::Applied);
    }
    assert!(
        store
            .read(&unknown)
            .await
            .unwrap()
            .unwrap()
            .expires_in
            .is_some()
    );
    let Claimed::Occupied(record) = store.claim(&unknown, &claim).await.unwrap() else {
        panic!("claimed twice");
    };
    assert_eq!(record.token, claim.token);
    store.close().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn fences_grow_over_sweeping_forgetting_and_reopening() {
    let file = File::new();
    let name = name("caller", "key");
    let mut last = Fence::from(0);
    for round in 0..12 {
        let store = file.open().await;
        let claim = Claim::new(fingerprint(1), HOUR, Duration::ZERO);
        let grant = acquired(store.claim(&name, &claim).await);
        assert!(grant.fence > last, "{} after {last}", grant.fence);
        last = grant.fence;
        if round % 2 == 0 {
            let _ = store.forget(&name, grant.fence).await.unwrap();
        } else {
            complete_and_expire(&store, &name, &claim).await;
            let again = taken(&store, &name, grant, ReclaimAs::Expired)
                .await
                .unwrap();
            assert!(again.fence > last);
            last = again.fence;
            let _ = store.forget(&name, again.fence).await.unwrap();
        }
        store.close().await;
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_sweep_obeys_its_limit_and_spares_leased_records() {
    let file = File::new();
    let store = file.open().await;
    let leased = name("leased", "0");
    // As many as the limit, and before all others.
    for n in 0..3 {
        let claim = Claim::new(fingerprint(1), HOUR, Duration::ZERO);
        acquired(store.claim(&name("leased", &n.to_string()), &claim).await);
    }
    for n in 0..5 {
        let (name, claim) = (name("done", &n.to_string()), claim_expiring());
        acquired(store.claim(&name, &claim).await);
        complete_and_expire(&store, &name, &claim).await;
    }
    for n in 0..3 {
        let lapsed = Claim::new(fingerprint(1), Duration::ZERO, Duration::ZERO);
        acquired(store.claim(&name("lapsed", &n.to_string()), &lapsed).await);
    }
    past().await;
    let mut total = (0, 0);
    loop {
        let purged = store.purge_expired(3, HOUR).await.unwrap();
        assert!(purged.touched() <= 3);
        total = (total.0 + purged.removed, total.1 + purged.marked_unknown);
        if purged.touched() == 0 {
            break;
        }
    }
    assert_eq!(total, (5, 3));
    assert!(store.read(&leased).await.unwrap().is_some());
    let page = store.list(&Filter::unknown(), None, 10).await.unwrap();
    assert_eq!((page.records.len(), page.next), (3, None));
    let page = store.list(&Filter::unknown(), None, 2).await.unwrap();
    assert_eq!(page.records.len(), 2);
    let page = store
        .list(&Filter::unknown(), page.next.as_ref(), 2)
        .await
        .unwrap();
    assert_eq!((page.records.len(), page.next), (1, None));
    let old = Filter::in_progress_for(Duration::ZERO);
    assert_eq!(
        store.list(&old, None, 10).await.unwrap().records[0].0,
        leased
    );
    store.close().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_sweep_never_deletes_a_record_that_was_claimed_again() {
    let file = File::new();
    let (store, sweeping) = (file.open().await, file.open().await);
    for round in 0..5 {
        let names: Vec<_> = (0..20)
            .map(|n| name("caller", &format!("{round} {n}")))
            .collect();
        for name in &names {
            let claim = claim_expiring();
            acquired(store.claim(name, &claim).await);
            complete_and_expire(&store, name, &claim).await;
        }
        let sweeps = tokio::spawn({
            let sweeping = sweeping.clone();
            async move {
                for _ in 0..10 {
                    sweeping.purge_expired(2, HOUR).await.unwrap();
                }
            }
        });
        let mut granted = Vec::new();
        for name in names.iter().rev() {
            if let Some(seen) = store.read(name).await.unwrap()
                && let Some(grant) = store
                    .reclaim(name, seen.fence, ReclaimAs::Expired, &hour())
                    .await
                    .unwrap()
            {
                granted.push((name, grant));
            }
        }
        sweeps.await.unwrap();
        for (name, grant) in granted {
            let record = store.read(name).await.unwrap().expect("swept while leased");
            assert_eq!(record.fence, grant.fence);
        }
    }
    store.close().await;
    sweeping.close().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn records_survive_closing_and_opening_again() {
    let file = File::new();
    let name = name("caller", "key");
    let claim = hour();
    let store = file.open().await;
    let grant = acquired(store.claim(&name, &claim).await);
    let _ = store.complete(&name, claim.token, &done()).await.unwrap();
    store.close().await;
    let error = store.read(&name).await.unwrap_err();
    assert_eq!(error.kind(), StoreErrorKind::Unavailable);

    let store = file.open().await;
    let record = store.read(&name).await.unwrap().unwrap();
    assert_eq!((record.fence, record.token), (grant.fence, claim.token));
    assert!(matches!(
        record.state,
        RecordState::Completed { response } if response == done().response
    ));
    assert!(record.expires_in.unwrap() > HOUR - Duration::from_secs(60));
    store.close().await;
}

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
async fn the_store_forces_wal_and_full_against_other_settings() {
    let file = File::new();
    let careless = file
        .options()
        .pragma("synchronous", "OFF")
        .pragma("journal_mode", "DELETE");
    let store = SqliteStore::open_with(careless).await.unwrap();
    let name = name("caller", "key");
    let claim = hour();
    acquired(store.claim(&name, &claim).await);
    // What is in force is asked of the store's own connection, by a trigger.
    let mut connection = file.connect().await;
    execute(
        &mut connection,
        "CREATE TABLE seen (mode, synchronous);
         CREATE TRIGGER note AFTER UPDATE ON idempotency_records BEGIN
             INSERT INTO seen SELECT journal_mode, synchronous
             FROM pragma_journal_mode, pragma_synchronous;
         END",
    )
    .await;
    let _ = store.complete(&name, claim.token, &done()).await.unwrap();
    let seen: String = query_scalar("SELECT mode || ' ' || synchronous FROM seen")
        .fetch_one(&mut connection)
        .await
        .unwrap();
    assert_eq!(seen, "wal 2");
    connection.close().await.unwrap();
    store.close().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_full_database_is_reported_and_keeps_no_partial_record() {
    let file = File::new();
    file.open().await.close().await;
    let small = file.options().pragma("max_page_count", "40");
    let store = SqliteStore::open_with(small).await.unwrap();
    let large = Completion::new(vec![7; 20_000].into(), HOUR, Duration::ZERO);
    let mut completed = 0;
    let (name, claim) = loop {
        let (name, claim) = (name("caller", &completed.to_string()), hour());
        acquired(store.claim(&name, &claim).await);
        match store.complete(&name, claim.token, &large).await {
            Ok(settlement) => assert_eq!(settlement, Transitioned::Applied),
            Err(error) => {
                assert_eq!(error.kind(), StoreErrorKind::Full, "{error:?}");
                break (name, claim);
            }
        }
        completed += 1;
        assert!(completed < 40);
    };
    // The claim is as it was, its owner may say something shorter, and the
    // store serves on.
    let record = store.read(&name).await.unwrap().unwrap();
    assert!(matches!(record.state, RecordState::InProgress { .. }));
    assert_eq!(
        store.renew(&name, claim.token, HOUR).await.unwrap(),
        Transitioned::Applied
    );
    let short = Completion::new(Bytes::new(), HOUR, Duration::ZERO);
    assert_eq!(
        store.complete(&name, claim.token, &short).await.unwrap(),
        Transitioned::Applied
    );
    let mut connection = file.connect().await;
    let sound: String = query_scalar("PRAGMA integrity_check")
        .fetch_one(&mut connection)
        .await
        .unwrap();
    assert_eq!(sound, "ok");
    connection.close().await.unwrap();
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
    assert_eq!(
        store.renew(&name, claim.token, HOUR).await.unwrap(),
        Transitioned::Applied
    );
    store.close().await;
    other.close().await.unwrap();
}

#[tokio::test(flavor = "multi_thread")]
async fn a_call_may_be_dropped_at_any_time() {
    let file = File::new();
    let store = file.open().await;
    for round in 0..100 {
        let name = name("caller", &round.to_string());
        let claim = hour();
        let completion = done();
        let patience = Duration::from_micros(40 * (round % 50));
        let _ = tokio::time::timeout(patience, store.claim(&name, &claim)).await;
        let token = match store.claim(&name, &claim).await.unwrap() {
            Claimed::Acquired(_) => claim.token,
            Claimed::Occupied(record) => record.token,
            Claimed::Vanished => panic!("nobody sweeps"),
        };
        assert_eq!(token, claim.token);
        let dropped = store.complete(&name, claim.token, &completion);
        let _ = tokio::time::timeout(patience, dropped).await;
        assert_eq!(
            store
                .complete(&name, claim.token, &completion)
                .await
                .unwrap(),
            Transitioned::Applied
        );
    }
    store.close().await;
    let mut connection = file.connect().await;
    let completed: i64 = query_scalar("SELECT count(*) FROM idempotency_records WHERE state = 2")
        .fetch_one(&mut connection)
        .await
        .unwrap();
    assert_eq!(completed, 100);
    connection.close().await.unwrap();
}

#[tokio::test(flavor = "multi_thread")]
async fn a_dropped_outcome_is_still_written() {
    let file = File::new();
    let store = file.open().await;
    let name = name("caller", "key");
    let claim = hour();
    acquired(store.claim(&name, &claim).await);
    let completion = done();
    {
        let mut call = std::pin::pin!(store.complete(&name, claim.token, &completion));
        let _ = futures_util::poll!(&mut call);
    }
    let begun = Instant::now();
    while !matches!(
        store.read(&name).await.unwrap().unwrap().state,
        RecordState::Completed { .. }
    ) {
        assert!(begun.elapsed() < Duration::from_secs(60));
    }
    store.close().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn migrations_coexist_with_those_of_the_application() {
    let file = File::new();
    let own = Migrator::with_migrations(vec![Migration::new(
        20_250_101,
        "accounts".into(),
        MigrationType::Simple,
        tower_idempotency::sqlx::SqlSafeStr::into_sql_str("CREATE TABLE accounts (id)"),
        false,
    )]);
    for _ in 0..2 {
        let store = file.open().await;
        let mut connection = file.connect().await;
        own.run(&mut connection).await.unwrap();
        connection.close().await.unwrap();
        store.close().await;
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn an_unreadable_row_is_an_error_and_never_absent() {
    let file = File::new();
    let store = file.open().await;
    let mut connection = file.connect().await;
    execute(&mut connection, "PRAGMA ignore_check_constraints = ON").await;
    for (key, damage) in [
        "state = 9",
        "state = 0",
        "state = 2",
        "response = x'00'",
        "token = x'00'",
        "operation = x''",
        "fingerprint = x'00'",
        "fence = -1",
        "attempt = -1",
        "takeovers = -1",
    ]
    .into_iter()
    .enumerate()
    {
        let name = name("caller", &key.to_string());
        acquired(store.claim(&name, &hour()).await);
        let update = format!("UPDATE idempotency_records SET {damage} WHERE key = '{key}'");
        execute(&mut connection, &update).await;
        let read = store.read(&name).await.unwrap_err();
        assert_eq!(read.kind(), StoreErrorKind::Corrupt, "{damage}");
        let claimed = store.claim(&name, &hour()).await.unwrap_err();
        assert_eq!(claimed.kind(), StoreErrorKind::Corrupt, "{damage}");
    }
    execute(&mut connection, "DELETE FROM idempotency_fences").await;
    let error = store
        .claim(&name("caller", "new"), &hour())
        .await
        .unwrap_err();
    assert_eq!(error.kind(), StoreErrorKind::Corrupt);
    connection.close().await.unwrap();
    store.close().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn an_unusable_file_is_refused_with_its_reason() {
    let file = File::new();
    std::fs::write(file.path(), [7; 8_192]).unwrap();
    let error = SqliteStore::open(file.path()).await.unwrap_err();
    assert_eq!(error.kind(), StoreErrorKind::Corrupt);

    let error = SqliteStore::open(file.directory.join("missing/records.db"))
        .await
        .unwrap_err();
    assert!(
        told(&error).contains("cannot be opened"),
        "{}",
        told(&error)
    );

    let error = SqliteStore::open(":memory:").await.unwrap_err();
    assert!(told(&error).contains("memory"), "{}", told(&error));
}

#[tokio::test(flavor = "multi_thread")]
async fn a_store_of_a_later_version_is_refused() {
    let file = File::new();
    file.open().await.close().await;
    let mut connection = file.connect().await;
    execute(
        &mut connection,
        "INSERT INTO _idempotency_migrations (version, description, success, checksum, execution_time)
         VALUES (999, 'later', TRUE, x'00', 0)",
    )
    .await;
    connection.close().await.unwrap();
    let error = SqliteStore::open(file.path()).await.unwrap_err();
    assert_eq!(error.kind(), StoreErrorKind::Unavailable);
}

#[tokio::test(flavor = "multi_thread")]
async fn f110_errors_name_the_cause_and_the_remedy() {
    let file = File::new();
    let options = file.options().busy_timeout(Duration::from_millis(10));
    let store = SqliteStore::open_with(options).await.unwrap();
    let name = name("caller", "key");
    let mut other = file.connect().await;
    let lock = other.begin_with("BEGIN IMMEDIATE").await.unwrap();
    let locked = store.claim(&name, &hour()).await.unwrap_err();
    lock.rollback().await.unwrap();
    execute(&mut other, "DROP TABLE idempotency_records").await;
    other.close().await.unwrap();
    let missing = store.read(&name).await.unwrap_err();
    store.close().await;
    let nowhere = SqliteStore::open(file.directory.join("missing/records.db")).await;
    std::fs::write(file.path(), [7; 8_192]).unwrap();
    let damaged = SqliteStore::open(file.path()).await;
    for (error, says) in [
        (locked, "busy_timeout"),
        (missing, "open the store again"),
        (nowhere.unwrap_err(), "its directory must exist"),
        (damaged.unwrap_err(), "no SQLite database"),
    ] {
        let told = error.to_string();
        assert!(told.contains(says), "{told}");
    }
}

/// What a child process does: nothing unless a test asked for it.
#[tokio::test(flavor = "multi_thread")]
async fn a_child_process_plays_its_part() {
    let (Ok(part), Ok(path)) = (std::env::var(PART), std::env::var(DATABASE)) else {
        return;
    };
    let store = SqliteStore::open(&path).await.unwrap();
    match &*part {
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

/// A file in a directory of its own, removed with it.
struct File {
    directory: PathBuf,
}

impl File {
    fn new() -> Self {
        let name = format!("idempotency-{:016x}", rand::random::<u64>());
        let directory = std::env::temp_dir().join(name);
        std::fs::create_dir(&directory).unwrap();
        Self { directory }
    }

    fn path(&self) -> PathBuf {
        self.directory.join("records.db")
    }

    fn options(&self) -> SqliteConnectOptions {
        SqliteConnectOptions::new().filename(self.path())
    }

    async fn open(&self) -> SqliteStore {
        SqliteStore::open(self.path()).await.unwrap()
    }

    async fn connect(&self) -> SqliteConnection {
        self.options().connect().await.unwrap()
    }

    /// Plays a part in another process, on this file.
    async fn child(&self, part: &str) -> std::process::Output {
        tokio::process::Command::new(std::env::current_exe().unwrap())
            .args(["--exact", "a_child_process_plays_its_part", "--nocapture"])
            .env(PART, part)
            .env(DATABASE, self.path())
            .output()
            .await
            .unwrap()
    }
}

impl Drop for File {
    fn drop(&mut self) {
        let _ = std::fs::remove_dir_all(Path::new(&self.directory));
    }
}

async fn execute(connection: &mut SqliteConnection, statements: &str) {
    raw_sql(AssertSqlSafe(statements.to_owned()))
        .execute(connection)
        .await
        .unwrap();
}

fn told(error: &StoreError) -> String {
    error.to_string()
}

async fn complete_and_expire(store: &SqliteStore, name: &RecordName, claim: &Claim) {
    let gone = Completion::new(Bytes::new(), Duration::ZERO, Duration::ZERO);
    let _ = store.complete(name, claim.token, &gone).await.unwrap();
    past().await;
}

async fn taken(
    store: &SqliteStore,
    name: &RecordName,
    seen: Grant,
    reclaim_as: ReclaimAs,
) -> Option<Grant> {
    store
        .reclaim(name, seen.fence, reclaim_as, &hour())
        .await
        .unwrap()
}

fn acquired(answer: Result<Claimed, StoreError>) -> Grant {
    match answer.unwrap() {
        Claimed::Acquired(grant) => grant,
        other => panic!("{other:?}"),
    }
}

fn hour() -> Claim {
    Claim::new(fingerprint(1), HOUR, HOUR)
}

fn claim_expiring() -> Claim {
    Claim::new(fingerprint(1), HOUR, Duration::ZERO)
}

fn done() -> Completion {
    Completion::new(Bytes::from_static(&[7; 300]), HOUR, Duration::ZERO)
}

fn fingerprint(body: u8) -> Fingerprint {
    Fingerprint::from_bytes([body; Fingerprint::LENGTH])
}

/// Until what lasted no time is over.
async fn past() {
    tokio::time::sleep(Duration::from_millis(3)).await;
}

const HOUR: Duration = Duration::from_secs(3600);
const KEYS: usize = 40;
const PART: &str = "IDEMPOTENCY_TEST_PART";
const DATABASE: &str = "IDEMPOTENCY_TEST_DATABASE";
