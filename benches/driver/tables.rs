//! The effect of a table's size and of sweeps on claims.

use std::{
    sync::{
        Arc, Mutex,
        atomic::{AtomicU64, Ordering},
    },
    time::{Duration, Instant},
};

use tokio::task::JoinHandle;
use tower_idempotency::{
    PostgresStore, Store as _,
    sqlx::{AssertSqlSafe, Connection as _, PgConnection, raw_sql},
    store::admin::Filter,
};

use crate::{
    Plan, calls,
    load::{self, Pairs},
    postgres::{database, store},
    report::Report,
    target::{Bound, Target},
};

pub(crate) async fn measure(plan: Plan, report: &mut Report) {
    sweeps(plan, report).await;
    if plan.is_quick {
        let url = database("driver_listed").await;
        let store = store(&url).await;
        fill(&url, LISTED, DAY).await;
        lists(plan, report, &url, &store, LISTED).await;
        store.close().await;
    } else {
        sizes(plan, report).await;
    }
}

/// An operator's list of unknown records, in a large table and beside requests.
async fn lists(plan: Plan, report: &mut Report, url: &str, store: &PostgresStore, records: u64) {
    let mut connection = PgConnection::connect(url).await.unwrap();
    raw_sql(UNKNOWN).execute(&mut connection).await.unwrap();
    connection.close().await.unwrap();
    let (mut slowest, mut ratios) = (Vec::new(), Vec::new());
    for _ in 0..plan.pairs {
        let quiet = load::run(16, plan.length, claims(store.clone())).await;
        let (walks, operator) = walk(store.clone());
        let beside = load::run(16, plan.length, claims(store.clone())).await;
        operator.abort();
        ratios.push(beside.p99 / quiet.p99);
        slowest.extend(walks.lock().unwrap().drain(..).max());
    }
    report.add(Target::new(
        format!("1000 unknown among {records} records, listed in pages of 100 beside claims"),
        Bound::AtMost(500.0),
        "ms",
        slowest
            .iter()
            .map(|walk| walk.as_secs_f64() * 1e3)
            .collect(),
    ));
    report.add(Target::new(
        "claims while an operator lists, against none: p99",
        Bound::AtMost(1.5),
        "×",
        ratios,
    ));
}

/// Lists all unknown records four times a second, and returns the time of each
/// list.
fn walk(store: PostgresStore) -> (Arc<Mutex<Vec<Duration>>>, JoinHandle<()>) {
    let walks = Arc::<Mutex<Vec<Duration>>>::default();
    let noted = Arc::clone(&walks);
    let operator = tokio::spawn(async move {
        let mut pace = tokio::time::interval(Duration::from_millis(250));
        loop {
            pace.tick().await;
            let begun = Instant::now();
            let (mut found, mut after) = (0, None);
            loop {
                let listed = store.list(&Filter::unknown(), after.as_ref(), 100).await;
                let page = listed.unwrap();
                found += page.records.len();
                after = page.next;
                if after.is_none() {
                    break;
                }
            }
            assert_eq!(found, 1_000);
            noted.lock().unwrap().push(begun.elapsed());
        }
    });
    (walks, operator)
}

async fn sizes(plan: Plan, report: &mut Report) {
    let (mut stores, mut url) = (Vec::new(), String::new());
    for records in SIZES {
        url = database(&format!("driver_{records}")).await;
        let store = store(&url).await;
        fill(&url, records, DAY).await;
        stores.push(store);
    }
    let small = stores[0].clone();
    for (store, records) in stores.iter().zip(SIZES) {
        let (small, large) = (small.clone(), store.clone());
        let pairs = Pairs::measure(plan, 16, claims(small), claims(large)).await;
        let (_, p50) = pairs.medians(|load| load.p50);
        report.sizes.push((records, p50));
        if records == SIZES[SIZES.len() - 1] {
            report.add(Target::new(
                "claims at 10 million records against 10 thousand, 16 in flight: p50",
                Bound::AtMost(1.15),
                "×",
                pairs.ratios(|load| load.p50),
            ));
        }
    }
    let largest = SIZES.len() - 1;
    lists(plan, report, &url, &stores[largest], SIZES[largest]).await;
    for store in stores {
        store.close().await;
    }
}

