//! The PostgreSQL store beside the usual handwritten statements.

use std::{
    env,
    sync::{
        Arc,
        atomic::{AtomicUsize, Ordering},
    },
};

use tower_idempotency::{
    PostgresStore,
    sqlx::{AssertSqlSafe, PgPool, postgres::PgPoolOptions, query, query_as, raw_sql},
};

use crate::{
    Plan, calls,
    load::{Load, Pairs},
    report::{Curve, Report},
    target::{Bound, Target},
};

/// Creates a database, and returns its address.
pub(crate) async fn database(name: &str) -> String {
    let url = env::var("DATABASE_URL").expect("DATABASE_URL: a server to measure on");
    let server = PgPool::connect(&url).await.unwrap();
    for statement in [
        format!("DROP DATABASE IF EXISTS {name} WITH (FORCE)"),
        format!("CREATE DATABASE {name}"),
    ] {
        raw_sql(AssertSqlSafe(statement))
            .execute(&server)
            .await
            .unwrap();
    }
    server.close().await;
    let (server, _) = url.rsplit_once('/').expect("DATABASE_URL: with a database");
    format!("{server}/{name}")
}

pub(crate) async fn store(url: &str) -> PostgresStore {
    let store = PostgresStore::connect(url).await.unwrap();
    store.migrate().await.unwrap();
    store
}

pub(crate) async fn plain_pool(url: &str) -> PgPool {
    let pool = PgPoolOptions::new().max_connections(16);
    let pool = pool.connect(url).await.unwrap();
    raw_sql(TABLE).execute(&pool).await.unwrap();
    pool
}

pub(crate) async fn measure(plan: Plan, report: &mut Report) {
    let url = database("driver").await;
    let (pool, store) = (plain_pool(&url).await, store(&url).await);
    let mut curves = [
        Curve::new("two statements, pool of 16"),
        Curve::new("this store"),
    ];
    for in_flight in [1, 2, 4, 8, 16, 64, 256] {
        let (pool, store) = (pool.clone(), store.clone());
        let pairs = if in_flight == 256 {
            plan.pairs.max(9)
        } else {
            plan.pairs
        };
        let pairs = Pairs::measure(
            Plan { pairs, ..plan },
            in_flight,
            move || {
                let pool = pool.clone();
                async move { plain(&pool).await }
            },
            move || {
                let store = store.clone();
                async move { calls::claim_and_complete(&store).await }
            },
        )
        .await;
        let (plain, store) = pairs.medians(|load| load.per_second);
        let (plain_p99, store_p99) = pairs.medians(|load| load.p99);
        curves[0].push(in_flight, plain, plain_p99);
        curves[1].push(in_flight, store, store_p99);
        let name = format!("PostgreSQL claim + complete, {in_flight} in flight");
        let mut add = |number: fn(&Load) -> f64, what: &str, bound| {
            let ratios = pairs.ratios(number);
            report.add(Target::new(format!("{name}: {what}"), bound, "×", ratios));
        };
        match in_flight {
            64 => add(|load| load.per_second, "operations/s", Bound::AtLeast(3.5)),
            256 => {
                add(|load| load.per_second, "operations/s", Bound::AtLeast(6.0));
                add(|load| load.p99, "p99", Bound::AtMost(0.35));
            }
            few => {
                add(|load| load.per_second, "operations/s", Bound::AtLeast(1.0));
                let p50 = if few == 1 { 1.1 } else { 1.0 };
                add(|load| load.p50, "p50", Bound::AtMost(p50));
            }
        }
    }
    report.throughput = curves.into();
    replays(plan, report, &pool, &store).await;
    store.close().await;
    pool.close().await;
}

async fn replays(plan: Plan, report: &mut Report, pool: &PgPool, store: &PostgresStore) {
    let names: Vec<_> = (0..10_000).map(|_| calls::name(calls::key())).collect();
    for name in &names {
        calls::complete(store, name).await;
    }
    let (names, turn) = (Arc::new(names), Arc::new(AtomicUsize::new(0)));
    let next = move || {
        let turn = turn.fetch_add(7_919, Ordering::Relaxed);
        names[turn % names.len()].clone()
    };
    let (pool, store, again) = (pool.clone(), store.clone(), next.clone());
    let pairs = Pairs::measure(
        plan,
        64,
        move || {
            let (pool, name) = (pool.clone(), next());
            async move {
                let found: (Vec<u8>, i16, Vec<u8>) = query_as(SELECT)
                    .bind(name.scope().as_str())
                    .bind(name.key().as_str())
                    .fetch_one(&pool)
                    .await
                    .unwrap();
                assert_eq!(found.1, 2);
            }
        },
        move || {
            let (store, name) = (store.clone(), again());
            async move { calls::find(&store, &name).await }
        },
    )
    .await;
    report.add(Target::new(
        "PostgreSQL replay, 64 in flight, against a prepared SELECT: operations/s",
        Bound::AtLeast(1.5),
        "×",
        pairs.ratios(|load| load.per_second),
    ));
}

/// The statements of a handler that keeps its own records.
pub(crate) async fn plain(pool: &PgPool) {
    plain_with(pool, &calls::key()).await;
}

pub(crate) async fn plain_with(pool: &PgPool, key: &str) {
    let inserted = query(INSERT)
        .bind(key)
        .bind(&[0_u8; 32][..])
        .execute(pool)
        .await
        .unwrap();
    assert_eq!(inserted.rows_affected(), 1);
    query(UPDATE)
        .bind(key)
        .bind(&calls::response()[..])
        .execute(pool)
        .await
        .unwrap();
}

pub(crate) const TABLE: &str = "
CREATE TABLE IF NOT EXISTS plain (
    key         text PRIMARY KEY,
    fingerprint bytea       NOT NULL,
    state       smallint    NOT NULL,
    response    bytea,
    expires_at  timestamptz NOT NULL);
CREATE INDEX IF NOT EXISTS plain_expires_at ON plain (expires_at)";

const INSERT: &str = "
INSERT INTO plain (key, fingerprint, state, expires_at)
VALUES ($1, $2, 1, now() + interval '1 day')
ON CONFLICT DO NOTHING";

const UPDATE: &str = "UPDATE plain SET state = 2, response = $2 WHERE key = $1 AND state = 1";

const SELECT: &str = "
SELECT fingerprint, state, response FROM idempotency_records WHERE scope = $1 AND key = $2";
