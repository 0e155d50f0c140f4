//! The memory store keeps every promise: alone and shared, with a paused clock and
//! with racing threads.

#[allow(dead_code, reason = "only the comparison is used")]
#[path = "any_store/mod.rs"]
mod any_store;

use std::time::Duration;

use tower_idempotency::{DynStore, MemoryStore, conformance::Subject, conformance_tests};

mod paused {
    use super::*;

    struct Memory;

    impl Subject for Memory {
        type Store = MemoryStore;
        const ADDS_USAGE: bool = true;
        const TICK: Option<Duration> = Some(Duration::from_nanos(1));

        async fn store(&self) -> MemoryStore {
            MemoryStore::new()
        }

        async fn pass(&self, time: Duration) {
            tokio::time::advance(time).await;
        }
    }

    conformance_tests! {
        #[tokio::test(start_paused = true)]
        Memory
    }
}

mod shared {
    use super::*;

    struct Shared;

    impl Subject for Shared {
        type Store = DynStore;
        const ADDS_USAGE: bool = true;
        const TICK: Option<Duration> = Some(Duration::from_nanos(1));

        async fn store(&self) -> DynStore {
            DynStore::new(MemoryStore::new())
        }

        async fn pass(&self, time: Duration) {
            tokio::time::advance(time).await;
        }
    }

    conformance_tests! {
        #[tokio::test(start_paused = true)]
        Shared
    }
}

mod racing {
    use super::*;

    struct Memory;

    impl Subject for Memory {
        type Store = MemoryStore;
        const ADDS_USAGE: bool = true;

        async fn store(&self) -> MemoryStore {
            MemoryStore::new()
        }
    }

    conformance_tests! {
        #[tokio::test(flavor = "multi_thread", worker_threads = 4)]
        Memory
    }
}

/// A remote store: each call takes time before it is applied and again before its
/// answer arrives, and may be dropped in between.
mod late {
    use tower_idempotency::{
        Fence, Store, StoreError,
        store::{
            Claim, Claimed, Grant, Purged, ReclaimAs, Record, RecordName, Transition, Transitioned,
            admin::{Filter, Page},
        },
    };

    use super::*;

    #[derive(Clone)]
    struct Late(MemoryStore);

    async fn late<T>(call: impl Future<Output = Result<T, StoreError>>) -> Result<T, StoreError> {
        tokio::task::yield_now().await;
        let answer = call.await;
        tokio::task::yield_now().await;
        answer
    }

    impl Store for Late {
        async fn claim(&self, name: &RecordName, claim: &Claim) -> Result<Claimed, StoreError> {
            late(self.0.claim(name, claim)).await
        }

        async fn reclaim(
            &self,
            name: &RecordName,
            seen: Fence,
            reclaim_as: ReclaimAs,
            claim: &Claim,
        ) -> Result<Option<Grant>, StoreError> {
            late(self.0.reclaim(name, seen, reclaim_as, claim)).await
        }

        async fn transition(
            &self,
            name: &RecordName,
            transition: Transition,
        ) -> Result<Transitioned, StoreError> {
            late(self.0.transition(name, transition)).await
        }

        async fn read(&self, name: &RecordName) -> Result<Option<Record>, StoreError> {
            late(self.0.read(name)).await
        }

        async fn list(
            &self,
            filter: &Filter,
            after: Option<&RecordName>,
            limit: u32,
        ) -> Result<Page, StoreError> {
            late(self.0.list(filter, after, limit)).await
        }

        async fn purge_expired(
            &self,
            limit: u32,
            unknown_retention: Duration,
        ) -> Result<Purged, StoreError> {
            late(self.0.purge_expired(limit, unknown_retention)).await
        }
    }

    struct FarAway;

    impl Subject for FarAway {
        type Store = Late;
        const TICK: Option<Duration> = Some(Duration::from_nanos(1));

        async fn store(&self) -> Late {
            Late(MemoryStore::new())
        }

        async fn pass(&self, time: Duration) {
            tokio::time::advance(time).await;
        }
    }

    conformance_tests! {
        #[tokio::test(start_paused = true)]
        FarAway
    }
}

/// A full store still answers each request.
mod full {
    use tower_idempotency::{
        Key, Scope, Store, StoreErrorKind,
        store::{Claim, Completion, Fingerprint, RecordName, Token, Transitioned},
    };

    use super::*;

    #[tokio::test(start_paused = true)]
    async fn a_full_store_repeats_its_answers_and_refuses_new_responses() {
        let store = MemoryStore::bounded(2, 8);
        let hour = Duration::from_secs(3600);
        let claim = || {
            Claim::new(
                Fingerprint::from_bytes([1; Fingerprint::LENGTH]),
                hour,
                hour,
            )
        };
        let [one, other] =
            ["one", "other"].map(|key| RecordName::new(Scope::single_tenant(), Key::new(key)));
        let (first, second) = (claim(), claim());
        store.claim(&one, &first).await.unwrap();
        store.claim(&other, &second).await.unwrap();
        let completion = Completion::new("8 bytes.".into(), hour, hour);
        for _ in 0..2 {
            let completed = store.complete(&one, first.token, &completion).await;
            assert_eq!(completed.unwrap(), Transitioned::Applied);
        }
        let stranger = store.complete(&other, Token::random(), &completion).await;
        assert_eq!(stranger.unwrap(), Transitioned::Superseded);
        let refused = store.complete(&other, second.token, &completion).await;
        assert_eq!(refused.unwrap_err().kind(), StoreErrorKind::Full);
    }
}

mod transition_function {
    use super::{any_store::reference::Compared, *};

    #[tokio::test(start_paused = true)]
    async fn every_transition_does_as_the_transition_function() {
        Compared::new(&MemoryStore::new()).every_transition().await;
    }

    #[tokio::test(start_paused = true)]
    async fn random_calls_answer_as_the_transition_function() {
        Compared::new(&MemoryStore::new()).random_walk(4, 300).await;
    }
}
