//! Rule 91: a key service that fails, hangs, panics or does not know a key.

use std::{
    future::pending,
    sync::{
        Arc, Mutex,
        atomic::{AtomicUsize, Ordering},
    },
    time::Duration,
};

use futures_util::poll;
use tokio::time::sleep;
use tower::BoxError;
use tower_idempotency::{
    DynStore, MemoryStore, StoreFailure,
    sealing::{KeyProvider, Sealing, Secret},
};

use super::{key, secret};
use crate::{
    api::{Api, keyed, required, settle},
    probe::Probe,
    told::Told,
};

/// What the key service does.
#[derive(Clone, Copy)]
enum Mood {
    Well,
    Failing,
    Hanging,
    Slow,
    Panicking,
    Forgetful,
}

/// A key service whose keys have the number behind the dash in every byte.
#[derive(Clone)]
struct Service {
    mood: Arc<Mutex<Mood>>,
    asked: Arc<AtomicUsize>,
}

impl Service {
    fn new(mood: Mood) -> Self {
        Self {
            mood: Arc::new(Mutex::new(mood)),
            asked: Arc::default(),
        }
    }

    fn be(&self, mood: Mood) {
        *self.mood.lock().unwrap() = mood;
    }

    fn asked(&self) -> usize {
        self.asked.load(Ordering::SeqCst)
    }

    fn sealing(&self, current: &str) -> Sealing {
        Sealing::with_provider("payments", current, self.clone())
    }
}

impl KeyProvider for Service {
    async fn secret(&self, id: &str) -> Result<Option<Secret>, BoxError> {
        self.asked.fetch_add(1, Ordering::SeqCst);
        let mood = *self.mood.lock().unwrap();
        match mood {
            Mood::Well => Ok(id
                .strip_prefix("key-")
                .map(|filled| secret(filled.parse().unwrap()))),
            Mood::Failing => Err("no route to the key service".into()),
            Mood::Hanging => pending().await,
            Mood::Slow => {
                sleep(Duration::from_secs(1)).await;
                Ok(Some(secret(7)))
            }
            Mood::Panicking => panic!("in the key service's client"),
            Mood::Forgetful => Ok(None),
        }
    }
}

#[tokio::test(start_paused = true)]
async fn rule_91_without_its_key_nothing_is_claimed_or_run() {
    for (mood, error) in [
        (Mood::Failing, "no route to the key service"),
        (
            Mood::Hanging,
            "did not answer within `provider_timeout` (2s)",
        ),
        (Mood::Panicking, "it panicked"),
        (Mood::Forgetful, "has no sealing key `key-7`"),
    ] {
        let told = Told::listen();
        let (service, store) = (Service::new(mood), MemoryStore::new());
        let sealing = service
            .sealing("key-7")
            .provider_timeout(Duration::from_secs(2));
        assert!(
            sealing
                .load()
                .await
                .unwrap_err()
                .to_string()
                .contains(error)
        );
        let builder = required(DynStore::new(store.clone()))
            .sealing(sealing)
            .store_failure(StoreFailure::RunUnguarded);
        let probe = Probe::counting();
        let api = Api::new(builder, &probe);
        let refused = api.send(keyed("K")).await;
        refused.assert_problem(503, "store-unavailable");
        assert_eq!((probe.runs(), store.len()), (0, 0));
        let warnings = told.warnings();
        assert_eq!(warnings.len(), 1);
        let message = "sealing key not available, nothing ran";
        assert_eq!(warnings[0].message(), message);
        assert!(
            warnings[0].field("error").contains(error),
            "{:?}",
            warnings[0]
        );
        // It recovers by itself.
        service.be(Mood::Well);
        tokio::time::sleep(Duration::from_secs(1)).await;
        let first = api.send(keyed("K")).await;
        first.assert_run(1);
        let asked = service.asked();
        service.be(Mood::Hanging);
        api.send(keyed("K")).await.assert_replay_of(&first);
        api.send(keyed("L")).await.assert_run(2);
        assert_eq!(service.asked(), asked);
    }
}

#[tokio::test(start_paused = true)]
async fn rule_91_a_replay_waits_for_the_key_of_its_record() {
    let (store, probe) = (DynStore::new(MemoryStore::new()), Probe::counting());
    let service = Service::new(Mood::Well);
    let with = |sealing| Api::new(required(store.clone()).sealing(sealing), &probe);
    let first = with(service.sealing("key-7")).send(keyed("K")).await;
    first.assert_run(1);
    for mood in [
        Mood::Failing,
        Mood::Hanging,
        Mood::Panicking,
        Mood::Forgetful,
    ] {
        service.be(Mood::Well);
        let sealing = service.sealing("key-8");
        sealing.load().await.unwrap();
        let api = with(sealing);
        service.be(mood);
        let refused = api.send(keyed("K")).await;
        refused.assert_problem(503, "store-unavailable");
        service.be(Mood::Well);
        tokio::time::sleep(Duration::from_secs(1)).await;
        api.send(keyed("K")).await.assert_replay_of(&first);
    }
    // A static key serves beside those of the service.
    let sealing = Sealing::new("payments", key("key-7", 7));
    with(sealing)
        .send(keyed("K"))
        .await
        .assert_replay_of(&first);
    assert_eq!(probe.runs(), 1);
}

#[tokio::test(start_paused = true)]
async fn rule_91_many_requests_ask_the_key_service_once() {
    let service = Service::new(Mood::Hanging);
    let probe = Probe::counting();
    let store = DynStore::new(MemoryStore::new());
    let api = Api::new(required(store).sealing(service.sealing("key-7")), &probe);
    let waiting: Vec<_> = (0..20).map(|n| api.spawn(keyed(&n.to_string()))).collect();
    settle().await;
    assert_eq!(service.asked(), 1);
    for request in waiting {
        request
            .await
            .unwrap()
            .assert_problem(503, "store-unavailable");
    }
    assert_eq!((service.asked(), probe.runs()), (1, 0));
}

#[tokio::test(start_paused = true)]
async fn rule_91_request_that_is_not_polled_delays_no_other() {
    let service = Service::new(Mood::Slow);
    let store = DynStore::new(MemoryStore::new());
    let sealing = service.sealing("key-7");
    let api = Api::new(required(store).sealing(sealing), &Probe::counting());
    let mut first = Box::pin(api.send(keyed("K")));
    while service.asked() == 0 {
        assert!(poll!(first.as_mut()).is_pending());
        settle().await;
    }
    api.send(keyed("L")).await.assert_run(1);
    first.await.assert_run(2);
    assert_eq!(service.asked(), 1);
}
