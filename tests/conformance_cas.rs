//! A store on compare-and-swap keeps every promise, over an engine in memory whose hosts'
//! clocks differ, whose answers take time, and of whose answers some are lost.

#[allow(dead_code, reason = "only the comparison is used")]
#[path = "any_store/mod.rs"]
mod any_store;

use std::{
    collections::BTreeMap,
    sync::{Arc, Mutex},
    time::Duration,
};

use bytes::Bytes;
use tokio::time::{Instant, sleep};
use tower_idempotency::{
    Fence, Key, Scope, Store, StoreError, StoreErrorKind,
    conformance::Subject,
    conformance_tests,
    store::{
        Claim, Claimed, Fingerprint, ReclaimAs, RecordName, RecordState, Transitioned,
        admin::Filter,
        cas::{CasStore, CompareAndSwap, Listed, Swap, Versioned},
    },
};

/// A host's connection to the engine. Fences are the engine's revisions, or come from
/// the host's clock.
#[derive(Clone)]
struct Engine<const REVISIONS: bool> {
    table: Arc<Mutex<Table>>,
    started: Instant,
    network: Network,
    /// How far this host's clock is ahead.
    ahead: Duration,
}

#[derive(Default)]
struct Table {
    values: BTreeMap<String, Versioned<u64>>,
    revision: u64,
    puts: u64,
}

#[derive(Clone, Copy, PartialEq)]
enum Network {
    Perfect,
    /// Calls take up to 2 ms. Every third write of a claim, a renewal or a completion is
    /// applied without an answer: only its owner changes such a record, so that the store
    /// finds out by reading.
    Lossy,
    /// Puts are lost before they are applied.
    CutOff,
}

impl<const REVISIONS: bool> Engine<REVISIONS> {
    fn new(network: Network) -> Self {
        Self {
            table: Arc::default(),
            started: Instant::now(),
            network,
            ahead: Duration::ZERO,
        }
    }

    fn ahead(&self, ahead: Duration) -> Self {
        let host = self.clone();
        Self { ahead, ..host }
    }

    async fn delay(&self) {
        if self.network == Network::Lossy {
            sleep(Duration::from_millis(rand::random_range(0..=1))).await;
        }
    }

    async fn call<T>(&self, call: impl FnOnce(&mut Table) -> T) -> T {
        self.delay().await;
        let answer = call(&mut self.table.lock().unwrap());
        self.delay().await;
        answer
    }
}

impl<const REVISIONS: bool> CompareAndSwap for Engine<REVISIONS> {
    type Version = u64;
    const FENCE: Option<fn(&u64) -> Fence> = match REVISIONS {
        true => Some(|revision| Fence::from(*revision)),
        false => None,
    };

    async fn get(&self, key: &str) -> Result<Option<Versioned<u64>>, StoreError> {
        Ok(self.call(|table| table.values.get(key).cloned()).await)
    }

    async fn put(
        &self,
        key: &str,
        value: Bytes,
        expected: Option<&u64>,
    ) -> Result<Swap<u64>, StoreError> {
        if self.network == Network::CutOff {
            return Err(StoreError::timed_out());
        }
        let put = |table: &mut Table| {
            let found = table.values.get(key).cloned();
            if found.as_ref().map(|found| &found.version) != expected {
                return (Swap::Lost(found), false);
            }
            table.revision += 1;
            table.puts += 1;
            let version = table.revision;
            let is_third = table.puts.is_multiple_of(3) && ANSWERS_LOST.contains(&value[1]);
            table
                .values
                .insert(key.to_owned(), Versioned { value, version });
            (Swap::Written(version), is_third)
        };
        match self.call(put).await {
            (Swap::Written(_), true) if self.network == Network::Lossy => {
                Err(StoreError::timed_out())
            }
            (answer, _) => Ok(answer),
        }
    }

    async fn delete(&self, key: &str, expected: &u64) -> Result<bool, StoreError> {
        let delete = |table: &mut Table| {
            let found = table.values.get(key);
            let is_same = found.is_some_and(|found| found.version == *expected);
            if is_same {
                table.values.remove(key);
            }
            is_same
        };
        Ok(self.call(delete).await)
    }

