//! A store with a cache in front keeps every promise, and replays a record that is gone
//! for no longer than it says.

use std::time::Duration;

use bytes::Bytes;
use tower_idempotency::{
    Key, MemoryStore, Scope, Store,
    conformance::Subject,
    conformance_tests,
    store::{
        CachedStore, Claim, Claimed, Completion, Fingerprint, ReclaimAs, Record, RecordName,
        RecordState, Release, Transitioned,
    },
    test_support::{Fault, FaultyStore, Gate, StoreCall},
};

/// All calls go through one cache, which may replay for longer than a trial lasts.
struct Cached;

impl Subject for Cached {
    type Store = CachedStore<MemoryStore>;
    const TICK: Option<Duration> = Some(Duration::from_nanos(1));
    const ADDS_USAGE: bool = true;

    async fn store(&self) -> Self::Store {
        CachedStore::new(MemoryStore::new(), 64 << 20, HOUR)
    }

    async fn pass(&self, time: Duration) {
        tokio::time::advance(time).await;
    }
}

conformance_tests! {
    #[tokio::test(start_paused = true)]
    Cached
}

type Cache = CachedStore<FaultyStore<MemoryStore>>;

/// A cache in front of a store that counts its calls.
fn cache() -> Cache {
    cache_of(64 << 20)
}

fn cache_of(bytes: u64) -> Cache {
    CachedStore::new(FaultyStore::new(MemoryStore::new()), bytes, STALE)
}

/// The cache of another process, before the same store.
fn other(cache: &Cache) -> Cache {
    let store = cache.get_ref().get_ref().clone();
    CachedStore::new(FaultyStore::new(store), 64 << 20, STALE)
}

fn name(key: &str) -> RecordName {
    RecordName::new(Scope::single_tenant(), Key::new(key))
}

fn claim() -> Claim {
    claim_of(1)
}

fn claim_of(seed: u8) -> Claim {
    Claim::new(
        Fingerprint::from_bytes([seed; Fingerprint::LENGTH]),
        HOUR,
        HOUR,
    )
}

async fn completed(cache: &Cache, name: &RecordName, retention: Duration) {
    let claim = claim();
    cache.claim(name, &claim).await.unwrap();
    let completion = Completion::new("the response".into(), retention, Duration::ZERO);
    let applied = cache.complete(name, claim.token, &completion).await;
    assert_eq!(applied.unwrap(), Transitioned::Applied);
}

async fn replayed(cache: &Cache, name: &RecordName) -> Record {
    match cache.claim(name, &claim()).await.unwrap() {
        Claimed::Occupied(record) => {
            let response = match &record.state {
                RecordState::Completed { response } => response,
                state => panic!("{state:?}"),
            };
            assert_eq!(*response, Bytes::from_static(b"the response"));
            record
        }
        claimed => panic!("{claimed:?}"),
    }
}

/// How many claims have reached the store behind.
fn claims(cache: &Cache) -> usize {
    cache.get_ref().calls_of(StoreCall::Claim)
}

#[tokio::test(start_paused = true)]
async fn second_replay_does_not_reach_the_store() {
    let (cache, name) = (cache(), name("key"));
    completed(&cache, &name, HOUR).await;
    replayed(&cache, &name).await;
    assert_eq!(claims(&cache), 2);
    tokio::time::advance(STALE).await;
    let record = replayed(&cache, &name).await;
    assert_eq!(claims(&cache), 2);
    assert_eq!((record.age, record.expires_in), (STALE, Some(HOUR - STALE)));
}

#[tokio::test(start_paused = true)]
async fn record_forgotten_elsewhere_is_replayed_until_the_bound() {
    let (cache, name) = (cache(), name("key"));
    completed(&cache, &name, HOUR).await;
    let fence = replayed(&cache, &name).await.fence;
    let forgotten = other(&cache).forget(&name, fence).await.unwrap();
    assert_eq!(forgotten, Transitioned::Applied);

    tokio::time::advance(STALE).await;
    replayed(&cache, &name).await;
    tokio::time::advance(Duration::from_nanos(1)).await;
    is_free(&cache, &name).await;
}

#[tokio::test(start_paused = true)]
async fn record_forgotten_through_the_cache_is_not_replayed() {
    let (cache, name) = (cache(), name("key"));
    completed(&cache, &name, HOUR).await;
    let fence = replayed(&cache, &name).await.fence;
    let forgotten = cache.clone().forget(&name, fence).await.unwrap();
    assert_eq!(forgotten, Transitioned::Applied);
    is_free(&cache, &name).await;
}

