//! The size of a record in the memory store.

use std::{env, fs, process::Command};

use tower_idempotency::MemoryStore;

use crate::{
    calls,
    report::Report,
    target::{Bound, Target},
};

/// Measures in a new process, whose memory holds nothing else.
pub(crate) fn measure(report: &mut Report) {
    let said = Command::new(env::current_exe().unwrap())
        .arg("records")
        .output()
        .unwrap();
    let bytes: f64 = String::from_utf8(said.stdout)
        .unwrap()
        .trim()
        .parse()
        .unwrap();
    report.add(Target::new(
        "a million completed records of 512 bytes in memory, each",
        Bound::AtMost(1.0),
        "KiB",
        vec![bytes / 1024.0],
    ));
}

pub(crate) fn say_bytes_of_a_record() {
    let runtime = tokio::runtime::Builder::new_current_thread()
        .build()
        .unwrap();
    let store = MemoryStore::new();
    let before = resident();
    runtime.block_on(async {
        for _ in 0..RECORDS {
            calls::claim_and_complete(&store).await;
        }
    });
    println!("{}", (resident() - before) / RECORDS);
}

/// The resident memory of the process, as the system counts it.
fn resident() -> u64 {
    let pages = fs::read_to_string("/proc/self/statm").unwrap();
    let pages: u64 = pages.split(' ').nth(1).unwrap().parse().unwrap();
    pages * 4096
}

const RECORDS: u64 = 1_000_000;