    async fn list(
        &self,
        prefix: &str,
        after: Option<&str>,
        limit: u32,
    ) -> Result<Listed<u64>, StoreError> {
        let list = |table: &mut Table| {
            let from = after.filter(|after| *after > prefix).unwrap_or(prefix);
            let values = table.values.range(from.to_owned()..);
            let values = values.take_while(|(key, _)| key.starts_with(prefix));
            let values = values.filter(|(key, _)| Some(key.as_str()) != after);
            let values = values.map(|(key, value)| (key.clone(), value.clone()));
            values.take(limit as usize).collect()
        };
        Ok(self.call(list).await)
    }

    fn now(&self) -> Duration {
        SINCE_1970 + self.started.elapsed() + self.ahead
    }
}

/// Two hosts that see each record at the latest when time begins to pass, as they do that
/// receive its retries.
struct Hosts<const REVISIONS: bool> {
    network: Network,
    ahead: Duration,
    all: Mutex<Vec<CasStore<Engine<REVISIONS>>>>,
}

impl<const REVISIONS: bool> Hosts<REVISIONS> {
    fn new(network: Network, ahead: Duration) -> Self {
        let all = Mutex::default();
        Self {
            network,
            ahead,
            all,
        }
    }

    fn host(&self, engine: Engine<REVISIONS>) -> CasStore<Engine<REVISIONS>> {
        let store = CasStore::new(engine);
        self.all.lock().unwrap().push(store.clone());
        store
    }

    async fn observe(&self) {
        let all = self.all.lock().unwrap().clone();
        for store in all {
            store.count(&Filter::unknown(), u32::MAX).await.unwrap();
        }
    }
}

macro_rules! subject {
    ($name:ident, $revisions:literal, $short:expr, $tick:expr, $pass:expr) => {
        struct $name(Hosts<$revisions>);

        impl Subject for $name {
            type Store = CasStore<Engine<$revisions>>;
            const ADDS_USAGE: bool = true;
            const SHORT: Duration = $short;
            const TICK: Option<Duration> = $tick;

            async fn store(&self) -> Self::Store {
                self.0.host(Engine::new(self.0.network))
            }

            async fn peer(&self, store: &Self::Store) -> Self::Store {
                self.0.host(store.get_ref().ahead(self.0.ahead))
            }

            async fn pass(&self, time: Duration) {
                self.0.observe().await;
                $pass(time).await;
            }
        }
    };
}

/// One clock, and fences from the engine. A tick is longer than the margin of a lease.
mod exact {
    use super::*;

    subject!(
        Exact,
        true,
        Duration::from_millis(100),
        Some(Duration::from_millis(2)),
        tokio::time::advance
    );

    conformance_tests! {
        #[tokio::test(start_paused = true)]
        Exact(Hosts::new(Network::Perfect, Duration::ZERO))
    }
}

/// Two clocks, fences from both of them, and lost answers.
mod skewed {
    use super::*;

    subject!(
        Skewed,
        false,
        Duration::from_millis(100),
        None,
        tokio::time::advance
    );

    conformance_tests! {
        #[tokio::test(start_paused = true)]
        Skewed(Hosts::new(Network::Lossy, SKEW))
    }
}

/// The same with racing threads. The two hosts see a record as far apart as a busy machine
/// lets them, and the suite accepts a quarter of the short time.
mod racing {
    use super::*;

    subject!(Racing, true, Duration::from_millis(400), None, sleep);

    conformance_tests! {
        #[tokio::test(flavor = "multi_thread", worker_threads = 4)]
        Racing(Hosts::new(Network::Lossy, SKEW))
    }
}

fn claim() -> Claim {
    let fingerprint = Fingerprint::from_bytes([1; Fingerprint::LENGTH]);
    Claim::new(fingerprint, LEASE, LEASE * 1_000)
}

