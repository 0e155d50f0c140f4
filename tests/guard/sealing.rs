//! Rules 88 to 94 for work that is not HTTP: sealed values, keyed inputs, and digests of
//! names.

use std::{convert::Infallible, time::Duration};

use tower_idempotency::{
    Guard, GuardBuilder, MemoryStore, Ran, RunError, Store,
    sealing::{KeyProvider, NameDigests, Sealing, SealingKey, Secret},
    store::{Completion, Record, RecordState},
};

use crate::{
    Runs, guard, name, retry,
    stores::{on_each_store, with_sqlite},
    told,
};

on_each_store! {
    rule_88_a_sealed_value_is_replayed_and_not_readable;
    rule_89_a_sealed_value_opens_in_its_own_record_alone;
    rule_94_secrets_of_inputs_rotate_while_both_guards_serve;
}

fn secret(filled: u8) -> Secret {
    Secret::from_bytes(&[filled; 32]).unwrap()
}

fn sealing() -> Sealing {
    Sealing::new("invoices", SealingKey::new("2026-11", &secret(11)).unwrap())
}

fn sealed<S: Store>(store: S) -> GuardBuilder<S> {
    Guard::builder(store).sealing(sealing())
}

async fn record<S: Store>(store: &S, key: &str) -> Record {
    store.read(&name(key)).await.unwrap().unwrap()
}

fn response(record: &Record) -> &[u8] {
    match &record.state {
        RecordState::Completed { response } => response,
        state => panic!("{state:?}"),
    }
}

async fn rule_88_a_sealed_value_is_replayed_and_not_readable(store: impl Store) {
    let digests = NameDigests::new(&secret(1));
    let guard = sealed(store).name_digests(digests.clone()).build().unwrap();
    for expected in ["now", "replayed"] {
        let run = guard.run(&name("job"), &"input", async |operation| {
            assert_eq!(operation.key().as_str(), "job");
            Ok::<_, Infallible>("inv0ice".to_owned())
        });
        let ran = run.await;
        assert_eq!(told(&ran), expected);
        assert_eq!(ran.unwrap().into_inner(), "inv0ice");
    }
    assert!(guard.store().read(&name("job")).await.unwrap().is_none());
    let kept = record_of(guard.store(), &digests).await;
    let bytes = response(&kept);
    assert!(!bytes.windows(7).any(|window| window == b"inv0ice"));
}

async fn record_of<S: Store>(store: &S, digests: &NameDigests) -> Record {
    store
        .read(&digests.of(&name("job")))
        .await
        .unwrap()
        .unwrap()
}

async fn rule_89_a_sealed_value_opens_in_its_own_record_alone(store: impl Store) {
    let (guard, runs) = (sealed(store).build().unwrap(), Runs::default());
    assert_eq!(retry(&guard, "one", &runs).await, "now");
    let stolen = record(guard.store(), "one").await;
    // A writer of the store claims a name with the same input, and completes it with the
    // other's value.
    let claim = tower_idempotency::store::Claim::new(
        stolen.fingerprint,
        Duration::from_secs(60),
        Duration::from_secs(600),
    );
    let _ = guard.store().claim(&name("two"), &claim).await.unwrap();
    let bytes = response(&stolen).to_vec().into();
    let completion = Completion::new(bytes, claim.retention, Duration::ZERO);
    let two = name("two");
    let completed = guard.store().complete(&two, claim.token, &completion);
    let _ = completed.await.unwrap();
    assert_eq!(retry(&guard, "two", &runs).await, "unreadable");
    assert_eq!(retry(&guard, "one", &runs).await, "replayed");
    assert_eq!(runs.count(), 1);
}

