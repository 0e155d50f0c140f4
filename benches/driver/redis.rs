//! The Redis store beside two plain commands, through the same client.

use std::env;

use redis::{Client, aio::MultiplexedConnection};
use tower_idempotency::RedisStore;

use crate::{
    Plan, calls,
    load::{Load, Pairs},
    report::Report,
    target::{Bound, Target},
};

pub(crate) async fn measure(plan: Plan, report: &mut Report) {
    let url = env::var("REDIS_URL").expect("REDIS_URL: a server to measure on");
    let store = RedisStore::connect(&url).await.unwrap();
    let client = Client::open(url).unwrap();
    let connection = client.get_multiplexed_async_connection().await.unwrap();
    // Before the load: it looks for its record among all keys.
    bytes_of_a_record(report, &store, connection.clone()).await;
    for in_flight in [1, 64] {
        let (plain_connection, store) = (connection.clone(), store.clone());
        let pairs = Pairs::measure(
            plan,
            in_flight,
            move || plain(plain_connection.clone()),
            move || {
                let store = store.clone();
                async move { calls::claim_and_complete(&store).await }
            },
        )
        .await;
        let (what, bound, number): (_, _, fn(&Load) -> f64) = match in_flight {
            1 => ("p50", Bound::AtMost(1.15), |load| load.p50),
            _ => ("operations/s", Bound::AtLeast(0.5), |load| load.per_second),
        };
        report.add(Target::new(
            format!("Redis claim + complete, {in_flight} in flight, against SET NX + SET: {what}"),
            bound,
            "×",
            pairs.ratios(number),
        ));
    }
}

async fn plain(mut connection: MultiplexedConnection) {
    let key = format!("plain:{}", calls::key());
    let set = |value: &[u8], condition: &str| {
        let mut command = redis::cmd("SET");
        command
            .arg(&key)
            .arg(value)
            .arg(condition)
            .arg("PX")
            .arg(86_400_000);
        command
    };
    let claim = set(&[0; 84], "NX");
    let complete = set(&calls::response(), "XX");
    for command in [claim, complete] {
        let () = command.query_async(&mut connection).await.unwrap();
    }
}

async fn bytes_of_a_record(
    report: &mut Report,
    store: &RedisStore,
    mut connection: MultiplexedConnection,
) {
    let name = calls::name(calls::key());
    calls::complete(store, &name).await;
    let keys = redis::cmd("KEYS")
        .arg(format!("idempotency:*{}", name.key().as_str()))
        .to_owned();
    let keys: Vec<Vec<u8>> = keys.query_async(&mut connection).await.unwrap();
    let mut usage = redis::cmd("MEMORY");
    usage.arg("USAGE").arg(&keys[0]);
    let bytes: f64 = usage.query_async(&mut connection).await.unwrap();
    report.add(Target::new(
        "Redis, a completed record with a response of 512 bytes",
        Bound::AtMost(1.2),
        "KiB",
        vec![bytes / 1024.0],
    ));
}