fn name(key: &str) -> RecordName {
    RecordName::new(Scope::single_tenant(), Key::new(key))
}

async fn lease_left(store: &impl Store) -> Option<Duration> {
    match store.read(&name("key")).await.unwrap().unwrap().state {
        RecordState::InProgress { lease_left } => lease_left,
        state => panic!("{state:?}"),
    }
}

#[tokio::test(start_paused = true)]
async fn i3_restarted_process_waits_one_lease_before_a_takeover() {
    let engine = Engine::<false>::new(Network::Perfect);
    let owner = CasStore::new(engine.clone());
    let Claimed::Acquired(grant) = owner.claim(&name("key"), &claim()).await.unwrap() else {
        panic!("a free name is acquired");
    };
    tokio::time::advance(LEASE * 10).await;

    let restarted = CasStore::new(engine);
    let take_over = async || {
        let (name, claim) = (name("key"), claim());
        let taken = restarted.reclaim(&name, grant.fence, ReclaimAs::Takeover, &claim);
        taken.await.unwrap()
    };
    assert_eq!(take_over().await, None);
    assert_eq!(lease_left(&restarted).await, Some(LEASE));
    tokio::time::advance(LEASE * 2).await;
    assert_eq!(lease_left(&restarted).await, None);
    assert!(
        take_over()
            .await
            .is_some_and(|taken| taken.fence > grant.fence)
    );
}

#[tokio::test(start_paused = true)]
async fn i3_clocks_a_year_apart_do_not_end_a_renewed_lease() {
    let engine = Engine::<false>::new(Network::Perfect);
    let owner = CasStore::new(engine.clone());
    let other = CasStore::new(engine.ahead(Duration::from_secs(365 * 24 * 3600)));
    let claim = claim();
    owner.claim(&name("key"), &claim).await.unwrap();
    for _ in 0..10 {
        assert_eq!(lease_left(&other).await, Some(LEASE));
        let purged = other.purge_expired(10, LEASE).await.unwrap();
        assert_eq!(purged.touched(), 0);
        tokio::time::advance(LEASE * 3 / 4).await;
        let renewed = owner.renew(&name("key"), claim.token, LEASE).await.unwrap();
        assert_eq!(renewed, Transitioned::Applied);
    }
}

#[tokio::test(start_paused = true)]
async fn i15_put_that_was_lost_is_an_error_and_asked_again() {
    let engine = Engine::<false>::new(Network::Perfect);
    let store = CasStore::new(engine.clone());
    let cut_off = CasStore::new(Engine {
        network: Network::CutOff,
        ..engine
    });
    let claim = claim();
    let lost = cut_off.claim(&name("key"), &claim).await.unwrap_err();
    assert_eq!(lost.kind(), StoreErrorKind::TimedOut);
    let again = store.claim(&name("key"), &claim).await.unwrap();
    assert!(matches!(again, Claimed::Acquired(_)));
    // The same bytes are there already, from an earlier write.
    let renewed = cut_off.renew(&name("key"), claim.token, LEASE).await;
    assert_eq!(renewed.unwrap_err().kind(), StoreErrorKind::TimedOut);
}

#[tokio::test(start_paused = true)]
async fn unreadable_record_does_not_stop_a_sweep() {
    let engine = Engine::<false>::new(Network::Perfect);
    let store = CasStore::new(engine.clone());
    let unreadable = Bytes::from_static(b"from a later version");
    engine.put("\0a", unreadable, None).await.unwrap();
    let claim = claim();
    let due = name("b");
    store.claim(&due, &claim).await.unwrap();
    let marked = store.mark_unknown(&due, claim.token, Duration::ZERO).await;
    assert_eq!(marked.unwrap(), Transitioned::Applied);
    tokio::time::advance(LEASE).await;
    assert_eq!(store.purge_expired(10, LEASE).await.unwrap().removed, 1);
    let error = store.purge_expired(10, LEASE).await.unwrap_err();
    assert_eq!(error.kind(), StoreErrorKind::Corrupt);
    let claimed = store.claim(&name("a"), &claim).await.unwrap_err();
    assert_eq!(claimed.kind(), StoreErrorKind::Corrupt);
}

