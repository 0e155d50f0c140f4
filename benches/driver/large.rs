//! The effect of replays of large responses on the requests of another scope.

use std::{sync::Arc, time::Duration};

use bytes::Bytes;
use tokio::task::JoinSet;
use tower_idempotency::{
    Key, PostgresStore, Scope, Store as _,
    store::{Completion, RecordName, Transitioned},
};

use crate::{
    Plan, calls, load,
    postgres::{database, store},
    report::Report,
    target::{Bound, Target},
};

pub(crate) async fn measure(plan: Plan, report: &mut Report) {
    let url = database("driver_large").await;
    let store = store(&url).await;
    let names = Arc::new(fill(&store).await);
    let other = {
        let store = store.clone();
        move || {
            let store = store.clone();
            async move { calls::claim_and_complete(&store).await }
        }
    };
    let mut ratios = Vec::new();
    for _ in 0..plan.pairs {
        let quiet = load::run(16, plan.length, other.clone()).await;
        let replays = replay(&store, &names);
        let beside = load::run(16, plan.length, other.clone()).await;
        drop(replays);
        ratios.push(beside.p99 / quiet.p99);
    }
    report.add(Target::new(
        "another scope's claim + complete beside 128 replays of 1 MiB, against none: p99",
        Bound::AtMost(1.5),
        "×",
        ratios,
    ));
    store.close().await;
}

/// Records with a response of a mebibyte each.
async fn fill(store: &PostgresStore) -> Vec<RecordName> {
    let mut names = Vec::new();
    // Bytes that compression hardly shortens.
    let response: Bytes = (0..1_u32 << 20)
        .map(|index| (index.wrapping_mul(2_654_435_761) >> 13) as u8)
        .collect();
    for _ in 0..REPLAYS {
        let name = RecordName::new(Scope::from_stored("large"), Key::new(calls::key()));
        let claim = calls::claim();
        store.claim(&name, &claim).await.unwrap();
        let completion = Completion::new(response.clone(), DAY, Duration::ZERO);
        let completed = store.complete(&name, claim.token, &completion).await;
        assert_eq!(completed.unwrap(), Transitioned::Applied);
        names.push(name);
    }
    names
}

/// Clients that ask for their responses repeatedly, until the set is dropped.
fn replay(store: &PostgresStore, names: &Arc<Vec<RecordName>>) -> JoinSet<()> {
    let mut clients = JoinSet::new();
    for client in 0..REPLAYS {
        let (store, names) = (store.clone(), Arc::clone(names));
        clients.spawn(async move {
            loop {
                calls::find(&store, &names[client]).await;
            }
        });
    }
    clients
}

const REPLAYS: usize = 128;
const DAY: Duration = Duration::from_secs(24 * 3600);
