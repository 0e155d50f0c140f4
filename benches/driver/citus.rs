//! The PostgreSQL store on Citus beside the usual handwritten statements, each on a table that
//! is distributed by key.

use std::env;

use tower_idempotency::{
    PostgresStore,
    sqlx::{
        PgPool,
        postgres::{PgConnectOptions, PgPoolOptions},
        raw_sql,
    },
};

use crate::{
    Plan, calls,
    load::Pairs,
    postgres::{TABLE, plain},
    report::Report,
    target::{Bound, Target},
};

pub(crate) async fn measure(plan: Plan, report: &mut Report) {
    let url = env::var("CITUS_URL").expect("CITUS_URL: a coordinator to measure on");
    let options: PgConnectOptions = url.parse().unwrap();
    let options = options.options([("search_path", "driver")]);
    let pool = PgPoolOptions::new().max_connections(16);
    let pool = pool.connect_with(options.clone()).await.unwrap();
    run(&pool, "DROP SCHEMA IF EXISTS driver CASCADE").await;
    run(&pool, "CREATE SCHEMA driver").await;
    run(&pool, TABLE).await;
    let store = PostgresStore::builder(options).connect().await.unwrap();
    store.migrate().await.unwrap();
    run(
        &pool,
        "SELECT create_distributed_table('plain', 'key', colocate_with => 'none')",
    )
    .await;
    run(
        &pool,
        "SELECT create_distributed_table('idempotency_records', 'key', colocate_with => 'none')",
    )
    .await;
    for in_flight in [1, 64] {
        let (pool, store) = (pool.clone(), store.clone());
        let pairs = Pairs::measure(
            plan,
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
        let least = if in_flight == 1 { 0.9 } else { 1.5 };
        report.add(Target::new(
            format!("Citus claim + complete, {in_flight} in flight: operations/s"),
            Bound::AtLeast(least),
            "×",
            pairs.ratios(|load| load.per_second),
        ));
    }
    store.close().await;
    run(&pool, "DROP SCHEMA driver CASCADE").await;
    pool.close().await;
}

async fn run(pool: &PgPool, statement: &'static str) {
    raw_sql(statement).execute(pool).await.unwrap();
}