async fn rule_94_secrets_of_inputs_rotate_while_both_guards_serve(store: impl Store + Clone) {
    let (builder, runs) = (|| Guard::builder(store.clone()), Runs::default());
    let unkeyed = guard(store.clone());
    assert_eq!(retry(&unkeyed, "unkeyed", &runs).await, "now");
    let (old, new) = (secret(1), secret(2));
    let learning = builder()
        .fingerprint_secret(&old)
        .earlier_fingerprint_secret(&new)
        .build()
        .unwrap();
    let rotated = builder()
        .fingerprint_secret(&new)
        .earlier_fingerprint_secret(&old)
        .accept_unkeyed()
        .build()
        .unwrap();
    for (one, other, key) in [(&learning, &rotated, "old"), (&rotated, &learning, "new")] {
        assert_eq!(retry(one, key, &runs).await, "now");
        assert_eq!(retry(other, key, &runs).await, "replayed");
        let differs = other.run(&name(key), &"another input", runs.work()).await;
        assert_eq!(told(&differs), "mismatch");
    }
    assert_eq!(retry(&rotated, "unkeyed", &runs).await, "replayed");
    let done = builder().fingerprint_secret(&new).build().unwrap();
    assert_eq!(retry(&done, "new", &runs).await, "replayed");
    for key in ["old", "unkeyed"] {
        assert_eq!(retry(&done, key, &runs).await, "other kind");
    }
    assert_eq!(retry(&unkeyed, "new", &runs).await, "other kind");
    assert_eq!(runs.count(), 3);
}

#[tokio::test]
async fn rule_90_a_value_of_an_unknown_key_is_unreadable() {
    let (store, runs) = (MemoryStore::new(), Runs::default());
    let before = guard(store.clone());
    assert_eq!(retry(&before, "readable", &runs).await, "now");
    let november = sealed(store.clone()).build().unwrap();
    assert_eq!(retry(&november, "readable", &runs).await, "unreadable");
    assert_eq!(retry(&november, "sealed", &runs).await, "now");
    assert_eq!(retry(&before, "sealed", &runs).await, "unreadable");
    let key = SealingKey::new("2026-12", &secret(12)).unwrap();
    let december = Guard::builder(store).sealing(Sealing::new("invoices", key));
    let december = december.build().unwrap();
    assert_eq!(retry(&december, "sealed", &runs).await, "unreadable");
    assert_eq!(runs.count(), 2);
}

#[tokio::test]
async fn rule_91_without_its_key_no_work_runs() {
    struct Failing;

    impl KeyProvider for Failing {
        async fn secret(&self, _: &str) -> Result<Option<Secret>, tower::BoxError> {
            Err("no route to the key service".into())
        }
    }

    let (store, runs) = (MemoryStore::new(), Runs::default());
    let sealing = Sealing::with_provider("invoices", "2026-11", Failing);
    let guard = Guard::builder(store.clone())
        .sealing(sealing)
        .build()
        .unwrap();
    let refused = guard.run(&name("job"), &"input", runs.work()).await;
    let Err(RunError::Store(error)) = refused else {
        panic!("{}", told(&refused));
    };
    assert!(error.to_string().contains("no route to the key service"));
    assert_eq!((store.len(), runs.count()), (0, 0));
}

#[tokio::test(flavor = "multi_thread")]
async fn rule_88_a_value_committed_with_its_writes_is_sealed() {
    with_sqlite(async |store, _| {
        let guard = sealed(store.clone()).build().unwrap();
        for replays in [false, true] {
            let of_work = store.clone();
            let run = guard.run(&name("job"), &"input", async move |operation| {
                let transaction = of_work.begin(&operation).await?;
                let value = "inv0ice".to_owned();
                of_work
                    .commit_value(&operation, transaction, &value)
                    .await?;
                Ok::<_, tower_idempotency::CommitError>(value)
            });
            let ran = run.await.unwrap();
            assert_eq!(matches!(ran, Ran::Replayed(_)), replays);
            assert_eq!(ran.into_inner(), "inv0ice");
        }
        let kept = record(&store, "job").await;
        assert!(
            !response(&kept)
                .windows(7)
                .any(|window| window == b"inv0ice")
        );
    })
    .await;
}
