//! Measures what the layer and its stores cost, each beside a baseline in the
//! same run, and says which targets are met.
//!
//! `./benches/run` gives it a server and all of its arguments.

#![allow(
    missing_docs,
    clippy::print_stdout,
    clippy::print_stderr,
    reason = "a program that reports"
)]

mod calls;
mod http;
mod large;
mod load;
mod memory;
mod postgres;
mod process;
mod report;
mod services;
mod sqlite;
mod target;
mod tables;

use std::{env, process::ExitCode, time::Duration};

use tokio::runtime::Builder;

/// How long and how often everything is measured.
#[derive(Clone, Copy)]
pub(crate) struct Plan {
    pub(crate) is_quick: bool,
    /// One load.
    pub(crate) length: Duration,
    /// How many times baseline and store take turns.
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

/// Everything, or what is called `only`.
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

/// Two threads, as the machine that the targets were set on.
fn runtime() -> tokio::runtime::Runtime {
    Builder::new_multi_thread()
        .worker_threads(2)
        .enable_all()
        .build()
        .unwrap()
}
