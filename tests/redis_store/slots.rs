//! Slots that move to another primary under load.

use std::{
    collections::BTreeSet,
    sync::{
        Arc,
        atomic::{AtomicBool, AtomicU64, Ordering},
    },
    time::Duration,
};

use tower_idempotency::{
    RedisStore, Store,
    store::{RecordName, admin::Filter},
};

use crate::{
    any_store::{acquired, applied, done, hour, name},
    group,
    redis_nodes::{Cluster, shard_of},
    slot,
};

#[tokio::test(flavor = "multi_thread")]
async fn a_slot_that_moves_fails_no_call_and_loses_no_entry() {
    let cluster = Cluster::start().await;
    // The machine may be busy. What counts is that no call fails.
    let patient = RedisStore::builder(cluster.url()).response_timeout(Duration::from_secs(10));
    let store = patient.connect().await.unwrap();
    let of = |number: u64| group("caller", &number.to_string());
    let moving_group = of(0);
    let numbers_in_it = (0..).filter(move |number| of(*number) == moving_group);
    let mut names = numbers_in_it.map(|number| name("caller", &number.to_string()));
    let moving = slot(&cluster.nodes[0], &name("caller", "0")).await;
    let numbers = Arc::new(AtomicU64::new(0));
    let is_over = Arc::new(AtomicBool::new(false));
    // Each of the callers leaves every third claim open.
    let callers: Vec<_> = (0..16)
        .map(|_| {
            let names: Vec<_> = names.by_ref().take(80).collect();
            let (store, is_over) = (store.clone(), Arc::clone(&is_over));
            let numbers = Arc::clone(&numbers);
            tokio::spawn(async move {
                let mut open = Vec::<RecordName>::new();
                for name in names {
                    if is_over.load(Ordering::Relaxed) {
                        break;
                    }
                    let claim = hour();
                    acquired(store.claim(&name, &claim).await);
                    match numbers.fetch_add(1, Ordering::Relaxed) % 3 {
                        0 => open.push(name),
                        _ => applied(store.complete(&name, claim.token, &done()).await),
                    }
                    tokio::time::sleep(Duration::from_millis(10)).await;
                }
                open
            })
        })
        .collect();
    let shard = shard_of(moving);
    let (here, there) = (&cluster.nodes[shard], &cluster.nodes[(shard + 1) % 3]);
    for _ in 0..3 {
        cluster.migrate(moving, here, there).await;
        cluster.migrate(moving, there, here).await;
    }
    is_over.store(true, Ordering::Relaxed);
    let mut open = BTreeSet::new();
    for caller in callers {
        open.extend(caller.await.unwrap());
    }
    assert!(open.len() > 100, "{} claims while a slot moved", open.len());
    let mut listed = BTreeSet::new();
    let (filter, mut after) = (Filter::in_progress_for(Duration::ZERO), None);
    loop {
        let page = store.list(&filter, after.as_ref(), 1_000).await.unwrap();
        listed.extend(page.records.into_iter().map(|(name, _)| name));
        after = page.next;
        if after.is_none() {
            break;
        }
    }
    assert_eq!(listed, open);
}
