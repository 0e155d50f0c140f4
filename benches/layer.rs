//! The cost of the layer in the process, beside the service that it wraps.

#![allow(missing_docs, reason = "a program that reports")]

#[allow(dead_code, reason = "the driver measures more")]
#[path = "driver/services.rs"]
mod services;

use std::time::{Duration, Instant};

use criterion::{BatchSize, Criterion, criterion_group, criterion_main};
use tokio::runtime::{Builder, Runtime};
use tower::{Layer as _, service_fn};

use self::services::{Body, answered, get, handle, layer, post};

fn runtime() -> Runtime {
    Builder::new_current_thread().enable_all().build().unwrap()
}

fn ignored(criterion: &mut Criterion) {
    let runtime = runtime();
    let mut group = criterion.benchmark_group("ignored");
    let mut bare = service_fn(handle::<Body>);
    group.bench_function("bare", |bencher| {
        bencher.iter_batched(
            get,
            |request| runtime.block_on(answered(&mut bare, request)),
            BatchSize::SmallInput,
        );
    });
    let mut layered = layer().1.layer(service_fn(handle));
    group.bench_function("layer", |bencher| {
        bencher.iter_batched(
            get,
            |request| runtime.block_on(answered(&mut layered, request)),
            BatchSize::SmallInput,
        );
    });
    group.finish();
}

fn first_run(criterion: &mut Criterion) {
    let runtime = runtime();
    let mut group = criterion.benchmark_group("first run");
    let mut number = 0_u64;
    let mut fresh = || {
        number += 1;
        post(&format!("key-{number:016x}"))
    };
    let mut bare = service_fn(handle::<Body>);
    group.bench_function("bare", |bencher| {
        bencher.iter(|| runtime.block_on(answered(&mut bare, fresh())));
    });
    group.bench_function("layer", |bencher| {
        bencher.iter_custom(|requests| {
            let mut took = Duration::ZERO;
            // The records of each store reuse the memory of the last one's.
            for chunk in 0..requests.div_ceil(CHUNK) {
                let keys = 0..CHUNK.min(requests - chunk * CHUNK);
                let keys: Vec<_> = keys.map(|number| format!("key-{number:016x}")).collect();
                let mut layered = layer().1.layer(service_fn(handle));
                let begun = Instant::now();
                for key in &keys {
                    runtime.block_on(answered(&mut layered, post(key)));
                }
                took += begun.elapsed();
            }
            took
        });
    });
    group.finish();
}

fn replay(criterion: &mut Criterion) {
    let runtime = runtime();
    let mut layered = layer().1.layer(service_fn(handle));
    runtime.block_on(answered(&mut layered, post("key")));
    criterion.bench_function("replay", |bencher| {
        bencher.iter_batched(
            || post("key"),
            |request| runtime.block_on(answered(&mut layered, request)),
            BatchSize::SmallInput,
        );
    });
}

const CHUNK: u64 = 5_000;

criterion_group! {
    name = benches;
    config = Criterion::default()
        .sample_size(20)
        .warm_up_time(Duration::from_millis(300))
        .measurement_time(Duration::from_secs(1));
    targets = ignored, first_run, replay
}
criterion_main!(benches);
