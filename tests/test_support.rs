//! What the feature `test-support` promises to tests of applications.

use std::{sync::Arc, time::Duration};

use tokio::time::{Instant, timeout};
use tower_idempotency::{
    Fence, Key, MemoryStore, Operation, Scope, SqliteStore, Store, StoreError, StoreErrorKind,
    store::{
        Claim, Claimed, Fingerprint, RecordName, RecordState, Transitioned,
        admin::{Count, Filter},
    },
    test_support::{Fault, FaultyStore, Gate, StoreCall},
};

type Memory = FaultyStore<MemoryStore>;

fn store() -> Memory {
    FaultyStore::new(MemoryStore::new())
}

fn named(key: &str) -> RecordName {
    RecordName::new(Scope::single_tenant(), Key::new(key))
}

async fn claim(store: &Memory, key: &str) -> Result<Claimed, StoreError> {
    let fingerprint = Fingerprint::from_bytes([0; Fingerprint::LENGTH]);
    let claim = Claim::new(fingerprint, HOUR, HOUR);
    store.claim(&named(key), &claim).await
}

/// Whether the wrapped store has a record.
async fn has(store: &Memory, key: &str) -> bool {
    let record = store.get_ref().read(&named(key)).await;
    record.unwrap().is_some()
}

#[tokio::test]
async fn errors_reach_the_chosen_calls_alone() {
    let store = store();
    store.inject(StoreCall::Claim, 2..=3, Fault::Error(StoreError::full("x")));
    assert!(claim(&store, "1").await.is_ok());
    store.inject(StoreCall::Claim, 5.., Fault::Panic("boom"));
    for key in ["2", "3"] {
        let error = claim(&store, key).await.unwrap_err();
        assert_eq!(error.kind(), StoreErrorKind::Full);
        assert!(!has(&store, key).await);
    }
    assert!(claim(&store, "4").await.is_ok());
    store.read(&named("4")).await.unwrap();
    assert_eq!(store.calls().last(), Some(&StoreCall::Read));
    let panicking = store.clone();
    let panicked = tokio::spawn(async move { claim(&panicking, "5").await });
    assert!(panicked.await.unwrap_err().is_panic());
    assert!(!has(&store, "5").await);
    assert_eq!(store.calls_of(StoreCall::Claim), 5);
}

#[tokio::test(start_paused = true)]
async fn every_kind_of_call_fails_until_it_heals() {
    let store = store();
    store.inject_all(Fault::Error(StoreError::timed_out()));
    let token = tower_idempotency::store::Token::random();
    let name = named("k");
    assert!(claim(&store, "k").await.is_err());
    assert!(store.renew(&name, token, HOUR).await.is_err());
    assert!(store.list(&Filter::unknown(), None, 1).await.is_err());
    assert!(store.forget(&name, Fence::from(1)).await.is_err());
    assert!(store.count(&Filter::unknown(), 1).await.is_err());
    assert!(store.purge_expired(1, HOUR).await.is_err());
    store.heal();
    assert!(claim(&store, "k").await.is_ok());
    let renewed = store.renew(&name, token, HOUR).await.unwrap();
    assert_eq!(renewed, Transitioned::Superseded);
    assert_eq!(store.calls_of(StoreCall::Renew), 2);
    let counted = store.count(&Filter::unknown(), 1).await.unwrap();
    assert_eq!(counted, Count::Exactly(0));
    assert_eq!(store.calls_of(StoreCall::Count), 2);
    assert_eq!(store.calls_of(StoreCall::List), 1);
}

#[tokio::test(start_paused = true)]
async fn faults_do_what_they_say() {
    for (fault, is_done, is_answered, takes) in [
        (Fault::LoseAnswer, true, true, 0),
        (Fault::Hang, false, false, 60),
        (Fault::HangAfterwards, true, false, 60),
        (Fault::Delay(Duration::from_secs(7)), true, true, 7),
        (Fault::LandLater(Duration::from_secs(50)), true, false, 60),
        (Fault::Vanish, false, true, 0),
    ] {
        let store = store();
        store.inject(StoreCall::Claim, .., fault.clone());
        let since = Instant::now();
        let answer = timeout(Duration::from_secs(60), claim(&store, "k")).await;
        assert_eq!(answer.is_ok(), is_answered, "{fault:?}");
        assert_eq!(since.elapsed().as_secs(), takes, "{fault:?}");
        tokio::task::yield_now().await;
        assert_eq!(has(&store, "k").await, is_done, "{fault:?}");
        match (fault, answer) {
            (Fault::LoseAnswer, Ok(answer)) => assert!(answer.is_err()),
            (Fault::Vanish, Ok(answer)) => assert!(matches!(answer, Ok(Claimed::Vanished))),
            (_, Ok(answer)) => assert!(matches!(answer, Ok(Claimed::Acquired(_)))),
            (_, Err(_)) => {}
        }
    }
}

#[tokio::test]
async fn gate_holds_a_call_until_it_lets_one_pass() {
    let store = store();
    let gate = Gate::closed();
    store.inject(StoreCall::Claim, .., Fault::Wait(gate.clone()));
    let claims = ["1", "2"].map(|key| {
        let store = store.clone();
        tokio::spawn(async move { claim(&store, key).await })
    });
    gate.arrival().await;
    gate.arrival().await;
    assert!(!has(&store, "1").await && !has(&store, "2").await);
    gate.let_one_pass();
    let [first, second] = claims;
    first.await.unwrap().unwrap();
    assert!(!second.is_finished());
    gate.open();
    second.await.unwrap().unwrap();
    for key in ["3", "4"] {
        claim(&store, key).await.unwrap();
    }
    gate.open();
}

#[tokio::test]
async fn operation_for_test_owns_its_claim() {
    let store = Arc::new(MemoryStore::new());
    let operation = Operation::for_test(&store, "k").await;
    assert_eq!((operation.attempt(), operation.key().as_str()), (1, "k"));
    let record = store.read(&named("k")).await.unwrap().unwrap();
    assert_eq!(record.operation, operation.id());
    assert_eq!(record.fence, operation.fence());
    assert!(matches!(
        record.state,
        RecordState::InProgress {
            lease_left: Some(_)
        }
    ));
    let again = tokio::spawn(async move { Operation::for_test(&store, "k").await });
    assert!(again.await.unwrap_err().is_panic());
}

#[tokio::test]
async fn operation_for_test_commits_with_its_response() {
    let name = format!("test-support-{}.sqlite", std::process::id());
    let file = std::path::PathBuf::from(env!("CARGO_TARGET_TMPDIR")).join(name);
    let store = SqliteStore::open(&file).await.unwrap();
    let operation = Operation::for_test(&store, "k").await;
    let transaction = store.begin(&operation).await.unwrap();
    let committed = store.commit(&operation, transaction, "done").await.unwrap();
    assert_eq!(committed.into_http().status(), 200);
    let record = store.read(&named("k")).await.unwrap().unwrap();
    assert!(matches!(record.state, RecordState::Completed { .. }));
    store.close().await;
    std::fs::remove_file(file).unwrap();
}

const HOUR: Duration = Duration::from_secs(3600);
