//! The memory store keeps every promise: alone and shared, with a clock that
//! stands still and with threads that race.

use std::time::Duration;

use tower_idempotency::{MemoryStore, SharedStore, conformance::Subject, conformance_tests};

mod paused {
    use super::*;

    struct Memory;

    impl Subject for Memory {
        type Store = MemoryStore;
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
        type Store = SharedStore;
        const TICK: Option<Duration> = Some(Duration::from_nanos(1));

        async fn store(&self) -> SharedStore {
            SharedStore::new(MemoryStore::new())
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

        async fn store(&self) -> MemoryStore {
            MemoryStore::new()
        }
    }

    conformance_tests! {
        #[tokio::test(flavor = "multi_thread", worker_threads = 4)]
        Memory
    }
}