#[tokio::test(start_paused = true)]
async fn list_names_an_unreadable_record_and_has_the_others() {
    let engine = Engine::<false>::new(Network::Perfect);
    let store = CasStore::new(engine.clone());
    let unreadable = Bytes::from_static(b"from a later version");
    let key = format!("{}\0a", Scope::single_tenant().as_str());
    engine.put(&key, unreadable, None).await.unwrap();
    store.claim(&name("b"), &claim()).await.unwrap();
    let filter = Filter::in_progress_for(Duration::ZERO);
    tokio::time::advance(LEASE).await;
    let page = store.list(&filter, None, 10).await.unwrap();
    assert_eq!(page.unreadable, [name("a")]);
    assert_eq!(page.records[0].0, name("b"));
}

#[tokio::test(start_paused = true)]
async fn list_passes_over_keys_that_name_no_record() {
    let engine = Engine::<false>::new(Network::Perfect);
    let store = CasStore::new(engine.clone());
    let value = Bytes::from_static(b"of somebody else");
    for number in 0..1_000 {
        let key = format!("!{number:03}");
        engine.put(&key, value.clone(), None).await.unwrap();
    }
    let scope = Scope::new("caller").unwrap();
    let name = RecordName::new(scope, Key::new("key"));
    store.claim(&name, &claim()).await.unwrap();
    tokio::time::advance(LEASE).await;
    let filter = Filter::in_progress_for(Duration::ZERO);
    let page = store.list(&filter, None, 10).await.unwrap();
    assert_eq!(page.records[0].0, name);
    assert!(page.unreadable.is_empty());
    let error = store.purge_expired(10, LEASE).await.unwrap_err();
    assert_eq!(error.kind(), StoreErrorKind::Corrupt);
}

/// An engine that keeps the default of `list`.
#[derive(Clone)]
struct Unlisted(Engine<true>);

impl CompareAndSwap for Unlisted {
    type Version = u64;

    async fn get(&self, key: &str) -> Result<Option<Versioned<u64>>, StoreError> {
        self.0.get(key).await
    }

    async fn put(
        &self,
        key: &str,
        value: Bytes,
        expected: Option<&u64>,
    ) -> Result<Swap<u64>, StoreError> {
        self.0.put(key, value, expected).await
    }

    async fn delete(&self, key: &str, expected: &u64) -> Result<bool, StoreError> {
        self.0.delete(key, expected).await
    }
}

#[tokio::test(start_paused = true)]
async fn backend_without_a_list_names_the_remedy() {
    let store = CasStore::new(Unlisted(Engine::new(Network::Perfect)));
    let claimed = store.claim(&name("key"), &claim()).await.unwrap();
    assert!(matches!(claimed, Claimed::Acquired(_)));
    let error = store.purge_expired(10, LEASE).await.unwrap_err();
    assert!(error.sent_nothing());
    assert!(
        error.to_string().contains("`CompareAndSwap::list`"),
        "{error}"
    );
}

const LEASE: Duration = Duration::from_secs(30);
/// How far the clocks of two hosts differ.
const SKEW: Duration = Duration::from_millis(10);
/// The states of an encoded record that is in progress or completed.
const ANSWERS_LOST: [u8; 2] = [1, 2];
/// A moment in 2026.
const SINCE_1970: Duration = Duration::from_secs(1_796_000_000);

mod transition_function {
    use super::{any_store::reference::Compared, *};

    #[tokio::test(start_paused = true)]
    async fn every_transition_does_as_the_transition_function() {
        Compared::new(&CasStore::new(Engine::<false>::new(Network::Perfect)))
            .every_transition()
            .await;
    }

    #[tokio::test(start_paused = true)]
    async fn random_calls_answer_as_the_transition_function() {
        Compared::new(&CasStore::new(Engine::<false>::new(Network::Perfect)))
            .random_walk(5, 300)
            .await;
    }
}
