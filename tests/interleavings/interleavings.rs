//! The memory store and the registry of waiters, under many orders of threads.
//!
//! Both are compiled into this test with the primitives of `shuttle` as
//! `store::sync`. A lost wake-up shows as a deadlock: the clock stands still, so
//! that no sleep ends.
//!
//! A step is one operation of a lock or an atomic, under sequential consistency.
//! Weaker orderings and the inside of `tokio::sync::Notify` are not explored.
//!
//! # Longer
//!
//! `ORDERS=1000000 cargo test --release -p interleavings`. A failure prints
//! its order, for `shuttle::replay`.

#[path = "../../src/store/waiters.rs"]
#[allow(unexpected_cfgs, reason = "the features are those of the crate")]
mod waiters;

#[path = "../../src/store/memory.rs"]
#[expect(unreachable_pub, reason = "it is public where it belongs")]
mod memory;

mod store {
    pub(crate) use tower_idempotency::store::*;

    pub(crate) use crate::{sync, waiters};
}

mod sync {
    pub(crate) use shuttle::sync::{
        Arc, Mutex, MutexGuard, PoisonError,
        atomic::{AtomicU64, AtomicUsize, Ordering},
    };
}

mod telemetry {
    pub(crate) mod log {
        /// Never read here.
        #[derive(Default)]
        pub(crate) struct Warnings {
            _limits: (),
        }
    }

    pub(crate) mod notice {
        use tower_idempotency::OperationId;

        use super::log::Warnings;

        pub(crate) enum Notice {
            UnknownExpired,
        }

        impl Notice {
            /// No log is kept here.
            pub(crate) fn tell(self, _: &Warnings, _: Option<OperationId>) {}
        }
    }
}

use std::{env, time::Duration};

use bytes::Bytes;
use futures_util::FutureExt as _;
use shuttle::{check_pct, check_random, future::block_on, thread};
use tower_idempotency::{
    Fence, Key, Scope, Store, StoreError,
    store::{Fingerprint, RecordName, Token},
};

use self::{
    memory::MemoryStore,
    store::{
        Claim, Claimed, Completion, Grant, Purged, ReclaimAs, Record, RecordState, Release,
        Transition, Transitioned, Usage, UsageDelta, UsageTable,
        admin::{self, Filter},
        transition,
    },
    sync::{Arc, AtomicUsize, Ordering},
    waiters::Waiters,
};

#[test]
fn i1_i2_two_claims_racing_a_forget_get_at_most_one_grant() {
    in_every_order(|| {
        let store = MemoryStore::with_shards(SHARDS, 2, 4);
        let first = acquired(&store, NOTHING);
        let claimants: Vec<_> = (0..2)
            .map(|_| {
                let store = store.clone();
                thread::spawn(move || {
                    let claim = claim(HOUR);
                    let Claimed::Occupied(record) = now(store.claim(&name(), &claim)) else {
                        panic!("a forgotten record stays");
                    };
                    let replace = ReclaimAs::Replace;
                    let granted = now(store.reclaim(&name(), record.fence, replace, &claim));
                    granted.map(|grant| (claim.token, grant.fence))
                })
            })
            .collect();
        let forgetful = {
            let store = store.clone();
            thread::spawn(move || now(store.forget(&name(), first.1)))
        };
        let granted: Vec<_> = claimants.into_iter().filter_map(joined).collect();
        assert_eq!(joined(forgetful), Transitioned::Applied);
        assert!(granted.len() <= 1, "two claims were granted");
        let record = now(store.read(&name())).expect("a record stays");
        match granted.first() {
            Some(granted) => assert_eq!((record.token, record.fence), *granted),
            None => assert_eq!(record.fence, first.1),
        }
        assert!(granted.iter().all(|(_, fence)| *fence > first.1));
    });
}

#[test]
fn i3_two_takeovers_racing_the_owner_get_at_most_one_grant() {
    in_every_order(|| {
        let store = MemoryStore::with_shards(SHARDS, 2, 4);
        let (token, fence) = acquired(&store, NOTHING);
        pass();
        let owner = {
            let store = store.clone();
            thread::spawn(move || now(store.complete(&name(), token, &completion(1))))
        };
        let takers: Vec<_> = (0..2)
            .map(|_| {
                let store = store.clone();
                thread::spawn(move || {
                    let takeover = ReclaimAs::Takeover;
                    now(store.reclaim(&name(), fence, takeover, &claim(HOUR)))
                })
            })
            .collect();
        let granted = takers.into_iter().filter_map(joined).count();
        let completed = joined(owner) == Transitioned::Applied;
        assert_eq!(granted + usize::from(completed), 1);
    });
}

