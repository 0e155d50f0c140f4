//! Measures the cost of the layer and its stores, each beside a baseline of the
//! same run, and compares it with the targets.
//!
//! `./benches/run` starts a server and passes all arguments.

#![allow(
    missing_docs,
    clippy::print_stdout,
    clippy::print_stderr,
    reason = "a program that reports"
)]

mod calls;
mod citus;
mod http;
mod large;
mod load;
mod memory;
mod messages;
mod postgres;
mod process;
mod redis;
mod report;
mod services;
mod sqlite;
mod target;
mod tables;
mod waiters;

use std::{env, process::ExitCode, time::Duration};

use tokio::runtime::Builder;

/// The length and the number of all measurements.
#[derive(Clone, Copy)]
pub(crate) struct Plan {
    pub(crate) is_quick: bool,
    /// The length of one load.
    pub(crate) length: Duration,
    /// The number of pairs of baseline and store.
    pub(crate) pairs: usize,
}

fn main() -> ExitCode {
    let mut arguments = env::args().skip(1).filter(|argument| argument != "--bench");
    match arguments.next().as_deref() {
        Some("serve") => {
            let kind = arguments.next().expect("what to serve");
            runtime().block_on(http::serve(&kind));
            ExitCode::SUCCESS
        }
        Some("records") => {
            memory::say_bytes_of_a_record();
            ExitCode::SUCCESS
        }
        argument => measure(argument == Some("--quick"), arguments.next().as_deref()),
    }
}

/// Runs all measurements, or the one named `only`.
fn measure(is_quick: bool, only: Option<&str>) -> ExitCode {
    let plan = if is_quick {
        Plan {
            is_quick,
            length: Duration::from_millis(1_000),
            pairs: 5,
        }
    } else {
        Plan {
            is_quick,
            length: Duration::from_secs(2),
            pairs: 5,
        }
    };
    let wanted = |name| only.is_none_or(|only| only == name);
    let mut report = report::Report::default();
    if wanted("process") {
        process::measure(plan, &mut report);
        memory::measure(&mut report);
    }
    let runtime = runtime();
    if wanted("sqlite") {
        runtime.block_on(sqlite::measure(plan, &mut report));
    }
    if wanted("postgres") {
        runtime.block_on(postgres::measure(plan, &mut report));
    }
    if only == Some("citus") || (only.is_none() && env::var_os("CITUS_URL").is_some()) {
        runtime.block_on(citus::measure(plan, &mut report));
    }
    if wanted("redis") {
        runtime.block_on(redis::measure(plan, &mut report));
    }
    if wanted("waiters") {
        runtime.block_on(waiters::measure(plan, &mut report));
    }
    if wanted("messages") {
        runtime.block_on(messages::measure(plan, &mut report));
    }
    if wanted("cached") {
        process::measure_cached(plan, &mut report);
    }
    if wanted("large") {
        runtime.block_on(large::measure(plan, &mut report));
    }
    if wanted("tables") {
        runtime.block_on(tables::measure(plan, &mut report));
    }
    if wanted("http") {
        runtime.block_on(http::measure(plan, &mut report));
    }
    if only.is_none() {
        report.write(plan);
    }
    if report.is_short() {
        ExitCode::FAILURE
    } else {
        ExitCode::SUCCESS
    }
}

/// Two threads, as on the machine for which the targets were set.
fn runtime() -> tokio::runtime::Runtime {
    Builder::new_multi_thread()
        .worker_threads(2)
        .enable_all()
        .build()
        .unwrap()
}
