//! How soon a waiter of another process is answered.

use std::{
    env,
    time::{Duration, Instant},
};

use tokio::time::sleep;
use tower_idempotency::{
    RedisStore, Store,
    store::{RecordState, Transitioned},
};

use crate::{
    Plan, calls, postgres,
    report::Report,
    target::{Bound, Target},
};

pub(crate) async fn measure(plan: Plan, report: &mut Report) {
    let url = postgres::database("waiters").await;
    let (owner, other) = (postgres::store(&url).await, postgres::store(&url).await);
    report.add(target("PostgreSQL", plan, &owner, &other).await);
    let url = env::var("REDIS_URL").expect("REDIS_URL: a server to measure on");
    let connect = || RedisStore::connect(&url);
    let (owner, other) = (connect().await.unwrap(), connect().await.unwrap());
    report.add(target("Redis", plan, &owner, &other).await);
}

async fn target<S: Store>(engine: &str, plan: Plan, owner: &S, other: &S) -> Target {
    let mut slowest = Vec::new();
    for _ in 0..plan.pairs {
        let mut times = Vec::new();
        for _ in 0..100 {
            times.push(delay(owner, other).await);
        }
        times.sort_unstable();
        slowest.push(times[98].as_secs_f64() * 1e3);
    }
    Target::new(
        format!(
            "{engine}, a waiter of another process reads the response after its completion: p99"
        ),
        Bound::AtMost(20.0),
        "ms",
        slowest,
    )
}

/// The time from a completion until another process has read the response.
async fn delay<S: Store>(owner: &S, other: &S) -> Duration {
    let (name, claim) = (calls::name(calls::key()), calls::claim());
    owner.claim(&name, &claim).await.unwrap();
    let record = other.read(&name).await.unwrap().unwrap();
    let waiter = async {
        other.wait(&name, record.fence).await.unwrap();
        let record = other.read(&name).await.unwrap().unwrap();
        assert!(matches!(record.state, RecordState::Completed { .. }));
        Instant::now()
    };
    let completion = async {
        // Until the waiter waits.
        sleep(Duration::from_millis(20)).await;
        let completion = calls::completion();
        let completed = owner.complete(&name, claim.token, &completion).await;
        assert_eq!(completed.unwrap(), Transitioned::Applied);
        Instant::now()
    };
    let (answered, completed) = tokio::join!(waiter, completion);
    answered.saturating_duration_since(completed)
}