#[test]
fn i4_a_completion_racing_a_release_and_a_mark_stays_whole() {
    in_every_order(|| {
        let store = MemoryStore::with_shards(SHARDS, 2, 4);
        let (token, fence) = acquired(&store, NOTHING);
        pass();
        let completing = {
            let store = store.clone();
            thread::spawn(move || now(store.complete(&name(), token, &completion(3))))
        };
        let marking = {
            let store = store.clone();
            thread::spawn(move || now(store.mark_lapsed(&name(), fence, HOUR)))
        };
        let releasing = {
            let store = store.clone();
            thread::spawn(move || now(store.release(&name(), token, Release::SameRequest)))
        };
        let completed = joined(completing);
        let released = joined(releasing);
        let _ = joined(marking);
        let record = now(store.read(&name())).expect("a record stays");
        // A call that was applied shows in the record.
        match record.state {
            RecordState::Completed { response } => {
                assert_eq!(
                    (completed, released),
                    (Transitioned::Applied, Transitioned::Superseded)
                );
                assert_eq!(response.len(), 3);
            }
            RecordState::Released(_) => {
                assert_eq!(
                    (completed, released),
                    (Transitioned::Superseded, Transitioned::Applied)
                );
            }
            state => panic!("{state:?}"),
        }
    });
}

#[test]
fn i13_racing_removals_and_completions_return_each_limit_once() {
    in_every_order(|| {
        // Limits of two records, and of the bytes of one response.
        let store = MemoryStore::with_shards(SHARDS, 2, 4);
        assert!(store.is_empty());
        let (token, fence) = acquired_for(&store, NOTHING, NOTHING);
        pass();
        let threads = [
            {
                let store = store.clone();
                thread::spawn(move || {
                    let completion = Completion::new(body(4), NOTHING, NOTHING);
                    let _ = now(store.complete(&name(), token, &completion));
                })
            },
            {
                let store = store.clone();
                thread::spawn(move || {
                    let _ = now(store.purge_expired(10, NOTHING));
                })
            },
            {
                let store = store.clone();
                thread::spawn(move || {
                    let _ = now(store.forget(&name(), fence));
                })
            },
            {
                let store = store.clone();
                thread::spawn(move || {
                    let listed = now(store.list(&Filter::in_progress_for(NOTHING), None, 10));
                    assert!(listed.records.len() <= 1);
                })
            },
        ];
        threads.into_iter().for_each(joined);
        // Both limits are free again, and not exceeded.
        let claim_again = claim(HOUR);
        let token = claim_again.token;
        assert!(store.len() <= 1, "swept or forgotten, and counted once");
        match now(store.claim(&name(), &claim_again)) {
            Claimed::Acquired(_) => {}
            Claimed::Occupied(forgotten) => {
                let (seen, replace) = (forgotten.fence, ReclaimAs::Replace);
                let granted = now(store.reclaim(&name(), seen, replace, &claim_again));
                assert!(granted.is_some(), "forgotten");
            }
            Claimed::Vanished => panic!("nobody removes it now"),
        }
        let (kept, refused) = (completion(4), completion(1));
        let settled = now(store.complete(&name(), token, &kept));
        assert_eq!(settled, Transitioned::Applied);
        let other = RecordName::new(Scope::single_tenant(), Key::new("another key"));
        let another = claim(HOUR);
        assert!(matches!(
            now(store.claim(&other, &another)),
            Claimed::Acquired(_)
        ));
        let too_much = store.complete(&other, another.token, &refused);
        assert!(
            too_much
                .now_or_never()
                .expect("memory does not wait")
                .is_err()
        );
    });
}

#[test]
fn f6_a_completion_wakes_every_waiter() {
    in_every_order(|| {
        let waiters = Arc::new(Waiters::new(2));
        let completed = Arc::new(AtomicUsize::new(0));
        let waiting: Vec<_> = (0..2)
            .map(|_| {
                let (waiters, completed) = (waiters.clone(), completed.clone());
                thread::spawn(move || {
                    let permit = waiters.enter(&name()).expect("a permit is free");
                    loop {
                        let heard = permit.listen();
                        if completed.load(Ordering::SeqCst) == 1 {
                            return;
                        }
                        block_on(heard);
                    }
                })
            })
            .collect();
        completed.store(1, Ordering::SeqCst);
        waiters.wake(&name());
        waiting.into_iter().for_each(joined);
    });
}