async fn sweeps(plan: Plan, report: &mut Report) {
    let url = database("driver_swept").await;
    let store = store(&url).await;
    let expired = if plan.is_quick { 200_000 } else { 1_000_000 };
    fill(&url, expired, -HOUR).await;
    let (mut ratios, mut slowest) = (Vec::new(), f64::INFINITY);
    for _ in 0..plan.pairs {
        let quiet = load::run(16, plan.length, claims(store.clone())).await;
        let removed = Arc::new(AtomicU64::new(0));
        let sweeper = sweep(store.clone(), Arc::clone(&removed));
        let begun = Instant::now();
        let swept = load::run(16, plan.length, claims(store.clone())).await;
        let removed = removed.load(Ordering::Relaxed) as f64;
        slowest = slowest.min(removed / begun.elapsed().as_secs_f64());
        sweeper.abort();
        ratios.push(swept.p99 / quiet.p99);
    }
    report.add(Target::new(
        format!("claims while {expired} expired records are swept, against none: p99"),
        Bound::AtMost(1.5),
        "×",
        ratios,
    ));
    report.add(Target::new(
        "records swept meanwhile",
        Bound::AtLeast(5_000.0),
        "a second",
        vec![slowest],
    ));
    store.close().await;
}

/// As many as the target demands, and a few more.
fn sweep(store: PostgresStore, removed: Arc<AtomicU64>) -> JoinHandle<()> {
    tokio::spawn(async move {
        let mut pace = tokio::time::interval(Duration::from_millis(160));
        loop {
            pace.tick().await;
            let purged = store.purge_expired(850, Duration::from_secs(86_400)).await;
            removed.fetch_add(purged.unwrap().removed, Ordering::Relaxed);
        }
    })
}

fn claims(
    store: PostgresStore,
) -> impl Fn() -> std::pin::Pin<Box<dyn Future<Output = ()> + Send>> + Clone + Send + 'static {
    move || {
        let store = store.clone();
        Box::pin(async move { calls::claim_only(&store).await })
    }
}

/// Completed records with times spread over a long period.
async fn fill(url: &str, records: u64, expires_in: i64) {
    let mut connection = PgConnection::connect(url).await.unwrap();
    for statement in [
        "ALTER TABLE idempotency_records SET (fillfactor = 90)".to_owned(),
        format!(
            "INSERT INTO idempotency_records
                 (scope, key, state, attempt, takeovers, fence, claimed_at, lease_until,
                  expires_at, operation, token, fingerprint, response)
             SELECT 'scope', md5(number::text), 2, 1, 0, number, now, now,
                    now + {expires_in} + number::bigint * 1000,
                    decode(md5(number::text), 'hex'), decode(md5(number::text), 'hex'),
                    decode(repeat('00', 84), 'hex'), decode(repeat('07', 64), 'hex')
             FROM generate_series(1, {records}) AS number,
                  (SELECT (EXTRACT(EPOCH FROM now()) * 1000000)::bigint AS now) AS clock"
        ),
        "ALTER TABLE idempotency_records SET (fillfactor = 20)".to_owned(),
        "VACUUM ANALYZE idempotency_records".to_owned(),
        "CHECKPOINT".to_owned(),
    ] {
        raw_sql(AssertSqlSafe(statement))
            .execute(&mut connection)
            .await
            .unwrap();
    }
    connection.close().await.unwrap();
}

/// A thousand records, over all of the table.
const UNKNOWN: &str = "
UPDATE idempotency_records
SET state = 3, response = NULL, unknown_since = claimed_at
WHERE scope = 'scope' AND fence % (
    (SELECT count(*) FROM idempotency_records WHERE scope = 'scope') / 1000) = 0";

const LISTED: u64 = 200_000;
const SIZES: [u64; 4] = [10_000, 100_000, 1_000_000, 10_000_000];

/// In microseconds.
const HOUR: i64 = 3_600_000_000;
const DAY: i64 = 24 * HOUR;
