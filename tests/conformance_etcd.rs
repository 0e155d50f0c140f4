//! The example of a store on etcd keeps every promise, with two hosts that contend, and
//! says what failed when there is no etcd.

#[allow(dead_code, reason = "only the comparison is used")]
mod any_store;

use std::{sync::Mutex, time::Duration};

use tokio::net::TcpListener;
use tower_idempotency::{
    Key, Scope, Store, StoreErrorKind,
    conformance::Subject,
    conformance_tests,
    store::{RecordName, admin::Filter, cas::CasStore},
};

mod etcd;

use any_store::reference::Compared;
use etcd::{Etcd, Keys};

/// Two hosts that see each record at the latest when time begins to pass.
struct Hosts {
    keys: Keys,
    all: Mutex<Vec<CasStore<Etcd>>>,
}

impl Hosts {
    fn new() -> Self {
        let (keys, all) = (Keys::new(), Mutex::default());
        Self { keys, all }
    }

    fn host(&self) -> CasStore<Etcd> {
        let store = self.keys.open();
        self.all.lock().unwrap().push(store.clone());
        store
    }
}

impl Subject for Hosts {
    type Store = CasStore<Etcd>;
    const ADDS_USAGE: bool = true;
    /// Each write is flushed to disk, and the suite makes many at once.
    const SHORT: Duration = Duration::from_millis(400);

    async fn store(&self) -> Self::Store {
        self.host()
    }

    async fn peer(&self, _: &Self::Store) -> Self::Store {
        self.host()
    }

    async fn pass(&self, time: Duration) {
        let all = self.all.lock().unwrap().clone();
        for store in all {
            store.count(&Filter::unknown(), u32::MAX).await.unwrap();
        }
        tokio::time::sleep(time).await;
    }

    async fn finish(&self, _: Self::Store) {
        self.keys.remove().await;
    }
}

conformance_tests! {
    #[tokio::test(flavor = "multi_thread", worker_threads = 4)]
    Hosts::new()
}

#[tokio::test(flavor = "multi_thread")]
async fn every_transition_does_as_the_transition_function() {
    let keys = Keys::new();
    let store = keys.open();
    let mut compared = Compared::new(&store);
    compared.lists_often = false;
    compared.every_transition().await;
    keys.remove().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn random_calls_answer_as_the_transition_function() {
    let keys = Keys::new();
    let store = keys.open();
    let mut compared = Compared::new(&store);
    compared.lists_often = false;
    compared.random_walk(6, 300).await;
    keys.remove().await;
}

#[tokio::test]
async fn etcd_that_is_gone_is_unavailable() {
    let listener = TcpListener::bind(("127.0.0.1", 0)).await.unwrap();
    let url = format!("http://{}", listener.local_addr().unwrap());
    drop(listener);
    let store = CasStore::new(Etcd::new(&url, ""));
    let name = RecordName::new(Scope::single_tenant(), Key::new("key"));
    let error = store.read(&name).await.unwrap_err();
    assert_eq!(error.kind(), StoreErrorKind::Unavailable);
    assert!(error.sent_nothing());
}
