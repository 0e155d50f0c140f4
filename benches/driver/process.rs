//! The cost of the layer in the process: bare and layered service in turns, on one
//! thread.

use std::{
    convert::Infallible,
    fmt::Debug,
    time::{Duration, Instant},
};

use bytes::Bytes;
use http::{Request, Response};
use tokio::runtime::{Builder, Runtime};
use tower::{Layer as _, Service, service_fn};
use tower_idempotency::{IdempotencyLayer, MemoryStore, Quota, Scope, Store, store::CachedStore};

use crate::{
    Plan, postgres,
    report::Report,
    services::{Body, answered, get, handle, layer, layer_on, post, sealed_layer},
    target::{Bound, Target},
};

pub(crate) fn measure(plan: Plan, report: &mut Report) {
    let runtime = Builder::new_current_thread().enable_all().build().unwrap();
    let pairs = plan.pairs + 2;
    report.add(Target::new(
        "ignored request, more than the bare service",
        Bound::AtMost(60.0),
        "ns",
        (0..pairs).map(|_| ignored(&runtime)).collect(),
    ));
    report.add(Target::new(
        "first run on the memory store, 1 KiB each way, more than the bare service",
        Bound::AtMost(5.0),
        "µs",
        (0..pairs).map(|_| first_run(&runtime)).collect(),
    ));
    report.add(Target::new(
        "the same, sealed and with a keyed fingerprint, more than without",
        Bound::AtMost(2.0),
        "µs",
        (0..pairs).map(|_| sealed_first_run(&runtime)).collect(),
    ));
    report.add(Target::new(
        "first run with a quota, more than one without",
        Bound::AtMost(0.5),
        "µs",
        (0..pairs).map(|_| first_run_with_quota(&runtime)).collect(),
    ));
    report.add(Target::new(
        "replay from the memory store",
        Bound::AtMost(2.5),
        "µs",
        (0..pairs).map(|_| replay(&runtime, &layer().1)).collect(),
    ));
}

pub(crate) fn measure_cached(plan: Plan, report: &mut Report) {
    let runtime = Builder::new_current_thread().enable_all().build().unwrap();
    let url = runtime.block_on(postgres::database("driver_cached"));
    let store = runtime.block_on(postgres::store(&url));
    let cached = CachedStore::new(store, 1 << 20, Duration::from_secs(2));
    report.add(Target::new(
        "replay from a `CachedStore` in front of PostgreSQL",
        Bound::AtMost(3.0),
        "µs",
        (0..plan.pairs + 2)
            .map(|_| replay(&runtime, &layer_on(cached.clone())))
            .collect(),
    ));
    runtime.block_on(cached.get_ref().close());
}

/// Measured in nanoseconds.
fn ignored(runtime: &Runtime) -> f64 {
    let mut bare = service_fn(handle::<Body>);
    let mut layered = layer().1.layer(service_fn(handle));
    let bare = time_of_one(|requests| {
        runtime.block_on(async {
            for _ in 0..requests {
                answered(&mut bare, get()).await;
            }
        });
    });
    let layered = time_of_one(|requests| {
        runtime.block_on(async {
            for _ in 0..requests {
                answered(&mut layered, get()).await;
            }
        });
    });
    (layered - bare) * 1e9
}

/// Measured in microseconds.
fn first_run(runtime: &Runtime) -> f64 {
    let bare = || service_fn(handle::<Body>);
    more_for_fresh_keys(runtime, bare, || layer().1.layer(service_fn(handle)))
}

/// Measured in microseconds.
fn sealed_first_run(runtime: &Runtime) -> f64 {
    let plain = || layer().1.layer(service_fn(handle));
    more_for_fresh_keys(runtime, plain, || sealed_layer().layer(service_fn(handle)))
}

/// Measured in microseconds.
fn first_run_with_quota(runtime: &Runtime) -> f64 {
    let plain = || layer().1.layer(service_fn(handle));
    more_for_fresh_keys(runtime, plain, || {
        let builder = IdempotencyLayer::required(MemoryStore::new(), |_| Scope::new("caller"));
        let quota = Quota::unlimited().max_records(u64::from(REQUESTS));
        let layer = builder.quota(quota).build().unwrap();
        layer.layer(service_fn(handle))
    })
}

/// Returns how much longer a request with a fresh key takes `with` than `without`, in
/// microseconds. Each chunk has a store of its own, whose records reuse the memory of the
/// last one's, instead of memory that the system first has to clear.
fn more_for_fresh_keys<A, B, R, Q>(
    runtime: &Runtime,
    without: impl Fn() -> A,
    with: impl Fn() -> B,
) -> f64
where
    A: Service<Request<Body>, Response = Response<R>, Error = Infallible>,
    B: Service<Request<Body>, Response = Response<Q>, Error = Infallible>,
    R: http_body::Body<Data = Bytes, Error: Debug>,
    Q: http_body::Body<Data = Bytes, Error: Debug>,
{
    let keys: Vec<_> = (0..REQUESTS / 10)
        .map(|number| format!("key-{number:08x}"))
        .collect();
    let (mut shorter, mut longer) = (f64::INFINITY, f64::INFINITY);
    for _ in 0..12 {
        shorter = shorter.min(time_of_all(runtime, &keys, without()));
        longer = longer.min(time_of_all(runtime, &keys, with()));
    }
    (longer - shorter) * 1e6 / keys.len() as f64
}

/// In seconds.
fn time_of_all<S, R>(runtime: &Runtime, keys: &[String], mut service: S) -> f64
where
    S: Service<Request<Body>, Response = Response<R>, Error = Infallible>,
    R: http_body::Body<Data = Bytes, Error: Debug>,
{
    let begun = Instant::now();
    runtime.block_on(async {
        for key in keys {
            answered(&mut service, post(key)).await;
        }
    });
    begun.elapsed().as_secs_f64()
}

/// Measured in microseconds, without the cost of the request.
fn replay<S: Store>(runtime: &Runtime, layer: &IdempotencyLayer<S>) -> f64 {
    let mut layered = layer.layer(service_fn(handle));
    runtime.block_on(answered(&mut layered, post("key")));
    let making = time_of_one(|requests| {
        for _ in 0..requests {
            drop(std::hint::black_box(post("key")));
        }
    });
    let all = time_of_one(|requests| {
        runtime.block_on(async {
            for _ in 0..requests {
                answered(&mut layered, post("key")).await;
            }
        });
    });
    (all - making) * 1e6
}

/// The smallest of a few times, in seconds: a disturbance only makes one longer.
fn time_of_one(mut run: impl FnMut(u32)) -> f64 {
    run(REQUESTS / 10);
    (0..3)
        .map(|_| {
            let begun = Instant::now();
            run(REQUESTS);
            begun.elapsed()
        })
        .min()
        .unwrap_or(Duration::ZERO)
        .as_secs_f64()
        / f64::from(REQUESTS)
}

const REQUESTS: u32 = 50_000;