#[test]
fn f6_a_waiter_that_leaves_takes_no_other_wake_up() {
    in_every_order(|| {
        let waiters = Arc::new(Waiters::new(3));
        let completed = Arc::new(AtomicUsize::new(0));
        let leaving = {
            let waiters = waiters.clone();
            thread::spawn(move || drop(waiters.enter(&name()).expect("a permit is free")))
        };
        let waiting = {
            let (waiters, completed) = (waiters.clone(), completed.clone());
            thread::spawn(move || {
                let permit = waiters.enter(&name()).expect("a permit is free");
                loop {
                    let heard = permit.listen();
                    if completed.load(Ordering::SeqCst) == 1 {
                        return;
                    }
                    block_on(heard);
                }
            })
        };
        completed.store(1, Ordering::SeqCst);
        waiters.wake(&name());
        joined(leaving);
        joined(waiting);
    });
}

#[test]
fn i13_waiters_stay_within_their_limit_and_return_every_permit() {
    in_every_order(|| {
        let waiters = Arc::new(Waiters::new(2));
        let inside = Arc::new(AtomicUsize::new(0));
        let threads: Vec<_> = (0..3)
            .map(|_| {
                let (waiters, inside) = (waiters.clone(), inside.clone());
                thread::spawn(move || {
                    let Some(_permit) = waiters.enter(&name()) else {
                        return;
                    };
                    assert!(inside.fetch_add(1, Ordering::SeqCst) < 2);
                    inside.fetch_sub(1, Ordering::SeqCst);
                })
            })
            .collect();
        threads.into_iter().for_each(joined);
        let permits = [waiters.enter(&name()), waiters.enter(&name())];
        assert!(permits.iter().all(Option::is_some));
        assert!(waiters.enter(&name()).is_none());
    });
}

/// Runs a scenario under random orders, and under orders with few switches at the
/// worst moments.
fn in_every_order(scenario: impl Fn() + Send + Sync + 'static) {
    let orders = match env::var("ORDERS") {
        Ok(text) => text.parse().expect("a number"),
        Err(_) => ORDERS,
    };
    let runtime = tokio::runtime::Builder::new_current_thread()
        .enable_time()
        .start_paused(true)
        .build()
        .expect("a runtime");
    let _clock = runtime.enter();
    let scenario = std::sync::Arc::new(scenario);
    let again = scenario.clone();
    check_random(move || scenario(), orders);
    check_pct(move || again(), orders, 3);
}

/// The answer of a call to memory, which never waits.
fn now<T>(call: impl Future<Output = Result<T, StoreError>>) -> T {
    let answer = call.now_or_never().expect("memory does not wait");
    answer.expect("memory answers")
}

fn joined<T>(thread: thread::JoinHandle<T>) -> T {
    thread.join().expect("a thread does not panic")
}

fn acquired(store: &MemoryStore, lease: Duration) -> (Token, Fence) {
    acquired_for(store, lease, HOUR)
}

fn acquired_for(store: &MemoryStore, lease: Duration, retention: Duration) -> (Token, Fence) {
    let claim = Claim::new(fingerprint(), lease, retention);
    match now(store.claim(&name(), &claim)) {
        Claimed::Acquired(grant) => (claim.token, grant.fence),
        other => panic!("{other:?}"),
    }
}

fn claim(lease: Duration) -> Claim {
    Claim::new(fingerprint(), lease, HOUR)
}

fn completion(length: usize) -> Completion {
    Completion::new(body(length), HOUR, NOTHING)
}

fn body(length: usize) -> Bytes {
    vec![b'x'; length].into()
}

fn fingerprint() -> Fingerprint {
    Fingerprint::from_bytes([1; Fingerprint::LENGTH])
}

fn name() -> RecordName {
    RecordName::new(Scope::single_tenant(), Key::new("a key"))
}

/// Lets durations of zero pass.
fn pass() {
    tokio::time::advance(Duration::from_millis(1))
        .now_or_never()
        .unwrap_or_default();
}

const NOTHING: Duration = Duration::ZERO;
const HOUR: Duration = Duration::from_secs(3600);
/// Each lock and each bound of a shard is a step of every order.
const SHARDS: usize = 2;
const ORDERS: usize = 2_000;