#[tokio::test(start_paused = true)]
async fn dropped_forget_is_followed_by_no_replay() {
    let (cache, name) = (cache(), name("key"));
    completed(&cache, &name, HOUR).await;
    let fence = replayed(&cache, &name).await.fence;
    cache
        .get_ref()
        .inject(StoreCall::Forget, .., Fault::HangAfterwards);
    let forget = tokio::time::timeout(Duration::from_nanos(1), cache.forget(&name, fence));
    assert!(forget.await.is_err());
    is_free(&cache, &name).await;
}

#[tokio::test(start_paused = true)]
async fn answer_from_before_a_forget_is_not_kept() {
    let (cache, name) = (cache(), name("key"));
    completed(&cache, &name, HOUR).await;
    let fence = cache.read(&name).await.unwrap().unwrap().fence;
    let gate = Gate::closed();
    let answer = Fault::WaitAfterwards(gate.clone());
    cache.get_ref().inject(StoreCall::Claim, 2..=2, answer);
    let claiming = tokio::spawn({
        let (cache, name) = (cache.clone(), name.clone());
        async move { cache.claim(&name, &claim()).await }
    });
    gate.arrival().await;
    let forgotten = cache.forget(&name, fence).await.unwrap();
    assert_eq!(forgotten, Transitioned::Applied);
    gate.open();
    let claimed = claiming.await.unwrap().unwrap();
    assert!(matches!(claimed, Claimed::Occupied(_)));
    is_free(&cache, &name).await;
}

#[tokio::test(start_paused = true)]
async fn expired_record_is_not_replayed() {
    let (cache, name) = (cache(), name("key"));
    completed(&cache, &name, STALE / 2).await;
    let fence = replayed(&cache, &name).await.fence;
    tokio::time::advance(STALE / 2).await;
    replayed(&cache, &name).await;
    tokio::time::advance(Duration::from_nanos(1)).await;
    let Claimed::Occupied(record) = cache.claim(&name, &claim()).await.unwrap() else {
        panic!("an expired record stays until it is swept");
    };
    assert_eq!(record.expires_in, None);
    let claim = claim();
    let again = cache
        .reclaim(&name, fence, ReclaimAs::Expired, &claim)
        .await;
    assert!(again.unwrap().is_some());
    let Claimed::Occupied(record) = cache.claim(&name, &claim_of(2)).await.unwrap() else {
        panic!("it is in progress");
    };
    assert!(matches!(record.state, RecordState::InProgress { .. }));
}

#[tokio::test(start_paused = true)]
async fn only_completed_records_of_the_same_request_come_from_the_cache() {
    let cache = cache();
    let [open, unknown, done] = ["open", "unknown", "done"].map(name);
    cache.claim(&open, &claim()).await.unwrap();
    let lost = claim();
    cache.claim(&unknown, &lost).await.unwrap();
    let marked = cache.mark_unknown(&unknown, lost.token, HOUR).await;
    assert_eq!(marked.unwrap(), Transitioned::Applied);
    completed(&cache, &done, HOUR).await;
    replayed(&cache, &done).await;
    let kept = cache.kept_bytes();

    for (name, claim) in [
        (&open, claim()),
        (&unknown, claim()),
        (&done, claim_of(2)),
        (&open, claim()),
        (&unknown, claim()),
        (&done, claim_of(2)),
    ] {
        let before = claims(&cache);
        let claimed = cache.claim(name, &claim).await.unwrap();
        assert!(matches!(claimed, Claimed::Occupied(_)));
        assert_eq!(claims(&cache), before + 1);
    }
    assert_eq!(cache.kept_bytes(), kept);
}

#[tokio::test(start_paused = true)]
async fn kept_records_stay_below_the_bound_of_bytes() {
    let cache = cache_of(64 << 10);
    for key in 0..1_000 {
        let name = name(&key.to_string());
        completed(&cache, &name, HOUR).await;
        replayed(&cache, &name).await;
        assert!(cache.kept_bytes() <= 64 << 10);
    }
    assert!(cache.kept_bytes() > 32 << 10, "and use it");
}

async fn is_free(cache: &Cache, name: &RecordName) {
    match cache.claim(name, &claim()).await.unwrap() {
        Claimed::Occupied(record) => assert!(matches!(
            record.state,
            RecordState::Released(Release::AnyRequest)
        )),
        claimed => panic!("{claimed:?}"),
    }
}

const HOUR: Duration = Duration::from_secs(3600);
/// How long a record may be replayed without asking.
const STALE: Duration = Duration::from_secs(2);
